"""Tables of made-up numbers, as `arsm_experiments.report.pages` reads them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

Numbers = tuple[float, ...]
"""A mean, or a mean, its standard deviation and the number of seeds."""
HEADER = ("row", "metric", "mean", "std", "seeds")


def write_cells(path: Path, cells: Mapping[tuple[str, str], Numbers]) -> None:
    """A table of means by row and metric."""
    found = [[row, metric, *numbers] for (row, metric), numbers in cells.items()]
    write_lines(path, HEADER, [[*line, *[""] * (len(HEADER) - len(line))] for line in found])


def write_lines(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A CSV file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
