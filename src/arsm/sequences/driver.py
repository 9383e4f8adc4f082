"""`estimate`: from prompts, a model and a reward to a gradient, in three stages: sample, play, credit.

1. Sample the true sequences and, from the same logits, the other draws of every state.
2. Play the branches that the strategy asks for.
3. Credit: one pass with a graph over the true sequences, in micro-batches.

No stage holds logits of all rows, steps and tokens, [N, T, V], for a strategy whose credit comes from draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from arsm.sequences.batch import Batch, Branches, Estimate, Strategy, token_log_probs
from arsm.sequences.checks import (
    Reward,
    check_cache,
    check_length,
    check_model,
    check_options,
    check_padding,
    check_prompts,
    check_reward,
    checked_completions,
    checked_rewards,
    given_completions,
    given_log_probs,
)
from arsm.sequences.credit import Pass, attach_credit, clipped_epochs
from arsm.sequences.decode import Completions, Decoding, Prefixes
from arsm.sequences.draws import Sampled, draw_beside
from arsm.sequences.ends import Ends, live_tokens
from arsm.sequences.engines import Engine
from arsm.sequences.memory import limited_by
from arsm.sequences.mismatch import check_sampler
from arsm.sequences.model import Model, one_pass, pad_before
from arsm.sequences.slots import Slots, Waves, decoder

LEAST_SLOTS = 64
"""Slots are kept from call to call, for at least this many rows."""


def estimate(
    strategy: Strategy,
    model: Model,
    prompts: Tensor,
    reward: Reward,
    *,
    max_tokens: int,
    eos: Ends = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    completions: Tensor | None = None,
    log_probs: Tensor | None = None,
    reference: Model | None = None,
    kl: float = 0.0,
    rows: int = 1024,
    micro_batch: int = 32,
    sampling_dtype: torch.dtype | None = None,
    engine: Engine | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate the expected reward of a model's completions, and its gradient.

    Args:
        strategy: how credit is given: `Branch(arsm.RLOO(8))` token by token, `Group(8)` sequence by sequence.
        model: a `Model`, such as `Recompute(module)` or `Transformers(model)`.
        prompts: [N, P] int64.
        reward: `reward(prompts [R, P], tokens [R, max_tokens]) -> [R]`, floating. Tokens after the end are eos
            (the first, if there are several).
        max_tokens: T, the most tokens of a completion.
        eos: the token that ends a sequence, or a list of several; None where every completion has max_tokens tokens.
        temperature: the tokens are drawn from softmax(logits / temperature).
        mask: [N, P] bool, true for tokens of the prompt, where prompts are padded; or a tokenizer's attention mask.
        completions: [N, T], or [N, n, T] for a `Group`: true sequences that another sampler drew from this model.
        log_probs: shaped like the completions: that sampler's ln p, to be compared with the model's.
        reference: a model to stay close to.
        kl: the cost of ln p - ln p_reference, per token.
        rows: maximum sequences that are decoded side by side.
        micro_batch: maximum sequences per pass with a graph, and per pass over a whole vocabulary.
        sampling_dtype: sample with copies of the weights in this type, such as torch.bfloat16; only where the model
            can be decoded in slots.
        engine: who samples: a `Server`, or a `Cluster` of Ray actors; None for this process.
        generator: where all randomness comes from.

    Returns:
        An `Estimate`; `(-out.value.mean()).backward()` gives the parameters the gradient of the loss.
    """
    check_prompts(prompts, mask)
    check_reward(reward)
    check_options(max_tokens, eos, temperature, kl, reference, rows, micro_batch, completions, log_probs, engine)
    given = prompts
    if mask is not None:
        prompts, mask = pad_before(prompts, mask.bool())
    check_padding(model, prompts, mask)
    for each in (model, reference):
        check_length(each, prompts, mask, max_tokens)
    with torch.no_grad():
        one = prompts.amax(-1).argmax(-1, keepdim=True)  # the prompt with the largest token, should it be unknown
        one = prompts[one], None if mask is None else mask[one]
        vocabulary, dtype = check_model(strategy, model, *one, eos)
        if completions is not None:  # nothing will be sampled along which the two could be compared
            check_cache(model, *one)
    decoding = Decoding(max_tokens, eos, temperature, rows)
    copies = strategy.samples or 1
    row = torch.arange(prompts.shape[0], device=prompts.device).repeat_interleave(copies)
    shape = (prompts.shape[0], max_tokens) if strategy.samples is None else (prompts.shape[0], copies, max_tokens)
    sampler = _Sampler(model, decoding, engine, vocabulary, sampling_dtype, generator)

    # 1. sample
    whole = prompts[row], None if mask is None else mask[row]
    reported = None
    if completions is not None:
        tokens = given_completions(completions, shape, eos, vocabulary).flatten(0, -2)
        if log_probs is not None:
            reported = given_log_probs(log_probs, completions, shape, eos).flatten(0, -2)
        sampled = _beside(model, whole, tokens, strategy.draws, decoding, micro_batch, generator)
    else:
        sampled, reported = sampler.sample(prompts, mask, row, whole, strategy.draws, micro_batch)
        tokens = sampled.tokens[..., 0]
    live = live_tokens(tokens, eos)
    logits_of = partial(_logits, model, whole, tokens, vocabulary, micro_batch)
    elsewhere = completions is not None or engine is not None
    compared = _compared_rows(tokens.shape[0], micro_batch, everywhere=elsewhere)
    info = check_sampler(logits_of, compared, tokens, live, reported, temperature, dtype, elsewhere=elsewhere)

    # 2. rewards, and the branches that the strategy plays
    costs = _Costs(reference, prompts, mask, temperature, vocabulary, micro_batch)
    rewards = checked_rewards(reward, given[row], tokens)
    ratio = costs(row, tokens, sampled.log_probs[..., 0], live)
    returns = rewards.unsqueeze(-1) - kl * _from_here_on(ratio)
    generated = int(live.sum()) if completions is None else 0

    def play(prefixes: Prefixes) -> Branches:
        nonlocal generated
        played = sampler.complete(*whole, prefixes)
        after = torch.arange(max_tokens, device=tokens.device) >= prefixes.step.unsqueeze(-1)
        after = after & live_tokens(played.tokens, eos)
        generated += int(after.sum())
        which = row[prefixes.row]
        reached = checked_rewards(reward, given[which], played.tokens)
        log_p = played.log_probs
        if reference is not None:
            log_p = _with_actions(log_p, prefixes, sampled, logits_of, temperature)
        cost = costs(which, played.tokens, log_p, after).sum(-1)
        return Branches(prefixes.row, prefixes.step, prefixes.action, played.tokens, reached, reached - kl * cost)

    batch = Batch(
        prompts=whole[0],
        prompt_mask=whole[1],
        tokens=tokens,
        mask=live,
        draws=sampled.tokens,
        log_probs=sampled.log_probs,
        largest=sampled.largest,
        temperature=temperature,
        returns=returns,
        generator=generator,
        play=play,
        logits_of=logits_of,
        micro_batch=micro_batch,
    )
    credit = strategy.credit(batch)

    # 3. credit
    run = Pass(model, *whole, tokens, row, credit, temperature, micro_batch)
    value = returns[:, 0].unflatten(0, (-1, copies)).mean(1).to(torch.promote_types(dtype, torch.float32))
    branches = credit.branches
    info["generated"] = torch.tensor(generated)
    info["rollouts"] = torch.tensor(0 if branches is None else branches.row.shape[0])
    if reference is not None:
        info["kl"] = ratio.sum(-1).mean()
    return Estimate(
        value=attach_credit(value, run),
        tokens=tokens.view(shape),
        mask=live.view(shape),
        rewards=rewards.view(shape[:-1]),
        credit=replace(credit, branches=None),
        branches=branches,
        info=info,
        clipped=partial(clipped_epochs, value, run),
    )


