"""`arsm sequences`: its run folders, being killed and going on, several processes, engines, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

import arsm
from arsm.sequences import Branch, Group
from arsm_experiments.cli import main
from arsm_experiments.report.chapters import make_chapters
from arsm_experiments.runs.reader import load_checkpoint, read_run
from arsm_experiments.sequences import command
from arsm_experiments.sequences.command import Sequences, TaskName
from arsm_experiments.sequences.methods import Size, cross_entropy, new_policy
from arsm_experiments.sequences.tasks import TASKS, decode, generate
from arsm_experiments.sequences.trainer import Spending, Trainer, imitate, named_strategy
from tests.experiments.test_sequences_server import SHAPE, serving

TINY = Sequences(
    strategies=("branch:rloo:samples=3",),
    rates=(1e-2,),
    seeds=(3, 4),
    tokens=1500,
    tokens_per_update=300,
    warm_up=0.0,
    width=16,
    layers=1,
    heads=2,
    tested=16,
    measure_every=2,
    device="cpu",
)
WORDS = ["--strategies", "branch:rloo:samples=3", "--rates", "0.01", "--seeds", "3", "4", "--tokens", "1500"]
WORDS += ["--tokens-per-update", "300", "--warm-up", "0", *SHAPE, "--tested", "16", "--measure-every", "2"]
WORDS += ["--device", "cpu"]
TIMES = {"seconds", "learning_seconds", "tokens_per_second"}


def trained(config: Sequences) -> list[Path]:
    config.check()
    config.run(Console(quiet=True))
    return list(config.runs())


def results(folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Metrics without times, and the last state but its seconds."""
    metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in read_run(folder).metrics]
    return metrics, load_checkpoint(folder / "checkpoint.pt")["state"]["trainer"]


def assert_same(folder: Path, other: Path) -> None:
    (metrics, state), (expected, expected_state) = results(folder), results(other)
    assert metrics == expected
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    return trained(replace(TINY, root=tmp_path_factory.mktemp("whole")))[0]


def test_a_run_folder_has_everything(whole: Path) -> None:
    record = read_run(whole)
    assert {path.name.partition(".")[0] for path in whole.iterdir()} == {"config", "metrics", "checkpoint", "events"}
    assert {line["seed"] for line in record.metrics} == {3, 4}
    for seed in (3, 4):
        lines = [line for line in record.metrics if line["seed"] == seed]
        assert [line["step"] for line in lines][:3] == [0, 2, 4]
        assert lines[0]["tokens"] == 0
        assert 1500 <= lines[-1]["tokens"] < 2500
        assert lines[-1]["tokens_per_second"] > 0
        assert lines[-1]["rollouts"] > 0
    chapter = make_chapters([record])["sequences"]
    assert {result.metric for result in chapter.sections[0].results} >= {"accuracy", "tokens", "seconds"}


def test_same_seed_same_curve(whole: Path, tmp_path: Path) -> None:
    assert_same(trained(replace(TINY, root=tmp_path))[0], whole)
    metrics = results(whole)[0]
    half = len(metrics) // 2
    assert [line["tokens"] for line in metrics[:half]] != [line["tokens"] for line in metrics[half:]]


