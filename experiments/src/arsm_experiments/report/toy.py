"""The toy problem's part of the report: the paper's figure, and the results of each estimator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

from arsm_experiments.report.figures import COLOURS, NEUTRAL, Figure, Level, Panel, band, palette
from arsm_experiments.report.sections import Headline, Result, Section, number
from arsm_experiments.runs.reader import Record
from arsm_experiments.toy import EVERY_UPDATE

TRACES = (
    ("expected reward", "reward", False),
    ("gradient variance, mean over categories", "variance", True),
    ("entropy of q (nats)", "entropy", False),
    ("share of distinct pseudo actions", "pseudo_action_share", False),
)
AXES = {"update": "step", "second": "seconds", "evaluation of f": "evaluations"}
ON_THE_WAY = "variance / arsm's on the way"
"""Mean over the measured points only: the first of every 50 updates stands for all of them."""
AT_EVERY_UPDATE = "variance / arsm's at every update"
"""Mean over all updates, in runs that measured each."""
ON_THE_BEST = "seeds on the best category"
"""Seeds that end with a probability above one half on the best category."""
PAPERS = ("reinforce", "ar", "ars", "gumbel-softmax", "relax")
"""The estimators that the paper's figure compares ARSM with."""
ENDS = (("first category", "first", COLOURS[1]), ("last category", "last", COLOURS[0]))


def toy_sections(records: Sequence[Record]) -> list[Section]:
    """One section per problem and step size, comparing the estimators that ran on it."""
    ordered = sorted((r for r in records if r.metrics), key=_problem)
    return [_section(list(group)) for _, group in groupby(ordered, key=_problem)]


def _problem(record: Record) -> tuple[Any, ...]:
    """Settings that runs must share to be compared."""
    config = record.config
    return (
        config["categories"],
        config["step"],
        config["r"],
        config["updates"],
        config["seed"],
        record.group,
    )


def _section(records: list[Record]) -> Section:
    config = records[0].config
    group = records[0].group
    problem = f"C = {config['categories']:,}, step {config['step']:.4g}" + (
        f" ({group})" if group else ""
    )
    records.sort(key=lambda r: _ORDER.get(r.config["estimator"], len(_ORDER)))
    colours = _colours(records)
    slug = f"{group}-" * bool(group) + f"C{config['categories']}-step{config['step']:g}"
    text = (
        f"Maximise E[f(z)], f(z) = 1/2 + z/(C R), R = {config['r']:g}, by {config['updates']:,} "
        f"updates with one estimate each. The optimum is {_optimum(config):.4f}. Lines are means "
        f"over {config['seeds']} seeds, bands the 10th to 90th percentile. Variances are from "
        f"{config['variance_samples']} estimates at each point. The gap is the distance to the "
        "optimum at the end, relative to the true gradient's."
    )
    traces = [_traces(records, colours, title, key, log) for title, key, log in TRACES]
    figures = [
        Figure(
            "Along the updates",
            "The dotted line is the optimum. The true gradient has no variance and is not drawn "
            "there.",
            traces,
            {f"{slug}-traces": ("update",)},
        )
    ]
    traced = all(record.series("gradient_first")[0] for record in records)
    parts = (("Gradient estimates", "gradient"), ("Probabilities", "probability"))
    for title, key in parts if traced else ():
        caption = f"{title} of the first and the last category, on each estimator's own scale."
        if key == "probability":
            caption = "The last category is the best one, the first the worst."
        figures.append(
            Figure(title, caption, [_ends(r, key) for r in records], {f"{slug}-{key}": ("update",)})
        )
    results = _results(records)
    claims = _claims(config, results)
    return Section(
        f"Toy, {problem}", text, records, results, figures, claims=claims, folded=_still(records)
    )


MOVED = 0.05
"""The smallest fraction of the way to the optimum that is worth showing."""


def _still(records: Sequence[Record]) -> str:
    """A sentence if even the true gradient hardly moves."""
    for record in records:
        if record.config["estimator"] == "exact":
            first, last = fmean(_first(record, "reward")), fmean(_last(record, "reward"))
            way = (last - first) / (_optimum(record.config) - first)
            if way < MOVED:
                return (
                    "Little to see: with this step size even the true gradient goes only "
                    f"{way:.1%} of the way."
                )
    return ""


_ORDER = {words: place for place, words in enumerate(("exact", "reinforce", "ar", "ars", "arsm"))}


def _label(record: Record) -> str:
    done = record.metrics[-1]["step"]
    unfinished = f" ({done:,} updates)" if done < record.config["updates"] else ""
    return record.label + unfinished


