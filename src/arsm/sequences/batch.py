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
    """N prompts with n true sequences each, as N n rows."""

    prompts: Tensor
    """[N n, P]."""
    prompt_mask: Tensor | None
    """[N n, P]."""
    tokens: Tensor
    """[N n, T]."""
    mask: Tensor
    """[N n, T] bool: true up to and including the end of sequence."""
    logits: Tensor
    """[N n, T, V] with the graph, before temperature."""
    temperature: float
    returns: Tensor
    """[N n, T]: the reward less the costs from each step on."""
    generator: torch.Generator | None
    play: Callable[[Prefixes], Branches]
    """Complete prefixes of the true sequences."""

    def scaled_logits(self) -> Tensor:
        """[N n, T, V], detached: the logits that the tokens were drawn from."""
        logits = self.logits.detach()
        return logits if self.temperature == 1 else logits / self.temperature

    def log_probs(self) -> Tensor:
        """[N n, T] with the graph: ln p of every token, 0 for padding."""
        return token_log_probs(self.logits, self.tokens, self.temperature).masked_fill(~self.mask, 0)


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """ln p of the tokens: [..., T, V], [..., T] -> [..., T]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


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

    def check(self, logits: Tensor) -> None:
        """Refuse what cannot work, given the logits [N, V] of the first token."""
        ...

    def surrogate(self, batch: Batch) -> tuple[Tensor, Branches | None]:
        """[N n], whose gradient is the estimate and whose value is 0; and the rollouts that it took."""
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
    branches: Branches | None = None
    """The rollouts of a `Branch`."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """`generated`: the number of tokens that were sampled, those of rollouts included, prompts and padding not;
    `rollouts`: their number; `mismatch`: the largest |ln p| difference between the sampler and the model's `logits`;
    `kl`: with a reference, the mean over true sequences of ln p - ln p_reference."""
