"""Refuse prompts, models and completions that cannot mean anything, each in
one sentence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from arsm.checks import NotFiniteError, check_count, check_whole, describe
from arsm.sequences.batch import Strategy
from arsm.sequences.decode import Completions, Decoding
from arsm.sequences.ends import Ends, all_ends, is_end, padding
from arsm.sequences.importance import Importance
from arsm.sequences.model import Model, active_dropout, begin, module_of, one_pass
from arsm.types import Estimator

LARGEST_MISMATCH = {8: 1e-6, 4: 0.1, 2: 1.0}
"""Largest difference of one token's ln p between a model's cached and uncached logits, by
the bytes of its floating type.
"""


def check_padding(model: Model | None, prompts: Tensor, mask: Tensor | None) -> None:
    """Refuse prompts that begin with the model's padding but come without a mask."""
    pad = getattr(model, "pad_token", None)
    if mask is not None or pad is None:
        return
    # in front only: a prompt that ends with this token may mean it
    padded = (prompts[:, 0] == pad).nonzero().squeeze(-1)
    if padded.shape[0]:
        raise ValueError(
            f"Prompt {int(padded[0])} begins with {pad}, the model's padding, but no mask was "
            "given, and the model would read it as text; pass the tokenizer's attention_mask as "
            "mask."
        )


def check_prompts(prompts: Tensor, mask: Tensor | None) -> None:
    """Require int64 prompts [N, P] of at least one token each."""
    if not isinstance(prompts, Tensor) or prompts.dtype != torch.int64 or prompts.ndim != 2:
        raise TypeError(f"prompts must be an int64 tensor [N, P], but are {describe(prompts)}.")
    if 0 in prompts.shape:
        raise ValueError(
            "prompts must hold at least one prompt of at least one token, but are "
            f"{list(prompts.shape)}; start an empty prompt with a begin-of-sequence token."
        )
    # such as -100, which losses use for padding: on a GPU an embedding would fail for good
    if int(prompts.min()) < 0:
        raise ValueError(
            f"prompts hold the token {int(prompts.min())}, but tokens count from 0; pad with any "
            "token and give a mask."
        )
    if mask is None:
        return
    if (
        not isinstance(mask, Tensor)
        or mask.dtype not in (torch.bool, torch.int64)
        or mask.shape != prompts.shape
    ):
        raise TypeError(
            f"mask must be a bool or int64 tensor {list(prompts.shape)}, true or 1 for tokens of "
            f"the prompt, but is {describe(mask)}."
        )
    if not bool((mask == mask.bool()).all()):
        raise ValueError("mask must hold 0 and 1 only, 1 for tokens of the prompt.")
    if not bool(mask.any(-1).all()):
        empty = int((~mask.any(-1)).nonzero()[0])
        raise ValueError(
            f"Prompt {empty} has no token, as mask[{empty}] is false throughout; start it with a "
            "begin-of-sequence token."
        )


def check_ends(max_tokens: int, min_tokens: int, eos: Ends, stop: object) -> None:
    """Require lengths in their range, and tokens or a function that end a sequence."""
    check_count("max_tokens", max_tokens)
    if eos is not None and not all_ends(eos):
        raise ValueError(
            "eos must hold at least one token, but is empty; leave it out if nothing ends a "
            "sequence."
        )
    for end in all_ends(eos):
        check_whole("eos", end)
    check_whole("min_tokens", min_tokens)
    if min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens must be at most max_tokens = {max_tokens}, but is {min_tokens}."
        )
    if stop is not None and not callable(stop):
        raise TypeError(
            "stop must be a function of a completion's tokens so far, such as lambda tokens: "
            f"tokens[-2:] == [3, 4], but is a {type(stop).__name__}."
        )


def check_costs(kl: float, reference: Model | None, model: Model) -> None:
    """Require a cost together with another model to stay close to."""
    if not 0 <= kl < math.inf:
        raise ValueError(f"kl must be a finite number of at least 0, but is {kl}.")
    # one without the other is a mistake that would train without any cost
    if (kl > 0) != (reference is not None):
        raise ValueError(
            "kl and reference belong together: give both, or neither; "
            + ("reference is missing." if reference is None else "kl is 0.")
        )
    if reference is None:
        return
    # another class may read the same module in another way, such as without its adapters
    same = module_of(reference) is module_of(model) is not None and type(reference) is type(model)
    if same or reference is model:
        raise ValueError(
            "reference is the model itself, which it would always be equal to; give a copy of it, "
            "such as Transformers(copy.deepcopy(module))."
        )


