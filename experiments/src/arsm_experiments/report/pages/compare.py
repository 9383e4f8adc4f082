"""The generated parts of results/compare/README.md and of two pages of docs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
"""Columns of the page's table."""
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
        problem, _, label = line["row"].removeprefix("Comparison, ").partition(": ")
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
    """Relative costs, one column per problem; estimators are ranked by the geometric mean."""
    numbers = read_numbers(tables)
    costs = {
        words: [numbers[problem].get(words, {}).get("cost", math.nan) for problem in PROBLEMS]
        for words in dict.fromkeys(words for problem in PROBLEMS for words in numbers[problem])
        if words not in LEFT_OUT
    }

    def mean(words: str) -> float:
        logs = [math.log(max(cost, 1e-300)) for cost in costs[words] if not math.isnan(cost)]
        return sum(logs) / len(logs)

    rows = []
    for kind in KINDS:
        ranked = sorted((words for words in costs if _kind(words) == kind), key=mean)
        if ranked:
            rows.append([f"**{kind}**", *[""] * len(PROBLEMS)])
            rows += [[f"`{words}`", *map(short, costs[words])] for words in ranked]
    return markdown(["", *PROBLEMS.values()], rows)


def ratios(
    numbers: Numbers, words: str, problems: Sequence[str] = (*NETWORKS, *VAES)
) -> list[float]:
    """An estimator's error x evaluations for twenty variables, relative to leave-one-out's."""
    return [numbers[problem][words]["cost"] for problem in problems]


def between(found: Sequence[float]) -> str:
    """The least and the largest, in two digits."""
    return f"{short(min(found))} to {short(max(found))}"


def finding(tables: Tables) -> str:
    """ARSM for several variables, the best black-box estimators, and one variable."""
    numbers = read_numbers(tables)
    ridge, local = ratios(numbers, "rloo:ridge=1.0"), ratios(numbers, "local-expectation")
    toy = [numbers[problem]["arsm"]["cost"] for problem in ("toy-30", "toy-1000")]
    binary = [between(ratios(numbers, words, BINARY)) for words in ("arsm", POOLED)]
    plus = numbers["toy-30"]["arsm-plus"]["cost"]
    asked = [
        f"{numbers[problem]['local-expectation']['evaluations']:.0f}"
        for problem in (NETWORKS[1], BINARY[1])
    ]
    return (
        f"**For twenty ten-way variables plain ARSM has {between(ratios(numbers, 'arsm'))} times "
        f"leave-one-out's error x evaluations, pooled ARSM {between(ratios(numbers, POOLED))} "
        f"times; for twenty binary ones {binary[0]} and {binary[1]}.** Of the unbiased black-box "
        "estimators without trained parts, on the ten-way network, local expectation is best at "
        f"small scales ({short(local[0])} and {short(local[1])} at 0.1 and 1) and leave-one-out "
        f"with the ridge at large ones ({short(ridge[2])} and {short(ridge[3])} at 3 and 6). Local "
        f"expectation takes {asked[0]} evaluations ({asked[1]} for binary variables), whatever the "
        f"budget. **For one variable ARSM has {short(toy[0])} (C = 30) and {short(toy[1])} "
        f"(C = 1,000) times leave-one-out's, ARSM+ {short(plus)} times (C = 30).**"
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


PARTS = {"table": table, "finding": finding}
