"""The generated parts of results/language_model/README.md."""

from __future__ import annotations

import math
import re

from arsm_experiments.report.pages.tables import Cell, Tables, markdown

METHODS = {
    "group 8": "group 8",
    "group 16": "group 16",
    "token baseline 8": "token baseline",
    "value head": "value head",
    "branch 4": "branch 4",
    "branch 8": "branch 8",
    "branch 16": "branch 16",
    "branch 32": "branch 32",
    "branch 64": "branch 64",
    "branch 32, chance": "chance, 32",
}
"""Rows of the page by their names in the table; the others are in table.csv alone."""
ROW = r"(\w+), level (\S+) \(accuracy (\S+)\), (.*)"
RATIO = "variance x tokens / best rival"
QUANTILE = 1.96


def noise(tables: Tables) -> str:
    """Variance x tokens relative to the best rival, methods by tasks and levels."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for (row, metric), cell in tables.cells("language_model/table.csv").items():
        matched = re.fullmatch(ROW, row)
        if matched is not None and metric == RATIO:
            task, _, accuracy, method = matched.groups()
            found.setdefault((task, accuracy), {})[method] = cell
    heads = [f"{task} {float(accuracy):.2f}" for task, accuracy in found]
    rows = [
        [name, *(_ratio(cells.get(method)) for cells in found.values())]
        for method, name in METHODS.items()
    ]
    return markdown(["", *heads], rows)


def _ratio(cell: Cell | None) -> str:
    """A ratio and half of its 95% interval; the best rival is 1 by definition."""
    if cell is None:
        return "-"
    if cell.std == 0:
        return "1"
    half = QUANTILE * cell.std / math.sqrt(cell.seeds)
    return f"{cell.mean:.2f}±{half:.2f}"


PARTS = {"noise": noise}
