"""A policy's gradient from played episodes: by try-and-see, or with a learned critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from arsm import policy
from arsm.categorical import one_hot
from arsm.estimators import RELAX, Reinforce
from arsm.rl.environment import Array
from arsm.rl.networks import mlp
from arsm.rl.play import discounted
from arsm.types import Estimator


@dataclass(frozen=True, eq=False)
class TrueEpisodes:
    """The true episodes of one iteration, one after the other: T steps in all."""

    observations: Tensor
    """[T, D], without masks."""
    logits: Tensor
    """[T, K, C], detached."""
    actions: Tensor
    """[T, K]."""
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
        self,
        estimator: Estimator,
        rollouts: policy.Rollouts,
        returns: Tensor,
        rollout_returns: Tensor,
    ) -> Tensor:
        """`arsm.policy.gradient` with these returns [T]: [T, K, C]."""
        discount = None if self.discount is None else self.discount.unsqueeze(0)
        logits = self.logits.unsqueeze(0)
        return policy.gradient(
            estimator, logits, rollouts, returns.unsqueeze(0), rollout_returns, discount
        ).squeeze(0)


@dataclass(frozen=True, eq=False)
class Tries:
    """R rollouts of the plan."""

    returns: Tensor
    """[R]: discounted, from the branch on, as far as they were played."""
    ends: Tensor
    """[R, D]: the observations after their last steps."""
    left: Tensor
    """[R]: the discount of what would follow; 0 where the episode ended by itself."""


Loss = Callable[[], Tensor] | None


class Learner(Protocol):
    """An estimator in a training loop, with what it learns itself."""

    estimator: Estimator
    cut: int | None
    """Maximum steps per rollout; None plays to the end of the episode."""
    iteration: tuple[int, int]
    """About how many true steps an iteration has, and its most episodes, where their
    number is chosen.
    """
    updates: int
    """Maximum updates of the policy per iteration."""
    own_updates: int
    """Updates of its own parameters per iteration."""
    divergence: float
    """The mean KL divergence from the policy that played, at which the policy's updates
    end after the first.
    """
    epsilon: float
    """Of the optimizer."""

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that it learns in addition to the policy's."""
        ...

    def tried(
        self, logits: Tensor, budget: int | None, generator: torch.Generator
    ) -> Tensor | None:
        """[T] bool: the steps, logits [T, K, C], at which the estimator has rollouts;
        None leaves it to the walk.
        """
        ...

    def gradient(
        self, batch: TrueEpisodes, rollouts: policy.Rollouts, tries: Tries
    ) -> tuple[Tensor, Loss]:
        """The estimate of dJ/dlogits [T, K, C], and the loss of its own parameters as
        they are at a call.
        """
        ...


class Single:
    """One update per iteration, with the steps that the budget's walk chooses."""

    cut: int | None = None
    iteration: tuple[int, int] = (1000, 64)
    updates: int = 1
    own_updates: int = 1
    divergence: float = 0.0
    epsilon: float = 1e-8

    def tried(
        self, logits: Tensor, budget: int | None, generator: torch.Generator
    ) -> Tensor | None:
        return None


