"""Figures as data: panels, their series, and all text. `picture.py` and `interactive.py` draw
them.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from arsm_experiments.labels import readable

# Readable on white and on near-black, and at least 29 apart in CIE Lab (Okabe and Ito's set,
# extended).
COLOURS = (
    *("#0090d6", "#e0562b", "#00a37a", "#c765ac", "#b8860b"),
    *("#5560ff", "#66753a", "#b52ee8", "#ff5a78", "#7d6aa8", "#00b400", "#9c5448", "#f000b4"),
)
NEUTRAL = "#8a8f98"
INK = "#1c1f24"
TITLE, ENTRY = 44, 64
"""Maximum characters per line of a panel's title and of a legend's entry."""

Mark = Literal["line", "linked", "dots", "ring"]
"""A line, a line with dots, only dots, or a ring around a point."""


@dataclass(frozen=True)
class Series:
    """One curve, with a band around it if `low` and `high` are given; all have the same length."""

    name: str
    """Series of one name share a colour and an entry in the figure's legend."""
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    mark: Mark = "line"

    def thinned(self, points: int) -> Series:
        """At most this many points, evenly spread, including the first and the last."""
        if len(self.x) <= points:
            return self
        return self.at(np.linspace(0, len(self.x) - 1, points).round().astype(int).tolist())

    def at(self, places: Sequence[int]) -> Series:
        """Only the points at these indices."""
        x, y, low, high = (
            [v[i] for i in places] if len(v) else () for v in (self.x, self.y, self.low, self.high)
        )
        return replace(self, x=x, y=y, low=low, high=high)

    @property
    def line(self) -> bool:
        """Whether its points are joined."""
        return self.mark in ("line", "linked")

    @property
    def dots(self) -> bool:
        """Whether its points are marked; a run with one measurement is a dot."""
        return self.mark != "line" or len(self.x) == 1


@dataclass(frozen=True)
class Level:
    """A dotted horizontal line."""

    meaning: str
    y: float
    colour: str = NEUTRAL
    name: str = ""
    """The series that it is shown and hidden with, if any."""
    label: str = ""
    """The label beside the line."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    views: Mapping[str, Sequence[Series]]
    """The series against each horizontal axis, by its label."""
    log: Literal["", "x", "y"] = ""
    """Whether the axis has a log scale, which omits zeros."""
    floor: float | None = None
    """Lower limit of the vertical axis."""
    ceiling: float | None = None
    """Upper limit of the vertical axis."""
    levels: Sequence[Level] = ()
    names: Sequence[str] = ()
    """Names of the heights 0, 1, 2..., from the top, for a categorical axis."""

    def drawn(self, axis: str) -> list[Series]:
        """The series against an axis, without points that cannot be drawn: NaN, and 0 on a log
        scale.

        On a log scale, values below the floor count as 0: a line has a gap there, and a band that
        reaches there ends at its line. Pieces of a line with only one point are left out.
        """
        least = self.floor if self.log == "y" and self.floor is not None else 0.0

        def has_place(x: float, y: float) -> bool:
            return (
                math.isfinite(x)
                and math.isfinite(y)
                and {"": 1.0, "x": x, "y": y - least}[self.log] > 0
            )

        def pieces(series: Series) -> list[Series]:
            places = [
                i
                for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
                if has_place(x, y)
            ]
            if self.log != "y" or series.mark != "line" or len(series.x) == 1:
                return [series.at(places)]
            low = [low if low > least else y for low, y in zip(series.low, series.y, strict=False)]
            runs = [
                [i for _, i in run]
                for _, run in itertools.groupby(enumerate(places), key=lambda own: own[1] - own[0])
            ]
            long = [run for run in runs if len(run) > 1] or [[]]
            return [replace(series, low=low).at(run) for run in long]

        return [piece for series in self.views[axis] for piece in pieces(series)]

    def from_zero(self, axis: str) -> bool:
        """Whether the horizontal axis starts at 0: if the series nearly do."""
        x = [value for series in self.views[axis] for value in series.x]
        return self.log != "x" and bool(x) and 0 <= min(x) < 0.1 * max(x)


@dataclass(frozen=True)
class Figure:
    """Panels under one legend."""

    title: str
    caption: str
    panels: Sequence[Panel]
    files: Mapping[str, Sequence[str]]
    """PNG files to export, by name, with the horizontal axes that each shows."""

    @property
    def axes(self) -> list[str]:
        """The horizontal axes to choose from."""
        return list(dict.fromkeys(axis for panel in self.panels for axis in panel.views))

    @property
    def legend(self) -> dict[str, str]:
        """Each name's colour."""
        views = [
            series for panel in self.panels for view in panel.views.values() for series in view
        ]
        return {series.name: series.colour for series in views}

    def in_words(self) -> Figure:
        """The same figure with readable names instead of the words that a command takes."""

        def renamed(panel: Panel) -> Panel:
            views = {
                axis: [replace(s, name=readable(s.name)) for s in view]
                for axis, view in panel.views.items()
            }
            levels = [replace(level, name=readable(level.name)) for level in panel.levels]
            names = [readable(name) for name in panel.names]
            return replace(
                panel, title=readable(panel.title), views=views, levels=levels, names=names
            )

        return replace(self, panels=[renamed(panel) for panel in self.panels])

    @property
    def meanings(self) -> list[str]:
        """The meanings of dotted lines."""
        return list(dict.fromkeys(level.meaning for panel in self.panels for level in panel.levels))


def grid(panels: int) -> tuple[int, int]:
    """Numbers of rows and columns for this many panels."""
    columns = 2 if panels in (2, 4) else min(3, panels)
    return -(-panels // columns), columns


def lines(words: str, letters: int) -> list[str]:
    """Text wrapped to lines of at most this many characters."""
    return textwrap.wrap(words, letters) or [""]


def palette(methods: Sequence[str]) -> list[str]:
    """A colour for each name; ARSM's is the same in every figure. Colours repeat if there are too
    few.
    """
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
    """The mean or median over seeds as a line, the 10th to 90th percentile as a band."""
    values = np.asarray(seeds, dtype=float)
    if not len(x):
        return Series(name, colour, (), ())
    y = values.mean(0) if middle == "mean" else np.median(values, 0)
    if len(values) < 2:
        return Series(name, colour, list(x), y.tolist())
    low, high = np.percentile(values, (10, 90), axis=0)
    return Series(name, colour, list(x), y.tolist(), low.tolist(), high.tolist())
