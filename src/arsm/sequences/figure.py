"""A comparison as a figure; the only module here that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from arsm.sequences.measured import Comparison


def plot_comparison(comparison: Comparison) -> Figure:
    """Variance x tokens of every strategy with two standard errors, the best on top;
    biased ones are hollow.
    """
    shown = list(reversed(comparison.rows))
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        fill = "tab:blue" if row.unbiased else "white"
        axes.errorbar(
            [row.cost],
            [place],
            xerr=[2 * row.cost_error],
            fmt="o",
            color="tab:blue",
            markerfacecolor=fill,
            capsize=3,
        )
    axes.set_yticks(
        range(len(shown)), [row.label if row.unbiased else f"{row.label} *" for row in shown]
    )
    # costs differ by factors, but a strategy without any variance has no logarithm
    if all(row.cost > 0 for row in shown):
        axes.set_xscale("log")
    axes.set_xlabel("variance of the gradient x generated tokens; lower is better")
    if not all(row.unbiased for row in shown):
        axes.set_title("*: biased, at a scale of its own", fontsize="medium")
    return figure
