"""The published table of sequences is what its records say, and the page quotes it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from arsm_experiments.sequences.publish import TASKS, unpack, write_table

RESULTS = Path(__file__).parents[2] / "results" / "sequences"


def test_the_table_is_made_from_the_records(tmp_path: Path) -> None:
    unpack(RESULTS / "records.tar.xz", tmp_path)
    write_table(tmp_path, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes() == (RESULTS / "table.csv").read_bytes()


def quoted(pattern: str) -> list[tuple[tuple[str, ...], list[str]]]:
    """The page's table rows whose first cell matches: the cell's groups, and the other cells, one per task."""
    found = []
    for line in (RESULTS / "README.md").read_text().splitlines():
        first, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        if (matched := re.fullmatch(pattern, first)) and len(cells) == len(TASKS):
            found.append((matched.groups(), cells))
    return found


def published(pattern: str) -> dict[tuple[str, ...], float]:
    """The table's means whose row and metric, joined by a colon, match."""
    rows = csv.DictReader((RESULTS / "table.csv").read_text().splitlines())
    matches = ((re.fullmatch(pattern, f"{row['row']}: {row['metric']}"), row["mean"]) for row in rows)
    return {matched.groups(): float(mean) for matched, mean in matches if matched}


def test_the_page_quotes_variances() -> None:
    found = published(r"(\w+), accuracy \S+ \(level (\S+)\), (.*): trace x tokens / best group")
    lines = quoted(r"(0\.\d+), `(.*)`")
    assert len(lines) >= 6
    for (level, method), cells in lines:
        for task, cell in zip(TASKS, cells, strict=True):
            value = found.get((task, level, method))
            assert cell == ("not measured" if value is None else f"{value:.2g}"), (task, level, method)


def test_the_page_quotes_tokens() -> None:
    """Thousands of tokens; a dash where not every seed got there."""
    found = published(r"(\w+), from (\S+), (.*), rate \S+: tokens to (\S+)")
    lines = quoted(r"from (0\.\d+) to (0\.\d+), `(.*)`")
    assert len(lines) >= 4
    for (start, level, method), cells in lines:
        for task, cell in zip(TASKS, cells, strict=True):
            value = found.get((task, start, method, level))
            assert cell == ("-" if value is None else f"{value / 1000:.3g}"), (task, start, level, method)