@pytest.mark.parametrize("updates", [1, 3, 8])
def test_an_interrupted_run_goes_on_bit_for_bit(
    updates: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of its first seed before and after a checkpoint, and in its second."""
    config = replace(TINY, root=tmp_path)
    left = updates
    real = Trainer.update

    def update(trainer: Trainer) -> dict[str, float]:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return real(trainer)

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(KeyboardInterrupt):
        trained(config)
    monkeypatch.undo()
    assert_same(trained(replace(config, resume=True))[0], whole)


@pytest.mark.slow
def test_a_killed_command_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "arsm_experiments.sequences", *WORDS, "--root", str(tmp_path), "--resume"]
    folder = tmp_path / "sequences" / whole.name
    for reached in (1, 4):
        with subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                path = folder / "metrics.jsonl"
                if path.exists() and path.read_bytes().count(b"\n") > reached:
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.001)
        assert process.returncode == -signal.SIGKILL
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    assert_same(folder, whole)


@pytest.mark.slow
def test_two_processes_learn_what_one_does_in_two_parts(tmp_path: Path) -> None:
    alone = trained(replace(TINY, parts=2, kl=0.1, root=tmp_path / "alone"))[0]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29871"]
    words = [*torchrun, "-m", "arsm_experiments.sequences", *WORDS, "--parts", "2", "--kl", "0.1"]
    done = subprocess.run([*words, "--root", str(tmp_path / "both")], check=True, capture_output=True, text=True)
    assert_same(tmp_path / "both" / "sequences" / alone.name, alone)
    assert done.stdout.count("Run folders:") == 1, "of two processes, one speaks"


@pytest.mark.parametrize("strategy", ["group:3", "grpo:3", "branch:arsm"])
def test_strategies_learn_within_their_tokens(strategy: str, tmp_path: Path) -> None:
    config = replace(TINY, strategies=(strategy,), seeds=(0,), tokens=3000, share=0.5, root=tmp_path)
    (folder,) = trained(config)
    first, *_, last = read_run(folder).metrics
    per_update = last["tokens"] / last["step"]
    assert 150 < per_update < 600
    assert first["tokens"] == 0
    state = load_checkpoint(folder / "checkpoint.pt")["state"]["trainer"]
    assert state["counters"] == [last["step"], last["tokens"]]


def test_imitation_is_done_once_and_a_run_can_start_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = iter([0.1, 0.35, 0.9])
    monkeypatch.setattr(command, "imitate", lambda policy, *_: reached)
    config = replace(TINY, warm_up=0.3, seeds=(0,), tokens=300, root=tmp_path)
    (first,) = trained(config)
    (second,) = trained(replace(config, strategies=("group:2",)))
    assert next(reached) == 0.9, "two accuracies were asked for, by the first run alone"
    assert read_run(first).metrics[0]["accuracy"] == read_run(second).metrics[0]["accuracy"]
    (third,) = trained(replace(config, name="third", start=first))
    weights = [load_checkpoint(folder / "checkpoint.pt")["state"]["trainer"]["policy"] for folder in (first, third)]
    assert not torch.equal(weights[0]["head.weight"], weights[1]["head.weight"])


def test_imitation_learns() -> None:
    data = generate("digit_sorting", 1000, 0)
    losses, policy = [], new_policy("digit_sorting", size := Size(16, 1, 2, 32, 100, 50), "cpu")
    prompts, answers = data.batch(torch.arange(100))
    for _, reached in zip(range(3), imitate(policy, "digit_sorting", data, size), strict=False):
        losses.append(float(cross_entropy(policy, prompts, answers).detach()))
        assert 0 <= reached <= 1
    assert losses[-1] < 0.8 * losses[0]


def test_a_server_that_dies_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same results as with a server that lives; the run goes on with another one."""
    words = ["sequences", *WORDS, "--engine"]
    with serving() as (_, address):
        assert main([*words, address, "--root", str(tmp_path / "whole")]) == 0
    with serving() as (process, address):
        left = 3
        real = Trainer.update

        def update(trainer: Trainer) -> dict[str, float]:
            nonlocal left
            left -= 1
            if left == 0:
                process.kill()
                process.wait()
            return real(trainer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "update", update)
            capsys.readouterr()
            assert main([*words, address, "--root", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"The engine at {address} does not answer" in said
    assert "The 2 updates until then are kept in" in said
    assert said.count("\n") == 1
    with serving() as (_, address):
        assert main([*words, address, "--root", str(tmp_path), "--resume"]) == 0
    (folder,) = (tmp_path / "sequences").iterdir()
    assert_same(folder, tmp_path / "whole" / "sequences" / folder.name)


@pytest.mark.slow
def test_ray_samples_for_the_command(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    one, two = (
        trained(replace(TINY, engine="ray", workers=workers, root=tmp_path / str(workers)))[0] for workers in (1, 2)
    )
    assert_same(one, two)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sequences", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--strategies", "tree:3"], 'There is no strategy "tree:3"; there are branch:ESTIMATOR, group:N,'),
        (["--strategies", "group:x"], '"group:x" must name a number of answers per prompt, as group:8 does.'),
        (["--strategies", "group:1"], "Group compares at least 2 sequences per prompt"),
        (["--strategies", "branch:rlooo"], 'There is no estimator "rlooo": did you mean "rloo"?'),
        (["--width", "10"], "--width must be a multiple of the 4 heads, but is 10."),
        (["--warm-up", "1"], "--warm-up must be below 1, but is 1.0."),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--kl", "-1"], "--kl must be at least 0"),
        (["--engine", "vllm"], '"vllm" is no address of a server; write http://HOST:PORT.'),
        (["--task", "chain_sum", "--data", "none"], "does not exist; make it with `pip install reasoning-gym` and"),
        (["--start", "none"], "--start must be a run folder or a file of weights, but there is none at none."),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *words, "--root", str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_processes_share_whole_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--parts must be a multiple of the 2 processes, but is 1." in refused(capsys)


def test_weights_of_another_model_are_refused(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--start", str(whole), "--root", str(tmp_path), "--width", "32")
    assert "holds no weights of a transformer for digit_sorting with --width 32" in said
    (tmp_path / "weights.pt").write_bytes(b"none")
    assert "holds no weights" in refused(capsys, "--start", str(tmp_path / "weights.pt"), "--root", str(tmp_path))


def test_names() -> None:
    assert get_args(TaskName) == tuple(TASKS)
    assert named_strategy("branch:arsm") == Branch(arsm.ARSM())
    assert named_strategy("dr-grpo") == Group(8, baseline="mean")
    assert not named_strategy("grpo:4").unbiased


def test_own_questions() -> None:
    data = generate("digit_sorting", 50, 1)
    for prompt, answer in zip(data.prompts.tolist(), data.answers.tolist(), strict=True):
        question = decode(prompt)
        assert question == question[:6] + "="
        assert decode(answer) == "".join(sorted(question[:6]))


def test_spending_learns_what_tokens_buy() -> None:
    spending = Spending.start(Branch(arsm.RLOO(4)), 1000, 0.4, 10)
    for _ in range(60):
        prompts, rollouts = round(spending.prompts()), round(spending.rollouts())
        spending.learn(prompts, 5 * prompts, 5 * prompts + 3 * rollouts, rollouts)
    assert (round(spending.prompts()), round(spending.rollouts())) == (80, 200)
    assert Spending.start(Group(4), 1000, 0.4, 10).prompts() == 25
