"""Sentences and tables of results/trl, on records worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arsm_experiments.report.pages import trl
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs import lines as run_lines
from tests.experiments.made_up_tables import HEADER, write_lines

GAINS = {
    ("sort", 1e-4): 0.1,
    ("sort", 3e-4): -0.1,
    ("sort", 1e-3): 0.01,
    ("count", 3e-4): -0.01,
    ("count", 1e-3): -0.2,
}
"""BranchTrainer's reward less GRPOTrainer's at 60,000 tokens."""
NOISE = {
    ("sort", "GRPOTrainer", None): 10.0,
    ("sort", "BranchTrainer", 1.0): 5.0,
    ("sort", "TrueTokens", 1.0): 15.0,
    ("count", "GRPOTrainer", None): 10.0,
    ("count", "BranchTrainer", 1.0): 20.0,
    ("count", "TrueTokens", 1.0): 30.0,
    ("sort", "BranchTrainer", None): 6.0,
    ("sort", "TrueTokens", None): 16.0,
    ("count", "BranchTrainer", None): 21.0,
    ("count", "TrueTokens", None): 31.0,
}
"""Variance x tokens of the first model; the second has 10% more of all but GRPOTrainer's."""


def small() -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for (task, rate), gain in GAINS.items():
        for trainer, more in (("GRPOTrainer", 0.0), ("BranchTrainer", 1.0)):
            row = f"{task}: {trainer}, rate {rate:g}"
            for metric, value in (
                ("reward at 60000 tokens", 0.5 + gain * more),
                ("reward at 30000 tokens", 0.4 + 0.01 * more),
                ("reward at 20000 tokens", 0.3 - 0.05 * more),
                ("after", 0.6 + (0.1 if rate == 1e-3 else 0.01) * more),
                ("tokens", 100.0 - 20 * more),
                ("cpu_seconds", 10.0 + 5 * more),
            ):
                lines.append((row, metric, value, 0.02, 3))
    return lines


def trainings() -> list[run_lines.Line]:
    """BranchTrainer's updates take twice as long: when GRPOTrainer has made all of its 40, with
    rewards of 0.5, it has made 20 of its own, with 0.8 in the last ten of these.
    """
    grpo = [[9, 0.5]] * 40
    branch = [[9, 0.1]] * 10 + [[9, 0.8]] * 10 + [[9, 0.0]] * 20
    return [
        {
            "task": task,
            "rate": rate,
            "trainer": trainer,
            "cpu_seconds": seconds,
            "curve": [[tokens, reward + 0.01 * seed] for tokens, reward in curve],
        }
        for task, rate in GAINS
        for trainer, curve, seconds in (
            ("GRPOTrainer", grpo, 10.0),
            ("BranchTrainer", branch, 20.0),
        )
        for seed in range(3)
    ]


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    folder = tmp_path / "trl"
    write_lines(folder / "table.csv", HEADER, small())
    noise = [
        {
            "task": task,
            "seed": seed,
            "trainer": trainer,
            "budget": budget,
            "per_token": value * (1 if trainer == "GRPOTrainer" else 1 + 0.1 * seed),
        }
        for seed in (0, 1)
        for (task, trainer, budget), value in NOISE.items()
    ]
    (folder / "noise.json").write_text(json.dumps({"runs": noise}))
    runs = [
        {
            "trainer": trainer,
            "before": 0.4 + 0.01 * seed,
            "after": after + 0.01 * seed,
            "tokens": tokens,
            "curve": [[tokens, 0.5, 2.0]],
        }
        for trainer, after, tokens in (("GRPOTrainer", 0.5, 80.0), ("BranchTrainer", 0.6, 20.0))
        for seed in (0, 1, 2)
    ]
    record = {"runs": runs, "hardware": "H", "commit": "c" * 40, "trainings at once": 6}
    (folder / "smollm2.json").write_text(json.dumps(record))
    run_lines.write(folder / "runs.jsonl.xz", trainings())
    return Tables(tmp_path)


def test_the_finding_tells_what_is_decided(tables: Tables) -> None:
    """Welch's half is 0.045: a standard error of 0.0163 and four degrees of freedom."""
    assert trl.finding(tables) == (
        "**Finding. On `sort`, where one wrong token decides, BranchTrainer is ahead at 1e-4 "
        "(+0.10), behind at 3e-4 (-0.10) and undecided at 1e-3 after 60,000 tokens. On `count`, a "
        "dense reward, it is behind at 1e-3 (-0.20) and undecided at 3e-4.** On SmolLM2-135M, in "
        "the same seconds, GRPOTrainer gains 0.10 in accuracy and BranchTrainer 0.20. "
        "BranchTrainer generated 0.25 of the tokens."
    )


def test_differences_are_branch_less_grpo(tables: Tables) -> None:
    lines = trl.rewards(tables).splitlines()
    assert lines[2] == (
        "| sort, 1e-4 | 0.500 ± 0.020 | 0.600 ± 0.020 | **+0.100 (+0.055 to +0.145)** |"
    )
    assert lines[5].endswith("| -0.010 (-0.055 to +0.035) |")
    assert "| sort, rate 1e-4 | 30,000 | 0.400 ± 0.020 | 0.410 ± 0.020 |" in trl.all_rewards(tables)


def test_details_have_costs_and_variances(tables: Tables) -> None:
    told = trl.details(tables)
    assert "**Sort at 30,000 tokens**: undecided at 1e-4, 3e-4 and 1e-3." in told
    sort = "with 0.8 of GRPOTrainer's tokens: ahead at 1e-3 (+0.10) and undecided at 1e-4 and 3e-4."
    assert sort in told
    assert "**Count after all 120 updates**: ahead at 1e-3 (+0.10) and undecided at 3e-4." in told
    assert "**Count at 20,000 tokens**, rate 1e-3: -0.05 (-0.10 to -0.00)." in told
    assert "takes 1.5 to 1.5 of GRPOTrainer's CPU time, with 0.8 to 0.8 of its tokens." in told
    assert "GRPOTrainer's: 0.50 to 0.55 on sort and 2.00 to 2.20 on count." in told
    assert "(advantages [B, T]) it is 1.50 to 1.65 on sort" in told
    # less noise on sort, more on count: wrong about sort at 3e-4 alone
    assert "the sign of 4 of the 5 differences in the table, and of 2 of the 3 that" in told


def test_equal_seconds_end_with_the_quicker_trainer(tables: Tables) -> None:
    told = trl.details(tables)
    ahead = "on sort ahead at 1e-4 (+0.30), 3e-4 (+0.30) and 1e-3 (+0.30)"
    assert f"BranchTrainer is {ahead}; on count ahead at 3e-4 (+0.30) and 1e-3 (+0.30)." in told


def test_variances_are_relative_to_grpo(tables: Tables) -> None:
    assert trl.noise(tables).splitlines()[2:] == [
        "| sort, budget 1 | 0.50 | 0.55 |",
        "| sort, every state | 0.60 | 0.66 |",
        "| sort, budget 1, advantages [B, T] | 1.50 | 1.65 |",
        "| sort, every state, advantages [B, T] | 1.60 | 1.76 |",
        "| count, budget 1 | 2.00 | 2.20 |",
        "| count, every state | 2.10 | 2.31 |",
        "| count, budget 1, advantages [B, T] | 3.00 | 3.30 |",
        "| count, every state, advantages [B, T] | 3.10 | 3.41 |",
    ]
