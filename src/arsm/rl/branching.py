"""Branching: go back to any step of an episode and take another action there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ENDLESS = 100_000
"""The horizon of an environment that ends by itself; an episode that reaches it is an error."""


class EnvironmentFailure(RuntimeError):
    """An environment raised an error, or returned a value that cannot be used."""


def check_finite(environment: str, what: str, values: Array) -> None:
    """Refuse a NaN or infinity that an environment gave."""
    finite = np.isfinite(values)
    if not finite.all():
        raise EnvironmentFailure(
            f"{environment} gave {what} of {values[~finite][0]}; it must be a finite number."
        )


def discounted(rewards: Array, gamma: float) -> Array:
    """[T]: the discounted sum of the rewards [T] from each step on."""
    sums, total = [], 0.0
    for reward in rewards[::-1].tolist():
        total = reward + gamma * total
        sums.append(total)
    return np.array(sums[::-1])


@dataclass(frozen=True)
class Trail:
    """How to get back to any step of a true episode."""

    seed: int
    actions: Array
    """[T, K]."""
    states: Array | None = None
    """[S, T], where the environment keeps its state in an array."""
    begin: Any = None
    """A snapshot after the reset, where there is one: a reset with a seed takes long in
    Atari games.
    """
    rewards: Array | None = None
    """[T]: where they are known, going back to a step must give them again."""
    observations: Array | None = None
    """[T, D]: likewise, what each action was chosen on."""

    def __getstate__(self) -> dict[str, Any]:
        # other processes reset, and observations may be large
        return {**vars(self), "begin": None, "observations": None}


class Replays:
    """An environment that goes back to a step faster than by calling its own step."""

    def replay(self, actions: Sequence[Any]) -> None:
        """Take these actions; only the state afterwards matters."""
        raise NotImplementedError


class Lanes(Protocol):
    """Episodes that are played in lock step."""

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Take actions [N, K]: observations [N, D], rewards [N], terminated [N], and
        over [N], truncated or not.
        """
        ...

    def drop(self, keep: Array) -> None:
        """Keep only these lanes."""
        ...

    def restart(self, lane: int) -> None:
        """Put the next branch in this lane."""
        ...
