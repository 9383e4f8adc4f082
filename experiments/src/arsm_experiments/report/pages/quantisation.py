"""The generated parts of docs/guides/vector_quantisation.md."""

from __future__ import annotations

import statistics

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch, with_spread
from arsm_experiments.report.welch import Difference
from arsm_experiments.runs import lines

WAYS = {
    "VQ-VAE": "VQ-VAE: the nearest code, its gradient copied",
    "straight-through": "`StraightThrough()`",
    "hard Gumbel-softmax": "`GumbelSoftmax(hard=True)`",
    "leave-one-out": "`RLOO(4)`",
}
SETTINGS = ("fixed rate", "bound")


def table(tables: Tables) -> str:
    """Test loss of both settings, its part for the pixels, codes in use and time per step: of the
    reported seeds if all ways have them, else of the trials.
    """
    cells = tables.cells("vector_quantisation/table.csv")
    names = [f"{setting}: {way}" for setting in SETTINGS for way in WAYS]
    seeds = min(
        cells[name, "test loss"].seeds if (name, "test loss") in cells else 0 for name in names
    )
    before = "" if seeds else "trial, "
    words = f"{seeds} seeds, 800 steps:" if seeds else "The trials, one seed and 400 steps:"
    rows = []
    for way, name in WAYS.items():
        row = [name]
        for setting in SETTINGS:
            of = f"{before}{setting}: {way}"
            row.append(with_spread(cells[of, "test loss"], 1))
            row.append(f"{cells[of, 'codes in use'].mean:.0f}")
            row.append(f"{cells[of, 'CPU ms per step'].mean:.1f} ms")
        row.append(f"{cells[f'{before}bound: {way}', 'nats of the pixels'].mean:.1f}")
        rows.append(row)
    header = ["", "fixed rate", "codes", "step", "bound", "codes", "step", "bound's pixels"]
    return f"{words}\n\n{markdown(header, rows)}"


def copied(tables: Tables) -> str:
    """VQ-VAE beside the ways that draw codes, at a fixed rate."""
    cells = tables.cells("vector_quantisation/table.csv")
    copying, *drawing = (cells[f"fixed rate: {way}", "test loss"] for way in WAYS)
    names = list(WAYS.values())[1:]
    found = [welch(copying, other) for other in drawing]
    words = [_signed(difference, name, 0) for name, difference in zip(names, found, strict=True)]
    return f"VQ-VAE's loss less the others', with Welch's 95% intervals: {listed(words)}."


def bound(tables: Tables) -> str:
    """Leave-one-out beside straight-through, with the bound."""
    ours, other = (
        _parts_of_the_bound(tables, way) for way in ("leave-one-out", "straight-through")
    )
    pixels, codes, loss = (welch(ours[part], other[part]) for part in ("nats", "rate", "loss"))
    words = [
        _signed(pixels, "nats of the pixels"),
        _signed(codes, "of the codes"),
        _signed(loss, "together"),
    ]
    return f"`RLOO(4)` less `StraightThrough()`, with Welch's 95% intervals: {listed(words)}."


def _parts_of_the_bound(tables: Tables, way: str) -> dict[str, Cell]:
    """Nats of the pixels, rate of the codes and their sum, over the reported seeds."""
    runs = lines.read(tables.results / "vector_quantisation/runs.jsonl.xz")
    longest = max(run["steps"] for run in runs)
    own = [
        run | {"loss": run["nats"] + run["rate"]}
        for run in runs
        if (run["setting"], run["way"], run["steps"]) == ("bound", way, longest)
    ]
    columns = {part: [run[part] for run in own] for part in ("nats", "rate", "loss")}
    return {
        part: Cell(statistics.mean(values), statistics.stdev(values), len(values))
        for part, values in columns.items()
    }


def _signed(found: Difference, name: str, decimals: int = 1) -> str:
    """A difference with its interval, and whether it is decided."""
    verdict = "" if found.decided else " (undecided)"
    return f"{name} {found.mean:+.{decimals}f} ± {found.half:.{decimals}f}{verdict}"


PARTS = {"quantisation": table, "copied": copied, "bound": bound}
