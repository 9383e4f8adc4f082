"""The generated parts of results/sequences/README.md."""

from __future__ import annotations

import re

from arsm_experiments.report.pages.tables import Tables, markdown

TASKS = {
    "spelling": "spell_backward",
    "spiral": "spiral_matrix",
    "sorting": "small_sorting",
    "filtering": "small_filtering",
}
LEVELS = ("0.1", "0.45", "0.8")
METHODS = (
    "token baseline 8",
    "value head",
    "branch rloo 16",
    "branch rloo 64, chance",
    "likeliest",
)
VARIANCE = "trace x tokens / best group"


def measured(tables: Tables, pattern: str, metric: str) -> dict[tuple[str, ...], float]:
    """Means by the groups of a pattern for rows."""
    lines = tables.lines("sequences/table.csv")
    matches = (
        (re.fullmatch(pattern, line["row"]), line["mean"])
        for line in lines
        if line["metric"] == metric
    )
    return {matched.groups(): float(mean) for matched, mean in matches if matched}


def table(tables: Tables) -> str:
    """Variance x tokens on fixed prompts, and the tokens of training relative to the best
    rival's.
    """
    variances = measured(tables, r"(\w+), accuracy \S+ \(level (\S+)\), (.*)", VARIANCE)
    rows = []
    for level in LEVELS:
        for method in METHODS:
            cells = [variances.get((task, level, method)) for task in TASKS.values()]
            rows.append([f"{level}: `{method}`", *map(_two, cells)])
    for level in ("0.7", "0.9"):
        tokens = measured(tables, r"(\w+), from 0\.1, (.*)", f"tokens to {level} / best rival")
        for method in METHODS[-2:]:
            cells = [tokens.get((task, method)) for task in TASKS.values()]
            rows.append([f"tokens to {level}, `{method}`", *map(_two, cells)])
    return markdown(["variance x tokens at accuracy; tokens to accuracy", *TASKS], rows)


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def finding(tables: Tables) -> str:
    """Branching and the likeliest answers beside the best group."""
    variances = measured(tables, r"(\w+), accuracy \S+ \(level (\S+)\), (.*)", VARIANCE)

    def fewer(level: str, method: str) -> str:
        found = sorted(1 / variances[task, level, method] for task in TASKS.values())
        return f"{found[0]:.2g} to {found[-1]:.2g}"

    name = "branch rloo 64, chance"
    return (
        f"**For the same variance on fixed prompts `{name}` needs {fewer('0.1', name)} times fewer "
        f"tokens than the best group at accuracy 0.1, {fewer('0.45', name)} times fewer at 0.45 "
        f"and {fewer('0.8', name)} times fewer at 0.8.** Plain branching needs more than the best "
        "group at 0.1 and less at 0.8. `likeliest` often has no variance left, because nearly "
        "every prompt is solved by the greedy answer or a variant of it."
    )


PARTS = {"table": table, "finding": finding}
