"""The estimators, one file each, and their names."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from typing import Any

from arsm.estimators.ar import AR
from arsm.estimators.ars import ARS
from arsm.estimators.arsm import ARSM
from arsm.estimators.average import Average
from arsm.estimators.exact import Exact
from arsm.estimators.local_expectation import LocalExpectation
from arsm.estimators.reinforce import Reinforce
from arsm.estimators.rloo import RLOO
from arsm.types import Estimator

NAMES: dict[str, type[Any]] = {
    "exact": Exact,
    "reinforce": Reinforce,
    "ar": AR,
    "ars": ARS,
    "arsm": ARSM,
    "rloo": RLOO,
    "local-expectation": LocalExpectation,
}

__all__ = [
    "AR",
    "ARS",
    "ARSM",
    "NAMES",
    "RLOO",
    "Average",
    "Exact",
    "LocalExpectation",
    "Reinforce",
    "estimator",
    "estimator_names",
]


def estimator_names() -> list[str]:
    """The names that `estimator` knows."""
    return sorted(NAMES)


def estimator(words: str) -> Estimator:
    """Make an estimator from words: "arsm", "rloo:samples=46,ridge=1.0", "4*arsm" (the average of 4 draws)."""
    spec = words.strip()
    count, star, rest = spec.partition("*")
    if star:
        if not count.strip().isdigit():
            raise ValueError(f'"{words}" must begin with a whole number of draws, as in "4*arsm".')
        return Average(estimator(rest), int(count))
    name, _, options = spec.partition(":")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, 1)
        hint = f'did you mean "{close[0]}"?' if close else "known are " + ", ".join(estimator_names()) + "."
        raise ValueError(f'There is no estimator "{name}": {hint}')
    kind = NAMES[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    chosen: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals or key not in fields:
            raise ValueError(
                f'"{option}" is no option of "{name}"; '
                + (f"its options are {', '.join(sorted(fields))}." if fields else "it has none.")
            )
        try:
            chosen[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f'"{value}" is no value for {key}; write a number, True, False or None.') from None
    return kind(**chosen)
