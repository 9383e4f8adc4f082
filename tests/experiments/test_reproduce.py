"""`arsm reproduce`: it resumes wherever it was stopped, survives failing runs, and its plans are
what they claim.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from arsm_experiments.cli import command_words, main, parse
from arsm_experiments.compare import Compare
from arsm_experiments.control import Control
from arsm_experiments.plans import FULL, SMOKE, Experiment
from arsm_experiments.progress import PlanBars, Throughput, progress_bars
from arsm_experiments.reproduce import PLANS, Reproduce, attempt
from arsm_experiments.runs.reader import Record, is_finished, read_run
from arsm_experiments.runs.writer import open_run
from arsm_experiments.toy import Toy
from arsm_experiments.vae import Vae

RESULTS = Path(__file__).parents[2] / "results"
TOY = Toy(
    categories=(4,),
    updates=120,
    seeds=2,
    variance_samples=2,
    checkpoint_every=30,
    estimators=("ar", "arsm"),
)
COMPARE = Compare(problems=("toy-30",), estimators=("rloo", "arsm"), samples=4)
TINY: tuple[Experiment, ...] = (
    TOY,
    dataclasses.replace(TOY, categories=(5,), name="again"),
    COMPARE,
)
RUNS = (
    "toy/C4-step1-ar",
    "toy/C4-step1-arsm",
    "toy/again-C5-step1-ar",
    "toy/again-C5-step1-arsm",
    "compare/toy-30",
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, "smoke", TINY)


def contents(root: Path) -> dict[str, bytes]:
    """All files of all runs."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.glob("*/*/*")}


def metrics(root: Path, run: str) -> list[dict[str, float]]:
    """What a run measured, without its clock."""
    clock = ("seconds", "milliseconds", "milliseconds_error")
    return [
        {key: line[key] for key in line if key not in clock}
        for line in read_run(root / run).metrics
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny plan's run folders, made in one go."""
    root = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(PLANS, "smoke", TINY)
        assert main(["reproduce", "--root", str(root)]) == 0
    return root


def test_all_runs_of_the_plan_are_made_and_reported(uninterrupted: Path) -> None:
    assert sorted(RUNS) == sorted(f"{p.parent.name}/{p.name}" for p in uninterrupted.glob("*/*"))
    assert [line["step"] for line in metrics(uninterrupted, RUNS[1]) if line["seed"] == 1] == [
        0,
        50,
        100,
        120,
    ]
    page = (uninterrupted / "report.html").read_text()
    assert "C = 4" in page
    assert "toy-30" in page


