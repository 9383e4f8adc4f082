"""Numbers in the sentences about control are those of its table and runs."""

from __future__ import annotations

from statistics import fmean

from arsm_experiments.report.control import seed_series
from arsm_experiments.report.sections import Result
from arsm_experiments.runs.reader import Record
from tests.experiments.statements import assert_said, page


def test_the_log_variances_of_acrobot(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    methods = {
        "ARSM": "arsm, adam 0.01, entropy 0.01",
        "A2C": "a2c, rmsprop 0.01, entropy 0.01",
        "REINFORCE": "reinforce, rmsprop 0.003, entropy 0.01",
        "RELAX": "relax, adam 0.01, entropy 0.01",
    }
    ends, wholes = [], []
    for row in methods.values():
        result = results[f"Acrobot-v1: {row}", "log variance"]
        wholes.append(f"{result.mean:.1f}")
        ends.append(fmean(s["log_variance"][-1] for s in seed_series(result.record, "log_variance")))
    a, b, c, d = (f"{end:.1f}" for end in ends)
    said = f"is {a} for ARSM, {b} for A2C, {c} for REINFORCE and {d} for RELAX at the end of the runs"
    assert_said("results/control/README.md", said)
    assert_said(
        "results/control/README.md", f"as `table.csv` has it, {wholes[0]}, {wholes[1]}, {wholes[2]} and {wholes[3]}."
    )


def test_arsm_on_acrobot_with_the_papers_settings(results: dict[tuple[str, str], Result]) -> None:
    final = results["Acrobot-v1: arsm, adam 0.01, entropy 0.01", "final average"]
    assert sum(value < -400 for value in final.values) == 3
    assert_said("README.md", "On Acrobot it fails on three of ten seeds.")
    assert_said("results/control/README.md", f"its mean at {final.mean:.0f} ± {final.std:.0f}: seven seeds pass -100")


def test_arsm_on_cartpole(results: dict[tuple[str, str], Result]) -> None:
    row = "CartPole-v0: arsm, rmsprop 0.03"
    final, episodes = results[row, "final average"], sorted(results[row, "episodes to the line"].values)
    assert (len(episodes), len(final.values), final.record.config["episodes"]) == (9, 10, 500)
    soon = f"seven of them after {episodes[0]:.0f} to {episodes[6]:.0f} episodes"
    late = f"two after {episodes[7]:.0f} and {episodes[8]:.0f}"
    said = page("results/control/README.md")
    assert "passes 195 on 9 of 10 seeds" in said
    assert soon in said
    assert late in said
    assert f"a mean of {final.mean:.0f} ± {final.std:.0f}. One seed stays at {min(final.values):.0f}." in said
    assert_said("README.md", "On CartPole it fails on one of ten seeds.")
    others = [r.mean for (name, metric), r in results.items() if name.startswith("CartPole-v0: ") and metric == "steps"]
    assert len(others) == 5
    assert sorted(others)[-2] < max(others) / 8
    assert max(others) == results[row, "steps"].mean
