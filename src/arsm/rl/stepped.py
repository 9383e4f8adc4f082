"""Any Gymnasium environment, one object an episode: it branches in the first way that a test finds exact."""

from __future__ import annotations

import copy
import io
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from arsm.rl.branching import Array, EnvironmentFailure, Replays, Trail, check_finite

Env = gymnasium.Env[Any, Any]
Encoder = Callable[[Any], Array]
Way = Literal["state", "copy", "replay"]


@dataclass(frozen=True, eq=False)
class Stepped:
    """Any deterministic Gymnasium environment with discrete actions and vectors as observations."""

    name: str
    make: Callable[[], Env]
    observations: int
    choices: tuple[int, ...]
    first_choice: Array
    """[K]: the numbers of the first actions; [] for a single action, where the environment wants no array."""
    horizon: int
    encoder: Encoder | None = None
    way: Way = "replay"
    """How to branch: by setting the environment's attributes if all are plain data, by deepcopy, or by replaying the
    episode's seed and actions."""
    _made: list[Env] = field(default_factory=list, init=False, repr=False)
    _spare: list[Env] = field(default_factory=list, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": [], "_spare": []}  # every process makes its own

    def close(self) -> None:
        """Close all environments that were made; later ones are made anew."""
        self._spare.clear()
        while self._made:
            try:
                self._made.pop().close()
            except Exception as error:
                raise self._failure("close", error) from error

    def _take(self) -> Env:
        if self._spare:
            return self._spare.pop()
        self._made.append(self.make())
        return self._made[-1]

    def give_back(self, environments: Iterable[Env | None]) -> None:
        """Keep those for later that were made and not copied."""
        made = set(map(id, self._made))
        self._spare.extend(env for env in environments if env is not None and id(env) in made)

    @property
    def lanes(self) -> int | None:
        """As many as make the policy's share of the time small."""
        return 32

    def start(self, seeds: Sequence[int]) -> tuple[SteppedLanes, Array]:
        """Fresh episodes, and their observations [N, D]."""
        environments = [self._take() for _ in seeds]
        seen = np.stack([self.reset(env, seed) for env, seed in zip(environments, seeds, strict=True)])
        return SteppedLanes(self, environments, self._branches((), seen[:0, 0], seen[:0, 0])), seen

    def branch(self, trails: Sequence[Trail], episode: Array, step: Array, lanes: int) -> SteppedLanes:
        """The first `lanes` branches; the others follow by `restart`, in the order given: sorted by step they share
        the way there."""
        source = self._branches(trails, episode, step)
        return SteppedLanes(self, [next(source) for _ in range(lanes)], source)

    def _branches(self, trails: Sequence[Trail], episode: Array, step: Array) -> Generator[Env, Env | None, None]:
        """An environment at each of these steps; one that is sent back is used again."""
        spare: Env | None = None
        trunk, at = None, (-1, -1)
        try:
            for number, time in zip(episode.tolist(), step.tolist(), strict=True):
                trail = trails[number]
                if self.way == "replay":
                    env = spare or self._take()
                    self.reset(env, trail.seed)
                    self._advance(env, trail, 0, time)
                else:
                    if trunk is None or at[0] != number or at[1] > time:
                        trunk, at = trunk or self._take(), (number, 0)
                        self.reset(trunk, trail.seed)
                    self._advance(trunk, trail, at[1], time)
                    at = (number, time)
                    if self.way == "copy":
                        env = copy.deepcopy(trunk)
                    else:
                        env = spare or self._awake()
                        _set_data(env, self._state(trunk))
                spare = yield env
        finally:
            self.give_back([trunk])

    def _state(self, env: Env) -> bytes:
        try:
            return _get_data(env)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.name} holds what it did not when it was tested ({error}), so that its state cannot be copied; "
                "let __init__ make it."
            ) from error

    def replayed(self, episode: Array, step: Array) -> int:
        """How many steps are played again on the way to these branches."""
        if self.way == "replay":
            return int(step.sum())
        return sum(int(step[episode == number].max()) for number in np.unique(episode))

    def _awake(self) -> Env:
        """An environment that wrappers allow to step."""
        env = self._take()
        env.reset(seed=0)
        return env

    def _advance(self, env: Env, trail: Trail, begin: int, end: int) -> None:
        actions = self.native(trail.actions[begin:end])
        if isinstance(env, Replays):
            env.replay(actions)
            return
        for action in actions:
            self.step(env, action)

    def native(self, actions: Array) -> list[Any]:
        """Actions [N, K] as the environment wants them."""
        if self.first_choice.ndim == 0:
            return (actions[:, 0] + self.first_choice).tolist()
        return list(actions + self.first_choice)

    def reset(self, env: Env, seed: int) -> Array:
        """The first observation [D]."""
        try:
            return self.encode(env.reset(seed=seed)[0])
        except Exception as error:
            raise self._failure("reset", error) from error

    def step(self, env: Env, action: Any) -> tuple[Any, float, bool, bool]:
        """The observation as the environment gives it, the reward, whether it terminated, and whether it is over."""
        try:
            seen, reward, terminated, truncated, _ = env.step(action)
        except Exception as error:
            raise self._failure("step", error) from error
        return seen, float(reward), terminated, terminated or truncated

    def encode(self, seen: Any) -> Array:
        """An observation as a vector [D]."""
        return np.asarray(seen if self.encoder is None else self.encoder(seen), dtype=np.float64).reshape(-1)

    def _failure(self, doing: str, error: Exception) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self.name} raised {type(error).__name__} in its {doing}: {error}")

    def tested(self) -> Stepped:
        """The same, with the first way to branch that gives the next observations bit for bit."""
        try:
            record = [self._record(seed) for seed in range(3)]
        finally:
            self.close()
        for way in ("state", "copy", "replay"):
            candidate = replace(self, way=way)
            if candidate._branches_exactly(record):
                return candidate
        raise EnvironmentFailure(
            f"{self.name} is not deterministic: the same seed and actions gave other observations, so that it cannot "
            "go back to a state and try another action; make its randomness follow from reset(seed=...)."
        )

    def _record(self, seed: int) -> tuple[Trail, list[Any]]:
        """An episode of random actions, and what each of them gave."""
        generator = np.random.default_rng(seed)
        env, given, actions = self._take(), [], []
        check_finite(self.name, "an observation", self.reset(env, seed))
        for _ in range(min(self.horizon, 200)):
            actions.append(generator.integers(self.choices))
            seen, reward, terminated, over = self.step(env, self.native(actions[-1][None])[0])
            given.append((np.array(seen), reward, terminated, over))
            for what, values in (("a reward", np.asarray(reward)), ("an observation", self.encode(seen))):
                check_finite(self.name, what, values)
            if over:
                break
        return Trail(seed, np.stack(actions)), given

    def _branches_exactly(self, record: list[tuple[Trail, list[Any]]]) -> bool:
        trails = [trail for trail, _ in record]
        points = [
            (number, step)
            for number, trail in enumerate(trails)
            for step in sorted({0, len(trail.actions) // 3, 2 * len(trail.actions) // 3, len(trail.actions) - 1})
        ]
        episode, step = np.array(points).T
        try:
            branches = self._branches(trails, episode, step)
            env = next(branches)
            for place, (number, begin) in enumerate(points):
                trail, given = record[number]
                for action, (seen, *rest) in zip(self.native(trail.actions[begin:]), given[begin:], strict=True):
                    again, *others = self.step(env, action)
                    if not np.array_equal(again, seen) or others != rest:
                        return False
                if place + 1 < len(points):
                    env = branches.send(env)
        except Exception:  # a way that raises is a way that does not work
            return False
        finally:
            self.close()
        return True


class SteppedLanes:
    """Lanes of one object an episode."""

    def __init__(
        self,
        environment: Stepped,
        environments: list[Env],
        source: Generator[Env, Env | None, None],
    ) -> None:
        self.environment = environment
        self.environments = environments
        self.source = source

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        step, encode = self.environment.step, self.environment.encode
        chosen = self.environment.native(actions)
        given = [step(env, action) for env, action in zip(self.environments, chosen, strict=True)]
        seen, *rest = zip(*given, strict=True)
        observations = np.array([encode(x) for x in seen]) if self.environment.encoder else np.array(seen, np.float64)
        reward, terminated, over = map(np.array, rest)
        return observations.reshape(len(given), -1), reward, terminated, over

    def drop(self, keep: Array) -> None:
        done = np.setdiff1d(range(len(self.environments)), keep)
        self.environment.give_back(self.environments[lane] for lane in done)
        self.environments = [self.environments[lane] for lane in keep]
        if not self.environments:
            self.source.close()

    def restart(self, lane: int) -> None:
        self.environments[lane] = self.source.send(self.environments[lane])


def layers(env: Env) -> list[Env]:
    """An environment's wrappers, the outermost first, and itself."""
    return [env, *layers(env.env)] if isinstance(env, gymnasium.Wrapper) else [env]


def _is_constant(x: Any) -> bool:
    if isinstance(x, FunctionType):
        return x.__closure__ is None  # which could hold state
    return isinstance(x, (gymnasium.Space, EnvSpec, type))


def _variables(env: Env) -> list[dict[str, Any]]:
    """The attributes of each layer, but for what never changes."""
    known = set(map(id, layers(env)))

    def changes(name: str, x: Any) -> bool:
        return id(x) not in known and not _is_constant(x) and name != "_saved_kwargs"  # what Gymnasium's wrappers got

    return [{name: x for name, x in vars(layer).items() if changes(name, x)} for layer in layers(env)]


class _DataPickler(pickle.Pickler):
    """Refuses what is no plain data, such as an object of which only its class knows how to copy it."""

    def reducer_override(self, x: Any) -> Any:
        """Asked about all but Python's numbers, strings, tuples, lists, dicts and sets themselves."""
        if isinstance(x, DATA) or hasattr(x, "__qualname__"):  # functions and classes are pickled by their names
            return NotImplemented
        raise TypeError(f"{type(x).__name__} is no plain data")


DATA = (
    *(dict, list, set, frozenset, tuple, deque),
    *(np.ndarray, np.generic, np.dtype),
    *(np.random.Generator, np.random.BitGenerator, np.random.SeedSequence),
)


def _get_data(env: Env) -> bytes:
    """The state, if it is plain data throughout, and the random numbers."""
    file = io.BytesIO()
    _DataPickler(file, pickle.HIGHEST_PROTOCOL).dump(_variables(env))
    return file.getvalue()


def _set_data(env: Env, data: bytes) -> None:
    for layer, before, after in zip(layers(env), _variables(env), pickle.loads(data), strict=True):
        for name in before.keys() - after.keys():
            delattr(layer, name)
        vars(layer).update(after)
