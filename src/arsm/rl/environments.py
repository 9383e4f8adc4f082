"""Environments that can branch, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import Error as GymnasiumError
from gymnasium.wrappers import TimeLimit

from arsm.options import closest
from arsm.rl.arrays import Acrobot, Arrays, CartPole
from arsm.rl.branching import ENDLESS, EnvironmentFailure
from arsm.rl.settings import check_count
from arsm.rl.snapshots import Env, LastAction, Snapshot, layers
from arsm.rl.spaces import Encoder, categories_of_actions, encoded_shape
from arsm.rl.stepped import Stepped
from arsm.rl.tabular import NAMES, Tabular, tabulate
from arsm.rl.teams import Team, is_parallel

Environment = Arrays | Tabular | Stepped
ARRAYS: dict[str, type[Arrays]] = {
    "CartPole-v0": CartPole,
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
}
Randomness = Literal["same", "fresh"]


def make_environment(
    which: str | Callable[[], Any],
    horizon: int | None = None,
    encoder: Encoder | None = None,
    *,
    snapshot: Snapshot | None = None,
    randomness: Randomness = "same",
    options: dict[str, Any] | None = None,
) -> Environment:
    """An environment that can branch.

    Args:
        which: the name of a Gymnasium environment, or a function that makes one, or a
            PettingZoo parallel one.
        horizon: maximum steps per episode; the environment's own limit applies as well.
        encoder: a function from an observation to a vector, used instead of the
            encoding for its space.
        snapshot: (get, set), the fastest way to branch: get(environment) returns its
            state, set(environment, state) puts it back. The random generator,
            np_random, is kept as well.
        randomness: whether branches of a stochastic environment see the "same" random
            numbers as the true episode or "fresh" ones. The gradient is unbiased either
            way.
        options: arguments of gymnasium.make, for an environment by name.
    """
    _check(which, horizon, snapshot, randomness, options)
    if isinstance(which, str):
        limit = _spec(which).max_episode_steps
        if which in ARRAYS and encoder is None and snapshot is None and not options:
            return ARRAYS[which](_earliest(horizon, limit))
        name, make = which, _MakeNamed(which, options or {})
        env = make()
        if which in NAMES and encoder is None and snapshot is None and not options:
            with closing(env):
                return tabulate(env, which, _needed(_earliest(horizon, limit), which), randomness)
    else:
        name, make = getattr(which, "__name__", type(which).__name__), _WithoutLimit(which)
        made = which()
        env, limit = make.strip(made), _time_limit(made)
    with closing(env):
        _check_spaces(env, name)
        first, actions = categories_of_actions(env.action_space, name)
        seen, info = _first(env, name)
        shape = _observation_shape(env, seen, name, encoder)
        plain = encoder is not None or (
            _is_vector(env.observation_space) and env.observation_space.dtype != np.uint8
        )
        environment = Stepped(
            name=name,
            make=make,
            shape=shape,
            choices=actions,
            first_choice=first,
            horizon=_earliest(horizon, limit),
            space=None if plain else env.observation_space,
            encoder=encoder,
            masked_by=_masks(env, info),
            agents=env.size if isinstance(env, Team) else 1,
            snapshot=snapshot,
            randomness=randomness,
        )
    return environment.tested()


@dataclass(frozen=True)
class _MakeNamed:
    """Make a registered environment without its own time limit; picklable, for worker processes."""

    name: str
    options: dict[str, Any]

    def __call__(self) -> Env:
        if self.name == "LunarLander-v3" and not self.options:
            from arsm.rl.lunar_lander import TrimmedLunarLander  # Box2D is an extra of its own

            return TrimmedLunarLander()
        _spec(self.name)  # a worker process must import the module first
        return _prepared(
            gymnasium.make(
                self.name, max_episode_steps=-1, disable_env_checker=True, **self.options
            )
        )


@dataclass(frozen=True)
class _WithoutLimit:
    """An environment from a function, without gymnasium's time limit: at the horizon an
    episode stops, not ends.
    """

    make: Callable[[], Any]

    def __call__(self) -> Env:
        return self.strip(self.make())

    def strip(self, env: Any) -> Env:
        """The environment without its limit, a team as one environment."""
        if is_parallel(env):
            return Team(env)
        if not isinstance(env, gymnasium.Env):
            raise TypeError(
                "An environment must be a gymnasium.Env or a PettingZoo ParallelEnv, but "
                f"{self.make} makes a {type(env).__name__}."
            )
        return _prepared(env.env if isinstance(env, TimeLimit) else env)


def _prepared(env: Env) -> Env:
    return LastAction(env) if hasattr(env.unwrapped, "ale") else env


def _check(
    which: object, horizon: Any, snapshot: object, randomness: object, options: object
) -> None:
    if not isinstance(which, str) and not callable(which):
        raise TypeError(
            f"An environment must be a name or a function that makes one, but is {which}; give its "
            "name, its class or a function without arguments."
        )
    if horizon is not None:
        check_count("horizon", horizon)
    if snapshot is not None and not (
        isinstance(snapshot, tuple) and len(snapshot) == 2 and all(map(callable, snapshot))
    ):
        raise TypeError(f"snapshot must be a pair of functions (get, set), but is {snapshot!r}.")
    if randomness not in ("same", "fresh"):
        raise ValueError(f'randomness must be "same" or "fresh", but is {randomness!r}.')
    if options and not isinstance(which, str):
        raise ValueError(
            "options are arguments of gymnasium.make; let your function pass them itself."
        )


def _spec(name: str) -> Any:
    # which Gymnasium imports first, as it registers the rest
    module, _, name = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise ValueError(
            f"{module}, to register {name}, cannot be imported ({error}); install it first."
        ) from error
    except GymnasiumError as error:
        meant = closest(name, gymnasium.registry)
        elsewhere = (
            f'if another package registers it, name that package too, as in "package:{name}".'
        )
        hint = elsewhere if meant is None else f'did you mean "{meant}"? Or, {elsewhere}'
        raise ValueError(f'There is no environment "{name}": {hint}') from error


def _time_limit(env: Any) -> int | None:
    """Of the wrappers, or what the environment was registered with."""
    if not isinstance(env, gymnasium.Env):
        return None
    limits = [
        layer.get_wrapper_attr("_max_episode_steps")
        for layer in layers(env)
        if isinstance(layer, TimeLimit)
    ]
    return min(limits) if limits else env.spec and env.spec.max_episode_steps


def _earliest(horizon: int | None, limit: int | None) -> int:
    # Gymnasium has -1 for no limit
    known = [end for end in (horizon, limit) if end is not None and end > 0]
    return min(known, default=ENDLESS)


def _needed(horizon: int, name: str) -> int:
    if horizon == ENDLESS:
        raise ValueError(f"{name} has no time limit; give one as horizon.")
    return horizon


def _check_spaces(env: Env, name: str) -> None:
    missing = [each for each in ("action_space", "observation_space") if not _has_space(env, each)]
    if missing:
        raise EnvironmentFailure(
            f"{name} has no {' and no '.join(missing)}; set self.action_space and "
            "self.observation_space to spaces of gymnasium.spaces in its __init__."
        )


def _has_space(env: Env, which: str) -> bool:
    return isinstance(getattr(env, which, None), spaces.Space)


def _first(env: Env, name: str) -> tuple[Any, dict[str, Any]]:
    try:
        given: Any = env.reset(seed=0)
    except Exception as error:
        raise EnvironmentFailure(
            f"{name} raised {type(error).__name__} in its reset(seed=0): {error}"
        ) from error
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], dict):
        raise EnvironmentFailure(
            f"{name} must return (observation, info) from its reset, info a dict, as Gymnasium's "
            "environments do."
        )
    return given


def _masks(env: Env, info: dict[str, Any]) -> Literal["info", "method"] | None:
    if "action_mask" in info:
        return "info"
    return "method" if env.has_wrapper_attr("action_masks") else None


def _is_vector(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 1


def _observation_shape(env: Env, seen: Any, name: str, encoder: Encoder | None) -> tuple[int, ...]:
    if encoder is not None:
        try:
            return np.asarray(encoder(seen), dtype=np.float64).shape or (1,)
        except Exception as error:
            raise EnvironmentFailure(
                f"The encoder raised {type(error).__name__} on the first observation of {name}: "
                f"{error}"
            ) from error
    shape = encoded_shape(env.observation_space)
    if shape is None or 0 in shape:
        raise ValueError(
            f"{name} has observations {env.observation_space}, which have no encoding; give an "
            "encoder that makes a vector of one."
        )
    return shape
