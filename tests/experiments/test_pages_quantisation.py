"""The parts of the guide on vector quantisation, on made-up losses worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import quantisation
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs import lines
from tests.experiments.made_up_tables import write_cells

LOSSES = dict(zip(quantisation.WAYS, (100.0, 104.0, 93.0, 90.0), strict=True))


def write_table(folder: Path, before: str = "", seeds: int = 3) -> Tables:
    """Losses at a fixed rate, 10 more with the bound; a standard deviation of 2."""
    cells: dict[tuple[str, str], tuple[float, ...]] = {}
    for setting, more in zip(quantisation.SETTINGS, (0.0, 10.0), strict=True):
        for way, loss in LOSSES.items():
            row = f"{before}{setting}: {way}"
            cells[row, "test loss"] = (loss + more, 2.0 if seeds > 1 else 0.0, seeds)
            cells[row, "codes in use"] = (loss / 2 + more,)
            cells[row, "CPU ms per step"] = (5.0 + more,)
            cells[row, "nats of the pixels"] = (loss - 50 + more,)
    write_cells(folder / "vector_quantisation" / "table.csv", cells)
    return Tables(folder)


def test_a_row_has_both_settings(tmp_path: Path) -> None:
    told = quantisation.table(write_table(tmp_path))
    assert told.startswith("3 seeds, 800 steps:")
    assert "| `RLOO(4)` | 90.0 ± 2.0 | 45 | 5.0 ms | 100.0 ± 2.0 | 55 | 15.0 ms | 50.0 |" in told


def test_trials_stand_in_for_missing_seeds(tmp_path: Path) -> None:
    told = quantisation.table(write_table(tmp_path, before="trial, ", seeds=1))
    assert told.startswith("The trials, one seed and 400 steps:")
    assert "| `RLOO(4)` | 90.0 | 45 |" in told


def test_differences_at_a_fixed_rate_are_the_nearest_codes_less_the_others(tmp_path: Path) -> None:
    """Welch's interval of three seeds with a deviation of 2 is ± 2.776 sqrt(8/3) = 4.5."""
    told = quantisation.copied(write_table(tmp_path))
    assert (
        "`StraightThrough()` -4 ± 5 (undecided), `GumbelSoftmax(hard=True)` +7 ± 5 and "
        "`RLOO(4)` +10 ± 5."
    ) in told


def test_the_bounds_parts_are_of_the_longest_runs(tmp_path: Path) -> None:
    def runs(way: str, steps: int, nats: float, rate: float) -> list[lines.Line]:
        about = {"setting": "bound", "way": way, "steps": steps}
        return [about | {"nats": nats + seed, "rate": rate} for seed in (-1, 0, 1)]

    found = [
        *runs("leave-one-out", 800, 80.0, 12.0),
        *runs("straight-through", 800, 86.0, 10.0),
        # trials, which do not count
        *runs("leave-one-out", 400, 200.0, 1.0),
        *runs("straight-through", 400, 100.0, 9.0),
    ]
    (tmp_path / "vector_quantisation").mkdir()
    lines.write(tmp_path / "vector_quantisation" / "runs.jsonl.xz", found)
    told = quantisation.bound(Tables(tmp_path))
    assert "nats of the pixels -6.0 ± 2.3, of the codes +2.0" in told
    assert told.endswith("together -4.0 ± 2.3.")


@pytest.mark.parametrize(("way", "verdict"), [("leave-one-out", ""), ("VQ-VAE", " (undecided)")])
def test_a_difference_says_whether_it_is_decided(tmp_path: Path, way: str, verdict: str) -> None:
    cells = write_table(tmp_path).cells("vector_quantisation/table.csv")
    first, second = (cells[f"fixed rate: {name}", "test loss"] for name in ("VQ-VAE", way))
    told = quantisation._signed(quantisation.welch(first, second), "it")
    assert told.endswith(f"± 4.5{verdict}")
