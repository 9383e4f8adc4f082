"""Control's part of the report: the paper's curves, and when each method reached the task's
completion line.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from arsm_experiments.control import WINDOW
from arsm_experiments.report.figures import Figure, Level, Panel, Series, band, palette
from arsm_experiments.report.sections import Picture, Result, Section
from arsm_experiments.runs.files import plain_name
from arsm_experiments.runs.merge import merge_seeds
from arsm_experiments.runs.reader import Record

NO_VARIANCE = math.log(sys.float_info.min)
"""The value recorded for the logarithm of zero."""
# seconds to the end of the paper's figure
PAPER_SECONDS = {
    "CartPole-v0": {"arsm": 677.0, "relax": 139.0, "a2c": 92.0},
    "Acrobot-v1": {"arsm": 425.0, "relax": 172.0, "a2c": 120.0},
    "LunarLander-v3": {"arsm": 19050.0, "relax": 3493.0, "a2c": 2708.0},
}
OPTIMIZERS = {"adam": "Adam", "rmsprop": "RMSprop"}
AXES = {
    "episode": "step",
    "simulator step, rollouts and replays counted": "simulator_steps",
    "CPU second": "cpu_seconds",
}
SPREAD = ("simulator_steps", "cpu_seconds")
"""Columns that are drawn on a log scale."""
TO_THE_LINE = {
    "episodes": "step",
    "simulator steps": "simulator_steps",
    "seconds": "learning_seconds",
    "CPU seconds": "cpu_seconds",
}
STATE = (
    ("log variance of the gradient", "log_variance"),
    ("pseudo actions per step", "pseudo_actions"),
    ("entropy of the policy (nats)", "entropy"),
)


def completion_line(environment: str) -> float | None:
    """The average return over 100 episodes at which Gymnasium calls a task solved."""
    try:
        import gymnasium
    except ModuleNotFoundError:  # reading runs must not need gymnasium
        return None
    try:
        return gymnasium.spec(environment).reward_threshold
    except gymnasium.error.Error:  # registered where it ran, not here
        return None


def control_sections(records: Sequence[Record]) -> list[Section]:
    """One section per task, comparing the methods that ran on it."""
    ordered = sorted((r for r in records if r.metrics), key=_task)
    # several commands may share the seeds of one setting
    return [
        _section(merge_seeds(list(runs), _alike, seconds=max))
        for _, runs in groupby(ordered, key=_task)
    ]


def _task(record: Record) -> tuple[Any, ...]:
    return record.config["environment"], record.config["horizon"] or 0, record.group


def _alike(record: Record) -> tuple[Any, ...]:
    """Key of runs that differ only in their seeds."""
    config = record.config
    length = config["episodes"], config.get("cpu_seconds")
    return record.label, config["optimizer"], config["learning_rate"], length


def _section(records: list[Record]) -> Section:
    environment, horizon, group = _task(records[0])
    slug = _joined("-", group, plain_name(environment), f"h{horizon}" if horizon else "")
    title = _joined(", ", environment, f"{horizon} steps" if horizon else "")
    line = completion_line(environment)
    levels = [Level("completion line", line)] if line is not None else []
    labels = _labels(records)
    text = _explanation(line)
    best = best_settings(records)
    is_grid = len(records) > 2 * len(best)
    if is_grid:
        text += (
            " The curves show each method's best setting, by the final average, then by the mean "
            "of the curve."
        )
        figures = [_rates(records, slug, levels), _along(best, labels, slug, levels)]
    else:
        figures = [_along(records, labels, slug, levels)]
    results = [
        x for r in records for x in _results(r, labels[r.folder], line, beside_paper=not is_grid)
    ]
    gifs = [Picture(r, file, labels[r.folder]) for r in records for file in r.pictures]
    title += f" ({group})" if group else ""
    return Section(title, text, records, results, figures, gifs, headline="seconds")


def _joined(between: str, *words: str) -> str:
    """The words that are not empty."""
    return between.join(filter(None, words))


def _explanation(line: float | None) -> str:
    at_line = (
        f"The dotted line is the task's completion line, {line:g}. " if line is not None else ""
    )
    return (
        "Average return over the last 100 true episodes: the median over seeds, with the 10th to "
        f"90th percentile as a band. {at_line}Variances come from moving averages of the "
        "gradient's moments (decay 0.99), averaged over all parameters."
    )


def _along(
    shown: Sequence[Record], labels: dict[Path, str], slug: str, levels: Sequence[Level]
) -> Figure:
    """Returns against episodes, steps and seconds; the learner's state against episodes."""
    methods = palette([r.config["method"] for r in shown])
    colours = dict(zip((r.folder for r in shown), methods, strict=True))
    # rollouts spread the methods' steps and seconds over three powers of ten
    returns = [
        Panel(
            "average return", {axis: view}, log="x" if AXES[axis] in SPREAD else "", levels=levels
        )
        for axis, view in _views(shown, labels, colours, "average_return", AXES).items()
    ]
    state = [
        Panel(name, _views(shown, labels, colours, key, {"episode": "step"})) for name, key in STATE
    ]
    return Figure(
        "Along training",
        "Simulator steps include rollouts and replays up to a branch.",
        [*returns, *state],
        {f"{slug}-curves": tuple(AXES)},
    )


