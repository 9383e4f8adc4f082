"""The first way to branch a Gymnasium environment that a test finds exact."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from arsm.rl.environment import ENDLESS, Array, EnvironmentFailure, Trail, check_finite
from arsm.rl.snapshots import WAYS, Env, Way, snapshot_of
from arsm.rl.stepped import Stepped, SteppedLanes

GAPS = (0, 3)
"""Steps between the starts of instances that are played in turns: all at once, and one
after the other."""
TESTED_STEPS = 200
"""Steps of each episode in which a way to branch is tested."""
GLANCES = 8
"""Steps between the points at which a way to branch is tested for a moment; one at
which state is missing in one step of sixteen passes with a chance of one in a hundred."""
GLANCE = 3
"""Steps of such a test."""
PATIENCE = 1000
"""Random steps within which an environment without a time limit must end by itself."""

Given = tuple[Array, float, bool, bool]
"""A step's observation and reward, and whether it terminated and is over."""
Record = tuple[Trail, list[Given]]
"""An episode of random actions, and what each of them gave."""


def with_exact_way(world: Stepped) -> Stepped:
    """The environment with the first way to branch that gives the next observations bit
    for bit.

    Where instances that are played in turns give something else than each gives alone,
    one at a time is played, and replayed.
    """
    if world.randomness == "fresh" and world.agents > 1:
        raise ValueError(
            f"{world.name} does not draw its randomness from np_random: branches cannot have "
            'fresh random numbers; use randomness="same".'
        )
    try:
        records = [_record(world, seed) for seed in range(3)]
        offered: list[Way] = [way for way in WAYS if _offers(world, way)]
        # kept until the tests are over: a later instance must not get the id of an earlier one
        earlier = list(world.made)
    finally:
        world.close()
    apart = all(_keeps_apart(world, records, gap) for gap in GAPS)
    if not apart or _shares_observations(world):
        alone = replace(world, way="replay", randomness="same", alone=True)
        if _branches_exactly(alone, records):
            return replace(alone, randomness=world.randomness)
        offered = []
    for way in offered:
        candidate = replace(world, way=way, randomness="same")
        if _branches_exactly(candidate, records):
            return replace(candidate, randomness=world.randomness)
        if way == "snapshot":
            raise EnvironmentFailure(
                f"{world.name} did not go on as before from its snapshot; let get(environment) "
                "copy all that a step changes and set(environment, state) put all of it back."
            )
    del earlier
    raise EnvironmentFailure(
        f"{world.name} is not deterministic: the same seed and actions gave other observations, "
        "and it cannot go back to a state and try another action; make its randomness follow "
        "from reset(seed=...)."
    )


def _offers(world: Stepped, way: Way) -> bool:
    if way in ("copy", "replay"):
        return True
    env = world.take()
    world.give_back([env])
    return snapshot_of(env, way, world.snapshot) is not None


def _record(world: Stepped, seed: int) -> Record:
    """An episode of random actions, of which the first steps are kept."""
    # random actions of our own: the action space's sampler has state
    generator = np.random.default_rng(seed)
    given = []
    actions = []
    before = []
    env = world.take()
    seen = world.reset_one(env, seed)
    check_finite(world.name, "an observation", seen)
    for time in range(PATIENCE if world.horizon == ENDLESS else min(world.horizon, TESTED_STEPS)):
        action = _random_action(world, seen, generator)
        if time < TESTED_STEPS:
            before.append(seen)
        chosen = world.native(action[None])[0]
        raw, reward, terminated, over, info = world.step_one(env, chosen)
        if world.masked_by is None and info and "action_mask" in info:
            raise EnvironmentFailure(
                f'{world.name} gives info["action_mask"] in its step but not in its reset; give '
                "it in both."
            )
        seen = world.observe(env, raw, info, over=over)
        if time < TESTED_STEPS:
            actions.append(action)
            given.append((seen, reward, terminated, over))
            for what, values in (("a reward", np.asarray(reward)), ("an observation", seen)):
                check_finite(world.name, what, values)
        if over:
            break
    else:
        if world.horizon == ENDLESS:
            raise ValueError(
                f"{world.name} has no time limit and did not end within {PATIENCE:,} random "
                "steps; give a limit as horizon."
            )
    world.give_back([env])
    rewards = np.array([reward for _, reward, _, _ in given])
    trail = Trail(seed, np.stack(actions), rewards=rewards, observations=np.stack(before))
    return trail, given


