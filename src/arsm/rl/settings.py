"""Settings of an agent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from arsm.checks import check_count, check_seed, is_whole


@dataclass(frozen=True)
class Learning:
    """How an agent learns, apart from its optimizer."""

    episodes_an_iteration: int = 1
    """True episodes per update. 0 chooses 4 to 64 for each iteration, about 1,000 steps if they are as long as
    the last iteration's, or with `Proximal` 4 to 128, about 2,000 steps."""
    gamma: float = 0.99
    """Discount factor."""
    reward_scale: float | None = 1.0
    """Factor of the rewards for learning; reported returns are unscaled. None divides by the standard deviation of the
    returns of earlier iterations."""
    entropy: float = 0.0
    """Weight of the policy's entropy in the objective, averaged over the actions of a step and summed over steps. It
    falls with the learning rate."""
    hidden: tuple[int, ...] = (10, 10)
    """Widths of the hidden layers of policy and critic, with ReLUs; none makes both linear."""
    weighted: bool = True
    """Reweight the steps that the budget keeps by M/|H|, which keeps the gradient unbiased; the paper does not."""
    discounting: Literal["none", "gamma^t"] = "none"
    """Weight step t by gamma^t, as the discounted objective has it, or not, as the paper's algorithm does."""
    common_random_numbers: bool = False
    """Let rollouts draw the same noise as the true episode at the same time: unbiased, and usually less noisy."""


@dataclass(frozen=True)
class Settings(Learning):
    """Settings of an agent. The defaults are for a new environment; those of `Learning` are the paper's."""

    episodes_an_iteration: int = 0
    reward_scale: float | None = None
    entropy: float = 0.05
    hidden: tuple[int, ...] = (32, 32)
    common_random_numbers: bool = True
    budget: int | None = 8
    """S_max: the most rollouts per true episode; None for all."""
    learning_rate: float = 0.01
    optimizer: Literal["adam", "rmsprop"] = "adam"
    decay_over: int | Literal["learn"] | None = "learn"
    """Let the learning rate and the weight of the entropy fall linearly to 0 over each call of `learn`, or over this
    many true episodes; None keeps them."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "decay_over"):
            if getattr(self, name) is not None and (name, getattr(self, name)) != ("decay_over", "learn"):
                check_count(name, getattr(self, name))
        check_count("episodes_an_iteration", self.episodes_an_iteration, least=0)
        whole = isinstance(self.hidden, (tuple, list)) and all(is_whole(n) and n >= 1 for n in self.hidden)
        if not whole:
            raise ValueError(f"hidden must be the sizes of layers, such as (10, 10), but is {self.hidden}.")
        for name in ("gamma", "learning_rate", "reward_scale", "entropy"):
            value = getattr(self, name)
            if name == "reward_scale" and value is None:
                continue
            if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(value):
                raise ValueError(f"{name} must be a finite number, but is {value!r}.")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], but is {self.gamma}.")
        for name in ("learning_rate", "reward_scale"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, but is {getattr(self, name)}.")
        if not math.isfinite(self.entropy):
            raise ValueError(f"entropy must be a finite number, but is {self.entropy}.")
        for name, known in (("optimizer", ("adam", "rmsprop")), ("discounting", ("none", "gamma^t"))):
            if getattr(self, name) not in known:
                raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}", but is "{getattr(self, name)}".')
        check_seed(self.seed)
