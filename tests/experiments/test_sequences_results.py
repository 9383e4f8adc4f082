"""The published table of sequences is what its records say, and the page quotes it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from arsm_experiments.sequences.publish import unpack, write_table

RESULTS = Path(__file__).parents[2] / "results" / "sequences"


def test_the_table_is_made_from_the_records(tmp_path: Path) -> None:
    unpack(RESULTS / "records.tar.xz", tmp_path)
    write_table(tmp_path, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes() == (RESULTS / "table.csv").read_bytes()


def test_the_page_quotes_the_table() -> None:
    rows = list(csv.DictReader((RESULTS / "table.csv").read_text().splitlines()))
    found = {
        (task, level): float(row["mean"])
        for row in rows
        if row["metric"] == "trace x tokens / best group"
        for task, level, method in re.findall(r"(\w+), accuracy \S+ \(level (\S+)\), (.*)", row["row"])
        if method == "branch rloo 16"
    }
    page = (RESULTS / "README.md").read_text()
    for level, start in (("0.1", "accuracy about 0.1"), ("0.45", "about 0.45: branch, RLOO(16)"), ("0.8", "about 0.8")):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {start}")]
        quoted = [cell.strip(" *") for cell in line.split("|")[2:-1]]
        for task, cell in zip(
            ("number_sorting", "spell_backward", "chain_sum", "number_filtering"), quoted, strict=True
        ):
            if cell != "not measured":
                assert cell == f"{found[task, level]:.2f}", (task, level)
