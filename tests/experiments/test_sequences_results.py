"""The published table of sequences is what its records say, and the page quotes it."""

from __future__ import annotations

import json
from pathlib import Path

from arsm_experiments.runs import lines
from arsm_experiments.sequences.curves import crossing
from arsm_experiments.sequences.publish import about, load, pack, runs, write_table

RESULTS = Path(__file__).parents[2] / "results" / "sequences"


def test_the_table_is_made_from_the_records(tmp_path: Path) -> None:
    write_table(load(RESULTS / "records.tar.xz"), tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes() == (RESULTS / "table.csv").read_bytes()


def test_the_records_are_runs_as_any_experiment_writes_them() -> None:
    """Of an experiment, with hardware and commit of their sessions, and steps and seconds."""
    records = load(RESULTS / "records.tar.xz")
    assert len(records) == 9
    for record in records.values():
        assert record.experiment == "sequences"
        assert {"hardware", "commit"} <= record.sessions[0].keys()
        assert record.seconds > 0


def test_a_run_that_was_cut_short_and_made_again_is_packed_once(tmp_path: Path) -> None:
    run = {"start": 0.1, "method": "likeliest", "per_update": 400, "rate": 1e-3, "seed": 1}
    for step, accuracy, end in (
        (0, 0.1, False),
        (5, 0.2, False),
        (0, 0.1, False),
        (5, 0.3, True),
    ):
        record = run | {"step": step, "accuracy": accuracy, "seconds": 1.23456, "end": end}
        lines.add(tmp_path / "curves-spiral_matrix.jsonl", record)
    made = ["a GPU", "abc"]
    (tmp_path / "provenance.json").write_text(json.dumps({"curves-spiral_matrix": made}))
    pack(tmp_path, tmp_path / "records.tar.xz")
    (packed,) = load(tmp_path / "records.tar.xz").values()
    assert about(packed) == made
    assert [(line["accuracy"], line["seconds"]) for line in packed.metrics] == [
        (0.1, 1.2),
        (0.3, 1.2),
    ]


def test_only_the_size_and_rate_that_seed_0_chose_are_published(tmp_path: Path) -> None:
    def add(size: int, seed: int, accuracies: tuple[float, ...]) -> None:
        for number, accuracy in enumerate(accuracies):
            record = {
                "start": 0.1,
                "method": "likeliest",
                "per_update": size,
                "rate": 1e-3,
                "seed": seed,
            }
            record |= {
                "step": 5 * number,
                "tokens": size * number,
                "accuracy": accuracy,
                "seconds": number,
            }
            lines.add(
                tmp_path / "curves-spiral_matrix.jsonl",
                record | {"end": number == len(accuracies) - 1},
            )

    add(400, 0, (0.1, 0.75, 0.3))
    add(2000, 0, (0.1, 0.97))
    add(400, 1, (0.1, 0.5))
    add(400, 1, (0.1, 0.9, 0.95))  # once more from the start
    add(2000, 1, (0.1, 0.99))
    (tmp_path / "provenance.json").write_text("{}")
    pack(tmp_path, tmp_path / "records.tar.xz")
    records = load(tmp_path / "records.tar.xz")
    found = runs(records, "spiral_matrix", 0.1, 0.7)
    assert [record["accuracy"] for record in found["likeliest"][1]] == [0.1, 0.9, 0.95]
    assert crossing(found["likeliest"][1], 0.5) == (200.0, 0.5)
    found = runs(records, "spiral_matrix", 0.1, 0.9)
    assert [record["accuracy"] for record in found["likeliest"][1]] == [0.1, 0.99]
