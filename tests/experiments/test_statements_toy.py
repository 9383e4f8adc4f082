"""Numbers in the sentences about the toy are those of its table and runs."""

from __future__ import annotations

import re

from arsm_experiments.report.sections import Result
from arsm_experiments.runs.reader import Record
from tests.experiments.statements import assert_said, curves, runs_of


def test_who_ends_on_the_best_category_of_the_toy(records: list[Record]) -> None:
    def winners(label: str) -> int:
        (run,) = runs_of(records, "toy", label, categories=30)
        return sum(curve[-1] > 0.5 for curve in curves(run, "probability_last").values())

    assert [winners(label) for label in ("arsm", "rloo", "gumbel-softmax:temperature=0.2")] == [10, 10, 9]
    assert_said("results/toy/README.md", f"above one half on the best category on {winners('ars')} of 10 seeds")
    assert winners("reinforce") == 2
    assert_said("results/toy/README.md", "On two of ten seeds REINFORCE happened to settle on the best category")


SCALED = {1000: "C = 1,000, step 33.33", 10000: "C = 10,000, step 333.3"}
"""The toy's sections with the scaled step."""


def test_the_toy_with_many_categories(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    def result(categories: int, label: str, metric: str) -> Result:
        found = results[f"Toy, {SCALED[categories]}: {label}", metric]
        assert len(found.values) == 10
        return found

    gumbel = "gumbel-softmax:temperature=0.2"
    for categories in SCALED:
        ratios = (
            result(categories, label, "variance / arsm's at the start").mean
            for label in ("rloo", gumbel, "ars", "reinforce", "relax", "ar")
        )
        cells = " | ".join(re.sub(r"e\+0?", "e", f"{ratio:.1e}") for ratio in ratios)
        assert_said("results/toy/README.md", f"| {categories:,} | {cells} |")
    gaps = [result(categories, "arsm", "gap / true gap") for categories in SCALED]
    said = f"{gaps[0].text} times the true gradient's at C = 1,000 and {gaps[1].text} times at C = 10,000"
    assert_said("results/toy/README.md", said)
    calls = [result(categories, "arsm", "f calls an update").mean for categories in SCALED]
    assert_said("results/toy/README.md", f"{calls[0]:,.0f} and {calls[1]:,.0f} per update on average")
    large = [r for r in records if r.experiment == "toy" and r.config["categories"] == 10000 and r.config["step"] > 1]
    winners = {r.label for r in large for curve in curves(r, "probability_last").values() if curve[-1] > 0.5}
    assert winners == {"true gradient"}
    assert_said("results/toy/README.md", "only the true gradient ends with a probability above one half on the best")


def test_evaluations_beside_the_readmes_first_figure(results: dict[tuple[str, str], Result]) -> None:
    calls = {words: results[f"Toy, C = 30, step 1: {words}", "f calls an update"].mean for words in ("arsm", "rloo")}
    assert all(results[f"Toy, C = 30, step 1: {w}", "f calls an update"].mean == 1 for w in ("reinforce", "relax"))
    sentence = f"It evaluates f {calls['arsm']:.1f} times per update, REINFORCE and RELAX once, leave-one-out REINFORCE"
    assert_said("README.md", f"{sentence} {calls['rloo']:.1f} times.")
