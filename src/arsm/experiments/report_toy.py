"""The toy problem's part of the report: the paper's figure, and what each estimator came to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any

from arsm.experiments.record import Record
from arsm.experiments.sections import COLOURS, NEUTRAL, Figure, Panel, Result, Section, band

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACES = (
    ("expected reward", "reward", False),
    ("gradient variance, mean over categories", "variance", True),
    ("entropy of q (nats)", "entropy", False),
    ("share of distinct pseudo actions", "pseudo_action_share", False),
)
ENDS = (("first category", "first", COLOURS[1]), ("last category", "last", COLOURS[0]))


def toy_sections(records: Sequence[Record]) -> list[Section]:
    """One section for every problem and step size, comparing the estimators that ran on it."""
    ordered = sorted((r for r in records if r.metrics), key=_problem)
    return [_section(list(group)) for _, group in groupby(ordered, key=_problem)]


def _problem(record: Record) -> tuple[Any, ...]:
    """What runs must have in common to be compared; the name's beginning keeps separate sweeps apart."""
    config = record.config
    prefix = record.name.partition(f"C{config['categories']}-step")[0]
    return config["categories"], config["step"], config["r"], config["updates"], config["seed"], prefix


def _section(records: list[Record]) -> Section:
    config = records[0].config
    prefix = _problem(records[0])[-1].rstrip("-")
    problem = f"C = {config['categories']:,}, step {config['step']:.4g}" + (f" ({prefix})" if prefix else "")
    records.sort(key=lambda r: _ORDER.get(r.config["estimator"], len(_ORDER)))
    colours = _colours(records)
    slug = f"{prefix}-" * bool(prefix) + f"C{config['categories']}-step{config['step']:g}"
    text = (
        f"Maximise E[f(z)], f(z) = 1/2 + z/(C R), R = {config['r']:g}, by {config['updates']:,} updates on one "
        f"estimate each; the optimum is {_optimum(config):.4f}. Lines are means over {config['seeds']} seeds, bands "
        f"their 10th to 90th percentile; variances come from {config['variance_samples']} estimates at each point. "
        "The gap is what remains to the optimum, relative to what the true gradient leaves."
    )
    figures = [
        Figure(
            f"{slug}-traces",
            "Along the updates",
            "The dotted line is the optimum. The true gradient has no variance, so that it is not on that axis.",
            [Panel(title, partial(_draw_traces, records, colours, key, log)) for title, key, log in TRACES],
            [(_label(r), colours[r.folder]) for r in records],
        )
    ]
    for title, key in (("Gradient estimates", "gradient"), ("Probabilities", "probability")):
        caption = f"{title} of the first and the last category, on each estimator's own scale."
        if key == "probability":
            caption = "The last category is the best one, the first the worst."
        panels = [Panel(_label(r), partial(_draw_ends, r, key)) for r in records]
        figures.append(Figure(f"{slug}-{key}", title, caption, panels, [(label, colour) for label, _, colour in ENDS]))
    return Section(f"Toy, {problem}", text, records, _results(records), figures)


_ORDER = {words: place for place, words in enumerate(("exact", "reinforce", "ar", "ars", "arsm"))}


def _label(record: Record) -> str:
    words: str = record.config["estimator"]
    done = record.metrics[-1]["step"]
    unfinished = f" ({done:,} updates)" if done < record.config["updates"] else ""
    return ("true gradient" if words == "exact" else words) + unfinished


def _colours(records: Sequence[Record]) -> dict[Any, str]:
    """The true gradient in grey, the others each in their own colour."""
    sampled = [r for r in records if r.config["estimator"] != "exact"]
    named = {r.folder: COLOURS[place % len(COLOURS)] for place, r in enumerate(sampled)}
    return {r.folder: named.get(r.folder, NEUTRAL) for r in records}


def _optimum(config: dict[str, Any]) -> float:
    return 0.5 + 1 / config["r"]


def _results(records: Sequence[Record]) -> list[Result]:
    """What each run came to, its gap relative to the true gradient's and its variance to ARSM's where those ran."""
    by_words = {r.config["estimator"]: r for r in records}
    true, arsm = by_words.get("exact"), by_words.get("arsm")
    results = []
    for r in records:
        row = {"E[f]": _last(r, "reward")}
        if true is not None:
            gap = fmean(_gaps(true))
            row["gap / true gap"] = [x / gap for x in _gaps(r)]
        if arsm is not None:
            start, along = fmean(_first(arsm, "variance")), fmean(_average(arsm, "variance"))
            row["variance / arsm's at the start"] = [x / start for x in _first(r, "variance")]
            row["variance / arsm's on the way"] = [x / along for x in _average(r, "variance")]
        row["f calls an update"] = [x / max(1, r.metrics[-1]["step"]) for x in _last(r, "evaluations")]
        row["seconds"] = [r.seconds]
        results.extend(Result(_label(r), metric, values, r) for metric, values in row.items())
    return results


def _gaps(record: Record) -> list[float]:
    """How far each seed ended below the optimum."""
    return [_optimum(record.config) - value for value in _last(record, "reward")]


def _first(record: Record, key: str) -> list[float]:
    return [values[0] for values in record.series(key)[1]]


def _last(record: Record, key: str) -> list[float]:
    return [values[-1] for values in record.series(key)[1]]


def _average(record: Record, key: str) -> list[float]:
    return [fmean(values) for values in record.series(key)[1]]


def _draw_traces(records: Sequence[Record], colours: dict[Any, str], key: str, log: bool, axes: Axes) -> None:
    for record in records:
        band(axes, *record.series(key), colours[record.folder], log=log)
    if log:
        # where an estimator has collapsed its variance is zero up to rounding: no reason to stretch the axis
        means = [fmean(_average(record, key)) for record in records]
        axes.set_ylim(bottom=min((mean for mean in means if mean > 0), default=1.0) / 100)
    if key == "reward":
        axes.axhline(_optimum(records[0].config), color=NEUTRAL, linewidth=1, linestyle=":")
    axes.set_xlabel("update")


def _draw_ends(record: Record, key: str, axes: Axes) -> None:
    for _, end, colour in ENDS:
        band(axes, *record.series(f"{key}_{end}"), colour)
    axes.set_xlabel("update")
