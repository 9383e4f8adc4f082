"""Sentences and tables of results/router, on made-up losses worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import routers
from arsm_experiments.report.pages.routers import GUMBEL, LATER, OWN, ROW, SWITCH, UNTRAINED
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs import lines
from tests.experiments.made_up_tables import write_cells

LOSSES = {
    "top-1": {SWITCH: 2.0, OWN: 2.05, GUMBEL: 2.2, UNTRAINED: 2.1, LATER: 2.4, ROW: 2.45},
    "top-2": {SWITCH: 1.9, GUMBEL: 1.8, UNTRAINED: 2.0, LATER: 2.3},
    "price": {
        SWITCH: 2.0,
        f"{SWITCH}, price unseen": 2.07,
        GUMBEL: 2.25,
        f"{UNTRAINED}, price unseen": 2.5,
        f"{OWN}, price unseen": 2.15,
        LATER: 2.2,
        ROW: 2.6,
    },
}
USED = {LATER: 2.0, ROW: 1.0, SWITCH: 6.0, GUMBEL: 7.0}
"""Experts in use with the price."""


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Three seeds with a standard deviation of 0.05: Welch's interval is ± 2.776 sqrt(2/3) 0.05 =
    0.113.
    """
    cells: dict[tuple[str, str], tuple[float, ...]] = {}
    for setting, losses in LOSSES.items():
        for way, loss in losses.items():
            row = f"{setting}: {way}"
            cells[row, "test loss"] = (loss, 0.05, 3)
            cells[row, "CPU ms per step"] = (20.0,)
            cells[row, "experts used"] = (USED.get(way, 5.0) if setting == "price" else 4.5, 0.1, 3)
    write_cells(tmp_path / "router" / "transformer.csv", cells)
    balances = {LATER: 0.01, SWITCH: 0.1, GUMBEL: 0.1}
    trials = [
        {"way": way, "setting": setting, "balance": balance if setting == "price" else 9.0}
        for way, balance in balances.items()
        for setting in ("top-1", "price")
    ]
    lines.write(tmp_path / "router" / "transformer.jsonl.xz", trials)
    return Tables(tmp_path)


def test_the_answer_has_the_gap_to_every_rival_and_reach(tables: Tables) -> None:
    told = routers.answer(tables)
    switch = "is behind Switch by 0.40 with one expert, by 0.40 with two and by 0.20 with the price"
    gumbel = "behind Gumbel by 0.20 with one expert and by 0.50 with two (undecided with the price)"
    assert f"{switch}, and {gumbel}.**" in told
    assert "it is 0.30 nats behind a router that is not trained" in told
    assert "that a choice can reach gains 0.05 (undecided) with one expert" in told
    assert '(`"own"`, biased) gains 0.35.' in told


def test_details_have_the_sign_of_the_way_behind(tables: Tables) -> None:
    told = routers.details(tables).splitlines()
    assert 'is `"own"` by 0.05 (-0.06 to 0.16; undecided) with one expert' in told[0]
    assert "Gumbel by -0.10 (-0.21 to 0.01; undecided) with two" in told[0]
    assert "and Switch trained without the price by 0.07 (-0.04 to 0.18; undecided)" in told[0]
    assert '`"later"` by 0.30 (0.19 to 0.41) and `"row"` by 0.35 (0.24 to 0.46)' in told[1]
    assert 'with two, `"later"` by 0.30' in told[1]
    assert "leaves these losses out, by 0.35 (0.24 to 0.46)." in told[2]
    assert "by 0.05 (-0.06 to 0.16; undecided), and by 0.40 (0.29 to 0.51) with the" in told[2]
    assert "behind Switch by 0.20 (0.09 to 0.31)" in told[3]
    assert "trained without it, by 0.15 (0.04 to 0.26)" in told[3]
    assert 'Gumbel is behind `"later"` by 0.05 (-0.06 to 0.16; undecided).' in told[3]


def test_what_the_price_saves_and_loses(tables: Tables) -> None:
    """Four experts fewer at 0.0125 nats per character are 0.05; 0.2 + 0.05 are lost."""
    told = routers.details(tables).splitlines()[4]
    assert "uses 2.0 experts and Switch 6.0" in told
    assert "saves 0.05 nats of the price and loses 0.25 in prediction" in told
    assert "balancing coefficient of 0.01, Switch and Gumbel 0.1." in told
    assert "uses only 4.5." in told


def test_rows_have_the_losses_of_their_settings(tables: Tables) -> None:
    rows = routers.table(tables).splitlines()
    assert (
        '| `RLOO(2)`, `reach="later"` | 2.400 ± 0.050 | 2.300 ± 0.050 | 2.200 ± 0.050 | 2.0 '
        "| 20.0 ms |"
    ) in rows
    # scored with the price, though trained without it
    assert (
        "| untrained router | 2.100 ± 0.050 | 2.000 ± 0.050 | 2.500 ± 0.050 | 4.5 | 20.0 ms |"
    ) in rows


def test_the_mixtures_times_are_relative_to_the_loop_by_hand(tmp_path: Path) -> None:
    ours = [f"arsm.choices, {name}" for name in ("RLOO(4)", "RLOO(2)", "LocalExpectation", "ARSM")]
    others = (routers.BY_HAND, GUMBEL, SWITCH, UNTRAINED, "one expert")
    cells: dict[tuple[str, str], tuple[float, ...]] = {}
    for place, way in enumerate((*ours, *others)):
        cells[f"Router: {way}", "test accuracy"] = (0.9 - place / 100, 0.012, 5)
        cells[f"Router: {way}", "CPU ms per step"] = (1.0 + place,)
    write_cells(tmp_path / "router" / "table.csv", cells)
    told = routers.mixture(Tables(tmp_path))
    assert "0.870 to 0.900 (standard deviation 0.012), leave-one-out by hand 0.860" in told
    assert "Switch 0.840, an untrained router 0.830, one expert 0.820." in told
    assert "`RLOO(4)` 0.20, `RLOO(2)` 0.40, Switch 1.40 and Gumbel 1.20." in told
