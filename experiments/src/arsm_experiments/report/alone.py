"""Curves against the time that training takes alone on a GPU.

Runs share their GPU with others, so that their own seconds say little. A step's time is measured
apart, one process at a time, and multiplied by the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from arsm_experiments.report.figures import Figure, Panel
from arsm_experiments.runs import lines

STEPS, SECONDS = "iteration", "second, one seed alone on an H200"
ITERATIONS = "-iterations"
"""How the file of curves against iterations ends."""


def step_times(folder: Path) -> dict[str, float]:
    """Milliseconds per training step by label, from an experiment's step_times.jsonl; empty if
    there is none.
    """
    found = lines.read(folder / "step_times.jsonl")
    return {line["label"]: line["milliseconds"] for line in found}


def with_time(figures: Sequence[Figure], folder: Path) -> list[Figure]:
    """The figures, and those of them against iterations once more against time, if the folder has
    the times of their steps.
    """
    times = step_times(folder)
    return [*figures, *(found for figure in figures if (found := against_time(figure, times)))]


def against_time(figure: Figure, times: Mapping[str, float]) -> Figure | None:
    """A figure of curves against iterations, drawn against time, with the curves whose steps were
    timed; None if there are no such curves.
    """
    names = [name for name in figure.files if name.endswith(ITERATIONS)]
    panels = [_timed(panel, times) for panel in figure.panels] if names else []
    if not any(panel.views[SECONDS] for panel in panels):
        return None
    files = {names[0].removesuffix(ITERATIONS) + "-time": (SECONDS,)}
    return replace(figure, panels=panels, files=files)


def _timed(panel: Panel, times: Mapping[str, float]) -> Panel:
    """The panel against time."""
    shown = []
    for series in panel.views[STEPS]:
        label = series.name.partition(", rate ")[0]
        if label in times:
            shown.append(replace(series, x=[step * times[label] / 1e3 for step in series.x]))
    names = {series.name for series in shown}
    levels = [level for level in panel.levels if level.name in names]
    return replace(panel, views={SECONDS: shown}, levels=levels)
