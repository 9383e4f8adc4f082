"""What results/ holds: tables that the archived runs make again, figures that a page shows, and
little else.
"""

import csv
import re
import subprocess
from pathlib import Path

import pytest

from arsm_experiments.readme import SCHEMES, SHAPES
from arsm_experiments.report.alone import with_time
from arsm_experiments.report.chapters import CHAPTERS, Chapter
from arsm_experiments.report.sections import results_csv
from arsm_experiments.runs.reader import Record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
MOST = 9_000_000
"""Bytes of all tracked files."""


@pytest.mark.parametrize(
    "experiment", [name for name in CHAPTERS if name != "sequences"]
)  # it has its own records
def test_the_runs_make_the_table_again(experiment: str, chapters: dict[str, Chapter]) -> None:
    assert (
        results_csv(chapters[experiment].sections)
        == (RESULTS / experiment / "table.csv").read_text()
    )


def test_every_run_and_table_names_a_clean_commit(records: list[Record]) -> None:
    assert all(
        re.fullmatch("[0-9a-f]{7,40}", session["commit"])
        for record in records
        for session in record.sessions
    )
    tables = [
        path
        for path in RESULTS.glob("*/*.csv")
        if "commit" in path.read_text().partition("\n")[0].split(",")
    ]
    assert len(tables) > 10
    for path in tables:
        with path.open() as file:
            lines = list(csv.DictReader(file))
        assert lines[0]["commit"], path
        # empty where it is that of the line above
        commits = {line["commit"] for line in lines} - {""}
        assert all(
            re.search("[0-9a-f]{7}", commit) and "dirty" not in commit for commit in commits
        ), path


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("This is no clone: nothing says which files are tracked.")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def shown() -> set[Path]:
    """Every file that a page shows or links to."""
    folders = ("docs", "results", "benchmarks", "examples")
    pages = [
        *ROOT.glob("*.md"),
        *(page for folder in folders for page in (ROOT / folder).rglob("*.md")),
    ]
    return {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)#\s\"]+)", page.read_text())
    }


def test_a_clone_is_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) <= MOST


def test_only_figures_that_a_page_shows_are_tracked() -> None:
    images = {
        path.resolve()
        for path in tracked()
        if RESULTS in path.parents and path.suffix in (".png", ".gif")
    }
    assert len(images) > 10
    assert images <= shown()


def test_every_figure_that_a_page_shows_comes_from_the_runs(chapters: dict[str, Chapter]) -> None:
    made = {RESULTS / f"{shape}-{scheme}.png" for shape in SHAPES for scheme in SCHEMES}
    for experiment, chapter in chapters.items():
        for section in chapter.sections:
            made |= {
                RESULTS / experiment / f"{name}.png"
                for figure in with_time(section.figures, RESULTS / experiment)
                for name in figure.files
            }
            made |= {RESULTS / experiment / picture.name for picture in section.pictures}
    images = {path for path in shown() if RESULTS in path.parents and path.suffix == ".png"}
    # the others have commands of their own
    reported = {
        RESULTS,
        *(RESULTS / experiment for experiment in chapters),
    }
    assert {path for path in images if path.parent in reported} <= made
    assert images & made
