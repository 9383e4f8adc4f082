"""Agents at equal CPU seconds and at equal simulator steps: credit from branches, from a learned
value and from both, beside Stable-Baselines3's PPO and A2C.

    python -m benchmarks.agents              # every row, method and seed; one worker per processor
    python -m benchmarks.agents --seconds 5 --seeds 2 --rows CartPole Taxi
    python -m benchmarks.agents --publish runs/agents    # add its complete blocks to the archive
    python -m benchmarks.agents --report     # only write table.csv and the figure

Each row, method and seed is one job in a process of its own with one thread. Its line is appended
to runs.jsonl, and a job that has a line is not run again. It learns until the process has spent the
row's CPU seconds. After the row's simulator steps (those of rollouts and of the way back to them
count) and at the end it plays 50 episodes with sampled and 50 with the likeliest actions, outside
of its CPU seconds; a method is credited with the better of the two. This library's methods have the
same settings, the defaults, on every row. Stable-Baselines3 has the settings that RL Baselines3 Zoo
publishes for a task (hyperparams/ppo.yml and a2c.yml, whose linear schedules fall over the CPU
seconds), and two settings elsewhere, of which the better one counts. All methods of a row see the
same encoding of the observations. Where an environment has action masks, sb3-contrib's MaskablePPO
uses them too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from examples.many_actions import Knobs
from examples.spread import get_state, set_state, spread

import arsm
from arsm.rl import Iteration, PolicyGradient, Value
from arsm.rl.spaces import encode, encoded_shape
from arsm_experiments.runs.provenance import provenance
from benchmarks.agents_report import publish, read, report
from benchmarks.agents_watch import WINDOW, Watch


def grid_features(seen: Any) -> Any:
    """MiniGrid's view as one-hot vectors of each cell's object and state, and the direction, for
    every method alike.
    """
    image = np.asarray(seen["image"])
    parts = [np.eye(11)[image[..., 0]], np.eye(3)[image[..., 2]]]
    return np.concatenate([*(part.reshape(-1) for part in parts), np.eye(4)[seen["direction"]]])


Method = arsm.Estimator | Value
SHORT_PPO: tuple[dict[str, Any], ...] = (
    {"n_steps": 128, "batch_size": 256, "learning_rate": 1e-3, "ent_coef": 0.01},
    {
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": "lin_0.001",
        "clip_range": "lin_0.2",
    },
)
"""Where the zoo has none: few steps per update, as short runs need; the second are the zoo's for
CartPole. The defaults, 2,048 steps of eight environments, would make one to three updates.
"""
SHORT_A2C: tuple[dict[str, Any], ...] = (
    {},
    {
        "environments": 16,
        "n_steps": 16,
        "gae_lambda": 0.95,
        "ent_coef": 0.01,
        "learning_rate": "lin_0.002",
    },
)
"""Where the zoo has none: the defaults, and longer steps with a bonus."""


@dataclass(frozen=True)
class Row:
    """A task."""

    environment: str | Callable[[], Any]
    seconds: float
    """CPU seconds of learning."""
    steps: int
    """Simulator steps after which the methods are compared too."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of PolicyGradient, besides the environment."""
    ppo: tuple[dict[str, Any], ...] = SHORT_PPO
    """Settings of Stable-Baselines3's PPO, the zoo's alone where it has some; `environments` and
    `normalize` are the zoo's.
    """
    a2c: tuple[dict[str, Any], ...] = SHORT_A2C
    masked: bool = False
    """Whether MaskablePPO runs too."""
    several: bool = False
    """Whether a step has several action variables."""
    line: float = math.inf
    """The return that counts as solved; the CPU seconds until 100 episodes of learning average it
    are recorded.
    """


