"""Environments that can branch, by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import Error as GymnasiumError
from gymnasium.wrappers import TimeLimit

from arsm.rl.arrays import Acrobot, Arrays, CartPole
from arsm.rl.branching import Array
from arsm.rl.stepped import Encoder, Env, Stepped, layers

Environment = Arrays | Stepped
ARRAYS: dict[str, type[Arrays]] = {"CartPole-v0": CartPole, "CartPole-v1": CartPole, "Acrobot-v1": Acrobot}


def make_environment(
    which: str | Callable[[], Env], horizon: int | None = None, encoder: Encoder | None = None
) -> Environment:
    """An environment that can branch.

    Args:
        which: the name of a Gymnasium environment, or a function that makes one.
        horizon: the step at which an episode ends at the latest; a limit of the environment's own holds besides.
        encoder: makes a vector of an observation that is none, such as an image.
    """
    if isinstance(which, str):
        limit = _spec(which).max_episode_steps
        if which in ARRAYS and encoder is None:
            return ARRAYS[which](_earliest(horizon, limit, which))
        name, make = which, _MakeNamed(which)
        env = make()
    else:
        if not callable(which):
            raise TypeError(
                f"An environment must be a name or a function that makes one, but is {which}; give its name, its class "
                "or a function without arguments."
            )
        name, make = getattr(which, "__name__", type(which).__name__), _WithoutLimit(which)
        env = which()
        limit = _time_limit(env)
    with closing(env):
        first, choices = _choices(env.action_space, name)
        size = _observation_size(env, name, encoder)
    return Stepped(name, make, size, choices, first, _earliest(horizon, limit, name), encoder).tested()


@dataclass(frozen=True)
class _MakeNamed:
    """Make a registered environment without its own time limit; picklable, for worker processes."""

    name: str

    def __call__(self) -> Env:
        if self.name == "LunarLander-v3":
            from arsm.rl.lunar_lander import TrimmedLunarLander  # Box2D is an extra of its own

            return TrimmedLunarLander()
        return gymnasium.make(self.name, max_episode_steps=-1, disable_env_checker=True)


@dataclass(frozen=True)
class _WithoutLimit:
    """What a function makes, without gymnasium's time limit: at the horizon an episode stops, but does not end."""

    make: Callable[[], Env]

    def __call__(self) -> Env:
        env = self.make()
        return env.env if isinstance(env, TimeLimit) else env


def _spec(name: str) -> Any:
    module, _, name = name.rpartition(":")  # which Gymnasium imports first, as it registers the rest
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise ValueError(f"{module}, to register {name}, cannot be imported ({error}); install it first.") from error
    except GymnasiumError as error:
        close = difflib.get_close_matches(name, gymnasium.registry, 1)
        hint = f'did you mean "{close[0]}"?' if close else "gymnasium.registry lists those there are."
        raise ValueError(f'There is no environment "{name}": {hint}') from error


def _time_limit(env: Env) -> int | None:
    """Of the wrappers, or what the environment was registered with."""
    limits = [layer.get_wrapper_attr("_max_episode_steps") for layer in layers(env) if isinstance(layer, TimeLimit)]
    return min(limits) if limits else env.spec and env.spec.max_episode_steps


def _earliest(horizon: int | None, limit: int | None, name: str) -> int:
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon must be at least 1, but is {horizon}.")
    known = [end for end in (horizon, limit) if end is not None and end > 0]  # Gymnasium has -1 for no limit
    if not known:
        raise ValueError(f"{name} has no time limit; give one as horizon.")
    return min(known)


def _choices(space: spaces.Space[Any], name: str) -> tuple[Array, tuple[int, ...]]:
    if isinstance(space, spaces.Discrete):
        return np.array(space.start), (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return np.asarray(space.start), tuple(int(n) for n in space.nvec)
    raise ValueError(f"{name} has actions {space}, but these gradients are for Discrete or MultiDiscrete ones.")


def _observation_size(env: Env, name: str, encoder: Encoder | None) -> int:
    space = env.observation_space
    if encoder is not None:
        return int(np.asarray(encoder(env.reset(seed=0)[0])).size)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.shape[0]
    raise ValueError(
        f"{name} has observations {space}, but the policy reads vectors; give an encoder that makes a vector of one."
    )