def best_settings(records: Sequence[Record]) -> list[Record]:
    """The best of the runs that differ only in optimizer and learning rate."""

    def merit(record: Record) -> tuple[int, float]:
        averages = [s["average_return"] for s in seed_series(record)]
        return round(np.mean([x[-1] for x in averages])), float(
            np.mean([x.mean() for x in averages])
        )

    best: dict[str, Record] = {}
    for record in records:
        best[record.label] = max(best.get(record.label, record), record, key=merit)
    return list(best.values())


def _rates(records: Sequence[Record], slug: str, levels: Sequence[Level]) -> Figure:
    """Final averages of all settings against the learning rate."""
    found: dict[str, dict[str, dict[float, float]]] = {}
    for record in records:
        config = record.config
        final = np.median([s["average_return"][-1] for s in seed_series(record)])
        found.setdefault(config["optimizer"], {}).setdefault(record.label, {})[
            config["learning_rate"]
        ] = float(final)
    names = list(dict.fromkeys(name for points in found.values() for name in points))
    colours = dict(zip(names, palette([name.partition(",")[0] for name in names]), strict=True))
    panels = []
    for optimizer, by_name in found.items():
        series = [
            Series(
                name,
                colours[name],
                sorted(points),
                [points[rate] for rate in sorted(points)],
                mark="linked",
            )
            for name, points in by_name.items()
        ]
        title = f"final average return, {OPTIMIZERS[optimizer]}"
        panels.append(Panel(title, {"learning rate": series}, log="x", levels=levels))
    return Figure(
        "Settings", "The median over seeds.", panels, {f"{slug}-rates": ("learning rate",)}
    )


def _labels(records: Sequence[Record]) -> dict[Path, str]:
    """A run's settings in words, by folder; with its length if others have the same, and progress
    if unfinished.
    """
    plain = {}
    for record in records:
        config = record.config
        settings = record.label.removeprefix(config["method"])
        plain[record.folder] = (
            f"{config['method']}, {config['optimizer']} {config['learning_rate']:g}{settings}"
        )
    repeated = Counter(plain.values())
    return {
        record.folder: plain[record.folder] + _length(record, repeated[plain[record.folder]] > 1)
        for record in records
    }


def _length(record: Record, told_apart: bool) -> str:
    """The length of a run in words: its limit of CPU seconds, its episodes if they tell it from
    others, and how far it came if it did not end.
    """
    whole, limit = record.config["episodes"], record.config.get("cpu_seconds")
    seeds = seed_series(record)
    if limit is not None:
        words = f", {limit:,g} CPU seconds"
        cut = [s for s in seeds if s["step"][-1] < whole and s["cpu_seconds"][-1] < limit]
    else:
        words = f", {whole:,} episodes" if told_apart else ""
        cut = [s for s in seeds if s["step"][-1] < whole]
    if cut:
        came_to = sorted({int(s["step"][-1]) for s in seeds})
        ends = [f"{n:,}" for n in dict.fromkeys((came_to[0], came_to[-1]))]
        words += f" ({' to '.join(ends)} of {whole:,} episodes)"
    return words


def seed_series(record: Record, key: str = "step") -> list[dict[str, np.ndarray]]:
    """Each seed's metrics as columns, at the lines that have `key`: a single gradient has no
    variance.
    """
    by_seed: dict[int, list[dict[str, Any]]] = {}
    for line in record.metrics:
        if key != "log_variance" or line[key] > NO_VARIANCE:
            by_seed.setdefault(line["seed"], []).append(line)
    found = []
    for lines in by_seed.values():
        columns = {key: np.array([line[key] for line in lines]) for key in lines[0]}
        columns["simulator_steps"] = columns["steps"] + columns.get("replayed", 0)
        found.append(columns)
    return found


