"""How the gradient's variance and the return change with the number of action variables, at equal rollouts.

    python -m benchmarks.many_actions                  # K = 2 to 32, five seeds, one worker per processor
    python -m benchmarks.many_actions --knobs 2 4 --seeds 2 --steps 50000

The problem is `Knobs` of examples/many_actions.py. Every method but A2C plays at most 128 rollouts per true episode.
The variance is the trace of the gradient's covariance at the untrained policy, over 100 iterations; times the steps of
an iteration it is comparable between methods that play more and fewer. The return is that of 50 episodes after the
same number of steps of the simulator, rollouts included.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples.many_actions import Knobs
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arsm
from arsm.rl import ActorCritic, PolicyGradient
from benchmarks.agents import commit
from benchmarks.measure import hardware, table

METHODS: dict[str, arsm.Estimator | ActorCritic] = {
    "ARSM": arsm.ARSM(),
    "pooled ARSM": arsm.ARSM(pooled=True),
    "RLOO(2)": arsm.RLOO(2),
    "RLOO(8)": arsm.RLOO(8),
    "local expectation": arsm.LocalExpectation(),
    "A2C": ActorCritic(),
}
BUDGET = 128
ITERATIONS = 100


def measure(knobs: int, method: str, seed: int, steps: int) -> tuple[float, float, float]:
    """The variance, the steps of an iteration at which it was measured, and the return after these steps."""
    torch.set_num_threads(1)
    make = partial(PolicyGradient, partial(Knobs, knobs), METHODS[method], seed=seed, budget=BUDGET)
    agent = make(episodes_an_iteration=1)
    parameters = list(agent.network.parameters())
    kept, gradients = parameters_to_vector(parameters).detach().clone(), []

    def keep(_: object) -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        vector_to_parameters(kept, parameters)

    agent.learn(episodes=ITERATIONS, callback=keep, progress=False)
    half = torch.stack(gradients[ITERATIONS // 2 :])  # the scale of the rewards has settled, and a critic has learned
    played = (agent.steps + agent.replayed) / ITERATIONS
    agent.close()
    learner = make()
    learner.learn(steps=steps, progress=False)
    found = learner.evaluate(50, deterministic=False).mean
    learner.close()
    return float(half.var(0).sum()), played, found


def main() -> None:
    """Measure in parallel and write many_actions.csv."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_actions", description=__doc__)
    parser.add_argument("--knobs", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500_000, help="steps of the simulator per training run")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=Path("results/agents"))
    chosen = parser.parse_args()
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.workers, mp_context=context) as pool:
        running = {
            pool.submit(measure, knobs, method, seed, chosen.steps): (knobs, method)
            for seed in range(chosen.seeds)
            for knobs in chosen.knobs
            for method in METHODS
        }
        for number, ended in enumerate(as_completed(running), 1):
            found.setdefault(running[ended], []).append(ended.result())
            left = (time.monotonic() - began) / number * (len(running) - number)
            print(f"[{number}/{len(running)}, {left / 60:.0f} min left] {running[ended]}", flush=True)
    write(chosen.folder, found, chosen.steps)


def write(folder: Path, found: dict[tuple[int, str], list[tuple[float, float, float]]], steps: int) -> None:
    """The table, in words and as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with (folder / "many_actions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "metric", "mean", "std", "seeds", "steps", "hardware", "commit"])
        for (knobs, method), runs in sorted(found.items()):
            variance, played, returns = (np.array(each) for each in zip(*runs, strict=True))
            metrics = {"variance": variance, "variance x steps": variance * played, "return": returns}
            for metric, values in metrics.items():
                spread = float(values.std(ddof=1)) if len(values) > 1 else ""
                facts = (len(values), steps if metric == "return" else "", hardware(), commit())
                writer.writerow([f"K = {knobs}: {method}", metric, values.mean(), spread, *facts])
            cells = (f"{values.mean():.4g}" for values in metrics.values())
            rows.append([str(knobs), method, f"{played.mean():.0f}", *cells])
    header = ["K", "method", "steps per iteration", "variance", "variance x steps", f"return after {steps:,} steps"]
    print(table("Knobs, at most 128 rollouts per true episode", header, rows))


if __name__ == "__main__":
    main()
