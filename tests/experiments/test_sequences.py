"""The experiment's parts: tasks, the transformer and its cache, rivals, and the commands on a tiny
model.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arsm import sequences
from arsm_experiments.runs import lines
from arsm_experiments.sequences import curves, likeliest, measure, schedule, speed, tasks
from arsm_experiments.sequences.curves import GOALS, Measurement, best_choice, finished
from arsm_experiments.sequences.likeliest import Likeliest
from arsm_experiments.sequences.methods import (
    METHODS,
    SMALL,
    Critics,
    new_policy,
    save_policy,
)
from arsm_experiments.sequences.rivals import Critic, ValueHead, VinePPO
from arsm_experiments.sequences.transformer import Transformer
from tests.statistics import deviations
from tests.tables import Setting, Table


def test_cached_and_uncached_logits_agree() -> None:
    model = Transformer(11, 12, width=16, layers=2, heads=2).double()
    generator = torch.Generator().manual_seed(0)
    prompts, tokens = (torch.randint(11, (5, n), generator=generator) for n in (4, 8))
    whole = model.logits(prompts, tokens)
    rows = torch.tensor([3, 0, 3, 4])
    state = model.start(prompts)
    for t in range(8):
        torch.testing.assert_close(state.logits, whole[:, t])
        kept = state.cache.clone()
        branch = model.select(state, rows)
        torch.testing.assert_close(branch.logits, whole[rows, t])
        if t < 7:
            torch.testing.assert_close(
                model.step(branch, tokens[rows, t]).logits, whole[rows, t + 1]
            )
            assert torch.equal(state.cache, kept), (
                "a branch must not write into the state that it left"
            )
            state = model.step(state, tokens[:, t])


def test_slots_give_the_same_tokens() -> None:
    torch.manual_seed(0)
    model = Transformer(11, 13, width=16, layers=2, heads=2).double()
    prompts = torch.randint(11, (5, 4))
    table = torch.rand(100, 9, 3, dtype=torch.float64)

    def noise(sequence: Tensor, step: Tensor) -> Tensor:
        return table[sequence, step.clamp_max(8)]

    row, decoding = torch.arange(5).repeat_interleave(4), sequences.Decoding(9, 2)
    expected = sequences.Waves(model).sample(prompts, None, row, decoding, 3, noise=noise)
    decoder = sequences.decoder(model, 3)
    assert isinstance(decoder, sequences.Slots)
    assert torch.equal(
        decoder.sample(prompts, None, row, decoding, 3, noise=noise).tokens, expected.tokens
    )
    with pytest.raises(ValueError, match="takes prompts of one length"):
        decoder.sample(prompts, prompts >= 0, row, decoding, 3, noise=noise)
    with pytest.warns(UserWarning, match="it samples with its own weights"):
        assert isinstance(sequences.decoder(model, dtype=torch.bfloat16), sequences.Waves)


def value(prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    before = torch.cat([prompts[:, 1:2], tokens[:, :-1]], -1)
    return 3 + torch.sin(before.cumsum(-1).double())


@pytest.mark.parametrize("strategy", [ValueHead(value), VinePPO(2)], ids=["value head", "VinePPO"])
def test_rivals_are_unbiased(strategy: sequences.Strategy) -> None:
    setting = Setting(eos=1, temperature=0.8)
    assert strategy.unbiased
    assert deviations(setting.estimates(strategy, 6000), setting.exact()).max() < 1


def test_a_short_trace_is_biased() -> None:
    setting = Setting(eos=1)
    strategy = ValueHead(value, trace=0.5)
    assert not strategy.unbiased
    assert deviations(setting.estimates(strategy, 6000), setting.exact()).max() > 1


@pytest.mark.parametrize("tries", [0, 2])
def test_likeliest_answers_and_the_rest_are_unbiased(tries: int) -> None:
    """Rewards of 0 are frequent, so that some greedy answers are tried again and some are not."""
    rows, vocabulary, width = 12_000, 3, 3
    table = Table(rows, vocabulary)
    prompts = Setting().prompts(rows)[0]

    def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
        return ((tokens * torch.tensor([1, 3, 9])).sum(-1) % 4 == prompts[:, 0] % 2 + 2).float()

    method = Likeliest(
        ValueHead(lambda prompts, tokens, mask=None: torch.zeros(tokens.shape)),
        tries,
        solved=0.5,
        unsolved=0.8,
    )
    out = likeliest.estimate(
        method,
        sequences.Recompute(table),
        prompts,
        reward,
        max_tokens=width,
        eos=1,
        rows=rows,
        generator=torch.Generator().manual_seed(0),
    )
    assert 0 < out.rewards.mean() < 1
    estimates = torch.autograd.grad(out.value.sum(), table.table)[0].unflatten(0, (-1, 2))
    setting = Setting(vocabulary, width, eos=1)
    every = torch.tensor(list(product(range(vocabulary), repeat=width)))
    every = every.masked_fill(~sequences.live_tokens(every, 1), 1).unique(dim=0)
    exact = Table(2, vocabulary)
    model, total = sequences.Recompute(exact), torch.zeros((), dtype=torch.float64)
    for row in range(2):
        some = prompts[row : row + 1].repeat(len(every), 1)
        total = total + (setting.log_p(model, some, None, every).exp() * reward(some, every)).sum()
    assert deviations(estimates, torch.autograd.grad(total, exact.table)[0]).max() < 1


@pytest.mark.parametrize(
    ("task", "question", "answer", "expected"),
    [
        (
            "number_sorting",
            "Sort these numbers in descending order: 56.0, 5.0\nPlease follow",
            "['56.0', '5.0']",
            (">56 5", "56 5"),
        ),
        (
            "spell_backward",
            "Spell this word backward (example: sun -> nus): Overtrim",
            "mirtrevO",
            ("overtrim", "mirtrevo"),
        ),
        (
            "chain_sum",
            "State the final answer to the following arithmetic problem: 184 - 442 =",
            "-258",
            ("184-442", "-258"),
        ),
        (
            "spiral_matrix",
            "what is the list of elements in spiral order?\n7 3\n4 1\n",
            "7 3 1 4",
            ("7341", "7314"),
        ),
        (
            "number_filtering",
            "Keep all numbers smaller than 38 in this list: ['14', '-49', '52']\nReturn",
            "['14', '-49']",
            ("K<38 14 -49 52", "14 -49"),
        ),
    ],
)
def test_questions_are_shortened(
    task: str, question: str, answer: str, expected: tuple[str, str]
) -> None:
    found = tasks.TASKS[task].question(question), tasks.TASKS[task].answer(answer)
    assert found == expected
    for text in found:
        assert tasks.decode([*tasks.encode(text), tasks.EOS, tasks.EOS]) == text


def test_exact_match() -> None:
    prompts, answers = (
        torch.tensor([[3, 4], [5, 6], [4, 3]]),
        torch.tensor([[7, 1], [8, 1], [9, 1]]),
    )
    reward = tasks.ExactMatch(prompts, answers)
    assert reward(prompts, answers).tolist() == [1, 1, 1]
    assert reward(prompts[[1, 1, 2]], torch.tensor([[8, 1], [7, 1], [9, 1]])).tolist() == [1, 0, 1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions whose answer is often found by chance: a single end of sequence."""
    task = tasks.TASKS["spell_backward"]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        2, 40, (200, task.prompt_tokens), generator=generator, dtype=torch.uint8
    )
    answers = torch.full((200, task.answer_tokens), tasks.EOS, dtype=torch.uint8)
    tasks.save(tasks.Data(prompts, answers), tmp_path / "data" / "spell_backward.pt")
    return tmp_path


