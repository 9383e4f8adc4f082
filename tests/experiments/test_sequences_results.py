"""The published table of sequences is what its records say, and the page quotes it."""

from __future__ import annotations

from pathlib import Path

from arsm_experiments.sequences.curves import crossing
from arsm_experiments.sequences.methods import add_line, read_lines
from arsm_experiments.sequences.publish import pack, runs, unpack, write_table

RESULTS = Path(__file__).parents[2] / "results" / "sequences"


def test_the_table_is_made_from_the_records(tmp_path: Path) -> None:
    unpack(RESULTS / "records.tar.xz", tmp_path)
    write_table(tmp_path, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_bytes() == (RESULTS / "table.csv").read_bytes()


def test_packed_records_are_the_same_records(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    unpack(RESULTS / "records.tar.xz", first)
    pack(first, tmp_path / "records.tar.xz")
    unpack(tmp_path / "records.tar.xz", second)
    files = [path.relative_to(first) for path in sorted(first.rglob("*.json*"))]
    assert files == [path.relative_to(second) for path in sorted(second.rglob("*.json*"))]
    assert all((first / file).read_text() == (second / file).read_text() for file in files)


def test_a_run_that_was_cut_short_and_made_again_is_packed_once(tmp_path: Path) -> None:
    run = {"start": 0.1, "method": "likeliest", "per_update": 400, "rate": 1e-3, "seed": 1}
    for update, accuracy, end in (
        (0, 0.1, False),
        (5, 0.2, False),
        (0, 0.1, False),
        (5, 0.3, True),
    ):
        record = run | {"update": update, "accuracy": accuracy, "seconds": 1.23456, "end": end}
        add_line(tmp_path / "curves-spiral_matrix.jsonl", record)
    (tmp_path / "provenance.json").write_text("{}")
    pack(tmp_path, tmp_path / "records.tar.xz")
    unpack(tmp_path / "records.tar.xz", tmp_path / "second")
    packed = read_lines(tmp_path / "second" / "curves-spiral_matrix.jsonl")
    assert [(record["accuracy"], record["seconds"]) for record in packed] == [
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
                "update": 5 * number,
                "tokens": size * number,
                "accuracy": accuracy,
                "seconds": number,
            }
            add_line(
                tmp_path / "curves-spiral_matrix.jsonl",
                record | {"end": number == len(accuracies) - 1},
            )

    add(400, 0, (0.1, 0.75, 0.3))
    add(2000, 0, (0.1, 0.97))
    add(400, 1, (0.1, 0.5))
    add(400, 1, (0.1, 0.9, 0.95))  # once more from the start
    add(2000, 1, (0.1, 0.99))
    found = runs(tmp_path, "spiral_matrix", 0.1, 0.7)
    assert [record["accuracy"] for record in found["likeliest"][1]] == [0.1, 0.9, 0.95]
    assert crossing(found["likeliest"][1], 0.5) == (200.0, 0.5)
    found = runs(tmp_path, "spiral_matrix", 0.1, 0.9)
    assert [record["accuracy"] for record in found["likeliest"][1]] == [0.1, 0.99]
