"""Playing true episodes and their rollouts in lock step, with the policy in NumPy.

Every rollout draws its noise from a stream of its own, and actions are chosen by the library's fixed-point race, so
that who plays a rollout, and beside which others, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import process_time

import numpy as np

from arsm.noise import LOWEST, RESOLUTION
from arsm.rl.branching import Array, EnvironmentFailure, Trail
from arsm.rl.environments import Environment

# as arrays, which NumPy takes faster than Python's numbers
ZERO, UNITS = np.array(0.0), np.array(1 / RESOLUTION)


# ---------------------------------------------------------------- the policy


@dataclass(frozen=True, eq=False)
class Policy:
    """An MLP with ReLUs in NumPy, from observations [N, D] to logits [N, K, C]."""

    layers: tuple[tuple[Array, Array], ...]
    """(weight [in, out], bias [out]) each, float64."""
    choices: tuple[int, ...]
    """The number of categories of each of the K actions; C is the largest, the rest are masked."""

    def logits(self, observations: Array) -> Array:
        x = observations
        for weight, bias in self.layers[:-1]:
            x = x.dot(weight)
            x += bias
            np.maximum(x, ZERO, out=x)
        weight, bias = self.layers[-1]
        x = x.dot(weight)
        x += bias
        return x.reshape(len(x), len(self.choices), -1)

    def act(self, logits: Array, noise: Array) -> Array:
        """argmin_i (a_i - phi_i), in units of the race's resolution: logits and noise [N, K, C] -> [N, K]."""
        top = logits[..., :1]
        for c in range(1, logits.shape[-1]):  # for the few actions there are, faster than a reduction
            top = np.maximum(top, logits[..., c : c + 1])
        phi = logits - top
        phi *= UNITS  # the race's clamp below 2^11 is left out: nobody wins from there
        np.rint(phi, out=phi)
        if self.masked is not None:
            phi[:, self.masked] = -np.inf
        return (noise - phi).argmin(-1)

    @cached_property
    def masked(self) -> Array | None:
        """[K, C]: where an action has fewer categories than the largest; None if all have as many."""
        most = max(self.choices)
        return None if min(self.choices) == most else np.arange(most) >= np.array(self.choices)[:, None]


def race_units(log_pi: Array) -> Array:
    """a = ln pi in whole units of the race's resolution, exact in float64."""
    return np.rint(np.maximum(log_pi, LOWEST / 2) / RESOLUTION)


# ---------------------------------------------------------------- true episodes


@dataclass(frozen=True, eq=False)
class Episode:
    """A true episode of T steps."""

    observations: Array
    """[T, D]: what each action was chosen on."""
    logits: Array
    """[T, K, C]."""
    actions: Array
    """[T, K]."""
    rewards: Array
    """[T]."""
    terminated: bool
    """Whether it ended by itself, not at the time limit."""
    last_observation: Array
    """[D]: after the last action."""
    trail: Trail

    def returns(self, gamma: float) -> Array:
        """[T]: discounted, from each step on."""
        returns, total = np.empty(len(self.rewards)), 0.0
        for t in range(len(self.rewards) - 1, -1, -1):
            total = self.rewards[t] + gamma * total
            returns[t] = total
        return returns


def play_episodes(environment: Environment, policy: Policy, seeds: Sequence[int], noise: Array) -> list[Episode]:
    """Play true episodes in lock step; noise [N, horizon, K, C] in race units."""
    lanes, seen = environment.start(seeds)
    owner: Array = np.arange(len(seeds))
    steps: list[tuple[Array, ...]] = []
    ended: dict[int, tuple[bool, Array]] = {}
    for time in range(environment.horizon):
        logits = policy.logits(seen)
        actions = policy.act(logits, noise[owner, time])
        state = getattr(lanes, "state", None)
        following, rewards, terminated = lanes.step(actions)
        steps.append((owner, seen, logits, actions, rewards, *(() if state is None else (state.T,))))
        seen = following
        over = terminated if time + 1 < environment.horizon else np.ones_like(terminated)
        if np.count_nonzero(over):
            for lane in over.nonzero()[0]:
                ended[int(owner[lane])] = (bool(terminated[lane]), seen[lane])
            keep = (~over).nonzero()[0]
            if not len(keep):
                break
            lanes.drop(keep)
            owner, seen = owner[keep], seen[keep]
    played = np.concatenate([step[0] for step in steps])
    columns = [np.concatenate(column) for column in list(zip(*steps, strict=True))[1:]]
    episodes = []
    for number, seed in enumerate(seeds):
        seen, logits, actions, rewards, *state = (column[played == number] for column in columns)
        _check_finite(environment, "a reward", rewards)
        _check_finite(environment, "an observation", seen)
        terminated, last = ended[number]
        trail = Trail(seed, actions, state[0].T if state else None)
        episodes.append(Episode(seen, logits, actions, rewards, terminated, last, trail))
    return episodes


