"""Make the README's figure and all generated parts of pages again: `python -m
arsm_experiments.readme`.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arsm_experiments.ecosystem.figure import kind
from arsm_experiments.palette import save
from arsm_experiments.report.pages import remake
from arsm_experiments.report.pages.claims import package
from arsm_experiments.report.pages.language_model import FRESH, half, measured
from arsm_experiments.report.pages.tables import Cell, Tables
from arsm_experiments.runs.reader import read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[3] / "results"


class Scheme(NamedTuple):
    """Colours for light or dark pages."""

    page: str
    ink: str
    grid: str


SCHEMES = {
    "light": Scheme("#ffffff", "#24292f", "#e8eaee"),
    "dark": Scheme("#0d1117", "#e6edf3", "#2b3138"),
}
OURS, RIVAL, OTHER, THIRD = "#2f81d9", "#e0562b", "#b8860b", "#3f9c6d"
SHOWN = {
    "reinforce": ("REINFORCE", RIVAL),
    "rloo": ("RLOO(4)", OTHER),
    "arsm": ("ARSM", OURS),
}
BRANCH = "branch 8"
"""The strategy that the figure shows: the default of `Branch`."""
TASKS = {
    "chain": ("sums in written steps", OURS),
    "countdown": ("countdown", OTHER),
    "translate": ("translation", THIRD),
}
VERDICTS = {"unbiased": OURS, "biased, no promise broken": "#9aa2ad", "not as documented": RIVAL}
PACKAGES = (
    "trl",
    "verl",
    "openrlhf",
    "skyrl",
    "tunix",
    "pyro",
    "numpyro",
    "storchastic",
    "torch",
    "reinmax",
    "vector-quantize-pytorch",
    "genjax",
    "stable-baselines3",
    "torchrl",
    "rlax",
)
"""Packages that the figure shows, in this order."""


class Shape(NamedTuple):
    """Arrangement of the panels."""

    rows: int
    columns: int
    inches: tuple[float, float]


SHAPES = {"overview": Shape(1, 3, (10.8, 3.4)), "overview-narrow": Shape(2, 1, (4.6, 6.0))}
"""Three panels beside each other on a screen, the first two below each other on a telephone. Their
text is about 10 pixels high on both.
"""


def figure(results: Path = RESULTS) -> None:
    """Panels in the order of the README's claims, for light and for dark pages."""
    for name, scheme in SCHEMES.items():
        for place, shape in SHAPES.items():
            draw(results, scheme, shape, results / f"{place}-{name}.png")


def draw(results: Path, scheme: Scheme, shape: Shape, path: Path) -> None:
    """One file of the figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    style = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.facecolor": scheme.page,
        "figure.facecolor": scheme.page,
        "legend.facecolor": scheme.page,
        "legend.fontsize": 9,
        "grid.color": scheme.grid,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
            scheme.ink,
        ),
    }
    with rc_context(style):  # pyright: ignore[reportArgumentType]
        canvas = Canvas(figsize=shape.inches, layout="constrained")
        panels = canvas.subplots(shape.rows, shape.columns)
        for axes, panel in zip(panels, (draw_tokens, draw_referee, draw_choice), strict=False):
            panel(axes, results, scheme)
        save(canvas, path, dpi=110)


def draw_choice(axes: Axes, results: Path, scheme: Scheme) -> None:
    """Ten runs per estimator on the toy problem, beside the true gradient's."""
    runs = {
        record.name: record for record in read_runs(results / "runs") if record.experiment == "toy"
    }
    for words, (name, colour) in SHOWN.items():
        steps, rewards = runs[f"C30-step1-{words}"].series("reward")
        for place, reward in enumerate(rewards):
            label = None if place else name
            axes.plot(steps, reward, color=colour, linewidth=1, label=label)
    steps, rewards = runs["C30-step1-exact"].series("reward")
    dots = (0, (1, 1.5))
    axes.plot(
        steps, rewards[0], color=scheme.ink, linewidth=2, linestyle=dots, label="true gradient"
    )
    axes.set_title("One choice, ten runs each")
    axes.set_xlabel("update")
    axes.set_ylabel("expected reward")
    axes.set_xlim(0, 5000)
    axes.set_ylim(0.4955, 0.5345)  # below the curves is the legend
    axes.set_yticks([0.51, 0.52, 0.53])
    axes.grid(True)
    axes.legend(framealpha=1, edgecolor="none", loc="lower right", ncols=2, columnspacing=1)


