"""`Ranking`: the result of `arsm.compare` as a table for a terminal, a page, a paper
or a spreadsheet, and as a figure.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from arsm.types import Estimator

WIDTH = 80
"""Columns of a printed table."""
HEADER = ("estimator", "bias", "variance", "evals", "ms", "product")
FIELDS = (
    "estimator",
    "bias",
    "bias_error",
    "variance",
    "variance_error",
    "evaluations",
    "milliseconds",
    "milliseconds_error",
    "product",
    "product_error",
)


class Compared(NamedTuple):
    """One estimator, measured.

    Attributes:
        estimator: The estimator, resized to the budget.
        evaluations: Distinct evaluations of f per estimate and row, on average.
        milliseconds: Median time of one estimate of the whole batch, including
            backward.
        variance: The trace of an estimate's covariance, averaged over the rows.
        bias: ||E[g] - dE[f]/dphi||, the root mean square over the rows, corrected
            for the expected square of its noise.
        bias_error: The bias that noise alone would show, including the reference's
            noise.
        variance_error: Standard error of the variance.
        milliseconds_error: Standard error of the time.
    """

    label: str
    estimator: Estimator
    evaluations: float
    milliseconds: float
    variance: float
    bias: float
    bias_error: float
    variance_error: float = math.nan
    milliseconds_error: float = math.nan

    @property
    def cost(self) -> float:
        """Mean squared error x evaluations: variance x evaluations for an unbiased
        estimator; lower is better.
        """
        return (self.variance + self.bias**2) * self.evaluations

    @property
    def cost_error(self) -> float:
        """Standard error of the cost."""
        # of the bias's square, to first order; the number of evaluations counts as exact
        of_bias = 2 * self.bias * self.bias_error
        return math.hypot(self.variance_error, of_bias) * self.evaluations


@dataclass(frozen=True)
class Ranking(Sequence[Compared]):
    """Estimators by mean squared error x evaluations ("product"), the best first: `print` it.

    It is a sequence of `Compared` too.
    """

    rows: tuple[Compared, ...]

    @overload
    def __getitem__(self, index: int) -> Compared: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Compared, ...]: ...
    def __getitem__(self, index: int | slice) -> Compared | tuple[Compared, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __str__(self) -> str:
        cells = self._cells("±")
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        # numbers are printed in full, names as far as there is room
        widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    __repr__ = __str__

    def markdown(self) -> str:
        """A table for a page."""
        header, *rows = self._cells(" ± ")
        rule = ["---", *["---:"] * (len(header) - 1)]
        # as code: an estimator's words may hold asterisks
        names = [[f"`{name}`", *numbers] for name, *numbers in rows]
        lines = [f"| {' | '.join(row)} |" for row in [header, rule, *names]]
        return "\n".join(lines) + "\n"

    def latex(self, highlight: str | None = None) -> str:
        r"""A `tabular` for a paper, with the rules of the package booktabs.

        Args:
            highlight: the label of a row to set in bold.
        """
        self._require(highlight)
        header, *rows = self._cells(r" \pm ")
        lines = [r"\begin{tabular}{l" + "r" * (len(header) - 1) + "}", r"\toprule"]
        titles = [header[0], *header[1:-1], r"error $\times$ evals"]
        lines += [" & ".join(titles) + r" \\", r"\midrule"]
        for compared, (label, *numbers) in zip(self.rows, rows, strict=True):
            name = rf"\texttt{{{_escaped(label)}}}"
            cells = [_powers(number) for number in numbers]
            # bold type is another command in text than in formulas
            if compared.label == highlight:
                name = rf"\textbf{{{name}}}"
                cells = [rf"\mathbf{{{cell}}}" for cell in cells]
            line = " & ".join([name, *(f"${cell}$" for cell in cells)])
            lines.append(line + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def csv(self) -> str:
        """All numbers, unrounded, one line per estimator."""
        whole = io.StringIO()
        writer = csv.writer(whole, lineterminator="\n")
        writer.writerow(FIELDS)
        for row in self.rows:
            writer.writerow(
                [
                    row.label,
                    *(row.bias, row.bias_error, row.variance, row.variance_error),
                    *(row.evaluations, row.milliseconds, row.milliseconds_error),
                    *(row.cost, row.cost_error),
                ]
            )
        return whole.getvalue()

    def figure(self, highlight: str | None = None) -> Any:
        """A matplotlib figure of every estimator's product with two standard errors.

        `comparison.figure(highlight="mine").savefig("figure.pdf")`; the name's ending
        says the format, such as .pdf, .svg or .png.

        Args:
            highlight: the label of an estimator to draw in another colour.
        """
        from arsm.ranking_figure import draw  # matplotlib is no dependency of the library

        self._require(highlight)
        return draw(self, highlight)

    def _require(self, label: str | None) -> None:
        if label is not None and label not in [row.label for row in self.rows]:
            known = ", ".join(row.label for row in self.rows)
            raise ValueError(f'There is no row "{label}" to highlight; there are {known}.')

    def _cells(self, sign: str) -> list[list[str]]:
        cells: list[list[str]] = [list(HEADER)]
        for row in self.rows:
            line = [
                row.label,
                with_error(row.bias, row.bias_error, sign),
                with_error(row.variance, row.variance_error, sign),
                f"{row.evaluations:.3g}",
                with_error(row.milliseconds, row.milliseconds_error, sign),
                with_error(row.cost, row.cost_error, sign),
            ]
            cells.append(line)
        return cells


def with_error(value: float, error: float, sign: str = "±") -> str:
    """A value with its error, rounded to the error's first digit: 0.0312±0.0009."""
    if not math.isfinite(error) or error <= 0:
        return f"{value:.3g}"
    # very large and very small numbers get a common power of ten
    power = math.floor(math.log10(max(abs(value), error)))
    shift = power if not -4 < power < 6 else 0
    value = value / 10**shift
    error = error / 10**shift
    digits = max(0, -math.floor(math.log10(error)))
    error = round(error, digits)
    both = f"{value:.{digits}f}{sign}{error:.{digits}f}"
    return both if shift == 0 else f"({both})e{shift}"


def _aligned(row: list[str], widths: list[int]) -> Iterator[str]:
    label, *numbers = row
    if len(label) > widths[0]:
        label = label[: widths[0] - 1] + "…"
    yield label.ljust(widths[0])
    for cell, width in zip(numbers, widths[1:], strict=True):
        yield cell.rjust(width)


def _escaped(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    known = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    known.update({c: f"\\{c}" for c in "{}_%&#$"})
    return "".join(known.get(c, c) for c in text)


def _powers(cell: str) -> str:
    """1e-05 and (1±2)e-5 as LaTeX writes them."""
    head, e, power = cell.partition("e")
    return rf"{head} \times 10^{{{int(power)}}}" if e else cell