def check_sizes(rows: int, micro_batch: int) -> None:
    """Require batch sizes that can hold something."""
    check_count("rows", rows, 2)  # one for a sequence and one for its branch
    check_count("micro_batch", micro_batch)


def check_given_options(
    completions: Tensor | None, log_probs: Tensor | None, importance: object
) -> None:
    """Require what belongs to given completions to come with them."""
    if log_probs is not None and completions is None:
        raise ValueError("log_probs are those of given completions, but completions is None.")
    if importance is not None and not isinstance(importance, Importance):
        raise TypeError(
            "importance must be one such as Importance(cap=2.0), but is a "
            f"{type(importance).__name__}."
        )
    if importance is not None and log_probs is None:
        raise ValueError(
            "importance divides by the sampler's probabilities of given completions; pass "
            "completions and log_probs."
        )


def check_engine(engine: object, min_tokens: int, stop: object) -> None:
    """Require a sampler, and no way to end sequences that it does not know."""
    if engine is None:
        return
    # the contract of engines has no words for either
    if min_tokens or stop is not None:
        raise ValueError(
            "An engine ends sequences at eos alone; leave min_tokens and stop out, or the engine."
        )
    if not callable(getattr(engine, "complete", None)):
        raise TypeError(
            "engine must have a method complete, as Server(url, module) has, but is a "
            f"{type(engine).__name__}."
        )


def check_module(model: object) -> None:
    """Refuse a module that is not wrapped, or does not compute the same twice."""
    name = type(model).__name__
    if isinstance(model, nn.Module) and not callable(getattr(model, "start", None)):
        raise TypeError(
            f"{name} has no start, step and select; wrap it: Transformers(model) for a causal "
            "model of transformers, Recompute(module) for any other."
        )
    if model.__hash__ is None:
        raise TypeError(
            f"{name} cannot be told apart from models with equal fields; write "
            "@dataclass(eq=False), or leave __eq__ out."
        )
    module = module_of(model)
    dropout = None if module is None else active_dropout(module)
    if dropout is not None:
        raise ValueError(
            f"{dropout} is active, but sampling and learning must see the same model; call "
            "model.eval()."
        )


def check_strategy(strategy: Strategy, logits: Tensor, eos: Ends) -> None:
    """Require a strategy that works with the logits [1, V] of a first token, and ends
    among these tokens.
    """
    vocabulary = logits.shape[-1]
    for end in all_ends(eos):
        if not 0 <= end < vocabulary:
            raise ValueError(
                f"eos = {end} is not in the model's vocabulary of {vocabulary} tokens."
            )
    strategy.check(logits)


def check_kind(strategy: object) -> None:
    """Refuse an estimator in the place of a strategy."""
    if isinstance(strategy, Estimator):
        name = type(strategy).__name__
        raise TypeError(
            f"strategy must be a Branch or a Group, but is {name}; write Branch({name}(...))."
        )


def first_logits(model: Model, prompts: Tensor, mask: Tensor | None) -> Tensor:
    """Start with one prompt [1, P]; the logits [1, V] of its first token."""
    try:
        logits = begin(model, prompts, mask).logits
    # an embedding's own message names neither token nor vocabulary
    except IndexError as error:
        raise ValueError(
            f"The model cannot read a prompt whose largest token is {int(prompts.max())} "
            f"({error}); use tokens of its own vocabulary."
        ) from error
    if (
        not isinstance(logits, Tensor)
        or not logits.is_floating_point()
        or logits.ndim != 2
        or logits.shape[0] != 1
    ):
        raise TypeError(
            "model.start(prompts).logits must be a floating tensor [N, V], but for N = 1 is "
            f"{describe(logits)}."
        )
    if logits.dtype.itemsize not in LARGEST_MISMATCH:
        raise TypeError(
            f"The model's logits are {logits.dtype}, too coarse to sample from; convert them with "
            ".float()."
        )
    if (
        bool(logits.isnan().any())
        or not bool((logits > -torch.inf).any())
        or bool((logits == torch.inf).any())
    ):
        raise NotFiniteError(
            "The model's logits for the first token are NaN, +inf, or -inf throughout; they must "
            "be finite, or -inf to mask a token."
        )
    return logits