class TryAndSee(Single):
    """An estimator of the contract, on the returns of true episodes and rollouts."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator

    def parameters(self) -> list[nn.Parameter]:
        return []

    def gradient(
        self, batch: TrueEpisodes, rollouts: policy.Rollouts, tries: Tries
    ) -> tuple[Tensor, Loss]:
        return batch.gradient(self.estimator, rollouts, batch.returns, tries.returns), None


@dataclass(frozen=True)
class ActorCritic:
    """Advantage actor-critic: an estimator on n-step returns less a learned value.

        A_t = sum_{i<n} gamma^i r_{t+i} + gamma^n V(s_{t+n}) - V(s_t),
        g_t = A_t dln pi(a_t|s_t)/dphi_t

    V of a state where the episode ended by itself is 0. Rollouts of the estimator are
    cut after n steps, and their returns go on with V likewise. The gradient is biased
    as far as V is wrong. Reference: Mnih et al., Asynchronous methods for deep
    reinforcement learning, ICML 2016.

    Attributes:
        steps: n; None for the whole return, which makes it REINFORCE with a value
            baseline.
        value_updates: Updates of V per iteration; ten make V more reliable where all
            episodes end at a time limit.
    """

    steps: int | None = 5
    estimator: Estimator = field(default_factory=Reinforce)
    value_updates: int = 1

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(
                f"steps must be at least 1, or None for the whole return, but is {self.steps}."
            )
        if self.value_updates < 1:
            raise ValueError(f"value_updates must be at least 1, but is {self.value_updates}.")


class Valued(Single):
    """A learner with a value network V, which is fitted to targets."""

    def __init__(
        self,
        kind: ActorCritic | Proximal,
        inputs: int,
        hidden: tuple[int, ...],
        gamma: float,
        generator: torch.Generator,
    ) -> None:
        self.estimator, self.cut, self.gamma = kind.estimator, kind.steps, gamma
        self.own_updates = kind.value_updates
        self.value = mlp(inputs, hidden, 1, generator)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.value.parameters())

    def values(self, batch: TrueEpisodes, tries: Tries) -> tuple[Tensor, Tensor, Tensor]:
        """V at every step [T], after every episode, and after every rollout [R]."""
        with torch.no_grad():
            at_steps, after_episodes, after_rollouts = (
                self.value(seen).squeeze(-1)
                for seen in (batch.observations, batch.last_observations, tries.ends)
            )
        return at_steps, after_episodes, after_rollouts

    def loss(self, batch: TrueEpisodes, targets: Tensor) -> Loss:
        """Half the squared error of V at every step."""
        return lambda: (self.value(batch.observations).squeeze(-1) - targets).square().sum() / 2


class Critic(Valued):
    """Actor-critic's value network, and the gradient from it."""

    def gradient(
        self, batch: TrueEpisodes, rollouts: policy.Rollouts, tries: Tries
    ) -> tuple[Tensor, Loss]:
        baseline, last, following = self.values(batch, tries)
        targets, tried = batch.returns, tries.returns
        if self.cut is not None:
            targets = n_step_returns(batch, baseline, last, self.cut, self.gamma)
            tried = tried + tries.left * following
        grad = batch.gradient(
            self.estimator, rollouts, targets - baseline, tried - baseline[rollouts.step]
        )
        return grad, self.loss(batch, targets)


def n_step_returns(
    batch: TrueEpisodes, value: Tensor, last: Tensor, n: int, gamma: float
) -> Tensor:
    """[T]: the rewards of n steps and the value after them, from the values [T] and
    those [episodes] after the end.
    """
    parts = []
    for rewards, ahead in _by_episode(batch, value, last):
        length = len(rewards)
        time = np.arange(length)
        end = np.minimum(time + n, length)
        # the discounted sums from t to the end of the episode, of which those beyond t + n are
        # taken away
        sums = np.append(discounted(rewards, gamma), 0.0)
        parts.append(sums[:-1] + gamma ** (end - time) * (ahead[end] - sums[end]))
    return torch.from_numpy(np.concatenate(parts))


def generalized_advantages(
    batch: TrueEpisodes, value: Tensor, last: Tensor, gamma: float, trace: float
) -> Tensor:
    """[T]: sum_i (gamma lambda)^i delta_{t+i} with delta_t = r_t + gamma V(s_{t+1}) - V(s_t)."""
    parts = []
    for rewards, ahead in _by_episode(batch, value, last):
        parts.append(discounted(rewards + gamma * ahead[1:] - ahead[:-1], gamma * trace))
    return torch.from_numpy(np.concatenate(parts))


def _by_episode(batch: TrueEpisodes, value: Tensor, last: Tensor) -> list[tuple[Array, Array]]:
    """Each episode's rewards [L] and the values [L + 1] of its states; after an end by
    itself the value is 0.
    """
    edges = np.cumsum([0, *batch.lengths])
    rewards, values = batch.rewards.numpy(), value.numpy()
    after = np.where(batch.terminated, 0.0, last.numpy())
    rows = zip(pairwise(edges.tolist()), after, strict=True)
    return [
        (rewards[begin:end], np.append(values[begin:end], final)) for (begin, end), final in rows
    ]


@dataclass(frozen=True)
class Proximal:
    """Generalized advantages at every true step, and several cautious updates per iteration.

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t),    A_t = sum_i (gamma lambda)^i delta_{t+i},
        g_t = A_t dln pi(a_t|s_t)/dphi_t,
        or the estimator's on returns of n steps that go on with V

    V of a state where the episode ended by itself is 0. The gradient is biased as far
    as the learned V is wrong. An iteration makes several updates along sum_t phi_t g_t,
    until the mean KL divergence from the policy that played exceeds a bound, and more
    of V. All but the first are also biased: g_t is not estimated again. An estimator
    with rollouts, such as RLOO(2), has them at some steps, drawn at random before the
    estimator draws anything; all others take A_t. References: Schulman et al.,
    High-dimensional continuous control using generalized advantage estimation, ICLR
    2016; Schulman et al., Proximal policy optimization algorithms, 2017.

    Attributes:
        trace: lambda.
        updates: Maximum updates of the policy per iteration.
        value_updates: Updates of V per iteration.
        divergence: The bound of the KL divergence, in nats, summed over the actions of
            a step.
        estimator: Of the steps with rollouts; `Reinforce()` has none.
        every: One step in this many has rollouts, and fewer if the budget is too small.
        steps: n, the maximum steps per rollout.
    """

    trace: float = 0.95
    updates: int = 3
    value_updates: int = 10
    divergence: float = 0.02
    estimator: Estimator = field(default_factory=Reinforce)
    every: int = 16
    steps: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.trace <= 1:
            raise ValueError(f"trace must lie in [0, 1], but is {self.trace}.")
        if self.divergence < 0:
            raise ValueError(f"divergence must not be negative, but is {self.divergence}.")
        for name in ("steps", "every", "updates", "value_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}.")


