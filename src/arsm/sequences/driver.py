"""`estimate`: from prompts, a model and a reward to a gradient, in three stages:
sample, play, credit.

1. Sample the true sequences and, from the same logits, the other draws of every state.
2. Play the branches that the strategy asks for.
3. Credit: one pass with a graph over the true sequences, in micro-batches.

No stage holds logits of all rows, steps and tokens, [N, T, V], for a strategy whose
credit comes from draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from arsm.options import suggests
from arsm.sequences.batch import (
    Batch,
    Branches,
    LogitsOf,
    SequenceEstimate,
    Strategy,
    TokenCredit,
    token_log_probs,
)
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
from arsm.sequences.ends import Ends, Stop
from arsm.sequences.engines import Engine
from arsm.sequences.heads import logits_in_parts
from arsm.sequences.importance import Importance, effective_share
from arsm.sequences.memory import limited_by
from arsm.sequences.mismatch import check_sampler
from arsm.sequences.model import Model, pad_before
from arsm.sequences.slots import Slots, Waves, decoder

LEAST_SLOTS = 64
"""Slots are kept from call to call, for at least this many rows."""


@suggests("arsm.sequences.estimate")
def estimate(
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
    check_options(
        max_tokens,
        min_tokens,
        eos,
        stop,
        temperature,
        kl,
        reference,
        rows,
        micro_batch,
        completions,
        log_probs,
        importance,
        engine,
    )
    shown = prompts  # to the reward, as the user padded them
    if mask is not None:
        prompts, mask = pad_before(prompts, mask.bool())
    check_padding(model, prompts, mask)
    for each in (model, reference):
        check_length(each, prompts, mask, max_tokens)
    vocabulary, dtype = _tried(strategy, model, prompts, mask, eos, sampled=completions is None)
    decoding = Decoding(max_tokens, eos, temperature, rows, min_tokens, stop)
    row = torch.arange(prompts.shape[0], device=prompts.device)
    row = row.repeat_interleave(strategy.samples or 1)
    call = _Call(
        strategy=strategy,
        model=model,
        reward=reward,
        shown=shown,
        prompts=prompts,
        mask=mask,
        row=row,
        decoding=decoding,
        vocabulary=vocabulary,
        reference=reference,
        kl=kl,
        micro_batch=micro_batch,
        sampler=_Sampler(model, decoding, engine, vocabulary, sampling_dtype, generator),
        generator=generator,
    )

    # 1. sample
    true = call.given(completions, log_probs) if completions is not None else call.sample()
    logits_of = partial(_logits, model, call.whole, true.tokens, vocabulary, decoding, micro_batch)
    elsewhere = completions is not None or engine is not None
    info = check_sampler(
        logits_of,
        _compared_rows(row.shape[0], micro_batch, everywhere=elsewhere),
        true.tokens,
        true.live,
        true.reported,
        temperature,
        dtype,
        elsewhere=elsewhere,
        corrected=importance is not None,
    )

    # 2. rewards, and the branches that the strategy plays
    rewards = checked_rewards(reward, shown[row], true.tokens)
    ratio = call.costs(row, true.tokens, true.sampled.log_probs[..., 0], true.live)
    returns = rewards.unsqueeze(-1) - kl * _from_here_on(ratio)
    branching = _Branching(call, true, logits_of)
    credit = strategy.credit(call.batch(true, returns, branching, logits_of))
    if importance is not None:
        credit, info["effective_share"] = true.weighed(credit, importance)

    # 3. credit
    run = Pass(
        model, *call.whole, true.tokens, row, credit, temperature, micro_batch, decoding.limit
    )
    wide = torch.promote_types(dtype, torch.float32)
    value = returns[:, 0].unflatten(0, (prompts.shape[0], -1)).mean(1).to(wide)
    branches = credit.branches
    generated = int(true.live.sum()) if completions is None else 0
    info["generated"] = torch.tensor(generated + branching.generated)
    info["rollouts"] = torch.tensor(0 if branches is None else branches.row.shape[0])
    if reference is not None:
        info["kl"] = ratio.sum(-1).mean()
    return SequenceEstimate(
        value=attach_credit(value, run),
        tokens=true.tokens.view(call.shape),
        mask=true.live.view(call.shape),
        rewards=rewards.view(call.shape[:-1]),
        credit=replace(credit, branches=None),
        branches=branches,
        info=info,
        clipped=partial(clipped_epochs, value, run),
    )


@torch.no_grad()
def _tried(
    strategy: Strategy,
    model: Model,
    prompts: Tensor,
    mask: Tensor | None,
    eos: Ends,
    *,
    sampled: bool,
) -> tuple[int, torch.dtype]:
    """Try one prompt: the size of the vocabulary and the type of the logits."""
    # the prompt with the largest token, should it be unknown
    which = prompts.amax(-1).argmax(-1, keepdim=True)
    one = prompts[which], None if mask is None else mask[which]
    found = check_model(strategy, model, *one, eos)
    if not sampled:  # nothing will be sampled along which the two could be compared
        check_cache(model, *one)
    return found


# ---------------------------------------------------------------- the stages


@dataclass(frozen=True, eq=False)
class _True:
    """The true sequences, M = N n rows."""

    sampled: Sampled
    """[M, T, d]: the sequences and the other draws of their states."""
    live: Tensor
    """[M, T] bool."""
    reported: Tensor | None
    """[M, T]: the sampler's own ln p."""

    @property
    def tokens(self) -> Tensor:
        """[M, T]."""
        return self.sampled.tokens[..., 0]

    def weighed(self, credit: TokenCredit, importance: Importance) -> tuple[TokenCredit, Tensor]:
        """The credit with importance weights, and the effective share of the samples."""
        assert self.reported is not None
        ratios = importance.ratios(self.sampled.log_probs[..., 0], self.reported, self.live)
        return importance.weigh(credit, ratios), effective_share(ratios, self.live)


