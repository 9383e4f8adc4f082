"""Update the README's figure and table of results from results/: `python -m arsm_experiments.readme`."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arsm_experiments.labels import BEFORE, readable
from arsm_experiments.palette import save
from arsm_experiments.report.sections import number
from arsm_experiments.runs.reader import read_runs

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
FIGURE = RESULTS / "overview.png"
LEAST = 1e-8
BEGIN, END = "<!-- results: make readme -->\n", "<!-- end of results -->"


class Task(NamedTuple):
    """A line of the README's table: methods on one task, ranked, from the rows of one table.csv."""

    title: str
    measure: str
    experiment: str
    metric: str
    rows: str
    """A pattern for the rows, whose last group is the method and its settings."""
    higher: bool = False
    """Whether higher is better."""
    names: tuple[tuple[str, str], ...] = ()
    """Methods to rename, as patterns and their replacements."""
    paper: bool = False
    """Whether the paper measured the same quantity on the same images."""


PRINTED = r"(?!.*(?:budget|hidden|episodes an iteration))"
"""Rows of control with the paper's network, budget and one episode per update."""
SEQUENCES = (
    (r"branch .*", "branching"),
    (r"group .*", "leave-one-out"),
    (r"grpo .*", "GRPO"),
    (r"dr\. grpo .*", "Dr. GRPO"),
    (r"vineppo .*", "VinePPO"),
    (r"(token baseline|value head).*", r"\1"),
    (r"likeliest.*", "likeliest answers"),
)
PYRO = ((r"arsm\.pyro\.ELBO, .*", "`arsm.pyro.ELBO`"), (r"(Trace\w+).*", r"Pyro's `\1`"))
ROUTER = ((r"arsm\.choices, .*", "`arsm.choices`"), (r"RLOO.*by hand", "leave-one-out by hand"))
SEARCH = ((r"arsm\.maximize", "`arsm.maximize`"), (r"annealing.*", "annealing"))
NATS = "test -ELBO, nats"
TWO_LAYERS = r"VAE, 2 layers(?: \(algorithm2\))?: ((?:(?!, ).)*)(?:, first logit fixed False.*)?"
RETURN = "final return"
TASKS = (
    Task("One choice among 30", "expected reward", "toy", "E[f]", r"Toy, C = 30, step 1: (?!true)(.*)", True),
    Task("Categorical VAE", NATS, "vae", "test", r"VAE, 1 layer: ((?:(?!, ).)*)", paper=True),
    Task("Two-layer VAE", NATS, "vae", "test", TWO_LAYERS, paper=True),
    Task("Regularised VAE", NATS, "vae", "test", r"VAE, 1 layer \(recipe\): (.*)"),
    Task("Half a digit", "test -ln p, nats", "conditional", "test, 1,000 samples", r"Conditional MNIST: (.*)"),
    Task("CartPole", RETURN, "control", "final average", rf"CartPole-v0: {PRINTED}(.*)", True),
    Task("Acrobot", RETURN, "control", "final average", rf"Acrobot-v1: {PRINTED}(.*)", True),
    Task("LunarLander", RETURN, "control", "final average", r"LunarLander-v3: (.*)", True),
    Task(
        "Language model sorting numbers",
        "variance x tokens",
        "sequences",
        "the same, fresh prompts",
        r"small_sorting, accuracy \S+ \(level 0.8\), (.*)",
        names=SEQUENCES,
    ),
    Task(
        "Pyro VAE",
        "variance x time",
        "pyro",
        "variance x time / best of Pyro's",
        r"Pyro VAE, K = 8, 550 steps: (?!.*same images)(.*)",
        names=PYRO,
    ),
    Task("Mixture of experts", "accuracy", "router", "test accuracy", r"Router: (.*)", True, ROUTER),
    Task("MAX-SAT", "clauses", "maximize", "best value after 3,000 evaluations", r"MAX-SAT: (.*)", True, SEARCH),
)
PLACES, KEPT = 4, ("ARSM", "leave-one-out")
"""Methods per line, and those that are always shown."""


class Entry(NamedTuple):
    """The best row of one method."""

    name: str
    mean: float
    spread: float
    seeds: int


def entries(task: Task) -> list[Entry]:
    """The best row of every method, best first; single seeds are left out."""
    sign = -1 if task.higher else 1
    best: dict[str, Entry] = {}
    for row in read_table(task):
        matched = re.fullmatch(task.rows, row["row"])
        if matched is not None and row["metric"] == task.metric and int(row["seeds"]) > 1:
            entry = Entry(method(matched[1], task), float(row["mean"]), float(row["std"] or 0), int(row["seeds"]))
            best[entry.name] = min(best.get(entry.name, entry), entry, key=lambda each: sign * each.mean)
    return sorted(best.values(), key=lambda entry: sign * entry.mean)


def read_table(task: Task) -> list[dict[str, str]]:
    """The rows of the task's table.csv."""
    return list(csv.DictReader((RESULTS / task.experiment / "table.csv").read_text().splitlines()))


def method(label: str, task: Task) -> str:
    """A method's name without its settings; pooled and straight-through ones are methods of their own."""
    for pattern, replacement in task.names:
        if re.fullmatch(pattern, label):
            return re.sub(pattern, replacement, label)
    name, *options = re.split(r"[:,]", label.partition(", ")[0].partition(" ")[0])
    kept = [option for option in options if option in BEFORE]
    words = ":".join([name, *kept])
    return readable(words) if readable(words) != words else label


def tied(entry: Entry, best: Entry) -> bool:
    """Whether its mean is within two standard errors of the best."""
    return abs(entry.mean - best.mean) <= 2 * math.hypot(*(e.spread / math.sqrt(e.seeds) for e in (entry, best)))


def table() -> str:
    """Tasks and methods as a Markdown table; the best method is bold, and so is every one that ties with it."""
    lines = ["| task | measure | better | best first |", "|---|---|---|---|"]
    for task in TASKS:
        ranked = entries(task)
        paper = in_paper(task) if task.paper else ""
        words = []
        for place, entry in enumerate(ranked):
            if place < PLACES or entry.name in KEPT:
                text = f"{entry.name} {number(entry.mean, entry.spread)}"
                words.append(f"**{text}**" if tied(entry, ranked[0]) else text)
                words[-1] += f" (paper {paper})" if paper and entry.name == "ARSM" else ""
        title = f"[{task.title}](results/{task.experiment}/README.md)"
        lines.append(f"| {title} | {task.measure} | {'higher' if task.higher else 'lower'} | {'; '.join(words)} |")
    return "\n".join(lines) + "\n"


def in_paper(task: Task) -> str:
    """The paper's number for ARSM; empty if no run of ours has its settings."""
    rows = [row for row in read_table(task) if row["metric"] == task.metric and row["paper"]]
    matched = [(re.fullmatch(task.rows, row["row"]), row["paper"]) for row in rows]
    papers = (paper for found, paper in matched if found is not None and method(found[1], task) == "ARSM")
    return next(papers, "")


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
    """The toy problem: reward of each estimator by updates and by evaluations of f, and variance x evaluations."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

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
        save(canvas, FIGURE, dpi=150)


def main() -> None:
    """Write the figure and the table."""
    figure()
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
