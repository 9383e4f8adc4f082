"""Credit for the actions of played episodes: from branches, from a learned value, or from
both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from arsm import policy
from arsm.brief import of_options
from arsm.categorical import one_hot
from arsm.checks import check_count
from arsm.estimators import RELAX
from arsm.rl.environment import Array
from arsm.rl.networks import mlp
from arsm.rl.play import EpisodeBranches, discounted
from arsm.types import Estimator

# ---------------------------------------------------------------- what a user chooses


@dataclass(frozen=True, repr=False)
class Value:
    """Credit from a learned value V, and at some steps from branches.

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t),    A_t = sum_{i<n} (gamma lambda)^i delta_{t+i},
        g_t = A_t dln pi(a_t|s_t)/dphi_t, or at the steps that branch
        the estimator's, on returns of h steps that go on with V

    V of a state where the episode ended by itself is 0. The gradient is biased as far
    as V is wrong, in A_t and at the cut of a rollout. Whole returns, lambda = 1 and n =
    None, use V as a baseline only and are unbiased. An iteration makes several updates
    along sum_t phi_t g_t, until the mean KL divergence from the policy that played
    exceeds a bound, and more of V. All but the first are also biased: g_t is not
    estimated again. References: Schulman et al., High-dimensional continuous control
    using generalized advantage estimation, ICLR 2016; Schulman et al., Proximal policy
    optimization algorithms, 2017.

    Attributes:
        trace: lambda.
        steps: n, the steps that A_t looks ahead; None looks to the end of the episode.
        updates: Maximum updates of the policy per iteration. With more than one, an
            iteration has more episodes, and the optimizer's epsilon is 0.001.
        divergence: The bound of the KL divergence, in nats, summed over the actions of
            a step.
        value_updates: Updates of V per iteration.
        branch: The estimator of the steps that branch, such as `arsm.RLOO(2)`; None
            plays no rollouts.
        every: One step in this many branches, and fewer if the budget is too small.
        where: The steps that branch: "unsure" takes those where two networks for V, of
            which it is the mean, differ most; "random" draws them. Both look at the
            states alone, so that the choice adds no bias.
        cut: h, the maximum steps per rollout; None plays to the end of the episode.
    """

    trace: float = 0.95
    steps: int | None = None
    updates: int = 3
    divergence: float = 0.02
    value_updates: int = 10
    branch: Estimator | None = None
    every: int = 16
    where: Literal["unsure", "random"] = "unsure"
    cut: int | None = 8

    @classmethod
    def actor_critic(cls, steps: int | None = 5, value_updates: int = 1) -> Value:
        """Advantage actor-critic (A2C): n-step returns less V, one update per iteration.

        With steps=None it is REINFORCE with a value baseline, which is unbiased.
        Reference: Mnih et al., Asynchronous methods for deep reinforcement learning,
        ICML 2016.
        """
        return cls(trace=1.0, steps=steps, updates=1, value_updates=value_updates)

    def __repr__(self) -> str:
        return of_options(self)

    def __post_init__(self) -> None:
        if not 0 <= self.trace <= 1:
            raise ValueError(f"trace must lie in [0, 1], but is {self.trace}.")
        if not self.divergence >= 0:
            raise ValueError(f"divergence must not be negative, but is {self.divergence}.")
        for name in ("every", "updates", "value_updates", "steps", "cut"):
            value = getattr(self, name)
            # None looks, or plays, to the end of the episode
            if value is not None:
                check_count(name, value)
        if self.where not in ("unsure", "random"):
            raise ValueError(f'where must be "unsure" or "random", but is {self.where!r}.')


@dataclass(frozen=True)
class ActionConditioned:
    """RELAX with a control variate that reads the state and the relaxed action, on the
    true episode's returns.

    Attributes:
        temperature: Of the relaxed action.
    """

    temperature: float = 0.5


Credit = Estimator | Value | ActionConditioned
"""The source of an agent's credit."""


# ---------------------------------------------------------------- what it is computed from


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
    """The episodes' lengths."""
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

    def scores(self, advantages: Tensor) -> Tensor:
        """A_t dln pi(a_t|s_t)/dphi_t, discounted: [T, K, C]."""
        # the paper's algorithm leaves gamma^t out
        weighted = advantages if self.discount is None else self.discount * advantages
        chosen = one_hot(self.actions, self.logits.shape[-1], torch.float64)
        return weighted[:, None, None] * (chosen - self.logits.softmax(-1))