@dataclass(frozen=True, eq=False)
class _Call:
    """What all stages of one call share."""

    strategy: Strategy
    model: Model
    reward: Reward
    shown: Tensor
    """[N, P]: the prompts as the user gave them."""
    prompts: Tensor
    """[N, P]: padded in front."""
    mask: Tensor | None
    row: Tensor
    """[M]: the prompt of every true sequence."""
    decoding: Decoding
    vocabulary: int
    reference: Model | None
    kl: float
    micro_batch: int
    sampler: _Sampler
    generator: torch.Generator | None

    @property
    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Prompts and mask of every true sequence, [M, P]."""
        return self.prompts[self.row], None if self.mask is None else self.mask[self.row]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the true sequences as the user sees them."""
        copies = () if self.strategy.samples is None else (self.strategy.samples,)
        return (self.prompts.shape[0], *copies, self.decoding.max_tokens)

    @property
    def costs(self) -> _Costs:
        """ln p - ln p_reference of tokens."""
        return _Costs(
            self.reference,
            self.prompts,
            self.mask,
            self.decoding,
            self.vocabulary,
            self.micro_batch,
        )

    def sample(self) -> _True:
        """True sequences, and draws beside them."""
        sampled, reported = self.sampler.sample(
            self.prompts,
            self.mask,
            self.row,
            self.whole,
            self.strategy.draws,
            self.micro_batch,
        )
        return _True(sampled, self.decoding.live(sampled.tokens[..., 0]), reported)

    def given(self, completions: Tensor, log_probs: Tensor | None) -> _True:
        """True sequences of somebody else, and draws beside them."""
        shape, decoding = self.shape, self.decoding
        tokens = given_completions(completions, shape, decoding, self.vocabulary).flatten(0, -2)
        reported = None
        if log_probs is not None:
            reported = given_log_probs(log_probs, completions, shape, decoding).flatten(0, -2)
        sampled = _beside(
            self.model,
            self.whole,
            tokens,
            self.strategy.draws,
            decoding,
            self.micro_batch,
            self.generator,
        )
        return _True(sampled, decoding.live(tokens), reported)

    def batch(
        self,
        true: _True,
        returns: Tensor,
        play: Callable[[Prefixes], Branches],
        logits_of: LogitsOf,
    ) -> Batch:
        """What the strategy works with."""
        prompts, prompt_mask = self.whole
        return Batch(
            prompts=prompts,
            prompt_mask=prompt_mask,
            tokens=true.tokens,
            mask=true.live,
            draws=true.sampled.tokens,
            log_probs=true.sampled.log_probs,
            largest=true.sampled.largest,
            temperature=self.decoding.temperature,
            returns=returns,
            generator=self.generator,
            play=play,
            logits_of=logits_of,
            micro_batch=self.micro_batch,
        )


