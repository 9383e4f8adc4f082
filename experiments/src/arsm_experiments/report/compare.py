"""The equal-cost comparison's part of the report: a ranked table and a figure per problem."""

from __future__ import annotations

from collections.abc import Sequence

from arsm.estimators import estimator
from arsm_experiments.compare import FLOOR
from arsm_experiments.report.figures import COLOURS, NEUTRAL, Figure, Panel, Series
from arsm_experiments.report.sections import Result, Section
from arsm_experiments.runs.reader import Record

COST = "mean squared error x evaluations"
KINDS = {"arsm": COLOURS[0], "other unbiased estimators": NEUTRAL, "biased estimators": COLOURS[1]}
COLUMNS = (
    ("error x evaluations", "cost"),
    ("bias", "bias"),
    ("bias of noise alone", "bias_error"),
    ("evaluations", "evaluations"),
)


def compare_sections(records: Sequence[Record]) -> list[Section]:
    """One section per problem, from all its runs."""
    by_problem: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.sessions[0]["started"]):
        key = record.config["problem"], record.config.get("checkpoint", "")
        by_problem.setdefault(key, []).append(record)
    return [_section(runs) for runs in sorted(by_problem.values(), key=_place)]


def _place(runs: Sequence[Record]) -> tuple[int, float]:
    kind, _, size = runs[0].config["problem"].partition("-")
    return ("toy", "network", "binary", "vae").index(kind), float(size or 0)


def _section(runs: Sequence[Record]) -> Section:
    """The first run names the problem; for the same estimator, a later run's numbers replace an
    earlier one's.
    """
    first, config = runs[0], runs[0].config
    found = {
        run.config["estimators"][line["step"] - 1]: (run, line)
        for run in runs
        for line in run.metrics
    }
    ranked = sorted(found.items(), key=lambda each: each[1][1]["cost"])
    rows, variables, categories = config["shape"]
    text = (
        f"K = {variables}, C = {categories:,}, {rows} rows of logits, {config['budget']} "
        "evaluations per estimate. Ranked by mean squared error x evaluations, which is variance "
        "x evaluations where there is no bias. Only distinct evaluations count: equal samples "
        "cost one. Each evaluation of a relaxing estimator includes a gradient of f. Means and "
        f"variances are from {config['samples']:,} estimates. "
        '"floor" is leave-one-out with the best additive control variate, '
        "fitted to f."
    )
    results = [
        Result(_label(words), title, [line[key]], run)
        for words, (run, line) in ranked
        for title, key in COLUMNS
    ]
    panel = _ranking(first.label, [(words, line) for words, (_, line) in ranked])
    figure = Figure("The ranking", "Lower is better. Log scale.", [panel], {first.label: (COST,)})
    return Section(first.label, text, list(runs), results, [figure])


def _unbiased(words: str) -> bool:
    return words == FLOOR or estimator(words).unbiased


def _label(words: str) -> str:
    return words if _unbiased(words) else f"{words} (biased)"


def _kind(words: str) -> str:
    arsm, unbiased, biased = KINDS
    return biased if not _unbiased(words) else arsm if "arsm" in words else unbiased


def _ranking(title: str, named: Sequence[tuple[str, dict[str, float]]]) -> Panel:
    shown = [(words, line["cost"]) for words, line in named if line["cost"] > 0]
    series = []
    for kind, colour in KINDS.items():
        places = [place for place, (words, _) in enumerate(shown) if _kind(words) == kind]
        series.append(
            Series(kind, colour, [shown[place][1] for place in places], places, mark="dots")
        )
    return Panel(title, {COST: series}, log="x", names=[words for words, _ in shown])
