"""Agents at equal CPU seconds: this library's defaults beside Stable-Baselines3's PPO and A2C.

    python -m benchmarks.agents              # 120 CPU seconds, five seeds, one worker per processor
    python -m benchmarks.agents --seconds 20 --seeds 2 --rows CartPole Taxi
    python -m benchmarks.agents --report     # only write table.csv and the figure

Each row, method and seed is one job in a process of its own with one thread. Its line is appended
to runs.jsonl, and a job that has a line is not run again. It learns until the process has spent the
CPU seconds, then plays 100 episodes with sampled and 100 with the likeliest actions; a method is
credited with the better of the two. This library's methods have the same settings, the defaults, on
every row. Stable-Baselines3 has the settings that RL Baselines3 Zoo publishes for a task
(hyperparams/ppo.yml and a2c.yml, whose linear schedules fall over the CPU seconds), and its
defaults with eight environments elsewhere. All methods of a row see the same encoding of the
observations. Where an environment has action masks, sb3-contrib's MaskablePPO uses them too, and
this library runs without them besides.
"""

from __future__ import annotations

import argparse
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
from benchmarks.agents_report import WINDOW, read, report


def grid_features(seen: Any) -> Any:
    """MiniGrid's view as one-hot vectors of each cell's object and state, and the direction, for
    every method alike.
    """
    image = np.asarray(seen["image"])
    parts = [np.eye(11)[image[..., 0]], np.eye(3)[image[..., 2]]]
    return np.concatenate([*(part.reshape(-1) for part in parts), np.eye(4)[seen["direction"]]])


class Unmasked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Without action masks."""

    def reset(self, **arguments: Any) -> Any:
        seen, _ = self.env.reset(**arguments)
        return seen, {}

    def step(self, action: Any) -> Any:
        return *self.env.step(action)[:4], {}


def taxi_without_masks() -> Any:
    """Taxi as a method without masks meets it."""
    return Unmasked(gymnasium.make("Taxi-v4"))


Method = arsm.Estimator | Value


@dataclass(frozen=True)
class Row:
    """A task."""

    environment: str | Callable[[], Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of PolicyGradient, besides the environment."""
    ppo: dict[str, Any] = field(default_factory=dict)
    """Of Stable-Baselines3's PPO, from the zoo's hyperparams/ppo.yml; `environments` and
    `normalize` are the zoo's.
    """
    a2c: dict[str, Any] = field(default_factory=dict)
    unmasked: Callable[[], Any] | None = None
    line: float = math.inf
    """The return that counts as solved; the CPU seconds until 100 episodes of learning average it
    are recorded.
    """
    others: dict[str, tuple[Method, dict[str, Any]]] = field(default_factory=dict)
    """Further methods, which run only if they are named, with settings that are not the
    defaults.
    """


LANDER: dict[str, Any] = {
    "hidden": (64, 64),
    "learning_rate": 0.003,
    "reward_scale": 0.01,
    "entropy": 0.0,
}
ROWS: dict[str, Row] = {
    "FrozenLake 8x8": Row("FrozenLake8x8-v1"),
    "Taxi": Row("Taxi-v4", unmasked=taxi_without_masks),
    "MiniGrid-DoorKey-5x5": Row(
        "minigrid:MiniGrid-DoorKey-5x5-v0",
        {"encoder": grid_features},
        ppo={
            **{
                "environments": 8,
                "n_steps": 128,
                "batch_size": 64,
                "gae_lambda": 0.95,
                "gamma": 0.99,
                "n_epochs": 10,
            },
            **{"ent_coef": 0.0, "learning_rate": 2.5e-4, "clip_range": 0.2, "normalize": True},
        },
    ),
    "CartPole": Row(
        "CartPole-v1",
        ppo={
            **{
                "environments": 8,
                "n_steps": 32,
                "batch_size": 256,
                "gae_lambda": 0.8,
                "gamma": 0.98,
                "n_epochs": 20,
            },
            **{"ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2"},
        },
        a2c={"environments": 8, "ent_coef": 0.0},
        line=475.0,
    ),
    "Acrobot": Row(
        "Acrobot-v1",
        ppo={
            **{
                "environments": 16,
                "normalize": True,
                "n_steps": 256,
                "gae_lambda": 0.94,
                "gamma": 0.99,
            },
            **{"n_epochs": 4, "ent_coef": 0.0},
        },
        a2c={"environments": 16, "normalize": True, "ent_coef": 0.0},
        line=-100.0,
    ),
    "LunarLander": Row(
        "LunarLander-v3",
        ppo={
            **{
                "environments": 16,
                "n_steps": 1024,
                "batch_size": 64,
                "gae_lambda": 0.98,
                "gamma": 0.999,
            },
            **{"n_epochs": 4, "ent_coef": 0.01},
        },
        a2c={
            "environments": 8,
            "gamma": 0.995,
            "n_steps": 5,
            "ent_coef": 1e-5,
            "learning_rate": "lin_0.00083",
        },
        line=200.0,
        others={
            "ARSM, 64 and 64 units": (
                arsm.ARSM(),
                {**LANDER, "episodes_an_iteration": 8, "budget": 32},
            ),
            "ARSM, budget 1,024": (
                arsm.ARSM(),
                {
                    **LANDER,
                    "hidden": (10, 10),
                    "learning_rate": 0.03,
                    "episodes_an_iteration": 1,
                    "budget": 1024,
                },
            ),
            "the value, RLOO(2) cut after 32 steps": (
                Value(branch=arsm.RLOO(2), every=4, cut=32),
                {"hidden": (64, 64), "learning_rate": 0.003},
            ),
        },
    ),
    "Knobs, K = 4": Row(partial(Knobs, 4)),
    "Knobs, K = 16": Row(partial(Knobs, 16)),
    "Spread, 3 agents": Row(partial(spread, 3), {"snapshot": (get_state, set_state)}),
}
OURS: dict[str, Method] = {
    "the default": Value(),
    "the default with RLOO(2)": Value(branch=arsm.RLOO(2), where="random"),
    "RLOO(2) where the value is unsure": Value(branch=arsm.RLOO(2)),
    "RLOO(2)": arsm.RLOO(2),
    "ARSM": arsm.ARSM(),
}
FIRST = ("the default", "PPO", "A2C")
"""The methods whose runs come before all others."""
MASKED = "MaskablePPO"