def run(main: object, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    main()  # pyright: ignore[reportCallIssue]


def test_variances_are_measured_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "group 2",
        "grpo 8",
        "value head",
        "vineppo 2",
        "group 2, fresh prompts",
        "branch rloo 16, critic",
    ]
    words = ["spell_backward", "--data", data / "data", "--out", data, "--device", "cpu", "--small"]
    words += ["--levels", 0.45, "--methods"]
    run(measure.main, monkeypatch, *words, *names[:2])
    run(measure.main, monkeypatch, *words, *names)
    records = lines.read(data / "variance-spell_backward.jsonl")
    assert [record["method"] for record in records] == names
    assert all(record["trace"] >= 0 and record["tokens"] > 0 for record in records)
    assert records[-1]["trace"] > 0
    assert set(names) - {"group 2, fresh prompts"} <= set(METHODS)


def test_a_variance_is_that_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(24, 50, generator=torch.Generator().manual_seed(0)) + 3
    drawn = iter(gradients)
    monkeypatch.setattr(measure, "one_gradient", lambda *_: (next(drawn), 7))
    policy = Transformer(tasks.VOCABULARY, 9, width=8, layers=1, heads=1)
    critics = Critics(Critic(policy, actions=False), Critic(policy, actions=True))
    data = tasks.Data(torch.zeros(8, 11, dtype=torch.uint8), torch.zeros(8, 11, dtype=torch.uint8))
    size = replace(SMALL, repeats=24, patience=60)
    record, mean = measure.measure(
        "group 2", critics, policy, "spell_backward", data, size, "cpu", 64, None, 0
    )
    assert record["repeats"] == 24
    assert record["tokens"] == 7
    assert record["trace"] == pytest.approx(float(gradients.var(0).sum()), rel=1e-5)
    # of normal gradients
    assert record["trace_error"] == pytest.approx(50 * (2 / 50 / 24) ** 0.5, rel=0.4)
    assert torch.allclose(mean, gradients.mean(0).double(), atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    policy = Transformer(tasks.VOCABULARY, 9, width=8, layers=1, heads=1)
    critics = Critics(Critic(policy, actions=False), Critic(policy, actions=True))
    prompts = torch.randint(2, 40, (4, 5))
    gradient, tokens = measure.one_gradient(
        METHODS[name](critics),
        policy,
        prompts,
        lambda prompts, tokens: (tokens[:, 0] % 2).float(),
        torch.Generator().manual_seed(2),
        64,
        4,
    )
    assert gradient.abs().max() > 0
    assert tokens >= 4


def test_a_worker_does_every_job_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "spell_backward": schedule.Setting(
            (100, 200), (1e-3, 1e-4), longest=800, lost=400, seeds=(1,)
        )
    }
    monkeypatch.setattr(schedule, "FIRST", ("likeliest", "group", "value head"))
    monkeypatch.setattr(schedule, "LAST", ("branch rloo 64, chance",))
    monkeypatch.setattr(schedule, "MEASURED", ("group 2", "likeliest"))
    for level in measure.LEVELS:
        save_policy(
            new_policy("spell_backward", SMALL, "cpu"),
            measure.checkpoint_path(data, "spell_backward", level),
        )
    (data / "claims").mkdir()
    path = data / "curves-spell_backward.jsonl"

    def work() -> list[Measurement]:
        schedule.Worker(data / "data", data, "cpu", SMALL, settings, time.time() + 100).work()
        return lines.read(path)

    records = work()
    ends = [record for record in records if record["end"]]
    grid = {(size, rate) for size in (100, 200) for rate in (1e-3, 1e-4)}
    assert len(ends) == 4 * (4 + 1)
    for name in ("likeliest", "group 4", "value head", "branch rloo 64, chance"):
        tried = {chosen(end): end for end in ends if (end["method"], end["seed"]) == (name, 0)}
        (reported,) = (end for end in ends if (end["method"], end["seed"]) == (name, 1))
        assert set(tried) == grid
        assert tried[chosen(reported)]["accuracy"] == max(end["accuracy"] for end in tried.values())
    assert all(
        end["tokens"] >= 800 or end["accuracy"] < 0.05 or end["accuracy"] >= 0.9 for end in ends
    )
    assert len(lines.read(data / "variance-spell_backward.jsonl")) == 2 * len(measure.LEVELS)
    with path.open("a") as file:
        file.write(json.dumps(records[0])[:20])  # a run that was killed while it wrote
    for claim in (data / "claims").iterdir():
        claim.unlink()
    assert work() == records, "what is done is not done again"


