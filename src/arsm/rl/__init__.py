"""Reinforcement learning: environments that can return to a state, engines that play
rollouts, and an agent whose credit comes from branches, from a learned value, or from
both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from arsm.rl.settings import Learning, Settings

if TYPE_CHECKING:
    from arsm.rl.agent import Evaluation, Iteration, PolicyGradient
    from arsm.rl.callbacks import Checkpoint, Evaluate
    from arsm.rl.credit import ActionConditioned, Value
    from arsm.rl.environment import Environment, EnvironmentFailure, Lanes, Trail
    from arsm.rl.environments import make_environment
    from arsm.rl.rollouts import WorkerFailure, make_engine

__all__ = [
    "ActionConditioned",
    "Checkpoint",
    "Environment",
    "EnvironmentFailure",
    "Evaluate",
    "Evaluation",
    "Iteration",
    "Lanes",
    "Learning",
    "PolicyGradient",
    "Settings",
    "Trail",
    "Value",
    "WorkerFailure",
    "make_engine",
    "make_environment",
]

# these need gymnasium, which settings alone do without
_LATE = {
    "agent": ("Evaluation", "Iteration", "PolicyGradient"),
    "callbacks": ("Checkpoint", "Evaluate"),
    "credit": ("ActionConditioned", "Value"),
    "environment": ("Environment", "EnvironmentFailure", "Lanes", "Trail"),
    "environments": ("make_environment",),
    "rollouts": ("WorkerFailure", "make_engine"),
}
"""Names by their modules."""
_GONE = {"Proximal": "Value()", "ActorCritic": "Value.actor_critic()"}
"""Names of 0.2, and what to write instead."""


def __dir__() -> list[str]:
    # completion offers the names that are imported late too
    return sorted({*__all__, "__doc__"})


def __getattr__(name: str) -> Any:
    if name in _GONE:
        # an AttributeError would lose its words in `from arsm.rl import ...`
        raise ImportError(
            f"{__name__}.{name}() is {__name__}.{_GONE[name]} since 0.3; docs/migration.md has its "
            "options."
        )
    place = next((module for module, names in _LATE.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{place}")
    except ModuleNotFoundError as error:
        if error.name not in ("gymnasium", "numpy"):
            raise
        words = f"{__name__} needs {error.name}; install it with `pip install 'arsm[rl]'`."
        raise ModuleNotFoundError(words, name=error.name) from None
    return getattr(module, name)