def _random_action(world: Stepped, seen: Array, generator: np.random.Generator) -> Array:
    if not world.masks:
        return generator.integers(world.choices)
    allowed = seen[world.observations :].reshape(len(world.choices), -1)
    return np.array([generator.choice(row.nonzero()[0]) for row in allowed])


# ---------------------------------------------------------------- instances beside each other


def _keeps_apart(world: Stepped, records: list[Record], gap: int) -> bool:
    """Whether instances that are played in turns give what each of them gave alone."""
    playing: list[Generator[bool, None, None]] = []
    # generators: each plays one step when its turn comes
    waiting = [_again(world, record) for record in records]
    try:
        while playing or waiting:
            # with a gap, one is made and reset when others are under way
            playing += waiting[:1] if gap else waiting
            waiting = waiting[1:] if gap else []
            for _ in range(gap or 1):
                for one in list(playing):
                    same = next(one, None)
                    if same is False:
                        return False
                    if same is None:
                        playing.remove(one)
    except Exception:  # what raises in turns, and did not alone, shares something
        return False
    finally:
        world.close()
    return True


def _shares_observations(world: Stepped) -> bool:
    """Whether instances write their observations into one array, which lanes read after
    all have stepped.
    """
    try:
        seen = [world.take().reset(seed=seed)[0] for seed in range(2)]
    finally:
        world.close()
    return all(isinstance(each, np.ndarray) for each in seen) and np.shares_memory(*seen)


def _again(world: Stepped, record: Record) -> Generator[bool, None, None]:
    """Play a recorded episode: whether its reset and then its steps are the same."""
    trail, given = record
    env = world.take()
    assert trail.observations is not None
    yield np.array_equal(world.reset_one(env, trail.seed), trail.observations[0])
    for action, expected in zip(world.native(trail.actions), given, strict=True):
        yield _gives(world, env, action, expected)


def _gives(world: Stepped, env: Env, action: Any, expected: Given) -> bool:
    """Whether a step gives this observation, this reward and this end."""
    seen, *rest = expected
    raw, reward, terminated, over, info = world.step_one(env, action)
    return [reward, terminated, over] == rest and np.array_equal(
        world.observe(env, raw, info, over=over), seen
    )


# ---------------------------------------------------------------- branches


def _branches_exactly(world: Stepped, records: list[Record]) -> bool:
    """Whether branches give what the recorded episodes gave.

    A few are played to the end, where a state that was left out may show late. Many are
    played for a moment, where it shows at once but in few of the steps.
    """
    trails = [trail for trail, _ in records]
    points = [
        (number, begin, end)
        for number, trail in enumerate(trails)
        for begin, end in _points(world, len(trail.actions))
    ]
    # two lanes at every point, in turns: copies that share an object show it
    width = 1 if world.alone else 2
    episode, step, _ = np.repeat(points, width, 0).T
    try:
        branches = world.branches(trails, episode, step, [()] * len(step), SteppedLanes(world, []))
        lanes: list[Env | None] = [None] * width
        for number, begin, end in points:
            lanes = [branches.send(env) for env in lanes]
            trail, given = records[number]
            actions = world.native(trail.actions[begin:end])
            for action, expected in zip(actions, given[begin:end], strict=True):
                if not all(
                    _gives(world, env, action, expected) for env in lanes if env is not None
                ):
                    return False
    except Exception:  # a way that raises is a way that does not work
        return False
    finally:
        world.close()
    return True


def _points(world: Stepped, steps: int) -> list[tuple[int, int]]:
    """The tests (begin, end) of an episode, in the order of their begins."""
    found = dict.fromkeys((0, steps // 3, 2 * steps // 3, steps - 1), steps)
    # a replay has no state to leave out, and the way to every point is long
    if world.way != "replay":
        for begin in range(0, steps, GLANCES):
            found.setdefault(begin, min(begin + GLANCE, steps))
    return sorted(found.items())
