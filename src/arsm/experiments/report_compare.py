"""The equal-cost comparison's part of the report: a ranked table and a figure for every problem."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from arsm.estimators import estimator
from arsm.experiments.record import Record
from arsm.experiments.sections import COLOURS, NEUTRAL, Figure, Panel, Result, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    ("error x evaluations", "cost"),
    ("variance", "variance"),
    ("bias", "bias"),
    ("bias that noise alone shows", "bias_error"),
    ("evaluations", "evaluations"),
    ("ms", "milliseconds"),
)


def compare_sections(records: Sequence[Record]) -> list[Section]:
    """One section a problem, in the order in which they were run."""
    return [_section(record) for record in sorted(records, key=_place)]


def _place(record: Record) -> tuple[int, float]:
    kind, _, size = record.config["problem"].partition("-")
    return ("toy", "network", "vae").index(kind), float(size or 0)


def _section(record: Record) -> Section:
    config = record.config
    ranked = sorted(record.metrics, key=lambda line: line["cost"])
    named = [(config["estimators"][line["step"] - 1], line) for line in ranked]
    rows, variables, categories = config["shape"]
    text = (
        f"K = {variables}, C = {categories:,}, {rows} rows of logits, {config['budget']} evaluations an estimate. "
        "Ranked by mean squared error x evaluations, which is variance x evaluations where there is no bias. "
        "Evaluations are the distinct ones, so that equal samples cost one; a relaxing estimator's each come with a "
        f"gradient of f. Means and variances are from {config['samples']:,} estimates. Milliseconds are for one "
        "estimate of all rows."
    )
    results = [Result(_label(words), title, [line[key]], record) for words, line in named for title, key in COLUMNS]
    figure = Figure(
        record.name,
        "Mean squared error x evaluations",
        "Lower is better; biased estimators in orange. Log scale.",
        [Panel(record.name, partial(_draw, named))],
    )
    return Section(f"Comparison, {record.name}", text, [record], results, [figure])


def _label(words: str) -> str:
    return words if estimator(words).unbiased else f"{words} (biased)"


def _draw(named: Sequence[tuple[str, dict[str, float]]], axes: Axes) -> None:
    shown = [(words, line) for words, line in named if line["cost"] > 0]
    for place, (words, line) in enumerate(shown):
        unbiased = estimator(words).unbiased
        colour = COLOURS[1] if not unbiased else COLOURS[0] if "arsm" in words else NEUTRAL
        axes.plot([line["cost"]], [place], "o", color=colour, markersize=5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)), [words for words, _ in shown], fontsize=6.5)
    axes.invert_yaxis()
