"""Reinforcement learning by try-and-see: environments that branch, rollout engines, and an agent."""

from arsm.rl.agent import Iteration, PolicyGradient, Settings
from arsm.rl.branching import EnvironmentFailure
from arsm.rl.environments import make_environment
from arsm.rl.learners import ActionConditioned, ActorCritic
from arsm.rl.rollouts import WorkerFailure, make_engine

__all__ = [
    "ActionConditioned",
    "ActorCritic",
    "EnvironmentFailure",
    "Iteration",
    "PolicyGradient",
    "Settings",
    "WorkerFailure",
    "make_engine",
    "make_environment",
]