def _colours(records: Sequence[Record]) -> dict[Any, str]:
    """The true gradient in grey, the others each in their own colour."""
    sampled = [r for r in records if r.config["estimator"] != "exact"]
    colours = palette([r.config["estimator"] for r in sampled])
    named = dict(zip((r.folder for r in sampled), colours, strict=True))
    return {r.folder: named.get(r.folder, NEUTRAL) for r in records}


def _optimum(config: dict[str, Any]) -> float:
    return 0.5 + 1 / config["r"]


def _results(records: Sequence[Record]) -> list[Result]:
    """Results of each run; its gap is relative to the true gradient's, its variance to ARSM's, if
    those were run.
    """
    by_words = {r.config["estimator"]: r for r in records}
    true, arsm = by_words.get("exact"), by_words.get("arsm")
    results = []
    for r in records:
        row = {"E[f]": _last(r, "reward")}
        if true is not None and (gap := fmean(_gaps(true))) > 0:
            row["gap / true gap"] = [x / gap for x in _gaps(r)]
        if arsm is not None and (start := fmean(_first(arsm, "variance"))) > 0:
            row["variance / arsm's at the start"] = [x / start for x in _first(r, "variance")]
        if arsm is not None and (along := fmean(_average(arsm, "variance"))) > 0:
            row[ON_THE_WAY] = [x / along for x in _average(r, "variance")]
        if arsm is not None and (of_arsm := _whole(arsm)) and (of_all := _whole(r)):
            row[AT_EVERY_UPDATE] = [x / fmean(of_arsm) for x in of_all]
        row[ON_THE_BEST] = [float(sum(x > 0.5 for x in _last(r, "probability_last")))]
        row["f calls an update"] = [
            x / max(1, r.metrics[-1]["step"]) for x in _last(r, "evaluations")
        ]
        row["seconds"] = [r.seconds]
        results.extend(Result(_label(r), metric, values, r) for metric, values in row.items())
    return results


def _gaps(record: Record) -> list[float]:
    """Distance of each seed's end from the optimum."""
    return [_optimum(record.config) - value for value in _last(record, "reward")]


def _first(record: Record, key: str) -> list[float]:
    return [values[0] for values in record.series(key)[1]]


def _last(record: Record, key: str) -> list[float]:
    return [values[-1] for values in record.series(key)[1]]


def _mean(record: Record, key: str) -> list[float]:
    """Along the run, over all seeds."""
    return [fmean(seeds) for seeds in zip(*record.series(key)[1], strict=True)]


def _average(record: Record, key: str) -> list[float]:
    return [fmean(values) for values in record.series(key)[1]]


def _whole(record: Record) -> list[float]:
    """Each seed's mean variance over all updates; empty if they were not all measured."""
    steps, seeds = record.series(EVERY_UPDATE)
    # every value is a mean over the updates since the step before
    widths = [last - first for first, last in pairwise([0, *steps])]
    return [fmean(values, widths) for values in seeds]


def _claims(config: dict[str, Any], results: Sequence[Result]) -> list[Headline]:
    """The paper's problem has C = R = 30 and step 1; its figure shows variances, and no table."""
    if (config["categories"], config["step"], config["r"]) != (30, 1.0, 30.0):
        return []
    found = {r.metric for r in results}
    metric = AT_EVERY_UPDATE if AT_EVERY_UPDATE in found else ON_THE_WAY
    others = [
        r.mean
        for r in results
        if r.metric == metric and r.record.config["estimator"].split(":")[0] in PAPERS
    ]
    if not others:
        return []
    what = "gradient variance of the paper's other estimators, ARSM = 1, lowest to highest"
    return [
        Headline(
            what,
            "10 to 10,000",
            " to ".join(number(float(f"{x:.1g}")) for x in (min(others), max(others))),
        )
    ]


def _traces(
    records: Sequence[Record], colours: dict[Any, str], title: str, key: str, log: bool
) -> Panel:
    views = {
        axis: [
            band(_label(r), colours[r.folder], _mean(r, along), r.series(key)[1]) for r in records
        ]
        for axis, along in AXES.items()
    }
    # a collapsed estimator has zero variance up to rounding: do not stretch the axis for it
    means = [fmean(_average(record, key)) for record in records]
    floor = min((mean for mean in means if mean > 0), default=1.0) / 100 if log else None
    levels = [Level("optimum", _optimum(records[0].config))] if key == "reward" else []
    return Panel(title, views, log="y" if log else "", floor=floor, levels=levels)


def _ends(record: Record, key: str) -> Panel:
    series = [band(name, colour, *record.series(f"{key}_{end}")) for name, end, colour in ENDS]
    return Panel(_label(record), {"update": series})
