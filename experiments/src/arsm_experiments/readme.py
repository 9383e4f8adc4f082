"""Make the README's figure and its table of results again, from results/: `python -m arsm_experiments.readme`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arsm_experiments.report.sections import number
from arsm_experiments.runs.reader import read_runs

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
FIGURE = RESULTS / "overview.png"
LEAST = 1e-8
BEGIN, END = "<!-- results: make readme -->\n", "<!-- end of results -->"


class Part(NamedTuple):
    """The rows of one table.csv that the README shows."""

    title: str
    experiment: str
    metric: str
    rows: str
    """What their names begin with; it is left out."""
    best: Callable[[list[float]], float]
    """Of several figures: min or max."""


PARTS = (
    Part("Categorical VAE on binarized MNIST: test -ELBO, nats", "vae", "test", "VAE, ", min),
    Part(
        "Half a digit from the other: test -ln p, nats", "conditional", "test, 1,000 samples", "Conditional MNIST", min
    ),
    Part(
        "CartPole, 200 steps: final average return, median and mean", "control", "final average", "CartPole-v0: ", max
    ),
    Part("Acrobot: final average return, median and mean", "control", "final average", "Acrobot-v1: ", max),
    Part("LunarLander: final average return, median and mean", "control", "final average", "LunarLander-v3: ", max),
    Part(
        "Toy, C = 30: expected reward after 5,000 updates, at most 0.5333", "toy", "E[f]", "Toy, C = 30, step 1: ", max
    ),
)


def table() -> str:
    """Ours beside the paper's, as Markdown: the rows that have the paper's settings, and of each estimator the best."""
    lines = ["| | ours | seeds | paper |", "|---|---|---|---|"]
    for part in PARTS:
        found = list(csv.DictReader((RESULTS / part.experiment / "table.csv").read_text().splitlines()))
        medians, steps = (
            {r["row"]: float(r["mean"]) for r in found if r["metric"] == m} for m in ("its median", "steps")
        )
        rows = [row for row in found if row["metric"] == part.metric and row["row"].startswith(part.rows)]
        rows = [row for row in rows if int(row["seeds"]) > 1 or as_printed(row["row"], part)]
        figures = [medians.get(row["row"], float(row["mean"])) for row in rows]
        names = [short(row["row"].removeprefix(part.rows)) for row in rows]
        kinds = [name.partition(", ")[0] for name in names]
        lines.append(f"| **[{part.title}](results/{part.experiment})** | | | |")
        for row, name, kind, value in zip(rows, names, kinds, figures, strict=True):
            best = part.best([other for other, its in zip(figures, kinds, strict=True) if its == kind])
            if row["paper"] or value == best or as_printed(row["row"], part):
                ours = number(float(row["mean"]), float(row["std"]) if row["std"] else None)
                if row["row"] in medians:
                    ours, name = f"{value:.0f}; {ours}", f"{name}; {steps[row['row']] / 1e6:.2g} million steps"
                lines.append(f"| {name} | {ours} | {row['seeds']} | {row['paper']} |")
    return "\n".join(lines) + "\n"


def as_printed(row: str, part: Part) -> bool:
    """Whether a row of control has the paper's network and budget, beside which no better one may stand alone."""
    return part.experiment == "control" and not re.search(r"\b(budget|hidden|episodes an iteration)\b", row)


def short(row: str) -> str:
    """Without its section's own name, whose settings a row has anyway: "1 layer (recipe): arsm" -> "1 layer: arsm"."""
    where, _, words = row.rpartition(": ")
    return ": ".join(filter(None, (where.partition("(")[0].strip(), words)))


SHOWN = {
    "ar": ("AR", "#a9afba"),
    "reinforce": ("REINFORCE", "#e0562b"),
    "relax": ("RELAX", "#8a63c9"),
    "ars": ("ARS", "#00a37a"),
    "rloo": ("leave-one-out\nREINFORCE, 4 samples", "#b8860b"),
    "arsm": ("ARSM", "#0074c2"),
    "exact": ("true gradient", "#1c1f24"),
}
RUNS = ("reinforce", "relax", "rloo", "arsm")
"""The estimators whose ten runs are drawn one by one."""


def figure() -> None:
    """The toy problem: where each estimator gets, by updates and by evaluations of f, and variance x evaluations."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from PIL import Image

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    style |= {"grid.color": "#e8eaee", "axes.titlelocation": "left", "axes.titlesize": 10}
    runs = {record.name: record for record in read_runs(RESULTS / "runs") if record.experiment == "toy"}
    with rc_context(style):  # pyright: ignore[reportArgumentType]
        canvas = Canvas(figsize=(12, 3.2), layout="constrained")
        by_update, by_evaluation, variance = canvas.subplots(1, 3)
        for words, (name, colour) in SHOWN.items():
            record = runs[f"C30-step1-{words}"]
            steps, rewards = record.series("reward")
            _, evaluations = record.series("evaluations")
            if words == "exact":
                for axes in (by_update, by_evaluation):
                    x = steps if axes is by_update else evaluations[0]
                    axes.plot(x, rewards[0], color=colour, linewidth=2, linestyle=(0, (1, 1.5)), label=name)
                continue
            for own, reward in zip(evaluations, rewards, strict=True) if words in RUNS else ():
                by_update.plot(steps, reward, color=colour, linewidth=0.9, alpha=0.7)
                by_evaluation.plot(own[1:], reward[1:], color=colour, linewidth=0.9, alpha=0.7)
            # evaluations of the estimates between one measurement and the next
            each = np.diff(np.mean(evaluations, 0)) / np.diff(steps)
            cost = np.mean(record.series("variance")[1], 0)[1:] * each
            cost[cost < LEAST] = np.nan  # all samples of a measurement were equal
            variance.plot(steps[1:], cost, color=colour, linewidth=2.6 if words == "arsm" else 1.5, label=name)
        by_update.set_title("Expected reward by updates, ten runs each")
        by_update.set_xlim(0, 5000)
        by_evaluation.set_title("The same runs by evaluations of f")
        by_evaluation.set_xscale("log")
        by_evaluation.set_xlim(50, 2e5)
        variance.set_title("Variance x evaluations of an estimate")
        variance.set_yscale("log")
        variance.set_ylim(LEAST, 1)
        variance.set_xlim(0, 5000)
        for axes, label in ((by_update, "update"), (by_evaluation, "evaluation of f"), (variance, "update")):
            axes.set_xlabel(label)
        entries = dict(zip(*reversed(variance.get_legend_handles_labels()), strict=True))
        entries |= dict(zip(*reversed(by_update.get_legend_handles_labels()), strict=True))
        canvas.legend(entries.values(), entries.keys(), frameon=False, loc="outside right center")
        whole = io.BytesIO()
        canvas.savefig(whole, dpi=150)
    picture = Image.open(whole).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(FIGURE, optimize=True)


def main() -> None:
    """Write the figure and the table."""
    figure()
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
