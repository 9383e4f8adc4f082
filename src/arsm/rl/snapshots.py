"""Ways to take an environment's state and to put it into another environment of the same kind.

Each is a pair (get, set), and none is trusted: `Stepped` compares what follows bit for
bit before it uses one.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

Env = gymnasium.Env[Any, Any]
Snapshot = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
"""(get, set): get(environment) is its state, and set(environment, state) puts it into
another environment.
"""
Way = Literal["snapshot", "save_state", "ale", "mujoco", "state", "copy", "replay"]
WAYS: tuple[Way, ...] = ("snapshot", "save_state", "ale", "mujoco", "state", "copy", "replay")
"""In the order in which they are tried: the user's own, what the environment offers,
its attributes if all of them are plain data, deepcopy, and replaying the episode's seed
and actions."""


def layers(env: Env) -> list[Env]:
    """An environment's wrappers, the outermost first, and itself."""
    return [env, *layers(env.env)] if isinstance(env, gymnasium.Wrapper) else [env]


def snapshot_of(env: Env, way: Way, given: Snapshot | None) -> Snapshot | None:
    """The pair of a way, for this kind of environment; None if the environment lacks
    it, or for copy and replay.
    """
    base: Any = env.unwrapped
    # the user's pair knows nothing of np_random, which belongs to Gymnasium
    if way == "snapshot" and given is not None:
        get, put = given
        return _with_random_numbers(
            lambda env: get(made(env)), lambda env, state: put(made(env), state)
        )
    if way == "save_state" and hasattr(base, "save_state") and hasattr(base, "load_state"):
        return _with_wrappers(
            lambda env: env.unwrapped.save_state(), lambda env, x: env.unwrapped.load_state(x)
        )
    if way == "ale" and is_atari(base):
        return _with_wrappers(_get_ale, _set_ale)
    if way == "mujoco" and hasattr(base, "model") and hasattr(base, "data"):
        return _with_wrappers(
            lambda env: _get_mujoco(env.unwrapped), lambda env, x: _set_mujoco(env.unwrapped, x)
        )
    if way == "state":
        return get_data, set_data
    return None


def made(env: Env) -> Any:
    """The user's own environment, which a team of agents wraps."""
    return getattr(env, "parallel", env)


def _with_random_numbers(get: Callable[[Env], Any], put: Callable[[Env, Any], Any]) -> Snapshot:
    def get_all(env: Env) -> Any:
        return get(env), env.unwrapped.np_random.bit_generator.state

    def set_all(env: Env, state: Any) -> None:
        own, random_numbers = state
        put(env, own)
        env.unwrapped.np_random.bit_generator.state = random_numbers

    return get_all, set_all


def _with_wrappers(get: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> Snapshot:
    """The base environment's own snapshot, with its random numbers and the wrappers' attributes."""
    get_base, set_base = _with_random_numbers(get, put)
    return (
        lambda env: (get_base(env), _dump(_variables(env)[:-1])),
        lambda env, state: (
            set_base(env, state[0]),
            _update(layers(env)[:-1], _variables(env)[:-1], state[1]),
        ),
    )


class StickyActions:
    """An Atari emulator whose actions stick by the environment's random numbers.

    The emulator itself repeats the last frame's action with some probability, but
    leaves that action out of the state that it saves: after one frame in four a branch
    would repeat another action than the true episode. Here both the coin and the action
    belong to the environment. The chances are the same; the coins of a seed are not.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._emulator = base.ale
        self._wanted = base.ale.getFloat(STICKINESS)
        self._chance = 0.0  # the emulator tosses its own coins until it loads a game again
        self.last: tuple[Any, ...] = (0,)
        """The arguments of the last frame's action; 0 does nothing."""
        # all else stays as it is; bound here, as a look-up per call would cost more than the call
        for name in dir(base.ale):
            if not hasattr(type(self), name):
                setattr(self, name, getattr(base.ale, name))

    def loadROM(self, path: Any) -> None:
        """Load a game, as every reset with a seed does."""
        # the emulator reads its settings when it loads
        self._emulator.setFloat(STICKINESS, 0.0)
        self._emulator.loadROM(path)
        self._chance = self._wanted

    def reset_game(self) -> None:
        """Begin an episode: nothing was done before it."""
        self.last = (0,)
        self._emulator.reset_game()

    def act(self, *action: Any) -> float:
        """Play a frame with this action, or with the last frame's."""
        if self._base.np_random.random() >= self._chance:
            self.last = action
        return self._emulator.act(*self.last)


STICKINESS = "repeat_action_probability"


def is_atari(base: Any) -> bool:
    """Whether an environment without its wrappers is one of ale-py."""
    return hasattr(base, "clone_state") and hasattr(base, "ale")


def _get_ale(env: Env) -> Any:
    base: Any = env.unwrapped
    return base.ale.cloneState(include_rng=True), base.ale.last


def _set_ale(env: Env, state: Any) -> None:
    base: Any = env.unwrapped
    emulator, base.ale.last = state
    base.ale.restoreState(emulator)


def _get_mujoco(base: Any) -> Any:
    import mujoco  # pyright: ignore[reportMissingImports]

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(base.model, kind))
    mujoco.mj_getState(base.model, base.data, state, kind)
    return state


