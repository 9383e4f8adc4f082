"""Generated sentences that are made from records instead of tables, on records worked by hand."""

from __future__ import annotations

from pathlib import Path

from arsm_experiments.report.pages import agents, maximize, pyro
from arsm_experiments.report.pages.tables import Tables
from arsm_experiments.runs import lines


def agents_run(method: str, steps: int, cpu: float, solved: list[float]) -> lines.Line:
    """A run that is read at 1,000 steps and at 10 CPU seconds."""
    limits = {"compared_at": 1_000, "seconds": 10.0}
    read = {"at_steps": {"steps": steps}, "cpu": cpu, "solved": solved}
    return {"row": "CartPole", "method": method, **limits, **read}


def write_agents(folder: Path) -> Tables:
    (folder / "agents").mkdir()
    runs = [
        agents_run("value", 1_300, 11.0, [4.0, 9.0]),
        agents_run("ARSM", 1_700, 10.5, [6.0]),
        agents_run("ARSM", 1_100, 10.0, []),
        agents_run("ARSM", 1_100, 10.0, [5.0]),
        agents_run("PPO, 2", 1_020, 10.3, []),
    ]
    lines.write(folder / "agents" / "runs.jsonl.xz", runs)
    return Tables(folder)


def test_rivals_and_ours_pass_their_limits_apart(tmp_path: Path) -> None:
    told = agents.overshoot(write_agents(tmp_path))
    assert "ours with up to 1.7 times the steps and 10% more CPU seconds" in told
    assert "the rivals' with 2% and 3% more" in told


def test_a_run_counts_when_it_is_solved_first_and_never_otherwise(tmp_path: Path) -> None:
    spent = agents.until_solved(write_agents(tmp_path))
    assert spent["value"] == 4.0
    # the median of 5, 6 and never
    assert spent["ARSM"] == 6.0
    assert spent["PPO, 2"] == float("inf")


def test_differences_of_losses_are_paired_by_seed() -> None:
    """Seeds that differ by far more than the losses: 0.1, 0.2 and 0.3 apart, 0.2 ± 0.25."""
    trained = {
        ("mixture", "ours"): {0: -10.0, 1: -20.0, 2: -30.0, 3: 5.0},
        ("mixture", "theirs"): {2: -30.3, 1: -20.2, 0: -10.1},
    }
    assert pyro._apart(trained, "mixture", "ours", "theirs") == "+0.20 ± 0.25"


def test_differences_of_optimisers_are_paired_by_instance() -> None:
    def runs(*best: float) -> dict[int, dict[str, float]]:
        return {instance: {"best": value} for instance, value in enumerate(best)}

    known = {(maximize.OURS, "QUBO"): runs(10, 20, 30), ("rival", "QUBO"): runs(9, 20, 27)}
    mean, ahead = maximize.gain(known, "rival", "QUBO")
    assert (round(mean.mean, 6), mean.seeds, ahead) == (round(4 / 3, 6), 3, 2)