def test_records_go_on_after_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines.add(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    lines.add(path, {"a": 3})
    lines.add(path, {"a": 4})
    assert lines.read(path) == [{"a": 1}, {"a": 3}, {"a": 4}]


def chosen(record: Measurement) -> tuple[int, float]:
    return record["per_update"], record["rate"]


def curve(
    rate: float, *points: tuple[int, float], size: int = 400, seed: int = 0
) -> list[Measurement]:
    """A finished run through these tokens and accuracies."""
    always = {
        "task": "spell_backward",
        "start": 0.1,
        "method": "group 8",
        "seed": seed,
        "rate": rate,
        "seconds": 1.0,
    }
    return [
        {**always, "per_update": size, "step": 5 * number, "tokens": tokens, "accuracy": accuracy}
        | {"end": number == len(points)}
        for number, (tokens, accuracy) in enumerate([(0, 0.1), *points])
    ]


def test_the_choice_is_the_first_to_reach_the_goal_or_else_the_most_accurate() -> None:
    fast = curve(3e-3, (6_000, 0.75), (20_000, 0.3))
    steady = curve(1e-3, (8_000, 0.65), (20_000, 0.85))
    small = curve(1e-3, (8_000, 0.4), (20_000, 0.8), size=100)
    trials = finished([*fast, *steady, *small])[0.1, "group 8", 0]
    assert [best_choice(trials, goal) for goal in (0.7, 0.8, 0.9)] == [
        (400, 3e-3),
        (400, 1e-3),
        (400, 1e-3),
    ]


def test_a_run_that_was_cut_short_does_not_hide_the_finished_one() -> None:
    whole, again = (
        curve(1e-3, (8_000, 0.65), (20_000, 0.85)),
        curve(1e-3, (8_000, 0.6), (16_000, 0.7), (20_000, 0.9)),
    )
    assert finished([*whole, *again[:-1]]) == {(0.1, "group 8", 0): {(400, 1e-3): whole}}
    assert finished([*whole, *again]) == {(0.1, "group 8", 0): {(400, 1e-3): again}}


@pytest.fixture
def worker(data: Path) -> schedule.Worker:
    """Of two rates."""
    settings = {
        "spell_backward": schedule.Setting((400,), (1e-3, 3e-3), longest=300_000, lost=20_000)
    }
    return schedule.Worker(data / "data", data, "cpu", SMALL, settings, time.time() + 100)


def test_a_trial_ends_when_it_can_no_longer_win(
    worker: schedule.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one has reached the last goal, and so every goal, with fewer tokens."""
    started: list[Any] = []
    monkeypatch.setattr(schedule, "train", lambda trial, ending, *_: started.append(ending))
    path = worker.out / "curves-spell_backward.jsonl"
    trials = [
        schedule.Job("train", "spell_backward", method="group 8", choice=(400, rate))
        for rate in (1e-3, 3e-3)
    ]
    worker.do(trials[1])
    (ending,) = started
    assert (ending.goal, ending.tokens(), ending.lost) == (GOALS[-1], 300_000, 20_000)
    for record in curve(1e-3, (60_000, 0.85)):
        lines.add(path, record)
    assert ending.tokens() == 300_000
    worker.do(trials[0])
    assert len(started) == 2, "a trial that ended before its goals were decided runs again"
    for record in curve(1e-3, (60_000, 0.85), (70_000, 0.95)):
        lines.add(path, record)
    assert ending.tokens() == pytest.approx(65_000), "a trial that runs already ends then"
    worker.do(trials[0])
    assert len(started) == 2


def test_every_goal_is_trained_for_with_its_own_choice(
    worker: schedule.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        schedule,
        "train",
        lambda trial, ending, *_: started.append(
            (trial.rate, ending.goal, ending.tokens(), ending.lost)
        ),
    )
    reported = [
        schedule.Job("train", "spell_backward", method="group 8", seed=1, goal=goal)
        for goal in GOALS
    ]
    for record in curve(3e-3, (6_000, 0.75), (60_000, 0.3)):
        lines.add(worker.out / "curves-spell_backward.jsonl", record)
    assert not any(map(worker.ready, reported)), "the other rate was not tried"
    for record in curve(1e-3, (8_000, 0.65), (20_000, 0.95)):
        lines.add(worker.out / "curves-spell_backward.jsonl", record)
    for job in reported:
        worker.do(job)
    assert started == [(3e-3, 0.7, 300_000, math.inf), (1e-3, 0.9, 300_000, math.inf)], (
        "one run for several goals"
    )


def test_a_run_ends_at_its_goal_at_its_limit_or_when_it_is_lost(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, path = data / "weights.pt", data / "curve.jsonl"
    save_policy(new_policy("spell_backward", SMALL, "cpu"), weights)
    questions = tasks.load(data / "data" / "spell_backward.pt", "cpu")

    def ends(accuracies: list[float], goal: float, tokens: float, lost: float) -> tuple[int, float]:
        values = iter(accuracies)
        monkeypatch.setattr(curves.Trainer, "score", lambda *_: next(values))
        trial = curves.Trial("spell_backward", 0.1, "group 2", 100, 1e-4, 1)
        ending = curves.Ending(goal, lambda: tokens, lost)
        curves.train(trial, ending, questions, SMALL, weights, path, "cpu", 64)
        last = lines.read(path)[-1]
        assert last["end"]
        return last["step"], last["accuracy"]

    assert ends([0.1, 0.6, 0.7, 0.9], 0.7, 1e9, math.inf) == (10, 0.7)
    assert ends([0.1, 0.01, 0.01, 0.8], 0.7, 1e9, math.inf) == (15, 0.8)
    assert ends([0.1, 0.01], 0.7, 1e9, 100) == (5, 0.01)
    assert ends([0.1, 0.2, 0.3], 0.7, 100, math.inf)[0] <= 5


def test_checkpoints_are_made_only_as_far_as_something_starts_from_them() -> None:
    settings = {task: schedule.SETTINGS[task] for task in ("spiral_matrix", "small_sorting")}
    measured = {("spiral_matrix", level) for level in measure.LEVELS} | {("small_sorting", 0.8)}
    found = schedule.jobs(settings, measured)
    assert [(job.kind, job.task, job.level) for job in found[:4]] == [
        ("pretrain", "spiral_matrix", 0.1),
        ("pretrain", "small_sorting", 0.45),
        ("variance", "small_sorting", 0.1),
        ("variance", "small_sorting", 0.45),
    ]
    assert {job.kind for job in found[4:]} == {"train"}
    assert len(found) == len({job.name() for job in found})


@pytest.mark.slow  # imports transformers
def test_speed_is_measured(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(speed.main, monkeypatch, "--out", data, "--device", "cpu", "--small")
    records = lines.read(data / "speed.jsonl")
    assert {record["measured"] for record in records} == {"decoding", "planning"}
    assert {record.get("model") for record in records} == {"own", "transformers", None}
