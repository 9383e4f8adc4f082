"""`estimate`: from prompts, a model and a reward to a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arsm.checks import NotFiniteError
from arsm.sequences.batch import Batch, Branches, Estimate, Strategy, token_log_probs
from arsm.sequences.decode import Decoding, Prefixes, complete, live_tokens
from arsm.sequences.model import Model, pad_before

Reward = Callable[[Tensor, Tensor], Tensor]
"""`reward(prompts [R, P], tokens [R, T]) -> [R]`, to be maximised."""

LARGEST_MISMATCH = {8: 1e-6, 4: 1e-2, 2: 0.5}
"""Of ln p between a model's cached and uncached logits, by the bytes of its floating type."""
LARGEST_SAMPLER_KL = 0.02
"""In nats per token, between another sampler and the model."""


def estimate(
    strategy: Strategy,
    model: Model,
    prompts: Tensor,
    reward: Reward,
    *,
    max_tokens: int,
    eos: int | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    completions: Tensor | None = None,
    log_probs: Tensor | None = None,
    reference: Model | None = None,
    kl: float = 0.0,
    max_rows: int = 1024,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate the expected reward of a model's completions, and its gradient.

    Args:
        strategy: how credit is given: `Branch(arsm.RLOO(8))` token by token, `Group(8)` sequence by sequence.
        model: a `Model`, such as `Recompute(module)` or `Transformers(model)`.
        prompts: [N, P] int64.
        reward: `reward(prompts [R, P], tokens [R, max_tokens]) -> [R]`, floating. Tokens after the end are eos.
        max_tokens: T, the most tokens of a completion.
        eos: the token that ends a sequence; None where every completion has max_tokens tokens.
        temperature: the tokens are drawn from softmax(logits / temperature).
        mask: [N, P] bool, true for tokens of the prompt, where prompts are padded.
        completions: [N, T], or [N, n, T] for a `Group`: true sequences that another sampler drew from this model.
        log_probs: shaped like the completions: that sampler's ln p, to be compared with the model's.
        reference: a model to stay close to.
        kl: the cost of ln p - ln p_reference, per token.
        max_rows: maximum rows per call of the model; where there are more true sequences, their graph is computed
            again in the backward pass.
        generator: where all randomness comes from.

    Returns:
        An `Estimate`; `(-out.value.mean()).backward()` gives the parameters the gradient of the loss.
    """
    _check_prompts(prompts, mask)
    _check_options(max_tokens, temperature, kl, reference, max_rows, completions, log_probs)
    given = prompts
    if mask is not None:
        prompts, mask = pad_before(prompts, mask)
    with torch.no_grad():
        vocabulary = _check_model(strategy, model, prompts[:1], None if mask is None else mask[:1], eos)
    decoding = Decoding(max_tokens, eos, temperature, max_rows)
    copies = strategy.samples or 1
    row = torch.arange(prompts.shape[0], device=prompts.device).repeat_interleave(copies)
    shape = (prompts.shape[0], max_tokens) if strategy.samples is None else (prompts.shape[0], copies, max_tokens)
    if completions is None:
        sampled = complete(model, prompts, mask, Prefixes.bare(row, max_tokens), decoding, generator)
        tokens, sampler = sampled.tokens, sampled.log_probs
    else:
        tokens = _given(completions, shape, eos, vocabulary).flatten(0, -2)
        sampler = None if log_probs is None else _given_log_probs(log_probs, completions, shape).flatten(0, -2)
    live = live_tokens(tokens, eos)
    rows, rows_mask = prompts[row], None if mask is None else mask[row]
    logits = _logits(model, rows, tokens, rows_mask, max_rows)
    if logits.shape != (*tokens.shape, vocabulary):
        raise ValueError(
            f"model.logits must return {[*tokens.shape, vocabulary]}, but returned {list(logits.shape)}; entry [:, t] "
            "holds the logits that token t is drawn from."
        )
    own = token_log_probs(logits.detach(), tokens, temperature)
    info = {"mismatch": _mismatch(own, sampler, live, logits.dtype, given=completions is not None)}

    def costs(which: Tensor, tokens: Tensor, log_p: Tensor, counts: Tensor) -> Tensor:
        if reference is None:
            return torch.zeros_like(log_p)
        ratio = torch.zeros_like(log_p)
        for part in torch.arange(tokens.shape[0], device=tokens.device).split(max_rows):
            some, some_mask = prompts[which[part]], None if mask is None else mask[which[part]]
            with torch.no_grad():
                of_reference = _call(reference, some, tokens[part], some_mask)
            if of_reference.shape[-1] != vocabulary:
                raise ValueError(
                    f"The reference has a vocabulary of {of_reference.shape[-1]} tokens, but the model's has "
                    f"{vocabulary}; they must share one."
                )
            log_q = token_log_probs(of_reference, tokens[part], temperature)
            ratio[part] = torch.where(counts[part], log_p[part] - log_q.to(log_p.dtype), 0)
        return ratio

    rewards = _rewards(reward, given[row], tokens)
    ratio = costs(row, tokens, own.double(), live)
    returns = rewards.unsqueeze(-1) - kl * _from_here_on(ratio)
    generated = int(live.sum()) if completions is None else 0

    def play(prefixes: Prefixes) -> Branches:
        nonlocal generated
        of_row = Prefixes(row[prefixes.row], prefixes.step, prefixes.action, prefixes.known)
        if strategy.samples is not None and prefixes.row.shape[0]:
            raise NotImplementedError("Only strategies with one true sequence per prompt can branch.")
        played = complete(model, prompts, mask, of_row, decoding, generator)
        after = torch.arange(max_tokens, device=tokens.device) >= prefixes.step.unsqueeze(-1)
        after = after & live_tokens(played.tokens, eos)
        generated += int(after.sum())
        reached = _rewards(reward, given[of_row.row], played.tokens)
        cost = costs(of_row.row, played.tokens, played.log_probs, after).sum(-1)
        return Branches(prefixes.row, prefixes.step, prefixes.action, played.tokens, reached, reached - kl * cost)

    batch = Batch(rows, rows_mask, tokens, live, logits, temperature, returns, generator, play)
    surrogate, branches = strategy.surrogate(batch)
    value = (returns[:, 0].to(surrogate.dtype) + surrogate).unflatten(0, (-1, copies)).mean(1)
    info["generated"] = torch.tensor(generated)
    info["rollouts"] = torch.tensor(0 if branches is None else branches.row.shape[0])
    if reference is not None:
        info["kl"] = ratio.sum(-1).mean()
    return Estimate(value, tokens.view(shape), live.view(shape), rewards.view(shape[:-1]), branches, info)


def _call(model: Model, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    return model.logits(prompts, tokens) if mask is None else model.logits(prompts, tokens, mask)


def _logits(model: Model, prompts: Tensor, tokens: Tensor, mask: Tensor | None, max_rows: int) -> Tensor:
    """One pass with the graph; where the rows are more than max_rows, the graph of each part is computed on demand."""
    if tokens.shape[0] <= max_rows:
        return _call(model, prompts, tokens, mask)
    parts = zip(
        prompts.split(max_rows),
        tokens.split(max_rows),
        [None] * tokens.shape[0] if mask is None else mask.split(max_rows),
        strict=False,
    )
    return torch.cat([checkpoint(_call, model, *part, use_reentrant=False) for part in parts])  # pyright: ignore


def _from_here_on(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s: [N, T] -> [N, T]."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _rewards(reward: Reward, prompts: Tensor, tokens: Tensor) -> Tensor:
    """[R] float64."""
    if tokens.shape[0] == 0:
        return torch.zeros(0, dtype=torch.float64, device=tokens.device)
    rewards = reward(prompts, tokens)
    if not isinstance(rewards, Tensor):
        raise TypeError(f"reward must return a tensor [R], but returned {type(rewards).__name__}; use torch.tensor.")
    if not rewards.is_floating_point():
        raise TypeError(f"reward must return a floating tensor, but returned {rewards.dtype}; convert with .float().")
    if rewards.shape != tokens.shape[:1]:
        raise ValueError(
            f"reward must return one value per completion, [{tokens.shape[0]}], but returned {list(rewards.shape)}."
        )
    if not bool((finite := rewards.isfinite()).all()):
        first = int((~finite).nonzero()[0])
        raise NotFiniteError(f"reward returned {float(rewards[first])} for tokens {tokens[first].tolist()}.")
    return rewards.detach().to(tokens.device, torch.float64)


def _check_prompts(prompts: Tensor, mask: Tensor | None) -> None:
    if not isinstance(prompts, Tensor) or prompts.dtype != torch.int64 or prompts.ndim != 2:
        found = f"{prompts.dtype} {list(prompts.shape)}" if isinstance(prompts, Tensor) else type(prompts).__name__
        raise TypeError(f"prompts must be an int64 tensor [N, P], but are {found}.")
    if 0 in prompts.shape:
        raise ValueError(
            f"prompts must hold at least one prompt of at least one token, but are {list(prompts.shape)}; start an "
            "empty prompt with a begin-of-sequence token."
        )
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != prompts.shape:
        raise TypeError(f"mask must be a bool tensor {list(prompts.shape)}, true for tokens of the prompt.")
    if not bool(mask.any(-1).all()):
        empty = int((~mask.any(-1)).nonzero()[0])
        raise ValueError(
            f"Prompt {empty} has no token, as mask[{empty}] is false throughout; start it with a begin-of-sequence "
            "token."
        )


def _check_options(
    max_tokens: int,
    temperature: float,
    kl: float,
    reference: Model | None,
    max_rows: int,
    completions: Tensor | None,
    log_probs: Tensor | None,
) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, but is {max_tokens}.")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, but is {temperature}.")
    if not 0 <= kl < math.inf:
        raise ValueError(f"kl must be a finite number of at least 0, but is {kl}.")
    if (kl > 0) != (reference is not None):
        raise ValueError(
            "kl and reference belong together: give both, or neither; "
            + ("reference is missing." if reference is None else "kl is 0.")
        )
    if max_rows < 2:
        raise ValueError(f"max_rows must be at least 2, one for a sequence and one for its branch, but is {max_rows}.")
    if log_probs is not None and completions is None:
        raise ValueError("log_probs are those of given completions, but completions is None.")


def _check_model(strategy: Strategy, model: Model, prompts: Tensor, mask: Tensor | None, eos: int | None) -> int:
    """Start with one prompt; the size of the vocabulary."""
    logits = (model.start(prompts) if mask is None else model.start(prompts, mask)).logits
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim != 2 or logits.shape[0] != 1:
        found = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"model.start(prompts).logits must be a floating tensor [N, V], but for N = 1 is {found}.")
    if bool(logits.isnan().any()) or not bool((logits > -torch.inf).any()) or bool((logits == torch.inf).any()):
        raise NotFiniteError(
            "The model's logits for the first token are NaN, +inf, or -inf throughout; they must be finite, or -inf to "
            "mask a token."
        )
    vocabulary = logits.shape[-1]
    if eos is not None and not 0 <= eos < vocabulary:
        raise ValueError(f"eos = {eos} is not in the model's vocabulary of {vocabulary} tokens.")
    strategy.check(logits)
    return vocabulary


def _given(completions: Tensor, shape: tuple[int, ...], eos: int | None, vocabulary: int) -> Tensor:
    """Completions of another sampler, padded to max_tokens with eos."""
    width, longest = completions.shape[-1], shape[-1]
    if completions.dtype != torch.int64 or completions.shape[:-1] != shape[:-1] or not 1 <= width <= longest:
        raise ValueError(
            f"completions must be int64 {list(shape)}, or shorter where all have ended, but are {completions.dtype} "
            f"{list(completions.shape)}."
        )
    if int(completions.min()) < 0 or int(completions.max()) >= vocabulary:
        raise ValueError(
            f"completions hold tokens from {int(completions.min())} to {int(completions.max())}, but the model's "
            f"vocabulary is 0 to {vocabulary - 1}."
        )
    if width < longest and (eos is None or not bool((completions == eos).any(-1).all())):
        raise ValueError(
            f"Some completions of {width} tokens have no end of sequence; only those that have one may be shorter than "
            f"max_tokens = {longest}."
        )
    if eos is None:
        return completions
    padded = torch.cat([completions, completions.new_full((*shape[:-1], longest - width), eos)], -1)
    return padded.masked_fill(~live_tokens(padded, eos), eos)


def _given_log_probs(log_probs: Tensor, completions: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(log_probs, Tensor) or log_probs.shape != completions.shape:
        raise ValueError(f"log_probs must be shaped like the completions, {list(completions.shape)}.")
    return torch.cat([log_probs, log_probs.new_zeros(*shape[:-1], shape[-1] - log_probs.shape[-1])], -1)


def _mismatch(own: Tensor, sampler: Tensor | None, live: Tensor, dtype: torch.dtype, *, given: bool) -> Tensor:
    """max |ln p - ln p_sampler| over the tokens, refused where it cannot be rounding."""
    if sampler is None:
        return torch.tensor(torch.nan)
    gap = torch.where(live, sampler.double() - own.double(), 0)
    largest = gap.abs().max()
    if given:
        nats = float(gap.sum() / live.sum())
        if not nats <= LARGEST_SAMPLER_KL:
            raise ValueError(
                f"The log_probs given lie {nats:.3g} nats per token above the model's own, so the completions are not "
                "samples of this model: sample with its weights, this temperature, and without top-k or top-p, which "
                "bias the gradient."
            )
    elif not float(largest) <= LARGEST_MISMATCH[dtype.itemsize]:
        raise ValueError(
            f"The model's step by step and one-pass logits differ: ln p of a sampled token by {float(largest):.3g}; "
            "check its cache, positions and padding, and put it into eval mode if it has dropout."
        )
    return largest
