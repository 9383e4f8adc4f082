"""Environments that are a table of transitions: FrozenLake, CliffWalking and Taxi, many
episodes at once.

Each episode's randomness is a counter in its state: a copied state continues with the
same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from arsm.rl.environment import ENDLESS, Array, Environment, Randomness, Trail
from arsm_experiments.environments.arrays import ColumnLanes, Columns

GOLDEN, FIRST, SECOND = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True, eq=False)
class Tabular(Columns):
    """A table of outcomes: in state s, action a leads to the first outcome m with
    cumulative[s, a, m] above a uniform.

    Observations are one-hot vectors of the state, as for any Discrete space. The first
    state is Gymnasium's own for the same seed; random transitions have the same law as
    Gymnasium's, but are other draws.
    """

    name: str
    horizon: int
    first: Array
    """[S]: cumulative probabilities of the first state."""
    cumulative: Array
    """[S, A, M]."""
    following: Array
    """[S, A, M] uint64: the next state."""
    reward: Array
    """[S, A, M]."""
    ends: Array
    """[S, A, M]: whether the episode terminates."""
    mask: Array | None = None
    """[S, A]: the actions that are allowed, if the environment masks any."""
    randomness: Randomness = "same"

    @property
    def observations(self) -> int:
        """Numbers in an observation: the states."""
        return len(self.first)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an observation."""
        return (len(self.first),)

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of actions."""
        return (self.cumulative.shape[1],)

    @property
    def masks(self) -> bool:
        """Whether an action mask follows each observation."""
        return self.mask is not None

    def initial(self, generator: np.random.Generator) -> tuple[Array, Array]:
        """One episode's state [2], the place in the table and the counter, and its observation."""
        place = np.argmax(self.first > generator.random())
        state = np.array([place, generator.integers(2**63)], np.uint64)
        return state, self.observe(state[:1])[0]

    def observe(self, places: Array) -> Array:
        """[N] -> [N, S], with the masks [N, A] behind them if there are masks."""
        seen = np.zeros((len(places), self.observations))
        seen[np.arange(len(places)), places.astype(np.intp)] = 1.0
        return (
            seen
            if self.mask is None
            else np.concatenate([seen, self.mask[places.astype(np.intp)]], 1)
        )

    def encode(self, observation: Any) -> Array:
        """An observation as Gymnasium gives it, as a vector [S]."""
        vector = np.zeros(self.observations)
        vector[int(observation)] = 1.0
        return vector

    def advance(self, state: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """state [2, N], actions [N, 1] -> state, observations [N, D], rewards [N],
        terminated [N].
        """
        counter, uniform = _next_uniform(state[1])
        where = state[0].astype(np.intp), actions[:, 0]
        outcome = (*where, (self.cumulative[where] <= uniform[:, None]).sum(1))
        following = self.following[outcome]
        return (
            np.stack([following, counter]),
            self.observe(following),
            self.reward[outcome],
            self.ends[outcome],
        )

    def restore(
        self,
        trails: Sequence[Trail],
        episode: Array,
        step: Array,
        streams: Sequence[Sequence[int]],
        lanes: int,
    ) -> ColumnLanes:
        """The states at these steps, with fresh counters if randomness is fresh."""
        branches = super().restore(trails, episode, step, streams, lanes)
        if self.randomness == "fresh":
            fresh = [
                np.random.SeedSequence(stream).generate_state(1, np.uint64)[0] for stream in streams
            ]
            branches.columns[1] = np.array(fresh, np.uint64)
        return branches


def _next_uniform(counter: Array) -> tuple[Array, Array]:
    """Count on, and mix the counter to a uniform in [0, 1): SplitMix64 (Steele, Lea and
    Flood, 2014).
    """
    counter = counter + GOLDEN
    mixed = (counter ^ (counter >> np.uint64(30))) * FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
    mixed = mixed ^ (mixed >> np.uint64(31))
    return counter, (mixed >> np.uint64(11)) * 2.0**-53


def make_table(name: str, horizon: int, randomness: Randomness) -> Environment:
    """One of Gymnasium's environments by its name."""
    if horizon == ENDLESS:
        raise ValueError(f"{name} has no time limit; give one as horizon.")
    with closing(gymnasium.make(name, max_episode_steps=-1, disable_env_checker=True)) as env:
        return tabulate(env, name, horizon, randomness)


def tabulate(env: Any, name: str, horizon: int, randomness: Randomness) -> Tabular:
    """The table of one of Gymnasium's environments."""
    base, info = env.unwrapped, env.reset(seed=0)[1]
    states, actions = len(base.P), len(base.P[0])
    most = max(len(outcomes) for row in base.P.values() for outcomes in row.values())
    cumulative, reward = np.ones((states, actions, most)), np.zeros((states, actions, most))
    following, ends = (
        np.zeros((states, actions, most), np.uint64),
        np.zeros((states, actions, most), bool),
    )
    for s, row in base.P.items():
        for a, outcomes in row.items():
            chances, to, paid, over = zip(*outcomes, strict=True)
            cell = (s, a, slice(len(outcomes)))
            cumulative[cell] = [*np.cumsum(chances)[:-1], 1.0]
            following[cell], reward[cell], ends[cell] = to, paid, over
    mask = (
        np.array([base.action_mask(s) for s in range(states)], float)
        if "action_mask" in info
        else None
    )
    first = np.cumsum(base.initial_state_distrib)
    return Tabular(name, horizon, first, cumulative, following, reward, ends, mask, randomness)
