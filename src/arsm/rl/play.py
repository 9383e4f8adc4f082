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
from arsm.rl.branching import Array, Trail, check_finite
from arsm.rl.environments import Environment

# as arrays, which NumPy takes faster than Python's numbers
ZERO, UNITS = np.array(0.0), np.array(1 / RESOLUTION)
TINY = np.finfo(np.float64).tiny
FEW_ROWS = 64
BLOCK = 64
"""Steps of noise that are drawn at once."""


# ---------------------------------------------------------------- the policy


@dataclass(frozen=True, eq=False)
class Policy:
    """An MLP with ReLUs in NumPy, from observations [N, D] to logits [N, K, C]."""

    layers: tuple[tuple[Array, Array], ...]
    """(weight [in, out], bias [out]) each, float64."""
    choices: tuple[int, ...]
    """The number of categories of each of the K actions; C is the largest, the rest are masked."""

    def logits(self, observations: Array) -> Array:
        x, rows = observations, len(observations)
        few = rows <= FEW_ROWS
        layers = self._repeated if few else self.layers
        for weight, bias in layers[:-1]:
            x = x.dot(weight)
            x += bias[:rows] if few else bias
            np.maximum(x, ZERO, out=x)
        weight, bias = layers[-1]
        x = x.dot(weight)
        x += bias[:rows] if few else bias
        return x.reshape(rows, len(self.choices), -1)

    @cached_property
    def _repeated(self) -> tuple[tuple[Array, Array], ...]:
        """The layers with a bias for every row of a small batch: arrays of one shape add up in half the time."""
        return tuple((weight, np.repeat(bias[None], FEW_ROWS, 0)) for weight, bias in self.layers)

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
        returns, total = [], 0.0
        for reward in self.rewards[::-1].tolist():
            total = reward + gamma * total
            returns.append(total)
        return np.array(returns[::-1])


def play_episodes(environment: Environment, policy: Policy, seeds: Sequence[int], noise: Array) -> list[Episode]:
    """Play true episodes in lock step; noise [N, horizon, K, C] in race units."""
    lanes, seen = environment.start(seeds)
    noise = noise.swapaxes(0, 1).copy()
    owner: Array = np.arange(len(seeds))
    steps: list[tuple[Array, ...]] = []
    ended: dict[int, tuple[bool, Array]] = {}
    for time in range(environment.horizon):
        logits = policy.logits(seen)
        actions = policy.act(logits, noise[time])
        state = getattr(lanes, "state", None)
        following, rewards, terminated, over = lanes.step(actions)
        steps.append((owner, seen, logits, actions, rewards, *(() if state is None else (state.T,))))
        seen = following
        if time + 1 == environment.horizon:
            over = np.ones_like(over)
        if np.count_nonzero(over):
            for lane in over.nonzero()[0]:
                ended[int(owner[lane])] = (bool(terminated[lane]), seen[lane])
            keep = (~over).nonzero()[0]
            lanes.drop(keep)
            if not len(keep):
                break
            owner, seen, noise = owner[keep], seen[keep], noise.take(keep, 1)
    played = np.concatenate([step[0] for step in steps])
    columns = [np.concatenate(column) for column in list(zip(*steps, strict=True))[1:]]
    episodes = []
    for number, seed in enumerate(seeds):
        seen, logits, actions, rewards, *state = (column[played == number] for column in columns)
        check_finite(environment.name, "a reward", rewards)
        check_finite(environment.name, "an observation", seen)
        terminated, last = ended[number]
        trail = Trail(seed, actions, state[0].T if state else None)
        episodes.append(Episode(seen, logits, actions, rewards, terminated, last, trail))
    return episodes


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


