"""Levels, noise, trials and page of the comparison on a pretrained model, with a tiny one."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arsm import RLOO
from arsm.sequences import Branch
from arsm_experiments.report.pages import (
    language_model_candidates,
    language_model_history,
    language_model_levels,
    language_model_training,
)
from arsm_experiments.report.pages import trl as trl_page
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs.archive import read_archive
from arsm_experiments.runs.reader import read_header, read_run
from arsm_experiments.sequences import language_model, levels, noise, texts
from arsm_experiments.sequences import language_model_rules as rules
from arsm_experiments.sequences.language_model_rules import Noise, Trained
from arsm_experiments.sequences.levels import level_path, reach
from arsm_experiments.sequences.pretrained import load_pretrained
from arsm_experiments.sequences.texts import Texts, Written, load_texts
from arsm_experiments.sequences.trainer import Trainer, weights
from arsm_experiments.sequences.trials import EXPERIMENT, Job, Plan, Worker, chosen_rate, open_jobs
from tests.experiments.tiny_llama import save_tiny_llama

pytest.importorskip("transformers", reason="transformers is in the extra `transformers`")
TASK = "digits"
PLAN = Plan(TASK, tokens=240, tokens_per_update=60, measure_every=1, reported=6, chosen_on=4)


def count_digits(completions: Sequence[Any], **_: Any) -> list[float]:
    return [sum(character in "0123456789" for character in text) / 6 for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def tiny_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers of digits."""
    records = [{"prompt": f"Say {n}", "completion": "0123"} for n in range(80)]
    monkeypatch.setitem(texts.WRITTEN, TASK, Written(lambda _: records, count_digits, 6))


def worker(folder: Path, root: Path, seconds: float = 600) -> Worker:
    pretrained = load_pretrained(str(folder))
    found = load_texts(pretrained.tokenizer, TASK, root)
    deadline = time.monotonic() + seconds
    return Worker(PLAN, root, pretrained, found, "cpu", None, 8, 64, deadline)


METHODS, RATES, SEEDS = ("branch:rloo:samples=3", "2*grpo:2"), (1e-3, 1e-2), (1,)


def test_levels_are_reached_once(folder: Path, tmp_path: Path) -> None:
    def go() -> list[dict[str, Any]]:
        return reach(
            TASK,
            str(folder),
            tmp_path,
            data=tmp_path,
            levels=(0.0, 0.4),
            device="cpu",
            precision=None,
            seconds=60,
            size=levels.FineTuning(rate=1e-2, batch=8, every=4, measured=8),
        )

    records = go()
    assert [record["level"] for record in records] == [0.0, 0.4]
    assert records[1]["accuracy"] >= 0.4
    assert records[1]["steps"] >= records[0]["steps"]
    before = level_path(tmp_path, TASK, 0.4).stat().st_mtime_ns
    assert go() == records
    assert level_path(tmp_path, TASK, 0.4).stat().st_mtime_ns == before


def test_every_method_has_a_line_per_round(folder: Path, tmp_path: Path) -> None:
    pretrained = load_pretrained(str(folder))
    found = load_texts(pretrained.tokenizer, TASK, tmp_path)
    how = noise.Measuring(
        device="cpu",
        precision=None,
        seconds=200.0,
        prompts=2,
        repeats=3,
        rounds=1,
        critic_steps=1,
        critic_rows=4,
    )
    noise.measure(TASK, "0.1", pretrained.module, found, tmp_path, how)
    path = tmp_path / f"noise-{TASK}-0.1.jsonl"
    lines = language_model.parse_lines(path.read_bytes())
    assert [line["method"] for line in lines] == list(noise.METHODS)
    assert all(line["variance"] > 0 and line["tokens"] > 0 for line in lines)
    noise.measure(TASK, "0.1", pretrained.module, found, tmp_path, how)
    assert language_model.parse_lines(path.read_bytes()) == lines, "nothing is measured twice"


