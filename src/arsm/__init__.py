"""Gradients through discrete choices: ask, evaluate, tell."""

from importlib.metadata import version

from arsm.categorical import entropy, log_prob, one_hot
from arsm.driver import estimate
from arsm.estimators import (
    AR,
    ARS,
    ARSM,
    RLOO,
    Average,
    Exact,
    LocalExpectation,
    Reinforce,
    estimator,
    estimator_names,
)
from arsm.types import Estimate, Estimator, Queries

__version__ = version("arsm")

__all__ = [
    "AR",
    "ARS",
    "ARSM",
    "RLOO",
    "Average",
    "Estimate",
    "Estimator",
    "Exact",
    "LocalExpectation",
    "Queries",
    "Reinforce",
    "entropy",
    "estimate",
    "estimator",
    "estimator_names",
    "log_prob",
    "one_hot",
]
