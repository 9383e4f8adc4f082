"""The result of a search."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LINE = 80
"""Longest line of a printed result."""
LINES = 4
"""Most lines that its point may take."""


@dataclass(frozen=True, eq=False, repr=False)
class Maximum:
    """The result of `arsm.maximize`; `print` shows it in a few lines.

    Attributes:
        point: int64 [K], the best point, in numbers of categories.
        settings: The best point of a named space, by name and value; None for a
            space of sizes.
        value: f at the best point.
        history: float64 [n]: the best value after each evaluation; -inf before the
            first that did not fail.
        probabilities: [K, C]: the choices' distribution at the end.
        stopped: Why: "evaluations", "all points known", "no new points",
            "patience", "callback" or "interrupted"; "" while a `Search` goes on.
        failures: The points at which f failed, as f saw them (a tensor as a list),
            and how.
        state: For `maximize(..., state=...)` and torch.save; load it with
            `weights_only=True`.
        described: The best point in words.
    """

    point: Tensor
    settings: dict[str, Any] | None
    value: float
    history: Tensor
    probabilities: Tensor
    stopped: str
    failures: list[tuple[Any, str]]
    state: dict[str, Any]
    described: str

    def __str__(self) -> str:
        # the history never falls, so that the best was found where its last value begins
        found = int((self.history == self.history[-1]).nonzero()[0]) + 1
        where = f"{self.value:.6g} at {self.described}"
        lines = textwrap.wrap(
            where, LINE, subsequent_indent="  ", max_lines=LINES, placeholder=" ..."
        )
        count = len(self.history)
        failed = f", of which {len(self.failures):,} failed" if self.failures else ""
        lines.append(f"evaluation {found:,} of {count:,}{failed}; stopped: {self.stopped}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Maximum(value={self.value!r}, point={self.point.tolist()}, "
            f"evaluations={len(self.history)}, stopped={self.stopped!r})"
        )
