"""`estimate`: from prompts, a model and a reward to a gradient, in three stages:
sample, play, credit.

1. Sample the true sequences and, from the same logits, the other draws of every state.
   Where all of these will be asked for, branches begin beside them.
2. Play the other branches that the strategy asks for.
3. Credit: one pass with a graph over the true sequences, in micro-batches.

No stage holds logits of all rows, steps and tokens, [N, T, V].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.checks import check_temperature
from arsm.options import suggests
from arsm.sequences.ahead import PlayedAhead
from arsm.sequences.batch import (
    Batch,
    Branches,
    LogitsOf,
    SequenceEstimate,
    Strategy,
    TokenCredit,
)
from arsm.sequences.checks import (
    Reward,
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
    check_reward,
    check_sizes,
    check_strategy,
    checked_rewards,
    first_logits,
    given_completions,
    given_log_probs,
)
from arsm.sequences.costs import Costs, with_actions
from arsm.sequences.credit import (
    Pass,
    attach_credit,
    clipped_epochs,
    parameters_of,
    versions_of,
)
from arsm.sequences.decode import Decoding, Prefixes
from arsm.sequences.draws import Sampled
from arsm.sequences.ends import Ends, Stop
from arsm.sequences.engines import Engine
from arsm.sequences.heads import logits_in_parts
from arsm.sequences.importance import Importance, effective_share
from arsm.sequences.memory import limited_by
from arsm.sequences.mismatch import check_sampler
from arsm.sequences.model import Model, pad_before
from arsm.sequences.sampler import TokenSampler

COMPARED = 16
"""Sequences of the model's own sampler that are compared with the model's pass."""


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
    # everything that can be refused is refused here, before a GPU has worked for minutes
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
    call = _Call(
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
    return call.run(completions, log_probs)


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


FIRST_LOGITS: WeakKeyDictionary[object, dict[object, Tensor]] = WeakKeyDictionary()
"""Logits [1, V] of a model's first trial, by what their type depends on. A pass over one
token takes as long as one over a batch, and every call would begin with it.
"""


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
    elsewhere: bool
    """Whether somebody else than the model drew them."""
    generated: int
    """How many tokens were sampled for them."""
    ahead: PlayedAhead | None = None
    """Branches that were played while they were sampled."""

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
class _Reached:
    """What the true sequences earned."""

    rewards: Tensor
    """[M]."""
    ratio: Tensor
    """[M, T]: ln p - ln p_reference."""
    returns: Tensor
    """[M, T]: the reward less the costs from each step on."""


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
    dtype: torch.dtype
    """Of the model's logits."""
    reference: Model | None
    kl: float
    importance: Importance | None
    micro_batch: int
    sampler: TokenSampler
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
    def costs(self) -> Costs:
        """ln p - ln p_reference of tokens."""
        return Costs(
            self.reference,
            self.prompts,
            self.mask,
            self.decoding,
            self.vocabulary,
            self.micro_batch,
        )

    def run(self, completions: Tensor | None, log_probs: Tensor | None) -> SequenceEstimate:
        """All stages, from the true sequences to the estimate."""
        if completions is None:
            true = self.sample()
        else:
            true = self.given(completions, log_probs)
        # first, as it may refuse: rewards can be slow or cost money
        info = self.compared(true)
        reached = self.judge(true)
        branching = _Branching(self, true)
        credit = self.strategy.credit(self.batch(true, reached.returns, branching))
        # after the strategy: a ratio multiplies the credit, the returns stay what they were
        if self.importance is not None:
            credit, info["effective_share"] = true.weighed(credit, self.importance)
        branches = credit.branches
        info["generated"] = torch.tensor(true.generated + branching.generated)
        info["rollouts"] = torch.tensor(0 if branches is None else branches.row.shape[0])
        if self.reference is not None:
            info["kl"] = reached.ratio.sum(-1).mean()
        return self.estimate(true, reached, credit, info)

    # ------------------------------------------------------------ 1. sample

    def sample(self) -> _True:
        """True sequences, and draws beside them."""
        sampled, reported, ahead = self.sampler.sample(
            self.prompts,
            self.mask,
            self.row,
            self.whole,
            self.strategy.draws,
            self.micro_batch,
            # not every strategy knows before the sequences are there
            ahead=getattr(self.strategy, "plays_every_draw", False),
        )
        live = self.decoding.live(sampled.tokens[..., 0])
        # an engine's tokens are tested like those of any other sampler
        elsewhere = self.sampler.engine is not None
        return _True(sampled, live, reported, elsewhere, int(live.sum()), ahead)

    def given(self, completions: Tensor, log_probs: Tensor | None) -> _True:
        """True sequences of somebody else, and draws beside them."""
        shape = self.shape
        decoding = self.decoding
        tokens = given_completions(completions, shape, decoding, self.vocabulary).flatten(0, -2)
        reported = None
        if log_probs is not None:
            reported = given_log_probs(log_probs, completions, shape, decoding).flatten(0, -2)
        # nothing was sampled for it here: only the other tokens of the states are drawn
        sampled = self.sampler.beside(self.whole, tokens, self.strategy.draws, self.micro_batch)
        return _True(sampled, decoding.live(tokens), reported, elsewhere=True, generated=0)

    def compared(self, true: _True) -> dict[str, Tensor]:
        """How far the sampler's ln p are from the model's; refuses another distribution."""
        rows = self.row.shape[0]
        if not true.elsewhere:
            # the model's own sampler differs by rounding alone, which some rows show
            rows = min(rows, self.micro_batch, COMPARED)
        return check_sampler(
            self.logits_of(true),
            [
                slice(start, min(start + self.micro_batch, rows))
                for start in range(0, rows, self.micro_batch)
            ],
            true.tokens,
            true.live,
            true.reported,
            self.decoding.temperature,
            self.dtype,
            elsewhere=true.elsewhere,
            corrected=self.importance is not None,
        )

    def logits_of(self, true: _True) -> LogitsOf:
        """Logits in the states of the true sequences."""
        return partial(
            _logits,
            self.model,
            self.whole,
            true.tokens,
            self.vocabulary,
            self.decoding,
            self.micro_batch,
        )

    # ------------------------------------------------------------ 2. rewards, and branches

    def judge(self, true: _True) -> _Reached:
        """Rewards, costs and returns of the true sequences."""
        rewards = checked_rewards(self.reward, self.shown[self.row], true.tokens)
        # the sampler's ln p: another pass over the model would give the same up to rounding
        log_p = true.sampled.log_probs[..., 0]
        ratio = self.costs(self.row, true.tokens, log_p, true.live)
        returns = rewards.unsqueeze(-1) - self.kl * _from_here_on(ratio)
        return _Reached(rewards, ratio, returns)

    def batch(self, true: _True, returns: Tensor, play: Callable[[Prefixes], Branches]) -> Batch:
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
            logits_of=self.logits_of(true),
            micro_batch=self.micro_batch,
        )

    # ------------------------------------------------------------ 3. credit

    def estimate(
        self, true: _True, reached: _Reached, credit: TokenCredit, info: dict[str, Tensor]
    ) -> SequenceEstimate:
        """The value of every prompt, whose backward is the pass with a graph."""
        if credit.along is None:
            run = self.credited(true.tokens, self.row, credit)
        else:
            run = self.with_branches(true.tokens, credit)
        wide = torch.promote_types(self.dtype, torch.float32)
        # the return of a whole sequence is that of its first token
        of_prompts = reached.returns[:, 0].unflatten(0, (self.prompts.shape[0], -1))
        value = of_prompts.mean(1).to(wide)
        return SequenceEstimate(
            value=attach_credit(value, run),
            tokens=true.tokens.view(self.shape),
            mask=true.live.view(self.shape),
            rewards=reached.rewards.view(self.shape[:-1]),
            # the branches have their own place in the result
            credit=replace(credit, branches=None),
            branches=credit.branches,
            info=info,
            clipped=partial(clipped_epochs, value, run, versions_of(self.model)),
        )

    def credited(self, tokens: Tensor, row: Tensor, credit: TokenCredit) -> Pass:
        """The pass over sequences [M, T] of the prompts `row` [M]."""
        return Pass(
            self.model,
            self.prompts[row],
            None if self.mask is None else self.mask[row],
            tokens,
            row,
            credit,
            self.decoding.temperature,
            self.micro_batch,
            self.decoding.limit,
        )

    def with_branches(self, tokens: Tensor, credit: TokenCredit) -> Pass:
        """The pass over the true sequences [M, T] and the branches."""
        branches = credit.branches
        assert branches is not None
        assert credit.along is not None
        along = credit.along.masked_fill(~self.decoding.live(branches.tokens), 0)
        # a branch is a sequence with credit for one token per state: its other draws weigh nothing
        draws = credit.weights.shape[-1]
        own = branches.tokens.unsqueeze(-1).expand(-1, -1, draws)
        weights = F.pad(along.to(credit.weights.dtype).unsqueeze(-1), (0, draws - 1))
        both = TokenCredit(torch.cat([credit.tokens, own]), torch.cat([credit.weights, weights]))
        return self.credited(
            torch.cat([tokens, branches.tokens]),
            torch.cat([self.row, self.row[branches.row]]),
            both,
        )


