"""Control's part of the report: the paper's curves, and when each method held the task's completion line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from arsm.experiments.record import Record
from arsm.experiments.sections import COLOURS, NEUTRAL, Figure, Panel, Result, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 100
# seconds to the end of the paper's figure
PAPER_SECONDS = {
    "CartPole-v0": {"arsm": 677.0, "relax": 139.0, "a2c": 92.0},
    "Acrobot-v1": {"arsm": 425.0, "relax": 172.0, "a2c": 120.0},
    "LunarLander-v3": {"arsm": 19050.0, "relax": 3493.0, "a2c": 2708.0},
}
PANELS = (
    ("average return against episodes", "step", "average_return", "episode"),
    ("average return against environment steps", "steps", "average_return", "environment step, rollouts counted"),
    ("average return against CPU time", "cpu_seconds", "average_return", "CPU second of the learning process"),
    ("log variance of the gradient", "step", "log_variance", "episode"),
    ("pseudo actions a step", "step", "pseudo_actions", "episode"),
    ("entropy of the policy (nats)", "step", "entropy", "episode"),
)


def completion_line(environment: str) -> float | None:
    """The average return over 100 episodes at which Gymnasium calls a task solved."""
    try:
        import gymnasium
    except ModuleNotFoundError:  # runs may be read where none are made
        return None
    return gymnasium.spec(environment).reward_threshold


def control_sections(records: Sequence[Record]) -> list[Section]:
    """One section for every task, comparing the methods that ran on it."""
    ordered = sorted((r for r in records if r.metrics), key=_task)
    return [_section(list(group)) for _, group in groupby(ordered, key=_task)]


def _task(record: Record) -> tuple[Any, ...]:
    config = record.config
    prefix = record.name.partition(config["environment"].replace("/", "-"))[0].rstrip("-")
    return config["environment"], config["horizon"] or 0, prefix


def _section(records: list[Record]) -> Section:
    environment, horizon, prefix = _task(records[0])
    slug = "-".join(filter(None, (prefix, environment.replace("/", "-"), f"h{horizon}" if horizon else "")))
    line = completion_line(environment)
    colours = {r.folder: COLOURS[place % len(COLOURS)] for place, r in enumerate(records)}
    text = (
        "Average return over the last 100 true episodes: the median over seeds, and their 10th to 90th percentile as a "
        "band. "
        + (f"The dotted line is the task's completion line, {line:g}. " if line is not None else "")
        + "Variances come from moving averages of the gradient's moments (decay 0.99), averaged over all parameters."
    )
    figure = Figure(
        f"{slug}-curves",
        "Along training",
        "Environment steps count those of rollouts; the way back to a branch is not counted.",
        [Panel(title, partial(_draw, records, colours, x, y, label, line)) for title, x, y, label in PANELS],
        [(_label(r), colours[r.folder]) for r in records],
    )
    title = f"{environment}" + (f", {horizon} steps" if horizon else "") + (f" ({prefix})" if prefix else "")
    return Section(title, text, records, [x for r in records for x in _results(r, line)], [figure])


def _label(record: Record) -> str:
    config = record.config
    return f"{config['method']}, {config['optimizer']} {config['learning_rate']:g}, budget {config['budget']}"


def seed_series(record: Record) -> list[dict[str, np.ndarray]]:
    """Each seed's metrics as columns."""
    by_seed: dict[int, list[dict[str, Any]]] = {}
    for line in record.metrics:
        by_seed.setdefault(line["seed"], []).append(line)
    return [{key: np.array([line[key] for line in lines]) for key in lines[0]} for lines in by_seed.values()]


def solved_at(series: dict[str, np.ndarray], line: float) -> int | None:
    """The place of the first full average that reaches the line."""
    reached = ((series["average_return"] >= line) & (series["step"] >= WINDOW)).nonzero()[0]
    return int(reached[0]) if len(reached) else None


def _results(record: Record, line: float | None) -> list[Result]:
    seeds = seed_series(record)
    paper = PAPER_SECONDS.get(record.config["environment"], {}).get(record.config["method"])
    rows: dict[str, list[float]] = {
        "final average": [float(s["average_return"][-1]) for s in seeds],
        "its median": [float(np.median([s["average_return"][-1] for s in seeds]))],
        "best average": [float(s["average_return"][s["step"] >= WINDOW].max(initial=-np.inf)) for s in seeds],
        "log variance": [float(s["log_variance"].mean()) for s in seeds],
        "steps": [float(s["steps"][-1]) for s in seeds],
        "seconds": [float(s["learning_seconds"][-1]) for s in seeds],
    }
    if line is not None:
        places = [(s, solved_at(s, line)) for s in seeds]
        solved = [(s, place) for s, place in places if place is not None]
        rows["seeds at the line"] = [float(len(solved))]
        if solved:
            for name, key in (("episodes", "step"), ("seconds", "learning_seconds"), ("CPU seconds", "cpu_seconds")):
                rows[f"{name} to the line"] = [float(s[key][place]) for s, place in solved]
    return [
        Result(_label(record), metric, values, record, paper if metric == "seconds" else None)
        for metric, values in rows.items()
    ]


def _draw(
    records: Sequence[Record],
    colours: dict[Any, str],
    x: str,
    y: str,
    label: str,
    line: float | None,
    axes: Axes,
) -> None:
    for record in records:
        seeds = [s for s in seed_series(record) if len(s["step"]) > 1]
        if not seeds:
            continue
        # every seed has its own places on the axis of steps or seconds: read all of them at the same ones, those that
        # are done at their last
        grid = np.linspace(min(s[x][0] for s in seeds), np.median([s[x][-1] for s in seeds]), 200)
        values = np.array([np.interp(grid, s[x], s[y]) for s in seeds])
        colour = colours[record.folder]
        axes.plot(grid, np.median(values, 0), color=colour, linewidth=1.5)
        if len(seeds) > 1:
            low, high = np.percentile(values, (10, 90), axis=0)
            axes.fill_between(grid, low, high, color=colour, alpha=0.22, linewidth=0)
    if y == "average_return" and line is not None:
        axes.axhline(line, color=NEUTRAL, linewidth=1, linestyle=":")
    axes.set_xlabel(label)
