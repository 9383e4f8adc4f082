"""The numbers of results/*/table.csv, and how pages print them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from arsm_experiments.report.sections import number
from arsm_experiments.report.welch import Difference, difference, student_quantile


class Cell(NamedTuple):
    """One metric of one row, over seeds."""

    mean: float
    std: float
    """Standard deviation over seeds; 0 for a single one."""
    seeds: int
    paper: str = ""
    """The paper's number, if the row has its settings."""

    @property
    def spread(self) -> str:
        """Mean ± standard deviation."""
        return number(self.mean, self.std)

    @property
    def half(self) -> float:
        """Half of the mean's 95% interval, by Student's distribution."""
        return student_quantile(self.seeds - 1) * self.std / math.sqrt(self.seeds)

    @property
    def interval(self) -> str:
        """The mean with its 95% interval and the number of seeds."""
        decimals = 1 if abs(self.mean) < 1000 else 0
        low, high = self.mean - self.half, self.mean + self.half
        return (
            f"{self.mean:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f}; "
            f"n = {self.seeds})"
        )


class Tables:
    """The tables under results/, each read once."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.lines = cache(self._lines)
        self.cells = cache(self._cells)

    def _lines(self, table: str) -> list[dict[str, str]]:
        return list(csv.DictReader((self.results / table).read_text().splitlines()))

    def _cells(self, table: str) -> dict[tuple[str, str], Cell]:
        return {(line["row"], line["metric"]): _cell(line) for line in self.lines(table)}

    def find(self, experiment: str, row: str, metric: str) -> Cell | None:
        """A cell of an experiment's table.csv, if it is there."""
        return self.cells(f"{experiment}/table.csv").get((row, metric))

    def cell(self, experiment: str, row: str, metric: str) -> Cell:
        """A cell of an experiment's table.csv."""
        found = self.find(experiment, row, metric)
        if found is None:
            raise KeyError(f'results/{experiment}/table.csv has no row "{row}" with "{metric}".')
        return found


Part = Callable[[Tables], str]
"""Makes one generated part of a page."""


def _cell(line: dict[str, str]) -> Cell:
    return Cell(
        float(line["mean"]), float(line["std"] or 0), int(line["seeds"] or 1), line.get("paper", "")
    )


def pooled(cells: Iterable[Cell]) -> Cell:
    """All seeds of several rows as one."""
    cells = list(cells)
    seeds = sum(cell.seeds for cell in cells)
    mean = sum(cell.seeds * cell.mean for cell in cells) / seeds
    squares = sum(
        (cell.seeds - 1) * cell.std**2 + cell.seeds * (cell.mean - mean) ** 2 for cell in cells
    )
    return Cell(mean, math.sqrt(squares / (seeds - 1)), seeds)


def welch(first: Cell, second: Cell) -> Difference:
    """first - second."""
    return difference(first.mean, first.std, first.seeds, second.mean, second.std, second.seeds)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text[1] = "|" + "---|" * len(header)
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in text) + "\n"


def listed(words: Sequence[str]) -> str:
    """A list in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def with_spread(cell: Cell, decimals: int) -> str:
    """Mean ± standard deviation with so many decimals; the mean alone of a single seed."""
    spread = f" ± {cell.std:.{decimals}f}" if cell.seeds > 1 else ""
    return f"{cell.mean:.{decimals}f}{spread}"


def short(x: float) -> str:
    """Two significant digits; empty for NaN."""
    if math.isnan(x):
        return ""
    if x == 0 or x >= 100:
        return f"{x:,.0f}"
    return f"{x:.{max(0, 1 - math.floor(math.log10(x)))}f}" if x >= 1e-4 else f"{x:.0e}"


def large(x: float) -> str:
    """Two digits, with an exponent from 1,000 on: 73, 8.8e4."""
    if abs(x) < 1000:
        return f"{x:.2g}" if abs(x) < 100 else f"{x:.0f}"
    digits, _, exponent = f"{x:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"