@dataclass(frozen=True)
class Job:
    """One run."""

    row: str
    method: str
    seed: int
    seconds: float
    episodes: int
    """Of each evaluation."""


def jobs(rows: list[str], seeds: int, seconds: float, episodes: int) -> Iterator[Job]:
    """All runs of these rows, seed by seed."""
    rest = [method for method in OURS if method not in FIRST]
    for number, methods in enumerate((FIRST, rest)):
        for seed in range(seeds):
            for name in rows:
                masks = (
                    (MASKED, "the default, no masks") if not number and ROWS[name].unmasked else ()
                )
                for method in (*methods, *masks):
                    yield Job(name, method, seed, seconds, episodes)
    for seed in range(seeds):
        for name in rows:
            for method in ROWS[name].others:
                yield Job(name, method, seed, seconds, episodes)


def run(job: Job) -> dict[str, Any]:
    """Learn, then play."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    row = ROWS[job.row]
    began = time.perf_counter()
    method = job.method.removesuffix(", no masks")
    if method in OURS or method in row.others:
        environment = row.unmasked if method != job.method and row.unmasked else row.environment
        credit, settings = row.others.get(method) or (OURS[method], {})
        found = ours(environment, {**row.arguments, **settings}, credit, job)
    else:
        # Stable-Baselines3 is needed to run its methods, not to report them
        from benchmarks import baselines

        options = row.a2c if job.method == "A2C" else row.ppo
        found = baselines.learn(
            job.method, single(row), options, job.seed, job.seconds, job.episodes, row.line
        )
    return {**found, "wall": time.perf_counter() - began}


class OnCpu(PolicyGradient):
    """Counts the seconds of `learn` by the process's CPU time."""

    def _clock(self) -> dict[str, float]:
        return {**super()._clock(), "seconds": time.process_time()}


def ours(environment: Any, arguments: dict[str, Any], credit: Method, job: Job) -> dict[str, Any]:
    """This library's agent."""
    begin = time.process_time()
    line, recent = ROWS[job.row].line, deque[float](maxlen=WINDOW)
    solved: list[float] = []

    def watch(iteration: Iteration) -> None:
        recent.extend(iteration.returns)
        if not solved and len(recent) == recent.maxlen and np.mean(recent) >= line:
            solved.append(time.process_time() - begin)

    agent = OnCpu(environment, credit, seed=job.seed, **arguments)
    agent.learn(seconds=job.seconds - (time.process_time() - begin), callback=watch, progress=False)
    spent = time.process_time() - begin
    sampled, likeliest = (
        agent.evaluate(job.episodes, deterministic=likely).mean for likely in (False, True)
    )
    agent.close()
    steps = agent.steps + agent.replayed
    return {
        "sampled": sampled,
        "likeliest": likeliest,
        "cpu": spent,
        "steps": steps,
        "solved": solved,
    }


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
    context = multiprocessing.get_context("spawn")
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
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU seconds per job")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100, help="episodes of each evaluation")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="jobs at a time")
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument(
        "--methods", nargs="*", metavar="METHOD", help="of the row's methods, only these"
    )
    parser.add_argument("--folder", type=Path, default=Path("results/agents"))
    parser.add_argument("--report", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    path = chosen.folder / "runs.jsonl"
    if not chosen.report:
        wanted = [*jobs(chosen.rows, chosen.seeds, chosen.seconds, chosen.episodes)]
        others = {name for row in ROWS.values() for name in row.others}
        named = (
            {job.method for job in wanted} - others
            if chosen.methods is None
            else set(chosen.methods)
        )
        work(path, [job for job in wanted if job.method in named], run, chosen.workers)
    report(chosen.folder, chosen.seconds)
    print(f"Wrote {chosen.folder}/table.csv and agents.png.")


if __name__ == "__main__":
    main()
