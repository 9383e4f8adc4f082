"""The table and the figure of `benchmarks.agents`."""

from __future__ import annotations

import csv
import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("sampled", "likeliest")
"""Actions of the evaluation."""
COLUMNS = (
    *("value", "both", "both, more branches", "RLOO(2)", "RLOO(4)", "ARSM", "ARSM, pooled"),
    *("PPO", "PPO, 2", "A2C", "A2C, 2", "MaskablePPO", "MaskablePPO, 2"),
)
"""The methods in the page's order."""
RIVALS = ("PPO", "A2C", "MaskablePPO")
"""Have one or two settings, of which the better one counts."""
MOMENTS = ("equal CPU seconds", "equal steps")
Line = dict[str, Any]
Cells = dict[tuple[str, str], list[Line]]
Block = tuple[str, int]
"""A row and a seed, with all its methods."""


def read(path: Path) -> list[Line]:
    """The lines of the jobs that are done: those of the published archive beside the file first."""
    archive = path.with_name(f"{path.name}.xz")
    text = lzma.decompress(archive.read_bytes()).decode() if archive.exists() else ""
    text += path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def publish(runs: Path, archive: Path, wanted: Callable[[str], Iterable[str]]) -> list[Block]:
    """Add the complete blocks of runs.jsonl that an archive does not have yet; `wanted` gives the
    methods of a row. A published block that lacks a method stays until its row has a complete one.
    """
    found = _by_block(read(runs))
    published = _by_block(read(archive.with_suffix("")))

    def complete(block: Block, own: dict[str, Line]) -> bool:
        return own.keys() >= set(wanted(block[0]))

    # whatever its numbers say: a block counts when all its methods are there
    added = [
        block for block, own in found.items() if block not in published and complete(block, own)
    ]
    rows = {row for row, _ in added}
    kept = {
        block: own
        for block, own in published.items()
        if block[0] not in rows or complete(block, own)
    }
    kept |= {block: found[block] for block in added}
    # rows stay in their order, also one whose first block goes
    order = list(dict.fromkeys(row for row, _ in [*published, *added]))
    blocks = sorted(kept, key=lambda block: (order.index(block[0]), block[1]))
    lines = [_short(line) for block in blocks for line in kept[block].values()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    archive.write_bytes(lzma.compress(text.encode(), preset=9))
    return added


def _by_block(lines: list[Line]) -> dict[Block, dict[str, Line]]:
    blocks: dict[Block, dict[str, Line]] = {}
    for line in lines:
        blocks.setdefault((line["row"], line["seed"]), {})[line["method"]] = line
    return blocks


def _short(value: Any) -> Any:
    """Six digits of every number, which is more than any table shows."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def report(folder: Path) -> None:
    """Write table.csv and agents.png."""
    cells = by_cell(read(folder / "runs.jsonl"))
    _write_csv(folder / "table.csv", cells)
    _draw(folder / "agents.png", cells)


def by_cell(runs: list[Line]) -> Cells:
    """The runs by row and method, seed by seed; methods in the page's order."""
    rows = list(dict.fromkeys(line["row"] for line in runs))
    cells: Cells = {}
    for line in sorted(
        runs, key=lambda x: (rows.index(x["row"]), COLUMNS.index(x["method"]), x["seed"])
    ):
        cells.setdefault((line["row"], line["method"]), []).append(line)
    return cells


def at(line: Line, moment: str) -> Line:
    """A run's evaluation at equal CPU seconds (its end) or at equal steps."""
    return line if moment == MOMENTS[0] else line["at_steps"]


def best(cells: Cells, row: str, method: str, moment: str) -> list[float]:
    """The seeds' returns with the better mean: of sampled and likeliest actions, and of a rival's
    settings.
    """
    names = (method, f"{method}, 2") if method in RIVALS else (method,)
    found = [
        [float(at(line, moment)[kind]) for line in cells[row, name]]
        for name in names
        if (row, name) in cells
        for kind in KINDS
    ]
    return max(found, key=lambda values: float(np.mean(values)), default=[])


def _write_csv(path: Path, cells: Cells) -> None:
    """One line per row and method: means over seeds."""
    returns = {f"{kind}, {moment}": (kind, moment) for moment in MOMENTS for kind in KINDS}
    spent = {
        "steps": lambda line: line["steps"],
        "CPU seconds": lambda line: line["cpu"],
        "CPU seconds, equal steps": lambda line: line["at_steps"]["cpu"],
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "method", "seeds", *returns, *spent, "hardware", "commit"])
        for (row, method), lines in cells.items():
            means = [
                np.mean([at(line, moment)[kind] for line in lines])
                for kind, moment in returns.values()
            ]
            means += [np.mean([number(line) for line in lines]) for number in spent.values()]
            place = [
                "; ".join(sorted({line["hardware"] for line in lines})),
                "; ".join(sorted({line["commit"][:10] for line in lines})),
            ]
            writer.writerow([row, method, len(lines), *(f"{x:.5g}" for x in means), *place])


def _draw(path: Path, cells: Cells) -> None:
    """One panel per row with the methods that it has: a dot per seed, a bar at the mean; hollow at
    equal steps.
    """
    import matplotlib.pyplot as plt

    from arsm_experiments.palette import save

    rows = list(dict.fromkeys(row for row, _ in cells))
    shown = [method for method in COLUMNS if not method.endswith(", 2")]
    figure, axes = plt.subplots(
        -(-len(rows) // 3), 3, figsize=(13, 11), squeeze=False, layout="constrained"
    )
    for axis, row in zip(axes.flat, rows, strict=False):
        methods = [method for method in shown if (row, method) in cells]
        for place, method in enumerate(methods):
            colour = f"C{shown.index(method)}"
            for moment, shift, fill in zip(MOMENTS, (-0.18, 0.18), (colour, "none"), strict=True):
                values = best(cells, row, method, moment)
                height = place + shift
                style = {"markerfacecolor": fill, "markeredgecolor": colour, "alpha": 0.7}
                axis.plot(values, np.full(len(values), height), "o", **style)
                axis.vlines(np.mean(values), height - 0.17, height + 0.17, color=colour, lw=2)
        axis.set_title(row, fontsize=13)
        axis.set_yticks(range(len(methods)), methods, fontsize=11)
        axis.set_ylim(len(methods) - 0.4, -0.6)
        axis.tick_params(axis="x", labelsize=11)
        axis.grid(axis="x", alpha=0.3)
    for axis in axes.flat[len(rows) :]:
        axis.remove()
    figure.supxlabel("return at equal CPU seconds (full) and at equal steps (hollow)", fontsize=13)
    save(figure, path)
    plt.close(figure)
