"""A figure as a PNG file, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arsm_experiments.palette import save
from arsm_experiments.report.figures import (
    ENTRY,
    NEUTRAL,
    TITLE,
    Figure,
    Panel,
    Series,
    grid,
    lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1c1f24"
CLOSE = 0.055
"""Minimum distance between two labels, as a fraction of the panel's height."""
SAMPLE, CHARACTER = 0.5, 0.08
"""Widths in a legend, in inches: a line's sample, and a character."""
FEW = 4
"""More entries than this are wrapped to fit into two columns at least."""
BAND = 0.16
"""Opacity of a band: several of them overlap."""
SETTINGS = {
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": INK,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "axes.formatter.limits": (-4, 5),
    "axes.formatter.useoffset": False,
}


def save_figure(figure: Figure, name: str, folder: Path) -> None:
    """Draw one of the figure's files, on white."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

    figure = figure.in_words()
    drawn = [
        (panel, axis)
        for panel in figure.panels
        for axis in panel.views
        if axis in figure.files[name]
    ]
    rows, columns = grid(len(drawn))
    height = max(2.7, *(0.17 * len(panel.names) + 0.8 for panel, _ in drawn))
    width = 6 if any(panel.names for panel, _ in drawn) else 4
    half = int((width * columns / 2 - SAMPLE) / CHARACTER)
    letters = min(ENTRY, half) if columns > 1 and len(figure.legend) > FEW else ENTRY
    entries = {"\n".join(lines(words, letters)): colour for words, colour in figure.legend.items()}
    entries |= dict.fromkeys(figure.meanings, NEUTRAL)
    longest = max((len(line) for words in entries for line in words.split("\n")), default=0)
    fit = int(width * columns / (SAMPLE + CHARACTER * longest))
    ncols = max(1, min(len(entries), 5, fit))
    tallest = max((words.count("\n") + 1 for words in entries), default=1)
    above = (0.06 + 0.14 * tallest) * -(-len(entries) // ncols)
    with rc_context(SETTINGS):  # pyright: ignore[reportArgumentType]
        canvas = Canvas(figsize=(width * columns, height * rows + above), layout="constrained")
        for place, (panel, axis) in enumerate(drawn, 1):
            draw_panel(canvas.add_subplot(rows, columns, place), panel, axis)
        handles = [
            Line2D(
                [],
                [],
                color=colour,
                label=words,
                linestyle=":" if words in figure.meanings else "-",
            )
            for words, colour in entries.items()
        ]
        canvas.legend(handles=handles, loc="outside upper center", ncols=ncols, frameon=False)
        save(canvas, folder / f"{name}.png")


def draw_panel(axes: Axes, panel: Panel, axis: str) -> None:
    """Draw one view of a panel on matplotlib axes."""
    from matplotlib.ticker import AutoLocator, NullLocator, ScalarFormatter

    axes.set_title("\n".join(lines(panel.title, TITLE)), loc="left")
    axes.set_xlabel(axis)
    if panel.log:
        (axes.set_xscale if panel.log == "x" else axes.set_yscale)("log")
    for series in panel.drawn(axis):
        _draw_series(axes, series)
    if panel.floor is not None:
        axes.set_ylim(bottom=panel.floor)
    if panel.ceiling is not None:
        axes.set_ylim(top=panel.ceiling)
    _draw_levels(axes, panel)
    if panel.log == "y" and axes.get_ylim()[1] < 10 * axes.get_ylim()[0]:
        axes.yaxis.set_major_locator(AutoLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.names:
        axes.set_yticks(range(len(panel.names)), panel.names, fontsize=8)
        axes.invert_yaxis()
    if panel.from_zero(axis):
        axes.set_xlim(left=0)


def _draw_levels(axes: Axes, panel: Panel) -> None:
    """Dotted lines with labels on the right; labels of close lines are moved apart."""
    for level in panel.levels:
        axes.axhline(level.y, color=level.colour, linewidth=1, linestyle=":")
    to_axes = axes.transData + axes.transAxes.inverted()
    below = -CLOSE
    for level in sorted(panel.levels, key=lambda level: level.y):
        _, height = to_axes.transform((axes.get_xlim()[0], level.y))
        if level.label and 0 <= height <= 1:
            below = max(height, below + CLOSE)
            style = {"color": level.colour, "fontsize": 7, "verticalalignment": "center"}
            axes.text(1.01, below, level.label, transform=axes.transAxes, **style)


def _draw_series(axes: Axes, series: Series) -> None:
    if not len(series.x):
        return
    if len(series.low):
        axes.fill_between(
            series.x, series.low, series.high, color=series.colour, alpha=BAND, linewidth=0
        )
    axes.plot(
        np.asarray(series.x),
        np.asarray(series.y),
        color=series.colour,
        linewidth=1.5,
        linestyle="-" if series.line else "",
        marker="o" if series.dots else "",
        markersize=8 if series.mark == "ring" else 4,
        fillstyle="none" if series.mark == "ring" else "full",
    )