# ---------------------------------------------------------------- who samples

_DECODERS: WeakKeyDictionary[object, dict[tuple[object, ...], Slots | Waves]] = WeakKeyDictionary()
"""Slots by model: their buffers and captured steps serve every later call."""


@dataclass(frozen=True, eq=False)
class _Sampler:
    """This process, or an engine."""

    model: Model
    decoding: Decoding
    engine: Engine | None
    vocabulary: int
    dtype: torch.dtype | None
    generator: torch.Generator | None

    def sample(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        row: Tensor,
        whole: tuple[Tensor, Tensor | None],
        draws: int,
        micro_batch: int,
    ) -> tuple[Sampled, Tensor]:
        """One sequence for each entry of `row`, the draws of its states, and the sampler's own ln p of it."""
        if self.engine is None:
            with self._limited("sampling"):
                decoder = self._decoder(row.shape[0])
                sampled = decoder.sample(prompts, mask, row, self.decoding, draws, self.generator)
            return sampled, sampled.log_probs[..., 0]
        done = self._by_engine(prompts, mask, Prefixes.bare(row, self.decoding.max_tokens))
        # an engine draws one token per state: the others are drawn here
        sampled = _beside(self.model, whole, done.tokens, draws, self.decoding, micro_batch, self.generator)
        return sampled, done.log_probs

    def complete(self, prompts: Tensor, mask: Tensor | None, prefixes: Prefixes) -> Completions:
        """Complete every prefix."""
        if self.engine is not None:
            return self._by_engine(prompts, mask, prefixes)
        with self._limited("playing branches"):
            decoder = self._decoder(prefixes.row.shape[0])
            return decoder.complete(prompts, mask, prefixes, self.decoding, self.generator)

    @contextmanager
    def _limited(self, doing: str) -> Iterator[None]:
        try:
            with limited_by("rows", self.decoding.rows, doing):
                yield
        except torch.OutOfMemoryError:
            # a later call with fewer rows would use slots that were made for more
            _DECODERS.pop(self.model, None)
            raise

    def _by_engine(self, prompts: Tensor, mask: Tensor | None, prefixes: Prefixes) -> Completions:
        assert self.engine is not None
        done = self.engine.complete(prompts, mask, prefixes, self.decoding, self.generator)
        return checked_completions(done, self.vocabulary)

    def _decoder(self, count: int) -> Slots | Waves:
        made = _DECODERS.setdefault(self.model, {})
        # no more slots than there are sequences, by powers of 2, so that few sizes are ever made
        rows = min(self.decoding.rows, max(LEAST_SLOTS, 1 << (count - 1).bit_length() if count else 1))
        larger = [key for key in made if key[0] == self.dtype and isinstance(key[1], int) and key[1] >= rows]
        key = min(larger, key=lambda key: key[1]) if larger else (self.dtype, rows)  # pyright: ignore
        if key not in made:
            made[key] = decoder(self.model, rows, dtype=self.dtype)
        return made[key]


