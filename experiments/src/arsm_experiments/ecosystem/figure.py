"""The figure of the whole losses: how far each gradient points away from that of the objective."""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure

from arsm_experiments import palette

COLUMN, HIGHEST = 1.0, 7
"""Degrees between neighbouring stacks of points, and the points of a stack."""
COLOURS = {
    "unbiased": "tab:green",
    "biased, no promise broken": "tab:orange",
    "not as documented": "tab:red",
}
PROMISES = (
    "unbiased",
    "exact",
    "right gradient",
    "the policy gradient",
    "the divergence's gradient",
)


def kind(row: dict[str, str]) -> str:
    """Whether a loss is right, biased without a promise of the opposite, or biased against its
    documentation.
    """
    if row["verdict"] == "unbiased":
        return "unbiased"
    promised = any(word in row["claim"] for word in PROMISES)
    promised = promised and not any(word in row["claim"] for word in ("no claim", "not unbiased"))
    partly = any(word in row["claim"] for word in ("but for", "some tokens", "length-unbiased"))
    return "not as documented" if promised and not partly else "biased, no promise broken"


def angle(row: dict[str, str]) -> float | None:
    """Degrees between the mean gradient and the objective's; None where no direction was
    measured.
    """
    _, found, cosine = row["scale"].partition("direction ")
    return math.degrees(math.acos(min(1.0, float(cosine)))) if found else None


def summary(table: Path) -> list[str]:
    """The lines of the page's table: for each package, how many of its parts are what."""
    with table.open() as file:
        rows = list(csv.DictReader(file))
    lines = []
    for package in dict.fromkeys(row["row"].split(":")[0] for row in rows):
        own = [row for row in rows if row["row"].split(":")[0] == package]
        judged = [row for row in own if row["verdict"] in ("unbiased", "wrong")]
        counts = [sum(kind(row) == name for row in judged) for name in COLOURS]
        versions = ", ".join(dict.fromkeys(row["version"].split(" ")[-1] for row in own))
        words = [str(count) for count in [len(own), *counts, len(own) - len(judged)]]
        lines.append(f"| {package} | {versions} | {' | '.join(words)} |")
    return lines


def draw(table: Path, target: Path) -> None:
    """A point for every whole loss: its angle, in the line of its package, equal ones stacked."""
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if angle(row) is not None]
    if not rows:
        return
    packages = list(dict.fromkeys(row["row"].split(":")[0] for row in rows))
    figure = Figure(figsize=(9, 1.2 + 0.75 * len(packages)), layout="constrained")
    axes = figure.add_subplot()
    order = list(COLOURS)
    for line, package in enumerate(packages):
        own = [row for row in rows if row["row"].split(":")[0] == package]
        own.sort(key=lambda row: order.index(kind(row)))
        stacked: Counter[int] = Counter()
        for row in own:
            degrees = angle(row) or 0.0
            column = round(degrees / COLUMN)
            # a stack turns to the right before it meets the next line
            over, height = divmod(stacked[column], HIGHEST)
            stacked[column] += 1
            place = line + 0.36 - 0.11 * height
            axes.plot(
                [degrees + over * COLUMN], [place], "o", color=COLOURS[kind(row)], markersize=4.5
            )
    axes.set_yticks(range(len(packages)), packages)
    axes.set_ylim(len(packages) - 0.5, -0.5)
    for line in range(1, len(packages)):
        axes.axhline(line - 0.5, color="0.85", linewidth=0.8)
    axes.set_xlim(left=-1)
    axes.set_xlabel("degrees between the mean gradient and the objective's")
    for name, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=name)
    axes.legend(loc="lower right", fontsize=8)
    palette.save(figure, target)
