"""What `python -m benchmarks --record FOLDER` keeps of a benchmark."""

from pathlib import Path

from benchmarks import records
from benchmarks.measure import Timing, table, write_record


def test_a_record_has_the_printed_table_and_every_single_time(tmp_path: Path) -> None:
    timing = Timing.of([3e-3, 1e-3, 2.00004e-3])
    assert (timing.median, timing.low, timing.high) == (2.00004e-3, 1e-3, 3e-3)
    printed = table("Both ways", ["way", "median (range)"], [["ours", str(timing)]], {"us": timing})
    write_record(tmp_path, "both", [printed])

    about, _, text = (tmp_path / "both.txt").read_text().partition("\n\n")
    assert about.startswith("python -m benchmarks both, commit ")
    assert text == "Both ways\nway   median (range)\nours  2 ms (1 ms to 3 ms)\n"
    (record,) = records.read(tmp_path / "both.jsonl.xz")
    assert {"commit", "hardware", "torch", "processes that ran or waited"} <= record.keys()
    assert record["tables"] == [{"title": "Both ways", "seconds": {"us": [3e-3, 1e-3, 2e-3]}}]
