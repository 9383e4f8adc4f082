"""The batch that a strategy works with, its credit, and the result of an estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from arsm.brief import of_parts
from arsm.sequences.decode import Prefixes
from arsm.types import NoTensor

LogitsOf: TypeAlias = Callable[[slice, Tensor], Iterable[tuple[Tensor, Tensor]]]
"""`logits_of(some, wanted [M, T] bool)`: logits without a graph, of the wanted states
of some rows.

They come in parts: indices [S] in those rows' [m T] states, and logits [S, V] before
temperature.
"""


@dataclass(frozen=True, eq=False)
class Branches:
    """R rollouts that left the true sequences.

    Attributes:
        row: [R] int64: the true sequence of each.
        step: [R] int64: where it left.
        action: [R] int64: with which token.
        tokens: [R, T] int64: the whole sequence, prefix included.
        rewards: [R].
        returns: [R]: the reward less the costs from `step` on.
    """

    row: Tensor
    step: Tensor
    action: Tensor
    tokens: Tensor
    rewards: Tensor
    returns: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """N prompts with n true sequences each, as M = N n rows.

    Attributes:
        prompts: [M, P].
        prompt_mask: [M, P].
        tokens: [M, T].
        mask: [M, T] bool: true up to and including the end of sequence.
        draws: [M, T, d] int64: d draws from every state, the true token first; as many
            as the strategy asked for.
        log_probs: [M, T, d] float64: ln p of the draws, as the sampler recorded it; 0
            after the end.
        largest: [M, T] float64: the largest ln p of every state; 0 after the end.
        returns: [M, T]: the reward less the costs from each step on.
        play: Complete prefixes of the true sequences.
        logits_of: Logits of some rows' states, in parts.
        micro_batch: Maximum rows per call of `logits_of`.
    """

    prompts: Tensor
    prompt_mask: Tensor | None
    tokens: Tensor
    mask: Tensor
    draws: Tensor
    log_probs: Tensor
    largest: Tensor
    temperature: float
    returns: Tensor
    generator: torch.Generator | None
    play: Callable[[Prefixes], Branches]
    logits_of: LogitsOf
    micro_batch: int

    def parts(self) -> list[slice]:
        """All rows, in parts of at most `micro_batch`."""
        # slices and no indices: what is written into such a part is written into the whole
        rows = self.tokens.shape[0]
        size = self.micro_batch
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class LogitGradient(Protocol):
    """A gradient in the logits of all tokens of M sequences, computed where it is wanted:
    [M, T, V] exists at no time.
    """

    def credited(self) -> Tensor:
        """[M, T] bool: the states that may have a gradient."""
        ...

    def scaled(self, factor: Tensor) -> LogitGradient:
        """With every state's gradient multiplied by a factor [M, T]."""
        ...

    def __call__(self, logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """The gradient [n, V] at the logits [n, V], before temperature, of the states row
        [n], step [n].
        """
        ...


@dataclass(frozen=True, eq=False)
class TokenCredit:
    """Credit for tokens: the gradient of the summed values is sum_i w_i dln p(token_i),
    over rows, steps and draws.

    Where every state has a credit for all tokens, there is a `gradient` in the logits
    instead.

    Attributes:
        tokens: [M, T, d] int64.
        weights: [M, T, d]: 0 after the end and for states without credit.
        centred: Whether the weights of every state sum to 0: then sum_i w_i logit_i has
            the same gradient.
        gradient: Computes the gradient in the logits of some states; the weights are
            then empty.
        branches: The rollouts that it took.
        along: [R, T]: the weights of the branches' own tokens, where these have credit
            too: w_rt dln p(branches.tokens_rt) is added for every branch. Nothing
            behind a branch's end counts.
    """

    tokens: Tensor
    weights: Tensor
    centred: bool = False
    gradient: LogitGradient | None = None
    branches: Branches | None = None
    along: Tensor | None = None


class Strategy(Protocol):
    """A way to give credit.

    A strategy that plays each distinct other draw of every state once says so in an
    attribute `plays_every_draw`: its branches may then begin while the true sequences
    are still being sampled.
    """

    @property
    def unbiased(self) -> bool:
        """The claim E[gradient] = dE[return]/dtheta, which the test suite checks
        against enumeration.
        """
        ...

    @property
    def samples(self) -> int | None:
        """True sequences per prompt; None for one, and tokens [N, T] without a dimension for it."""
        ...

    @property
    def draws(self) -> int:
        """Draws to record from every state of a true sequence, its own token included."""
        ...

    def check(self, logits: Tensor) -> None:
        """Refuse what cannot work, given the logits [N, V] of the first token."""
        ...

    def credit(self, batch: Batch) -> TokenCredit:
        """The credit of every token of the true sequences, and of other tokens in their states."""
        ...


@dataclass(frozen=True, eq=False)
class SequenceEstimate(NoTensor):
    """The result of `sequences.estimate`.

    Attributes:
        value: [N]: each prompt's return (the mean over its true sequences), to be
            maximised. Its backward gives the model's parameters the estimate.
        tokens: [N, T] int64, or [N, n, T] from a `Group`: the true sequences, padded
            with eos after the end.
        mask: Shaped like the tokens: true up to and including the end of sequence.
        rewards: [N], or [N, n]: the rewards of the true sequences, without the KL cost.
        credit: Tokens [M, T, d] and weights [M, T, d] for other people's trainers; M =
            N, or N n with a prompt's n together.
        branches: The rollouts of a `Branch`.
        info: `generated`: the number of tokens that were sampled, those of rollouts
            included, prompts and padding not; `rollouts`: their number; `mismatch` and
            `mean_mismatch`: the largest and the mean |ln p| difference between the
            sampler and the model's `logits`, over the rows that were compared; `kl`:
            with a reference, the mean over true sequences of ln p - ln p_reference;
            `effective_share`: with importance weights, the share of tokens or sequences
            that would tell as much with equal weights.
        clipped: `again = out.clipped(0.2)`, before the first optimiser step: `again()`
            is the value [N] for a further epoch over the same sequences and credit,
            with PPO's clipped probability ratios.
    """

    value: Tensor
    tokens: Tensor
    mask: Tensor
    rewards: Tensor
    credit: TokenCredit | None = None
    branches: Branches | None = None
    info: dict[str, Tensor] = field(default_factory=dict)
    clipped: Callable[[float], Callable[[], Tensor]] | None = None

    def __repr__(self) -> str:
        return of_parts(
            self, value=self.value, tokens=self.tokens, rewards=self.rewards, info=self.info
        )


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """ln p of the tokens: [..., T, V], [..., T] -> [..., T]; or [..., T, d] -> [..., T, d]."""
    # the sum over the vocabulary would lose its small terms in bfloat16
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    # with d tokens per state, one normaliser serves all of them
    if tokens.ndim == logits.ndim:
        return logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
