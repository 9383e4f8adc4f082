"""How a policy's gradient is made of what was played: by try-and-see, or by a critic that learns along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from arsm import policy
from arsm.estimators import RELAX, Reinforce
from arsm.rl.networks import mlp
from arsm.types import Estimator


@dataclass(frozen=True, eq=False)
class Batch:
    """The true episodes of one iteration, one after the other: T steps in all."""

    observations: Tensor
    """[T, D], without masks."""
    logits: Tensor
    """[T, K, C], detached."""
    rewards: Tensor
    """[T]."""
    returns: Tensor
    """[T]: discounted, from each step on."""
    discount: Tensor | None
    """[T]: gamma^t, where the gradient is weighted by it."""
    lengths: tuple[int, ...]
    """Of the episodes."""
    last_observations: Tensor
    """[episodes, D]: after the last actions."""
    terminated: tuple[bool, ...]
    """Whether an episode ended by itself, not at the time limit."""

    def gradient(
        self, estimator: Estimator, rollouts: policy.Rollouts, returns: Tensor, rollout_returns: Tensor
    ) -> Tensor:
        """`arsm.policy.gradient` with these returns [T]: [T, K, C]."""
        discount = None if self.discount is None else self.discount.unsqueeze(0)
        logits = self.logits.unsqueeze(0)
        return policy.gradient(estimator, logits, rollouts, returns.unsqueeze(0), rollout_returns, discount).squeeze(0)


@dataclass(frozen=True, eq=False)
class Tries:
    """R rollouts of the plan."""

    returns: Tensor
    """[R]: discounted, from the branch on, as far as they were played."""
    ends: Tensor
    """[R, D]: the observations after their last steps."""
    left: Tensor
    """[R]: the discount of what would follow; 0 where the episode ended by itself."""


class Learner(Protocol):
    """An estimator in a training loop, with what it learns itself."""

    estimator: Estimator
    cut: int | None
    """The most steps of a rollout; None plays to the end of the episode."""

    def parameters(self) -> list[nn.Parameter]:
        """What it learns besides the policy."""
        ...

    def gradient(self, batch: Batch, rollouts: policy.Rollouts, tries: Tries) -> tuple[Tensor, Tensor | None]:
        """The estimate of dJ/dlogits [T, K, C], and the loss of its own parameters."""
        ...


class TryAndSee:
    """An estimator of the contract, on the returns of true episodes and rollouts."""

    cut: int | None = None

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator

    def parameters(self) -> list[nn.Parameter]:
        return []

    def gradient(self, batch: Batch, rollouts: policy.Rollouts, tries: Tries) -> tuple[Tensor, Tensor | None]:
        return batch.gradient(self.estimator, rollouts, batch.returns, tries.returns), None


@dataclass(frozen=True)
class ActorCritic:
    """Advantage actor-critic: an estimator on n-step returns less a learned value.

        A_t = sum_{i<n} gamma^i r_{t+i} + gamma^n V(s_{t+n}) - V(s_t),    g_t = A_t dln pi(a_t|s_t)/dphi_t

    V of a state where the episode ended by itself is 0. Rollouts of the estimator are cut after n steps, and their
    returns go on with V likewise. The gradient is biased as far as V is wrong. Reference: Mnih et al., Asynchronous
    methods for deep reinforcement learning, ICML 2016.
    """

    steps: int | None = 5
    """n; None for the whole return, which makes it REINFORCE with a value baseline."""
    estimator: Estimator = field(default_factory=Reinforce)

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, or None for the whole return, but is {self.steps}.")


class Critic:
    """Actor-critic's value network, and the gradient from it."""

    def __init__(
        self, kind: ActorCritic, inputs: int, hidden: tuple[int, ...], gamma: float, generator: torch.Generator
    ) -> None:
        self.kind, self.gamma, self.cut = kind, gamma, kind.steps
        self.estimator = kind.estimator
        self.value = mlp(inputs, hidden, 1, generator)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.value.parameters())

    def gradient(self, batch: Batch, rollouts: policy.Rollouts, tries: Tries) -> tuple[Tensor, Tensor | None]:
        value = self.value(batch.observations).squeeze(-1)
        baseline = value.detach()
        targets, tried = self._targets(batch, baseline), tries.returns
        if self.cut is not None:
            with torch.no_grad():
                tried = tried + tries.left * self.value(tries.ends).squeeze(-1)
        grad = batch.gradient(self.estimator, rollouts, targets - baseline, tried - baseline[rollouts.step])
        return grad, (value - targets).square().sum() / 2

    def _targets(self, batch: Batch, value: Tensor) -> Tensor:
        if self.kind.steps is None:
            return batch.returns
        with torch.no_grad():
            last = self.value(batch.last_observations).squeeze(-1)
        parts = []
        rows = zip(batch.rewards.split(batch.lengths), value.split(batch.lengths), last, batch.terminated, strict=True)
        for rewards, values, final, terminated in rows:
            ahead = torch.cat([values, (0.0 if terminated else 1.0) * final.view(1)])
            length, n = len(rewards), self.kind.steps
            end = (torch.arange(length) + n).clamp_max(length)
            # the discounted sums from t to the end of the episode, of which those beyond t + n are taken away
            sums = torch.zeros(length + 1, dtype=rewards.dtype)
            for t in range(length - 1, -1, -1):
                sums[t] = rewards[t] + self.gamma * sums[t + 1]
            distance = self.gamma ** (end - torch.arange(length))
            parts.append(sums[:-1] + distance * (ahead[end] - sums[end]))
        return torch.cat(parts)


@dataclass(frozen=True)
class ActionConditioned:
    """RELAX with a control variate that reads the state and the relaxed action, on the true episode's returns."""

    temperature: float = 0.5


class ActionValue(nn.Module):
    """c(state, relaxed action): `RELAX`'s control variate, whose states are set before each use."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.network = mlp(inputs, hidden, 1, generator)
        self.observations = torch.empty(0)

    def forward(self, s: Tensor, p: Tensor) -> Tensor:
        return self.network(torch.cat([self.observations, s.flatten(1)], -1)).squeeze(-1)


class Relax:
    """RELAX, and the training of its control variate on the squared norm of the gradient."""

    cut: int | None = None

    def __init__(
        self, kind: ActionConditioned, inputs: int, hidden: tuple[int, ...], generator: torch.Generator
    ) -> None:
        self.control = ActionValue(inputs, hidden, generator)
        self.estimator: Estimator = RELAX(self.control, kind.temperature)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.control.parameters())

    def gradient(self, batch: Batch, rollouts: policy.Rollouts, tries: Tries) -> tuple[Tensor, Tensor | None]:
        self.control.observations = batch.observations
        grad = batch.gradient(self.estimator, rollouts, batch.returns, tries.returns)
        return grad.detach(), grad.square().sum()
