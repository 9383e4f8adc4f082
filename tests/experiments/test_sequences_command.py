"""`arsm sequences`: its run folders, killing and resuming, several processes, engines, and what it
refuses.
"""

from __future__ import annotations

import contextlib
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
from arsm_experiments.sequences import learners
from arsm_experiments.sequences.command import Sequences, TaskName
from arsm_experiments.sequences.imitation import imitate
from arsm_experiments.sequences.methods import Size, cross_entropy, new_policy
from arsm_experiments.sequences.named import named_method, named_strategy
from arsm_experiments.sequences.rivals import BestOf, Unsure
from arsm_experiments.sequences.server import Sampler, make_server
from arsm_experiments.sequences.tasks import EOS, TASKS, Data, decode, generate, save
from arsm_experiments.sequences.texts import WRITTEN
from arsm_experiments.sequences.trainer import Trainer
from tests.experiments.test_sequences_server import SHAPE, SIZE, running

TINY = Sequences(
    strategies=("branch:rloo:samples=3",),
    rates=(1e-2,),
    seeds=(3, 4),
    tokens=9000,
    tokens_per_update=1500,
    warm_up=0.0,
    width=16,
    layers=1,
    heads=2,
    tested=16,
    measure_every=2,
    device="cpu",
)
WORDS = [
    "--strategies",
    "branch:rloo:samples=3",
    "--rates",
    "0.01",
    "--seeds",
    "3",
    "4",
    "--tokens",
    "9000",
]
WORDS += [
    "--tokens-per-update",
    "1500",
    "--warm-up",
    "0",
    *SHAPE,
    "--tested",
    "16",
    "--measure-every",
    "2",
]
WORDS += ["--device", "cpu"]
TIMES = {"seconds", "learning_seconds", "tokens_per_second"}


def trained(config: Sequences) -> list[Path]:
    config.check()
    config.run(Console(quiet=True))
    return list(config.runs())


