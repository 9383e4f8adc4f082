"""Make the README's figure and its table of results again, from results/: `python -m arsm_experiments.readme`."""

from __future__ import annotations

import csv
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
    """Ours beside the paper's, as Markdown: what the paper has a figure for, and of each estimator the best."""
    lines = ["| | ours | seeds | paper |", "|---|---|---|---|"]
    for part in PARTS:
        found = list(csv.DictReader((RESULTS / part.experiment / "table.csv").read_text().splitlines()))
        medians = {row["row"]: float(row["mean"]) for row in found if row["metric"] == "its median"}
        rows = [row for row in found if row["metric"] == part.metric and row["row"].startswith(part.rows)]
        rows = [row for row in rows if int(row["seeds"]) > 1]
        figures = [medians.get(row["row"], float(row["mean"])) for row in rows]
        names = [short(row["row"].removeprefix(part.rows)) for row in rows]
        kinds = [name.partition(", ")[0] for name in names]
        lines.append(f"| **[{part.title}](results/{part.experiment})** | | | |")
        for row, name, kind, value in zip(rows, names, kinds, figures, strict=True):
            best = part.best([other for other, its in zip(figures, kinds, strict=True) if its == kind])
            if row["paper"] or value == best:
                ours = number(float(row["mean"]), float(row["std"]) if row["std"] else None)
                ours = f"{value:.0f}; {ours}" if row["row"] in medians else ours
                lines.append(f"| {name} | {ours} | {row['seeds']} | {row['paper']} |")
    return "\n".join(lines) + "\n"


def short(row: str) -> str:
    """Without its section's own name, whose settings a row has anyway: "1 layer (recipe): arsm" -> "1 layer: arsm"."""
    where, _, words = row.rpartition(": ")
    return ": ".join(filter(None, (where.partition("(")[0].strip(), words)))


def figure() -> None:
    """The toy problem: where each estimator gets, and the variance on its way."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    shown = {
        "ar": ("AR", "#a9afba"),
        "reinforce": ("REINFORCE", "#e0562b"),
        "relax": ("RELAX", "#8a63c9"),
        "ars": ("ARS", "#00a37a"),
        "rloo": ("leave-one-out REINFORCE,\n4 samples", "#b8860b"),
        "arsm": ("ARSM", "#0074c2"),
        "exact": ("true gradient", "#1c1f24"),
    }
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#e8eaee", "axes.titlelocation": "left", "axes.titlesize": 10})
    drawing, (reward, variance) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    runs = {record.name: record for record in read_runs(RESULTS / "runs") if record.experiment == "toy"}
    for words, (name, colour) in shown.items():
        record = runs[f"C30-step1-{words}"]
        if words in ("reinforce", "relax", "arsm"):
            steps, seeds = record.series("reward")
            reward.plot(steps, np.transpose(seeds), color=colour, linewidth=0.9, alpha=0.7)
        if words == "exact":
            steps, seeds = record.series("reward")
            (line,) = reward.plot(steps, seeds[0], color=colour, linewidth=2, linestyle=(0, (1, 1.5)))
            line.set_label(name)
            continue
        steps, seeds = record.series("variance")
        mean = np.mean(seeds, 0)
        mean[mean < LEAST] = np.nan  # all samples of a measurement were equal
        variance.plot(steps, mean, color=colour, linewidth=2.6 if words == "arsm" else 1.5, label=name)
    reward.set_title("Expected reward while learning, ten runs each")
    variance.set_title("Variance of one gradient estimate, mean of ten runs")
    variance.set_yscale("log")
    variance.set_ylim(LEAST, 1)
    for axes in (reward, variance):
        axes.set_xlabel("update")
        axes.set_xlim(0, 5000)
    drawing.legend(frameon=False, loc="outside right center")
    drawing.savefig(FIGURE, dpi=160, metadata={"Software": None})


def main() -> None:
    """Write the figure and the table."""
    figure()
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
