"""Run folders: what they hold, how they resume, and what they refuse."""

import contextlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arsm_experiments.runs import provenance
from arsm_experiments.runs.files import RunError, write_atomically
from arsm_experiments.runs.merge import merge_seeds
from arsm_experiments.runs.reader import Record, load_checkpoint, read_run, read_runs
from arsm_experiments.runs.writer import open_run

CONFIG = {"rate": 0.1, "seed": 3, "sizes": (1, 2)}


def test_a_run_folder_holds_configuration_metrics_checkpoint_and_events(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG, group="sweep", label="a run") as run:
        assert run.state is None
        assert run.step == 0
        run.log(1, {"loss": 0.5}, seed=7)
        run.log(1, {"loss": 1.5}, seed=8)
        run.save(
            1, {"phi": torch.arange(3), "count": 4, "words": ["a"], "nested": {"x": torch.ones(1)}}
        )
    folder = tmp_path / "trial" / "one"
    found = read_run(folder)
    assert read_runs(tmp_path) == [found]
    assert (found.experiment, found.name, found.group, found.label) == (
        "trial",
        "one",
        "sweep",
        "a run",
    )
    assert found.config == {"rate": 0.1, "seed": 3, "sizes": [1, 2]}
    assert {"started", "commit", "hardware", "torch", "python", "system"} == found.sessions[
        0
    ].keys()
    assert found.series("loss") == ([1], [[0.5], [1.5]])
    assert found.series("absent") == ([], [])
    assert load_checkpoint(folder / "checkpoint.pt")["state"]["words"] == ["a"]
    assert {p.name.partition(".out")[0] for p in folder.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "checkpoint.pt",
        "events",
    }
    assert [p.name for p in (tmp_path / "trial").iterdir()] == ["one"]


def test_events_are_what_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.save(0, {})
        for step in (1, 2, 3):
            run.log(step, {"loss": step / 2})
            if step == 1:
                run.save(1, {})
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True) as run:
        run.log(2, {"loss": 9.0})
    events = EventAccumulator(str(tmp_path / "trial" / "one"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 9.0)]


def test_a_resumed_run_of_seeds_in_turn_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        for step in (1, 2, 3):
            run.log(step, {"loss": 0.5}, seed=0)
        run.log(1, {"loss": 0.5}, seed=1)
        run.save(4, {})
        run.log(2, {"loss": 0.5}, seed=1)
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True) as run:
        for step in (2, 3):
            run.log(step, {"loss": 0.5}, seed=1)
    events = EventAccumulator(str(tmp_path / "trial" / "one"))
    events.Reload()
    assert [[e.step for e in events.Scalars(f"loss/{seed}")] for seed in (0, 1)] == [
        [1, 2, 3],
        [1, 2, 3],
    ]


def seeds_run(
    root: Path, name: str, losses: dict[int, float], seconds: float = 0.0, rate: float = 0.1
) -> Record:
    with open_run(
        root, "trial", name, {"rate": rate, "seeds": list(losses), "seed": min(losses)}
    ) as run:
        for seed, loss in losses.items():
            run.log(1, {"loss": loss}, seed)
    return replace(read_run(run.folder), seconds=seconds)


def test_runs_that_differ_in_their_seeds_only_are_one(tmp_path: Path) -> None:
    later = seeds_run(tmp_path, "one-seed-10", {10: 3.0}, seconds=4.0)
    other = seeds_run(tmp_path, "other", {5: 9.0}, rate=0.2)
    first = seeds_run(tmp_path, "one", {1: 2.0, 0: 1.0}, seconds=3.0)
    found = merge_seeds([later, other, first], lambda r: r.config["rate"])
    assert [(x.folder, x.name, x.config, x.seconds) for x in found] == [
        (first.folder, "one", first.config, 7.0),
        (other.folder, "other", other.config, 0.0),
    ]
    assert found[0].by_seed("loss") == {0: {1: 1.0}, 1: {1: 2.0}, 10: {1: 3.0}}
    assert found[0].sessions == [*first.sessions, *later.sessions]
    assert found[1] == other
    together = merge_seeds([later, other, first], lambda r: r.experiment, seconds=max)
    assert [(x.name, x.seconds) for x in together] == [("one", 4.0)]


def test_a_seed_that_ran_in_two_commands_counts_once(tmp_path: Path) -> None:
    records = [
        seeds_run(tmp_path, "one", {0: 1.0, 1: 2.0}),
        seeds_run(tmp_path, "one-seed-1", {1: 2.5, 2: 3.0}),
    ]
    (found,) = merge_seeds(records, lambda r: r.config["rate"])
    assert [(line["seed"], line["loss"]) for line in found.metrics] == [
        (0, 1.0),
        (1, 2.0),
        (2, 3.0),
    ]


