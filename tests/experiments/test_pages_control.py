"""Sentences and tables of results/control, on made-up numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arsm_experiments.report.pages import control
from arsm_experiments.report.pages.tables import Tables
from tests.experiments.made_up_tables import Numbers, write_cells

CARTPOLE, ACROBOT, LANDER = control.ROWS
MEDIANS = {
    CARTPOLE: {"ARSM": 200, "RELAX": 195, "A2C": 100},
    ACROBOT: {"ARSM": -90, "ARS": -95, "RELAX": -91, "A2C": -80},
    LANDER: {"ARSM": -80, "ARS": -60, "RELAX": 10, "A2C": 50},
}
PASSED = {
    CARTPOLE: {"ARSM": 8, "RELAX": 8, "A2C": 3},
    ACROBOT: {"ARSM": 10, "RELAX": 9, "A2C": 9},
}
STEPS = {
    CARTPOLE: {"ARSM": 6e5, "RELAX": 1e5, "A2C": 5e4},
    ACROBOT: {"ARSM": 2e6, "RELAX": 1e5, "A2C": 5e4},
    LANDER: {"ARSM": 1.2e7, "RELAX": 4e5, "A2C": 8e5},
}
VARIANCES = {
    CARTPOLE: {"ARSM": 1.0, "RELAX": 6.0, "A2C": 1.2, control.NOT_CHOSEN: 4.0},
    ACROBOT: {"ARSM": 5.0, "RELAX": 8.0, "A2C": 7.0},
    LANDER: {"ARSM": -1.0, "RELAX": -3.0, "A2C": -2.0},
}
"""Their intervals have a half of 2.101 x sqrt(2 x 1 / 10) = 0.94."""


def made_up(folder: Path) -> Tables:
    cells: dict[tuple[str, str], Numbers] = {}
    for task, methods in control.ROWS.items():
        for name, label in methods.items():
            row = f"{task}: {label}"
            median = MEDIANS[task].get(name, 0.0)
            # 15 on both sides meets whoever is 30 or less apart
            cells[row, "its median"] = (median,)
            cells[row, "its 10th percentile"] = (median - 15,)
            cells[row, "its 90th percentile"] = (median + 15,)
            cells[row, "final average"] = (median, 1.0, 2 if name == control.LONGEST else 10)
            cells[row, "seeds at the line"] = (PASSED.get(task, {}).get(name, 1),)
            cells[row, "simulator steps"] = (STEPS[task].get(name, 2.05e8),)
            cells[row, "CPU seconds"] = (400.0 if name == "ARSM" else 60.0,)
            cells[row, "episodes"] = (124.0 if name == "ARSM" else 1600.0,)
            cells[row, "log variance"] = (VARIANCES[task].get(name, 0.0), 1.0, 10)
    cells[f"{CARTPOLE}: {control.ROWS[CARTPOLE]['ARSM']}", "CPU seconds to the line"] = (4.0,)
    write_cells(folder / "control" / "table.csv", cells)
    return Tables(folder)


def seed(episodes: int, end: float = 0.0, early: float = 0.0) -> control.Columns:
    """A run whose ln variance is `early` in the first 100 episodes, and 9 after them."""
    step = np.array([50, 100, episodes])
    return {
        "step": step,
        "average_return": np.array([0.0, 0.0, end]),
        "log_variance": np.where(step <= 100, early, 9.0),
    }


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tables:
    seeds = {
        "ARSM": [seed(120, early=0.0), seed(130, early=0.2)],
        "RELAX": [seed(1600, early=0.1), seed(1600, early=0.2)],
        "A2C": [seed(1600, early=-9.0), seed(1600, early=-9.2)],
        control.LONGER: [seed(1600), seed(170), seed(210)],
        control.LONGEST: [seed(900, end=220.0), seed(500, end=130.0)],
    }
    monkeypatch.setattr(control, "on_lander", lambda tables, method, key="step": seeds[method])
    return made_up(tmp_path)


def test_places_overlaps_and_cost(tables: Tables) -> None:
    """A2C's range ends at 115 on CartPole; the costlier rival is RELAX, RELAX and A2C."""
    told = control.finding(tables)
    assert "ARSM is first on CartPole, second on Acrobot and third on LunarLander;" in told
    assert "overlaps with both rivals' on Acrobot." in told
    assert "ARS is above it on LunarLander." in told
    assert "It plays 6 to 20 times the simulator steps of the costlier rival" in told
    assert "and 256 times in its longest runs on LunarLander." in told


def test_more_seeds_pass_only_where_they_are_more_than_each_rivals(tables: Tables) -> None:
    told = control.details(tables)
    assert "More seeds of ARSM than of either rival pass only on Acrobot." in told
    assert "In 400 CPU seconds ARSM plays 124 episodes" in told
    assert "A2C plays 1,600 in 60." in told


def test_the_longest_runs_are_told_seed_by_seed(tables: Tables) -> None:
    told = control.details(tables)
    assert "2 seeds of ARSM play 900 and 500 episodes and end at 220 and 130, above both" in told
    assert "above both rivals' medians; 1 passes the line" in told


def test_less_variance_is_decided_and_of_the_right_sign(tables: Tables) -> None:
    """On CartPole A2C's lead of 0.2 is undecided, on LunarLander both rivals have less."""
    assert control.lower_variance(tables) == {"RELAX": ["CartPole", "Acrobot"], "A2C": ["Acrobot"]}
    told = control.variance(tables)
    assert "CartPole RELAX 5.0 ± 0.9, A2C 0.2 ± 0.9, A2C not from the grid 3.0 ± 0.9;" in told
    assert "LunarLander RELAX -2.0 ± 0.9, A2C -1.0 ± 0.9." in told


def test_the_first_episodes_alone_count_as_early(tables: Tables) -> None:
    """RELAX is level, A2C 9.2 below with 4.303 x sqrt(2 x 0.02 / 2) = 0.6."""
    told = control.details(tables)
    assert "first 100 episodes A2C has decidedly less variance than ARSM (ln variance -9.2 " in told


def test_the_page_leaves_out_a_row_that_the_history_has(tables: Tables) -> None:
    short, long = control.table(tables), control.every_row(tables)
    assert control.LONGER not in short
    assert control.LONGER in long
    first = "| CartPole | ARSM | 200 (185 to 215) | 8/10 | 0.6 | 400 |"
    assert short.splitlines()[2] == first
    assert long.splitlines()[2] == f"{first} 124 | 4 | 1.0 |"
    assert "| | ARSM, 4,000 s | 0 (-15 to 15) | 1/2 | 205 | 60 |" in short.splitlines()


def test_where_the_longer_runs_end(tables: Tables) -> None:
    told = control.longer_runs(tables)
    assert "or at 1,600 episodes (1 seed of `ARSM, 1,500 s`; the others play 170 to 210)" in told
    assert "Rows have 10 seeds, `ARSM, 4,000 s` has 2." in control.notes(tables)
