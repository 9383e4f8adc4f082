"""What a strategy works with, and what an estimate returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from arsm.sequences.decode import Prefixes
from arsm.types import NoTensor


@dataclass(frozen=True, eq=False)
class Branches:
    """R rollouts that left the true sequences."""

    row: Tensor
    """[R] int64: the true sequence of each."""
    step: Tensor
    """[R] int64: where it left."""
    action: Tensor
    """[R] int64: with which token."""
    tokens: Tensor
    """[R, T] int64: the whole sequence, prefix included."""
    rewards: Tensor
    """[R]."""
    returns: Tensor
    """[R]: the reward less the costs from `step` on."""


@dataclass(frozen=True, eq=False)
class Batch:
    """N prompts with n true sequences each, as M = N n rows."""

    prompts: Tensor
    """[M, P]."""
    prompt_mask: Tensor | None
    """[M, P]."""
    tokens: Tensor
    """[M, T]."""
    mask: Tensor
    """[M, T] bool: true up to and including the end of sequence."""
    draws: Tensor
    """[M, T, d] int64: d draws from every state, the true token first; as many as the strategy asked for."""
    log_probs: Tensor
    """[M, T, d] float64: ln p of the draws, as the sampler recorded it; 0 after the end."""
    largest: Tensor
    """[M, T] float64: the largest ln p of every state; 0 after the end."""
    temperature: float
    returns: Tensor
    """[M, T]: the reward less the costs from each step on."""
    generator: torch.Generator | None
    play: Callable[[Prefixes], Branches]
    """Complete prefixes of the true sequences."""
    logits_of: Callable[[slice], Tensor]
    """Logits [m, T, V] of some rows, without a graph, before temperature."""
    micro_batch: int
    """Maximum rows per call of `logits_of`."""

    def parts(self) -> list[slice]:
        """All rows, in parts of at most `micro_batch`."""
        rows, size = self.tokens.shape[0], self.micro_batch
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]

    def scaled_logits(self) -> Tensor:
        """[M, T, V], without a graph: the logits that the tokens were drawn from.

        This is by far the largest tensor of an estimate; credit that comes from draws alone does without.
        """
        logits = torch.cat([self.logits_of(some) for some in self.parts()])
        return logits if self.temperature == 1 else logits / self.temperature


@dataclass(frozen=True, eq=False)
class TokenCredit:
    """Credit for tokens: the gradient of the summed values is sum_i w_i dln p(token_i), over rows, steps and draws.

    Where every state has a credit for all tokens, there is a `gradient` in the logits instead.
    """

    tokens: Tensor
    """[M, T, d] int64."""
    weights: Tensor
    """[M, T, d]: 0 after the end and for states without credit."""
    centred: bool = False
    """Whether the weights of every state sum to 0: then sum_i w_i logit_i has the same gradient."""
    gradient: Tensor | None = None
    """[M, T, V]: the gradient in the logits, before temperature; the weights are then empty."""
    branches: Branches | None = None
    """The rollouts that it took."""


class Strategy(Protocol):
    """How credit is given."""

    @property
    def unbiased(self) -> bool:
        """The claim E[gradient] = dE[return]/dtheta, which the test suite checks against enumeration."""
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
class Estimate(NoTensor):
    """What `sequences.estimate` returns."""

    value: Tensor
    """[N]: each prompt's return (the mean over its true sequences), to be maximised. Its backward gives the model's
    parameters the estimate."""
    tokens: Tensor
    """[N, T] int64, or [N, n, T] from a `Group`: the true sequences, padded with eos after the end."""
    mask: Tensor
    """Shaped like the tokens: true up to and including the end of sequence."""
    rewards: Tensor
    """[N], or [N, n]: the rewards of the true sequences, without the KL cost."""
    credit: TokenCredit | None = None
    """Tokens [M, T, d] and weights [M, T, d] for other people's trainers; M = N, or N n with a prompt's n together."""
    branches: Branches | None = None
    """The rollouts of a `Branch`."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """`generated`: the number of tokens that were sampled, those of rollouts included, prompts and padding not;
    `rollouts`: their number; `mismatch` and `mean_mismatch`: the largest and the mean |ln p| difference between the
    sampler and the model's `logits`, over the rows that were compared; `kl`: with a reference, the mean over true
    sequences of ln p - ln p_reference."""
    clipped: Callable[[float], Callable[[], Tensor]] | None = None
    """`again = out.clipped(0.2)`, before the first optimiser step: `again()` is the value [N] for a further epoch over
    the same sequences and credit, with PPO's clipped probability ratios."""


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """ln p of the tokens: [..., T, V], [..., T] -> [..., T]; or [..., T, d] -> [..., T, d]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    if tokens.ndim == logits.ndim:
        return logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
