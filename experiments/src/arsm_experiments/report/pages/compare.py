"""The generated parts of the pages of results/compare and of two pages of docs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from arsm.estimators import estimator
from arsm_experiments.compare import FLOOR
from arsm_experiments.report.pages.tables import Tables, markdown, short

KINDS = ("black-box f, unbiased", "slope of f, unbiased", "biased")
NETWORKS = ("network-0.1", "network-1", "network-3", "network-6")
BINARY = ("binary-1", "binary-3")
VAES = (
    "vae-short-1layer-gumbel-softmax-hard=True-rate0.0003",
    "vae-1layer-arsm-rate0.0004",
)
POOLED = "arsm:pooled=True"
PROBLEMS = {
    "network-1": "network, scale 1",
    "network-6": "network, scale 6",
    "binary-3": "binary",
    VAES[0]: "VAE, broad q",
    VAES[1]: "VAE, confident q",
    "toy-30": "toy, C = 30",
}
"""Columns of the longer table."""
COLUMNS = tuple(problem for problem in PROBLEMS if problem not in BINARY)
"""Columns of the page's table."""
SHOWN = (
    FLOOR,
    "rloo:ridge=1.0",
    "carms",
    "local-expectation",
    "rloo",
    "relax",
    POOLED,
    "arsm-plus",
    "arsm",
    "reinforce",
    "double-control",
    "straight-through",
    "reinmax",
    "gumbel-softmax:temperature=0.5,hard=True",
)
"""Rows of the page's table; HISTORY.md has the others."""
LEFT_OUT = (
    "4*rodeo:samples=11",
    "ars-plus",
    "arsm:references=2,pooled=True",
    "decoupled-straight-through:backward=0.5",
    "dr-grpo",
    "gapped-straight-through",
    "gumbel-rao",
    "otb",
    "rloo:surrogate=logits",
    "rodeo",
    "ugc",
)
"""Variants and close relatives of other rows; table.csv has them."""

CHOOSING = {
    "network-0.1": "network-0.1",
    "network-6": "network-6",
    VAES[1]: "vae-1layer",
    VAES[0]: "vae-short",
    "toy-30": "toy-30",
    "toy-1000": "toy-1000",
}
"""Columns of the guide's table."""
CHOICES = {
    KINDS[0]: (
        "rloo",
        "rloo:ridge=1.0",
        "rloo:surrogate=logits",
        "carms",
        "unordered-set",
        "local-expectation",
        POOLED,
        "arsm",
        "arsm-plus",
        "ars",
        "reinforce",
    ),
    KINDS[1]: ("double-control", "rebar", "muprop"),
    KINDS[2]: ("straight-through", "reinmax", "gumbel-softmax:temperature=0.5"),
}
"""Rows of the guide's table."""

Numbers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""numbers[problem][words][metric]."""


def read_numbers(tables: Tables) -> Numbers:
    """All metrics of table.csv; costs are relative to plain leave-one-out."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in tables.lines("compare/table.csv"):
        problem, _, label = line["row"].partition(": ")
        words = label.removesuffix(" (biased)")
        found.setdefault(problem, {}).setdefault(words, {})[line["metric"]] = float(line["mean"])
    for rows in found.values():
        unit = rows["rloo"]["error x evaluations"]
        for metrics in rows.values():
            metrics["cost"] = metrics["error x evaluations"] / unit
    return found


def _kind(words: str) -> str:
    if words == FLOOR:
        return KINDS[0]
    chosen = estimator(words)
    return KINDS[2] if not chosen.unbiased else KINDS[1] if chosen.needs_gradient else KINDS[0]


def table(tables: Tables) -> str:
    """Relative costs of the best known estimators, one column per problem."""
    return _ranking(read_numbers(tables), COLUMNS, lambda words: words in SHOWN)


def every_estimator(tables: Tables) -> str:
    """The same table with more estimators and problems."""
    return _ranking(read_numbers(tables), tuple(PROBLEMS), lambda words: words not in LEFT_OUT)


def _ranking(numbers: Numbers, problems: Sequence[str], wanted: Callable[[str], bool]) -> str:
    """Relative costs; estimators of a kind are ranked by their geometric mean over problems."""
    costs = {
        words: [numbers[problem].get(words, {}).get("cost", math.nan) for problem in problems]
        for words in dict.fromkeys(words for problem in problems for words in numbers[problem])
        if wanted(words)
    }

    def mean(words: str) -> float:
        logs = [math.log(max(cost, 1e-300)) for cost in costs[words] if not math.isnan(cost)]
        return sum(logs) / len(logs)

    rows = []
    for kind in KINDS:
        ranked = sorted((words for words in costs if _kind(words) == kind), key=mean)
        if ranked:
            rows.append([f"**{kind}**", *[""] * len(problems)])
            rows += [[f"`{words}`", *map(short, costs[words])] for words in ranked]
    return markdown(["", *(PROBLEMS[problem] for problem in problems)], rows)


