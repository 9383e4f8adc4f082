"""The benchmarks' records, and the list of the benchmarks."""

import lzma
from pathlib import Path

import pytest
from benchmarks import records
from benchmarks.__main__ import BENCHMARKS, COMMANDS
from benchmarks.measure import Timing, table, write_record

ROOT = Path(__file__).parents[1]


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


def test_only_missing_records_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    made: list[tuple[str, int]] = []

    def make(key: tuple[str, int]) -> records.Record:
        made.append(key)
        return {"way": key[0], "seed": key[1], "loss": 0.5, "seconds": 3}

    def run(seeds: range) -> None:
        records.make_missing(
            path,
            (("ours", seed) for seed in seeds),
            lambda record: (record["way"], record["seed"]),
            make,
            lambda record: f"{record['loss']:.2f}, {record['seconds']} s",
        )

    run(range(2))
    run(range(3))
    assert made == [("ours", 0), ("ours", 1), ("ours", 2)]
    assert [record["seed"] for record in records.read(path)] == [0, 1, 2]
    assert capsys.readouterr().out.splitlines()[-1] == "ours, 2: 0.50, 3 s"


def squared(way: str, seed: int) -> records.Record:
    return {"way": way, "seed": seed, "square": seed**2}


def test_processes_make_only_missing_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    records.add(path, {"way": "ours", "seed": 1, "square": -1})
    records.make_in_processes(
        path,
        [("ours", seed) for seed in range(3)],
        lambda record: (record["way"], record["seed"]),
        squared,
        lambda record: str(record["square"]),
        workers=1,
    )
    # the record that was there is neither made again nor replaced
    assert {r["seed"]: r["square"] for r in records.read(path)} == {0: 0, 1: -1, 2: 4}
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "2/2 ours, 2: 4; about 0 min left"


def test_a_table_has_the_columns_of_all_tables(tmp_path: Path) -> None:
    row = ("ours", "accuracy", "0.5", "", 1, "", "3.0", "CPU", "abc")
    records.write_table(tmp_path / "table.csv", [row])
    header, written = (tmp_path / "table.csv").read_text().splitlines()
    assert header == "row,metric,mean,std,seeds,paper,seconds,hardware,commit"
    assert written == "ours,accuracy,0.5,,1,,3.0,CPU,abc"


JSON_ELSEWHERE = {
    # what one process tells another, or prints
    "benchmarks/gpu_against.py",
    "benchmarks/overhead.py",
    "benchmarks/small_transformer.py",
    "benchmarks/token_credit_smollm2.py",
    "benchmarks/univariate.py",
    "benchmarks/vae_estimators.py",
    "experiments/src/arsm_experiments/ecosystem/__main__.py",
    "experiments/src/arsm_experiments/ecosystem/coverage.py",
    "experiments/src/arsm_experiments/ecosystem/table.py",
    "experiments/src/arsm_experiments/sequences/server.py",
    # data that others wrote, or that is no record
    "experiments/src/arsm_experiments/data.py",
    "experiments/src/arsm_experiments/sequences/texts.py",
    "experiments/src/arsm_experiments/sequences/translate.py",
    # files inside an archive of runs
    "experiments/src/arsm_experiments/sequences/language_model.py",
    "experiments/src/arsm_experiments/sequences/language_model_rules.py",
    "experiments/src/arsm_experiments/sequences/publish.py",
    "experiments/src/arsm_experiments/sequences/trials.py",
    # records of their own; these may only become fewer
    "benchmarks/agents.py",
    "benchmarks/agents_report.py",
    "benchmarks/decoding.py",
    "benchmarks/real_model.py",
    "benchmarks/update.py",
}


def test_records_are_read_and_written_in_one_room() -> None:
    rooms = [ROOT / "benchmarks", ROOT / "experiments" / "src"]
    paths = [path for room in rooms for path in room.rglob("*.py") if path.parent.name != "runs"]
    users = {path for path in paths if "import json\n" in path.read_text()}
    assert {path.relative_to(ROOT).as_posix() for path in users} == JSON_ELSEWHERE


def test_a_file_with_one_record(tmp_path: Path) -> None:
    path = tmp_path / "made" / "times.json"
    records.write_one(path, {"ms": {"ours": 1.5}})
    assert path.read_text() == '{\n "ms": {\n  "ours": 1.5\n }\n}\n'
    assert records.read_one(path) == {"ms": {"ours": 1.5}}
    assert [each.name for each in path.parent.iterdir()] == ["times.json"]
    compressed = path.with_name("times.json.xz")
    records.write_one(compressed, {"ms": {"ours": 1.5}})
    assert lzma.decompress(compressed.read_bytes()) == path.read_bytes()
    assert records.read_one(compressed) == {"ms": {"ours": 1.5}}


def test_every_benchmark_is_listed() -> None:
    commands = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    # a script that `real_model` runs with the source of an earlier commit
    commands -= {"__main__", "small_transformer"}
    assert commands <= BENCHMARKS.keys() | COMMANDS.keys()
    listed = {f"{name}.py" for name in (*BENCHMARKS, *COMMANDS)}
    assert listed <= {path.name for path in (ROOT / "benchmarks").glob("*.py")}
