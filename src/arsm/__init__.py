"""Gradients through discrete choices: ask, evaluate, tell."""

import importlib
from typing import TYPE_CHECKING

from arsm import policy as policy
from arsm import referee as referee
from arsm import sequences as sequences
from arsm.bound import estimate_bound
from arsm.categorical import entropy, log_prob, one_hot
from arsm.checks import NotFiniteError
from arsm.choice import Choice, choices
from arsm.comparison import Compared, compare
from arsm.diagnostics import Bias, Moments
from arsm.distinct import share
from arsm.draws import Draws, draw, sample, samples
from arsm.driver import estimate
from arsm.estimators import (
    AR,
    ARS,
    ARSM,
    CARMS,
    GRPO,
    OTB,
    REBAR,
    RELAX,
    RLOO,
    RODEO,
    SIMPLE,
    UGC,
    VIMCO,
    ARSMPlus,
    ARSPlus,
    Average,
    DecoupledStraightThrough,
    DisARM,
    DoubleControl,
    DrGRPO,
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
    SubsetRLOO,
    UnorderedSet,
    estimator,
    estimator_names,
)
from arsm.fields import document_fields
from arsm.layers import LayersEstimate, estimate_layers
from arsm.noise import argmin_sample, dirichlet, race_noise
from arsm.referee import Audit, audit, audit_advantages, audit_sequences
from arsm.rows import ragged, rowwise
from arsm.scores import score, weighted_scores
from arsm.search import Maximum, maximize
from arsm.subsets import subset_log_prob, subset_marginals
from arsm.types import Estimate, Estimator, Queries

if TYPE_CHECKING:
    from arsm import pyro as pyro
    from arsm import rl as rl
    from arsm import testing as testing
    from arsm import trl as trl

__version__ = "0.3.0"

__all__ = [
    "AR",
    "ARS",
    "ARSM",
    "CARMS",
    "GRPO",
    "OTB",
    "REBAR",
    "RELAX",
    "RLOO",
    "RODEO",
    "SIMPLE",
    "UGC",
    "VIMCO",
    "ARSMPlus",
    "ARSPlus",
    "Audit",
    "Average",
    "Choice",
    "DecoupledStraightThrough",
    "DisARM",
    "DoubleControl",
    "DrGRPO",
    "Draws",
    "Estimate",
    "Estimator",
    "Exact",
    "ExactPlusSampled",
    "GappedStraightThrough",
    "GumbelRao",
    "GumbelSoftmax",
    "LocalExpectation",
    "Maximum",
    "MuProp",
    "NotFiniteError",
    "Queries",
    "ReinMax",
    "Reinforce",
    "StraightThrough",
    "SubsetRLOO",
    "UnorderedSet",
    "argmin_sample",
    "audit",
    "audit_advantages",
    "audit_sequences",
    "choices",
    "compare",
    "dirichlet",
    "draw",
    "entropy",
    "estimate",
    "estimate_bound",
    "estimate_layers",
    "estimator",
    "estimator_names",
    "log_prob",
    "maximize",
    "one_hot",
    "race_noise",
    "ragged",
    "rowwise",
    "sample",
    "samples",
    "score",
    "share",
    "subset_log_prob",
    "subset_marginals",
    "weighted_scores",
]

document_fields(*(globals()[name] for name in __all__), *vars(sequences).values())
document_fields(policy.Rollouts, LayersEstimate, Compared, Bias, Moments)

_LATE = ("pyro", "rl", "testing", "trl")
"""Modules that are imported on their first use; all but `testing` need packages that the core does without."""

if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            # `hasattr` and `help` expect an AttributeError; the sentence says which extra to install
            raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
