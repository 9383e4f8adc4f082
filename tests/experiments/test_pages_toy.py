"""Sentences and tables of results/toy, on made-up numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import toy
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.report.toy import AT_EVERY_UPDATE, ON_THE_BEST, ON_THE_WAY
from tests.experiments.made_up_tables import Numbers, write_cells

LOO = toy.LEAVE_ONE_OUT
REWARDS = {
    "true gradient": 0.53,
    "ARSM": 0.52,
    LOO: 0.5199,
    toy.GUMBEL: 0.50,
    "ARS": 0.49,
    "RELAX": 0.48,
    "REINFORCE": 0.47,
    "AR": 0.46,
}
"""At 30 categories; leave-one-out's difference from the best estimator is undecided."""
SHORTFALL = {30: 0.0, 1_000: 0.1, 10_000: 0.2}
VARIANCES = {
    "true gradient": 0,
    "ARSM": 1,
    LOO: 2,
    toy.GUMBEL: 7,
    "ARS": 5,
    "RELAX": 60,
    "REINFORCE": 70,
    "AR": 800,
}


def made_up(folder: Path, loo_gap: float = 2.0) -> Tables:
    cells: dict[tuple[str, str], Numbers] = {}
    for place, name in enumerate(toy.METHODS):
        for categories, section in toy.SECTIONS.items():
            row = f"Toy, {section}: {toy.METHODS[name]}"
            # rewards are their own at each size, and leave-one-out is decidedly behind at two
            less = SHORTFALL[categories] + 0.01 * (categories > 30 and name == LOO)
            cells[row, toy.REWARD] = (REWARDS[name] - less, 0.001, 10)
            cells[row, ON_THE_BEST] = (10 - place,)
            cells[row, toy.CALLS] = (categories / 2 + place,)
            cells[row, toy.START] = (place * categories,)
        for categories, seeds in (("1,000", 10), ("10,000", 5)):
            row = f"Toy, C = {categories}, step 1: {toy.METHODS[name]}"
            cells[row, toy.REWARD] = (0.1 * place + 0.01 * seeds, 0.0, seeds)
        small = f"Toy, {toy.SECTIONS[30]}: {toy.METHODS[name]}"
        cells[small, AT_EVERY_UPDATE] = (VARIANCES[name], 2.0, 10)
        cells[small, ON_THE_WAY] = (VARIANCES[name] + 1,)
        cells[small, toy.GAP] = (loo_gap if name == LOO else 1.0, 0.1, 10)
    for categories, gap in ((1_000, 3.0), (10_000, 90.0)):
        cells[f"Toy, {toy.SECTIONS[categories]}: arsm", toy.GAP] = (gap, 2.0, 10)
    write_cells(folder / "toy" / "table.csv", cells)
    return Tables(folder)


def test_the_finding_counts_seeds_and_takes_the_least_of_the_papers_rivals(tmp_path: Path) -> None:
    told = toy.finding(made_up(tmp_path))
    assert "9 of 10 seeds end on the best category" in told
    # leave-one-out's 2 is no number of the paper's rivals
    assert "with at least 5 times less gradient variance" in told
    assert "Leave-one-out makes 17.0 evaluations of f per update instead of 16.0" in told
    assert "With 1,000 and 10,000 categories ARSM ends nearest to the optimum" in told
    assert "but 3 and 90 times as far from it as the true gradient" in told


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (2.0, "it ends farther from the optimum"),
        (1.05, "whether it ends farther from the optimum is undecided"),
        (0.5, "it ends nearer to the optimum"),
    ],
)
def test_leave_one_out_is_farther_or_nearer_only_if_decided(
    tmp_path: Path, gap: float, words: str
) -> None:
    assert f", and {words}." in toy.finding(made_up(tmp_path, gap))


def test_the_interval_of_the_distance(tmp_path: Path) -> None:
    """18 degrees of freedom: 2.101 x sqrt(2 x 0.1^2 / 10) = 0.094."""
    told = toy.details(made_up(tmp_path))
    assert "has 2.0 times ARSM's variance at C = 30" in told
    assert "is 1.00 larger (0.91 to 1.09)" in told
    assert "is 1.0 ± 0.1, 3 ± 2 and 90 ± 2 times" in told
    assert "it makes 501 and 5,001 evaluations of f per update, and 9 and 9 of 10 seeds" in told
    assert "Here 6 of 10 seeds of ARS end on the best category, and 7 of 10 of Gumbel" in told


def test_the_table_has_small_c_first_and_bold_for_what_is_level_with_the_best(
    tmp_path: Path,
) -> None:
    rows = toy.table(made_up(tmp_path)).splitlines()[2:]
    assert rows[0] == "| true gradient | 0.530 ± 0.001 | 10/10 | 0 | 15.0 | 0.430 ± 0.001 |"
    assert rows[1] == "| ARSM | **0.520 ± 0.001** | 9/10 | 1 | 16.0 | **0.420 ± 0.001** |"
    assert rows[2] == f"| {LOO} | **0.520 ± 0.001** | 8/10 | 2 | 17.0 | 0.410 ± 0.001 |"
    assert "**" not in "".join(rows[3:])


def test_the_history_tells_the_step_sizes_and_sizes_apart(tmp_path: Path) -> None:
    tables = made_up(tmp_path)
    assert toy.more(tables).splitlines()[3] == "| ARSM | 30 | 1.0e4 | **0.320 ± 0.001** |"
    head, _, first, *_ = toy.printed(tables).splitlines()
    assert head == "| | C = 1,000 (10 seeds) | C = 10,000 (5 seeds) |"
    assert first == "| true gradient | 0.1 | 0.05 |"
    told = toy.variances(tables)
    assert "70 ± 2 times ARSM's over seeds. Every 50th update alone would give 71." in told
