"""The table and the figure of `benchmarks.agents`."""

from __future__ import annotations

import csv
import json
import lzma
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import table

KINDS = ("sampled", "likeliest")
"""Actions of the evaluation."""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of the jobs that are done: those of the published archive beside the file first."""
    archive = path.with_name(f"{path.name}.xz")
    text = lzma.decompress(archive.read_bytes()).decode() if archive.exists() else ""
    text += path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def report(folder: Path, seconds: float) -> str:
    """Write table.csv and agents.png from the runs of this length in runs.jsonl; returns the table in words."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in sorted(read(folder / "runs.jsonl"), key=lambda line: line["seed"]):
        if line["seconds"] == seconds:
            cells.setdefault((line["row"], line["method"]), []).append(line)
    _write_csv(folder / "table.csv", cells)
    _draw(folder / "agents.png", cells)
    methods = list(dict.fromkeys(method for _, method in cells))
    body = []
    for row in dict.fromkeys(row for row, _ in cells):
        best = [_best(cells[row, method]) if (row, method) in cells else None for method in methods]
        words = ["" if each is None else f"{np.mean(each):.2f} ± {error(each):.2f} ({len(each)})" for each in best]
        body.append([row, *words])
    return table("Mean return and its standard error (seeds)", ["", *methods], body)


def error(values: list[float]) -> float:
    """The mean's standard error."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _best(lines: list[dict[str, Any]]) -> list[float]:
    """The seeds' returns with sampled or with the likeliest actions, whichever mean is higher."""
    return max(([line[kind] for line in lines] for kind in KINDS), key=np.mean)


def _write_csv(path: Path, cells: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit"])
        for (row, method), lines in cells.items():
            metrics = {f"return, {kind}": [line[kind] for line in lines] for kind in KINDS}
            metrics["steps"] = [line["steps"] for line in lines]
            if solved := [line["solved"][0] for line in lines if line.get("solved")]:
                metrics["CPU seconds until solved"] = solved
            place = ["; ".join(sorted({line[name] for line in lines})) for name in ("hardware", "commit")]
            spent = f"{np.mean([line['cpu'] for line in lines]):.1f}"
            for metric, values in metrics.items():
                deviation = f"{np.std(values, ddof=1):.6g}" if len(values) > 1 else ""
                name = f"{row}: {method}"
                writer.writerow([name, metric, f"{np.mean(values):.6g}", deviation, len(values), "", spent, *place])


def _draw(path: Path, cells: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """One panel per row: a dot per seed, a bar at the mean."""
    import matplotlib.pyplot as plt

    from arsm_experiments.palette import save

    rows = list(dict.fromkeys(row for row, _ in cells))
    methods = [name for name in dict.fromkeys(name for _, name in cells) if any((row, name) in cells for row in rows)]
    figure, axes = plt.subplots(3, math.ceil(len(rows) / 3), figsize=(12, 7), squeeze=False, layout="constrained")
    for axis, row in zip(axes.flat, rows, strict=False):
        for place, method in enumerate(methods):
            if (row, method) in cells:
                values = _best(cells[row, method])
                axis.plot(np.full(len(values), place), values, "o", color=f"C{place}", alpha=0.6)
                axis.hlines(np.mean(values), place - 0.3, place + 0.3, color=f"C{place}", linewidth=2)
        axis.set_title(row, fontsize=10)
        axis.set_xticks(range(len(methods)), [textwrap.fill(name, 11) for name in methods], fontsize=6)
        axis.set_xlim(-0.6, len(methods) - 0.4)
        axis.grid(axis="y", alpha=0.3)
    for axis in axes.flat[len(rows) :]:
        axis.remove()
    figure.supylabel("return after learning")
    save(figure, path)
    plt.close(figure)
