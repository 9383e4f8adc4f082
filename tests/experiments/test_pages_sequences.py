"""Sentences and tables of results/sequences, on a table worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import sequences
from arsm_experiments.report.pages.tables import Tables
from tests.experiments.made_up_tables import HEADER, write_lines

RATIOS = {
    "token baseline 8": (0.5, 0.4, 0.6),
    "value head": (0.9, 1.1, 1.2),
    "branch rloo 16": (2.0, 0.6, 0.3),
    "branch rloo 64, chance": (0.4, 0.2, 0.05),
    "likeliest": (0.1, 0.0, 0.3),
}
"""Variance x tokens at three levels on the first task; each other task has 0.1 more."""
LATE = {
    "branch rloo 64, chance, updates of 400, rate 0.001": (320.0, 10.0),
    "value head, updates of 400, rate 0.001": (200.0, 10.0),
    "grpo 8, updates of 400, rate 0.001": (800.0, 10.0),
}
"""Tokens until 0.19 on filtering."""


def write(folder: Path, late: dict[str, tuple[float, float]]) -> Tables:
    lines: list[tuple[object, ...]] = []
    for place, task in enumerate(sequences.TASKS.values()):
        for method, ratios in RATIOS.items():
            for level, value in zip(sequences.LEVELS, ratios, strict=True):
                row = f"{task}, accuracy 0.5 (level {level}), {method}"
                lines.append((row, sequences.VARIANCE, value + 0.1 * place, "", 12 + place))
    for task, share in (("spell_backward", 0.5), ("spiral_matrix", 0.75)):
        row = f"{task}, from 0.1, branch rloo 64, chance"
        lines.append((row, "tokens to 0.7 / best rival", share, "", ""))
    for method, (mean, std) in late.items():
        row = f"small_filtering, from 0.1, {method}"
        lines.append((row, "tokens to 0.19", mean, std, 3))
    write_lines(folder / "sequences" / "table.csv", HEADER, lines)
    return Tables(folder)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return write(tmp_path, LATE)


def test_the_finding_is_that_of_the_table(tables: Tables) -> None:
    assert sequences.finding(tables) == (
        "**Finding. For the same gradient noise on fixed prompts, branching with `chance` needs "
        "0.05 to 0.35 of the best group's tokens at accuracy 0.8, and 0.4 to 0.7 at 0.1**, where a "
        "token baseline is close (0.5 to 0.8). With 16 draws and no `chance` it needs 2 to 2.3 "
        "times the best group's tokens at 0.1. To train from 0.1 to 0.7 on 2 of 4 tasks, branching "
        "with `chance` needs 0.5 to 0.75 of the best rival's tokens."
    )


def test_the_table_spans_the_tasks(tables: Tables) -> None:
    lines = sequences.table(tables).splitlines()
    assert "| `branch rloo 16` | 2 to 2.3 | 0.6 to 0.9 | 0.3 to 0.6 | |" in lines
    assert lines[5].startswith("| `branch rloo 64, chance` | 0.4 to 0.7 |")
    assert lines[5].endswith("| 0.5 to 0.75 |")
    assert "| 0.45: `likeliest` | <0.001 | 0.1 | 0.2 | 0.3 |" in sequences.by_task(tables)
    assert "| tokens to 0.7, `branch rloo 64, chance` | 0.5 | 0.75 | - | - |" in sequences.by_task(
        tables
    )


def test_losses_are_told(tables: Tables, tmp_path: Path) -> None:
    told = sequences.details(tables)
    assert "`chance` needs 1.60 times the tokens of the best rival, `value head`." in told
    # 0.3 against 0.05 on the first task, and as much apart on the others
    assert "except on spelling at 0.8 (0.3 against 0.05), spiral at 0.8 (0.4 against 0.15)" in told
    assert "has 2 to 2.3 of the best group's noise at 0.1 and 0.3 to 0.6 at 0.8." in told
    noisy = {method: (mean, 200.0) for method, (mean, _) in LATE.items()}
    (tmp_path / "noisy").mkdir()
    assert "`value head`: undecided." in sequences.details(write(tmp_path / "noisy", noisy))


def test_estimates_are_those_of_the_table(tables: Tables) -> None:
    assert "measured on 12 to 15 estimates" in sequences.repeats(tables)


def test_the_figure_counts_fresh_prompts(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "first": {"likeliest": 0.1, "chance": 0.5},
        "second": {"likeliest": 0.2, "chance": 0.7},
    }
    monkeypatch.setattr(sequences.publish, "load", lambda _: None)
    monkeypatch.setattr(sequences.publish, "variances", lambda _: found)
    monkeypatch.setattr(sequences.publish, "between_prompts", lambda _: 0.05)
    monkeypatch.setattr(
        sequences.publish,
        "relative",
        lambda methods, method, between: methods[method.rpartition(", ")[2]] + between,
    )
    assert sequences.figure(tables) == (
        "In the figure `branch rloo 64, chance` is at 0.55 to 0.75 and `likeliest` at 0.15 to 0.25."
    )
