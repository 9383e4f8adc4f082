"""`benchmarks.agents`: what a run's clock counts, when it is evaluated, and what a method is
credited with.
"""

from __future__ import annotations

import json
import lzma
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium")

from benchmarks.agents import FIRST_SEED, POOLED, ROWS, Job, jobs, methods, run
from benchmarks.agents_report import MOMENTS, best, by_cell, publish, read
from benchmarks.agents_watch import Watch

from arsm_experiments.report.pages import agents as page
from arsm_experiments.report.pages.tables import Tables


def job(**changes: Any) -> Job:
    given = {"seconds": 9.0, "compared_at": 100, "episodes": 2, "seed": 0}
    return Job(**{"row": "CartPole", "method": "value", **given, **changes})


def busy(seconds: float) -> None:
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass


def test_evaluations_do_not_count_as_learning() -> None:
    watch = Watch(job(), line=1.0)

    def play(likely: bool) -> float:
        busy(0.2)
        return float(likely)

    busy(0.05)
    watch.look(99, [], play)
    assert watch.spent() < 0.2  # not yet evaluated
    watch.look(100, [], play)
    watch.look(500, [], play)
    assert 0.05 <= watch.spent() < 0.2
    found = watch.found(900, play)
    assert (found["sampled"], found["likeliest"], found["steps"]) == (0.0, 1.0, 900)
    # the first time that the steps are reached is the one that counts
    assert found["at_steps"]["steps"] == 100


def test_a_run_that_ends_before_the_steps_is_read_at_its_end() -> None:
    found = Watch(job(), line=1.0).found(60, float)
    assert found["at_steps"]["steps"] == found["steps"] == 60


def test_a_task_is_solved_when_a_hundred_episodes_average_the_line() -> None:
    watch = Watch(job(), line=5.0)
    watch.look(1, [9.0] * 99, float)
    watch.look(2, [4.9] * 100, float)
    assert not watch.solved
    watch.look(3, [5.0] * 100, float)
    watch.look(4, [5.0] * 100, float)
    assert len(watch.solved) == 1


def test_an_agent_of_this_library_is_evaluated_twice() -> None:
    found = run(job(row="Knobs, K = 4", method="RLOO(2)", seconds=1.5, compared_at=500))
    assert found["at_steps"]["steps"] >= 500
    assert found["at_steps"]["cpu"] < found["cpu"]
    assert found["steps"] > found["at_steps"]["steps"]


def test_every_row_has_its_methods_and_fresh_seeds() -> None:
    wanted = list(jobs(["Taxi", "Knobs, K = 4"], FIRST_SEED, 2, None, 50))
    assert {each.seed for each in wanted} == {300, 301}
    taxi, knobs = ({j.method for j in wanted if j.row == name} for name in ("Taxi", "Knobs, K = 4"))
    assert knobs - taxi == {POOLED}
    assert taxi - knobs == {"MaskablePPO", "MaskablePPO, 2"}
    # the zoo's settings stand alone
    assert not any(name.endswith(", 2") for name in methods(ROWS["LunarLander"]))


def test_a_rival_is_credited_with_its_better_setting_and_kind_of_action() -> None:
    def line(method: str, seed: int, sampled: float, likeliest: float) -> dict[str, Any]:
        end = {"sampled": sampled, "likeliest": likeliest}
        start = {"at_steps": {"sampled": -sampled, "likeliest": -9.0}}
        return {"row": "Taxi", "method": method, "seed": seed, **end, **start}

    cells = by_cell([line("PPO", 0, 1, 2), line("PPO, 2", 0, 4, 3), line("value", 0, 7, 0)])
    assert best(cells, "Taxi", "PPO", MOMENTS[0]) == [4.0]
    assert best(cells, "Taxi", "PPO", MOMENTS[1]) == [-1.0]
    assert best(cells, "Taxi", "value", MOMENTS[0]) == [7.0]


def published(folder: Path, seeds: int) -> Tables:
    """A page's runs: the value with 10, 11, 12 by the likeliest actions, PPO better by its second
    settings and far behind, A2C behind but unsteady.
    """
    lines = []
    for seed in range(seeds):
        for method, sampled, likeliest in (
            ("value", 12.5 - 6 * (seed == 0), 10 + seed),
            ("PPO", 0, 1),
            ("PPO, 2", 2, 3 + 0.1 * seed),
            ("A2C", 20 * (seed == 1), 0),
        ):
            end = {"sampled": sampled, "likeliest": likeliest}
            run = {"row": "Taxi", "method": method, "seed": seed}
            lines.append(json.dumps({**run, **end, "at_steps": end}))
    (folder / "agents").mkdir(parents=True)
    text = "\n".join(lines).encode()
    (folder / "agents/runs.jsonl.xz").write_bytes(lzma.compress(text))
    return Tables(folder)


