"""The estimators, one file each, and their names."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from arsm.capabilities import is_estimator_class
from arsm.estimators.aimle import AIMLE
from arsm.estimators.ar import AR
from arsm.estimators.ars import ARS
from arsm.estimators.ars_plus import ARSPlus
from arsm.estimators.arsm import ARSM
from arsm.estimators.arsm_plus import ARSMPlus
from arsm.estimators.average import Average
from arsm.estimators.carms import CARMS
from arsm.estimators.decoupled_straight_through import DecoupledStraightThrough
from arsm.estimators.disarm import DisARM
from arsm.estimators.double_control import DoubleControl
from arsm.estimators.dr_grpo import DrGRPO
from arsm.estimators.exact import Exact
from arsm.estimators.exact_plus_sampled import ExactPlusSampled
from arsm.estimators.gapped_straight_through import GappedStraightThrough
from arsm.estimators.grpo import GRPO
from arsm.estimators.gumbel_rao import GumbelRao
from arsm.estimators.gumbel_softmax import GumbelSoftmax
from arsm.estimators.imle import IMLE
from arsm.estimators.local_expectation import LocalExpectation
from arsm.estimators.muprop import MuProp
from arsm.estimators.nvil import NVIL
from arsm.estimators.otb import OTB
from arsm.estimators.rebar import REBAR
from arsm.estimators.reinforce import Reinforce
from arsm.estimators.reinmax import ReinMax
from arsm.estimators.reinmax_rao import ReinMaxRao
from arsm.estimators.relax import RELAX
from arsm.estimators.rloo import RLOO
from arsm.estimators.rodeo import RODEO
from arsm.estimators.simple import SIMPLE
from arsm.estimators.straight_through import StraightThrough
from arsm.estimators.subset_rloo import SubsetRLOO
from arsm.estimators.ugc import UGC
from arsm.estimators.unordered_set import UnorderedSet
from arsm.estimators.vimco import VIMCO
from arsm.named import load
from arsm.options import closest
from arsm.types import Estimator

NAMES: dict[str, type[Any]] = {
    "exact": Exact,
    "reinforce": Reinforce,
    "nvil": NVIL,
    "ar": AR,
    "ars": ARS,
    "ars-plus": ARSPlus,
    "arsm": ARSM,
    "arsm-plus": ARSMPlus,
    "rloo": RLOO,
    "local-expectation": LocalExpectation,
    "disarm": DisARM,
    "ugc": UGC,
    "carms": CARMS,
    "unordered-set": UnorderedSet,
    "exact-plus-sampled": ExactPlusSampled,
    "vimco": VIMCO,
    "grpo": GRPO,
    "dr-grpo": DrGRPO,
    "otb": OTB,
    "double-control": DoubleControl,
    "rodeo": RODEO,
    "gumbel-softmax": GumbelSoftmax,
    "straight-through": StraightThrough,
    "decoupled-straight-through": DecoupledStraightThrough,
    "gumbel-rao": GumbelRao,
    "gapped-straight-through": GappedStraightThrough,
    "reinmax": ReinMax,
    "reinmax-rao": ReinMaxRao,
    "imle": IMLE,
    "aimle": AIMLE,
    "muprop": MuProp,
    "rebar": REBAR,
    "relax": RELAX,
}

__all__ = [
    "AIMLE",
    "AR",
    "ARS",
    "ARSM",
    "CARMS",
    "GRPO",
    "IMLE",
    "NVIL",
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
    "Average",
    "DecoupledStraightThrough",
    "DisARM",
    "DoubleControl",
    "DrGRPO",
    "Exact",
    "ExactPlusSampled",
    "GappedStraightThrough",
    "GumbelRao",
    "GumbelSoftmax",
    "LocalExpectation",
    "MuProp",
    "ReinMax",
    "ReinMaxRao",
    "Reinforce",
    "StraightThrough",
    "SubsetRLOO",
    "UnorderedSet",
    "estimator",
    "estimator_names",
]


_OWN = re.compile(r"(?P<name>.+?:[A-Za-z_][\w.]*)(:(?P<options>.*))?")
"""module:Class or path.py:Class, with options."""


def _fields(kind: type[Estimator]) -> tuple[dataclasses.Field[Any], ...]:
    """The options of a class; one of a user's need not be a dataclass."""
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def estimator_names() -> list[str]:
    """The names that `estimator` knows."""
    return sorted(NAMES)


def estimator(words: str) -> Estimator:
    """Make an estimator from words: "arsm", "rloo:samples=46,surrogate=logits",
    "4*arsm" (the average of 4 draws), "my_module:MyEstimator" or
    "path/to/file.py:MyEstimator:samples=8" (your own).
    """
    spec = words.strip()
    count, star, rest = spec.partition("*")
    if star:
        if not count.strip().isdigit():
            raise ValueError(f'"{words}" must begin with a whole number of draws, as in "4*arsm".')
        return Average(estimator(rest), int(count))

    name, kind, options = _class_and_options(spec)
    fields = {field.name: field for field in _fields(kind) if field.init}
    chosen: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if key in fields and not equals:
            raise ValueError(f'Option "{key}" of "{name}" needs a value, as in "{name}:{key}=...".')
        if key not in fields:
            known = f"its options are {', '.join(sorted(fields))}" if fields else "it has none"
            raise ValueError(f'"{option}" is no option of "{name}"; {known}.')
        chosen[key] = _option_value(fields[key], value)
    return kind(**chosen)


def _class_and_options(spec: str) -> tuple[str, type[Any], str]:
    """The name, the class and the options that words stand for: a known name, or a user's class."""
    name, _, options = spec.partition(":")
    if name in NAMES:
        return name, NAMES[name], options
    if own := _OWN.fullmatch(spec):
        kind = load(own["name"])
        if not is_estimator_class(kind):
            raise ValueError(f'"{own["name"]}" is no class of estimators.')
        return own["name"], kind, own["options"] or ""
    meant = closest(name.lower(), NAMES)
    if meant is not None:
        raise ValueError(f'There is no estimator "{name}": did you mean "{meant}"?')
    raise ValueError(
        f'There is no estimator "{name}": known are {", ".join(estimator_names())}, and your '
        "own as module:Class or path.py:Class."
    )


def _option_value(field: dataclasses.Field[Any], word: str) -> Any:
    """The value that a word stands for: a number, True, False, None, or the word itself."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        # only options that are words themselves, such as coupling=tree, take words
        if isinstance(field.default, str) or "Literal" in str(field.type):
            return word
    raise ValueError(f'"{word}" is no value for {field.name}; write a number, True, False or None.')
