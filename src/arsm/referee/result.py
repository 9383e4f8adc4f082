"""The result of an audit: a verdict for a test, a page for a person, a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from arsm.referee.diagnose import Finding, Interval, Means

Verdict = Literal["unbiased", "wrong", "not decided"]
WIDTH = 110


@dataclass(frozen=True)
class Entry:
    """One entry of one gradient: the largest bias, relative to its interval, of a problem."""

    problem: str
    index: tuple[int, ...]
    truth: float
    bias: Interval

    @property
    def relative(self) -> float:
        """The bias in units of its interval's half-width; beyond 1 it is not 0."""
        half = (self.bias.high - self.bias.low) / 2
        return self.bias.value / half if half else 0.0


def worst_entry(means: Means) -> Entry | None:
    """The entry whose bias is largest relative to its interval; None where nothing is decided."""
    if not bool(means.half_width.isfinite().any()):
        return None
    error = means.mean - means.gradient
    # infinite half-widths, of what cannot be decided, lose
    place = (error.abs() / means.half_width.clamp_min(1e-300)).argmax()
    index = tuple(int(i) for i in torch.unravel_index(place, error.shape))
    value = float(error[index])
    width = float(means.half_width[index])
    return Entry(
        means.name,
        index,
        float(means.gradient[index]),
        Interval(value, value - width, value + width),
    )


def in_words(error: BaseException) -> str:
    """An exception in one line."""
    # a message of many lines would break the table
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('. ')}"


@dataclass(frozen=True)
class Row:
    """A problem's line on the page."""

    problem: str
    size: str
    worst: Entry | None
    """The entry whose bias is largest relative to its interval."""
    rejected: int
    """Entries whose interval excludes a bias of 0."""
    undecided: int
    """Entries too rare to be decided."""
    scale: Interval | None
    """The length in the right direction; 1 is right."""
    variance: float | None = None
    """Trace of one draw's variance, averaged over the rows."""
    evaluations: float | None = None
    """Evaluations of f per row."""
    rloo: float | None = None
    """Leave-one-out's variance with as many evaluations (at least 2)."""
    bound: float | None = None
    """The lower bound on the variance as a share of leave-one-out's, over random additive f."""
    error: str = ""
    """Why there are no numbers."""
    direction: float | None = None
    """The cosine of the angle to the true gradient; 1 is right."""


