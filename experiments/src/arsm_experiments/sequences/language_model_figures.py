"""Figures of results/language_model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from arsm_experiments.palette import save
from arsm_experiments.sequences.language_model_rules import (
    OURS,
    RIVALS,
    Noise,
    Trained,
    best_rival,
    mean_curve,
    place,
    ratio,
    task_and_level,
)
from arsm_experiments.sequences.trials import TRIAL

COLOURS = {
    "branch": "#b5473c",
    "branch, 4 epochs": "#d58a80",
    "group": "#5a94d1",
    "token baseline": "#6e6e6e",
    "grpo": "#9b6fb5",
    "grpo, 4 epochs": "#c9a9dd",
    "ppo": "#c28f2c",
    "raft": "#5b9a68",
}


def draw_noise(levels: dict[str, list[Noise]], path: Path) -> None:
    """Variance x tokens over accuracy, relative to the best rival, one panel per task."""
    import matplotlib.pyplot as plt

    shades = {"branch 4": "#e8c3bd", "branch 8": "#d58a80", "branch 16": "#c66558"}
    shades |= {"branch 32": "#b5473c", "branch 64": "#7d2b22", "branch 32, chance": "#c28f2c"}
    shades |= {"group 8": "#8fb8e0", "group 16": "#5a94d1", "token baseline 8": "#6e6e6e"}
    drawn = {
        name for name, noise in levels.items() if {row.method for row in noise} >= {"branch 8"}
    }
    tasks = sorted({task_and_level(name)[0] for name in drawn})
    figure, axes = plt.subplots(
        1,
        len(tasks),
        figsize=(4.2 * len(tasks) + 1.6, 3.6),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        own = [noise for name, noise in levels.items() if task_and_level(name)[0] == task]
        for number, (method, colour) in enumerate(shades.items()):
            points = sorted(
                (row.accuracy, *ratio(row, best))
                for noise in own
                if (best := best_rival(noise)) is not None
                for row in noise
                if row.method == method
            )
            if points:
                x, y, error = zip(*points, strict=True)
                # side by side, or the intervals hide each other
                x = [accuracy + 0.006 * (number - len(shades) // 2) for accuracy in x]
                half = [1.96 * e for e in error]
                style = {"linestyle": "--"} if method in RIVALS else {}
                axis.errorbar(
                    x,
                    y,
                    half,
                    label=method,
                    color=colour,
                    marker="o",
                    markersize=3,
                    lw=1.1,
                    **style,
                )
        axis.set_yscale("log")
        axis.set_ylim(0.04, 8)
        axis.set_yticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "0.25", "0.5", "1", "2", "4"])
        axis.minorticks_off()
        axis.axhline(1, color="#bbbbbb", linewidth=0.8)
        axis.set_xlabel("accuracy of the model")
        axis.set_title(task)
    axes[0][0].set_ylabel("variance x tokens / best rival")
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def draw_trials(runs: list[Trained], path: Path) -> None:
    """Accuracy over tokens of the trials, one panel per method: they choose its rate."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    trials = [run for run in runs if run.seed == TRIAL]
    methods = sorted({run.method for run in trials}, key=place)
    rates = sorted({run.rate for run in trials})
    shades = ["#c9b37e", "#5a94d1", "#b5473c", "#5b9a68"]
    wide = min(4, len(methods))
    high = math.ceil(len(methods) / wide)
    figure, axes = plt.subplots(
        high, wide, figsize=(2.3 * wide, 2.1 * high), squeeze=False, sharex=True, sharey=True
    )
    for axis, method in itertools.zip_longest(axes.flat, methods):
        if method is None:
            axis.set_axis_off()
            continue
        for run in sorted((run for run in trials if run.method == method), key=lambda r: r.rate):
            colour = shades[rates.index(run.rate) % len(shades)]
            tokens = [line["tokens"] / 1000 for line in run.metrics]
            accuracy = [line["accuracy"] for line in run.metrics]
            axis.plot(tokens, accuracy, color=colour, lw=1.3, ls="-" if run.finished else ":")
            if not run.finished:
                axis.plot(tokens[-1], accuracy[-1], "x", color=colour)
        axis.set_title(method, fontsize=9)
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.grid(color="#eeeeee")
    lines = [Line2D([], [], color=shades[i % len(shades)]) for i in range(len(rates))]
    names = [f"rate {rate:g}" for rate in rates]
    lines.append(Line2D([], [], color="#555555", ls=":", marker="x"))
    figure.supxlabel("generated tokens, thousands", fontsize=9)
    figure.supylabel(f"accuracy, {trials[0].chosen_on} questions", fontsize=9)
    figure.tight_layout()
    figure.legend(
        lines,
        [*names, "did not end"],
        fontsize=8,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(0.99, 0.12),
    )
    save(figure, path)
    plt.close(figure)


def draw_training(tasks: Mapping[str, dict[str, list[Trained]]], path: Path) -> None:
    """Accuracy over tokens and over learning seconds, the mean over seeds; a column per task."""
    import matplotlib.pyplot as plt

    wide = len(tasks)
    figure, axes = plt.subplots(
        2, wide, figsize=(3.6 * wide + 1.6, 5.4), squeeze=False, sharey="col"
    )
    for (tokens_axis, seconds_axis), (task, by_method) in zip(axes.T, tasks.items(), strict=True):
        for name, runs in by_method.items():
            tokens, seconds, accuracy = zip(*mean_curve(runs), strict=True)
            thousands = [count / 1000 for count in tokens]
            style = {"label": name, "color": COLOURS.get(name), "lw": 2.2 if name in OURS else 1.2}
            tokens_axis.plot(thousands, accuracy, **style)
            seconds_axis.plot(seconds, accuracy, **style)
        tokens_axis.set_title(task)
        tokens_axis.set_xlabel("generated tokens, thousands")
        seconds_axis.set_xlabel("learning seconds")
        for axis in (tokens_axis, seconds_axis):
            axis.grid(color="#eeeeee")
            axis.set_xlim(left=0)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean reward")
    axes[0][-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)
