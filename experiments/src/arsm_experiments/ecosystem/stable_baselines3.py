"""Stable-Baselines3's A2C on a decision process that can be enumerated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arsm.referee.bounds import bernstein, student
from arsm_experiments.ecosystem.entry import Entry, Found, from_package

RATE = 1e-6
FIRST, SECOND = [0.2, -0.5], [[1.0, -0.3], [0.4, 0.9]]
"""Rewards of both steps, by state and action."""


def a2c(discount: float) -> Callable[[], Found]:
    """A2C's gradient of its policy on a decision process of two steps, against the enumerated one.

    The policy is a table (one-hot observations, one linear layer). The loss is a mean over steps,
    hence half the sum.
    """

    def run() -> Found:
        agent = standing_agent(discount)
        weight = agent.policy.action_net.weight
        _, callback = agent._setup_learn(10**9, None)
        draws = []
        for _ in range(400):
            agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, n_rollout_steps=64)
            agent.train()
            draws.append(-weight.grad.T.flatten().double())
        return compared(torch.stack(draws), enumerated_gradient(weight, discount) / 2)

    return run


def two_steps() -> Any:
    """In state 0 an action leads to state 1 or 2, there another one ends the episode; both steps
    are rewarded.
    """
    np, gym = from_package("numpy"), from_package("gymnasium")

    class TwoSteps(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def _see(self) -> Any:
            return np.eye(3, dtype=np.float32)[self.state]

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
            self.state = 0
            return self._see(), {}

        def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
            if self.state == 0:
                reward, self.state, done = FIRST[action], 1 + int(action), False
            else:
                reward, done = SECOND[self.state - 1][action], True
            return self._see(), reward, done, False, {}

    return TwoSteps()


def standing_agent(discount: float) -> Any:
    """An agent of A2C whose policy is a table that does not move."""
    agent = from_package("stable_baselines3").A2C(
        "MlpPolicy",
        two_steps(),
        n_steps=64,
        gamma=discount,
        gae_lambda=1.0,
        ent_coef=0.0,
        vf_coef=0.0,
        max_grad_norm=math.inf,
        use_rms_prop=False,
        seed=0,
        policy_kwargs={"net_arch": [], "ortho_init": False},
    )
    agent.policy.optimizer = torch.optim.SGD(agent.policy.parameters(), lr=0.0)
    agent.lr_schedule = lambda _: 0.0
    with torch.no_grad():
        agent.policy.action_net.bias.zero_()
        weight = torch.tensor([[0.4, -0.3, 0.1], [-0.4, 0.3, -0.1]])
        agent.policy.action_net.weight.copy_(weight)
        agent.policy.value_net.weight.copy_(torch.tensor([[0.3, 0.1, -0.2]]))
    return agent


def enumerated_gradient(weight: Tensor, discount: float) -> Tensor:
    """The gradient of the discounted return in the logits, the weights [2, 3] of a layer."""
    logits = weight.detach().double().T.clone().requires_grad_()
    p = logits.softmax(-1)
    later = (p[1:] * torch.tensor(SECOND, dtype=p.dtype)).sum(-1)
    value = (p[0] * (torch.tensor(FIRST, dtype=p.dtype) + discount * later)).sum()
    return torch.autograd.grad(value, logits)[0].flatten()


def compared(draws: Tensor, truth: Tensor) -> Found:
    """Independent draws [n, entries] against their mean: the columns of an audit."""
    n, failure = len(draws), RATE / (truth.numel() + 1)
    error = draws.mean(0) - truth
    spread = draws.amax(0) - draws.amin(0)
    width = torch.maximum(
        bernstein(draws.var(0), spread, n, failure), student(failure, n - 1) * draws.std(0) / n**0.5
    ).clamp_min(1e-6)
    along = (draws * truth).sum(1) / truth.square().sum()
    half = float(bernstein(along.var(), along.amax() - along.amin(), n, failure))
    s = float(along.mean())
    wrong = bool((error.abs() > width).any()) or abs(s - 1) > half
    entries = ", ".join(
        f"{a:.4f} for {b:.4f}" for a, b in zip(draws.mean(0).tolist(), truth.tolist(), strict=True)
    )
    finding = f"Means and what they should be: {entries}." if wrong else ""
    verdict = "wrong" if wrong else "unbiased"
    return Found(verdict, finding, f"{s:.3f} [{s - half:.3f}, {s + half:.3f}]", f"{n:,}")


ENTRIES = tuple(
    Entry(
        f"stable-baselines3: A2C, two steps, gamma = {discount:g}",
        "stable-baselines3",
        "stable_baselines3",
        claim,
        a2c(discount),
    )
    for discount, claim in (
        (1.0, "the policy gradient"),
        (0.7, "A3C's gradient, which leaves out discount^t; no claim of being unbiased"),
    )
)