def test_fixed_questions_wait_for_their_round_and_failures_cost_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrained = load_pretrained(str(folder))
    found = load_texts(pretrained.tokenizer, TASK, tmp_path)
    monkeypatch.setitem(noise.METHODS, "branch 8", lambda _: 1 / 0)
    names = ["branch 8", "group 2", "group 2, fresh"]
    options: dict[str, Any] = {"prompts": 2, "repeats": 3, "rounds": 2, "fixed_from": 1}
    how = noise.Measuring("cpu", None, 200.0, names, **options)
    noise.measure(TASK, "0.3", pretrained.module, found, tmp_path, how)
    lines = [json.loads(line) for line in (tmp_path / f"noise-{TASK}-0.3.jsonl").open()]
    measured = [(line["method"], line["round"]) for line in lines]
    assert measured == [("group 2, fresh", 0), ("group 2", 1), ("group 2, fresh", 1)]


def test_fresh_questions_differ_from_estimate_to_estimate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrained = load_pretrained(str(folder))
    found = load_texts(pretrained.tokenizer, TASK, tmp_path)
    names = ["group 2", "group 2, fresh"]
    how = noise.Measuring("cpu", None, 200.0, names, prompts=3, repeats=4, rounds=1)
    asked: list[list[int]] = []
    real = Texts.ask

    def ask(self: Texts, rows: torch.Tensor, device: torch.device | str = "cpu") -> Any:
        asked.append(rows.tolist())
        return real(self, rows, device)

    monkeypatch.setattr(Texts, "ask", ask)
    noise.measure(TASK, "0.3", pretrained.module, found, tmp_path, how)
    lines = [json.loads(line) for line in (tmp_path / f"noise-{TASK}-0.3.jsonl").open()]
    assert [line["method"] for line in lines] == names
    # the accuracy's questions, those that stay fixed, then others for every estimate
    assert len(asked) == 2 + how.repeats
    assert len({tuple(rows) for rows in asked[2:]}) > 1


