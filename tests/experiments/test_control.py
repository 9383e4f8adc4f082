"""`arsm control`: it solves CartPole, resumes, and says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from rich.console import Console

from arsm.rl import Learning
from arsm_experiments.cli import main
from arsm_experiments.control import Control, train
from arsm_experiments.report.control import control_sections, seed_series, solved_at
from arsm_experiments.runs.reader import read_run

WALK = "tests.test_rl_environments:Walk"
CLOCKS = ("seconds", "learning_seconds", "cpu_seconds")


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in CLOCKS}
        for line in text
    ]


def test_cartpole_is_solved(tmp_path: Path) -> None:
    Control(episodes=170, seeds=1, learning_rates=(0.03,), root=tmp_path).run(Console(quiet=True))
    record = read_run(tmp_path / "control" / "CartPole-v0-arsm-adam-0.03")
    (series,) = seed_series(record)
    assert solved_at(series, 195.0) is not None
    assert series["log_variance"][-1] < series["log_variance"].max()
    assert series["replayed"][-1] == 0 < series["steps"][-1]
    (section,) = control_sections([record])
    results = {x.metric: x for x in section.results}
    assert results["seeds at the line"].values == [1.0]
    assert results["best average"].values == [max(series["average_return"][series["step"] >= 100])]
    assert results["seconds"].paper == 677.0


def test_files_of_an_environment_named_with_its_module_have_plain_names(tmp_path: Path) -> None:
    control = Control(
        "gymnasium:CartPole-v1", methods=("a2c",), episodes=2, seeds=1, log_every=1, root=tmp_path
    )
    control.run(Console(quiet=True))
    (folder,) = (tmp_path / "control").iterdir()
    assert folder.name.startswith("gymnasium-CartPole-v1-a2c")
    (section,) = control_sections([read_run(folder)])
    assert all(
        name.startswith("gymnasium-CartPole-v1")
        for figure in section.figures
        for name in figure.files
    )


def test_seeds_of_several_runs_are_one_row(tmp_path: Path) -> None:
    def results(*controls: Control) -> list[tuple[str, str, list[float]]]:
        for control in controls:
            control.run(Console(quiet=True))
        records = [read_run(folder) for folder in sorted(controls[0].root.glob("control/*"))]
        assert len(records) == len(controls)
        (section,) = control_sections(records)
        return [
            (x.row, x.metric, list(x.values)) for x in section.results if "seconds" not in x.metric
        ]

    short = partial(
        Control,
        "CartPole-v1",
        methods=("a2c",),
        horizon=20,
        episodes=10,
        learning=Learning(entropy=0.5),
    )
    whole = results(short(seeds=2, root=tmp_path / "whole"))
    parts = results(
        short(seeds=1, root=tmp_path / "parts"), short(seeds=1, seed=1, root=tmp_path / "parts")
    )
    assert whole == parts
    assert whole[0][0] == "a2c, adam 0.01, entropy 0.5"
    assert "best average" not in {metric for _, metric, _ in whole}, (
        "ten episodes have no average over a hundred"
    )


def test_how_far_seeds_are_is_said_where_one_is_not_finished(tmp_path: Path) -> None:
    control = Control(
        "CartPole-v1", ("a2c",), horizon=20, episodes=10, seeds=3, log_every=5, root=tmp_path
    )
    control.run(Console(quiet=True))
    (folder,) = control.runs()
    record = read_run(folder)
    cut = replace(
        record, metrics=[line for line in record.metrics if line["seed"] < 2 or line["step"] < 10]
    )
    (whole,), (section,) = control_sections([record]), control_sections([cut])
    assert {x.row for x in whole.results} == {"a2c, adam 0.01"}
    assert {x.row for x in section.results} == {"a2c, adam 0.01 (5 to 10 of 10 episodes)"}


def test_a_limit_of_cpu_seconds_is_said_and_ends_a_run(tmp_path: Path) -> None:
    control = Control(
        "CartPole-v1",
        ("a2c",),
        horizon=20,
        episodes=1_000_000,
        cpu_seconds=0.01,
        seeds=2,
        log_every=1,
        root=tmp_path,
    )
    control.run(Console(quiet=True))
    (folder,) = control.runs()
    record = read_run(folder)
    (section,) = control_sections([record])
    assert {x.row for x in section.results} == {"a2c, adam 0.01, 0.01 CPU seconds"}
    # a seed that was interrupted has not spent them
    lines = [{**line, "cpu_seconds": 0.005} for line in record.metrics if line["step"] == 1]
    (cut,) = control_sections([replace(record, metrics=lines)])
    assert {x.row for x in cut.results} == {
        "a2c, adam 0.01, 0.01 CPU seconds (1 of 1,000,000 episodes)"
    }


def test_runs_that_differ_in_their_length_alone_are_two_rows(tmp_path: Path) -> None:
    for episodes, seed in ((10, 0), (20, 1)):
        Control(
            "CartPole-v1",
            ("a2c",),
            horizon=20,
            episodes=episodes,
            seeds=1,
            seed=seed,
            root=tmp_path,
        ).run(Console(quiet=True))
    (section,) = control_sections(
        [read_run(folder) for folder in sorted(tmp_path.glob("control/*"))]
    )
    assert {x.row for x in section.results} == {
        "a2c, adam 0.01, 10 episodes",
        "a2c, adam 0.01, 20 episodes",
    }


def test_runs_with_other_limits_of_cpu_seconds_are_two_rows(tmp_path: Path) -> None:
    for limit, seed in ((0.01, 0), (0.02, 1)):
        Control(
            "CartPole-v1",
            ("a2c",),
            horizon=20,
            episodes=1_000_000,
            cpu_seconds=limit,
            seeds=1,
            seed=seed,
            root=tmp_path,
        ).run(Console(quiet=True))
    (section,) = control_sections(
        [read_run(folder) for folder in sorted(tmp_path.glob("control/*"))]
    )
    assert {x.row for x in section.results} == {
        "a2c, adam 0.01, 0.01 CPU seconds",
        "a2c, adam 0.01, 0.02 CPU seconds",
    }


def test_a_run_whose_iterations_are_longer_than_it_resumes_at_the_next_seed(tmp_path: Path) -> None:
    short = partial(Control, "CartPole-v1", ("arsm",), horizon=20, episodes=2, seeds=2, log_every=1)
    whole, cut = (
        short(root=tmp_path / name, learning=Learning(episodes_an_iteration=5))
        for name in ("whole", "cut")
    )
    whole.run(Console(quiet=True))
    (folder,), (config,) = cut.runs(), cut.configs()
    for episodes in train(cut, config, folder.name):
        if episodes >= 2:
            break  # as if it had been stopped after the first seed
    replace(cut, resume=True).run(Console(quiet=True))
    assert lines(folder) == lines(next(iter(whole.runs())))


def test_a_seed_ends_when_its_cpu_seconds_are_spent_and_the_next_begins(tmp_path: Path) -> None:
    control = Control(episodes=10_000, cpu_seconds=0.3, seeds=2, log_every=5, root=tmp_path)
    control.run(Console(quiet=True))
    (folder,) = (tmp_path / "control").iterdir()
    series = seed_series(read_run(folder))
    assert len(series) == 2
    for seed in series:
        # the iteration in which they are spent is the last, and it is recorded
        assert seed["cpu_seconds"][-1] >= 0.3 > seed["cpu_seconds"][-2]
        assert 0 < seed["step"][-1] < 10_000
    before = lines(folder)
    replace(control, resume=True).run(Console(quiet=True))
    assert lines(folder) == before


def test_the_settings_of_a_grid_do_not_stand_beside_the_paper(tmp_path: Path) -> None:
    grid = Control(
        "CartPole-v0",
        methods=("a2c",),
        episodes=4,
        seeds=1,
        learning_rates=(0.001, 0.003, 0.01),
        root=tmp_path,
    )
    grid.run(Console(quiet=True))
    records = [read_run(folder) for folder in grid.runs()]
    papers = [
        {x.paper for x in section.results}
        for n in (1, 3)
        for section in control_sections(records[:n])
    ]
    assert papers == [{None, 92.0}, {None}]


def test_steps_that_are_played_again_are_counted(tmp_path: Path) -> None:
    control = Control("LunarLander-v3", horizon=30, episodes=3, seeds=1, log_every=1, root=tmp_path)
    control.run(Console(quiet=True))
    (record,) = map(read_run, control.runs())
    counts = [line["replayed"] for line in record.metrics]
    assert 0 < counts[0] < counts[1] < counts[2]
    (section,) = control_sections([record])
    assert {x.metric: x.values for x in section.results}["steps played again"] == [float(counts[2])]


def test_a_run_folder_is_named_without_slashes_and_colons() -> None:
    (folder,) = Control("package.games:ALE/Pong-v5").runs()
    assert folder == Path("runs/control/package.games-ALE-Pong-v5-arsm-adam-0.01")


def test_a_linear_policy_is_called_so(tmp_path: Path) -> None:
    words = [
        "--environment",
        "CartPole-v1",
        "--horizon",
        "20",
        "--episodes",
        "4",
        "--seeds",
        "1",
        "--hidden",
    ]
    assert main(["control", *words, "--root", str(tmp_path)]) == 0
    (section,) = control_sections(
        [read_run(tmp_path / "control" / "CartPole-v1-arsm-adam-0.01-hidden-none")]
    )
    assert {x.row for x in section.results} == {"arsm, adam 0.01, hidden none"}


def test_encoders_and_environments_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rooms.py").write_text(
        "from gymnasium import register\n"
        'register("Room-v0", "tests.test_rl_spaces:Room")\n'
        "def where(seen):\n    return [seen['room'] / 3, 1.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("unused")  # restores sys.path afterwards
    words = [
        "--environment",
        "my_rooms:Room-v0",
        "--episodes",
        "2",
        "--seeds",
        "1",
        "--log-every",
        "1",
    ]
    assert main(["control", *words, "--encoder", "my_rooms:where"]) == 0
    record = read_run(next((tmp_path / "runs" / "control").iterdir()))
    assert record.config["encoder"] == "my_rooms:where"
    words[1] = "FrozenLake-v1"
    assert main(["control", *words, "--options", "is_slippery=False", "map_name=8x8"]) == 0


WORDS = [
    "control",
    "--environment",
    "CartPole-v1",
    "--horizon",
    "40",
    "--seeds",
    "2",
    "--episodes",
    "60",
]
WORDS += ["--methods", "a2c", "--log-every", "7", "--checkpoint-every", "5"]


def test_a_killed_run_resumes_to_the_same_curve(tmp_path: Path) -> None:
    assert main([*WORDS, "--root", str(tmp_path / "whole")]) == 0
    command = [
        sys.executable,
        "-m",
        "arsm_experiments.cli",
        *WORDS,
        "--root",
        str(tmp_path / "killed"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    name = "control/CartPole-v1-a2c-adam-0.01"
    killed = tmp_path / "killed" / name
    until = time.monotonic() + 120
    while time.monotonic() < until and not (killed / "checkpoint.pt").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(lines(killed)) < len(lines(tmp_path / "whole" / name))
    assert main([*WORDS, "--root", str(tmp_path / "killed"), "--resume"]) == 0
    assert lines(killed) == lines(tmp_path / "whole" / name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--environment", "CartPoole-v1"], 'There is no environment "CartPoole-v1"'),
        (["--environment", "Pendulum-v1"], "has continuous actions"),
        (["--environment", "Taxi-v9"], 'name that package too, as in "package:Taxi-v9"'),
        (["--encoder", "nowhere:encode"], 'The encoder "nowhere:encode" cannot be imported'),
        (["--encoder", "encode"], "An encoder is named as MODULE:FUNCTION"),
        (["--options", "ram"], "An option of the environment is KEY=VALUE"),
        (["--methods", "armsm"], 'There is no estimator "armsm": did you mean "arsm"'),
        (["--methods", "ppo"], 'There is no method "ppo": "value" is the nearest'),
        (["--environment", "Acrobot-v1", "--budget", "1"], "less than the 2 pseudo actions"),
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--gamma", "2"], "gamma must lie in (0, 1], but is 2.0."),
        (["--budget", "0"], "budget must be at least 1, but is 0."),
        (["--name", "a/b"], "--name is the beginning of a folder's name"),
        (["--horizon", "0"], "--horizon must be at least 1, but is 0."),
        (["--engine", "pool", "--workers", "-1"], "--workers must be at least 1, but is -1."),
        (["--methods", "vimco"], "estimates a multi-sample bound"),
        (["--methods", "exact"], "cannot start from a given sample"),
        (["--methods", "relax:temperature=0.1"], "use ActionConditioned()"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], message: str, capsys: Any, tmp_path: Path
) -> None:
    assert main(["control", *words, "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_without_gymnasium_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['gymnasium'] = None; from arsm_experiments.cli import main; "
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "control", "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "Control needs gymnasium; install it with `pip install 'arsm[rl]'`.\n",
    )


def test_a_policy_as_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    control = Control(
        environment="CartPole-v1", horizon=20, episodes=2, seeds=1, gif=True, root=tmp_path
    )
    control.run(Console(quiet=True))
    (gif,) = tmp_path.glob("control/*/policy.gif")
    assert gif.read_bytes().startswith(b"GIF89a")


def test_what_cannot_be_drawn_is_refused_before_it_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        gymnasium.registry, "Undrawn-v0", EnvSpec("Undrawn-v0", WALK, max_episode_steps=5)
    )
    Control("Undrawn-v0").check()
    with pytest.raises(
        ValueError, match=r"--gif cannot draw Undrawn-v0 \(.*render_mode.*\); fix that, or"
    ):
        Control("Undrawn-v0", gif=True).check()
