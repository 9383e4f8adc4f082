"""Variance x tokens on the pretrained model, by task, accuracy and method."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from arsm_experiments.report.pages.language_model_training import TABLE
from arsm_experiments.report.pages.tables import Cell, Tables

ROW = r"(\w+), level (\S+) \(accuracy (\S+)\), (.*)"
RATIO = "variance x tokens / best rival"
AGAIN = "b"
"""A level whose name ends with it was measured a second time, at weights of another fine-tuning."""
CANDIDATE = "c"
"""A level whose name ends with it is a measurement of the protocol's fourth amendment."""
PLAIN = "branch 8"
"""The default of `Branch`."""
FRESH = ", fresh"
"""Ends the name of a method that met other questions in every estimate."""
FIXED_DRAWS = (2, 4, 8, 16, 32, 64)
"""Numbers of draws at fixed questions; the first two were not measured everywhere."""
VALUE_HEAD = "value head"
LONG = "long"
"""The task with long answers, where branching needs a budget."""
QUANTILE = 1.96


class Level(NamedTuple):
    """A task at one accuracy."""

    task: str
    accuracy: float
    ratios: dict[str, Cell]
    """By method."""


def all_levels(tables: Tables, wanted: str = RATIO) -> dict[tuple[str, str], Level]:
    """All levels by task and name, with one metric of their methods."""
    found: dict[tuple[str, str], Level] = {}
    for (row, metric), cell in tables.cells(TABLE).items():
        matched = re.fullmatch(ROW, row)
        if matched is not None and metric == wanted:
            task, name, accuracy, method = matched.groups()
            level = found.setdefault((task, name), Level(task, float(accuracy), {}))
            level.ratios[method] = cell
    return found


def measured(tables: Tables) -> list[Level]:
    """All levels but those of the fourth amendment; of one that was measured twice, the second
    measurement.
    """
    found = all_levels(tables)
    return [
        level
        for (task, name), level in found.items()
        if (task, name + AGAIN) not in found and not name.endswith(CANDIDATE)
    ]


def measured_afresh(tables: Tables) -> list[Level]:
    """The levels where the default met fresh questions."""
    return [level for level in measured(tables) if PLAIN + FRESH in level.ratios]


def translate_at_fixed(tables: Tables) -> Level | None:
    """Translation at fixed questions: 8 draws beside one rival, groups of 8."""
    return all_levels(tables).get(("translate", f"0.3{CANDIDATE}"))


def best_draws(level: Level) -> tuple[int, Cell] | None:
    """The number of draws with the lowest ratio at fixed questions, and this ratio."""
    found = {n: level.ratios.get(f"branch {n}") for n in FIXED_DRAWS}
    known = {n: cell for n, cell in found.items() if cell is not None}
    if not known:
        return None
    best = min(known, key=lambda n: known[n].mean)
    return best, known[best]


def half(cell: Cell) -> float:
    """Half of a ratio's 95% interval."""
    return QUANTILE * cell.std / math.sqrt(cell.seeds)


def with_half(cell: Cell) -> str:
    """A ratio and half of its 95% interval; the best rival is 1 by definition."""
    if cell.std == 0:
        return "1"
    return f"{cell.mean:.2f}±{half(cell):.2f}"


def below(cell: Cell) -> bool:
    """Whether a ratio's interval lies below 1."""
    return cell.mean + half(cell) < 1


def above(cell: Cell) -> bool:
    """Whether a ratio's interval lies above 1."""
    return cell.mean - half(cell) > 1
