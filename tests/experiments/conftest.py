"""The published runs, read once for all tests."""

from pathlib import Path

import pytest

from arsm_experiments.report.chapters import Chapter, make_chapters
from arsm_experiments.runs.reader import Record, read_runs


@pytest.fixture(scope="session")
def records() -> list[Record]:
    return read_runs(Path(__file__).parents[2] / "results" / "runs")


@pytest.fixture(scope="session")
def chapters(records: list[Record]) -> dict[str, Chapter]:
    return make_chapters(records)
