"""The toy experiment: its problem, its trajectories, and that nothing is lost when it is killed."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console

import arsm
from arsm_experiments import toy
from arsm_experiments.runs.reader import Record, load_checkpoint, read_run
from arsm_experiments.toy import EVERY_UPDATE, Problem, Toy, ascend, folder_name, scaled_step

CONFIG: dict[str, Any] = {
    "estimator": "arsm",
    "categories": 5,
    "step": 1.0,
    "r": 5.0,
    "updates": 30,
    "seeds": 3,
    "seed": 0,
    "variance_samples": 10,
    "trace_every": 7,
}


def play(root: Path, *, resume: bool = False, stop: int | None = None, **changes: Any) -> Record:
    """Run the toy, or its first updates only, and read what it left."""
    config = {**CONFIG, **changes}
    name = folder_name("", config)
    steps = ascend(config, root, name, resume=resume, checkpoint_every=10)
    for step in steps:
        if step == stop:
            steps.close()
    return read_run(root / "toy" / name)


def without_seconds(record: Record) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if key != "seconds"} for line in record.metrics
    ]


def test_the_problem_counts_categories_from_one() -> None:
    problem = Problem(30, 30.0)
    z = torch.tensor([[0], [29]])
    torch.testing.assert_close(
        problem.f(z), torch.tensor([0.5 + 1 / 900, 0.5 + 1 / 30], dtype=torch.float64)
    )
    torch.testing.assert_close(problem.f(arsm.one_hot(z, 30, torch.float64)), problem.f(z))
    uniform = problem.expected_reward(torch.zeros(2, 1, 30, dtype=torch.float64))
    torch.testing.assert_close(uniform, torch.full((2,), 0.5 + 31 / 2 / 900, dtype=torch.float64))


@pytest.mark.parametrize(("categories", "share"), [(30, 0.958), (1000, 0.999), (10_000, 0.9999)])
def test_the_true_gradient_converges_at_the_scaled_step(categories: int, share: float) -> None:
    """dE[f]/dphi_c = p_c (f(c) - E[f]), written out."""
    problem = Problem(categories, 30.0)
    f = problem.f(torch.arange(categories).unsqueeze(-1))
    step, phi = scaled_step(categories, 30.0), torch.zeros(categories, dtype=torch.float64)
    for _ in range(5000):
        p = phi.softmax(0)
        phi = phi + step * p * (f - p @ f)
    closed = (phi.softmax(0) @ f - f.mean()) / (f[-1] - f.mean())
    assert float(closed) >= share


def test_the_true_gradient_ascends_by_its_formula(tmp_path: Path) -> None:
    record = play(tmp_path, estimator="exact", seeds=1)
    problem = Problem(5, 5.0)
    f, phi = problem.f(torch.arange(5).unsqueeze(-1)), torch.zeros(5, dtype=torch.float64)
    for _ in range(30):
        p = phi.softmax(0)
        phi = phi + p * (f - p @ f)
    last = record.metrics[-1]
    assert last["step"] == 30
    assert last["reward"] == pytest.approx(float(phi.softmax(0) @ f), abs=1e-14)
    assert last["probability_last"] == pytest.approx(float(phi.softmax(0)[-1]), abs=1e-14)
    assert last["entropy"] == pytest.approx(float(arsm.entropy(phi)), abs=1e-14)
    assert last["variance"] == 0
    assert last["evaluations"] == 30 * 5


def test_everything_is_traced_at_the_start_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    record = play(tmp_path)
    steps, seeds = record.series("reward")
    assert steps == [0, 7, 14, 21, 28, 30]
    assert len(seeds) == 3
    assert {
        "reward",
        "gradient_first",
        "gradient_last",
        "probability_first",
        "probability_last",
        "variance",
        "entropy",
        "pseudo_action_share",
        "evaluations",
    } <= record.metrics[0].keys()


def test_only_small_problems_trace_their_first_and_last_category(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "ENDS_DRAWN", 2)
    record = play(tmp_path)
    assert not record.series("gradient_first")[0]
    assert record.series("probability_last")[0]


def test_seeds_have_noise_of_their_own(tmp_path: Path) -> None:
    _, seeds = play(tmp_path).series("reward")
    assert len({values[0] for values in seeds}) == 1
    assert len({values[-1] for values in seeds}) == len(seeds)


def test_measuring_changes_no_update(tmp_path: Path) -> None:
    rare, often = (
        play(tmp_path / "rare", trace_every=30),
        play(tmp_path / "often", trace_every=3, variance_samples=4),
    )
    assert [values[-1] for values in rare.series("reward")[1]] == [
        values[-1] for values in often.series("reward")[1]
    ]


def test_the_variance_of_every_update_is_that_of_tracing_all_of_them(tmp_path: Path) -> None:
    """REINFORCE's variance falls as it settles: a mean over few updates, the first among them, is
    another number.
    """
    changes = {"estimator": "reinforce", "variance_samples": 400}
    every = play(tmp_path / "every", variance_of_every_update=400, **changes)
    traced = play(tmp_path / "traced", trace_every=1, **changes)

    steps, means = every.series(EVERY_UPDATE)
    assert steps == [7, 14, 21, 28, 30]
    _, values = traced.series("variance")
    for seed, bins in enumerate(means):
        for last, width, found in zip(steps, (7, 7, 7, 7, 2), bins, strict=True):
            expected = fmean(values[seed][last - width : last])
            assert found == pytest.approx(expected, rel=0.1)
    whole = [fmean(values[:30]) for values in traced.series("variance")[1]]
    few = [fmean(values) for values in every.series("variance")[1]]
    assert any(abs(one / other - 1) > 0.05 for one, other in zip(few, whole, strict=True))

    # nothing else changes, and a resumed run has the same numbers
    without = play(tmp_path / "without", **changes)
    for line in every.metrics:
        line.pop(EVERY_UPDATE, None)
    assert without_seconds(every) == without_seconds(without)
    play(tmp_path / "stopped", variance_of_every_update=400, stop=15, **changes)
    resumed = play(tmp_path / "stopped", variance_of_every_update=400, resume=True, **changes)
    assert resumed.series(EVERY_UPDATE) == (steps, means)


def test_the_variance_of_an_update_is_taken_before_it(tmp_path: Path) -> None:
    """Update 1 draws its estimate at phi = 0; a long step then leaves little to vary."""
    changes = {"estimator": "reinforce", "variance_samples": 400, "step": 20.0, "updates": 1}
    record = play(tmp_path, variance_of_every_update=400, **changes)
    for (taken,), (before, after) in zip(
        record.series(EVERY_UPDATE)[1], record.series("variance")[1], strict=True
    ):
        assert taken == pytest.approx(before, rel=0.1)
        assert after < before / 2


def test_a_relaxing_estimator_runs(tmp_path: Path) -> None:
    """At a gentle slope Gumbel-Softmax climbs too: f is linear."""
    _, seeds = play(tmp_path, estimator="gumbel-softmax").series("reward")
    assert all(values[-1] > values[0] for values in seeds)


def test_learned_parts_are_each_seeds_own_and_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = play(tmp_path / "whole", estimator="relax")
    play(tmp_path / "stopped", estimator="relax", stop=15)
    resumed = play(tmp_path / "stopped", estimator="relax", resume=True)
    assert without_seconds(resumed) == without_seconds(whole)
    states = [
        load_checkpoint(record.folder / "checkpoint.pt")["state"] for record in (resumed, whole)
    ]
    one, other = (state["learned_parts"] for state in states)
    assert all(torch.equal(one[name], value) for name, value in other.items())
    weights = [
        tuple(value.flatten().tolist())
        for name, value in one.items()
        if name.endswith("out.weight")
    ]
    assert len(weights) == len(set(weights)) == CONFIG["seeds"]
    assert len({values[-1] for values in whole.series("reward")[1]}) == CONFIG["seeds"]


def test_learned_parts_learn_the_level_of_f(tmp_path: Path) -> None:
    """Without them RELAX is REINFORCE, most of whose variance is f's level; with a step of 0
    nothing else moves.
    """
    _, seeds = play(tmp_path, estimator="relax", step=0.0, variance_samples=100).series("variance")
    assert all(values[-1] < 0.1 * values[0] for values in seeds)


def test_measuring_trains_no_learned_part(tmp_path: Path) -> None:
    rare, often = (play(tmp_path / str(n), estimator="relax", trace_every=n) for n in (30, 3))
    assert [values[-1] for values in rare.series("reward")[1]] == [
        values[-1] for values in often.series("reward")[1]
    ]


def test_running_statistics_adapt_and_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = play(tmp_path / "whole", estimator="aimle:rate=0.01")
    play(tmp_path / "stopped", estimator="aimle:rate=0.01", stop=15)
    resumed = play(tmp_path / "stopped", estimator="aimle:rate=0.01", resume=True)
    assert without_seconds(resumed) == without_seconds(whole)
    states = [
        load_checkpoint(record.folder / "checkpoint.pt")["state"]["learned_parts"]
        for record in (resumed, whole)
    ]
    alphas = [{n: float(v) for n, v in state.items() if n.endswith("alpha")} for state in states]
    assert alphas[0] == alphas[1]
    assert len(alphas[0]) == CONFIG["seeds"]
    assert all(alpha != 1.0 for alpha in alphas[0].values())


@pytest.mark.parametrize("words", ["rebar", "double-control", "2*relax", "nvil"])
def test_every_estimator_with_learned_parts_runs(tmp_path: Path, words: str) -> None:
    record = play(tmp_path, estimator=words, updates=3)
    parts = load_checkpoint(record.folder / "checkpoint.pt")["state"]["optimiser"]["state"]
    assert {float(state["step"]) for state in parts.values()} == {3}


@pytest.mark.parametrize("stop", [0, 6, 10, 15, 29, 30])
def test_a_run_stopped_anywhere_ends_like_one_never_stopped(tmp_path: Path, stop: int) -> None:
    whole = play(tmp_path / "whole", estimator="ars")
    play(tmp_path / "stopped", estimator="ars", stop=stop)
    resumed = play(tmp_path / "stopped", estimator="ars", resume=True)
    assert without_seconds(resumed) == without_seconds(whole)


def test_a_run_killed_midway_ends_like_one_never_killed(tmp_path: Path) -> None:
    """SIGKILL, which nothing can prepare for."""
    words = [
        "--categories",
        "6",
        "--updates",
        "900",
        "--trace-every",
        "3",
        "--checkpoint-every",
        "50",
    ]
    words += ["--variance-samples", "5", "--seeds", "2", "--estimators", "arsm"]
    command = [
        sys.executable,
        "-m",
        "arsm_experiments.cli",
        "toy",
        *words,
        "--root",
        str(tmp_path / "killed"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    name = "C6-step1-arsm"
    metrics = tmp_path / "killed" / "toy" / name / "metrics.jsonl"
    for _ in itertools.takewhile(lambda _: process.poll() is None, itertools.count()):
        if metrics.exists() and metrics.read_bytes().count(b"\n") > 120:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed = read_run(metrics.parent)
    assert 120 < len(killed.metrics) < 2 * 301

    options: dict[str, Any] = {
        "categories": (6,),
        "updates": 900,
        "trace_every": 3,
        "checkpoint_every": 50,
    }
    options |= {"variance_samples": 5, "seeds": 2, "estimators": ("arsm",)}
    Toy(**options, root=tmp_path / "killed", resume=True).run(Console(quiet=True))
    Toy(**options, root=tmp_path / "whole").run(Console(quiet=True))
    resumed, whole = read_run(metrics.parent), read_run(tmp_path / "whole" / "toy" / name)
    assert len(resumed.sessions) == 2
    assert len(whole.metrics) == 2 * 301
    assert without_seconds(resumed) == without_seconds(whole)
    one, other = (load_checkpoint(record.folder / "checkpoint.pt") for record in (resumed, whole))
    assert one["step"] == other["step"] == 900
    assert {"phi", "evaluations", "noise", "probe"} == one["state"].keys() == other["state"].keys()
    assert all(torch.equal(one["state"][key], value) for key, value in other["state"].items())


def test_variances_at_the_start_lie_orders_apart(tmp_path: Path) -> None:
    """At C = R = 30 and phi = 0, against ARSM: leave-one-out and ARS above it, REINFORCE 1e4, AR
    1e6 and more.
    """
    shared: dict[str, Any] = {"categories": 30, "r": 30.0, "updates": 1, "variance_samples": 100}
    words = ("arsm", "rloo", "ars", "reinforce", "ar")
    variance = {
        w: torch.tensor(play(tmp_path, estimator=w, **shared).series("variance")[1])[:, 0]
        .mean()
        .item()
        for w in words
    }
    ratio = {w: variance[w] / variance["arsm"] for w in words}
    assert 4 < ratio["rloo"] < 20
    assert ratio["ars"] > 8
    assert ratio["reinforce"] > 1e4
    assert ratio["ar"] > 1e6


@pytest.mark.slow
def test_arsm_keeps_up_with_the_true_gradient_on_every_seed(tmp_path: Path) -> None:
    """The paper's toy in full: after 5,000 updates ARSM's gap is within 25% of the true gradient's.

    REINFORCE and AR settle on a category early, most often on a wrong one; now and then luck makes
    it the best.
    """
    shared: dict[str, Any] = {
        "categories": 30,
        "r": 30.0,
        "updates": 5000,
        "seeds": 10,
        "trace_every": 1000,
    }

    def gaps(words: str) -> list[float]:
        _, seeds = play(tmp_path, estimator=words, **shared).series("reward")
        return [0.5 + 1 / 30 - values[-1] for values in seeds]

    true = gaps("exact")[0]
    assert all(abs(gap / true - 1) < 0.25 for gap in gaps("arsm"))
    for words in ("reinforce", "ar"):
        assert sum(gap / true > 1.25 for gap in gaps(words)) >= 7


def test_an_estimator_that_lacks_categories_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="references must lie between 1 and the 2 categories, but is 3"
    ):
        Toy(categories=(30, 2), estimators=("arsm", "arsm:references=3"), root=tmp_path).check()


def test_a_device_that_is_not_there_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="--device must be cpu, cuda or auto, but is gpu"):
        Toy(device="gpu").check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("estimator", ["arsm", "relax", "gumbel-softmax"])
def test_it_runs_on_a_gpu(estimator: str, tmp_path: Path) -> None:
    config = {**CONFIG, "estimator": estimator}
    for resume in (False, True):
        steps = ascend(config, tmp_path, "gpu", resume=resume, checkpoint_every=10, device="cuda")
        for step in steps:
            if step == 20 and not resume:
                steps.close()
    assert [
        line["step"] for line in read_run(tmp_path / "toy" / "gpu").metrics if line["seed"] == 0
    ][-1] == 30


def test_equal_steps_run_once() -> None:
    configs = list(
        Toy(categories=(30, 60), steps=("printed", "scaled", 2.0), estimators=("arsm",)).configs()
    )
    assert [(c["categories"], c["step"]) for c in configs] == [
        (30, 1.0),
        (30, 2.0),
        (60, 1.0),
        (60, 2.0),
    ]


def test_folder_names_tell_runs_apart() -> None:
    def name(words: str) -> str:
        return folder_name("", {"estimator": words, "categories": 30, "step": 0.5})

    assert name("rloo:samples=4") == "C30-step0.5-rloo-samples=4"
    assert name("4*arsm") == "C30-step0.5-4xarsm"
    assert "/" not in name("../x")