class _Branching:
    """Plays branches off the true sequences, and counts their tokens."""

    def __init__(self, call: _Call, true: _True) -> None:
        self.call = call
        self.true = true
        self.generated = 0

    def __call__(self, prefixes: Prefixes) -> Branches:
        call = self.call
        # what began beside the true sequences is there already
        played = call.sampler.complete(*call.whole, prefixes, self.true.ahead)
        step = torch.arange(call.decoding.max_tokens, device=played.tokens.device)
        # the known tokens before a branch were counted with their sequence
        after = (step >= prefixes.step.unsqueeze(-1)) & call.decoding.live(played.tokens)
        self.generated += int(after.sum())
        which = call.row[prefixes.row]
        reached = checked_rewards(call.reward, call.shown[which], played.tokens)
        log_p = played.log_probs
        # a given action has no ln p of the sampler's; only the cost needs it
        if call.reference is not None:
            log_p = with_actions(
                log_p,
                prefixes,
                self.true.sampled,
                call.logits_of(self.true),
                call.decoding.temperature,
                call.micro_batch,
            )
        cost = call.costs(which, played.tokens, log_p, after).sum(-1)
        return Branches(
            prefixes.row,
            prefixes.step,
            prefixes.action,
            played.tokens,
            reached,
            reached - call.kl * cost,
        )


# ---------------------------------------------------------------- a pass without a graph


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
            # a head of another size would give credit to other tokens without any error
            if logits.shape[-1] != vocabulary:
                expected = [*tokens[some].shape, vocabulary]
                returned = [*tokens[some].shape, logits.shape[-1]]
                raise ValueError(
                    f"model.logits must return {expected}, but returned {returned}; the last are "
                    "the logits of model.start."
                )
            yield states, logits


def _from_here_on(x: Tensor) -> Tensor:
    """sum_{s >= t} x_s: [N, T] -> [N, T]."""
    # a sum from the right
    return x.flip(-1).cumsum(-1).flip(-1)
