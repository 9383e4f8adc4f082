"""A comparison of estimators as a figure; the only module here that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from arsm.ranking import Ranking


def draw(comparison: Ranking, highlight: str | None) -> Figure:
    """Error x evaluations of every estimator with two standard errors, the best on top."""
    shown = list(reversed(comparison.rows))
    figure = Figure(figsize=(6, 0.8 + 0.28 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        colour = "tab:red" if row.label == highlight else "0.35"
        # a row without error, such as the exact gradient's, has no bar
        error = [2 * row.cost_error] if row.cost_error == row.cost_error else None
        axes.errorbar([row.cost], [place], xerr=error, fmt="o", color=colour, capsize=2.5)
    axes.set_yticks(range(len(shown)), [row.label for row in shown])
    for tick, row in zip(axes.get_yticklabels(), shown, strict=True):
        if row.label == highlight:
            tick.set(color="tab:red", fontweight="bold")
    # products differ by factors, but an estimator without any error has no logarithm
    if all(row.cost > 0 for row in shown):
        axes.set_xscale("log")
        _number(axes)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("mean squared error × evaluations; lower is better")
    return figure


def _number(axes: Axes) -> None:
    """A few plain numbers along a logarithmic axis; matplotlib's own overlap in a small figure."""
    low, high = axes.get_xlim()
    if high > 100 * low:
        locator = LogLocator(numticks=8)
    elif high > 5 * low:
        locator = LogLocator(subs=(1.0, 2.0, 5.0), numticks=8)
    else:
        locator = MaxNLocator(5)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x:.3g}" if x < 1e5 else f"{x:.0e}")
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
