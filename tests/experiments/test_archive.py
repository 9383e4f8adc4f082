"""Archives of runs: they hold what a report needs, the same runs make the same bytes, and nothing
is lost.
"""

import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from arsm_experiments.archive import Archive
from arsm_experiments.runs.archive import by_column, by_line
from arsm_experiments.runs.files import RunError
from arsm_experiments.runs.reader import read_run, read_runs
from arsm_experiments.runs.writer import open_run

QUIET = Console(quiet=True)


def make(root: Path, name: str, loss: float = 0.5) -> Path:
    """A run folder with a checkpoint and pictures of two seeds."""
    with open_run(root, "trial", name, {"rate": 0.1}, group="sweep", label="a run") as run:
        run.log(1, {"loss": loss}, seed=0)
        run.save(1, {})
    for seed in (0, 1):
        (run.folder / f"pictures-seed{seed}.png").write_bytes(b"picture %d" % seed)
    return run.folder


def test_an_archived_run_is_read_as_its_folder_was(tmp_path: Path) -> None:
    folders = [make(tmp_path / "runs", name) for name in ("two", "one")]
    Archive(tmp_path / "runs", tmp_path / "kept").run(QUIET)
    records = read_runs(tmp_path / "kept")
    assert [record.name for record in records] == ["one", "two"]
    for record, folder in zip(records, sorted(folders), strict=True):
        same = read_run(folder)
        for field in ("experiment", "group", "label", "config", "sessions", "metrics", "seconds"):
            assert getattr(record, field) == getattr(same, field)
        assert record.pictures == {"pictures-seed0.png": b"picture 0"}, (
            "one seed's pictures are kept"
        )
    with tarfile.open(tmp_path / "kept" / "trial.tar.xz") as archive:
        assert archive.getnames() == [
            f"{name}/{file}"
            for name in ("one", "two")
            for file in ("config.json", "metrics.columns", "pictures-seed0.png")
        ]


def test_archived_numbers_have_eight_digits(tmp_path: Path) -> None:
    make(tmp_path / "runs", "one", loss=-1 / 3e9)
    Archive(tmp_path / "runs", tmp_path / "kept").run(QUIET)
    (record,) = read_runs(tmp_path / "kept")
    assert record.metrics[0]["loss"] == -3.3333333e-10
    assert record.metrics[0]["step"] == 1


def test_archived_numbers_that_are_only_drawn_have_three_digits(tmp_path: Path) -> None:
    with open_run(tmp_path / "runs", "trial", "one", {}) as run:
        run.log(1, {"entropy": 2 / 3, "reward": 2 / 3})
    Archive(tmp_path / "runs", tmp_path / "kept").run(QUIET)
    (record,) = read_runs(tmp_path / "kept")
    assert (record.metrics[0]["entropy"], record.metrics[0]["reward"]) == (0.667, 0.66666667)


def test_numbers_between_the_first_and_the_last_line_are_only_drawn(tmp_path: Path) -> None:
    with open_run(tmp_path / "runs", "trial", "one", {}) as run:
        for step in range(3):
            run.log(step, {"reward": 2 / 3}, seed=0)
    Archive(tmp_path / "runs", tmp_path / "kept").run(QUIET)
    (record,) = read_runs(tmp_path / "kept")
    assert [line["reward"] for line in record.metrics] == [0.66666667, 0.6667, 0.66666667]


def trained(root: Path, epochs: int) -> None:
    """A training of eight epochs, of which so many are done; the third and the fifth were best."""
    config = {"epochs": 8, "measure_every": 1}
    with open_run(root, "trial", "one", config) as run:
        for epoch in range(1, epochs + 1):
            for seed, best in ((0, 3), (1, 5)):
                run.log(epoch, {"epoch": epoch, "validation": abs(epoch - best)}, seed)


def test_of_a_finished_training_every_other_measurement_is_kept(tmp_path: Path) -> None:
    """With each seed's first, best and last one; of an unfinished training all are."""
    trained(tmp_path / "runs", 8)
    Archive(tmp_path / "runs", tmp_path / "kept").run(QUIET)
    (record,) = read_runs(tmp_path / "kept")
    steps = {seed: list(line) for seed, line in record.by_seed("validation").items()}
    assert steps == {0: [1, 2, 3, 4, 6, 8], 1: [1, 2, 4, 5, 6, 8]}
    trained(tmp_path / "cut", 7)
    Archive(tmp_path / "cut", tmp_path / "all").run(QUIET)
    assert len(read_runs(tmp_path / "all")[0].metrics) == 14


def test_an_archive_has_one_seed_after_the_other(tmp_path: Path) -> None:
    trained(tmp_path / "runs", 7)
    Archive(tmp_path / "runs", tmp_path / "kept").run(QUIET)
    (record,) = read_runs(tmp_path / "kept")
    places = [(line["seed"], line["step"]) for line in record.metrics]
    assert places == sorted(places)


def test_metrics_by_column_are_the_same_lines() -> None:
    """Some lines have more metrics than others, and some values are not finite."""
    lines = (
        b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": NaN, "test": 3}\n{"step": 3, "test": 4.0}\n'
    )
    assert by_line(by_column(lines)) == lines
    assert by_column(lines).count(b"\n") == 3


def test_the_same_runs_make_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make(tmp_path / "runs", name) for name in ("one", "two"))
    Archive(tmp_path / "runs", tmp_path / "together").run(QUIET)
    # one after the other, last first, and younger
    for number, folder in enumerate((second, first)):
        alone = tmp_path / str(number) / "trial"
        alone.mkdir(parents=True)
        folder.rename(alone / folder.name)
        os.utime(alone / folder.name / "metrics.jsonl", (0, 0))
        Archive(tmp_path / str(number), tmp_path / "apart").run(QUIET)
    one, other = ((tmp_path / name / "trial.tar.xz").read_bytes() for name in ("together", "apart"))
    assert one == other


def test_another_run_of_a_name_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    make(tmp_path / "old", "one")
    make(tmp_path / "new", "one", loss=0.25)
    into = tmp_path / "kept"
    Archive(tmp_path / "old", into).run(QUIET)
    Archive(tmp_path / "old", into).run(QUIET)
    before = (into / "trial.tar.xz").read_bytes()
    with pytest.raises(RunError, match=r"has other runs named one; pass --replace"):
        Archive(tmp_path / "new", into).run(QUIET)
    assert (into / "trial.tar.xz").read_bytes() == before
    Archive(tmp_path / "new", into, replace=True).run(QUIET)
    (record,) = read_runs(into)
    assert record.metrics[0]["loss"] == 0.25


def test_a_run_folder_is_read_instead_of_its_archived_namesake(tmp_path: Path) -> None:
    make(tmp_path / "runs", "one")
    Archive(tmp_path / "runs", tmp_path / "runs").run(QUIET)
    path = tmp_path / "runs" / "trial" / "one" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label": "another"}))
    (record,) = read_runs(tmp_path / "runs")
    assert record.label == "another"


@pytest.mark.parametrize("content", [b"", b"no archive", lzma.compress(b"no archive")])
def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trial.tar.xz").write_bytes(content)
    with pytest.raises(RunError, match=r"trial.tar.xz is no archive of runs .* restore it"):
        read_runs(tmp_path)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "runs", "one")
    Archive(tmp_path / "runs", tmp_path).run(QUIET)
    path = tmp_path / "trial.tar.xz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunError, match="is no archive of runs"):
        read_runs(tmp_path)


def test_nothing_to_add_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="There are no run folders under"):
        Archive(tmp_path, tmp_path / "kept").run(QUIET)
    assert not list(tmp_path.iterdir())