def test_a_series_ends_where_the_first_seed_does(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        for step, seed in ((1, 0), (1, 1), (2, 0)):
            run.log(step, {"loss": step + seed / 10}, seed)
    found = read_run(run.folder)
    assert found.series("loss") == ([1], [[1.0], [1.1]])
    assert found.by_seed("loss") == {0: {1: 1.0, 2: 2.0}, 1: {1: 1.1}}


def test_resuming_discards_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.log(1, {"loss": 1.0})
        run.save(1, {"phi": torch.full((2,), 0.1, dtype=torch.float64)})
        run.log(2, {"loss": 2.0})
    metrics = tmp_path / "trial" / "one" / "metrics.jsonl"
    with metrics.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # as a killed process leaves it
    assert [line["step"] for line in read_run(metrics.parent).metrics] == [1, 2]
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True) as run:
        assert run.step == 1
        assert run.state is not None
        assert torch.equal(run.state["phi"], torch.full((2,), 0.1, dtype=torch.float64))
        run.log(2, {"loss": 5.0})
    found = read_run(metrics.parent)
    assert [line["loss"] for line in found.metrics] == [1.0, 5.0]
    assert len(found.sessions) == 2
    seconds = [line["seconds"] for line in found.metrics]
    assert seconds == sorted(seconds)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.log(1, {"loss": 1.0})
        raise KeyboardInterrupt
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True) as run:
        assert run.state is None
        run.log(1, {"loss": 2.0})
    assert [line["loss"] for line in read_run(tmp_path / "trial" / "one").metrics] == [2.0]


def test_opening_a_finished_run_leaves_it_as_it_is(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.log(1, {"loss": 1.0})
        run.save(1, {})
    before = {p: p.read_bytes() for p in (tmp_path / "trial" / "one").iterdir()}
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True):
        pass
    assert before == {p: p.read_bytes() for p in (tmp_path / "trial" / "one").iterdir()}


def test_global_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        torch.rand(5)
        run.save(1, {})
        expected = torch.rand(3)
    torch.manual_seed(1)
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True):
        assert torch.equal(torch.rand(3), expected)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file) -> None:
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="file cannot be written: disk full; make room"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_run_is_refused_without_resume(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG):
        pass
    with pytest.raises(RunError, match=r"exists; pass --resume .* or choose another --root"):
        open_run(tmp_path, "trial", "one", CONFIG)


def test_a_finished_run_without_its_checkpoint_is_not_started_over(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.log(1, {"value": 1.0})
        run.save(1, {})
    (run.folder / "checkpoint.pt").unlink()
    with pytest.raises(RunError, match="finished run without its checkpoint; choose another"):
        open_run(tmp_path, "trial", "one", CONFIG, resume=True)
    assert len(read_run(run.folder).metrics) == 1


def test_another_configuration_is_refused_by_its_fields(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG):
        pass
    with pytest.raises(
        RunError, match=r"another rate \(0.1 there, 0.2 here\), width \(None there, 5 here\);"
    ):
        open_run(tmp_path, "trial", "one", {**CONFIG, "rate": 0.2, "width": 5}, resume=True)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"format": 99, "experiment": "trial"}'])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "trial" / "one"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(
        RunError, match="is not a run folder" if content is None else "not one that this version"
    ):
        open_run(tmp_path, "trial", "one", CONFIG, resume=True)


def test_a_run_of_another_experiment_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG):
        pass
    (tmp_path / "trial").rename(tmp_path / "other")
    with pytest.raises(RunError, match="holds a run of trial, not of other"):
        open_run(tmp_path, "other", "one", CONFIG, resume=True)


@pytest.mark.parametrize("keep", [0, 100, -200])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, keep: int) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.save(1, {"x": torch.zeros(100)})
    path = tmp_path / "trial" / "one" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        RunError, match=r"checkpoint.pt is damaged .* delete it to start this run again"
    ):
        open_run(tmp_path, "trial", "one", CONFIG, resume=True)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.save(1, {"x": Path("not a plain value")})
    with pytest.raises(RunError, match="damaged"):
        open_run(tmp_path, "trial", "one", CONFIG, resume=True)


def test_metrics_shorter_than_their_checkpoint_are_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.log(1, {"loss": 1.0})
        run.save(1, {})
    (tmp_path / "trial" / "one" / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="has 0 bytes, but its checkpoint was made after"):
        open_run(tmp_path, "trial", "one", CONFIG, resume=True)


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b'{"step": 1}', b"\x80"])
def test_damaged_metrics_are_refused_by_their_line(tmp_path: Path, line: bytes) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.log(1, {"loss": 1.0})
        run.log(2, {"loss": 1.0})
        run.save(2, {})
    path = run.folder / "metrics.jsonl"
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(first + b"\n" + line + b" " * (len(second) - len(line)) + b"\n")
    with pytest.raises(
        RunError, match=r"metrics.jsonl is damaged in line 2; .* or delete its folder"
    ):
        read_run(run.folder)
    again = open_run(tmp_path, "trial", "one", CONFIG, resume=True)
    with again, pytest.raises(RunError, match="damaged in line 2"):
        again.log(3, {"loss": 1.0})


def test_a_run_is_open_once_at_a_time(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG) as run:
        run.save(1, {})
        with pytest.raises(RunError, match="in use by another process"):
            open_run(tmp_path, "trial", "one", CONFIG, resume=True)
    with open_run(tmp_path, "trial", "one", CONFIG, resume=True):
        pass


def test_commit_is_that_of_the_source_not_of_a_repository_around_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "venv" / "record.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.provenance("cpu")["commit"] is None
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert provenance.provenance("cpu")["commit"] == head
    (tmp_path / ".gitignore").write_text("venv/\n")
    assert provenance.provenance("cpu")["commit"] is None


def test_config_is_readable_json(tmp_path: Path) -> None:
    with open_run(tmp_path, "trial", "one", CONFIG):
        pass
    text = (tmp_path / "trial" / "one" / "config.json").read_text()
    assert json.loads(text)["experiment"] == "trial"
    assert text.count("\n") > 5