def test_the_page_takes_the_kind_of_action_with_the_better_mean_over_seeds(tmp_path: Path) -> None:
    """Not the better one of every seed, which would favour the noisy."""
    runs = page.blocks(published(tmp_path, 3))
    own = [runs["Taxi", seed]["value"][page.SECONDS] for seed in range(3)]
    assert own == [10, 11, 12]
    assert [runs["Taxi", seed]["PPO"][page.STEPS] for seed in range(3)] == [3.0, 3.1, 3.2]
    assert page.beaten(runs, "value", "A2C", page.SECONDS) == (2, 1)


@pytest.mark.parametrize("seeds", [2, 3])
def test_bold_is_not_decidedly_behind_the_first_and_needs_three_seeds(
    tmp_path: Path, seeds: int
) -> None:
    row = page.every_method(published(tmp_path, seeds)).splitlines()[-1]
    cells = dict(zip(page.METHODS, [x.strip() for x in row.split("|")[2:-1]], strict=True))
    assert (cells["ARSM"], cells["PPO"].startswith("3.")) == ("", True)
    if seeds == 2:
        assert "**" not in row
    else:
        assert cells["value"] == "**11.0**/**11.0**"
        assert cells["A2C"] == "**6.7**/**6.7**"


def test_only_complete_blocks_are_published_and_once(tmp_path: Path) -> None:
    def line(method: str, seed: int) -> str:
        run = {"row": "CartPole", "method": method, "seed": seed}
        return json.dumps({**run, "sampled": 1 / 3, "at_steps": {"sampled": 2 / 3}}) + "\n"

    wanted = methods(ROWS["CartPole"])
    runs, archive = tmp_path / "runs.jsonl", tmp_path / "published" / "runs.jsonl.xz"
    archive.parent.mkdir()
    runs.write_text("".join(line(m, 1) for m in wanted) + "".join(line(m, 2) for m in wanted[1:]))
    assert publish(runs, archive, lambda row: wanted) == [("CartPole", 1)]
    runs.write_text(runs.read_text() + line(wanted[0], 2))
    assert publish(runs, archive, lambda row: wanted) == [("CartPole", 2)]
    assert publish(runs, archive, lambda row: wanted) == []
    kept = read(archive.with_suffix(""))
    assert len(kept) == 2 * len(wanted)
    assert (kept[0]["sampled"], kept[0]["at_steps"]["sampled"]) == (0.333333, 0.666667)


def test_a_published_block_without_a_method_goes_when_its_row_has_a_complete_one(
    tmp_path: Path,
) -> None:
    def lines(row: str, seed: int, of: list[str]) -> str:
        runs = [{"row": row, "method": method, "seed": seed} for method in of]
        return "".join(json.dumps(run) + "\n" for run in runs)

    wanted = ["value", "A2C"]
    runs, archive = tmp_path / "runs.jsonl", tmp_path / "published" / "runs.jsonl.xz"
    archive.parent.mkdir()
    before = lines("Taxi", 1, ["value"]) + lines("Acrobot", 1, ["value"]) + lines("Taxi", 2, wanted)
    archive.write_bytes(lzma.compress(before.encode()))
    runs.write_text(lines("Taxi", 3, wanted))
    assert publish(runs, archive, lambda row: wanted) == [("Taxi", 3)]
    kept = {(line["row"], line["seed"]) for line in read(archive.with_suffix(""))}
    assert kept == {("Taxi", 2), ("Taxi", 3), ("Acrobot", 1)}


@pytest.mark.parametrize(("better", "worse"), [(2, 0), (1, 0), (3, 1)])
def test_another_default_needs_two_rows_ahead_and_none_behind(
    tmp_path: Path, better: int, worse: int
) -> None:
    """`both` is ahead of the value on some rows, behind it on others and level on the rest."""
    lines = []
    for place, row in enumerate(page.TASKS[:5]):
        gain = 5 if place < better else -5 if place < better + worse else 0
        for seed in range(3):
            for method, reached in (("value", 10 + seed), ("both", 10 + seed + gain)):
                end = {"sampled": reached, "likeliest": reached}
                run = {"row": row, "method": method, "seed": seed}
                lines.append(json.dumps({**run, **end, "at_steps": end}))
    (tmp_path / "agents").mkdir()
    text = "\n".join(lines).encode()
    (tmp_path / "agents/runs.jsonl.xz").write_bytes(lzma.compress(text))
    words = page.default_rule(Tables(tmp_path))
    assert f"`value` {5 - better}, `both` {5 - worse} ({worse})," in words
    assert words.endswith("names both." if (better, worse) == (2, 0) else "it stays `Value()`.")
