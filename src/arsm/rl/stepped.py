"""Any Gymnasium environment, one object per episode: it branches in the first way that
a test finds exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from gymnasium import Space

from arsm.rl.environment import (
    ENDLESS,
    Array,
    EnvironmentFailure,
    Randomness,
    Replays,
    Trail,
    check_finite,
    strayed,
)
from arsm.rl.snapshots import WAYS, Env, Snapshot, Way, snapshot_of
from arsm.rl.spaces import Encoder, encode, exists, full_mask, is_bytes
from arsm.rl.teams import Team

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


@dataclass(frozen=True, eq=False)
class Stepped:
    """Any deterministic Gymnasium environment with discrete actions."""

    name: str
    make: Callable[[], Env]
    shape: tuple[int, ...]
    """Of an observation, encoded."""
    choices: tuple[int, ...]
    first_choice: Array
    """[K]: the numbers of the first actions; [] for a single action, where the
    environment wants no array.
    """
    horizon: int
    space: Space[Any] | None = None
    """Of the observations, where they must be encoded."""
    encoder: Encoder | None = None
    masked_by: Literal["info", "method"] | None = None
    """Where action masks come from: `info["action_mask"]` or `action_masks()`."""
    agents: int = 1
    """Agents of a team, whose observations and actions lie side by side."""
    snapshot: Snapshot | None = None
    randomness: Randomness = "same"
    """Whether a branch goes on with the true episode's random numbers or with its own."""
    way: Way = "replay"
    """How to branch."""
    alone: bool = False
    """Whether its instances share state, so that only one is ever played at a time."""
    _made: list[Env] = field(default_factory=list, init=False, repr=False)
    _spare: list[Env] = field(default_factory=list, init=False, repr=False)
    _awake: set[int] = field(default_factory=set, init=False, repr=False)
    """The ids of those that were reset at least once."""

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "_pair"}
        return {**kept, "_made": [], "_spare": [], "_awake": set()}  # every process makes its own

    @property
    def observations(self) -> int:
        """Numbers in an observation, D."""
        return math.prod(self.shape)

    @property
    def masks(self) -> bool:
        """Whether an action mask [K C] follows each observation."""
        return self.masked_by is not None

    def close(self) -> None:
        """Close all environments that were made; later ones are made anew."""
        self._spare.clear()
        self._awake.clear()
        while self._made:
            try:
                self._made.pop().close()
            except Exception as error:
                raise self._failure("close", error) from error

    def _take(self) -> Env:
        if self._spare:
            return self._spare.pop()
        # remembered, so that close reaches those that are in use
        self._made.append(self.make())
        return self._made[-1]

    def give_back(self, environments: Iterable[Env | None]) -> None:
        """Keep those for later that were made and not copied."""
        # a deep copy is thrown away: only what was made is closed in the end
        made = set(map(id, self._made))
        self._spare.extend(env for env in environments if env is not None and id(env) in made)

    @property
    def lanes(self) -> int | None:
        """As many as make the policy's share of the time small; one where instances
        share state.
        """
        if self.alone:
            return 1
        # an emulator is large: more of them push each other out of the processor's cache
        return 16 if self.way == "ale" else 32

    def _team(self) -> Team | None:
        """One of its environments, where several agents are one environment; None for a
        single agent.
        """
        if self.agents == 1:
            return None
        env = self._take()
        self.give_back([env])
        assert isinstance(env, Team)
        return env

    # ---------------------------------------------------------------- episodes and branches

    def reset(self, seeds: Sequence[int]) -> tuple[SteppedLanes, Array]:
        """Fresh episodes, and their observations [N, D]."""
        environments = [self._take() for _ in seeds]
        seen = [self.reset_one(env, seed) for env, seed in zip(environments, seeds, strict=True)]
        return SteppedLanes(self, environments), np.stack(seen)

    def restore(
        self,
        trails: Sequence[Trail],
        episode: Array,
        step: Array,
        streams: Sequence[Sequence[int]],
        lanes: int,
    ) -> SteppedLanes:
        """Environments at these steps; those that follow use the lanes' environments again."""
        branches = SteppedLanes(self, [])
        branches.follow(self._branches(trails, episode, step, streams, branches), lanes)
        return branches

    def begins(self, environments: Sequence[Env]) -> list[Any] | None:
        """Snapshots of environments that were just reset; None without a way to take them."""
        if self.way in ("copy", "replay"):
            return None
        return [self._get(env) for env in environments]

    def _branches(
        self,
        trails: Sequence[Trail],
        episode: Array,
        step: Array,
        streams: Sequence[Sequence[int]],
        lanes: SteppedLanes,
    ) -> Generator[Env, Env | None, None]:
        """An environment at each of these steps; one that is sent back is used again.
        The steps of the way there are counted in the lanes.
        """
        spare: Env | None = None
        trunk, at = None, (-1, -1)
        state: Any = None
        try:
            for number, time, stream in zip(episode.tolist(), step.tolist(), streams, strict=True):
                trail = trails[number]
                if self.way == "replay":
                    # the lane's own environment, which its last rollout has left
                    env = spare or self._take()
                    self._check_reset(env, trail)
                    self._advance(env, trail, 0, time)
                    lanes.replayed += time
                else:
                    # branches come by episode and step: one trunk walks along each episode
                    if trunk is None or at[0] != number or at[1] > time:
                        trunk, at = trunk or self._take_awake(), (number, -1)
                        if len(trail.states) == 0 or self.way == "copy":
                            self._check_reset(trunk, trail)
                        else:
                            self._pair[1](trunk, trail.states[0])
                    if at[1] != time:
                        self._advance(trunk, trail, max(at[1], 0), time)
                        lanes.replayed += time - max(at[1], 0)
                        # one snapshot serves all branches at this step
                        state = None if self.way == "copy" else self._get(trunk)
                    at = (number, time)
                    if self.way == "copy":
                        # the trunk itself stays behind for the next branch
                        env = copy.deepcopy(trunk)
                    else:
                        env = spare or self._take_awake()
                        self._pair[1](env, state)
                if self.randomness == "fresh":
                    env.unwrapped.np_random = np.random.Generator(
                        np.random.PCG64(np.random.SeedSequence(stream))
                    )
                spare = yield env
        finally:
            self.give_back([trunk])

    @cached_property
    def _pair(self) -> Snapshot:
        env = self._take()
        pair = snapshot_of(env, self.way, self.snapshot)
        self.give_back([env])
        if pair is None:
            raise EnvironmentFailure(f'{self.name} cannot be branched by "{self.way}".')
        return pair

    def _get(self, env: Env) -> Any:
        try:
            return self._pair[0](env)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.name} holds what it did not when it was tested ({error}), and its state "
                "cannot be copied; let __init__ make it."
            ) from error

    def _take_awake(self) -> Env:
        """An environment that wrappers allow to step; a seed makes Atari games load
        again, which takes long.
        """
        env = self._take()
        if id(env) not in self._awake:
            env.reset(seed=0)
            self._awake.add(id(env))
        return env

    def _advance(self, env: Env, trail: Trail, begin: int, end: int) -> None:
        actions = self.native(trail.actions[begin:end])
        # a simulator that can replay without observations does so
        if isinstance(env, Replays):
            env.replay(actions)
            return
        for place, action in enumerate(actions, begin):
            raw, reward, _, over, info = self.step_one(env, action)
            if trail.rewards is not None and reward != trail.rewards[place]:
                raise strayed(self.name, place)
            # encoding costs; a stray shows in the rewards on the way and in the last observation
            last = place + 1 == end
            if (
                last
                and trail.observations is not None
                and not np.array_equal(
                    self.observe(env, raw, info, over=over), trail.observations[end]
                )
            ):
                raise strayed(self.name, place)

    def _check_reset(self, env: Env, trail: Trail) -> None:
        seen = self.reset_one(env, trail.seed)
        if trail.observations is not None and not np.array_equal(seen, trail.observations[0]):
            raise strayed(self.name, -1)

    # ---------------------------------------------------------------- actions and observations

    def decode(self, actions: Array) -> list[Any]:
        """Actions [N, K] as the environment wants them; of a team {agent: action} each."""
        team = self._team()
        return self.native(actions) if team is None else [team.split(joint) for joint in actions]

    def encode(self, observation: Any) -> Array:
        """An observation as the environment gives it, of a team {agent: observation}, as
        a vector [D].
        """
        team = self._team()
        return self.encode_one(observation if team is None else team.join(observation))

    def native(self, actions: Array) -> list[Any]:
        """Actions [N, K] as `step_one` takes them."""
        # a Discrete space wants a plain number
        if self.first_choice.ndim == 0:
            return (actions[:, 0] + self.first_choice).tolist()
        return list(actions + self.first_choice)

    def reset_one(self, env: Env, seed: int) -> Array:
        """The first observation [D], with the mask if there are masks."""
        try:
            seen, info = env.reset(seed=seed)
        except Exception as error:
            raise self._failure("reset", error) from error
        self._awake.add(id(env))
        return self.observe(env, seen, info, over=False)

    def step_one(self, env: Env, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The observation as the environment gives it, the reward, whether it
        terminated, whether it is over, and the environment's further information."""
        try:
            seen, reward, terminated, truncated, info = env.step(action)
        except Exception as error:
            raise self._failure("step", error) from error
        try:
            # float reads digits out of text, which no reward is
            value = float("text" if isinstance(reward, str) else reward)
        except (TypeError, ValueError):
            raise EnvironmentFailure(
                f"{self.name} gave a reward of {reward!r}; it must be a number."
            ) from None
        terminated = bool(terminated)
        return seen, value, terminated, terminated or bool(truncated), info

    def observe(self, env: Env, seen: Any, info: dict[str, Any], *, over: bool) -> Array:
        """An observation as a vector [D], with the mask [K C] behind it if there are masks."""
        vector = self.encode_one(seen)
        if self.masked_by is None:
            return vector
        if over:  # nothing is chosen there, and many an environment allows nothing
            return np.concatenate([vector, exists(self.choices).reshape(-1)])
        try:
            mask = (
                info["action_mask"]
                if self.masked_by == "info"
                else env.get_wrapper_attr("action_masks")()
            )
            return np.concatenate([vector, full_mask(mask, self.choices)])
        except Exception as error:
            raise self._failure("action mask", error) from error

    def encode_one(self, seen: Any) -> Array:
        """An observation as a vector [D]."""
        try:
            if self.encoder is not None:
                # a copy: some environments write every observation into the same array
                vector = np.array(self.encoder(seen), dtype=np.float64).reshape(-1)
            elif self.space is not None:
                vector = encode(self.space, seen)
            else:
                vector = np.array(seen, dtype=np.float64).reshape(-1)
        except Exception as error:
            raise self._failure("observation's encoder", error) from error
        if vector.shape != (self.observations,):
            raise EnvironmentFailure(
                f"{self.name} gave an observation of {vector.size} numbers instead of "
                f"{self.observations}; every observation must be as large as the first."
            )
        return vector

    def _failure(self, doing: str, error: Exception) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{self.name} raised {type(error).__name__} in its {doing}: {error}"
        )

    # ---------------------------------------------------------------- the test of the ways

    def tested(self) -> Stepped:
        """The same, with the first way to branch that gives the next observations bit for bit.

        Where instances that are played in turns give something else than each gives
        alone, one at a time is played, and replayed.
        """
        if self.randomness == "fresh" and self.agents > 1:
            raise ValueError(
                f"{self.name} does not draw its randomness from np_random: branches cannot have "
                'fresh random numbers; use randomness="same".'
            )
        try:
            record = [self._record(seed) for seed in range(3)]
            offered: list[Way] = [way for way in WAYS if self._offers(way)]
            # kept until the tests are over: a later instance must not get the id of an earlier one
            earlier = list(self._made)
        finally:
            self.close()
        if not all(self._keeps_apart(record, gap) for gap in GAPS):
            alone = replace(self, way="replay", randomness="same", alone=True)
            if alone._branches_exactly(record):
                return replace(alone, randomness=self.randomness)
            offered = []
        for way in offered:
            candidate = replace(self, way=way, randomness="same")
            if candidate._branches_exactly(record):
                return replace(candidate, randomness=self.randomness)
            if way == "snapshot":
                raise EnvironmentFailure(
                    f"{self.name} did not go on as before from its snapshot; let get(environment) "
                    "copy all that a step changes and set(environment, state) put all of it back."
                )
        del earlier
        raise EnvironmentFailure(
            f"{self.name} is not deterministic: the same seed and actions gave other observations, "
            "and it cannot go back to a state and try another action; make its randomness follow "
            "from reset(seed=...)."
        )

    def _offers(self, way: Way) -> bool:
        if way in ("copy", "replay"):
            return True
        env = self._take()
        self.give_back([env])
        return snapshot_of(env, way, self.snapshot) is not None

    def _record(self, seed: int) -> tuple[Trail, list[Any]]:
        """An episode of random actions, and what each of them gave."""
        # random actions of our own: the action space's sampler has state
        generator = np.random.default_rng(seed)
        env, given, actions, before = self._take(), [], [], []
        seen = self.reset_one(env, seed)
        check_finite(self.name, "an observation", seen)
        for time in range(PATIENCE if self.horizon == ENDLESS else min(self.horizon, TESTED_STEPS)):
            action = self._random_action(seen, generator)
            if time < TESTED_STEPS:
                before.append(seen)
            chosen = self.native(action[None])[0]
            raw, reward, terminated, over, info = self.step_one(env, chosen)
            seen = self.observe(env, raw, info, over=over)
            if time < TESTED_STEPS:
                actions.append(action)
                given.append((seen, reward, terminated, over))
                for what, values in (("a reward", np.asarray(reward)), ("an observation", seen)):
                    check_finite(self.name, what, values)
            if over:
                break
        else:
            if self.horizon == ENDLESS:
                raise ValueError(
                    f"{self.name} has no time limit and did not end within {PATIENCE:,} random "
                    "steps; give a limit as horizon."
                )
        self.give_back([env])
        rewards = np.array([reward for _, reward, _, _ in given])
        trail = Trail(seed, np.stack(actions), rewards=rewards, observations=np.stack(before))
        return trail, given

    def _keeps_apart(self, record: list[tuple[Trail, list[Any]]], gap: int) -> bool:
        """Whether instances that are played in turns give what each of them gave alone."""
        playing: list[Generator[bool, None, None]] = []
        # generators: each plays one step when its turn comes
        waiting = [self._again(trail, given) for trail, given in record]
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
            self.close()
        return True

    def _again(self, trail: Trail, given: list[Any]) -> Generator[bool, None, None]:
        """Play a recorded episode: whether its reset and then its steps are the same."""
        env = self._take()
        assert trail.observations is not None
        yield np.array_equal(self.reset_one(env, trail.seed), trail.observations[0])
        for action, expected in zip(self.native(trail.actions), given, strict=True):
            yield self._gives(env, action, expected)

    def _gives(self, env: Env, action: Any, expected: tuple[Array, float, bool, bool]) -> bool:
        """Whether a step gives this observation, this reward and this end."""
        seen, *rest = expected
        raw, reward, terminated, over, info = self.step_one(env, action)
        return [reward, terminated, over] == rest and np.array_equal(
            self.observe(env, raw, info, over=over), seen
        )

    def _random_action(self, seen: Array, generator: np.random.Generator) -> Array:
        if not self.masks:
            return generator.integers(self.choices)
        allowed = seen[self.observations :].reshape(len(self.choices), -1)
        return np.array([generator.choice(row.nonzero()[0]) for row in allowed])

    def _branches_exactly(self, record: list[tuple[Trail, list[Any]]]) -> bool:
        """Whether branches give what the recorded episodes gave.

        A few are played to the end, where a state that was left out may show late. Many
        are played for a moment, where it shows at once but in few of the steps.
        """
        trails = [trail for trail, _ in record]
        points = [
            (number, begin, end)
            for number, trail in enumerate(trails)
            for begin, end in self._points(len(trail.actions))
        ]
        # two lanes at every point, in turns: copies that share an object show it
        width = 1 if self.alone else 2
        episode, step, _ = np.repeat(points, width, 0).T
        try:
            branches = self._branches(
                trails, episode, step, [()] * len(step), SteppedLanes(self, [])
            )
            lanes: list[Env | None] = [None] * width
            for number, begin, end in points:
                lanes = [branches.send(env) for env in lanes]
                trail, given = record[number]
                actions = self.native(trail.actions[begin:end])
                for action, expected in zip(actions, given[begin:end], strict=True):
                    if not all(
                        self._gives(env, action, expected) for env in lanes if env is not None
                    ):
                        return False
        except Exception:  # a way that raises is a way that does not work
            return False
        finally:
            self.close()
        return True

    def _points(self, steps: int) -> list[tuple[int, int]]:
        """The tests (begin, end) of an episode, in the order of their begins."""
        found = dict.fromkeys((0, steps // 3, 2 * steps // 3, steps - 1), steps)
        # a replay has no state to leave out, and the way to every point is long
        if self.way != "replay":
            for begin in range(0, steps, GLANCES):
                found.setdefault(begin, min(begin + GLANCE, steps))
        return sorted(found.items())


class SteppedLanes:
    """Lanes of one object per episode."""

    def __init__(self, environment: Stepped, environments: list[Env]) -> None:
        self.environment = environment
        self.environments = environments
        self.replayed = 0
        self._moved = False
        self._source: Generator[Env, Env | None, None] | None = None

    def follow(self, source: Generator[Env, Env | None, None], lanes: int) -> None:
        """Take branches from here, the first for so many lanes."""
        # a branch is no beginning: it keeps no states
        self._source, self._moved = source, True
        self.environments = [next(source) for _ in range(lanes)]

    def state(self) -> list[Any] | None:
        """Snapshots after the reset alone, which takes long in Atari games; one per step
        would cost more than the few that branches go back to.
        """
        return None if self._moved else self.environment.begins(self.environments)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        world = self.environment
        self._moved = True
        given = [
            world.step_one(env, action)
            for env, action in zip(self.environments, world.native(actions), strict=True)
        ]
        seen, reward, terminated, over, info = zip(*given, strict=True)
        if (
            world.encoder is None
            and not world.masks
            and (world.space is None or is_bytes(world.space))
        ):
            observations = self._stacked(seen)
        else:
            rows = zip(self.environments, seen, info, over, strict=True)
            observations = np.array(
                [world.observe(env, x, more, over=end) for env, x, more, end in rows]
            )
        return observations, np.array(reward), np.array(terminated), np.array(over)

    def _stacked(self, seen: tuple[Any, ...]) -> Array:
        try:
            stacked = np.array(seen, np.float64).reshape(len(seen), -1)
        except (TypeError, ValueError):
            stacked = np.empty(0)
        if stacked.shape != (len(seen), self.environment.observations):
            # which says what is wrong
            return np.array([self.environment.encode_one(x) for x in seen])
        # all lanes at once: a division per lane would cost more than the stacking
        return stacked if self.environment.space is None else stacked / 255

    def keep(self, lanes: Array) -> None:
        kept = set(lanes.tolist())
        self.environment.give_back(
            env for lane, env in enumerate(self.environments) if lane not in kept
        )
        self.environments = [self.environments[lane] for lane in lanes]
        # lets the generator give its trunk back
        if not self.environments and self._source is not None:
            self._source.close()

    def restore(self, lane: int) -> None:
        assert self._source is not None  # only branches are restored
        self.environments[lane] = self._source.send(self.environments[lane])
