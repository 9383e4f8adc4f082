"""Sentences and tables of results/agents, on made-up runs worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import agents
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs import lines

SEEDS = 3
BLOCKS = {
    "CartPole": {
        "value": (10, 5),
        "both": (9, 6),
        "RLOO(2)": (4, 6),
        "PPO": (1, 9),
        "ARSM": (3, 2),
    },
    "Knobs, K = 4": {"value": (10, 5), "both": (11, 4), "RLOO(2)": (5, 4), "PPO": (2, 7)},
    "Taxi": {"value": (-3, 5), "both": (-3, 4), "RLOO(2)": (-9, 4), "PPO": (-8, 1)},
}
"""Returns of every task's seeds at equal CPU seconds and at equal steps."""


def run(row: str, method: str, seed: int, ends: tuple[float, float]) -> lines.Line:
    seconds, steps = ({"sampled": end + 0.1 * seed, "likeliest": end - 1} for end in ends)
    solved = [8.0] if method == "ARSM" else [4.0]
    one = {"row": row, "method": method, "seed": seed, "solved": solved}
    return {**one, **seconds, "at_steps": steps}


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    (tmp_path / "agents").mkdir()
    runs = [
        run(row, method, seed, ends)
        for row, methods in BLOCKS.items()
        for seed in range(SEEDS)
        for method, ends in ({"A2C": (0, 0)} | methods).items()
    ]
    lines.write(tmp_path / "agents" / "runs.jsonl.xz", runs)
    lines.write(tmp_path / "agents" / "speed.jsonl.xz", speed_lines())
    return Tables(tmp_path)


def speed_lines() -> list[lines.Line]:
    solved = {"average": 195.0, "line": 195.0}
    cartpole = [
        {"method": "ARSM", "cpu": 2.0, **solved},
        {"method": "ARSM", "cpu": 3.0, "average": 90.0, "line": 195.0},
        {"method": "ARSM", "cpu": 4.0, **solved},
        {"method": agents.RIVAL, "cpu": 12.0, **solved},
    ]
    pong = [
        {"method": method, "frames": 1, "commit": commit, "steps": steps, "cpu": 2.0}
        for commit, factor in (("old", 10), ("new", 1))
        for method, rates in (
            ("rollouts, branched by ale", (2_000, 6_000, 4_000)),
            ("the emulator alone", (8_000, 12_000, 10_000)),
        )
        for steps in [factor * rate for rate in rates]
    ]
    return [*cartpole, *pong]


def test_the_finding_says_who_wins_and_how_often(tables: Tables) -> None:
    """At equal steps branches win on CartPole alone: 3 to 6, p = 0.51."""
    told = agents.finding(tables)
    assert "the learned value is not decidedly better than branches alone: of 9 compa" in told
    assert "`RLOO(2)` wins 0 and loses 9 at equal CPU seconds, and wins 3 and loses 6 at" in told
    assert "Branches added to the value win 3 and lose 3 (undecided)." in told
    assert "ARSM takes 2.0 times the value's CPU seconds" in told


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([(1, 9), (0, 6)], "beats branches alone"),
        ([(9, 1), (6, 0)], "is worse than branches alone"),
        ([(1, 9), (6, 0)], "is not decidedly better than branches alone"),
        ([(1, 9), (3, 6)], "is not decidedly better than branches alone"),
    ],
)
def test_the_value_beats_branches_only_if_both_tests_decide(
    scores: list[tuple[int, int]], words: str
) -> None:
    assert agents._against_branches([agents.Score(*score) for score in scores]) == words


def test_the_sign_test_has_two_sides() -> None:
    """2 x (1 + 10) / 2^10 = 0.021 for 1 to 9; a draw has no side."""
    assert agents.Score(1, 9).p == agents.Score(9, 1).p == pytest.approx(22 / 1024)
    assert agents.Score(1, 9).text == "1 to 9 (p = 0.021)"
    assert agents.Score(0, 11).p_text == "p < 0.001"
    assert agents.Score(3, 3).p == 1.0


def test_details_have_seconds_before_steps_and_the_named_method_first(tables: Tables) -> None:
    told = agents.details(tables).splitlines()
    assert told[0] == "- `RLOO(2)` against `value`: 0 to 9 (p = 0.0039), and 3 to 6 (p = 0.51)."
    # a tie on Taxi does not count
    assert told[1] == "- `both` against `value`: 3 to 3 (p = 1), and 3 to 6 (p = 0.51)."
    assert told[2] == "- `value` against `PPO`: 9 to 0 (p = 0.0039), and 3 to 6 (p = 0.51)."
    assert told[4] == "- Rivals decidedly ahead of `value` at equal CPU seconds: A2C on Taxi."
    assert told[5] == (
        "- Rivals decidedly ahead of `value` at equal steps: PPO on CartPole and Knobs (K = 4)."
    )


def test_the_page_shows_equal_seconds_and_the_history_steps_too(tables: Tables) -> None:
    """Means of the better kind of action, 0.1 above those of the first seed."""
    head, _, taxi, *_ = agents.table(tables).splitlines()
    assert head == "| | value | both | RLOO(2) | ARSM | PPO | A2C |"
    assert taxi == "| Taxi | -2.9 | -2.9 | -8.9 | | -7.9 | **0.10** |"
    _, _, taxi, *_ = agents.every_method(tables).splitlines()
    assert taxi.startswith("| Taxi (3) | -2.9/**5.1** | -2.9/4.1 | | -8.9/4.1 |")


def test_seconds_until_cartpole_is_solved(tables: Tables) -> None:
    told = agents.speed(tables)
    assert "after 3.0 CPU seconds (median; 2 of 3 seeds)" in told
    assert "takes 12.0 (1 of 1), 4.0 times as long" in told
    assert "the value reaches 475 on CartPole-v1 after 4.0 CPU seconds, ARSM after 8.0" in told


def test_the_last_run_of_pong_counts(tables: Tables) -> None:
    told = agents.pong(tables)
    assert "play 2,000 steps per CPU second (1,000 to 3,000, 3 times)" in told
    assert "The emulator alone plays 5,000 (4,000 to 6,000)." in told
