"""The README's results are those of results/."""

from pathlib import Path

from arsm_experiments import readme

PAGE = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_table_is_what_the_results_say() -> None:
    shown = PAGE.partition(readme.BEGIN)[2].partition(readme.END)[0]
    assert shown == readme.table(), "the README's results are stale; run `make readme`"
    assert shown.count("\n") > 10
