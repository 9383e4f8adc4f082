"""Update the tables of results/compare/README.md: `python -m arsm_experiments.report.compare_page`."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from arsm.estimators import estimator
from arsm_experiments.compare import FLOOR

PAGE = Path(__file__).parents[4] / "results" / "compare" / "README.md"
KINDS = ("black-box f, unbiased", "slope of f, unbiased", "biased")
GROUPS = {
    "network": ("network-0.1", "network-1", "network-3", "network-6"),
    "binary": ("binary-1", "binary-3"),
    "toy": ("toy-30", "toy-1000"),
}
"""Problems that share a table; every VAE has its own."""

Numbers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""numbers[problem][words][metric]."""


def read_numbers(table: Path) -> Numbers:
    """All metrics of table.csv; costs are relative to plain leave-one-out."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in csv.DictReader(table.open()):
        problem, _, label = line["row"].removeprefix("Comparison, ").partition(": ")
        words = label.removesuffix(" (biased)")
        found.setdefault(problem, {}).setdefault(words, {})[line["metric"]] = float(line["mean"])
    for rows in found.values():
        unit = rows["rloo"]["error x evaluations"]
        for metrics in rows.values():
            metrics["cost"] = metrics["error x evaluations"] / unit
    return found


def tables(numbers: Numbers) -> dict[str, str]:
    """Markdown by name: the groups, and each VAE by its problem's name."""
    made = {name: _by_problem(numbers, problems) for name, problems in GROUPS.items()}
    return made | {name: _of_vae(rows) for name, rows in numbers.items() if name.startswith("vae")}


def _kind(words: str) -> str:
    if words == FLOOR:
        return KINDS[0]
    chosen = estimator(words)
    return KINDS[2] if not chosen.unbiased else KINDS[1] if chosen.needs_gradient else KINDS[0]


def _by_problem(numbers: Numbers, problems: Sequence[str]) -> str:
    """Relative costs, one column per problem; estimators are ranked by the geometric mean."""
    costs = {
        words: [numbers[problem].get(words, {}).get("cost", math.nan) for problem in problems]
        for words in dict.fromkeys(words for problem in problems for words in numbers[problem])
    }

    def mean(words: str) -> float:
        logs = [math.log(max(cost, 1e-300)) for cost in costs[words] if not math.isnan(cost)]
        return sum(logs) / len(logs)

    lines = [_line(["", *problems]), "|---" * (1 + len(problems)) + "|"]
    for kind in KINDS:
        ranked = sorted((words for words in costs if _kind(words) == kind), key=mean)
        if ranked:
            lines.append(_line([f"**{kind}**", *[""] * len(problems)]))
            lines += [_line([f"`{words}`", *map(short, costs[words])]) for words in ranked]
    return "\n".join(lines) + "\n"


def _of_vae(rows: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        _line(["", "error x evaluations / `rloo`'s", "evaluations", "bias", "that noise alone shows"]),
        "|---" * 5 + "|",
    ]
    for words in sorted(rows, key=lambda words: rows[words]["cost"]):
        metrics, biased = rows[words], " (biased)" * (_kind(words) == KINDS[2])
        cells = [short(metrics[key]) for key in ("cost", "evaluations", "bias", "bias that noise alone shows")]
        lines.append(_line([f"`{words}`{biased}", *cells]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def short(x: float) -> str:
    """Two significant digits; empty for NaN."""
    if math.isnan(x):
        return ""
    if x == 0 or x >= 100:
        return f"{x:,.0f}"
    return f"{x:.{max(0, 1 - math.floor(math.log10(x)))}f}" if x >= 1e-4 else f"{x:.0e}"


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with its tables, each between `<!-- table: NAME -->` and `<!-- end -->`."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{made[found[1]]}<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables(read_numbers(PAGE.parent / "table.csv"))))
