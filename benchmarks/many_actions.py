"""How the gradient's variance and the return change with the number of action variables, at equal
rollouts.

    python -m benchmarks.many_actions    # K = 2 to 32, five seeds, one worker per processor
    python -m benchmarks.many_actions --knobs 2 4 --seeds 2 --steps 20000

The problem is `Knobs` of examples/many_actions.py. Every method but A2C plays at most 128 rollouts
per true episode. The variance is the trace of the gradient's covariance at the untrained policy,
over 100 iterations; times the steps of an iteration it is comparable between methods that play more
and fewer. The return is that of 50 episodes after the same number of steps of the simulator,
rollouts included.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples.many_actions import Knobs
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arsm
from arsm.rl import PolicyGradient, Value
from benchmarks.agents import work
from benchmarks.agents_report import read
from benchmarks.measure import table
from benchmarks.records import write_table

METHODS: dict[str, arsm.Estimator | Value] = {
    "ARSM": arsm.ARSM(),
    "pooled ARSM": arsm.ARSM(pooled=True),
    "RLOO(2)": arsm.RLOO(2),
    "RLOO(8)": arsm.RLOO(8),
    "local expectation": arsm.LocalExpectation(),
    "A2C": Value.actor_critic(value_updates=10),
}
BUDGET = 128
ITERATIONS = 100


@dataclass(frozen=True)
class Job:
    """One seed of a method at one number of action variables."""

    knobs: int
    method: str
    seed: int
    training: int
    """Steps of the simulator."""


def measure(job: Job) -> dict[str, float]:
    """The variance, the steps per iteration at which it was measured, and the return after
    training.
    """
    torch.set_num_threads(1)
    make = partial(
        PolicyGradient, partial(Knobs, job.knobs), METHODS[job.method], seed=job.seed, budget=BUDGET
    )
    agent = make(episodes_an_iteration=1)
    parameters = list(agent.network.parameters())
    kept, gradients = parameters_to_vector(parameters).detach().clone(), []

    def keep(_: object) -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        vector_to_parameters(kept, parameters)

    agent.learn(episodes=ITERATIONS, callback=keep, progress=False)
    # the scale of the rewards has settled, and a critic has learned
    half = torch.stack(gradients[ITERATIONS // 2 :])
    played = (agent.steps + agent.replayed) / ITERATIONS
    agent.close()
    learner = make()
    learner.learn(steps=job.training, progress=False)
    found = learner.evaluate(50, deterministic=False).mean
    learner.close()
    return {"variance": float(half.var(0).sum()), "played": played, "return": found}


def write(folder: Path) -> None:
    """The table of the records, in words and as many_actions.csv."""
    runs = read(folder / "many_actions.jsonl")
    rows, lines = [], []
    for knobs, method in sorted({(run["knobs"], run["method"]) for run in runs}):
        own = [run for run in runs if (run["knobs"], run["method"]) == (knobs, method)]
        variance, played, returns = (
            np.array([run[name] for run in own]) for name in ("variance", "played", "return")
        )
        metrics = {
            "steps per iteration": played,
            "variance": variance,
            "variance x steps": variance * played,
            "return": returns,
        }
        hardware, commit = (
            "; ".join(sorted({run[name] for run in own})) for name in ("hardware", "commit")
        )
        for metric, values in metrics.items():
            spread = f"{values.std(ddof=1):.6g}" if len(values) > 1 else ""
            mean, seeds = f"{values.mean():.6g}", len(values)
            row = f"K = {knobs}: {method}"
            lines.append([row, metric, mean, spread, seeds, "", "", hardware, commit[:10]])
        means = (f"{values.mean():.4g}" for values in metrics.values())
        rows.append([str(knobs), method, *means])
    write_table(folder / "many_actions.csv", lines)
    header = ["K", "method", "steps per iteration", "variance", "variance x steps", "return"]
    print(table("Knobs, at most 128 rollouts per true episode", header, rows))


def main() -> None:
    """Run what is not done yet, then write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_actions", description=__doc__)
    parser.add_argument("--knobs", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=200_000, help="steps of the simulator per training run"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=Path("results/agents"))
    chosen = parser.parse_args()
    jobs = [
        Job(knobs, method, seed, chosen.steps)
        for seed in range(chosen.seeds)
        for knobs in chosen.knobs
        for method in METHODS
    ]
    work(chosen.folder / "many_actions.jsonl", jobs, measure, chosen.workers)
    write(chosen.folder)


if __name__ == "__main__":
    main()