@pytest.mark.usefixtures("tiny")
def test_what_is_finished_is_skipped(
    uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(uninterrupted)
    assert main(["reproduce", "--root", str(uninterrupted)]) == 0
    assert contents(uninterrupted) == before
    out = capsys.readouterr().out
    assert len(re.findall(r"^ +\d +(?:toy|compare) .* all", out, re.MULTILINE)) == len(TINY)
    assert "after" not in out


@pytest.mark.usefixtures("tiny")
def test_only_names_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--only", "compare", "--root", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["compare"]
    capsys.readouterr()
    assert main(["reproduce", "--only", "vae", "--root", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == '--only has "vae", but the smoke plan consists of toy, toy/again, compare.\n'
    )


def test_only_may_name_a_group() -> None:
    plan = Reproduce(scale="full", only="conditional/sampled,vae/precision-fresh").plan()
    assert {each.name for each in plan} == {"sampled", "precision-fresh"}
    assert len(plan) == 11


def test_what_an_experiment_builds_on_belongs_to_it() -> None:
    names = {type(experiment).__name__ for experiment in Reproduce(only="toy,control").plan()}
    assert names == {"Toy", "Control"}
    plan = Reproduce(only="compare").plan()
    assert [type(experiment) for experiment in plan] == [Vae, Compare, Compare]
    assert isinstance(plan[-1], Compare)
    assert plan[-1].checkpoint in plan[0].runs()


def start(root: Path) -> subprocess.Popen[str]:
    """The tiny plan in a process of its own."""
    program = (
        "import sys\n"
        "from arsm_experiments.cli import main\n"
        "from arsm_experiments.reproduce import PLANS\n"
        "from tests.experiments.test_reproduce import TINY\n"
        "PLANS['smoke'] = TINY\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "reproduce", "--root", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    cwd = RESULTS.parent
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("killed_in", [RUNS[1], RUNS[4]])
def test_killed_and_started_again_it_goes_on(
    killed_in: str, uninterrupted: Path, tmp_path: Path
) -> None:
    process = start(tmp_path)
    wait_for(process, tmp_path / killed_in / "checkpoint.pt")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    header = json.loads((tmp_path / killed_in / "config.json").read_text())
    assert not header["finished"]
    finished = RUNS[: RUNS.index(killed_in)]
    assert main(["reproduce", "--root", str(tmp_path)]) == 0
    for run in finished:
        assert len(read_run(tmp_path / run).sessions) == 1
    assert len(read_run(tmp_path / killed_in).sessions) == 2
    for run in RUNS:
        assert metrics(tmp_path, run) == metrics(uninterrupted, run)


def test_interrupted_it_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for(process, tmp_path / RUNS[0] / "checkpoint.pt")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.splitlines()[-1].endswith(f"to continue: arsm reproduce --root {tmp_path}")
    assert "Traceback" not in said


@pytest.mark.usefixtures("tiny")
def test_a_failing_experiment_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare").touch()
    with open_run(tmp_path, "toy", "C4-step1-ar", {"updates": 1}):
        pass
    assert main(["reproduce", "--root", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert err == "2 of 3 experiments failed (see above); run the same command again.\n"
    assert "cannot be resumed with another" in out.replace("\n", " ")
    assert "compare: File exists; choose another folder." in out
    assert len(metrics(tmp_path, RUNS[3])) == len(metrics(tmp_path, RUNS[2])) == 2 * 4
    assert (tmp_path / "report.html").exists()


def test_an_experiment_leaves_the_threads_as_they_were(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert attempt(dataclasses.replace(TOY, root=tmp_path, updates=1)) is None
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_run_is_finished_when_it_was_left_without_an_exception(tmp_path: Path) -> None:
    config, folder = {"rate": (0.1,)}, tmp_path / "trial" / "one"
    assert not is_finished(folder, config)

    class Killed(Exception): ...

    with contextlib.suppress(Killed), open_run(tmp_path, "trial", "one", config) as run:
        run.save(1, {})
        raise Killed
    assert not is_finished(folder, config)
    with open_run(tmp_path, "trial", "one", config, resume=True):
        pass
    assert is_finished(folder, config)
    assert not is_finished(folder, {"rate": (0.2,)})
    with contextlib.suppress(Killed), open_run(tmp_path, "trial", "one", config, resume=True):
        raise Killed
    assert is_finished(folder, config)
    with (
        contextlib.suppress(Killed),
        open_run(tmp_path, "trial", "one", config, resume=True) as run,
    ):
        run.log(2, {})
        raise Killed
    assert not is_finished(folder, config)


def test_slow_steps_have_a_speed_too() -> None:
    with progress_bars(Console(file=io.StringIO())) as bars:
        bars.add_task("slow", total=2)
        (task,) = bars.tasks
        for speed, shown in ((0.31, "0.31/s"), (9.9, "9.9/s"), (12_345.6, "12,346/s")):
            task.finished_speed = speed
            assert str(Throughput().render(task)) == shown


def test_one_bar_adds_up_the_runs_of_all_experiments() -> None:
    console = Console(file=io.StringIO())
    with PlanBars(console, runs=10, done=3) as bars:
        (whole,) = bars.tasks
        with bars.part("first", runs=4, done=1):
            with progress_bars(console) as inner:
                tasks = [inner.add_task(name, total=50) for name in "ab"]
                inner.update(tasks[0], completed=25)
                assert whole.completed == 3 - 1 + 4 * 0.25
                inner.update(tasks[0], completed=50)
                inner.update(tasks[1], completed=25)
            assert whole.completed == 3 - 1 + 4 * 0.75
            paper = Console(width=100, file=io.StringIO(), record=True)
            paper.print(*bars.get_renderables())
            assert re.fullmatch(r"first .* 5/10 .*\nb .* 25/50 .*\n", paper.export_text())
        assert bars.tasks == [whole]
        assert whole.completed == 6
        with bars.part("second", runs=4, done=0):
            pass
        assert whole.completed == 10


@pytest.mark.parametrize("plan", [SMOKE, FULL], ids=["smoke", "full"])
def test_plans_can_be_typed_and_no_two_experiments_share_a_run_folder(
    plan: tuple[Experiment, ...],
) -> None:
    folders = [folder for experiment in plan for folder in experiment.runs()]
    assert len(set(folders)) == len(folders)
    for place, experiment in enumerate(plan):
        assert parse(command_words(experiment)) == experiment
        if isinstance(experiment, Compare) and experiment.checkpoint:
            made = [str(folder) for before in plan[:place] for folder in before.runs()]
            assert f"runs/{experiment.checkpoint}" in made
        else:
            experiment.check()


def test_the_smoke_plan_has_every_experiment() -> None:
    assert {type(experiment) for experiment in SMOKE} == set(Experiment.__args__)
    environments = {
        experiment.environment for experiment in SMOKE if isinstance(experiment, Control)
    }
    assert environments == {"CartPole-v0", "Acrobot-v1", "LunarLander-v3"}


def test_the_full_plan_has_every_published_run(records: list[Record]) -> None:
    """Some runs have a part of a command's seeds."""
    planned = {
        str(folder.relative_to("runs")) for experiment in FULL for folder in experiment.runs()
    }
    published = {f"{record.experiment}/{record.name}" for record in records}

    def without_seed(name: str) -> str:
        return re.sub(r"-seed-\d+$", "", name)

    settings = set(map(without_seed, planned))
    assert {name for name in published if without_seed(name) not in settings} == set()
