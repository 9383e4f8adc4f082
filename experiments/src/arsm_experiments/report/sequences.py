"""The sequences' part of the report: accuracy by generated tokens, and the results of each
strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from arsm_experiments.report.figures import Figure, Panel, Series, band, palette
from arsm_experiments.report.sections import Result, Section
from arsm_experiments.runs.reader import Record

AXES = {"generated token": "tokens", "update": "step", "second of learning": "learning_seconds"}
SHARED = (
    "task",
    "model",
    "prompts",
    "reward",
    "imitate",
    "warm_up",
    "start",
    "width",
    "layers",
    "heads",
    "tokens",
)
"""Settings that runs must share to be compared."""


def sequences_sections(records: Sequence[Record]) -> list[Section]:
    """One section per task and model, comparing the strategies that ran on it."""
    ordered = sorted((r for r in records if r.metrics), key=lambda r: list(map(str, _problem(r))))
    return [_section(list(group)) for _, group in groupby(ordered, key=_problem)]


def _problem(record: Record) -> tuple[Any, ...]:
    return (record.group, *(record.config.get(key) for key in SHARED))


def _section(records: list[Record]) -> Section:
    config, group = records[0].config, records[0].group
    model = config.get("model")
    about = (
        f"{config['layers']} layers and width {config['width']}"
        if model is None
        else Path(model).name
    )
    shape = f"{config['width']}x{config['layers']}" if model is None else Path(model).name
    task = config["task"] if config.get("prompts") is None else Path(config["prompts"]).stem
    reward = "the reward is 1 for a right answer, else 0"
    if config.get("reward") is not None:
        reward = f"the reward, shown as accuracy, is {Path(config['reward']).name}"
    text = (
        f"A transformer of {about} learns {task} by policy gradients: {reward}. Accuracy is that "
        "of one sampled answer per held-out question. Tokens are all that were generated, those "
        "of rollouts included. Lines are means over seeds, bands their 10th to 90th percentile."
    )
    labels = {r.folder: f"{r.label}, rate {r.config['rate']:g}" for r in records}
    colours = dict(
        zip(labels.values(), palette([r.config["strategy"] for r in records]), strict=True)
    )
    views = {
        axis: [_curve(r, key, labels[r.folder], colours[labels[r.folder]]) for r in records]
        for axis, key in AXES.items()
    }
    slug = "-".join(filter(None, (group, task, shape)))
    figure = Figure(
        "Along training", "", [Panel("accuracy", views)], {f"{slug}-accuracy": tuple(AXES)}
    )
    results = [result for r in records for result in _results(r, labels[r.folder])]
    title = task.replace("_", " ") + (f" ({group})" if group else "")
    return Section(f"Sequences, {title}", text, records, results, [figure])


def _by_seed(record: Record) -> list[list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for line in record.metrics:
        found.setdefault(line["seed"], []).append(line)
    return list(found.values())


def _curve(record: Record, key: str, label: str, colour: str) -> Series:
    """Seeds have different points on the axis: interpolate all of them at the same ones."""
    seeds = _by_seed(record)
    grid = np.linspace(0, min(lines[-1][key] for lines in seeds), 100)
    values = [
        np.interp(grid, [x[key] for x in lines], [x["accuracy"] for x in lines]).tolist()
        for lines in seeds
    ]
    return band(label, colour, grid.tolist(), values)


def _results(record: Record, label: str) -> list[Result]:
    seeds = _by_seed(record)
    last = [lines[-1] for lines in seeds]
    rows = {
        "accuracy before": [lines[0]["accuracy"] for lines in seeds],
        "accuracy": [line["accuracy"] for line in last],
        "tokens": [line["tokens"] for line in last],
        "updates": [line["step"] for line in last],
        "tokens/s": [line["tokens_per_second"] for line in last],
        "seconds": [line["learning_seconds"] for line in last],
    }
    return [
        Result(label, metric, list(map(float, values)), record) for metric, values in rows.items()
    ]