ROWS: dict[str, Row] = {
    "FrozenLake 8x8": Row("FrozenLake8x8-v1", 12, 15_000),
    "Taxi": Row("Taxi-v4", 12, 12_000, masked=True),
    "MiniGrid-DoorKey-5x5": Row(
        "minigrid:MiniGrid-DoorKey-5x5-v0",
        20,
        12_000,
        {"encoder": grid_features},
        ppo=(
            {
                "environments": 8,
                "n_steps": 128,
                "batch_size": 64,
                "gae_lambda": 0.95,
                "gamma": 0.99,
                "n_epochs": 10,
                "ent_coef": 0.0,
                "learning_rate": 2.5e-4,
                "clip_range": 0.2,
                "normalize": True,
            },
        ),
    ),
    "CartPole": Row(
        "CartPole-v1",
        10,
        20_000,
        ppo=(
            {
                "environments": 8,
                "n_steps": 32,
                "batch_size": 256,
                "gae_lambda": 0.8,
                "gamma": 0.98,
                "n_epochs": 20,
                "ent_coef": 0.0,
                "learning_rate": "lin_0.001",
                "clip_range": "lin_0.2",
            },
        ),
        a2c=({"environments": 8, "ent_coef": 0.0},),
        line=475.0,
    ),
    "Acrobot": Row(
        "Acrobot-v1",
        12,
        25_000,
        ppo=(
            {
                "environments": 16,
                "normalize": True,
                "n_steps": 256,
                "gae_lambda": 0.94,
                "gamma": 0.99,
                "n_epochs": 4,
                "ent_coef": 0.0,
            },
        ),
        a2c=({"environments": 16, "normalize": True, "ent_coef": 0.0},),
        line=-100.0,
    ),
    "LunarLander": Row(
        "LunarLander-v3",
        30,
        60_000,
        ppo=(
            {
                "environments": 16,
                "n_steps": 1024,
                "batch_size": 64,
                "gae_lambda": 0.98,
                "gamma": 0.999,
                "n_epochs": 4,
                "ent_coef": 0.01,
            },
        ),
        a2c=(
            {
                "environments": 8,
                "gamma": 0.995,
                "n_steps": 5,
                "ent_coef": 1e-5,
                "learning_rate": "lin_0.00083",
            },
        ),
        line=200.0,
    ),
    "Knobs, K = 4": Row(partial(Knobs, 4), 10, 8_000, several=True),
    "Knobs, K = 16": Row(partial(Knobs, 16), 12, 5_000, several=True),
    "Spread, 3 agents": Row(
        partial(spread, 3), 15, 5_000, {"snapshot": (get_state, set_state)}, several=True
    ),
}
POOLED = "ARSM, pooled"
"""Runs only where a step has several action variables."""
OURS: dict[str, tuple[Method, dict[str, Any]]] = {
    "ARSM": (arsm.ARSM(), {}),
    POOLED: (arsm.ARSM(pooled=True), {}),
    "RLOO(2)": (arsm.RLOO(2), {}),
    "RLOO(4)": (arsm.RLOO(4), {}),
    "value": (Value(), {}),
    "both": (Value(branch=arsm.RLOO(2)), {}),
    "both, more branches": (Value(branch=arsm.RLOO(2), every=4, cut=16), {"budget": 64}),
}
"""This library's methods, and the settings that are not the defaults."""
FIRST_SEED = 300
LAZY = ["torch._dynamo", "torch.distributions"]
"""Modules that the first optimizer of a process imports, which takes seconds."""
RIVALS = ["benchmarks.baselines"] if importlib.util.find_spec("stable_baselines3") else []
"""Modules that need Stable-Baselines3, if it is installed."""


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    method: str
    seed: int
    seconds: float
    compared_at: int
    """Simulator steps after which it is evaluated besides."""
    episodes: int
    """Of each evaluation."""


def methods(row: Row) -> list[str]:
    """The names of a row's methods: "PPO, 2" is PPO with its second settings."""
    names = [name for name in OURS if row.several or name != POOLED]
    rivals = {"PPO": row.ppo, "A2C": row.a2c, "MaskablePPO": row.ppo if row.masked else ()}
    for name, settings in rivals.items():
        names += [
            name if not number else f"{name}, {number + 1}" for number in range(len(settings))
        ]
    return names


def jobs(
    rows: list[str], first: int, seeds: int, seconds: float | None, episodes: int
) -> Iterator[Job]:
    """All runs of these rows, seed by seed and row by row: the methods of a row run side by
    side.
    """
    for seed in range(first, first + seeds):
        for name in rows:
            row = ROWS[name]
            for method in methods(row):
                yield Job(name, method, seed, seconds or row.seconds, row.steps, episodes)


def run(job: Job) -> dict[str, Any]:
    """Learn, then play."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # imports are not learning: no clock runs yet
    for module in (*LAZY, *RIVALS):
        importlib.import_module(module)
    began = time.perf_counter()
    if job.method in OURS:
        found = ours(job)
    else:
        # Stable-Baselines3 is needed to run its methods, not to report them
        from benchmarks import baselines

        row = ROWS[job.row]
        name, _, number = job.method.partition(", ")
        options = (row.a2c if name == "A2C" else row.ppo)[int(number or 1) - 1]
        watch = Watch(job, row.line)
        found = baselines.learn(name, single(row), options, watch)
    return {**found, "wall": time.perf_counter() - began}


class OnCpu(PolicyGradient):
    """Counts the seconds of `learn` by the process's CPU time, without those of evaluations."""

    def __init__(self, watch: Watch, *arguments: Any, **settings: Any) -> None:
        self._watch = watch
        super().__init__(*arguments, **settings)

    def _clock(self) -> dict[str, float]:
        return {**super()._clock(), "seconds": self._watch.spent()}