def _check_finite(environment: Environment, what: str, values: Array) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        raise EnvironmentFailure(f"{environment.name} gave {what} of {values[~finite][0]}; it must be a finite number.")


# ---------------------------------------------------------------- rollouts


@dataclass(frozen=True, eq=False)
class Branches:
    """R rollouts: where they leave their true episodes, and the action they take there. Sorted by episode and step."""

    trails: tuple[Trail, ...]
    episode: Array
    """[R]."""
    step: Array
    """[R]."""
    action: Array
    """[R, K]."""
    key: int
    """The stream of the noise, 64 bits; rollout number r draws from stream (key, number[r])."""
    number: Array
    """[R]."""
    gamma: float
    noise: Array | None = None
    """[episodes, horizon, K, C]: the true episodes' noise in race units, where rollouts share it."""

    def __len__(self) -> int:
        return len(self.step)

    def part(self, index: Array) -> Branches:
        """Some of the rollouts."""
        chosen = {name: getattr(self, name)[index] for name in ("episode", "step", "action", "number")}
        return replace(self, **chosen)

    def noise_of(self, rollout: int, horizon: int, categories: int) -> Array:
        """[horizon, K, C] in race units, of which the steps after this rollout's first are used."""
        if self.noise is not None:
            return self.noise[self.episode[rollout]]
        stream = np.random.Generator(np.random.Philox(key=self.key << 64 | int(self.number[rollout])))
        drawn = np.zeros((horizon, self.action.shape[1], categories))
        rest = horizon - int(self.step[rollout]) - 1
        exponential = stream.standard_exponential((rest, *drawn.shape[1:]))
        drawn[horizon - rest :] = race_units(np.log(np.maximum(exponential, np.finfo(np.float64).tiny)))
        return drawn


@dataclass(frozen=True, eq=False)
class Played:
    """What rollouts gave."""

    returns: Array
    """[R]: discounted, from the branch on."""
    steps: int
    """How many environment steps they took, those on the way to the branches not counted."""
    cpu_seconds: float = 0.0
    """What other processes spent on them."""


def play_elsewhere(environment: Environment, policy: Policy, branches: Branches) -> Played:
    """As `play_rollouts`, in a process of its own, whose time is counted."""
    begin = process_time()
    played = play_rollouts(environment, policy, branches)
    return replace(played, cpu_seconds=process_time() - begin)


def play_rollouts(environment: Environment, policy: Policy, branches: Branches) -> Played:
    """Play rollouts in lock step, one call of the policy a step; a lane that is done takes the next rollout."""
    total = len(branches)
    if not total:
        return Played(np.zeros(0), 0)
    count = min(total, environment.lanes or total)
    horizon, categories = environment.horizon, max(policy.choices)
    lanes = environment.branch(branches.trails, branches.episode, branches.step, count)
    noise = np.stack([branches.noise_of(r, horizon, categories) for r in range(count)])
    owner: Array = np.arange(count)
    slot: Array = np.arange(count)
    time: Array = branches.step[:count].copy()
    result: Array = np.zeros(count)
    factor: Array = np.ones(count)
    steps, following = 0, count
    returns = np.empty(total)
    actions = branches.action[:count]
    until_limit = horizon - int(time.max())
    while True:
        seen, rewards, terminated = lanes.step(actions)
        result += factor * rewards
        factor *= branches.gamma
        time += 1
        steps += len(time)
        until_limit -= 1
        fresh: list[int] = []
        if not until_limit or np.count_nonzero(terminated):
            over = terminated | (time >= horizon)
            done = over.nonzero()[0]
            returns[owner[done]] = result[done]
            for lane in done.tolist():
                if following < total:
                    lanes.restart(lane)
                    owner[lane], time[lane], result[lane], factor[lane] = following, branches.step[following], 0.0, 1.0
                    noise[slot[lane]] = branches.noise_of(following, horizon, categories)
                    over[lane] = False
                    fresh.append(lane)
                    following += 1
            if np.count_nonzero(over):
                keep = (~over).nonzero()[0]
                if not len(keep):
                    break
                fresh = [lane for lane in range(len(keep)) if keep[lane] in fresh]
                lanes.drop(keep)
                owner, slot, time, result, factor = (x[keep] for x in (owner, slot, time, result, factor))
                seen = seen[keep]
            until_limit = horizon - int(time.max())
        actions = policy.act(policy.logits(seen), noise[slot, time])
        if fresh:
            actions[fresh] = branches.action[owner[fresh]]
    _check_finite(environment, "a reward", returns)
    return Played(returns, steps)