Loss = Callable[[], Tensor] | None


class CreditSource(ABC):
    """Computes the credit of an iteration, and may have parameters of its own that
    learn.
    """

    estimator: Estimator | None = None
    """The estimator of the branches; None has no rollouts."""
    cut: int | None = None
    """Maximum steps per rollout; None plays to the end of the episode."""
    iteration: tuple[int, int] = (1000, 64)
    """About how many true steps an iteration has, and its most episodes, where their
    number is chosen.
    """
    updates: int = 1
    """Maximum updates of the policy per iteration."""
    own_updates: int = 1
    """Updates of its own parameters per iteration."""
    divergence: float = 0.0
    """The mean KL divergence from the policy that played, at which the policy's updates
    end after the first.
    """
    epsilon: float = 1e-8
    """The optimizer's epsilon."""

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that it learns in addition to the policy's."""
        return []

    def branching(
        self, batch: TrueEpisodes, budget: int | None, generator: torch.Generator
    ) -> Tensor | None:
        """[T] bool: the steps that branch; None leaves the choice to the budget's walk."""
        return None

    @abstractmethod
    def gradient(self, batch: TrueEpisodes, branches: EpisodeBranches) -> tuple[Tensor, Loss]:
        """The estimate of dJ/dlogits [T, K, C], and the loss of its own parameters as
        they are at a call.
        """


def make_credit(
    credit: Credit,
    inputs: int,
    choices: tuple[int, ...],
    hidden: tuple[int, ...],
    gamma: float,
    generator: torch.Generator,
) -> CreditSource:
    """The credit of an agent with `inputs` numbers per observation."""
    if isinstance(credit, Value):
        return Valued(credit, inputs, hidden, gamma, generator)
    if isinstance(credit, ActionConditioned):
        return Relax(credit, inputs + len(choices) * max(choices), hidden, generator)
    return Branching(credit)


# ---------------------------------------------------------------- from branches


