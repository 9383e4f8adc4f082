"""The generated parts of results/sequences/README.md."""

from __future__ import annotations

import re

from arsm_experiments.report.pages.tables import Tables, markdown
from arsm_experiments.sequences import publish

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
    if value is None:
        return "-"
    # table.csv has three decimals
    return "<0.001" if value == 0 else f"{value:.2g}"


def finding(tables: Tables) -> str:
    """Branching beside the best group, in noise and in training."""
    variances = measured(tables, r"(\w+), accuracy \S+ \(level (\S+)\), (.*)", VARIANCE)
    name = "branch rloo 64, chance"

    def share(level: str) -> str:
        return _range([variances[task, level, name] for task in TASKS.values()])

    tokens = measured(tables, r"(\w+), from 0\.1, (.*)", "tokens to 0.7 / best rival")
    trained = [share for (_, method), share in tokens.items() if method == name]
    return (
        f"`Branch(RLOO(64))` with `chance` needs {share('0.1')} of the best group's tokens for "
        f"the same noise at accuracy 0.1, {share('0.45')} at 0.45 and {share('0.8')} at 0.8, and "
        f"{_range(trained)} of the best rival's tokens to train from 0.1 to 0.7."
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def repeats(tables: Tables) -> str:
    """Estimates per variance of the table."""
    found = {
        int(line["seeds"])
        for line in tables.lines("sequences/table.csv")
        if line["metric"] == VARIANCE
        and line["row"].partition("), ")[2] in (*publish.GROUPS, *METHODS)
    }
    return (
        f"Each variance is measured on {min(found)} to {max(found)} estimates of the gradient: a "
        "limit of seconds ended the slower methods early."
    )


def figure(tables: Tables) -> str:
    """What the figure counts and the table does not."""
    found = publish.variances(publish.load(tables.results / "sequences/records.tar.xz"))

    def drawn(method: str) -> str:
        return _range(
            [
                publish.relative(methods, method, publish.between_prompts(methods) or 0.0)
                for methods in found.values()
            ]
        )

    chance, likeliest = METHODS[-2:]
    return (
        "The figure also counts the variance of drawing 128 fresh prompts, inferred from two "
        f"methods; the table does not. In the figure `{chance}` is at {drawn(chance)} "
        f"and `{likeliest}` at {drawn(likeliest)}."
    )


PARTS = {"table": table, "repeats": repeats, "figure": figure}
