"""Sentences and tables of results/maximize, on made-up runs worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import maximize
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs import lines
from tests.experiments.made_up_tables import write_cells

BEST = {
    "QUBO": {maximize.OURS: 10.0, "CatCMA": 12.0},
    "schedule": {maximize.OURS: -10.0},
    "MAX-SAT": {maximize.OURS: 10.0, "CatCMA": 10.0, "Optuna TPE": 10.0},
    "architecture": {maximize.OURS: 10.0, "nevergrad NGOpt": 13.0},
}
"""Means of ours and of rivals; the others are 5 behind ours."""


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    runs: list[lines.Line] = []
    cells: dict[tuple[str, str], tuple[float, ...]] = {}
    for family, known in BEST.items():
        for method in maximize.METHODS:
            mean = known.get(method, known[maximize.OURS] - 5)
            cells[f"{family}: {method}", maximize.BEST] = (mean, 1.0, 3)
            # ours differ by one from instance to instance
            spread = int(method == maximize.OURS)
            about = {"method": method, "family": family, "budget": 2_000, "evaluations": 2_000}
            about["seconds"] = {"QUBO": 3.0, "schedule": 1.0}.get(family, 2.0)
            runs += [
                {**about, "instance": 10 + place, "best": mean + place * spread}
                for place in (-1, 0, 1)
            ]
    for run, evaluations in zip(runs[:2], (1_400, 1_200), strict=True):
        run["evaluations"] = evaluations
    write_cells(tmp_path / "maximize" / "table.csv", cells)
    lines.write(tmp_path / "maximize" / "runs.jsonl.xz", runs)
    return Tables(tmp_path)


def test_the_answer_counts_what_is_decided(tables: Tables) -> None:
    """The interval of three instances one apart is ± 2.48: -2 and 0 are undecided, -3 is not."""
    told = maximize.answer(tables)
    assert "ahead of all its main rivals on schedules alone" in told
    assert "undecided on QUBO and MAX-SAT.**" in told
    assert "Of 16 comparisons" in told
    assert "it is ahead in 12, behind in 1 and undecided in 3." in told


def test_details_have_the_sign_of_ours(tables: Tables) -> None:
    told = maximize.details(tables).splitlines()
    assert told[0].startswith("- **CatCMA**: QUBO -2.0 ± 2.5 (0), schedule +5.0 ± 2.5 (3), ")
    assert "MAX-SAT +0.0 ± 2.5 (1) and architecture +5.00 ± 2.48 (3)." in told[0]
    assert "architecture -3.00 ± 2.48 (0)" in told[2]
    assert (
        told[4] == "- **Undecided**: QUBO against CatCMA; MAX-SAT against CatCMA and Optuna's TPE."
    )
    assert "`arsm.maximize` 1.0 to 3.0, CatCMA" in told[5]


def test_the_highest_value_is_bold(tables: Tables) -> None:
    rows = maximize.table(tables).splitlines()
    assert rows[2] == "| `arsm.maximize` | 10.0 | **-10.0** | **10.0** | 10.00 |"
    assert rows[3] == "| CatCMA | **12.0** | -15.0 | **10.0** | 5.00 |"


def test_runs_that_ended_early_are_told(tables: Tables) -> None:
    told = maximize.stopped(tables)
    assert told.endswith("evaluations: `arsm.maximize`, 2 on QUBO (1,200 to 1,400).")


def test_processes_are_read_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "maximize").mkdir()
    (tmp_path / "maximize" / "processes.txt").write_text(
        "f runs  time  times faster\nin this process  4 s  1.0\n2 processes  2.5 s  1.6\n"
    )
    rows = maximize.processes(Tables(tmp_path)).splitlines()
    assert rows[2:] == ["| in this process | 4 s | 1.0 |", "| in 2 processes | 2.5 s | 1.6 |"]
