"""CartPole and Acrobot for N episodes at once, their state in one array: branching is a copy of
columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from arsm.rl.environment import Array, Environment, Randomness, Trail


class Columns:
    """An environment whose state is an array [S, N], a column per episode."""

    agents: int = 1
    lanes: int | None = None
    """All at once: a batch of a thousand costs little more than one of ten."""

    @property
    def masks(self) -> bool:
        """Whether an action mask follows each observation."""
        return False

    def initial(self, generator: np.random.Generator) -> tuple[Array, Array]:
        """One episode's state [S] and observation [D]."""
        raise NotImplementedError

    def advance(self, state: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """state [S, N], actions [N, K] -> state, observations [N, D], rewards [N],
        terminated [N].
        """
        raise NotImplementedError

    def reset(self, seeds: Sequence[int]) -> tuple[ColumnLanes, Array]:
        """Fresh episodes, and their observations [N, D]."""
        fresh = [
            self.initial(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))))
            for seed in seeds
        ]
        states = np.stack([state for state, _ in fresh], 1)
        return ColumnLanes(self, states), np.stack([seen for _, seen in fresh])

    def restore(
        self,
        trails: Sequence[Trail],
        episode: Array,
        step: Array,
        streams: Sequence[Sequence[int]],
        lanes: int,
    ) -> ColumnLanes:
        """The states at these steps of these episodes."""
        states = np.concatenate([np.asarray(trail.states) for trail in trails])
        offset = np.cumsum([0, *(len(trail.states) for trail in trails)])
        return ColumnLanes(self, np.ascontiguousarray(states[offset[episode] + step].T))

    def decode(self, actions: Array) -> list[Any]:
        """The numbers of the actions."""
        return actions[:, 0].tolist()

    def close(self) -> None:
        """Nothing is open."""


class ColumnLanes:
    """Lanes of one environment of columns."""

    replayed: int = 0
    """None: a state is copied."""

    def __init__(self, environment: Columns, columns: Array) -> None:
        self.environment = environment
        self.columns = columns

    def state(self) -> Array:
        return self.columns.T

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        self.columns, seen, reward, terminated = self.environment.advance(self.columns, actions)
        return seen, reward, terminated, terminated

    def keep(self, lanes: Array) -> None:
        self.columns = self.columns.take(lanes, 1)

    def restore(self, lane: int) -> None:
        raise AssertionError("all branches of an array environment start at once")