def results(folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Metrics without times, and the last state but its seconds."""
    metrics = [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_run(folder).metrics
    ]
    return metrics, load_checkpoint(folder / "checkpoint.pt")["state"]["trainer"]


def assert_same(folder: Path, other: Path) -> None:
    (metrics, state), (expected, expected_state) = results(folder), results(other)
    assert metrics == expected
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with questions whose answer a random model finds now and then: nothing but the
    end.
    """
    task, folder = TASKS["digit_sorting"], tmp_path_factory.mktemp("data")
    prompts = torch.randint(2, 40, (200, task.prompt_tokens), dtype=torch.uint8)
    save(
        Data(prompts, torch.full((200, task.answer_tokens), EOS, dtype=torch.uint8)),
        folder / "digit_sorting.pt",
    )
    return folder


@pytest.fixture(scope="module")
def tiny(data: Path) -> Sequences:
    return replace(TINY, data=data)


@pytest.fixture(scope="module")
def whole(tiny: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    return trained(replace(tiny, root=tmp_path_factory.mktemp("whole")))[0]


def test_a_run_folder_has_everything(whole: Path) -> None:
    record = read_run(whole)
    assert {path.name.partition(".")[0] for path in whole.iterdir()} == {
        "config",
        "metrics",
        "checkpoint",
        "events",
    }
    assert {line["seed"] for line in record.metrics} == {3, 4}
    for seed in (3, 4):
        lines = [line for line in record.metrics if line["seed"] == seed]
        assert [line["step"] for line in lines][:3] == [0, 2, 4]
        assert lines[0]["tokens"] == 0
        assert 9000 <= lines[-1]["tokens"] < 12000
        assert lines[-1]["tokens_per_second"] > 0
        assert lines[-1]["rollouts"] > 0
        assert max(line["gradient_norm"] for line in lines[1:]) > 0
    chapter = make_chapters([record])["sequences"]
    assert {result.metric for result in chapter.sections[0].results} >= {
        "accuracy",
        "tokens",
        "seconds",
    }


def test_same_seed_same_curve(whole: Path, tiny: Sequences, tmp_path: Path) -> None:
    assert_same(trained(replace(tiny, root=tmp_path))[0], whole)
    metrics = results(whole)[0]
    half = len(metrics) // 2
    assert [line["tokens"] for line in metrics[:half]] != [
        line["tokens"] for line in metrics[half:]
    ]


@pytest.mark.parametrize("updates", [3, 8])
def test_an_interrupted_run_goes_on_bit_for_bit(
    updates: int, whole: Path, tiny: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in its first seed and in its second, an update after a checkpoint."""
    config = replace(tiny, root=tmp_path)
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
def test_a_killed_command_goes_on_bit_for_bit(whole: Path, data: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "arsm_experiments.sequences", *WORDS, "--data", str(data)]
    words += ["--root", str(tmp_path), "--resume"]
    folder = tmp_path / "sequences" / whole.name
    for reached in (1, 4):
        with subprocess.Popen(
            words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
        ) as process:
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
def test_two_processes_learn_what_one_does_in_two_parts(tiny: Sequences, tmp_path: Path) -> None:
    alone = trained(replace(tiny, parts=2, kl=0.1, root=tmp_path / "alone"))[0]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29871",
    ]
    words = [
        *torchrun,
        "-m",
        "arsm_experiments.sequences",
        *WORDS,
        "--parts",
        "2",
        "--kl",
        "0.1",
        "--data",
        str(tiny.data),
    ]
    done = subprocess.run(
        [*words, "--root", str(tmp_path / "both")], check=True, capture_output=True, text=True
    )
    assert_same(tmp_path / "both" / "sequences" / alone.name, alone)
    assert done.stdout.count("Run folders:") == 1, "of two processes, one speaks"


@pytest.mark.parametrize("strategy", ["grpo:3", "branch:arsm", "chance"])
def test_strategies_learn_within_their_tokens(
    strategy: str, tiny: Sequences, tmp_path: Path
) -> None:
    config = replace(tiny, strategies=(strategy,), seeds=(0,), root=tmp_path)
    (folder,) = trained(config)
    first, *_, last = read_run(folder).metrics
    per_update = last["tokens"] / last["step"]
    assert 250 < per_update < 3000
    assert first["tokens"] == 0
    state = load_checkpoint(folder / "checkpoint.pt")["state"]["trainer"]
    assert state["counters"][:2] == [last["step"], last["tokens"]]


def test_imitation_is_done_once_and_a_run_can_start_from_another(
    tiny: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = iter([0.1, 0.35, 0.9])
    monkeypatch.setattr(learners, "imitate", lambda policy, *_: reached)
    config = replace(tiny, warm_up=0.3, seeds=(0,), tokens=4000, root=tmp_path)
    (first,) = trained(config)
    (second,) = trained(replace(config, strategies=("group:2",)))
    assert next(reached) == 0.9, "two accuracies were asked for, by the first run alone"
    assert read_run(first).metrics[0]["accuracy"] == read_run(second).metrics[0]["accuracy"]
    (kept,) = (tmp_path / "sequences" / "starts").iterdir()
    before, after = (
        learners.start_from(path, "digit_sorting", SIZE, "cpu").head.weight
        for path in (kept, first)
    )
    assert not torch.equal(before, after)
    policies = []
    monkeypatch.setattr(
        Trainer,
        "scores",
        lambda trainer, *_: policies.append(trainer.policy.head.weight.clone()) or torch.zeros(2),
    )
    trained(replace(config, name="third", start=first))
    assert torch.equal(policies[0], after)


def test_imitation_learns() -> None:
    data = generate("digit_sorting", 1000, 0)
    losses, policy = [], new_policy("digit_sorting", size := Size(16, 1, 2, 32, 100, 50), "cpu")
    prompts, answers = data.batch(torch.arange(100))
    for _, reached in zip(range(3), imitate(policy, "digit_sorting", data, size), strict=False):
        losses.append(float(cross_entropy(policy, prompts, answers).detach()))
        assert 0 <= reached <= 1
    assert losses[-1] < losses[0] - 0.1


def fresh_server() -> contextlib.AbstractContextManager[str]:
    """A server with weights of its own, and its address."""
    policy = new_policy("digit_sorting", SIZE, "cpu")
    return running(make_server(Sampler(policy, policy)))


def test_a_server_that_dies_loses_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same results as with a server that lives; the run goes on with another one."""
    words = ["sequences", *WORDS, "--data", str(data), "--engine"]
    with fresh_server() as address:
        assert main([*words, address, "--root", str(tmp_path / "whole")]) == 0
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(fresh_server())
        left = 3
        real = Trainer.update

        def update(trainer: Trainer) -> dict[str, float]:
            nonlocal left
            left -= 1
            if left == 0:
                stack.close()
            return real(trainer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "update", update)
            capsys.readouterr()
            assert main([*words, address, "--root", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"The engine at {address} does not answer" in said
    assert "The 2 updates until then are kept in" in said
    assert said.count("\n") == 1
    with fresh_server() as address:
        assert main([*words, address, "--root", str(tmp_path), "--resume"]) == 0
    (folder,) = (tmp_path / "sequences").iterdir()
    assert_same(folder, tmp_path / "whole" / "sequences" / folder.name)


@pytest.mark.slow
def test_ray_samples_for_the_command(tiny: Sequences, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    one, two = (
        trained(replace(tiny, engine="ray", workers=workers, root=tmp_path / str(workers)))[0]
        for workers in (1, 2)
    )
    assert_same(one, two)


def test_a_folder_that_exists_is_refused_before_anything_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learners, "imitate", lambda *_: pytest.fail("it imitates"))
    (tmp_path / "sequences" / Sequences().folder_name(Sequences().config("group:2", 3e-4))).mkdir(
        parents=True
    )
    assert "exists; pass --resume to continue" in refused(
        capsys, "--strategies", "group:2", "--root", str(tmp_path)
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sequences", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--strategies", "tree:3"],
            'There is no strategy "tree:3"; there are branch:ESTIMATOR, chance:ESTIMATOR, group:N,',
        ),
        (
            ["--strategies", "group:x"],
            '"group:x" must name a number of answers per prompt, at least 2',
        ),
        (["--strategies", "group:1"], "answers per prompt, at least 2"),
        (["--strategies", "branch:rlooo"], 'There is no estimator "rlooo": did you mean "rloo"?'),
        (["--width", "10"], "--width must be a multiple of the 4 heads, but is 10."),
        (["--warm-up", "1"], "--warm-up must be below 1, but is 1.0."),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--kl", "-1"], "--kl must be at least 0"),
        (["--engine", "vllm"], '"vllm" is no address of a server; write http://HOST:PORT.'),
        (
            ["--task", "chain_sum", "--data", "none"],
            "There is no none/chain_sum.pt; make it with `pip install reasoning-gym` and",
        ),
        (
            ["--task", "chain"],
            "--task chain is written in words and needs --model, such as smollm2.",
        ),
        (["--lora", "4"], "--lora is for a model of transformers; name one with --model."),
        (
            ["--start", "none"],
            "--start must be a run folder or a file of weights, but there is none at none.",
        ),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, *words, "--root", str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_processes_share_whole_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--parts must be a multiple of the 2 processes, but is 1." in refused(capsys)


def test_weights_of_another_model_are_refused(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--root", str(tmp_path), "--data", str(data)]
    said = refused(capsys, "--start", str(whole), *where, "--width", "32")
    assert "holds no weights of a transformer for digit_sorting with --width 32" in said
    (tmp_path / "weights.pt").write_bytes(b"none")
    assert "holds no weights" in refused(capsys, "--start", str(tmp_path / "weights.pt"), *where)


def test_names() -> None:
    assert get_args(TaskName) == (*TASKS, *WRITTEN)
    branch = named_strategy("branch:arsm:references=3")
    assert isinstance(branch, Branch)
    assert branch.estimator == arsm.ARSM(references=3)
    assert named_strategy("dr-grpo") == Group(arsm.DrGRPO(8))
    assert not named_strategy("grpo:4").unbiased
    assert named_strategy("unsure:2:8") == Unsure(2, 8)
    assert named_strategy("raft:4") == BestOf(4)
    assert (named_method("4*grpo:8").epochs, named_method("ppo").epochs) == (4, 1)


def test_own_questions() -> None:
    data = generate("digit_sorting", 50, 1)
    for prompt, answer in zip(data.prompts.tolist(), data.answers.tolist(), strict=True):
        question = decode(prompt)
        assert question == question[:6] + "="
        assert decode(answer) == "".join(sorted(question[:6]))
