"""Gradients through discrete choices: ask, evaluate, tell."""

from arsm import policy as policy
from arsm.bound import estimate_bound
from arsm.categorical import entropy, log_prob, one_hot
from arsm.comparison import compare
from arsm.driver import estimate
from arsm.estimators import (
    AR,
    ARS,
    ARSM,
    CARMS,
    REBAR,
    RELAX,
    RLOO,
    VIMCO,
    Average,
    DisARM,
    DoubleControl,
    Exact,
    ExactPlusSampled,
    GappedStraightThrough,
    GumbelRao,
    GumbelSoftmax,
    LocalExpectation,
    MuProp,
    Reinforce,
    ReinMax,
    StraightThrough,
    UnorderedSet,
    estimator,
    estimator_names,
    learned_parts,
)
from arsm.evaluate import NotFiniteError
from arsm.layers import estimate_layers
from arsm.types import Estimate, Estimator, Queries

__version__ = "0.1.0"

__all__ = [
    "AR",
    "ARS",
    "ARSM",
    "CARMS",
    "REBAR",
    "RELAX",
    "RLOO",
    "VIMCO",
    "Average",
    "DisARM",
    "DoubleControl",
    "Estimate",
    "Estimator",
    "Exact",
    "ExactPlusSampled",
    "GappedStraightThrough",
    "GumbelRao",
    "GumbelSoftmax",
    "LocalExpectation",
    "MuProp",
    "NotFiniteError",
    "Queries",
    "ReinMax",
    "Reinforce",
    "StraightThrough",
    "UnorderedSet",
    "compare",
    "entropy",
    "estimate",
    "estimate_bound",
    "estimate_layers",
    "estimator",
    "estimator_names",
    "learned_parts",
    "log_prob",
    "one_hot",
]
