"""What tests share: the published runs, read once, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arsm_experiments.report.chapters import Chapter, make_chapters
from arsm_experiments.report.sections import Result
from arsm_experiments.runs.reader import Record, read_runs
from tests.experiments.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def records() -> list[Record]:
    return read_runs(Path(__file__).parents[2] / "results" / "runs")


@pytest.fixture(scope="session")
def chapters(records: list[Record]) -> dict[str, Chapter]:
    return make_chapters(records)


@pytest.fixture(scope="module")
def results(chapters: dict[str, Chapter]) -> dict[tuple[str, str], Result]:
    """Every result by its table's row, as "SECTION: ROW", and metric."""
    sections = [section for chapter in chapters.values() for section in chapter.sections]
    return {
        (f"{section.title}: {r.row}", r.metric): r for section in sections for r in section.results
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; skips the test if there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip("There is no Chromium; `apt-get install chromium`.")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser
