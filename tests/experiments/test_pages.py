"""The pages of results/: what is generated is current, and each page is short."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import MARKED, PAGES, filled, remake
from arsm_experiments.report.pages.claims import package
from arsm_experiments.report.pages.tables import Cell, Tables, large, pooled, short, welch
from arsm_experiments.report.welch import Difference

RESULTS = Path(__file__).parents[2] / "results"
TABLES = Tables(RESULTS)
MOST = 900
"""Words of a page, as `wc -w` counts them."""


@pytest.mark.parametrize("name", PAGES)
def test_the_export_remakes_every_generated_part(name: str) -> None:
    page = (RESULTS / name).read_text()
    marked = [found[1] for found in MARKED.findall(page)]
    assert sorted(marked) == sorted(PAGES[name]), f"{name} does not mark all of its parts"
    assert filled(page, PAGES[name], TABLES) == page, f"{name} is stale; run `make readme`"


@pytest.mark.parametrize(
    "page", sorted(RESULTS.glob("**/README.md")), ids=lambda page: page.parent.name
)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST


def test_a_stale_number_is_made_again(tmp_path: Path) -> None:
    """A page that quotes an old table gets the numbers of the present one."""
    results = tmp_path / "results"
    (results / "toy").mkdir(parents=True)
    table = (RESULTS / "toy" / "table.csv").read_text()
    (results / "toy" / "table.csv").write_text(table)
    page = results / "toy" / "README.md"
    page.write_text("before\n<!-- from the tables: details -->\nold\n<!-- end -->\nafter\n")
    assert remake(results) == [page]
    assert page.read_text() == (
        "before\n<!-- from the tables: details -->\n"
        f"{PAGES['toy/README.md']['details'](TABLES)}\n<!-- end -->\nafter\n"
    )


def test_welch() -> None:
    """Worked by hand: variances 0.04/4 and 0.16/4, 0.05^2 / (0.01^2/3 + 0.04^2/3) = 4.412 degrees
    of freedom, whose 97.5% quantile is 2.676.
    """
    found = welch(Cell(3.0, 0.2, 4), Cell(2.0, 0.4, 4))
    assert found.mean == pytest.approx(1.0)
    assert found.half == pytest.approx(2.676 * 0.05**0.5, rel=2e-3)
    assert found.decided
    assert not welch(Cell(2.5, 0.2, 4), Cell(2.0, 0.4, 4)).decided


def test_pooled_seeds_are_those_of_one_row() -> None:
    first, second = [1.0, 2.0, 4.0], [7.0, 8.0]
    cells = [Cell(7 / 3, 1.5275252, 3), Cell(7.5, 0.70710678, 2)]
    found = pooled(cells)
    everything = first + second
    mean = sum(everything) / 5
    std = (sum((x - mean) ** 2 for x in everything) / 4) ** 0.5
    assert found.seeds == 5
    assert found.mean == pytest.approx(mean)
    assert found.std == pytest.approx(std)


def test_numbers_in_words() -> None:
    assert [large(x) for x in (1, 9.72, 73.02, 87572.3)] == ["1", "9.7", "73", "8.8e4"]
    assert [short(x) for x in (0.0173, 1.0, 45.6, 2345.0)] == ["0.017", "1.0", "46", "2,345"]
    assert Cell(87.2, 0.4, 6).spread == "87.2 ± 0.4"
    assert Cell(10.0, 1.0, 4).interval == "10.0 (8.4 to 11.6; n = 4)"


def test_a_difference_prints_no_negative_zero() -> None:
    assert Difference(-0.04, 0.7).short == "0.0 ± 0.7"
    assert Difference(-0.06, 0.7).short == "-0.1 ± 0.7"


def test_entries_of_earlier_releases_are_not_counted() -> None:
    assert package({"row": "trl: grpo"}) == "trl"
    assert package({"row": "trl 1.9.2: grpo"}) is None