@dataclass(frozen=True)
class Audit:
    """Is this gradient right? `passed` for a test, `print` for a person.

    Attributes:
        verdict: "unbiased" at the declared rate, "wrong", or "not decided" where the
            loss could not be judged.
        findings: What was found, the most important first.
        rows: One per problem.
        false_alarm: The probability that a correct loss is called wrong; 0 where
            everything was enumerated.
        scale: The length in the right direction over all problems; 1 is right.
        missed: A relative error in the length that would have been caught with
            probability 0.99.
        sizes: What the sizes of the problems are.
        exception: What the loss raised, if it did.
    """

    name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    false_alarm: float
    scale: Interval | None = None
    missed: float | None = None
    notes: tuple[str, ...] = ()
    sizes: str = "B, K, C"
    seconds: float = 0.0
    exception: BaseException | None = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        """Whether every problem ran and none of them shows a bias."""
        return self.verdict == "unbiased"

    @property
    def diagnosis(self) -> str:
        """The kind of the most important finding, such as "scale" or "temperature";
        empty if there is none.
        """
        return self.findings[0].kind if self.findings else ""

    @property
    def bias(self) -> Entry | None:
        """The bias that is largest relative to its interval; the intervals hold together."""
        return max(
            (r.worst for r in self.rows if r.worst),
            key=lambda worst: abs(worst.relative),
            default=None,
        )

    def __repr__(self) -> str:
        parts = [repr(self.name), repr(self.verdict), f"problems={len(self.rows)}"]
        if self.diagnosis:
            parts.append(f"diagnosis={self.diagnosis!r}")
        return f"Audit({', '.join(parts)})"

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict.upper()}", ""]
        for finding in self.findings:
            lines += textwrap.wrap(
                f"[{finding.kind}] {finding.sentence}", WIDTH, subsequent_indent="  "
            )
        lines += [""] * bool(self.findings)
        header = ["problem", self.sizes, "worst entry: bias [interval]", "exact", "length"]
        # columns that no row has a number for are left out
        header += ["direction"] * any(r.direction is not None for r in self.rows)
        header += ["variance", "evals", "RLOO's", "floor"] * any(
            r.variance is not None for r in self.rows
        )
        lines += _table(header, [_cells(r, len(header)) for r in self.rows])
        lines.append("")
        lines += (line for text in self._footer() for line in textwrap.wrap(text, WIDTH))
        return "\n".join(lines)

    def _footer(self) -> Sequence[str]:
        footer = []
        if any(r.worst is not None for r in self.rows):
            words = (
                "*: the interval excludes 0. exact: the entry's true gradient. length: along "
                "it, 1 is right."
            )
            if any(r.direction is not None for r in self.rows):
                words += " direction: the cosine of the angle to it, 1 is right."
            if any(r.variance is not None for r in self.rows):
                words += (
                    " RLOO's: the variance of leave-one-out with as many evaluations; floor: the "
                    "least share of it that is possible, on average over additive f."
                )
            footer.append(words)
        footer += self.notes
        if self.scale is not None:
            footer.append(f"Length over all problems: {self.scale} (1 is right).")
        # of a loss that is wrong, what else could have been missed does not matter
        if self.missed is not None and self.verdict != "wrong":
            footer.append(
                "It could have missed: a length that is wrong by less than "
                f"{100 * self.missed:.2g} %, and errors of single entries inside their intervals. "
                "More samples find smaller errors."
            )
        undecided = sum(r.undecided for r in self.rows)
        if undecided:
            footer.append(
                f"Not decided: {undecided} entries whose outcomes are expected fewer than 100 "
                "times."
            )
        rate = (
            f"A correct loss fails with probability at most {self.false_alarm:.0e}."
            if self.false_alarm
            else ""
        )
        footer.append(f"{rate} {self.seconds:.1f} s.".strip())
        return footer

    def markdown(self) -> str:
        """A table and the findings, for an issue or a job's summary."""
        from arsm.referee.summary import markdown

        return markdown([self])

    def badge(self) -> str:
        """The verdict as an SVG image."""
        from arsm.referee.summary import badge

        return badge([self])

    def figure(self) -> Any:
        """A matplotlib figure of every problem's worst bias in units of its interval's
        half-width.
        """
        # matplotlib is needed here alone
        from arsm.referee.figure import plot_audit

        return plot_audit(self)


def _cells(row: Row, count: int) -> list[str]:
    if row.error:
        return [row.problem, row.size, row.error]
    worst = "" if row.worst is None else f"{'* ' if row.rejected else ''}{row.worst.bias}"
    truth = "" if row.worst is None else f"{row.worst.truth:.3g}"
    cells = [
        row.problem,
        row.size,
        worst,
        truth,
        "" if row.scale is None else f"{row.scale.value:.3f}",
    ]
    if row.direction is not None:
        return [*cells, f"{row.direction:.3f}"]
    # losses of given batches have a direction, those that draw a variance
    numbers = (row.variance, row.evaluations, row.rloo)
    cells += ["" if x is None else f"{x:.3g}" for x in numbers]
    cells.append("" if row.bound is None else f"{row.bound:.2f}")
    return cells[:count]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    # a row with an error has one long cell, which must not widen a column
    full = [row for row in [header, *rows] if len(row) == len(header)]
    widths = [max(len(row[i]) for row in full) for i in range(len(header))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip()
        for row in [header, *rows]
    ]
