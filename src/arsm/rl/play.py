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
    sums, total = [], 0.0
    for reward in rewards[::-1].tolist():
        total = reward + gamma * total
        sums.append(total)
    return np.array(sums[::-1])


def play_episodes(
    environment: Environment, policy: Policy, seeds: Sequence[int], noise: Tape | Still
) -> list[Episode]:
    """Play true episodes in lock step, or one after the other where there is one lane."""
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
        if np.count_nonzero(over):
            for lane in over.nonzero()[0]:
                ended[int(owner[lane])] = (bool(terminated[lane]), seen[lane])
            keep = (~over).nonzero()[0]
            lanes.keep(keep)
            if not len(keep):
                break
            owner, seen = owner[keep], seen[keep]
    played, *columns = (np.concatenate(column) for column in zip(*steps, strict=True))
    states = _by_episode(kept, len(seeds))
    episodes = []
    for number, seed in enumerate(seeds):
        seen, logits, actions, rewards = (column[played == number] for column in columns)
        check_finite(environment.name, "a reward", rewards)
        check_finite(environment.name, "an observation", seen)
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
        return replace(self, **chosen, plan=None)

    def answered(
        self, parts: Sequence[Array], played: Sequence[EpisodeBranches]
    ) -> EpisodeBranches:
        """These rollouts with the results of their parts, which lie at the given places."""
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
    # who asked has the trails
    return replace(played, trails=(), cpu_seconds=process_time() - begin)


def play_rollouts(
    environment: Environment, policy: Policy, branches: EpisodeBranches
) -> EpisodeBranches:
    """Play rollouts in lock step, one call of the policy per step; a lane that is done
    takes the next rollout.
    """
    total = len(branches)
    if not total:
        nothing = np.zeros((0, environment.observations))
        return replace(branches, returns=nothing[:, 0], ends=nothing, left=nothing[:, 0])
    count = min(total, environment.lanes or total)
    horizon, shape = environment.horizon, (len(policy.choices), max(policy.choices))
    streams = [(branches.key, number) for number in branches.number.tolist()]
    lanes = environment.restore(branches.trails, branches.episode, branches.step, streams, count)
    if branches.shared is None:
        noise = OwnNoise(branches.key, branches.number, count, shape)
    else:
        tape = Tape(branches.shared, len(branches.trails), shape)
        noise = SharedNoise(tape, branches.episode, branches.step, count)
    owner: Array = np.arange(count)
    lengths = np.minimum(horizon - branches.step, branches.cut or horizon)
    limit: Array = lengths[:count].copy()  # what the clock says when a lane has played its length
    result: Array = np.zeros(count)
    factor: Array = np.ones(count)
    gamma = np.array(branches.gamma)
    steps, clock, following = 0, 0, count
    returns = np.empty(total)
    ends, left = np.empty((total, environment.observations)), np.empty(total)
    actions = branches.action[:count]
    next_limit = int(limit.min())
    while True:
        seen, rewards, terminated, over = lanes.step(actions)
        result += factor * rewards
        factor *= gamma
        steps += len(owner)
        clock += 1
        fresh: list[int] = []
        if clock == next_limit or np.count_nonzero(over):
            over = over | (limit == clock)
            done = over.nonzero()[0]
            returns[owner[done]] = result[done]
            ends[owner[done]] = seen[done, : environment.observations]
            left[owner[done]] = np.where(terminated[done], 0.0, factor[done])
            for lane in done.tolist():
                if following < total:
                    lanes.restore(lane)
                    noise.restart(lane, following)
                    owner[lane], result[lane], factor[lane] = following, 0.0, 1.0
                    limit[lane] = clock + lengths[following]
                    over[lane] = False
                    fresh.append(lane)
                    following += 1
            if np.count_nonzero(over):
                keep = (~over).nonzero()[0]
                lanes.keep(keep)
                if not len(keep):
                    break
                fresh = [lane for lane in range(len(keep)) if keep[lane] in fresh]
                noise.drop(keep)
                owner, limit, result, factor = (x[keep] for x in (owner, limit, result, factor))
                seen = seen[keep]
            next_limit = int(limit.min())
        actions = act(policy.logits(seen), noise.next())
        if fresh:
            actions[fresh] = branches.action[owner[fresh]]
    check_finite(environment.name, "a reward", returns)
    return replace(
        branches, returns=returns, ends=ends, left=left, steps=steps, replayed=lanes.replayed
    )
