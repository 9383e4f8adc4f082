"""The table of tasks that the paper does not have: methods on each, best first."""

from __future__ import annotations

import re
from typing import NamedTuple

from arsm_experiments.report.pages.tables import Cell, Tables, welch


class Task(NamedTuple):
    """A line of the table: methods on one task, ranked, from the rows of one table.csv."""

    title: str
    measure: str
    experiment: str
    metric: str
    rows: str
    """A pattern for the rows, whose last group is the method and its settings."""
    names: tuple[tuple[str, str], ...]
    """Methods as patterns, and what to call them."""
    higher: bool = False
    """Whether higher is better."""
    page: str = "README.md"
    """Where the table is told."""


LANGUAGE_MODEL = (
    (r"branch \d+", "branching"),
    (r"group \d+", "leave-one-out"),
    (r"value head", "value head"),
)
TASKS = (
    Task(
        "SmolLM2-135M, sums, accuracy 0.77",
        "variance x tokens, thousands",
        "language_model",
        "variance x tokens, thousands",
        r"chain, level 0\.8c \(accuracy \S+\), (.*), fresh",
        LANGUAGE_MODEL,
    ),
    Task(
        "SmolLM2-135M, countdown, accuracy 0.32",
        "variance x tokens, thousands",
        "language_model",
        "variance x tokens, thousands",
        r"countdown, level 0\.3c \(accuracy \S+\), (.*), fresh",
        LANGUAGE_MODEL,
    ),
    Task(
        "SmolLM2-135M, translation, chrF 0.32",
        "variance x tokens, thousands",
        "language_model",
        "variance x tokens, thousands",
        r"translate, level 0\.3c \(accuracy \S+\), (.*), fresh",
        LANGUAGE_MODEL,
    ),
    Task(
        "Pyro VAE",
        "variance x time",
        "pyro",
        "variance x time / best of Pyro's",
        r"Pyro VAE, K = 8, 550 steps: (?!.*same images)(.*)",
        ((r"arsm\.pyro\.ELBO, .*", "`arsm.pyro.ELBO`"), (r"(Trace\w+).*", r"Pyro's `\1`")),
        page="HISTORY.md",
    ),
    Task(
        "Mixture of experts",
        "accuracy",
        "router",
        "test accuracy",
        r"Router: (.*)",
        (
            (r"arsm\.choices, .*", "`arsm.choices`"),
            (r"RLOO.*by hand", "leave-one-out by hand"),
            (r"(.*)", r"\1"),
        ),
        higher=True,
        page="HISTORY.md",
    ),
    Task(
        "MAX-SAT",
        "clauses",
        "maximize",
        "best value after 2,000 evaluations",
        r"MAX-SAT: (.*)",
        ((r"arsm\.maximize", "`arsm.maximize`"), (r"annealing.*", "annealing"), (r"(.*)", r"\1")),
        higher=True,
    ),
)
PLACES = 4
"""Methods per line."""


def entries(tables: Tables, task: Task) -> dict[str, Cell]:
    """The best row of every method, best first; single seeds are left out."""
    sign = -1 if task.higher else 1
    best: dict[str, Cell] = {}
    for (row, metric), cell in tables.cells(f"{task.experiment}/table.csv").items():
        matched = re.fullmatch(task.rows, row)
        if matched is None or metric != task.metric or cell.seeds < 2:
            continue
        name = method(matched[1], task)
        if name is not None and sign * cell.mean < sign * best.get(name, cell).mean + 1e-12:
            best[name] = cell
    return dict(sorted(best.items(), key=lambda entry: sign * entry[1].mean))


def method(label: str, task: Task) -> str | None:
    """A method's name without its settings; None if the line does not show it."""
    for pattern, name in task.names:
        if re.fullmatch(pattern, label):
            return re.sub(f"^{pattern}$", name, label)
    return None


def table(tables: Tables) -> str:
    """Bold: the best mean, and every mean that is not decidedly behind it."""
    lines = ["| task | measure | better | best first |", "|---|---|---|---|"]
    for task in TASKS:
        ranked = entries(tables, task)
        first = next(iter(ranked.values()))
        words = []
        for name, cell in list(ranked.items())[:PLACES]:
            level = cell is first or (cell.std > 0 and not welch(cell, first).decided)
            words.append(f"**{name} {cell.spread}**" if level else f"{name} {cell.spread}")
        title = f"[{task.title}]({task.experiment}/{task.page})"
        better = "higher" if task.higher else "lower"
        lines.append(f"| {title} | {task.measure} | {better} | {'; '.join(words)} |")
    return "\n".join(lines) + "\n"