def _set_mujoco(base: Any, state: Any) -> None:
    import mujoco  # pyright: ignore[reportMissingImports]

    mujoco.mj_setState(base.model, base.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(base.model, base.data)
    # the forward pass warms the solver for a step that the original has not taken
    mujoco.mj_setState(base.model, base.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)


# ---------------------------------------------------------------- plain data

CONSTANT = {"gymnasium.envs.toy_text": {"P", "desc", "initial_state_distrib"}}
"""Attributes that the environments of a package never change, by the package's name:
large tables.
"""


def get_data(env: Env) -> bytes:
    """The attributes of every layer, if they are plain data throughout, and the random numbers."""
    return _dump(_variables(env))


def set_data(env: Env, data: bytes) -> None:
    """Set the attributes of every layer."""
    _update(layers(env), _variables(env), data)


def _dump(variables: list[dict[str, Any]]) -> bytes:
    # bytes: the state must not change with the environment that it came from
    file = io.BytesIO()
    _DataPickler(file, pickle.HIGHEST_PROTOCOL).dump(variables)
    return file.getvalue()


def _update(targets: list[Env], before: list[dict[str, Any]], data: bytes) -> None:
    for layer, old, new in zip(targets, before, pickle.loads(data), strict=True):
        # an attribute that a later step made was not there yet
        for name in old.keys() - new.keys():
            delattr(layer, name)
        vars(layer).update(new)


def _variables(env: Env) -> list[dict[str, Any]]:
    """The attributes of each layer, but for those that never change."""
    stack = layers(env)
    # a wrapper's reference to the layer below is no state
    known = set(map(id, stack))
    found = []
    for layer in stack:
        # _saved_kwargs are the arguments of Gymnasium's wrappers
        skipped = {"_saved_kwargs", *CONSTANT.get(type(layer).__module__.rpartition(".")[0], ())}
        own = vars(layer).items()
        found.append(
            {
                name: x
                for name, x in own
                if name not in skipped and id(x) not in known and not _is_constant(x)
            }
        )
    return found


def _is_constant(x: Any) -> bool:
    if isinstance(x, FunctionType):
        return x.__closure__ is None  # which could hold state
    return isinstance(x, _FIXED)


_FIXED = (gymnasium.Space, EnvSpec, type)


class _DataPickler(pickle.Pickler):
    """Refuses everything but plain data, such as an object of which only its class
    knows how to copy it.
    """

    def reducer_override(self, x: Any) -> Any:
        """Asked about all but Python's numbers, strings, tuples, lists, dicts and sets
        themselves.
        """
        # functions and classes are pickled by their names
        if isinstance(x, DATA) or hasattr(x, "__qualname__"):
            return NotImplemented
        raise TypeError(f"{type(x).__name__} is no plain data")


DATA = (
    *(dict, list, set, frozenset, tuple, deque),
    *(np.ndarray, np.generic, np.dtype),
    *(np.random.Generator, np.random.BitGenerator, np.random.SeedSequence),
)