class _Branching:
    """Plays branches off the true sequences, and counts their tokens."""

    def __init__(self, call: _Call, true: _True, logits_of: LogitsOf) -> None:
        self.call = call
        self.true = true
        self.logits_of = logits_of
        self.generated = 0

    def __call__(self, prefixes: Prefixes) -> Branches:
        call = self.call
        played = call.sampler.complete(*call.whole, prefixes)
        step = torch.arange(call.decoding.max_tokens, device=played.tokens.device)
        after = (step >= prefixes.step.unsqueeze(-1)) & call.decoding.live(played.tokens)
        self.generated += int(after.sum())
        which = call.row[prefixes.row]
        reached = checked_rewards(call.reward, call.shown[which], played.tokens)
        log_p = played.log_probs
        if call.reference is not None:
            temperature = call.decoding.temperature
            log_p = _with_actions(log_p, prefixes, self.true.sampled, self.logits_of, temperature)
        cost = call.costs(which, played.tokens, log_p, after).sum(-1)
        return Branches(
            prefixes.row,
            prefixes.step,
            prefixes.action,
            played.tokens,
            reached,
            reached - call.kl * cost,
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
        """One sequence for each entry of `row`, the draws of its states, and the
        sampler's own ln p of it.
        """
        if self.engine is None:
            with self._limited("sampling"):
                decoder = self._decoder(row.shape[0])
                sampled = decoder.sample(prompts, mask, row, self.decoding, draws, self.generator)
            return sampled, sampled.log_probs[..., 0]
        done = self._by_engine(prompts, mask, Prefixes.bare(row, self.decoding.max_tokens))
        # an engine draws one token per state: the others are drawn here
        sampled = _beside(
            self.model, whole, done.tokens, draws, self.decoding, micro_batch, self.generator
        )
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
        rows = min(
            self.decoding.rows, max(LEAST_SLOTS, 1 << (count - 1).bit_length() if count else 1)
        )
        larger = [
            key
            for key in made
            if key[0] == self.dtype and isinstance(key[1], int) and key[1] >= rows
        ]
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
    with limited_by("micro_batch", micro_batch, "drawing beside given completions"):
        return draw_beside(
            model,
            *whole,
            tokens,
            decoding.live(tokens),
            draws,
            decoding.limit,
            decoding.temperature,
            micro_batch,
            generator,
        )


# ---------------------------------------------------------------- passes without a graph


def _logits(
    model: Model,
    whole: tuple[Tensor, Tensor | None],
    tokens: Tensor,
    vocabulary: int,
    decoding: Decoding,
    micro_batch: int,
    some: slice,
    wanted: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The `LogitsOf` of the true sequences."""
    prompts, mask = whole
    padding = None if mask is None else mask[some]
    with limited_by("micro_batch", micro_batch, "computing logits"):
        for states, logits in logits_in_parts(
            model, prompts[some], tokens[some], padding, wanted[some], decoding.limit
        ):
            if logits.shape[-1] != vocabulary:
                expected = [*tokens[some].shape, vocabulary]
                returned = [*tokens[some].shape, logits.shape[-1]]
                raise ValueError(
                    f"model.logits must return {expected}, but returned {returned}; the last are "
                    "the logits of model.start."
                )
            yield states, logits


def _compared_rows(count: int, micro_batch: int, *, everywhere: bool) -> list[slice]:
    """The rows along which sampler and model are compared: all, if somebody else
    sampled, else one micro-batch.
    """
    rows = count if everywhere else min(count, micro_batch)
    return [slice(start, min(start + micro_batch, rows)) for start in range(0, rows, micro_batch)]


@dataclass(frozen=True, eq=False)
class _Costs:
    """ln p - ln p_reference of tokens; zeros without a reference."""

    reference: Model | None
    prompts: Tensor
    mask: Tensor | None
    decoding: Decoding
    vocabulary: int
    micro_batch: int

    @torch.no_grad()
    def __call__(self, which: Tensor, tokens: Tensor, log_p: Tensor, counts: Tensor) -> Tensor:
        """[R, T] of completions of the prompts `which` [R], where `counts` [R, T]."""
        ratio = torch.zeros_like(log_p)
        if self.reference is None or tokens.shape[0] == 0:
            return ratio
        with limited_by("micro_batch", self.micro_batch, "computing the reference's logits"):
            for part in torch.arange(tokens.shape[0], device=tokens.device).split(self.micro_batch):
                self._add(self.reference, part, which, tokens, log_p, counts, ratio)
        return ratio

    def _add(
        self,
        reference: Model,
        part: Tensor,
        which: Tensor,
        tokens: Tensor,
        log_p: Tensor,
        counts: Tensor,
        ratio: Tensor,
    ) -> None:
        """Write the ratios of some completions."""
        width = tokens.shape[1]
        mask = None if self.mask is None else self.mask[which[part]]
        states = logits_in_parts(
            reference,
            self.prompts[which[part]],
            tokens[part],
            mask,
            counts[part],
            self.decoding.limit,
        )
        for some, logits in states:
            if logits.shape[-1] != self.vocabulary:
                raise ValueError(
                    f"The reference has a vocabulary of {logits.shape[-1]} tokens, but the "
                    f"model's has {self.vocabulary}; they must share one."
                )
            row, step = part[some // width], some % width
            log_q = token_log_probs(logits, tokens[row, step], self.decoding.temperature)
            ratio[row, step] = log_p[row, step] - log_q.to(log_p.dtype)


def _with_actions(
    log_p: Tensor,
    prefixes: Prefixes,
    sampled: Sampled,
    logits_of: LogitsOf,
    temperature: float,
) -> Tensor:
    """ln p [R, T] of completions with that of the tokens that they were given, which
    their sampler does not know.
    """
    given = (prefixes.action >= 0).nonzero().squeeze(-1)
    row, step, action = prefixes.row[given], prefixes.step[given], prefixes.action[given]
    drawn = sampled.tokens[row, step] == action.unsqueeze(-1)
    found = (
        sampled.log_probs[row, step].gather(-1, drawn.byte().argmax(-1, keepdim=True)).squeeze(-1)
    )
    # not drawn, but asked for by another estimator
    for one in (~drawn.any(-1)).nonzero().squeeze(-1).tolist():
        wanted = torch.zeros_like(sampled.largest, dtype=torch.bool)
        wanted[row[one], step[one]] = True
        for _, logits in logits_of(slice(int(row[one]), int(row[one]) + 1), wanted):
            found[one] = token_log_probs(logits[0], action[one], temperature).to(found.dtype)
    return log_p.index_put((given, step), found.to(log_p.dtype))


def _from_here_on(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s: [N, T] -> [N, T]."""
    return x.flip(-1).cumsum(-1).flip(-1)
