"""Figures as data: series in panels, drawn by matplotlib as PNG files and by the page's own script."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Readable on white and on near-black (Okabe and Ito's set, its black and yellow replaced).
COLOURS = (
    *("#0090d6", "#e0562b", "#00a37a", "#c765ac", "#b8860b", "#7a7fe0"),
    *("#2aa8a8", "#9a6a4a", "#d63384", "#6b8e23", "#4b6f9e", "#a0522d"),
)
NEUTRAL = "#8a8f98"
INK = "#1c1f24"
TITLE = 44  # letters in a line above a panel

Mark = Literal["line", "linked", "dots", "ring"]
"""A line, a line through dots, dots alone, or a ring around a point."""


@dataclass(frozen=True)
class Series:
    """One curve, with a band around it where `low` and `high` are given; all of one length."""

    name: str
    """Series of one name share a colour and an entry in the figure's legend."""
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    mark: Mark = "line"

    def thinned(self, points: int) -> Series:
        """At most so many points, evenly spread, the first and the last among them."""
        if len(self.x) <= points:
            return self
        kept = np.linspace(0, len(self.x) - 1, points).round().astype(int).tolist()
        x, y, low, high = ([v[i] for i in kept] if len(v) else () for v in (self.x, self.y, self.low, self.high))
        return Series(self.name, self.colour, x, y, low, high, self.mark)


@dataclass(frozen=True)
class Level:
    """A dotted horizontal line."""

    meaning: str
    y: float
    colour: str = NEUTRAL
    name: str = ""
    """The series that it comes and goes with, if any."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    views: Mapping[str, Sequence[Series]]
    """The series against each horizontal axis, by its label."""
    log: Literal["", "x", "y"] = ""
    """The axis with a log scale, which leaves out values of zero."""
    floor: float | None = None
    """The lowest height that is shown."""
    levels: Sequence[Level] = ()
    names: Sequence[str] = ()
    """What the heights 0, 1, 2... stand for, from the top, where they are not numbers."""

    def from_zero(self, axis: str) -> bool:
        """Whether the horizontal axis begins at 0: where the series nearly do."""
        x = [value for series in self.views[axis] for value in series.x]
        return self.log != "x" and bool(x) and 0 <= min(x) < 0.1 * max(x)


@dataclass(frozen=True)
class Figure:
    """Panels under one legend."""

    title: str
    caption: str
    panels: Sequence[Panel]
    files: Mapping[str, Sequence[str]]
    """The PNG files to export, by name, each with the horizontal axes that it shows."""

    @property
    def axes(self) -> list[str]:
        """The horizontal axes to choose from."""
        return list(dict.fromkeys(axis for panel in self.panels for axis in panel.views))

    @property
    def legend(self) -> dict[str, str]:
        """Each name's colour."""
        views = [series for panel in self.panels for view in panel.views.values() for series in view]
        return {series.name: series.colour for series in views}


def palette(methods: Sequence[str]) -> list[str]:
    """A colour for each, ARSM's the same in every figure; they repeat where there are more than colours."""
    first = methods.index("arsm") if "arsm" in methods else 0
    others = itertools.cycle(COLOURS[1:])
    return [COLOURS[0] if place == first else next(others) for place in range(len(methods))]


def band(
    name: str,
    colour: str,
    x: Sequence[float],
    seeds: Sequence[Sequence[float]],
    middle: Literal["mean", "median"] = "mean",
) -> Series:
    """The mean or median over seeds as a line, their 10th to 90th percentile as a band."""
    values = np.asarray(seeds, dtype=float)
    if not len(x):
        return Series(name, colour, (), ())
    y = values.mean(0) if middle == "mean" else np.median(values, 0)
    if len(values) < 2:
        return Series(name, colour, list(x), y.tolist())
    low, high = np.percentile(values, (10, 90), axis=0)
    return Series(name, colour, list(x), y.tolist(), low.tolist(), high.tolist())


def save_figure(figure: Figure, folder: Path) -> None:
    """Each of the figure's files as PNG, on white."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as MatplotlibFigure
    from matplotlib.lines import Line2D

    settings = {
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
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
    for name, shown in figure.files.items():
        drawn = [(panel, axis) for panel in figure.panels for axis in panel.views if axis in shown]
        columns = 2 if len(drawn) in (2, 4) else min(3, len(drawn))
        rows = -(-len(drawn) // columns)
        height = max(2.7, *(0.17 * len(panel.names) + 0.8 for panel, _ in drawn))
        width = 6 if any(panel.names for panel, _ in drawn) else 4
        longest = max((len(label) for label in figure.legend), default=0)
        fit = int(width * columns / (0.5 + 0.08 * longest))  # inches of a line's sample and of a letter
        ncols = max(1, min(len(figure.legend), 5, fit))
        above = 0.2 * -(-len(figure.legend) // ncols)
        with rc_context(settings):  # pyright: ignore[reportArgumentType]
            canvas = MatplotlibFigure(figsize=(width * columns, height * rows + above), layout="constrained")
            for place, (panel, axis) in enumerate(drawn, 1):
                draw_panel(canvas.add_subplot(rows, columns, place), panel, axis)
            handles = [Line2D([], [], color=colour, label=label) for label, colour in figure.legend.items()]
            canvas.legend(handles=handles, loc="outside upper center", ncols=ncols, frameon=False)
            canvas.savefig(folder / f"{name}.png", dpi=110)


def draw_panel(axes: Axes, panel: Panel, axis: str) -> None:
    """One view of a panel on matplotlib's axes."""
    from matplotlib.ticker import AutoLocator, NullLocator, ScalarFormatter

    axes.set_title(textwrap.fill(panel.title, TITLE), loc="left")
    axes.set_xlabel(axis)
    if panel.log:
        (axes.set_xscale if panel.log == "x" else axes.set_yscale)("log")
    for series in panel.views[axis]:
        _draw_series(axes, series, panel.log)
    if panel.floor is not None:
        axes.set_ylim(bottom=panel.floor)
    for level in panel.levels:
        axes.axhline(level.y, color=level.colour, linewidth=1, linestyle=":")
    if panel.log == "y" and axes.get_ylim()[1] < 10 * axes.get_ylim()[0]:
        axes.yaxis.set_major_locator(AutoLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.names:
        axes.set_yticks(range(len(panel.names)), panel.names, fontsize=8)
        axes.invert_yaxis()
    if panel.from_zero(axis):
        axes.set_xlim(left=0)


def _draw_series(axes: Axes, series: Series, log: Literal["", "x", "y"]) -> None:
    on_log = {"x": series.x, "y": series.y}.get(log)
    keep = np.asarray(on_log) > 0 if on_log is not None else np.isfinite(np.asarray(series.y, dtype=float))
    if not keep.any():
        return
    x, y = np.asarray(series.x)[keep], np.asarray(series.y)[keep]
    if len(series.low):
        low, high = np.asarray(series.low)[keep], np.asarray(series.high)[keep]
        axes.fill_between(x, low, high, color=series.colour, alpha=0.22, linewidth=0)
    dotted = series.mark != "line" or len(x) == 1
    axes.plot(
        x,
        y,
        color=series.colour,
        linewidth=1.5,
        linestyle="-" if series.mark in ("line", "linked") else "",
        marker="o" if dotted else "",
        markersize=8 if series.mark == "ring" else 4,
        fillstyle="none" if series.mark == "ring" else "full",
    )