class Branching(CreditSource):
    """An estimator on the returns of true episodes and of rollouts to the end."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator

    def gradient(self, batch: TrueEpisodes, branches: EpisodeBranches) -> tuple[Tensor, Loss]:
        assert self.estimator is not None
        assert branches.plan is not None
        tried = torch.from_numpy(branches.returns)
        return batch.gradient(self.estimator, branches.plan, batch.returns, tried), None


# ---------------------------------------------------------------- from a learned value


class Valued(CreditSource):
    """The value networks of `Value`, and the gradient from them."""

    def __init__(
        self,
        credit: Value,
        inputs: int,
        hidden: tuple[int, ...],
        gamma: float,
        generator: torch.Generator,
    ) -> None:
        self.credit = credit
        self.gamma = gamma
        self.estimator = credit.branch
        self.cut = credit.cut
        self.updates = credit.updates
        self.divergence = credit.divergence
        self.own_updates = credit.value_updates
        if credit.updates > 1:
            # several updates want more episodes; gradients far below epsilon move the policy at
            # less than the full rate
            self.iteration = (2000, 128)
            self.epsilon = 0.001
        # two networks from different starts differ where the data say little
        compared = credit.branch is not None and credit.where == "unsure"
        self.networks = nn.ModuleList(
            mlp(inputs, hidden, 1, generator) for _ in range(2 if compared else 1)
        )

    def parameters(self) -> list[nn.Parameter]:
        return list(self.networks.parameters())

    def values(self, observations: Tensor) -> Tensor:
        """[networks, N], of which V is the mean."""
        return torch.stack([network(observations).squeeze(-1) for network in self.networks])

    @torch.no_grad()
    def branching(
        self, batch: TrueEpisodes, budget: int | None, generator: torch.Generator
    ) -> Tensor | None:
        if self.estimator is None:
            return None
        steps = len(batch.logits)
        count = steps // self.credit.every
        most = self.estimator.most_queries(batch.logits) - 1
        # an estimator may ask for nothing beyond the true action, and then needs no budget
        if most and budget is not None:
            count = min(count, budget // most)
        # states alone decide: a choice by actions or returns would bias the gradient
        if self.credit.where == "random":
            order = torch.randperm(steps, generator=generator)
        else:
            first, second = self.values(batch.observations)
            order = (first - second).abs().argsort(descending=True, stable=True)
        return torch.zeros(steps, dtype=torch.bool).index_fill(0, order[: max(count, 1)], True)

    def gradient(self, batch: TrueEpisodes, branches: EpisodeBranches) -> tuple[Tensor, Loss]:
        with torch.no_grad():
            value = self.values(batch.observations).mean(0)
            last = self.values(batch.last_observations).mean(0)
            following = self.values(torch.from_numpy(branches.ends)).mean(0)
        advantages = generalized_advantages(
            batch, value, last, self.gamma, self.credit.trace, self.credit.steps
        )
        # V learns the lambda-returns that its own advantages come from
        targets = advantages + value
        grad = batch.scores(advantages)
        if self.estimator is not None and branches.plan is not None:
            plan = branches.plan
            # the true action's return is cut and continued as those of the rollouts
            own = generalized_advantages(batch, value, last, self.gamma, 1.0, self.cut)
            tried = torch.from_numpy(branches.returns) - value[plan.step]
            if self.cut is not None:
                tried = tried + torch.from_numpy(branches.left) * following
            branched = batch.gradient(self.estimator, plan, own, tried)
            # a step that branches has its estimator's credit instead of the advantage, not besides
            grad[plan.played] = branched[plan.played]
        return grad, lambda: (self.values(batch.observations) - targets).square().sum() / 2


def generalized_advantages(
    batch: TrueEpisodes,
    value: Tensor,
    last: Tensor,
    gamma: float,
    trace: float,
    steps: int | None = None,
) -> Tensor:
    """[T]: sum_{i<n} (gamma lambda)^i delta_{t+i} with delta_t = r_t + gamma V(s_{t+1}) - V(s_t),
    from the values [T] and those [episodes] after the end.

    With lambda = 1 and without n it is the return to the end of the episode less V(s_t):
    no value follows the time limit.
    """
    whole = trace == 1 and steps is None
    parts = []
    for rewards, ahead in _by_episode(batch, value, torch.zeros_like(last) if whole else last):
        decay = gamma * trace
        # in NumPy from the end: T small steps cost more in PyTorch
        sums = discounted(rewards + gamma * ahead[1:] - ahead[:-1], decay)
        if steps is not None and steps < len(sums):
            # those beyond t + n are taken away
            sums[:-steps] -= decay**steps * sums[steps:]
        parts.append(sums)
    return torch.from_numpy(np.concatenate(parts))


def _by_episode(batch: TrueEpisodes, value: Tensor, last: Tensor) -> list[tuple[Array, Array]]:
    """Each episode's rewards [L] and the values [L + 1] of its states; after an end by
    itself the value is 0.
    """
    # an episode's last value must not reach into the next episode
    edges = np.cumsum([0, *batch.lengths])
    rewards = batch.rewards.numpy()
    values = value.numpy()
    after = np.where(batch.terminated, 0.0, last.numpy())
    rows = zip(pairwise(edges.tolist()), after, strict=True)
    return [
        (rewards[begin:end], np.append(values[begin:end], final)) for (begin, end), final in rows
    ]


# ---------------------------------------------------------------- from a learned control variate


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
        # RELAX evaluates in the order of the played steps, and may do so in parts
        states = self._left[:rows]
        self._left = self._left[rows:]
        return self.network(torch.cat([states, s.flatten(1)], -1)).squeeze(-1)


class Relax(Branching):
    """RELAX, and the training of its control variate on the squared norm of the gradient."""

    def __init__(
        self,
        credit: ActionConditioned,
        inputs: int,
        hidden: tuple[int, ...],
        generator: torch.Generator,
    ) -> None:
        self.control = ActionValue(inputs, hidden, generator)
        super().__init__(RELAX(self.control, credit.temperature))

    def parameters(self) -> list[nn.Parameter]:
        return list(self.control.parameters())

    def gradient(self, batch: TrueEpisodes, branches: EpisodeBranches) -> tuple[Tensor, Loss]:
        assert branches.plan is not None
        # only the steps that the budget kept are asked about
        with self.control.at(batch.observations[branches.plan.played]):
            grad, _ = super().gradient(batch, branches)
        return grad.detach(), lambda: grad.square().sum()
