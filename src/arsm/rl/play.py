"""Playing true episodes and their rollouts in lock step.

Every rollout draws its noise from its own stream, and actions are chosen by the
library's fixed-point race: it does not matter which process plays a rollout, or beside
which others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

import numpy as np

from arsm.policy import Rollouts
from arsm.rl.environment import (
    ENDLESS,
    Array,
    Environment,
    EnvironmentFailure,
    Trail,
    check_finite,
    strayed,
)
from arsm.rl.policies import Policy, act
from arsm.rl.streams import OwnNoise, SharedNoise, Still, Tape

# ---------------------------------------------------------------- true episodes


@dataclass(frozen=True, eq=False)
class Episode:
    """A true episode of T steps."""

    observations: Array
    """[T, D]: what each action was chosen on, with the masks [T, K C] behind it, if
    there are masks.
    """
    logits: Array
    """[T, K, C]."""
    actions: Array
    """[T, K]."""
    rewards: Array
    """[T]."""
    terminated: bool
    """Whether it ended by itself, not at the time limit."""
    last_observation: Array
    """[D]: after the last action, as the others."""
    trail: Trail

    def returns(self, gamma: float) -> Array:
        """[T]: discounted, from each step on."""
        return discounted(self.rewards, gamma)


def discounted(rewards: Array, gamma: float) -> Array:
    """[T]: the discounted sum of the rewards [T] from each step on."""
    # Python's numbers: a loop over NumPy's is several times slower
    sums = []
    total = 0.0
    for reward in rewards[::-1].tolist():
        total = reward + gamma * total
        sums.append(total)
    return np.array(sums[::-1])


def play_episodes(
    environment: Environment, policy: Policy, seeds: Sequence[int], noise: Tape | Still
) -> list[Episode]:
    """Play true episodes in lock step, or one after the other where there is one lane."""
    # instances that share state must not be open at the same time
    if environment.lanes == 1:
        return [
            episode
            for number, seed in enumerate(seeds)
            for episode in _play_together(environment, policy, [seed], noise, number)
        ]
    return _play_together(environment, policy, seeds, noise, 0)


def _play_together(
    environment: Environment,
    policy: Policy,
    seeds: Sequence[int],
    noise: Tape | Still,
    first: int,
) -> list[Episode]:
    """Episodes in lock step; `first` is the number of the first one's noise."""
    lanes, seen = environment.reset(seeds)
    owner: Array = np.arange(len(seeds))
    steps: list[tuple[Array, ...]] = []
    kept: list[tuple[Array, Sequence[Any] | Array]] = []
    ended: dict[int, tuple[bool, Array]] = {}
    for time in range(environment.horizon):
        logits = policy.logits(seen)
        actions = act(logits, noise.at(first + owner, time))
        # before the step: a branch tries another action from here
        state = lanes.state()
        if state is not None:
            kept.append((owner, state))
        following, rewards, terminated, over = lanes.step(actions)
        steps.append((owner, seen, logits, actions, rewards))
        seen = following
        if time + 1 == environment.horizon:
            over = np.ones_like(over)
            if time + 1 == ENDLESS:
                raise EnvironmentFailure(
                    f"{environment.name} did not end within {ENDLESS:,} steps; give a horizon."
                )
        # most steps end no episode, and counting is the fastest way to see it
        if np.count_nonzero(over):
            for lane in over.nonzero()[0]:
                ended[int(owner[lane])] = (bool(terminated[lane]), seen[lane])
            keep = (~over).nonzero()[0]
            lanes.keep(keep)
            if not len(keep):
                break
            owner = owner[keep]
            seen = seen[keep]
    states = _by_episode(kept, len(seeds))
    return _episodes(environment.name, seeds, steps, states, ended)


def _episodes(
    name: str,
    seeds: Sequence[int],
    steps: list[tuple[Array, ...]],
    states: list[Sequence[Any] | Array],
    ended: dict[int, tuple[bool, Array]],
) -> list[Episode]:
    """Sort the lanes' steps, (owner, observation, logits, action, reward) each, by episode."""
    played, *columns = (np.concatenate(column) for column in zip(*steps, strict=True))
    episodes = []
    for number, seed in enumerate(seeds):
        seen, logits, actions, rewards = (column[played == number] for column in columns)
        # once per episode: per step it would take as long as a small simulator's step
        check_finite(name, "a reward", rewards)
        check_finite(name, "an observation", seen)
        terminated, last = ended[number]
        trail = Trail(seed, actions, states[number], rewards, seen)
        episodes.append(Episode(seen, logits, actions, rewards, terminated, last, trail))
    return episodes


