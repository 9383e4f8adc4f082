"""`estimate`: refuse what cannot mean anything, then let the stages run.

A GPU samples for minutes before the credit is computed. So all that can be refused is
refused first, and the models are tried on one prompt.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from arsm.checks import check_temperature
from arsm.options import suggests
from arsm.sequences.batch import SequenceEstimate, Strategy
from arsm.sequences.checks import (
    check_cache,
    check_costs,
    check_ends,
    check_engine,
    check_given_options,
    check_kind,
    check_length,
    check_module,
    check_padding,
    check_prompts,
    check_sizes,
    check_strategy,
    first_logits,
)
from arsm.sequences.credit import parameters_of
from arsm.sequences.decode import Decoding
from arsm.sequences.ends import Ends, Stop
from arsm.sequences.engines import Engine
from arsm.sequences.importance import Importance
from arsm.sequences.model import Model, pad_before
from arsm.sequences.rewards import Reward, check_reward
from arsm.sequences.sampler import TokenSampler
from arsm.sequences.stages import Stages

FIRST_LOGITS: WeakKeyDictionary[object, dict[object, Tensor]] = WeakKeyDictionary()
"""Logits [1, V] of a model's first trial, by what their type depends on. A pass over one
token takes as long as one over a batch, and every call would begin with it.
"""


@suggests("arsm.sequences.estimate")
def estimate(  # noqa: PLR0913  one call, all of its options by name
    strategy: Strategy,
    model: Model,
    prompts: Tensor,
    reward: Reward,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    eos: Ends = None,
    stop: Stop | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    completions: Tensor | None = None,
    log_probs: Tensor | None = None,
    importance: Importance | None = None,
    reference: Model | None = None,
    kl: float = 0.0,
    rows: int = 1024,
    micro_batch: int = 32,
    sampling_dtype: torch.dtype | None = None,
    engine: Engine | None = None,
    generator: torch.Generator | None = None,
) -> SequenceEstimate:
    """Estimate the expected reward of a model's completions, and its gradient.

    Args:
        strategy: how credit is given: `Branch(arsm.RLOO(8))` token by token, `Group(8)`
            sequence by sequence.
        model: a `Model`, such as `Recompute(module)` or `Transformers(model)`.
        prompts: [N, P] int64.
        reward: `reward(prompts [R, P], tokens [R, max_tokens]) -> [R]`, floating.
            Tokens after the end are eos (the first, if there are several).
        max_tokens: T, the most tokens of a completion.
        min_tokens: no sequence ends before it has so many tokens; the policy is the
            distribution without eos there.
        eos: the token that ends a sequence, or a list of several; None where every
            completion has max_tokens tokens.
        stop: `stop(tokens: list[int]) -> bool`, whether a completion is over after
            these tokens, as for strings: `lambda tokens: "END" in
            tokenizer.decode(tokens)`.
        temperature: the tokens are drawn from softmax(logits / temperature).
        mask: [N, P] bool, true for tokens of the prompt, where prompts are padded; or a
            tokenizer's attention mask.
        completions: [N, T], or [N, n, T] for a `Group`: true sequences that another
            sampler drew from this model.
        log_probs: shaped like the completions: that sampler's ln p, to be compared with
            the model's.
        importance: weights for completions of another distribution than the model's,
            which are refused without; needs log_probs. The value is not corrected.
        reference: a model to stay close to.
        kl: the cost of ln p - ln p_reference, per token.
        rows: maximum sequences that are decoded side by side.
        micro_batch: maximum sequences per pass with a graph, and per pass over a whole
            vocabulary.
        sampling_dtype: sample with copies of the weights in this type, such as
            torch.bfloat16; only where the model can be decoded in slots.
        engine: who samples: a `Server`, or a `Cluster` of Ray actors; None for this
            process.
        generator: where all randomness comes from.

    Returns:
        An `SequenceEstimate`; `(-out.value.mean()).backward()` gives the parameters the
        gradient of the loss.
    """
    check_prompts(prompts, mask)
    check_reward(reward)
    check_ends(max_tokens, min_tokens, eos, stop)
    check_temperature(temperature)
    check_costs(kl, reference, model)
    check_sizes(rows, micro_batch)
    check_given_options(completions, log_probs, importance)
    check_engine(engine, min_tokens, stop)
    check_kind(strategy)

    shown = prompts  # to the reward, as the user padded them
    if mask is not None:
        prompts, mask = pad_before(prompts, mask.bool())
    logits = _trial(model, reference, prompts, mask, max_tokens, completions, engine)
    check_strategy(strategy, logits, eos)

    vocabulary = logits.shape[-1]
    decoding = Decoding(max_tokens, eos, temperature, rows, min_tokens, stop)
    row = torch.arange(prompts.shape[0], device=prompts.device)
    stages = Stages(
        strategy=strategy,
        model=model,
        reward=reward,
        shown=shown,
        prompts=prompts,
        mask=mask,
        row=row.repeat_interleave(strategy.samples or 1),
        decoding=decoding,
        vocabulary=vocabulary,
        dtype=logits.dtype,
        reference=reference,
        kl=kl,
        importance=importance,
        micro_batch=micro_batch,
        sampler=TokenSampler(model, decoding, engine, vocabulary, sampling_dtype, generator),
        generator=generator,
    )
    return stages.run(completions, log_probs)


def _trial(
    model: Model,
    reference: Model | None,
    prompts: Tensor,
    mask: Tensor | None,
    max_tokens: int,
    completions: Tensor | None,
    engine: Engine | None,
) -> Tensor:
    """Refuse prompts that do not fit into the models, and try the model on one of them: the
    logits [1, V] of its first token.
    """
    check_padding(model, prompts, mask)
    for each in (model, reference):
        check_module(each)
        check_length(each, prompts, mask, max_tokens)
    if completions is None and engine is None:
        return _remembered_logits(model, prompts, mask)
    return _first_logits(model, prompts, mask, cached=completions is not None)


def _remembered_logits(model: Model, prompts: Tensor, mask: Tensor | None) -> Tensor:
    """The logits [1, V] of a first token, from an earlier call if there was one: what
    they say of the model, the vocabulary and its type, stays.
    """
    device = prompts.device
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    weights = {parameter.dtype for parameter in parameters_of(model) or []}
    key = device, autocast, frozenset(weights)
    known = FIRST_LOGITS.setdefault(model, {})
    # a token beyond the vocabulary is named by the trial
    if key not in known or int(prompts.max()) >= known[key].shape[-1]:
        known[key] = _first_logits(model, prompts, mask, cached=False)
    return known[key]


@torch.no_grad()
def _first_logits(model: Model, prompts: Tensor, mask: Tensor | None, *, cached: bool) -> Tensor:
    """The logits [1, V] of one prompt's first token; on request its cache is tried too."""
    # the prompt with the largest token, should it be unknown
    which = prompts.amax(-1).argmax(-1, keepdim=True)
    one = prompts[which], None if mask is None else mask[which]
    logits = first_logits(model, *one)
    if cached:  # nothing will be sampled along which step by step and one pass could be compared
        check_cache(model, *one)
    return logits