def ratios(
    numbers: Numbers, words: str, problems: Sequence[str] = (*NETWORKS, *VAES)
) -> list[float]:
    """An estimator's error x evaluations for twenty variables, relative to leave-one-out's."""
    return [numbers[problem][words]["cost"] for problem in problems]


def between(found: Sequence[float]) -> str:
    """The least and the largest, in two digits."""
    return f"{short(min(found))} to {short(max(found))}"


def answer(tables: Tables) -> str:
    """Leave-one-out with the ridge, ARSM for several variables, and the best for one variable."""
    numbers = read_numbers(tables)
    several = (*NETWORKS, *BINARY, *VAES)
    better = sum(cost < 1 for cost in ratios(numbers, "rloo:ridge=1.0", several))
    best, cost = _best_unbiased(numbers, "toy-30")
    asked = numbers["toy-30"][best]["evaluations"]
    return (
        "**Finding.** **For several variables ARSM is not the one to choose: on ten-way variables "
        f"it has {between(ratios(numbers, 'arsm'))} times the error of leave-one-out REINFORCE at "
        f"equal cost, {between(ratios(numbers, POOLED))} times with pooling.** Leave-one-out with "
        f"a ridge regression has less error than plain leave-one-out on {better} of {len(several)} "
        f"problems of twenty variables. For one variable of 30 categories `{best}` has the least "
        f"error of the unbiased estimators that were run, {short(cost)} times leave-one-out's, "
        f"with {asked:.0f} evaluations; 30 would give the exact gradient."
    )


def _best_unbiased(numbers: Numbers, problem: str) -> tuple[str, float]:
    """The unbiased estimator with the least cost on a problem, and that cost."""
    costs = {
        words: metrics["cost"]
        for words, metrics in numbers[problem].items()
        if words != FLOOR and _kind(words) != KINDS[2]
    }
    best = min(costs, key=costs.__getitem__)
    return best, costs[best]


def details(tables: Tables) -> str:
    """Binary variables, the best black-box estimators, those with slopes, and one variable."""
    numbers = read_numbers(tables)
    ridge, local = ratios(numbers, "rloo:ridge=1.0"), ratios(numbers, "local-expectation")
    asked = [
        f"{numbers[problem]['local-expectation']['evaluations']:.0f}"
        for problem in (NETWORKS[1], BINARY[1])
    ]
    binary = [between(ratios(numbers, words, BINARY)) for words in ("arsm", POOLED)]
    slope = [between(ratios(numbers, "double-control", of)) for of in (NETWORKS, VAES)]
    best, cost = _best_unbiased(numbers, "toy-1000")
    return "\n".join(
        [
            "- **Small logits.** Of the unbiased black-box estimators without trained parts, "
            "`local-expectation` has the least error on the network at scales 0.1 and 1: "
            f"{short(local[0])} and {short(local[1])}. It takes {asked[0]} evaluations ({asked[1]} "
            "for binary variables), whatever the budget.",
            "- **Large logits.** At scales 3 and 6 leave-one-out with the ridge has the least: "
            f"{short(ridge[2])} and {short(ridge[3])}.",
            f"- **Slopes.** `double-control` has {slope[0]} on the network, where f is smooth, and "
            f"{slope[1]} on the VAEs. It needs one backward pass for all samples. Its parts, and "
            "those of `relax`, were trained at these fixed logits.",
            f"- **Twenty binary variables.** ARSM has {binary[0]}, pooled ARSM {binary[1]}.",
            "- **One variable.** Plain ARSM has "
            f"{short(numbers['toy-30']['arsm']['cost'])} with 30 categories and "
            f"{short(numbers['toy-1000']['arsm']['cost'])} with 1,000. With 1,000 `{best}` has the "
            f"least of the unbiased estimators that were run, {short(cost)}; `arsm-plus` was not.",
        ]
    )


def in_short(tables: Tables) -> str:
    """The sentence of docs/estimators.md about several variables."""
    numbers = read_numbers(tables)
    return (
        "- **Several variables, a black-box f:** leave-one-out REINFORCE (`rloo`, with `ridge=1.0` "
        f"from ten samples on). ARSM has {between(ratios(numbers, 'arsm'))} times its error x "
        f"evaluations for ten-way variables and {between(ratios(numbers, 'arsm', BINARY))} times "
        f"for binary ones, pooled ARSM {between(ratios(numbers, POOLED))} and "
        f"{between(ratios(numbers, POOLED, BINARY))} times."
    )


def choosing(tables: Tables) -> str:
    """The table of docs/guides/choosing.md: the estimators that it recommends or warns of."""
    numbers = read_numbers(tables)
    rows = []
    for kind, several in CHOICES.items():
        rows.append([f"**{kind}**", *[""] * len(CHOOSING)])
        for words in several:
            costs = [numbers[problem].get(words, {}).get("cost", math.nan) for problem in CHOOSING]
            rows.append([f"`{words}`", *map(short, costs)])
    return markdown(["", *(f"`{name}`" for name in CHOOSING.values())], rows)


PARTS = {"answer": answer, "table": table, "details": details}
HISTORY_PARTS = {"every": every_estimator}