@dataclass(frozen=True)
class Arrays(Columns):
    """An environment that is built of array operations."""

    name: str
    horizon: int

    observations: ClassVar[int]
    choices: ClassVar[tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an observation."""
        return (self.observations,)

    def encode(self, observation: Any) -> Array:
        """An observation as Gymnasium gives it, as a vector [D]."""
        try:
            return np.asarray(observation, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"An observation must have {self.observations} numbers, but is {observation!r}."
            ) from error


def make_cart_pole(name: str, horizon: int, randomness: Randomness) -> Environment:
    """CartPole; nothing is random after the reset."""
    return CartPole(name, horizon)


def make_acrobot(name: str, horizon: int, randomness: Randomness) -> Environment:
    """Acrobot; nothing is random after the reset."""
    return Acrobot(name, horizon)


FAR, TILTED = 2.4, 12 * 2 * math.pi / 360
FEW_POLES, FEW_LINKS = 8, 5  # up to here Python's own numbers are faster than arrays


class CartPole(Arrays):
    """Gymnasium's CartPole, bit for bit. Reference: Barto, Sutton and Anderson, 1983."""

    observations = 4
    choices = (2,)

    _far, _tilted = np.array(FAR), np.array(TILTED)
    _force = np.array([-10.0, 10.0])
    _seconds = np.array(0.02)

    def initial(self, generator: np.random.Generator) -> tuple[Array, Array]:
        state = generator.uniform(-0.05, 0.05, size=(4,))
        return state, _as_seen(state)

    def advance(self, state: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        if len(actions) <= FEW_POLES:
            return self._advance_few(state, actions)
        force = self._force.take(actions[:, 0])
        following = np.empty_like(state)
        following[::2] = state[1::2]
        following[1], following[3] = _cartpole_rates(
            np.cos(state[2]), np.sin(state[2]), state[3], force, *ARRAYS
        )
        following *= self._seconds
        following += state
        out = (np.abs(following[0]) > self._far) | (np.abs(following[2]) > self._tilted)
        return following, _as_seen(following.T), _ones(len(actions)), out

    def _advance_few(self, state: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """The same in Python's own numbers."""
        following, out = [], []
        for (place, speed, angle, turning), action in zip(
            state.T.tolist(), actions[:, 0].tolist(), strict=True
        ):
            force = 10.0 if action else -10.0
            push, turn = _cartpole_rates(
                float(np.cos(angle)), float(np.sin(angle)), turning, force, *NUMBERS
            )
            place, angle = place + 0.02 * speed, angle + 0.02 * turning
            following.append((place, speed + 0.02 * push, angle, turning + 0.02 * turn))
            out.append(abs(place) > FAR or abs(angle) > TILTED)
        states = np.array(following)
        return states.T, _as_seen(states), _ones(len(out)), np.array(out)


# the pole's mass times half its length, the total mass, gravity, 4/3, the pole's mass and half its
# length; of the numbers that meet arrays, arrays are the faster kind
NUMBERS = (0.05, 1.1, 9.8, 4.0 / 3.0, 0.1, 0.5)
ARRAYS = tuple(map(np.array, NUMBERS))


def _as_seen(states: Array) -> Array:
    """Rounded to what Gymnasium observes."""
    return states.astype(np.float32).astype(np.float64)


def _cartpole_rates(
    cos: Any,
    sin: Any,
    turning: Any,
    force: Any,
    moment: Any,
    total: Any,
    g: Any,
    ratio: Any,
    mass: Any,
    half: Any,
) -> tuple[Any, Any]:
    """The accelerations of the cart and of the pole's angle, of numbers or arrays."""
    push = (force + moment * (turning * turning) * sin) / total
    turn = (g * sin - cos * push) / (half * (ratio - mass * (cos * cos) / total))
    return push - moment * turn * cos / total, turn


@lru_cache(maxsize=1)  # as many lanes at one step as at the next
def _ones(count: int) -> Array:
    ones = np.ones(count)
    ones.flags.writeable = False
    return ones


class Acrobot(Arrays):
    """Gymnasium's Acrobot, bit for bit; its squares are powers, which x * x does not always match.

    Reference: Sutton, Generalization in reinforcement learning, 1996.
    """

    observations = 6
    choices = (3,)

    _fastest = np.array([[4 * np.pi], [9 * np.pi]])
    _step, _half, _sixth = np.array(0.2), np.array(0.2 / 2.0), np.array(0.2 / 6.0)

    def initial(self, generator: np.random.Generator) -> tuple[Array, Array]:
        state = generator.uniform(-0.1, 0.1, size=(4,)).astype(np.float32)
        # in float32, as Gymnasium's first observation
        cos, sin = (
            np.cos(state[:2]),
            np.sin(state[:2]),
        )
        seen = np.array([cos[0], sin[0], cos[1], sin[1], state[2], state[3]], dtype=np.float64)
        return state.astype(np.float64), seen

    def advance(self, state: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        state = (
            self._runge_kutta_few(state, actions)
            if len(actions) <= FEW_LINKS
            else self._runge_kutta(state, actions)
        )
        angles, speeds = state[:2], state[2:]
        while np.count_nonzero(np.abs(angles) > PI):
            np.subtract(angles, TWO_PI, out=angles, where=angles > PI)
            np.add(angles, TWO_PI, out=angles, where=angles < -PI)
        np.minimum(speeds, self._fastest, out=speeds)
        np.maximum(speeds, -self._fastest, out=speeds)
        cos = np.cos(angles)
        terminated = -cos[0] - np.cos(angles[1] + angles[0]) > 1.0
        seen = np.empty((len(actions), 6))
        seen[:, 0:4:2], seen[:, 1:4:2], seen[:, 4:] = cos.T, np.sin(angles).T, speeds.T
        return state, _as_seen(seen), terminated - 1.0, terminated

    def _runge_kutta(self, state: Array, actions: Array) -> Array:
        torque = actions[:, 0] - 1.0

        def rate(state: Array) -> Array:
            angle1, angle2, speed1, speed2 = state
            pull1, pull2 = np.cos(angle1 - HALF_PI), np.cos(angle1 + angle2 - HALF_PI)
            cos, sin = np.cos(angle2), np.sin(angle2)
            rate = np.empty_like(state)
            rate[:2] = state[2:]
            rate[2], rate[3] = _acrobot_rates(
                cos, sin, pull1, pull2, speed1, speed2, torque, np.float_power, LINK_ARRAYS
            )
            return rate

        k1 = rate(state)
        k2 = rate(state + self._half * k1)
        k3 = rate(state + self._half * k2)
        k4 = rate(state + self._step * k3)
        return state + self._sixth * (k1 + TWO * k2 + TWO * k3 + k4)

    def _runge_kutta_few(self, state: Array, actions: Array) -> Array:
        """The same in Python's own numbers."""
        following = []
        for start, action in zip(state.T.tolist(), actions[:, 0].tolist(), strict=True):
            torque = action - 1.0
            k: list[tuple[float, ...]] = []
            for far in (0.0, 0.1, 0.1, 0.2):
                at = [x + far * d for x, d in zip(start, k[-1], strict=True)] if k else start
                angle1, angle2, speed1, speed2 = at
                cos, pull1, pull2 = np.cos(
                    (angle2, angle1 - math.pi / 2, angle1 + angle2 - math.pi / 2)
                ).tolist()
                sin = float(np.sin(angle2))
                rates = _acrobot_rates(
                    cos, sin, pull1, pull2, speed1, speed2, torque, pow, LINK_NUMBERS
                )
                k.append((speed1, speed2, *rates))
            following.append(
                [
                    x + 0.2 / 6.0 * (a + 2 * b + 2 * c + d)
                    for x, a, b, c, d in zip(start, *k, strict=True)
                ]
            )
        return np.array(following).T.copy()


PI, HALF_PI, TWO_PI = np.array(np.pi), np.array(np.pi / 2), np.array(2 * np.pi)
# 2, 1/4, 1/2, 1, 5/4 and the pull on both joints, half and one and a half times gravity
LINK_NUMBERS = (2.0, 0.25, 0.5, 1.0, 1.25, 1.5 * 9.8, 0.5 * 9.8)
LINK_ARRAYS = tuple(map(np.array, LINK_NUMBERS))
TWO = LINK_ARRAYS[0]


def _acrobot_rates(
    cos: Any,
    sin: Any,
    pull1: Any,
    pull2: Any,
    speed1: Any,
    speed2: Any,
    torque: Any,
    power: Any,
    constants: tuple[Any, ...],
) -> tuple[Any, Any]:
    """The accelerations of two links of mass, length and inertia 1, the book's for the
    second; of numbers or arrays.
    """
    two, quarter, half, one, five_quarters, weight1, weight2 = constants
    d1 = quarter + (five_quarters + cos) + one + one
    d2 = quarter + half * cos + one
    phi2 = weight2 * pull2
    phi1 = -half * power(speed2, two) * sin - speed2 * speed1 * sin + weight1 * pull1 + phi2
    rate2 = torque + d2 / d1 * phi1 - half * power(speed1, two) * sin - phi2
    rate2 = rate2 / (five_quarters - power(d2, two) / d1)
    return -(d2 * rate2 + phi1) / d1, rate2
