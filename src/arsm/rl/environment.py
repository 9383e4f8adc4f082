"""The `Environment` protocol: episodes in lanes side by side, and the way back to any of
their steps.

`arsm.rl.stepped` implements it for any Gymnasium environment. A package offers faster
ones by entry points of the group "arsm.environments", which `make_environment` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Randomness = Literal["same", "fresh"]
"""Whether a branch goes on with the true episode's random numbers or with its own."""

ENDLESS = 100_000
"""The horizon of an environment that ends by itself; an episode that reaches it is an error."""


@dataclass(frozen=True)
class Trail:
    """The way back to any of the T steps of a true episode.

    Attributes:
        seed: Of its reset.
        actions: [T, K].
        states: What `Lanes.state` gave before the first of its actions: for all T of
            them, for the first alone, or for none.
        rewards: [T]; where they are known, going back must give them again.
        observations: [T, D], what each action was chosen on, likewise.
    """

    seed: int
    actions: Array
    states: Sequence[Any] | Array = ()
    rewards: Array | None = None
    observations: Array | None = None

    def __getstate__(self) -> dict[str, Any]:
        # other processes reset instead of taking a snapshot, and observations may be large
        states = self.states if isinstance(self.states, np.ndarray) else ()
        return {**vars(self), "states": states, "observations": None}


class Lanes(Protocol):
    """N episodes in lock step, one per lane."""

    @property
    def replayed(self) -> int:
        """Steps that were played again so far to reach the branches."""
        ...

    def state(self) -> Sequence[Any] | Array | None:
        """The state of each lane, before its next action: an array [N, ...] or a list
        [N]; None where none is kept.

        `Environment.restore` goes back by the states that were kept, and by the seed
        and the actions where none was.
        """
        ...

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Take actions [N, K].

        Returns observations [N, D] with the masks [N, K C] behind them if there are
        masks, rewards [N], terminated [N], and over [N], which is also true where an
        episode was truncated.
        """
        ...

    def keep(self, lanes: Array) -> None:
        """Keep only these lanes, in this order."""
        ...

    def restore(self, lane: int) -> None:
        """Put the next branch of `Environment.restore` into this lane."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A simulator that plays episodes side by side and can return to any of their steps.

    An episode is determined by its seed and its actions, whatever is played beside it.
    A branch that takes the true actions from its step on gives what the true episode
    gave, bit for bit, unless its random numbers are fresh ones.
    """

    # ------------------------------------------------------------ spaces and masks

    @property
    def name(self) -> str:
        """The environment's name, for messages and files."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an encoded observation."""
        ...

    @property
    def observations(self) -> int:
        """D, the numbers in an observation: the product of its shape."""
        ...

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of categories of each of the K actions; C is the largest."""
        ...

    @property
    def masks(self) -> bool:
        """Whether an action mask [K C] of 0 and 1 follows each observation."""
        ...

    @property
    def agents(self) -> int:
        """Agents whose observations and actions lie side by side; 1 for a single one."""
        ...

    @property
    def horizon(self) -> int:
        """The step at which an episode stops at the latest."""
        ...

    def encode(self, observation: Any) -> Array:
        """An observation from outside as a vector [D]."""
        ...

    def decode(self, actions: Array) -> list[Any]:
        """Actions [N, K] for outside."""
        ...

    # ------------------------------------------------------------ episodes and branches

    @property
    def lanes(self) -> int | None:
        """The most lanes of one batch; None for any number."""
        ...

    def reset(self, seeds: Sequence[int]) -> tuple[Lanes, Array]:
        """Fresh episodes, one lane each, and their first observations [N, D] with masks
        behind them if there are masks.
        """
        ...

    def restore(
        self,
        trails: Sequence[Trail],
        episode: Array,
        step: Array,
        streams: Sequence[Sequence[int]],
        lanes: int,
    ) -> Lanes:
        """Branches: lanes at steps [R] of episodes [R], numbered as the trails.

        The first `lanes` of them start at once, the others follow by `Lanes.restore`,
        in the order given: by episode and step, which lets them share the way there.
        Each has a stream of fresh random numbers, if the environment wants them.
        """
        ...

    def close(self) -> None:
        """Close whatever is open; playing opens it again."""
        ...


class EnvironmentFailure(RuntimeError):
    """An environment raised an error, or returned a value that cannot be used."""


def strayed(environment: str, place: int) -> EnvironmentFailure:
    """An episode, played again, gave something else at this place."""
    return EnvironmentFailure(
        f"{environment} gave something else at step {place + 1} when an episode's seed and actions "
        "were played again: its instances share state, or reset(seed=...) leaves some of it as it "
        "was; keep all state in attributes of the instance, and let reset set it."
    )


def check_finite(environment: str, what: str, values: Array) -> None:
    """Refuse a NaN or infinity that an environment gave."""
    # one NaN would reach every weight of the policy
    finite = np.isfinite(values)
    if not finite.all():
        raise EnvironmentFailure(
            f"{environment} gave {what} of {values[~finite][0]}; it must be a finite number."
        )


class Replays:
    """A Gymnasium environment that goes back to a step faster than by its own step."""

    def replay(self, actions: Sequence[Any]) -> None:
        """Take these actions; only the state afterwards matters."""
        raise NotImplementedError
