"""Settings of an agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Literal

from arsm.checks import check_count, check_positive, check_seed, describe, is_whole
from arsm.options import closest


@dataclass(frozen=True)
class Learning:
    """Settings of an agent's learning, apart from its optimizer.

    Attributes:
        episodes_an_iteration: True episodes per update. 0 chooses 4 to 64 for each
            iteration, about 1,000 steps if they are as long as the last iteration's, or
            with `Value` 4 to 128, about 2,000 steps.
        gamma: Discount factor.
        reward_scale: Factor of the rewards for learning; reported returns are unscaled.
            None divides by the standard deviation of the returns of earlier iterations.
        entropy: Weight of the policy's entropy in the objective, averaged over the
            actions of a step and summed over steps. It falls with the learning rate.
        hidden: Widths of the hidden layers of policy and critic, with ReLUs; none makes
            both linear.
        weighted: Reweight the steps that the budget keeps by M/|H|, which keeps the
            gradient unbiased; the paper does not.
        discounting: Weight step t by gamma^t, as the discounted objective has it, or
            not, as the paper's algorithm does.
        common_random_numbers: Let rollouts draw the same noise as the true episode at
            the same time: unbiased, and usually less noisy.
    """

    episodes_an_iteration: int = 1
    gamma: float = 0.99
    reward_scale: float | None = 1.0
    entropy: float = 0.0
    hidden: tuple[int, ...] = (10, 10)
    weighted: bool = True
    discounting: Literal["none", "gamma^t"] = "none"
    common_random_numbers: bool = False


@dataclass(frozen=True)
class Settings(Learning):
    """Settings of an agent, with defaults for a new environment. `Learning` explains
    those that are not listed here.

    Attributes:
        budget: S_max: the most rollouts per true episode; None for all.
        decay_over: Let the learning rate and the weight of the entropy fall linearly to
            0 over each call of `learn`, or over this many true episodes; None keeps
            them.
        learning_rate: Of the policy, and of the credit's own networks.
        optimizer: "adam" or "rmsprop".
        seed: Of all randomness.
    """

    episodes_an_iteration: int = 0
    reward_scale: float | None = None
    entropy: float = 0.05
    hidden: tuple[int, ...] = (32, 32)
    common_random_numbers: bool = True
    budget: int | None = 8
    learning_rate: float = 0.01
    optimizer: Literal["adam", "rmsprop"] = "adam"
    decay_over: int | Literal["learn"] | None = "learn"
    seed: int = 0

    def __post_init__(self) -> None:
        # two words mean no count: None for no limit, "learn" for each call of learn
        if self.budget is not None:
            check_count("budget", self.budget)
        if self.decay_over is not None and self.decay_over != "learn":
            check_count("decay_over", self.decay_over)
        # 0 lets the agent choose
        check_count("episodes_an_iteration", self.episodes_an_iteration, least=0)
        _check_widths(self.hidden)
        _check_number("gamma", self.gamma)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], but is {self.gamma}.")
        _check_number("learning_rate", self.learning_rate)
        check_positive("learning_rate", self.learning_rate)
        # None leaves the scale to the returns
        if self.reward_scale is not None:
            _check_number("reward_scale", self.reward_scale)
            check_positive("reward_scale", self.reward_scale)
        _check_number("entropy", self.entropy)
        if not math.isfinite(self.entropy):
            raise ValueError(f"entropy must be a finite number, but is {self.entropy}.")
        _check_word("optimizer", self.optimizer, ("adam", "rmsprop"))
        _check_word("discounting", self.discounting, ("none", "gamma^t"))
        check_seed(self.seed)
        for name in ("weighted", "common_random_numbers"):
            # "no" is true to Python
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, but is {getattr(self, name)!r}.")


def _check_widths(hidden: object) -> None:
    """Require widths of layers; none at all is a linear network."""
    if not isinstance(hidden, (tuple, list)) or not all(is_whole(n) and n >= 1 for n in hidden):
        raise ValueError(f"hidden must be the sizes of layers, such as (10, 10), but is {hidden}.")


def _check_number(name: str, value: object) -> None:
    """Require a number; each setting has its own limits."""
    # True is a number to Python, and never meant as one
    if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(f"{name} must be a finite number, but is {value!r}.")


def _check_word(name: str, value: object, known: tuple[str, str]) -> None:
    """Require one of two words."""
    if value not in known:
        raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}", but is "{value}".')


ELSEWHERE = {
    "lr": "use learning_rate=",
    "alpha": "use learning_rate=",
    "ent_coef": "use entropy=",
    "discount": "use gamma=",
    "net_arch": "use hidden=",
    "policy_kwargs": "use hidden=, or give a module as policy=",
    "n_envs": "episodes are played side by side already; use episodes_an_iteration= for how many",
    "num_envs": "episodes are played side by side already; use episodes_an_iteration= for how many",
    "n_steps": "use episodes_an_iteration=, the true episodes per update",
    "batch_size": "use episodes_an_iteration=, the true episodes per update",
    "total_timesteps": "use learn(steps=...)",
    "tensorboard_log": "use learn(tensorboard_log=...)",
    "verbose": "use learn(progress=...)",
    "device": "give a module on that device as policy=",
    "max_episode_steps": "use horizon=",
    "env": "use environment=",
    "method": "use credit=",
    "estimator": "use credit=",
}
"""Settings of other libraries, and their names here."""
ARGUMENTS = (
    *("environment", "credit", "policy", "settings", "horizon", "encoder", "snapshot"),
    *("randomness", "options", "shared_policy", "engine", "workers", "address"),
)
"""Arguments of `PolicyGradient` that are no settings."""


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with changes by name; an unknown name is refused with the likeliest one."""
    if not isinstance(settings, Settings):
        raise TypeError(f"settings must be an arsm.rl.Settings, but are a {describe(settings)}.")
    known = [each.name for each in fields(Settings)]
    for name in changes:
        if name in known:
            continue
        # a misspelled argument arrives here too, as if it were a setting
        meant = closest(name, [*known, *ARGUMENTS])
        if name in ELSEWHERE:
            hint = ELSEWHERE[name]
        elif meant is not None:
            hint = f'did you mean "{meant}"?'
        else:
            hint = f"known are {', '.join(known)}."
        end = "" if hint[-1] in ".?" else "."
        raise TypeError(f'PolicyGradient has no setting "{name}": {hint}{end}')
    return replace(settings, **changes)
