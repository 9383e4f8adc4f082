"""Any Gymnasium environment, one object per episode."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from gymnasium import Space

from arsm.rl.environment import (
    Array,
    EnvironmentFailure,
    Randomness,
    Replays,
    Trail,
    strayed,
)
from arsm.rl.snapshots import Env, Snapshot, Way, snapshot_of
from arsm.rl.spaces import Encoder, encode, exists, full_mask, is_bytes
from arsm.rl.teams import Team


@dataclass(frozen=True, eq=False)
class Stepped:
    """Any deterministic Gymnasium environment with discrete actions."""

    name: str
    make: Callable[[], Env]
    shape: tuple[int, ...]
    """The shape of an encoded observation."""
    choices: tuple[int, ...]
    first_choice: Array
    """[K]: the numbers of the first actions; [] for a single action, where the
    environment wants no array.
    """
    horizon: int
    space: Space[Any] | None = None
    """The observations' space, where they must be encoded."""
    encoder: Encoder | None = None
    masked_by: Literal["info", "method"] | None = None
    """The source of action masks: `info["action_mask"]` or `action_masks()`."""
    agents: int = 1
    """Agents of a team, whose observations and actions lie side by side."""
    snapshot: Snapshot | None = None
    randomness: Randomness = "same"
    """Whether a branch goes on with the true episode's random numbers or with its own."""
    way: Way = "replay"
    """The way to branch."""
    alone: bool = False
    """Whether its instances share state, so that only one is ever played at a time."""
    made: list[Env] = field(default_factory=list, init=False, repr=False)
    """To be closed in the end."""
    _spare: list[Env] = field(default_factory=list, init=False, repr=False)
    _awake: set[int] = field(default_factory=set, init=False, repr=False)
    """The ids of those that were reset at least once."""

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "pair"}
        return {**kept, "made": [], "_spare": [], "_awake": set()}  # every process makes its own

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
        while self.made:
            try:
                self.made.pop().close()
            except Exception as error:
                raise self._failure("close", error) from error

    def take(self) -> Env:
        """An environment that is not in use."""
        if self._spare:
            return self._spare.pop()
        # remembered, so that close reaches those that are in use
        self.made.append(self.make())
        return self.made[-1]

    def give_back(self, environments: Iterable[Env | None]) -> None:
        """Keep those for later that were made and not copied."""
        # a deep copy is thrown away: only what was made is closed in the end
        made = set(map(id, self.made))
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
        env = self.take()
        self.give_back([env])
        assert isinstance(env, Team)
        return env

    # ---------------------------------------------------------------- episodes and branches

    def reset(self, seeds: Sequence[int]) -> tuple[SteppedLanes, Array]:
        """Fresh episodes, and their observations [N, D]."""
        environments = [self.take() for _ in seeds]
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
        branches.follow(self.branches(trails, episode, step, streams, branches), lanes)
        return branches

    def branches(
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
        trunk = Trunk(self, lanes)
        try:
            for number, time, stream in zip(episode.tolist(), step.tolist(), streams, strict=True):
                trail = trails[number]
                if self.way == "replay":
                    # the lane's own environment, which its last rollout has left
                    env = spare or self.take()
                    self.restart(env, trail)
                    self.advance(env, trail, 0, time)
                    lanes.replayed += time
                else:
                    trunk.walk(number, trail, time)
                    env = trunk.branch(spare)
                if self.randomness == "fresh":
                    env.unwrapped.np_random = np.random.Generator(
                        np.random.PCG64(np.random.SeedSequence(stream))
                    )
                spare = yield env
        finally:
            self.give_back([trunk.env])

    @cached_property
    def pair(self) -> Snapshot:
        env = self.take()
        pair = snapshot_of(env, self.way, self.snapshot)
        self.give_back([env])
        if pair is None:
            raise EnvironmentFailure(f'{self.name} cannot be branched by "{self.way}".')
        return pair

    def snapshot_at(self, env: Env) -> Any:
        """The state of an environment."""
        try:
            return self.pair[0](env)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.name} holds what it did not when it was tested ({error}), and its state "
                "cannot be copied; let __init__ make it."
            ) from error

    def take_awake(self) -> Env:
        """An environment that wrappers allow to step; a seed makes Atari games load
        again, which takes long.
        """
        env = self.take()
        if id(env) not in self._awake:
            env.reset(seed=0)
            self._awake.add(id(env))
        return env

    def advance(self, env: Env, trail: Trail, begin: int, end: int) -> None:
        """Take the trail's actions from one step to another."""
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

    def restart(self, env: Env, trail: Trail) -> None:
        """Reset to where the trail began."""
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


class Trunk:
    """An environment that walks along one true episode after the other, and stays behind
    where a branch leaves it.
    """

    def __init__(self, world: Stepped, lanes: SteppedLanes) -> None:
        self.world = world
        self.lanes = lanes
        self.env: Env | None = None
        self._episode = self._step = -1
        self._state: Any = None

    def walk(self, episode: int, trail: Trail, step: int) -> None:
        """Go to a step of an episode; branches come by episode and step."""
        if self.env is None or self._episode != episode or self._step > step:
            self._begin(trail)
            self._episode = episode
            self._step = 0
        elif self._step == step:
            return
        assert self.env is not None
        self.world.advance(self.env, trail, self._step, step)
        self.lanes.replayed += step - self._step
        self._step = step
        # one snapshot serves all branches at this step
        if self.world.way != "copy":
            self._state = self.world.snapshot_at(self.env)

    def _begin(self, trail: Trail) -> None:
        self.env = self.env or self.world.take_awake()
        if len(trail.states) == 0 or self.world.way == "copy":
            self.world.restart(self.env, trail)
        else:
            self.world.pair[1](self.env, trail.states[0])

    def branch(self, spare: Env | None) -> Env:
        """An environment that goes on from here: `spare`, if it can be used again."""
        assert self.env is not None  # it has walked here
        if self.world.way == "copy":
            return copy.deepcopy(self.env)
        env = spare or self.world.take_awake()
        self.world.pair[1](env, self._state)
        return env


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
        self._source = source
        self._moved = True
        self.environments = [next(source) for _ in range(lanes)]

    def state(self) -> list[Any] | None:
        """Snapshots after the reset alone, which takes long in Atari games; one per step
        would cost more than the few that branches go back to.
        """
        if self._moved or self.environment.way in ("copy", "replay"):
            return None
        return [self.environment.snapshot_at(env) for env in self.environments]

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        world = self.environment
        self._moved = True
        together = (
            world.encoder is None
            and not world.masks
            and (world.space is None or is_bytes(world.space))
        )
        given = []
        for env, action in zip(self.environments, world.native(actions), strict=True):
            seen, reward, terminated, over, info = world.step_one(env, action)
            if not together:
                seen = world.observe(env, seen, info, over=over)
            given.append((seen, reward, terminated, over))
        rows, rewards, terminated, over = zip(*given, strict=True)
        observations = self._stacked(rows) if together else np.array(rows)
        return observations, np.array(rewards), np.array(terminated), np.array(over)

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
