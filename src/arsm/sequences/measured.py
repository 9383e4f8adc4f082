"""The result of `compare`: strategies by variance x tokens, as a table, a recommendation,
CSV or a figure.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from dataclasses import dataclass
from typing import Any

from arsm.sequences.batch import Strategy

WIDTH = 88
"""Most columns of a printed comparison."""
APART = 2.5
"""Two costs differ if they are further apart than this many standard errors. More than
the usual 2: the error of few repeats is itself uncertain, and a fifth too small where
gradients have heavy tails."""
FIELDS = (
    "strategy",
    "unbiased",
    "cost",
    "cost_error",
    "variance",
    "variance_error",
    "tokens",
    "seconds",
    "memory",
    "signal",
)


@dataclass(frozen=True)
class Measured:
    """One strategy, measured.

    Attributes:
        variance: Trace of the covariance of one estimate's gradient, over all
            parameters.
        variance_error: Its standard error.
        tokens: Generated tokens per estimate, those of rollouts included.
        tokens_error: Its standard error.
        seconds: Median time of one estimate, backward included.
        memory: Most bytes allocated on the GPU during an estimate, model included; None
            on a CPU.
        signal: |E g|^2, the squared norm of the mean gradient; unbiased, so that noise
            can make it negative.
    """

    label: str
    strategy: Strategy
    variance: float
    variance_error: float
    tokens: float
    tokens_error: float
    seconds: float
    memory: int | None
    signal: float

    @property
    def unbiased(self) -> bool:
        """Whether the strategy claims to be; the gradient of one that does not has a
        scale of its own.
        """
        return self.strategy.unbiased

    @property
    def cost(self) -> float:
        """Variance x tokens; lower is better."""
        return self.variance * self.tokens

    @property
    def cost_error(self) -> float:
        """Standard error of the cost."""
        return math.hypot(self.variance_error * self.tokens, self.variance * self.tokens_error)


@dataclass(frozen=True)
class Comparison:
    """Strategies by variance x tokens, the best first: `print` it.

    Attributes:
        repeats: Independent estimates per strategy.
    """

    rows: tuple[Measured, ...]
    repeats: int

    @property
    def recommendation(self) -> str:
        """One sentence: the strategy to take."""
        # the variance of a biased gradient has another scale: it competes only among its like
        fair = [row for row in self.rows if row.unbiased] or list(self.rows)
        best, *others = fair
        if not any(row.cost for row in fair):
            return (
                "No strategy shows any variance: check that the rewards of different "
                "completions differ."
            )
        if not others:
            return (
                f"Only {best.label} can be recommended: there is no other to compare it with at "
                "the same scale."
            )
        close = [row.label for row in others if not _apart(best, row)]
        if close:
            return (
                f"Use {best.label}, but {_listed(close)} cannot be told apart from it: the "
                f"differences are within the errors of {self.repeats} repeats."
            )
        second = others[0]
        if not best.cost:
            return f"Use {best.label}: its estimates do not vary here."
        # the runner-up tells how much the choice matters
        factor = second.cost / best.cost
        return (
            f"Use {best.label}: {second.label}, the next best, needs {factor:.3g} times its "
            "tokens for one variance."
        )

    def __str__(self) -> str:
        cells = self._cells(plus_minus=" +- ")
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        # numbers are printed in full, names as far as there is room
        widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append("")
        for text in (self.recommendation, *self._notes()):
            lines += textwrap.wrap(text, WIDTH)
        return "\n".join(lines)

    def markdown(self) -> str:
        """A table for a page, with the recommendation below."""
        header, *rows = self._cells(plus_minus=" ± ")
        lines = [_piped(header), _piped(["---"] + ["---:"] * (len(header) - 1)), *map(_piped, rows)]
        return "\n".join([*lines, "", self.recommendation, *self._notes(), ""])

    def csv(self) -> str:
        """All numbers, unrounded, one line per strategy."""
        whole = io.StringIO()
        writer = csv.writer(whole, lineterminator="\n")
        writer.writerow(FIELDS)
        for row in self.rows:
            writer.writerow([row.label, *(getattr(row, name) for name in FIELDS[1:])])
        return whole.getvalue()

    def figure(self) -> Any:
        """A matplotlib figure of every strategy's variance x tokens, relative to the best one's."""
        from arsm.sequences.figure import plot_comparison

        return plot_comparison(self)

    def _cells(self, plus_minus: str) -> list[list[str]]:
        """The table: a header, then a line per strategy."""
        # a column without any number would only be in the way
        on_gpu = any(row.memory is not None for row in self.rows)
        memory = ["GB"] if on_gpu else []
        cells = [
            ["strategy", "variance x tokens", "variance", "tokens", "seconds", *memory, "signal"]
        ]
        for row in self.rows:
            if on_gpu:
                memory = ["" if row.memory is None else _rounded(row.memory / 1e9)]
            cells.append(
                [
                    row.label if row.unbiased else f"{row.label} *",
                    f"{_rounded(row.cost)}{plus_minus}{_rounded(row.cost_error)}",
                    _rounded(row.variance),
                    f"{row.tokens:,.0f}",
                    _rounded(row.seconds),
                    *memory,
                    _rounded(row.signal) if row.signal > 0 else "~0",
                ]
            )
        return cells

    def _notes(self) -> list[str]:
        notes = []
        if not all(row.unbiased for row in self.rows):
            notes.append(
                "*: biased. Its gradient has a scale of its own, and so have its variance and its "
                "signal."
            )
        return notes


def _rounded(x: float) -> str:
    """Three digits; large and small numbers with an exponent."""
    if x and not 1e-3 <= abs(x) < 1e5:
        return f"{x:.2e}"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _apart(one: Measured, other: Measured) -> bool:
    return abs(one.cost - other.cost) > APART * math.hypot(one.cost_error, other.cost_error)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _aligned(cells: list[str], widths: list[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    name = cells[0] if len(cells[0]) <= widths[0] else cells[0][: widths[0] - 3] + "..."
    return [
        name.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]


def _piped(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
