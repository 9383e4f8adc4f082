"""An entry of the audit of released packages, and how its result is put into columns."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import arsm
from arsm.referee import PROBLEMS, Audit, Objective, Problem
from arsm.referee.measure import Loss
from arsm.referee.problems import Function
from arsm.referee.worlds import TrainerLoss

SAMPLES = 1 << 14
BINARY = [p for p in PROBLEMS if p.weights.shape[1] == 2]
SOME = [
    p
    for p in PROBLEMS
    if p.role in ("f", "f+100") or p.learns or p.name in ("masked categories", "a batch of 2")
]
"""For packages whose calls take long: an f with and without a constant, several variables, masks, a
small batch.
"""
ONE_VARIABLE = [p for p in SOME if len(p.weights) == 1]
UNBIASED = "unbiased"
RELAXED = "a relaxation; no claim of being unbiased"


class Found(NamedTuple):
    """What an audit found, in words."""

    verdict: str
    finding: str = ""
    scale: str = ""
    draws: str = ""


@dataclass(frozen=True)
class Entry:
    """Somebody's estimator, and what its documentation claims."""

    name: str
    package: str
    """Its distribution on PyPI."""
    module: str
    claim: str
    run: Callable[[], Found]
    requires: tuple[str, ...] = ()
    """What pip installs for it; the package alone by default."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """What its environment contains besides torch and numpy; nothing for the entries of
        torch and of this library.
        """
        return self.requires or (() if self.package in ("torch", "arsm") else (self.package,))


def from_package(name: str) -> Any:
    """The module; imported by name, since none of them is a requirement of this package."""
    return importlib.import_module(name)


def from_gradient(gradient: Callable[[Tensor, Function], Tensor]) -> Loss:
    """A loss for code that computes the gradient itself: gradient(logits, f) -> shaped like the
    logits.
    """

    def loss(logits: Tensor, f: Any) -> Tensor:
        with torch.enable_grad():
            found = gradient(logits.detach().clone().requires_grad_(), f)
        f.theta.grad = None
        return (logits.masked_fill(logits == -torch.inf, 0) * found.detach()).sum()

    return loss


def sentences(audit: Audit) -> str:
    """All findings; places in a package without the folder of the environment that holds it."""
    found = " ".join(f"[{f.kind}] {f.sentence}" for f in audit.findings)
    return re.sub(r"\S*/site-packages/", "", found)


def judged(audit: Audit, draws: str) -> Found:
    """An audit as columns."""
    scale = (
        ""
        if audit.scale is None
        else f"{audit.scale.value:.3f} [{audit.scale.low:.3f}, {audit.scale.high:.3f}]"
    )
    return Found(audit.verdict, sentences(audit), scale, draws)


def refereed(
    make: Callable[[], TrainerLoss], target: Objective | None = None, up_to_scale: bool = False
) -> Callable[[], Found]:
    """An entry whose whole loss, to be minimised, `arsm.audit_sequences` judges."""

    def run() -> Found:
        found = arsm.audit_sequences(
            make(), target=target or Objective(), up_to_scale=up_to_scale, sign=-1
        )
        return in_columns(found)

    return run


def in_columns(audit: Audit) -> Found:
    """An audit of a whole loss as columns: its scale and direction are those of the first
    setting.
    """
    row = next((r for r in audit.rows if r.scale is not None), None)
    scale = "" if row is None or row.scale is None else f"{row.scale.value:.3f}"
    if row is not None and row.direction is not None:  # a gradient of 0 has none
        scale += f", direction {row.direction:.3f}"
    finding = sentences(audit)
    factor = [n for n in audit.notes if n.startswith("Right up to")]
    return Found(audit.verdict, finding or " ".join(factor), scale, "enumerated")


def audited(
    make: Callable[[], Loss], problems: Sequence[Problem] = SOME, samples: int = SAMPLES
) -> Callable[[], Found]:
    """An entry that `arsm.audit` judges."""
    return lambda: judged(arsm.audit(make(), problems=problems, samples=samples), f"{samples:,}")