class OwnNoise:
    """Noise of the rollouts in the lanes, each from its own stream, a block ahead, as few last until the horizon."""

    def __init__(self, branches: Branches, lanes: int, categories: int) -> None:
        self._branches = branches
        self._shape = branches.action.shape[1], categories
        self._streams = [self._stream(rollout) for rollout in range(lanes)]
        self._block, self._at = self._draw(self._streams, BLOCK), 0

    def _stream(self, rollout: int) -> np.random.Generator:
        key = self._branches.key << 64 | int(self._branches.number[rollout])
        return np.random.Generator(np.random.Philox(key=key))

    def _draw(self, streams: list[np.random.Generator], steps: int) -> Array:
        """[steps, N, K, C]."""
        drawn = np.empty((len(streams), steps, *self._shape))
        for stream, own in zip(streams, drawn, strict=True):
            stream.standard_exponential(out=own)
        return race_units(np.log(np.maximum(drawn, TINY)).swapaxes(0, 1).copy())

    def next(self) -> Array:
        """[N, K, C] in race units, of every lane's next step; a rollout's first needs none."""
        noise = self._block[self._at]
        self._at += 1
        if self._at == BLOCK:
            self._block, self._at = self._draw(self._streams, BLOCK), 0
        return noise

    def drop(self, keep: Array) -> None:
        self._streams = [self._streams[lane] for lane in keep]
        self._block = self._block.take(keep, 1)

    def restart(self, lane: int, rollout: int) -> None:
        self._streams[lane] = self._stream(rollout)
        after_first = self._at + 1
        self._block[after_first:, lane] = self._draw([self._streams[lane]], BLOCK - after_first)[:, 0]


class SharedNoise:
    """The true episodes' noise, at the same times."""

    def __init__(self, branches: Branches, lanes: int) -> None:
        self._branches = branches
        self._episode, self._time = branches.episode[:lanes].copy(), branches.step[:lanes].copy()

    def next(self) -> Array:
        assert self._branches.noise is not None
        self._time += 1
        return self._branches.noise[self._episode, self._time]

    def drop(self, keep: Array) -> None:
        self._episode, self._time = self._episode[keep], self._time[keep]

    def restart(self, lane: int, rollout: int) -> None:
        self._episode[lane], self._time[lane] = self._branches.episode[rollout], self._branches.step[rollout] - 1


@dataclass(frozen=True, eq=False)
class Played:
    """What rollouts gave."""

    returns: Array
    """[R]: discounted, from the branch on."""
    steps: int
    """How many environment steps they took from the branches on."""
    replayed: int = 0
    """How many were played again on the way to the branches."""
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
    noise = OwnNoise(branches, count, categories) if branches.noise is None else SharedNoise(branches, count)
    owner: Array = np.arange(count)
    limit: Array = horizon - branches.step[:count]  # what the clock says when a lane reaches the horizon
    result: Array = np.zeros(count)
    factor: Array = np.ones(count)
    gamma = np.array(branches.gamma)
    steps, clock, following = 0, 0, count
    returns = np.empty(total)
    actions = branches.action[:count]
    next_limit = int(limit.min())
    while True:
        seen, rewards, _, over = lanes.step(actions)
        result += factor * rewards
        factor *= gamma
        steps += len(owner)
        clock += 1
        fresh: list[int] = []
        if clock == next_limit or np.count_nonzero(over):
            over = over | (limit == clock)
            done = over.nonzero()[0]
            returns[owner[done]] = result[done]
            for lane in done.tolist():
                if following < total:
                    lanes.restart(lane)
                    noise.restart(lane, following)
                    owner[lane], result[lane], factor[lane] = following, 0.0, 1.0
                    limit[lane] = clock + horizon - branches.step[following]
                    over[lane] = False
                    fresh.append(lane)
                    following += 1
            if np.count_nonzero(over):
                keep = (~over).nonzero()[0]
                lanes.drop(keep)
                if not len(keep):
                    break
                fresh = [lane for lane in range(len(keep)) if keep[lane] in fresh]
                noise.drop(keep)
                owner, limit, result, factor = (x[keep] for x in (owner, limit, result, factor))
                seen = seen[keep]
            next_limit = int(limit.min())
        actions = policy.act(policy.logits(seen), noise.next())
        if fresh:
            actions[fresh] = branches.action[owner[fresh]]
    check_finite(environment.name, "a reward", returns)
    return Played(returns, steps, environment.replayed(branches.episode, branches.step))
