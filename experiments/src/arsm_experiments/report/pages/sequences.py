"""The generated parts of results/sequences/README.md and HISTORY.md."""

from __future__ import annotations

import re

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch
from arsm_experiments.sequences import publish

TABLE = "sequences/table.csv"
TASKS = {
    "spelling": "spell_backward",
    "spiral": "spiral_matrix",
    "sorting": "small_sorting",
    "filtering": "small_filtering",
}
LEVELS = ("0.1", "0.45", "0.8")
BASELINE, VALUE_HEAD, PLAIN, CHANCE, LIKELIEST = METHODS = (
    "token baseline 8",
    "value head",
    "branch rloo 16",
    "branch rloo 64, chance",
    "likeliest",
)
OURS = (CHANCE, LIKELIEST)
"""Methods whose tokens are relative to the best rival's."""
VARIANCE = "trace x tokens / best group"


def measured(tables: Tables, pattern: str, metric: str) -> dict[tuple[str, ...], float]:
    """Means by the groups of a pattern for rows."""
    lines = tables.lines(TABLE)
    matches = (
        (re.fullmatch(pattern, line["row"]), line["mean"])
        for line in lines
        if line["metric"] == metric
    )
    return {matched.groups(): float(mean) for matched, mean in matches if matched}


def _variances(tables: Tables) -> dict[tuple[str, ...], float]:
    """Variance x tokens relative to the best group, by task, level and method."""
    return measured(tables, r"(\w+), accuracy \S+ \(level (\S+)\), (.*)", VARIANCE)


def _tokens(tables: Tables, level: str) -> dict[tuple[str, ...], float]:
    """Tokens of a training from 0.1 to a level relative to the best rival's, by task and method."""
    return measured(tables, r"(\w+), from 0\.1, (.*)", f"tokens to {level} / best rival")


def _over_tasks(tables: Tables, method: str, level: str) -> list[float]:
    """Variance x tokens of a method on all tasks."""
    found = _variances(tables)
    return [found[task, level, method] for task in TASKS.values()]


def table(tables: Tables) -> str:
    """The lowest and highest ratio over the tasks, methods by levels."""
    tokens = _tokens(tables, "0.7")
    rows = []
    for method in METHODS:
        cells = [_range(_over_tasks(tables, method, level)) for level in LEVELS]
        trained = [share for (_, name), share in tokens.items() if name == method]
        rows.append([f"`{method}`", *cells, _range(trained) if trained else ""])
    heads = [f"noise at {level}" for level in LEVELS]
    return markdown(["", *heads, "tokens from 0.1 to 0.7"], rows)


def by_task(tables: Tables) -> str:
    """Variance x tokens on fixed prompts, and the tokens of training relative to the best
    rival's.
    """
    variances = _variances(tables)
    rows = []
    for level in LEVELS:
        for method in METHODS:
            cells = [variances.get((task, level, method)) for task in TASKS.values()]
            rows.append([f"{level}: `{method}`", *map(_two, cells)])
    for level in ("0.7", "0.9"):
        tokens = _tokens(tables, level)
        for method in OURS:
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

    def share(method: str, level: str) -> str:
        return _range(_over_tasks(tables, method, level))

    trained = [share for (_, name), share in _tokens(tables, "0.7").items() if name == CHANCE]
    return (
        "**Finding. For the same gradient noise on fixed prompts, branching with `chance` needs "
        f"{share(CHANCE, LEVELS[-1])} of the best group's tokens at accuracy {LEVELS[-1]}, and "
        f"{share(CHANCE, LEVELS[0])} at {LEVELS[0]}**, where a token baseline is close "
        f"({share(BASELINE, LEVELS[0])}). With 16 draws and no `chance` it needs "
        f"{share(PLAIN, LEVELS[0])} times the best group's tokens at {LEVELS[0]}. To train from "
        f"0.1 to 0.7 on {len(trained)} of {len(TASKS)} tasks, branching with `chance` needs "
        f"{_range(trained)} of the best rival's tokens."
    )


def details(tables: Tables) -> str:
    """Where branching loses, and the method that is an experiment."""
    variances = _variances(tables)
    worse = [
        f"{name} at {level} ({_two(variances[task, level, LIKELIEST])} against "
        f"{_two(variances[task, level, CHANCE])})"
        for name, task in TASKS.items()
        for level in LEVELS
        if variances[task, level, LIKELIEST] > variances[task, level, CHANCE]
    ]
    but = f", except on {listed(worse)}" if worse else ""
    return (
        f"- {_filtering(tables)}\n"
        f"- **`{LIKELIEST}`** has less noise than `chance`{but}. It needs answers so short that "
        "single ones have a noticeable probability, and is not in the library.\n"
        f"- {_cost_of_few_right(tables)}"
    )


def _filtering(tables: Tables) -> str:
    """The task that no method trains to 0.7."""
    found: dict[str, Cell] = {}
    for (row, metric), cell in tables.cells(TABLE).items():
        matched = re.fullmatch(rf"{TASKS['filtering']}, from 0\.1, (.*), updates of .*", row)
        if matched is not None and metric == "tokens to 0.19":
            found[matched[1]] = cell
    rival = min((name for name in found if name not in OURS), key=lambda name: found[name].mean)
    share = found[CHANCE].mean / found[rival].mean
    undecided = "" if welch(found[CHANCE], found[rival]).decided else ": undecided"
    return (
        f"**Filtering.** No method trains it to 0.7. To 0.19, `chance` needs {share:.2f} times the "
        f"tokens of the best rival, `{rival}`{undecided}."
    )


def _cost_of_few_right(tables: Tables) -> str:
    """Branching without `chance` at the lowest and the highest accuracy."""
    first, last = (_range(_over_tasks(tables, PLAIN, level)) for level in (LEVELS[0], LEVELS[-1]))
    return (
        f"**`{PLAIN}`**, without `chance`, has {first} of the best group's noise at {LEVELS[0]} "
        f"and {last} at {LEVELS[-1]}."
    )


def _range(values: list[float]) -> str:
    """The lowest and the highest of several ratios."""
    return f"{_two(min(values))} to {_two(max(values))}"


def repeats(tables: Tables) -> str:
    """Estimates per variance of the table."""
    found = {
        int(line["seeds"])
        for line in tables.lines(TABLE)
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

    return (
        f"In the figure `{CHANCE}` is at {drawn(CHANCE)} and `{LIKELIEST}` at {drawn(LIKELIEST)}."
    )


PARTS = {"finding": finding, "table": table, "details": details}
HISTORY_PARTS = {"tasks": by_task, "repeats": repeats, "figure": figure}
