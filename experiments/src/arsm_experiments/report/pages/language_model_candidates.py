"""The generated part of results/language_model/candidates.md: methods of the protocol's fourth
amendment.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable

from arsm_experiments.report.pages.language_model_levels import FRESH, PLAIN, Level, all_levels
from arsm_experiments.report.pages.tables import Cell, Tables, markdown

TO_PLAIN = f"variance x tokens / {PLAIN}, by rounds"
NEW = ("own", "shared", "critic", "value or")
"""How the names of the new methods begin."""
WIDER = 1.4
"""A 95% interval for eight methods together is so many times as wide as one for a single method."""
ENTERS = 0.9
"""The geometric mean of the ratios with which a method enters the library."""


def table(tables: Tables) -> str:
    """Variance x tokens over that of the default, at fresh questions, and what the protocol's rule
    says.
    """
    levels = reported(tables)
    if not levels:
        return "Not measured."
    names = {method: None for level in levels for method in level.ratios if method.endswith(FRESH)}
    means = {name: _over_levels(name, levels) for name in names}
    heads = [f"{level.task} {level.accuracy:.2f}" for level in levels]
    rows = [
        [
            name.removesuffix(FRESH),
            *(by_rounds(level.ratios.get(name)) for level in levels),
            by_rounds(mean),
        ]
        for name, mean in sorted(means.items(), key=_best_first)
    ]
    rounds = sorted({level.ratios[PLAIN + FRESH].seeds for level in levels})
    most = f" to {rounds[-1]}" if len(rounds) > 1 else ""
    made = markdown(["", *heads, "geometric mean"], rows)
    return (
        f"Relative to `{PLAIN}`, at fresh questions, over {rounds[0]}{most} rounds:"
        f"\n\n{made}\nThe protocol's rule lets into the library: {_entered(levels) or 'none'}."
    )


def reported(tables: Tables) -> list[Level]:
    """The levels of the fourth amendment that have enough rounds."""
    levels = all_levels(tables, TO_PLAIN).values()
    return [level for level in levels if PLAIN + FRESH in level.ratios]


def by_rounds(cell: Cell | None) -> str:
    """A ratio and half of its 95% interval, by Student's distribution."""
    if cell is None:
        return "-"
    return f"{cell.mean:.2f}±{cell.half:.2f}" if cell.std else "1"


def _entered(levels: list[Level]) -> str:
    """The methods that the protocol's rule lets into the library."""

    def enters(method: str, mean: Cell) -> bool:
        below = mean.mean <= ENTERS and mean.mean + WIDER * mean.half < 1
        return below and not any(_above(level.ratios[method]) for level in levels)

    return ", ".join(name for name, _ in _best_of_kinds(levels, enters))


def _best_of_kinds(
    levels: list[Level], wanted: Callable[[str, Cell], bool] = lambda method, mean: True
) -> list[tuple[str, Cell]]:
    """The wanted ones of the new methods that all levels have, with their means; of several that
    differ in a number alone, the one with the lowest. The best first.
    """
    found: dict[str, tuple[str, Cell]] = {}
    for method in dict.fromkeys(method for level in levels for method in level.ratios):
        mean = _over_levels(method, levels)
        if not method.startswith(NEW) or not method.endswith(FRESH) or mean is None:
            continue
        kind = re.sub(r"[\d.]+", "n", method)
        if wanted(method, mean) and (kind not in found or mean.mean < found[kind][1].mean):
            found[kind] = (method.removesuffix(FRESH), mean)
    return sorted(found.values(), key=_best_first)


def _over_levels(method: str, levels: list[Level]) -> Cell | None:
    """The geometric mean of a method's ratios; None if a level lacks it."""
    cells = [level.ratios[method] for level in levels if method in level.ratios]
    return _geometric_mean(cells) if len(cells) == len(levels) else None


def _geometric_mean(cells: list[Cell]) -> Cell:
    """Over levels; as many rounds as the level with the fewest has."""
    mean = math.exp(statistics.mean(math.log(cell.mean) for cell in cells))
    rounds = min(cell.seeds for cell in cells)
    errors = [cell.std / math.sqrt(cell.seeds) / cell.mean for cell in cells]
    return Cell(mean, mean * math.hypot(*errors) / len(errors) * math.sqrt(rounds), rounds)


def _best_first(item: tuple[str, Cell | None]) -> float:
    return math.inf if item[1] is None else item[1].mean


def _above(cell: Cell) -> bool:
    """Whether the interval over rounds lies above 1."""
    return cell.mean - cell.half > 1
