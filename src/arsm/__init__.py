"""Gradients through discrete choices: ask, evaluate, tell.

    import torch, arsm

    logits = torch.zeros(30, requires_grad=True)  # one choice among 30
    reward = torch.linspace(0, 1, 30)  # the last is the best
    optimiser = torch.optim.Adam([logits], lr=0.1, maximize=True)
    for _ in range(200):
        out = arsm.estimate(arsm.RLOO(16), logits, lambda z: reward[z[:, 0]])
        optimiser.zero_grad()
        out.value.mean().backward()
        optimiser.step()
    print(logits.softmax(-1) @ reward)  # at first 0.5, now almost 1

Where to go on:

- `arsm.estimate`: the gradient of E[f(z)] for any f; `arsm.estimator_names()` and
  `arsm.compare` help to choose an estimator. `estimate_layers` for choices that depend
  on each other, `estimate_bound` for log-likelihoods.
- `arsm.Choice` and `arsm.choices`: discrete choices inside a PyTorch module.
- `arsm.sequences`, `arsm.trl`: language models, with credit token by token.
- `arsm.policy`, `arsm.rl`: episodes of a simulator or an environment.
- `arsm.maximize`, `arsm.optuna`: the best settings of a black box.
- `arsm.pyro`: an ELBO for Pyro.
- `arsm.audit`, `arsm.testing`: is this gradient right, anybody's?
- `arsm.extend`: tools for authors of estimators.
"""

import importlib
from typing import TYPE_CHECKING

from arsm import estimators
from arsm import extend as extend
from arsm import policy as policy
from arsm import referee as referee
from arsm import sequences as sequences
from arsm.bound import estimate_bound
from arsm.categorical import entropy, log_prob, one_hot
from arsm.checks import NotFiniteError
from arsm.choice import Choice, choices
from arsm.comparison import compare
from arsm.draws import sample
from arsm.driver import estimate
from arsm.estimators import *  # noqa: F403  an estimator is listed once, in its own room
from arsm.layers import estimate_layers
from arsm.ranking import Ranking
from arsm.referee import Audit, audit, audit_advantages, audit_sequences
from arsm.rows import ragged, rowwise
from arsm.search import Maximum, Search, When, maximize
from arsm.subsets import subset_log_prob, subset_marginals
from arsm.types import Estimate, Estimator

if TYPE_CHECKING:
    from arsm import optuna as optuna
    from arsm import pyro as pyro
    from arsm import rl as rl
    from arsm import testing as testing
    from arsm import trl as trl

__version__ = "0.3.0"

__all__ = [
    "Audit",
    "Choice",
    "Estimate",
    "Estimator",
    "Maximum",
    "NotFiniteError",
    "Ranking",
    "Search",
    "When",
    "audit",
    "audit_advantages",
    "audit_sequences",
    "choices",
    "compare",
    "entropy",
    "estimate",
    "estimate_bound",
    "estimate_layers",
    "log_prob",
    "maximize",
    "one_hot",
    "ragged",
    "rowwise",
    "sample",
    "subset_log_prob",
    "subset_marginals",
]
__all__ += estimators.__all__

_ROOMS = ("extend", "policy", "referee", "sequences")
"""Modules for users that are imported with the package."""
_LATE = ("optuna", "pyro", "rl", "testing", "trl")
"""Modules that are imported on their first use; all but `testing` need packages that
the core does without.
"""

if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            from arsm.options import closest

            known = {each.lower(): each for each in __dir__()}  # arsm.Rloo is arsm.RLOO
            meant = known.get(closest(name.lower(), known) or "")
            mend = f'; did you mean "{meant}"?' if meant else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{mend}")
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            # `hasattr` and `help` expect an AttributeError; the sentence says which extra to
            # install
            raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATE, *_ROOMS, "__doc__", "__version__"})
