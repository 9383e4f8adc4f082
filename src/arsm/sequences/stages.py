"""From a strategy, a model and prompts to a gradient, in three stages: sample, play, credit.

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

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.sequences.ahead import PlayedAhead
from arsm.sequences.batch import (
    Batch,
    Branches,
    LogitsOf,
    SequenceEstimate,
    Strategy,
    TokenCredit,
)
from arsm.sequences.checks import given_completions, given_log_probs
from arsm.sequences.costs import Costs, with_actions
from arsm.sequences.credit import Pass, attach_credit, clipped_epochs, versions_of
from arsm.sequences.decode import Decoding, Prefixes
from arsm.sequences.draws import Sampled
from arsm.sequences.heads import logits_in_parts
from arsm.sequences.importance import Importance, effective_share
from arsm.sequences.memory import limited_by
from arsm.sequences.mismatch import check_sampler
from arsm.sequences.model import Model
from arsm.sequences.rewards import Reward, checked_rewards
from arsm.sequences.sampler import TokenSampler

COMPARED = 16
"""Sequences of the model's own sampler that are compared with the model's pass."""


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
    """Number of tokens that were sampled for them."""
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
    """Rewards, costs and returns of the true sequences."""

    rewards: Tensor
    """[M]."""
    ratio: Tensor
    """[M, T]: ln p - ln p_reference."""
    returns: Tensor
    """[M, T]: the reward less the costs from each step on."""


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of one call, and what all of them share."""

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
    """The type of the model's logits."""
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
        branching = _BranchPlayer(self, true)
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
        """Compare the sampler's ln p with the model's; refuse another distribution."""
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
        """Everything that the strategy works with."""
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


class _BranchPlayer:
    """Plays branches off the true sequences, and counts their tokens."""

    def __init__(self, call: Stages, true: _True) -> None:
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
