"""What a report is made of: results, which become tables, and panels, which become figures."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arsm.experiments.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

COLUMNS = ("row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit")

# The page's text colour takes this one's place, so that figures follow light and dark mode.
INK = "#010203"
# Readable on white and on near-black (Okabe and Ito's set, its black and yellow replaced).
COLOURS = (
    *("#0090d6", "#e0562b", "#00a37a", "#c765ac", "#b8860b", "#7a7fe0"),
    *("#2aa8a8", "#9a6a4a", "#d63384", "#6b8e23", "#4b6f9e", "#a0522d"),
)
NEUTRAL = "#8a8f98"


@dataclass(frozen=True)
class Result:
    """One metric of one row of a table, over all seeds."""

    row: str
    metric: str
    values: Sequence[float]
    record: Record
    """The run that it comes from."""
    paper: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) if math.isfinite(self.mean) else math.nan

    @property
    def text(self) -> str:
        """Mean and spread, as a table shows them."""
        paper = f" (paper {self.paper:g})" if self.paper is not None else ""
        return _number(self.mean, self.std) + paper


def _number(mean: float, spread: float | None) -> str:
    """The mean to four digits, or as far as its spread's first: 0.516 ± 0.008, 2.5e6 ± 8e4; a tiny one is left out."""
    if not spread or not math.isfinite(mean + spread) or spread < 1e-5 * abs(mean):
        return _plain_exponent(f"{mean:.4g}")
    if 1e-4 <= abs(mean) < 1e5:
        decimals = max(0, -math.floor(math.log10(spread)))
        return f"{mean:,.{decimals}f} ± {spread:,.{decimals}f}"
    return _plain_exponent(f"{mean:.1e} ± {spread:.0e}")


def _plain_exponent(text: str) -> str:
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", text)


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Figure:
    """Panels under one legend."""

    name: str
    """Its file's name."""
    title: str
    caption: str
    panels: Sequence[Panel]
    legend: Sequence[tuple[str, str]] = ()
    """(label, colour) pairs."""

    @property
    def columns(self) -> int:
        """How many panels go side by side, where there is room."""
        return 2 if len(self.panels) in (2, 4) else min(3, len(self.panels))


@dataclass(frozen=True)
class Section:
    """One comparison: its table and figures, all made from `records`."""

    title: str
    text: str
    records: Sequence[Record]
    results: Sequence[Result] = ()
    figures: Sequence[Figure] = field(default_factory=tuple)


def pivot(results: Iterable[Result]) -> tuple[list[str], list[tuple[str, list[Result | None]]]]:
    """(metrics, (row, one result a metric or None)), both in order of appearance."""
    results = list(results)
    metrics = list(dict.fromkeys(r.metric for r in results))
    found = {(r.row, r.metric): r for r in results}
    rows = dict.fromkeys(r.row for r in results)
    return metrics, [(row, [found.get((row, metric)) for metric in metrics]) for row in rows]


def print_results(console: Console, section: Section) -> None:
    """A section's table on the terminal."""
    metrics, rows = pivot(section.results)
    table = Table(title=section.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for metric in metrics:
        table.add_column(escape(metric), justify="right", overflow="fold")
    for row, cells in rows:
        table.add_row(escape(row), *("" if cell is None else cell.text for cell in cells))
    console.print(table)


def results_csv(sections: Iterable[Section]) -> str:
    """All results as table.csv."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in sections:
        for r in section.results:
            session = r.record.sessions[-1]
            spread = "" if r.std is None else f"{r.std:.6g}"
            paper = "" if r.paper is None else f"{r.paper:g}"
            where = (f"{r.record.seconds:.1f}", session["hardware"], session["commit"])
            writer.writerow(
                (f"{section.title}: {r.row}", r.metric, f"{r.mean:.6g}", spread, len(r.values), paper, *where)
            )
    return out.getvalue()


def band(
    axes: Axes, steps: Sequence[float], seeds: Sequence[Sequence[float]], colour: str, *, log: bool = False
) -> None:
    """The mean over seeds as a line, their 10th to 90th percentile as a band; a log axis leaves out a mean of zero."""
    import numpy as np

    values = np.asarray(seeds)
    if log:
        axes.set_yscale("log")
        keep = values.mean(0) > 0
        steps, values = np.asarray(steps)[keep].tolist(), values[:, keep]
    if not steps:
        return
    axes.plot(steps, values.mean(0), color=colour, linewidth=1.5, marker="o" if len(steps) == 1 else "", markersize=4)
    if len(values) > 1:
        low, high = np.percentile(values, (10, 90), axis=0)
        axes.fill_between(steps, low, high, color=colour, alpha=0.22, linewidth=0)


def panel_svg(panel: Panel) -> str:
    """One panel as SVG to be put into a page, in the page's own text colour."""
    out = io.StringIO()
    with _drawn([panel], columns=1, ink=INK) as figure:
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def save_figure(figure: Figure, folder: Path) -> None:
    """All panels of a figure in one PNG, on white."""
    from matplotlib.lines import Line2D

    with _drawn(figure.panels, columns=figure.columns, ink="#1c1f24") as drawn:
        if figure.legend:
            handles = [Line2D([], [], color=colour, label=label) for label, colour in figure.legend]
            drawn.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5), frameon=False)
        drawn.savefig(folder / f"{figure.name}.png", dpi=110)


@contextmanager
def _drawn(panels: Sequence[Panel], *, columns: int, ink: str) -> Iterator[MatplotlibFigure]:
    """The panels side by side, while matplotlib's settings hold."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as MatplotlibFigure

    rows = -(-len(panels) // columns)
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    settings = {
        **dict.fromkeys(inked, ink),
        "svg.fonttype": "none",
        "svg.hashsalt": "arsm",
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
    with rc_context(settings):  # pyright: ignore[reportArgumentType]
        figure = MatplotlibFigure(figsize=(4 * columns, 2.7 * rows), layout="constrained")
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            axes.set_title(panel.title, loc="left")
            panel.draw(axes)
        yield figure