def _by_episode(
    kept: list[tuple[Array, Sequence[Any] | Array]], episodes: int
) -> list[Sequence[Any] | Array]:
    """The states of each episode, of (owners [N], states [N]) at some steps."""
    if kept and all(isinstance(states, np.ndarray) for _, states in kept):
        owner = np.concatenate([owner for owner, _ in kept])
        rows = np.concatenate([states for _, states in kept])
        return [rows[owner == number] for number in range(episodes)]
    found: list[Sequence[Any] | Array] = []
    for number in range(episodes):
        own = [
            state
            for owner, states in kept
            for lane, state in zip(owner, states, strict=True)
            if lane == number
        ]
        found.append(own)
    return found


def check_repeats(environment: Environment, trail: Trail) -> None:
    """Play an episode again with no other beside it, and refuse an environment that gives
    something else than before.

    The test before the training knows random episodes only, and learning leads to other
    states.
    """
    # a trail of this process has them
    assert trail.observations is not None
    assert trail.rewards is not None
    lanes, seen = environment.reset([trail.seed])
    for place, action in enumerate(trail.actions):
        if not np.array_equal(seen[0], trail.observations[place]):
            raise strayed(environment.name, place - 1)
        seen, rewards, _, _ = lanes.step(action[None])
        if rewards[0] != trail.rewards[place]:
            raise strayed(environment.name, place)
    lanes.keep(np.arange(0))


# ---------------------------------------------------------------- rollouts


def _not_played() -> Array:
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class EpisodeBranches:
    """R rollouts, from the plan to the gradient: where they leave their true episodes, the
    actions they take there, and, once they are played, what came of them.

    They are sorted by episode and step.
    """

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
    shared: int | None = None
    """The key of the true episodes' noise, where rollouts share it."""
    cut: int | None = None
    """The most steps of a rollout; None plays to the end of the episode."""
    plan: Rollouts | None = None
    """The estimator's questions that the rollouts answer; they stay in this process."""
    returns: Array = field(default_factory=_not_played)
    """[R]: discounted, from the branch on."""
    ends: Array = field(default_factory=_not_played)
    """[R, D]: the observations after the last steps."""
    left: Array = field(default_factory=_not_played)
    """[R]: the discount of what would follow there; 0 where the episode ended by itself."""
    steps: int = 0
    """Environment steps from the branches on."""
    replayed: int = 0
    """Environment steps that were played again to reach the branches."""
    cpu_seconds: float = 0.0
    """CPU seconds of other processes."""

    def __len__(self) -> int:
        return len(self.step)

    def part(self, index: Array) -> EpisodeBranches:
        """Some of the rollouts, for another process."""
        chosen = {
            name: getattr(self, name)[index] for name in ("episode", "step", "action", "number")
        }
        # the plan stays where the gradient is computed
        return replace(self, **chosen, plan=None)

    def answered(
        self, parts: Sequence[Array], played: Sequence[EpisodeBranches]
    ) -> EpisodeBranches:
        """These rollouts with the results of their parts, which lie at the given places."""
        # parts are dealt like cards, and come back in any order
        order = np.argsort(np.concatenate(parts))
        results = {
            name: np.concatenate([getattr(one, name) for one in played])[order]
            for name in ("returns", "ends", "left")
        }
        totals = {
            name: sum(getattr(one, name) for one in played)
            for name in ("steps", "replayed", "cpu_seconds")
        }
        return replace(self, **results, **totals)


def play_elsewhere(
    environment: Environment, policy: Policy, branches: EpisodeBranches
) -> EpisodeBranches:
    """As `play_rollouts`, in a process of its own, whose time is counted."""
    begin = process_time()
    played = play_rollouts(environment, policy, branches)
    # the process that asked has the trails
    return replace(played, trails=(), cpu_seconds=process_time() - begin)


def play_rollouts(
    environment: Environment, policy: Policy, branches: EpisodeBranches
) -> EpisodeBranches:
    """Play rollouts in lock step, one call of the policy per step; a lane that is done
    takes the next rollout.
    """
    results = _Results(len(branches), environment.observations)
    if not len(branches):
        return results.of(branches)
    count = min(len(branches), environment.lanes or len(branches))
    streams = [(branches.key, number) for number in branches.number.tolist()]
    lanes = environment.restore(branches.trails, branches.episode, branches.step, streams, count)
    noise = _noise(branches, (len(policy.choices), max(policy.choices)), count)
    running = _Running(branches, environment.horizon, count)
    actions = branches.action[:count]
    while True:
        seen, rewards, terminated, over = lanes.step(actions)
        running.earn(rewards)
        done = running.done(over)
        if not len(done):
            actions = act(policy.logits(seen), noise.next())
            continue
        results.write(running, done, seen, terminated)
        # lanes that are done take the next rollouts, and those without one are dropped
        fresh = running.begin(done)
        for lane in fresh.tolist():
            lanes.restore(lane)
            noise.restart(lane, int(running.owner[lane]))
        if len(fresh) < len(done):
            keep = running.all_but(done[len(fresh) :])
            lanes.keep(keep)
            if not len(keep):
                break
            noise.drop(keep)
            running.drop(keep)
            seen = seen[keep]
            fresh = np.searchsorted(keep, fresh)
        actions = act(policy.logits(seen), noise.next())
        if len(fresh):
            # the first action of a rollout is the one that it tries
            actions[fresh] = branches.action[running.owner[fresh]]
    check_finite(environment.name, "a reward", results.returns)
    return replace(results.of(branches), steps=running.steps, replayed=lanes.replayed)