class ProximalCritic(Valued):
    """The value network of `Proximal`, and the gradient from it."""

    iteration: tuple[int, int] = (2000, 128)
    epsilon: float = 0.001
    """Of the optimizer: gradients far below it move the policy at less than the full rate."""

    def __init__(
        self,
        kind: Proximal,
        inputs: int,
        hidden: tuple[int, ...],
        gamma: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__(kind, inputs, hidden, gamma, generator)
        self.kind, self.updates, self.divergence = kind, kind.updates, kind.divergence

    def tried(
        self, logits: Tensor, budget: int | None, generator: torch.Generator
    ) -> Tensor | None:
        most = self.estimator.most_queries(logits) - 1
        count = len(logits) // self.kind.every
        if most and budget is not None:
            count = min(count, budget // most)
        return torch.randperm(len(logits), generator=generator) < max(count, 1)

    def gradient(
        self, batch: TrueEpisodes, rollouts: policy.Rollouts, tries: Tries
    ) -> tuple[Tensor, Loss]:
        baseline, last, following = self.values(batch, tries)
        advantages = generalized_advantages(batch, baseline, last, self.gamma, self.kind.trace)
        own = n_step_returns(batch, baseline, last, self.kind.steps, self.gamma) - baseline
        tried = tries.returns + tries.left * following - baseline[rollouts.step]
        grad = batch.gradient(self.estimator, rollouts, own, tried)
        chosen = one_hot(
            batch.actions, batch.logits.shape[-1], torch.float64
        ) - batch.logits.softmax(-1)
        weighted = advantages if batch.discount is None else batch.discount * advantages
        elsewhere = torch.ones(len(own), dtype=torch.float64).index_fill(0, rollouts.played, 0.0)
        grad = grad + (elsewhere * weighted)[:, None, None] * chosen
        return grad, self.loss(batch, advantages + baseline)


@dataclass(frozen=True)
class ActionConditioned:
    """RELAX with a control variate that reads the state and the relaxed action, on the
    true episode's returns.
    """

    temperature: float = 0.5


Method = Estimator | Proximal | ActorCritic | ActionConditioned
"""Methods of an agent."""


class ActionValue(nn.Module):
    """c(state, relaxed action): `RELAX`'s control variate, which finds its states inside `at`."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.network = mlp(inputs, hidden, 1, generator)
        self._left: Tensor | None = None

    @contextmanager
    def at(self, states: Tensor) -> Iterator[None]:
        """Compute one gradient at these states [S, D], whose rows come in their order,
        possibly in parts.
        """
        self._left = states
        try:
            yield
            if len(self._left) > 0:
                raise RuntimeError(
                    f"{len(self._left)} of {len(states)} states were not read; give the played "
                    "steps'."
                )
        finally:
            self._left = None

    def forward(self, s: Tensor, p: Tensor) -> Tensor:
        rows = s.shape[0]
        if self._left is None or len(self._left) < rows:
            raise RuntimeError(
                "There is no state for these steps; compute one gradient inside `with "
                "control.at(...)`."
            )
        states, self._left = self._left[:rows], self._left[rows:]
        return self.network(torch.cat([states, s.flatten(1)], -1)).squeeze(-1)


class Relax(Single):
    """RELAX, and the training of its control variate on the squared norm of the gradient."""

    def __init__(
        self,
        kind: ActionConditioned,
        inputs: int,
        hidden: tuple[int, ...],
        generator: torch.Generator,
    ) -> None:
        self.control = ActionValue(inputs, hidden, generator)
        self.estimator: Estimator = RELAX(self.control, kind.temperature)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.control.parameters())

    def gradient(
        self, batch: TrueEpisodes, rollouts: policy.Rollouts, tries: Tries
    ) -> tuple[Tensor, Loss]:
        with self.control.at(batch.observations[rollouts.played]):
            grad = batch.gradient(self.estimator, rollouts, batch.returns, tries.returns)
        return grad.detach(), lambda: grad.square().sum()
