"""The tables of results/compare/README.md are those of its table.csv."""

import pytest

from arsm_experiments.report.compare_page import PAGE, filled, read_figures, short, tables

TEXT = PAGE.read_text()


def test_the_tables_are_what_the_runs_say() -> None:
    made = tables(read_figures(PAGE.parent / "table.csv"))
    assert filled(TEXT, made) == TEXT, "stale: run `python -m arsm_experiments.report.compare_page`"
    assert all(f"<!-- table: {name} -->\n" in TEXT for name in made)


@pytest.mark.parametrize(
    ("number", "words"), [(0.0173, "0.017"), (0.283, "0.28"), (1.0, "1.0"), (45.6, "46"), (2345.0, "2,345"), (0, "0")]
)
def test_two_digits(number: float, words: str) -> None:
    assert short(number) == words
