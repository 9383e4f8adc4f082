"""The table and the figure of `benchmarks.agents`."""

from __future__ import annotations

import csv
import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("sampled", "likeliest")
"""Actions of the evaluation."""
COLUMNS = (
    *("the default", "PPO", "A2C", "MaskablePPO"),
    *("RLOO(2)", "ARSM", "ten updates", "three updates"),
)
"""The methods of the figure; table.csv has all."""
WINDOW = 100
"""Episodes of learning whose average return tells whether a task is solved."""
Cells = dict[tuple[str, str], list[dict[str, Any]]]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of the jobs that are done: those of the published archive beside the file first."""
    archive = path.with_name(f"{path.name}.xz")
    text = lzma.decompress(archive.read_bytes()).decode() if archive.exists() else ""
    text += path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def report(folder: Path, seconds: float) -> None:
    """Write table.csv from all runs and agents.png from those of this length."""
    runs = read(folder / "runs.jsonl")
    _write_csv(folder / "table.csv", runs, seconds)
    _draw(folder / "agents.png", by_cell(runs, seconds))


def by_cell(runs: list[dict[str, Any]], seconds: float) -> Cells:
    """The runs of this length by row and method, seed by seed; rows and methods in the page's
    order.
    """
    runs = [line for line in runs if line["seconds"] == seconds]
    known = [*COLUMNS, *sorted({line["method"] for line in runs} - {*COLUMNS})]
    rows = list(dict.fromkeys(line["row"] for line in runs))
    cells: Cells = {}
    for line in sorted(
        runs, key=lambda x: (rows.index(x["row"]), known.index(x["method"]), x["seed"])
    ):
        cells.setdefault((line["row"], line["method"]), []).append(line)
    return cells


def _best(lines: list[dict[str, Any]]) -> list[float]:
    """The seeds' returns with sampled or with the likeliest actions, whichever mean is higher."""
    return max(([line[kind] for line in lines] for kind in KINDS), key=np.mean)


def _write_csv(path: Path, runs: list[dict[str, Any]], seconds: float) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit"]
        )
        for length in sorted(
            {line["seconds"] for line in runs}, key=lambda length: (length != seconds, length)
        ):
            for (row, method), lines in by_cell(runs, length).items():
                metrics = {f"return, {kind}": [line[kind] for line in lines] for kind in KINDS}
                metrics["steps"] = [line["steps"] for line in lines]
                if solved := [line["solved"][0] for line in lines if line.get("solved")]:
                    metrics["CPU seconds until solved"] = solved
                place = [
                    "; ".join(sorted({line[name] for line in lines}))
                    for name in ("hardware", "commit")
                ]
                spent = f"{np.mean([line['cpu'] for line in lines]):.1f}"
                for metric, values in metrics.items():
                    deviation = f"{np.std(values, ddof=1):.6g}" if len(values) > 1 else ""
                    name = (
                        f"{row}: {method}"
                        if length == seconds
                        else f"{row}, {length:g} s: {method}"
                    )
                    writer.writerow(
                        [
                            name,
                            metric,
                            f"{np.mean(values):.6g}",
                            deviation,
                            len(values),
                            "",
                            spent,
                            *place,
                        ]
                    )


def _draw(path: Path, cells: Cells) -> None:
    """One panel per row with the methods that it has: a dot per seed, a bar at the mean."""
    import matplotlib.pyplot as plt

    from arsm_experiments.palette import save

    rows = list(dict.fromkeys(row for row, _ in cells))
    figure, axes = plt.subplots(
        math.ceil(len(rows) / 3), 3, figsize=(13, 8.5), squeeze=False, layout="constrained"
    )
    for axis, row in zip(axes.flat, rows, strict=False):
        methods = [method for method in COLUMNS if (row, method) in cells]
        for place, method in enumerate(methods):
            values, colour = _best(cells[row, method]), f"C{COLUMNS.index(method)}"
            axis.plot(values, np.full(len(values), place), "o", color=colour, alpha=0.6)
            axis.vlines(np.mean(values), place - 0.35, place + 0.35, color=colour, linewidth=2)
        axis.set_title(row, fontsize=13)
        axis.set_yticks(range(len(methods)), methods, fontsize=11)
        axis.set_ylim(len(methods) - 0.4, -0.6)
        axis.tick_params(axis="x", labelsize=11)
        axis.grid(axis="x", alpha=0.3)
    for axis in axes.flat[len(rows) :]:
        axis.remove()
    figure.supxlabel("return after learning", fontsize=13)
    save(figure, path)
    plt.close(figure)