@pytest.fixture(scope="module")
def root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, without an interruption."""
    where = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        records = [{"prompt": f"Say {n}", "completion": "0123"} for n in range(80)]
        patch.setitem(texts.WRITTEN, TASK, Written(lambda _: records, count_digits, 6))
        worker(folder, where).work(METHODS, RATES, SEEDS)
    return where


def test_trials_come_first_and_the_best_rate_gets_the_seeds(root: Path) -> None:
    folders = {path.name: path for path in (root / EXPERIMENT).iterdir()}
    assert len(folders) == len(METHODS) * (len(RATES) + len(SEEDS))
    for method in METHODS:
        own = [read_run(root / EXPERIMENT / Job(method, rate, 0).name(PLAN)) for rate in RATES]
        fresh = root / EXPERIMENT / Job(method, chosen_rate(own), 1).name(PLAN)
        assert len(json.loads((fresh / "scores.json").read_bytes())) == PLAN.reported
        assert len(json.loads((own[0].folder / "scores.json").read_bytes())) == PLAN.chosen_on
    assert open_jobs(PLAN, root, METHODS, RATES, SEEDS) == ([], False)
    assert all(
        sum(f.stat().st_size for f in path.glob("*.json*")) < 20_000 for path in folders.values()
    )
    assert not list(root.rglob("checkpoint.pt"))


def test_a_run_that_is_cut_goes_on_as_if_it_was_not(
    folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(METHODS[0], RATES[0], 0)
    late = worker(folder, tmp_path, seconds=600)
    real = Trainer.update

    def update(trainer: Trainer) -> dict[str, float]:
        # the time is over in the middle of the second update
        object.__setattr__(late, "deadline", time.monotonic() + (0 if trainer.updates else 600))
        return real(trainer)

    monkeypatch.setattr(Trainer, "update", update)
    late.train(job, 8)
    monkeypatch.undo()
    cut = tmp_path / EXPERIMENT / job.name(PLAN)
    assert not read_header(cut).get("finished")
    assert (cut / "checkpoint.pt").exists()
    records = [{"prompt": f"Say {n}", "completion": "0123"} for n in range(80)]
    monkeypatch.setitem(texts.WRITTEN, TASK, Written(lambda _: records, count_digits, 6))
    worker(folder, tmp_path).train(job, 8)
    whole = root / EXPERIMENT / job.name(PLAN)
    assert (cut / "scores.json").read_bytes() == (whole / "scores.json").read_bytes()
    for ours, theirs in zip(read_run(cut).metrics, read_run(whole).metrics, strict=True):
        apart = ("seconds", "learning_seconds", "tokens_per_second")
        assert {k: v for k, v in ours.items() if k not in apart} == {
            k: v for k, v in theirs.items() if k not in apart
        }


def test_a_run_that_fails_holds_nobody_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Worker.train

    def train(worker: Worker, job: Job, micro_batch: int) -> None:
        if job.rate == RATES[1]:
            raise FloatingPointError("The gradient is not finite.")
        real(worker, job, micro_batch)

    monkeypatch.setattr(Worker, "train", train)
    worker(folder, tmp_path).work(METHODS[:1], RATES, SEEDS)
    assert open_jobs(PLAN, tmp_path, METHODS[:1], RATES, SEEDS) == ([], False)
    failed = tmp_path / EXPERIMENT / Job(METHODS[0], RATES[1], 0).name(PLAN)
    assert "not finite" in (failed / "failure.txt").read_text()
    fresh = tmp_path / EXPERIMENT / Job(METHODS[0], RATES[0], SEEDS[0]).name(PLAN)
    assert (fresh / "scores.json").exists()


def test_two_workers_never_share_a_job(folder: Path, tmp_path: Path) -> None:
    job = Job(METHODS[0], RATES[0], 0)
    from arsm_experiments.sequences.trials import claimed

    with claimed(tmp_path / "locks" / job.name(PLAN)) as mine:
        assert mine
        with claimed(tmp_path / "locks" / job.name(PLAN)) as second:
            assert not second


def lines_of(costs: dict[str, float], rounds: int = 2) -> list[dict[str, Any]]:
    """Some rounds per method."""
    rest = {"tokens": 10.0, "tokens_error": 0.0, "repeats": 5, "unbiased": True, "seconds": 1.0}
    rest |= {"memory": None, "accuracy": 0.5, "hardware": "H200", "commit": "1234567"}
    return [
        {"method": name, "round": n, "variance": cost / 10, "variance_error": cost / 100, **rest}
        for name, cost in costs.items()
        for n in range(rounds)
    ]


COSTS = {"group 8": 100.0, "group 16": 80.0, "token baseline 8": 90.0, "branch 8": 20.0}
COSTS |= {"branch 32": 10.0}


def test_the_noise_chooses_sizes_and_ratios_have_intervals() -> None:
    rows = rules.read_noise(lines_of(COSTS))
    chosen = ["branch:rloo:samples=32", "4*branch:rloo:samples=32", "group:16"]
    assert rules.choose(rows)[:3] == chosen
    afresh = rules.read_noise(lines_of(COSTS | {"branch 2, fresh": 3.0, "group 4, fresh": 5.0}))
    chosen = ["branch:rloo:samples=2", "4*branch:rloo:samples=2", "group:4"]
    assert rules.choose(afresh)[:3] == chosen
    by_name = {row.method: row for row in rows}
    best = rules.best_rival(rows)
    assert best is not None
    assert best.method == "group 16"
    assert rules.best_rival(rows, fresh=True) is None
    best = rules.best_rival(afresh, fresh=True)
    assert best is not None
    assert best.method == "group 4, fresh"
    value, error = rules.ratio(by_name["branch 8"], by_name["group 16"])
    assert value == pytest.approx(0.25)
    # each cost has an error of a tenth, over two rounds
    assert error == pytest.approx(0.25 * 0.1)
    assert rules.ratio(by_name["group 16"], by_name["group 16"]) == (1, 0)
    assert isinstance(rows[0], Noise)


def trained(method: str, seed: int, scores: list[float], finals: list[float]) -> Trained:
    metrics = [
        {"tokens": 100 * i, "learning_seconds": float(i), "accuracy": x}
        for i, x in enumerate(finals)
    ]
    return Trained(method, method, 1e-5, seed, metrics, scores, {"hardware": "", "commit": ""})


def test_only_seeds_that_all_have_are_reported_and_differences_are_paired() -> None:
    ours = [trained("branch", seed, [1, 1, 0, 1] * 50, [0.2, 0.75]) for seed in (1, 2)]
    theirs = [trained("group", 1, [1, 0, 0, 1] * 50, [0.2, 0.5])]
    found = rules.reported([*ours, *theirs, trained("group", 0, [], [0.9])])
    assert [run.seed for run in found["branch"]] == [1]
    gap, low, high = rules.paired(found["branch"], found["group"])
    assert gap == pytest.approx(0.25)
    assert 0.15 < low < 0.25 < high < 0.35
    curve = rules.mean_curve(found["branch"])
    assert rules.crossing(curve, 0.475) == (pytest.approx(50), pytest.approx(0.5))
    assert rules.crossing(curve, 0.8) is None


def test_no_method_is_reported_before_every_one_has_finished_a_seed() -> None:
    fresh = trained("branch", 1, [1, 0], [0.2, 0.5])
    trials = [trained(name, 0, [1, 0], [0.2, 0.5]) for name in ("branch", "raft")]
    assert not any(rules.reported([fresh, *trials]).values())
    cut = trained("raft", 1, [], [0.2, 0.4])
    assert not any(rules.reported([fresh, *trials, cut]).values())
    whole = trained("raft", 1, [0, 0], [0.2, 0.4])
    assert all(rules.reported([fresh, *trials, whole]).values())


def test_trials_alone_are_drawn_and_not_compared(root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(root / EXPERIMENT, runs / EXPERIMENT)
    for method in METHODS:
        for rate in RATES:
            shutil.rmtree(runs / EXPERIMENT / Job(method, rate, 1).name(PLAN), ignore_errors=True)
    # a trial that was cut has no scores
    (runs / EXPERIMENT / Job(METHODS[0], RATES[0], 0).name(PLAN) / "scores.json").unlink()
    results = tmp_path / "results"
    language_model.pack(results / "records.tar.xz", None, None, runs)
    assert language_model.write(results) == ""
    rows = list(csv.DictReader((results / "table.csv").read_text().splitlines()))
    assert len(rows) == len(METHODS) * len(RATES)
    assert sum(row["row"].endswith("trial, cut") for row in rows) == 1
    assert (results / "trials.png").exists()
    assert not (results / "training.png").exists()


def test_trials_of_the_archive_need_not_run_again(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.tar.xz"
    language_model.pack(path, None, None, root)
    language_model.unpack(path, tmp_path / "runs")
    folders = {each.name for each in (tmp_path / "runs" / EXPERIMENT).iterdir()}
    assert folders == {Job(m, rate, 0).name(PLAN) for m in METHODS for rate in RATES}
    jobs, later = open_jobs(PLAN, tmp_path / "runs", METHODS, RATES, SEEDS)
    assert not later
    own = [read_run(root / EXPERIMENT / Job(METHODS[0], rate, 0).name(PLAN)) for rate in RATES]
    assert jobs[0] == Job(METHODS[0], chosen_rate(own), SEEDS[0])
    assert len(jobs) == len(METHODS) * len(SEEDS)


def test_a_level_without_a_comparison_is_not_packed(tmp_path: Path) -> None:
    measured = tmp_path / "noise"
    measured.mkdir()
    alone = {"group 8": COSTS["group 8"]}
    for level, costs in (("0.3b", alone), ("0.5", COSTS)):
        whole = "".join(json.dumps(line) + "\n" for line in lines_of(costs))
        (measured / f"noise-chain-{level}.jsonl").write_text(whole)
    path = tmp_path / "records.tar.xz"
    language_model.pack(path, None, measured, None)
    assert list(read_archive(path)["noise"]) == ["noise-chain-0.5.jsonl"]


def test_a_gradient_that_is_not_finite_stops_the_run(folder: Path, tmp_path: Path) -> None:
    late = worker(folder, tmp_path)
    before = {name: x.clone() for name, x in weights(late.pretrained.module).items()}
    last = list(late.pretrained.module.parameters())[-1]
    last.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(FloatingPointError, match="update 1 is not finite"):
        late.train(Job(METHODS[0], RATES[0], 0), 8)
    after = weights(late.pretrained.module)
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_the_default_number_of_draws_is_the_measured_one() -> None:
    means = language_model_history.at_fresh(Tables(Path(__file__).parents[2] / "results"))
    estimator = Branch().estimator
    assert isinstance(estimator, RLOO)
    assert means[estimator.samples] == min(means.values())


def test_the_published_table_is_made_from_the_records(tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "results" / "language_model"
    shutil.copy(published / "records.tar.xz", tmp_path)
    language_model.write(tmp_path)
    assert (tmp_path / "table.csv").read_text() == (published / "table.csv").read_text()


def test_records_make_the_table_and_the_figures(root: Path, tmp_path: Path) -> None:
    measured = tmp_path / "noise"
    measured.mkdir()
    # the second measurement of a level takes the place of the first
    for level in ("0.1", "0.5", "0.5b"):
        whole = "".join(json.dumps(line) + "\n" for line in lines_of(COSTS))
        (measured / f"noise-chain-{level}.jsonl").write_text(whole)
    results = tmp_path / "language_model"
    language_model.pack(results / "records.tar.xz", None, measured, root)
    words = language_model.write(results)
    assert "| branch 32 | 0.12 ± " in words
    tables = Tables(tmp_path)
    assert [level.task for level in language_model_levels.measured(tables)] == ["chain"] * 2
    assert language_model_history.best_fixed(tables).count("(32)") == 2
    made = language_model_training.training(tables)
    rates = {
        chosen_rate([read_run(root / EXPERIMENT / Job(m, r, 0).name(PLAN)) for r in RATES])
        for m in METHODS[:1]
    }
    rows = language_model_training.results(tables)[TASK]
    assert {row.rate for row in rows if row.method == "branch"} == {f"{rate:g}" for rate in rates}
    assert made.startswith("| | digits | seconds |")
    assert "**Digits, less `2*grpo:2`.** `branch` is " in language_model_training.differences(
        tables
    )
    rows = list(csv.DictReader((results / "table.csv").read_text().splitlines()))
    assert sum("trial" in row["row"] for row in rows) == len(METHODS) * len(RATES)
    assert (results / "noise.png").stat().st_size > 1000
    assert (results / "training.png").stat().st_size > 1000
    first = (results / "records.tar.xz").read_bytes()
    language_model.pack(results / "records.tar.xz", None, measured, root)
    assert (results / "records.tar.xz").read_bytes() == first
    language_model.pack(results / "records.tar.xz", None, None, None, anew=True)
    language_model.write(results)
    assert not language_model_training.results(Tables(tmp_path))


def test_candidates_enter_by_the_rule(tmp_path: Path) -> None:
    """One halves the noise and its kin does less, one has too little, one does so at a single level
    alone, and one was not measured at the other.
    """
    plain = {"group 4": 300.0, "branch 8": 100.0, "branch 16": 40.0}
    new = {"own 0.5, branch 8": 50.0, "own 0.25, branch 8": 60.0, "critic, branch 8": 30.0}
    new |= {"shared, group 2, branch 4": 95.0, "value or branch 8": 10.0}
    costs = {f"{name}, fresh": cost for name, cost in (plain | new).items()}
    worse = costs | {"critic, branch 8, fresh": 180.0}
    del worse["value or branch 8, fresh"]
    measured = tmp_path / "noise"
    measured.mkdir()
    for name, own in (("chain-0.8c", costs), ("countdown-0.3c", worse), ("chain-0.8b", COSTS)):
        found = lines_of(own, 6)
        for line in found:
            # what the rounds of a seed share does not count
            line["variance"] *= 1 + 9 * line["round"]
            line["variance"] *= 1.02 if (line["round"] + len(line["method"])) % 2 else 1
        (measured / f"noise-{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in found))
    results = tmp_path / "language_model"
    language_model.pack(results / "records.tar.xz", None, measured, None)
    language_model.write(results)
    tables = Tables(tmp_path)
    made = language_model_candidates.table(tables)
    assert made.endswith("rule lets into the library: own 0.5, branch 8.")
    assert "| own 0.5, branch 8 | 0.50±0.01 | 0.50±0.01 | 0.50±0.01 |" in made
    assert "| branch 8 | 1 | 1 | 1 |" in made
    assert "| value or branch 8 | 0.10±0.00 | - | - |" in made
    assert "over 6 rounds" in made
    # what other tables show stays what it was
    assert len(language_model_levels.measured(tables)) == 1
    assert language_model_history.at_fresh(tables) == {}


def test_findings_say_what_was_met(tmp_path: Path) -> None:
    fast = [0.3, 0.5, 0.6]
    slow = [0.3, 0.4, 0.5]
    scores = {"branch": [1.0, 1.0, 0.0], "ppo": [1.0, 0.0, 0.0]}
    runs = [
        trained(name, seed, scores[name], curve)
        for name, curve in (("branch", fast), ("ppo", slow))
        for seed in (1, 2)
    ]
    rows = language_model._result_rows("countdown", runs)
    (tmp_path / "language_model").mkdir()
    with (tmp_path / "language_model" / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, language_model.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    made = language_model_training.training(Tables(tmp_path))
    assert made.splitlines()[2:] == [
        "| branch | **0.600±0.000** | 2 |",
        "| ppo | **0.500±0.000** | 2 |",
    ]
    told = language_model_training.differences(Tables(tmp_path))
    assert told.startswith("- **Countdown, less `ppo`.** `branch` is undecided: +0.333 (")
    assert "When `branch` ends, after 2 s, `ppo` is at 0.500; it ends after 2 s." in told
    # the rival ends at 0.5, which branching has after half of the rival's tokens and seconds
    (_, target) = language_model_training.in_short(Tables(tmp_path))
    assert target.endswith("and half of its seconds, is missed on countdown.")


def test_a_run_that_needs_too_much_memory_gets_smaller_micro_batches(
    folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.update

    def update(trainer: Trainer) -> dict[str, float]:
        if trainer.micro_batch > 8 and trainer.updates == 1:
            raise torch.OutOfMemoryError("Out of memory.")
        return real(trainer)

    monkeypatch.setattr(Trainer, "update", update)
    job = Job(METHODS[0], RATES[0], 0)
    replace(worker(folder, tmp_path), micro_batch=16).work(METHODS[:1], RATES[:1], ())
    found, expected = (
        read_run(where / EXPERIMENT / job.name(PLAN)).metrics for where in (tmp_path, root)
    )
    assert [line["accuracy"] for line in found] == [line["accuracy"] for line in expected]
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]


def test_a_ruined_run_stops(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = worker(folder, tmp_path)
    found = iter([torch.ones(4), 0.4 * torch.ones(4)])
    monkeypatch.setattr(Trainer, "scores", lambda *_: next(found))
    late.train(replace(Job(METHODS[0], RATES[0], 0)), 8)
    run = read_run(tmp_path / EXPERIMENT / Job(METHODS[0], RATES[0], 0).name(PLAN))
    assert [line["accuracy"] for line in run.metrics] == [1.0, pytest.approx(0.4)]


def test_trainers_are_compared_at_equal_tokens_and_seconds(tmp_path: Path) -> None:
    curves = {
        "GRPOTrainer": [[10, 0.1, 1.0], [10, 0.2, 2.0], [10, 0.3, 3.0]],
        "BranchTrainer": [[20, 0.4, 4.0]],
    }
    runs = [
        {"trainer": kind, "before": 0.1, "after": 0.2, "tokens": 30.0, "curve": curve}
        for kind, curve in curves.items()
    ]
    record = {"runs": runs, "hardware": "H", "commit": "c" * 40, "trainings at once": 2}
    (tmp_path / "trl").mkdir()
    (tmp_path / trl_page.FILE).write_text(json.dumps(record))
    made = trl_page.smollm2(Tables(tmp_path))
    assert "| reward at 20 tokens | 0.150 ± 0.000 | 0.400 ± 0.000 |" in made
    assert "| reward at 3 s | 0.200 ± 0.000 | 0.400 ± 0.000 |" in made