def solved_at(series: dict[str, np.ndarray], line: float) -> int | None:
    """Index of the first full average that reaches the line."""
    reached = ((series["average_return"] >= line) & (series["step"] >= WINDOW)).nonzero()[0]
    return int(reached[0]) if len(reached) else None


def _results(record: Record, label: str, line: float | None, *, beside_paper: bool) -> list[Result]:
    seeds = seed_series(record)
    if beside_paper:
        rows = _outcome(record, seeds) | _cost(seeds)
        if line is not None:
            rows |= _to_the_line(seeds, line)
        paper = PAPER_SECONDS.get(record.config["environment"], {}).get(record.config["method"])
    else:  # a grid chooses a setting by this metric alone
        rows = {"final average": _finals(seeds)}
        paper = None
    return [
        Result(
            label,
            metric,
            values,
            record,
            paper if metric == "seconds" else None,
            like_for_like=False,
        )
        for metric, values in rows.items()
        if values
    ]


Columns = dict[str, np.ndarray]
Rows = dict[str, list[float]]
"""Values of each metric, one per seed or one over seeds."""


def _finals(seeds: list[Columns]) -> list[float]:
    return [float(s["average_return"][-1]) for s in seeds]


def _outcome(record: Record, seeds: list[Columns]) -> Rows:
    """Returns at the end and on the way, and the gradient's variance."""
    finals = _finals(seeds)
    averages = [s["average_return"][s["step"] >= WINDOW] for s in seeds]
    return {
        "final average": finals,
        "its median": [float(np.median(finals))],
        "its 10th percentile": [float(np.quantile(finals, 0.1))],
        "its 90th percentile": [float(np.quantile(finals, 0.9))],
        # a run that ends before 100 episodes has no full average
        "best average": [float(full.max()) for full in averages if len(full)],
        "log variance": [
            float(s["log_variance"].mean()) for s in seed_series(record, "log_variance")
        ],
    }


def _cost(seeds: list[Columns]) -> Rows:
    """Steps, seconds and episodes of whole runs; old runs have no CPU seconds."""
    replayed = [float(s["replayed"][-1]) for s in seeds if "replayed" in s]
    return {
        "steps": [float(s["steps"][-1]) for s in seeds],
        "steps played again": [steps for steps in replayed if steps],
        "simulator steps": [float(s["simulator_steps"][-1]) for s in seeds],
        "seconds": [float(s["learning_seconds"][-1]) for s in seeds],
        "CPU seconds": [float(s["cpu_seconds"][-1]) for s in seeds if "cpu_seconds" in s],
        "episodes": [float(s["step"][-1]) for s in seeds],
    }


def _to_the_line(seeds: list[Columns], line: float) -> Rows:
    """The seeds that reach the completion line, and what that took."""
    places = [(s, solved_at(s, line)) for s in seeds]
    solved = [(s, place) for s, place in places if place is not None]
    rows = {"seeds at the line": [float(len(solved))]}
    for name, key in TO_THE_LINE.items():
        rows[f"{name} to the line"] = [float(s[key][place]) for s, place in solved if key in s]
    return rows


def _views(
    records: Sequence[Record],
    labels: dict[Path, str],
    colours: dict[Any, str],
    key: str,
    axes: dict[str, str],
) -> dict[str, list[Series]]:
    """Each run's median over seeds and its spread, against each axis."""
    views: dict[str, list[Series]] = {axis: [] for axis in axes}
    for record in records:
        seeds = [s for s in seed_series(record, key) if len(s["step"]) > 1]
        if not seeds or not any(s[key].any() for s in seeds):  # actor-critic has no pseudo actions
            continue
        for axis, x in axes.items():
            timed = [s for s in seeds if x in s]
            if not timed:
                continue
            # seeds have different steps and seconds: interpolate all of them at the same points,
            # and hold finished ones at their last value
            spaced = np.geomspace if x in SPREAD else np.linspace
            first = min(s[x][0] for s in timed)
            grid = spaced(max(first, 1e-3), np.median([s[x][-1] for s in timed]), 200)
            values = [np.interp(grid, s[x], s[key]).tolist() for s in timed]
            views[axis].append(
                band(labels[record.folder], colours[record.folder], grid.tolist(), values, "median")
            )
    return views