def draw_tokens(axes: Axes, results: Path, scheme: Scheme) -> None:
    """Tokens that branching needs for the noise of the best group method, by accuracy: at fixed
    questions, and at those drawn afresh for every estimate, which are the README's numbers.
    """
    levels = measured(Tables(results))
    for task, (name, colour) in TASKS.items():
        own = [level for level in levels if level.task == task]
        fixed = sorted((level.accuracy, level.ratios.get(BRANCH)) for level in own)
        fresh = [(level.accuracy, level.ratios.get(BRANCH + FRESH)) for level in own]
        draw_ratios(axes, fixed, color=colour, marker="o", markersize=4, linewidth=1, alpha=0.55)
        draw_ratios(axes, fresh, color=colour, marker="D", markersize=6, linestyle="", label=name)
    grey: dict[str, Any] = {"color": "#808891", "linestyle": ""}
    axes.plot([], marker="D", markersize=6, label="questions as in training", **grey)
    axes.plot([], marker="o", markersize=4, label="fixed questions", **grey)
    axes.axhline(1, color=scheme.ink, linewidth=1, linestyle=":")
    axes.text(0.62, 1.06, "best group method", ha="center")
    axes.set_yscale("log")
    axes.set_ylim(0.12, 16)
    axes.set_yticks([0.2, 0.5, 1, 2, 4], ["0.2", "0.5", "1", "2", "4"])
    axes.minorticks_off()
    axes.set_xlim(0.05, 0.88)
    axes.set_title("Token credit: tokens for equal noise")
    axes.set_xlabel("mean reward of SmolLM2 on the task")
    axes.set_ylabel("relative number of tokens")
    axes.grid(True, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    # matplotlib lists lines before error bars; the tasks come first here
    axes.legend(
        handles[2:] + handles[:2], labels[2:] + labels[:2], frameon=False, loc="upper right"
    )


def draw_ratios(axes: Axes, points: Sequence[tuple[float, Cell | None]], **how: Any) -> None:
    """Ratios that were measured, with their 95% intervals, by accuracy."""
    shown = [(accuracy, cell.mean, half(cell)) for accuracy, cell in points if cell is not None]
    if shown:
        accuracy, ratio, interval = zip(*shown, strict=True)
        axes.errorbar(accuracy, ratio, interval, capsize=3, **how)


def draw_referee(axes: Axes, results: Path, scheme: Scheme) -> None:
    """Entries of each package by verdict."""
    counts: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    for row in read_table(results / "audit"):
        name = package(row)
        # others did not run, or could not be judged
        if name in counts and row["verdict"] in ("unbiased", "wrong"):
            counts[name][kind(row)] += 1
    left = [0] * len(PACKAGES)
    for verdict, colour in VERDICTS.items():
        width = [counts[package][verdict] for package in PACKAGES]
        edge = {"edgecolor": scheme.page, "linewidth": 0.5}
        axes.barh(PACKAGES, width, left=left, color=colour, label=verdict, **edge)
        left = [a + b for a, b in zip(left, width, strict=True)]
    # the longest name would reach into the panel beside it
    axes.set_yticks(range(len(PACKAGES)), [name.removesuffix("-pytorch") for name in PACKAGES])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title("Gradients of released packages")
    axes.set_xlabel("gradients checked")
    axes.legend(frameon=False, loc="lower right")


def read_table(folder: Path) -> list[dict[str, str]]:
    """The rows of a folder's table."""
    with (folder / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Write the figure and the generated parts."""
    figure()
    remake(RESULTS)


if __name__ == "__main__":
    main()
