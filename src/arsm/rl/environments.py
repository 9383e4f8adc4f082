"""Environments that can branch: one that a package offers for a name, one that a
function makes, or Gymnasium's own behind the adapter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import Error as GymnasiumError
from gymnasium.wrappers import TimeLimit

from arsm.options import closest
from arsm.rl.environment import ENDLESS, Environment, EnvironmentFailure, Randomness
from arsm.rl.settings import check_count
from arsm.rl.snapshots import Env, Snapshot, StickyActions, is_atari, layers
from arsm.rl.spaces import Encoder, categories_of_actions, encoded_shape
from arsm.rl.stepped import Stepped
from arsm.rl.teams import Team, is_parallel
from arsm.rl.ways import with_exact_way

GROUP = "arsm.environments"
"""The entry points of packages that offer an `Environment` for a name: each a function
of the name, the horizon and the randomness.
"""


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
            PettingZoo parallel one, or an `arsm.rl.Environment`. For a name without an
            encoder, a snapshot and options, an installed package may offer a faster
            environment of the same law.
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
    plain = encoder is None and snapshot is None and not options
    if isinstance(which, str):
        # a faster one knows nothing of encoders, snapshots or options
        if plain and (entry := offered(which)) is not None:
            registered = gymnasium.registry.get(which)
            limit = None if registered is None else registered.max_episode_steps
            return entry.load()(which, _earliest(horizon, limit), randomness)
        limit = _spec(which).max_episode_steps
        name = which
        make = _MakeNamed(which, options or {})
        env = make()
    else:
        name = getattr(which, "__name__", type(which).__name__)
        make = _WithoutLimit(which)
        made = which()
        # the user's own implementation needs no adapter, and no test of its ways
        if isinstance(made, Environment):
            _check_plain(made, plain and horizon is None and randomness == "same")
            return made
        env = make.strip(made)
        limit = _time_limit(made)
    # this one only shows its spaces: every lane makes its own
    with closing(env):
        environment = _stepped(
            env, name, make, _earliest(horizon, limit), encoder, snapshot, randomness
        )
    return with_exact_way(environment)


def _stepped(
    env: Env,
    name: str,
    make: Callable[[], Env],
    horizon: int,
    encoder: Encoder | None,
    snapshot: Snapshot | None,
    randomness: Randomness,
) -> Stepped:
    """The adapter of environments with the spaces of this one."""
    _check_spaces(env, name)
    first, actions = categories_of_actions(env.action_space, name)
    seen, info = _first(env, name)
    shape = _observation_shape(env, seen, name, encoder)
    # a vector of numbers is its own encoding; bytes are divided by 255
    numbers = _is_vector(env.observation_space) and env.observation_space.dtype != np.uint8
    needs_encoding = encoder is None and not numbers
    return Stepped(
        name=name,
        make=make,
        shape=shape,
        choices=actions,
        first_choice=first,
        horizon=horizon,
        space=env.observation_space if needs_encoding else None,
        encoder=encoder,
        masked_by=_masks(env, info, name, encoder),
        agents=env.size if isinstance(env, Team) else 1,
        snapshot=snapshot,
        randomness=randomness,
    )


def offered(name: str) -> EntryPoint | None:
    """The environment that an installed package offers for this name, if any."""
    # a package may be found twice, by its source and by its installation
    found = {entry.value: entry for entry in _entries() if entry.name == name}
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(sorted(found))} are both offered for {name}; uninstall one of their "
            "packages, or give a function that makes your environment."
        )
    return next(iter(found.values()), None)


@cache  # reads the metadata of every installed package
def _entries() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


@dataclass(frozen=True)
class _MakeNamed:
    """Make a registered environment without its own time limit; picklable, for worker processes."""

    name: str
    options: dict[str, Any]

    def __call__(self) -> Env:
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
                "An environment must be a gymnasium.Env, a PettingZoo ParallelEnv or an "
                f"arsm.rl.Environment, but {self.make} makes a {type(env).__name__}."
            )
        return _prepared(env.env if isinstance(env, TimeLimit) else env)


def _prepared(env: Env) -> Env:
    base: Any = env.unwrapped
    # a function may make the same environment twice
    if is_atari(base) and not isinstance(base.ale, StickyActions):
        base.ale = StickyActions(base)
    return env


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


def _check_plain(made: Environment, plain: bool) -> None:
    if not plain:
        raise ValueError(
            f"{made.name} is an arsm.rl.Environment, which has its own horizon, encoding, "
            "snapshots, randomness and options; let the function that makes it choose them."
        )


def _spec(name: str) -> Any:
    # which Gymnasium imports first, as it registers the rest
    module, _, name = name.rpartition(":")
    try:
        # importing a package is how it registers its environments
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
    """The time limit of the wrappers, or the one that the environment was registered with."""
    if not isinstance(env, gymnasium.Env):
        return None
    limits = [
        layer.get_wrapper_attr("_max_episode_steps")
        for layer in layers(env)
        if isinstance(layer, TimeLimit)
    ]
    # wrappers may shorten what was registered
    return min(limits) if limits else env.spec and env.spec.max_episode_steps


def _earliest(horizon: int | None, limit: int | None) -> int:
    # Gymnasium has -1 for no limit
    known = [end for end in (horizon, limit) if end is not None and end > 0]
    return min(known, default=ENDLESS)


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


def _masks(
    env: Env, info: dict[str, Any], name: str, encoder: Encoder | None
) -> Literal["info", "method"] | None:
    # Gymnasium's Taxi puts it there; sb3-contrib asks a method
    if "action_mask" in info:
        return "info"
    if env.has_wrapper_attr("action_masks"):
        return "method"
    seen = env.seen_spaces if isinstance(env, Team) else [env.observation_space]
    if encoder is None and any("action_mask" in getattr(each, "spaces", ()) for each in seen):
        raise ValueError(
            f"{name} has its action mask in its observations, which the policy sees but need not "
            'obey; give it as info["action_mask"] or by a method action_masks().'
        )
    return None


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