def ours(job: Job) -> dict[str, Any]:
    """This library's agent."""
    row, (credit, settings) = ROWS[job.row], OURS[job.method]
    watch = Watch(job, row.line)
    recent = deque[float](maxlen=WINDOW)
    agent = OnCpu(watch, row.environment, credit, seed=job.seed, **row.arguments, **settings)

    def play(likely: bool) -> float:
        return agent.evaluate(job.episodes, deterministic=likely).mean

    def look(iteration: Iteration) -> None:
        recent.extend(iteration.returns)
        watch.look(agent.steps + agent.replayed, recent, play)

    left = max(0.0, job.seconds - watch.spent())
    agent.learn(seconds=left, callback=look, progress=False)
    found = watch.found(agent.steps + agent.replayed, play)
    agent.close()
    return found


def single(row: Row) -> Callable[[], Any]:
    """A function that makes the environment with the same encoding as this library's agent sees."""
    return partial(_encoded, row)


def _encoded(row: Row) -> Any:
    if isinstance(row.environment, str):
        env = gymnasium.make(row.environment)
    else:
        env = row.environment()
        if not isinstance(env, gymnasium.Env):
            return env  # a team, which independent PPO takes as it is
    encoder = row.arguments.get("encoder") or partial(encode, env.observation_space)
    shape = (
        np.asarray(encoder(env.reset(seed=0)[0])).shape
        if row.arguments
        else encoded_shape(env.observation_space)
    )
    space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
    return gymnasium.wrappers.TransformObservation(
        env, lambda seen: np.asarray(encoder(seen), np.float32), space
    )


def work(path: Path, wanted: list[Any], run: Callable[[Any], dict[str, Any]], workers: int) -> None:
    """Run the jobs that have no line in this file yet, and append a line for each: the job and what
    it found.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read(path)
    left = [job for job in wanted if not any(vars(job).items() <= line.items() for line in done)]
    place = {
        name: value
        for name, value in provenance("cpu").items()
        if name in ("hardware", "commit", "torch")
    }
    # a fresh process per job, forked from one that has imported what all need
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["arsm.rl", *LAZY, *RIVALS])
    began = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        running = {pool.submit(run, job): job for job in left}
        for number, ended in enumerate(as_completed(running), 1):
            job = running[ended]
            minutes = (time.monotonic() - began) / number * (len(left) - number) / 60
            try:
                found = ended.result()
            except Exception as error:
                print(f"{job} failed: {error!r}", flush=True)
                continue
            with path.open("a") as file:
                file.write(json.dumps({**vars(job), **found, **place}) + "\n")
            numbers = ", ".join(f"{name} {value}" for name, value in found.items())
            print(f"[{number}/{len(left)}, {minutes:.0f} min left] {job}: {numbers}", flush=True)


def main() -> None:
    """Run what is not done yet, then write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--seconds", type=float, help="CPU seconds per job instead of the row's")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--episodes", type=int, default=50, help="episodes of each evaluation")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="jobs at a time")
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument(
        "--methods", nargs="*", metavar="METHOD", help="of the row's methods, only these"
    )
    parser.add_argument("--folder", type=Path, default=Path("results/agents"))
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="FOLDER",
        help="run nothing, and add the complete blocks of another folder's runs",
    )
    chosen = parser.parse_args()
    if chosen.publish is not None:
        archive = chosen.folder / "runs.jsonl.xz"
        for row, seed in publish(
            chosen.publish / "runs.jsonl", archive, lambda row: methods(ROWS[row])
        ):
            print(f"Added {row}, seed {seed}.")
    elif not chosen.report:
        wanted = [
            job
            for job in jobs(
                chosen.rows, chosen.first_seed, chosen.seeds, chosen.seconds, chosen.episodes
            )
            if chosen.methods is None or job.method in chosen.methods
        ]
        work(chosen.folder / "runs.jsonl", wanted, run, chosen.workers)
    report(chosen.folder)
    print(f"Wrote {chosen.folder}/table.csv and agents.png.")


if __name__ == "__main__":
    main()
