"""Sentences and tables of results/compare, on made-up errors worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.compare import FLOOR
from arsm_experiments.report.pages import compare
from arsm_experiments.report.pages.tables import Tables
from tests.experiments.made_up_tables import write_cells

TEN_WAY = (*compare.NETWORKS, *compare.VAES)
TOYS = ("toy-30", "toy-1000")


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Errors whose unit, leave-one-out's, is 2 everywhere."""
    errors: dict[str, dict[str, float]] = {
        problem: {
            "rloo": 2.0,
            FLOOR: 0.1,
            "rloo:ridge=1.0": 1.0,
            compare.POOLED: 6.0,
            "arsm": 30.0,
            "local-expectation": 4.0,
            "double-control": 0.5,
        }
        for problem in (*TEN_WAY, *compare.BINARY)
    }
    errors["network-6"] |= {"arsm": 50.0, compare.POOLED: 8.0, "rloo:ridge=1.0": 0.8}
    errors["network-1"] |= {"local-expectation": 1.2, "straight-through (biased)": 0.02}
    errors["network-0.1"]["double-control"] = 0.3
    errors["binary-1"] |= {"arsm": 7.0, "rloo:ridge=1.0": 3.0}
    for problem, plus in zip(TOYS, (1.4, 5.0), strict=True):
        errors[problem] = {"rloo": 2.0, "arsm": 2.6, "arsm-plus": plus, "unordered-set": 1.8}
        errors[problem]["gumbel-softmax:temperature=0.5 (biased)"] = 0.4
    cells: dict[tuple[str, str], tuple[float, ...]] = {}
    for problem, rows in errors.items():
        for words, error in rows.items():
            row = f"{problem}: {words}"
            cells[row, "error x evaluations"] = (error,)
            few = dict.fromkeys(compare.BINARY, 21.0) | {"toy-30": 25.0}
            cells[row, "evaluations"] = (few.get(problem, 181.0),)
    write_cells(tmp_path / "compare" / "table.csv", cells)
    return Tables(tmp_path)


def test_the_answer_is_relative_to_leave_one_out(tables: Tables) -> None:
    told = compare.answer(tables)
    assert "has 15 to 25 times the error of leave-one-out" in told
    assert "3.0 to 4.0 times with pooling" in told
    # binary-1 is the one where the ridge loses
    assert "less error than plain leave-one-out on 7 of 8 problems of" in told


def test_neither_a_biased_estimator_nor_the_floor_is_the_best_unbiased_one(tables: Tables) -> None:
    told = compare.answer(tables)
    assert "`arsm-plus` has the least error of the unbiased estimators that were run, 0.70 " in told
    assert "with 25 evaluations; 30 would give the exact gradient." in told
    numbers = compare.read_numbers(tables)
    assert compare._best_unbiased(numbers, "network-0.1") == ("double-control", 0.15)
    assert compare._best_unbiased(numbers, "network-6")[0] == "double-control"


def test_details_name_their_problems(tables: Tables) -> None:
    told = compare.details(tables).splitlines()
    assert "scales 0.1 and 1: 2.0 and 0.60. It takes 181 evaluations (21 for binary" in told[0]
    assert "leave-one-out with the ridge has the least: 0.50 and 0.40." in told[1]
    assert "0.15 to 0.25 on the network, where f is smooth, and 0.25 to 0.25 on the VAEs" in told[2]
    assert "ARSM has 3.5 to 15, pooled ARSM 3.0 to 3.0." in told[3]
    assert "1.3 with 30 categories and 1.3 with 1,000. With 1,000 `unordered-set`" in told[4]
    assert "unbiased estimators that were run, 0.90;" in told[4]


def test_rows_of_a_kind_are_ranked_and_kinds_apart(tables: Tables) -> None:
    rows = compare.table(tables).splitlines()[2:]
    # geometric means: ARSM+ (0.7) of one problem alone, local expectation of four
    assert [line.split(" | ")[0].strip("| ") for line in rows] == [
        f"**{compare.KINDS[0]}**",
        f"`{FLOOR}`",
        "`rloo:ridge=1.0`",
        "`arsm-plus`",
        "`rloo`",
        "`local-expectation`",
        f"`{compare.POOLED}`",
        "`arsm`",
        f"**{compare.KINDS[1]}**",
        "`double-control`",
        f"**{compare.KINDS[2]}**",
        "`straight-through`",
    ]
    assert rows[7] == "| `arsm` | 15 | 25 | 15 | 15 | 1.3 |"
    assert rows[-1] == "| `straight-through` | 0.010 | | | | |"


def test_the_guides_sentence_and_table(tables: Tables) -> None:
    told = compare.in_short(tables)
    assert "ARSM has 15 to 25 times its error x evaluations for ten-way variables" in told
    assert "and 3.5 to 15 times for binary ones, pooled ARSM 3.0 to 4.0 and 3.0 to 3.0" in told
    rows = {line.split(" | ")[0]: line for line in compare.choosing(tables).splitlines()}
    assert rows["| `arsm`"] == "| `arsm` | 15 | 25 | 15 | 15 | 1.3 | 1.3 |"
    assert rows["| `arsm-plus`"] == "| `arsm-plus` | | | | | 0.70 | 2.5 |"