def _beside(
    model: Model,
    whole: tuple[Tensor, Tensor | None],
    tokens: Tensor,
    draws: int,
    decoding: Decoding,
    micro_batch: int,
    generator: torch.Generator | None,
) -> Sampled:
    """Draws in the states of sequences that somebody else drew."""
    live = live_tokens(tokens, decoding.eos)
    temperature = decoding.temperature
    with limited_by("micro_batch", micro_batch, "drawing beside given completions"):
        return draw_beside(model, *whole, tokens, live, draws, temperature, micro_batch, generator)


# ---------------------------------------------------------------- passes without a graph


@torch.no_grad()
def _logits(
    model: Model,
    whole: tuple[Tensor, Tensor | None],
    tokens: Tensor,
    vocabulary: int,
    micro_batch: int,
    some: slice,
) -> Tensor:
    """Logits [m, T, V] of some rows."""
    prompts, mask = whole
    with limited_by("micro_batch", micro_batch, "computing logits"):
        logits = one_pass(model, prompts[some], tokens[some], None if mask is None else mask[some])
    expected = [*tokens[some].shape, vocabulary]
    if list(logits.shape) != expected:
        raise ValueError(
            f"model.logits must return {expected}, but returned {list(logits.shape)}; entry [:, t] holds the logits "
            "that token t is drawn from."
        )
    return logits


def _compared_rows(count: int, micro_batch: int, *, everywhere: bool) -> list[slice]:
    """The rows along which sampler and model are compared: all, if somebody else sampled, else one micro-batch."""
    rows = count if everywhere else min(count, micro_batch)
    return [slice(start, min(start + micro_batch, rows)) for start in range(0, rows, micro_batch)]


@dataclass(frozen=True, eq=False)
class _Costs:
    """ln p - ln p_reference of tokens; zeros without a reference."""

    reference: Model | None
    prompts: Tensor
    mask: Tensor | None
    temperature: float
    vocabulary: int
    micro_batch: int

    @torch.no_grad()
    def __call__(self, which: Tensor, tokens: Tensor, log_p: Tensor, counts: Tensor) -> Tensor:
        """[R, T] of completions of the prompts `which` [R], where `counts` [R, T]."""
        ratio = torch.zeros_like(log_p)
        if self.reference is None or tokens.shape[0] == 0:
            return ratio
        for part in torch.arange(tokens.shape[0], device=tokens.device).split(self.micro_batch):
            some, mask = self.prompts[which[part]], None if self.mask is None else self.mask[which[part]]
            with limited_by("micro_batch", self.micro_batch, "computing the reference's logits"):
                of_reference = one_pass(self.reference, some, tokens[part], mask)
            if of_reference.shape[-1] != self.vocabulary:
                raise ValueError(
                    f"The reference has a vocabulary of {of_reference.shape[-1]} tokens, but the model's has "
                    f"{self.vocabulary}; they must share one."
                )
            log_q = token_log_probs(of_reference, tokens[part], self.temperature)
            ratio[part] = torch.where(counts[part], log_p[part] - log_q.to(log_p.dtype), 0)
        return ratio


def _with_actions(
    log_p: Tensor,
    prefixes: Prefixes,
    sampled: Sampled,
    logits_of: Callable[[slice], Tensor],
    temperature: float,
) -> Tensor:
    """ln p [R, T] of completions with that of the tokens that they were given, which their sampler does not know."""
    given = (prefixes.action >= 0).nonzero().squeeze(-1)
    row, step, action = prefixes.row[given], prefixes.step[given], prefixes.action[given]
    drawn = sampled.tokens[row, step] == action.unsqueeze(-1)
    found = sampled.log_probs[row, step].gather(-1, drawn.byte().argmax(-1, keepdim=True)).squeeze(-1)
    for one in (~drawn.any(-1)).nonzero().squeeze(-1).tolist():  # not drawn, but asked for by another estimator
        logits = logits_of(slice(int(row[one]), int(row[one]) + 1))[0, step[one]]
        found[one] = token_log_probs(logits, action[one], temperature).to(found.dtype)
    return log_p.index_put((given, step), found.to(log_p.dtype))


def _from_here_on(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s: [N, T] -> [N, T]."""
    return x.flip(-1).cumsum(-1).flip(-1)