class _Results:
    """The results of R rollouts, written down as they end."""

    def __init__(self, rollouts: int, observations: int) -> None:
        self.returns = np.empty(rollouts)
        self.ends = np.empty((rollouts, observations))
        self.left = np.empty(rollouts)

    def write(self, running: _Running, done: Array, seen: Array, terminated: Array) -> None:
        """The results of the lanes that are done."""
        owner = running.owner[done]
        self.returns[owner] = running.result[done]
        # without the masks behind the observation, which no value looks at
        self.ends[owner] = seen[done, : self.ends.shape[1]]
        # nothing follows the end of an episode, but something follows a cut
        self.left[owner] = np.where(terminated[done], 0.0, running.factor[done])

    def of(self, branches: EpisodeBranches) -> EpisodeBranches:
        """The branches with their results."""
        return replace(branches, returns=self.returns, ends=self.ends, left=self.left)


def _noise(branches: EpisodeBranches, shape: tuple[int, int], lanes: int) -> OwnNoise | SharedNoise:
    """The rollouts' own noise, or that of their true episodes."""
    if branches.shared is None:
        return OwnNoise(branches.key, branches.number, lanes, shape)
    tape = Tape(branches.shared, len(branches.trails), shape)
    return SharedNoise(tape, branches.episode, branches.step, lanes)


NO_LANE: Array = np.arange(0)


class _Running:
    """The rollouts that are under way, one per lane, and which one comes next."""

    def __init__(self, branches: EpisodeBranches, horizon: int, lanes: int) -> None:
        self.owner: Array = np.arange(lanes)
        """[N]: the number of each lane's rollout."""
        self.result: Array = np.zeros(lanes)
        """[N]: its discounted rewards so far."""
        self.factor: Array = np.ones(lanes)
        """[N]: the discount of its next reward."""
        self.steps = 0
        self._gamma = np.array(branches.gamma)  # arrays multiply faster by arrays
        self._lengths = np.minimum(horizon - branches.step, branches.cut or horizon)
        self._following = lanes
        # lanes begin at different times: what the clock says when one has played its length
        self._clock = 0
        self._limit: Array = self._lengths[:lanes].copy()
        self._next_limit = int(self._limit.min())

    def earn(self, rewards: Array) -> None:
        """A step of every lane."""
        self.result += self.factor * rewards
        self.factor *= self._gamma
        self.steps += len(self.owner)
        self._clock += 1

    def done(self, over: Array) -> Array:
        """The lanes whose rollouts ended by themselves or have played their lengths."""
        # in most steps nothing ends, which two numbers tell
        if self._clock != self._next_limit and not np.count_nonzero(over):
            return NO_LANE
        return (over | (self._limit == self._clock)).nonzero()[0]

    def begin(self, done: Array) -> Array:
        """Give the next rollouts to the first of these lanes, as far as there are
        any; returns those lanes.
        """
        if self._following == len(self._lengths):
            return NO_LANE
        lanes = done[: len(self._lengths) - self._following]
        rollouts = self._following + np.arange(len(lanes))
        self._following += len(lanes)
        self.owner[lanes] = rollouts
        self.result[lanes] = 0.0
        self.factor[lanes] = 1.0
        self._limit[lanes] = self._clock + self._lengths[rollouts]
        self._next_limit = int(self._limit.min())
        return lanes

    def all_but(self, lanes: Array) -> Array:
        """The other lanes."""
        others = np.ones(len(self.owner), bool)
        others[lanes] = False
        return others.nonzero()[0]

    def drop(self, keep: Array) -> None:
        """Keep only these lanes."""
        self.owner = self.owner[keep]
        self.result = self.result[keep]
        self.factor = self.factor[keep]
        self._limit = self._limit[keep]
        self._next_limit = int(self._limit.min())