def check_length(
    model: Model | None, prompts: Tensor, mask: Tensor | None, max_tokens: int
) -> None:
    """Require room for the longest prompt and its completion, whose last token is not read."""
    # padding takes no positions
    longest = prompts.shape[1] if mask is None else int(mask.sum(-1).max())
    positions = getattr(model, "positions", None)
    if positions is not None and longest + max_tokens - 1 > positions:
        raise ValueError(
            f"A prompt of {longest} tokens and max_tokens = {max_tokens} do not fit into the "
            f"model's {positions} positions; shorten one of them."
        )


def check_cache(model: Model, prompts: Tensor, mask: Tensor | None) -> None:
    """Compare one prompt's first two steps with the one pass over them."""
    state = begin(model, prompts, mask)
    # any token would do; the likeliest is surely allowed
    first = state.logits
    token = state.logits.argmax(-1)
    stepped = torch.stack([first.clone(), model.step(state, token).logits], 1)
    at_once = one_pass(model, prompts, torch.stack([token, token], 1), mask)
    difference = stepped.log_softmax(-1) - at_once.log_softmax(-1)
    largest = float(difference.nan_to_num().abs().max())
    if largest > LARGEST_MISMATCH[at_once.dtype.itemsize]:
        raise ValueError(
            "The model's step by step and one-pass logits differ: ln p of a token by "
            f"{largest:.3g}; check its cache, positions and padding, and put it into eval "
            "mode if it has dropout."
        )


def given_completions(
    completions: Tensor, shape: tuple[int, ...], decoding: Decoding, vocabulary: int
) -> Tensor:
    """Completions of another sampler, padded to max_tokens with eos."""
    if not isinstance(completions, Tensor):
        raise TypeError(
            f"completions must be an int64 tensor {list(shape)}, but are a "
            f"{type(completions).__name__}."
        )
    width = completions.shape[-1]
    longest = shape[-1]
    if (
        completions.dtype != torch.int64
        or completions.shape[:-1] != shape[:-1]
        or not 1 <= width <= longest
    ):
        raise ValueError(
            f"completions must be int64 {list(shape)}, or shorter where all have ended, but are "
            f"{completions.dtype} {list(completions.shape)}."
        )
    if int(completions.min()) < 0 or int(completions.max()) >= vocabulary:
        raise ValueError(
            f"completions hold tokens from {int(completions.min())} to {int(completions.max())}, "
            f"but the model's vocabulary is 0 to {vocabulary - 1}."
        )
    # what stands after the end is anything: samplers pad in their own ways
    eos = decoding.eos
    live = decoding.live(completions)
    early = is_end(completions, eos)[..., : decoding.min_tokens]
    if bool(early.any()):
        raise ValueError(
            f"A completion ends within its first {decoding.min_tokens} tokens, which min_tokens "
            "excludes."
        )
    over = is_end(completions, eos).any(-1) | ~live[..., -1]
    if decoding.stop is not None:
        flat = completions.flatten(0, -2)
        over = over | decoding.stopped(flat, width).view(over.shape)
    if width < longest and not bool(over.all()):
        raise ValueError(
            f"Some completions of {width} tokens have no end of sequence; only those that have one "
            f"may be shorter than max_tokens = {longest}."
        )
    after = completions.new_full((*shape[:-1], longest - width), padding(eos))
    return torch.cat([completions.masked_fill(~live, padding(eos)), after], -1)


def checked_completions(done: Completions, vocabulary: int) -> Completions:
    """An engine's completions, whose tokens the model knows."""
    if done.tokens.numel() and int(done.tokens.max()) >= vocabulary:
        raise ValueError(
            f"The engine sampled the token {int(done.tokens.max())}, but the model's vocabulary is "
            f"0 to {vocabulary - 1}; let it serve this model."
        )
    return done


def given_log_probs(
    log_probs: Tensor, completions: Tensor, shape: tuple[int, ...], decoding: Decoding
) -> Tensor:
    """Log-probabilities of another sampler, padded to max_tokens with 0."""
    if not isinstance(log_probs, Tensor) or log_probs.shape != completions.shape:
        raise ValueError(
            f"log_probs must be shaped like the completions, {list(completions.shape)}."
        )
    # padding may have any ln p, also -inf
    wrong = decoding.live(completions) & ~log_probs.isfinite()
    if bool(wrong.any()):
        raise NotFiniteError(
            f"log_probs of sampled tokens must be finite, but hold {float(log_probs[wrong][0])}."
        )
    return torch.cat(
        [log_probs, log_probs.new_zeros(*shape[:-1], shape[-1] - log_probs.shape[-1])], -1
    ).detach()
