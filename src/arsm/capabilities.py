"""Compare what an estimator declares with what a caller needs: the one place that says
what fits where.

The sentence of refusal is the same everywhere: "<Estimator> <lack>, but <caller> needs
one that <need>; <instead>."
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from torch import Tensor

from arsm.brief import brief
from arsm.types import Estimator


class Need(NamedTuple):
    """Something that a caller may need of an estimator."""

    met: Callable[[Estimator], bool]
    """Whether an estimator meets it, by its declared members alone."""
    need: str
    """Says what is needed: it follows "... needs one that"."""
    lack: str
    """Says what an estimator does instead: it follows the estimator's name."""


NEEDS = {
    "values_only": Need(
        lambda e: not e.needs_gradient, "only evaluates f", "needs f's derivative in z"
    ),
    "one_pass": Need(
        lambda e: e.pathwise or not e.needs_gradient,
        "only evaluates f, or differentiates it at one point",
        "differentiates f at several points",
    ),
    "mean": Need(
        lambda e: e.target == "mean",
        "estimates the gradient of E[f]",
        "estimates a multi-sample bound",
    ),
    "bound": Need(
        lambda e: e.target == "bound",
        "estimates a multi-sample bound",
        "estimates the gradient of E[f]",
    ),
    "given_sample": Need(
        lambda e: e.given_sample,
        "can start from a sample that was drawn elsewhere",
        "cannot start from a given sample",
    ),
    "independent_rows": Need(
        lambda e: not e.couples_rows,
        "treats every row by itself",
        "learns from one row what it subtracts at another",
    ),
    "nothing_learned": Need(
        lambda e: len(e.learned) == 0,
        "has no learned parts",
        "learns a control variate, which nothing would train",
    ),
    "paths": Need(lambda e: e.paths > 0, "weighs whole samples", "does not weigh whole samples"),
    "one_weight": Need(
        lambda e: not e.weighs_energy,
        "gives a whole sample one weight",
        "weighs every variable of a sample by itself",
    ),
    "compares": Need(
        lambda e: e.paths > 1 and e.centred and not e.weighs_energy,
        "compares several samples by their values alone",
        "does not compare several samples by their values alone",
    ),
    "unbiased": Need(lambda e: e.unbiased, "is unbiased", "is biased"),
}
ANY = -1
"""A value of `subset` for callers to which it does not matter; None already stands for
one category.
"""


def require(
    estimator: object,
    by: str,
    *needs: str,
    subset: int | None = ANY,
    instead: str = "use one such as arsm.RLOO(8)",
) -> None:
    """Refuse an estimator that does not meet the needs of a caller, in one sentence.

    Args:
        estimator: what the caller was given.
        by: the caller, by the name that its user knows.
        needs: names of `NEEDS`.
        subset: number of categories that a sample must have, None for one category of
            each variable.
        instead: what the user should do, without a full stop.
    """
    check_estimator(estimator)
    assert isinstance(estimator, Estimator)
    missing = []
    for name in needs:
        need = NEEDS[name]
        if not need.met(estimator):
            missing.append((need.lack, need.need))
    if subset not in (ANY, estimator.subset):
        missing.append((_chooses(estimator.subset), _chooses(subset)))
    if missing:
        lack, needed = missing[0]  # the first is enough: the message names another estimator
        raise ValueError(
            f"{type(estimator).__name__} {lack}, but {by} needs one that {needed}; {instead}."
        )


def _chooses(subset: int | None) -> str:
    return "chooses one category" if subset is None else f"chooses {subset} categories at once"


def is_estimator(x: object) -> TypeGuard[Estimator]:
    """Whether it is an estimator, for callers that take something else too."""
    return isinstance(x, Estimator)


def is_estimator_class(x: object) -> TypeGuard[type[Estimator]]:
    """Whether it is a class of estimators, for commands that name one."""
    return isinstance(x, type) and issubclass(x, Estimator)


def check_estimator(estimator: object) -> None:
    """Require an estimator, not its name or its class."""
    if isinstance(estimator, Estimator):
        return
    # the advice depends on what was given: words, a class, the logits, or something else
    words = repr(estimator) if isinstance(estimator, str) else '"arsm"'
    mend = f"arsm.estimator({words}) makes one from words"
    if not isinstance(estimator, str | type):
        mend = "an estimator of your own must be a subclass of arsm.Estimator, and " + mend
    if isinstance(estimator, Tensor):
        mend = "the estimator comes first, then the logits"
    found = brief(estimator)
    if is_estimator_class(estimator):
        found = f"the class {estimator.__name__}"
        mend = f"{estimator.__name__}(...), with its options, makes one"
    raise TypeError(f"estimator must be an estimator such as arsm.ARSM(), but is {found}; {mend}.")
