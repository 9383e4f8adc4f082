"""What an agent learns with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Learning:
    """How an agent learns, whatever its optimizer."""

    episodes_an_iteration: int = 1
    """True episodes whose gradients are averaged before each update."""
    gamma: float = 0.99
    """What a reward one step later counts."""
    reward_scale: float = 1.0
    """What rewards are multiplied by before anything is learned from them; returns are reported as they are."""
    entropy: float = 0.0
    """The weight of the policy's entropy, summed over steps, in what is maximised."""
    hidden: tuple[int, ...] = (10, 10)
    """Hidden layers of policy and critic, with ReLUs; none makes both linear."""
    weighted: bool = True
    """On, the steps that the budget keeps weigh M/|H|, so that the gradient is unbiased; off, 1, as in the paper."""
    discounting: Literal["none", "gamma^t"] = "none"
    """Weight step t by gamma^t, as the discounted objective has it, or not, as the paper's algorithm does."""
    common_random_numbers: bool = False
    """Let rollouts draw the same noise as the true episode at the same time."""


@dataclass(frozen=True)
class Settings(Learning):
    """What an agent learns with."""

    budget: int | None = 16
    """S_max: the most rollouts a true episode; None for all."""
    learning_rate: float = 0.01
    optimizer: Literal["adam", "rmsprop"] = "adam"
    decay_over: int | None = None
    """Let the learning rate fall linearly to 0 over this many true episodes; None keeps it."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "decay_over", "episodes_an_iteration"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}.")
        if not isinstance(self.hidden, (tuple, list)) or not all(isinstance(n, int) and n >= 1 for n in self.hidden):
            raise ValueError(f"hidden must be the sizes of layers, such as (10, 10), but is {self.hidden}.")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], but is {self.gamma}.")
        for name in ("learning_rate", "reward_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, but is {getattr(self, name)}.")
        if not math.isfinite(self.entropy):
            raise ValueError(f"entropy must be finite, but is {self.entropy}.")
        for name, known in (("optimizer", ("adam", "rmsprop")), ("discounting", ("none", "gamma^t"))):
            if getattr(self, name) not in known:
                raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}", but is "{getattr(self, name)}".')
