"""The whole experiment, unattended: `python -m arsm_experiments.sequences.schedule --seconds 1100
--workers 6`.

Worker processes take the next job whose requirements are met, from one list in order of importance:
cross-entropy to the checkpoints, variances, then each task's trainings: every size of an update and
every rate on seed 0, then the reported seeds, each method with the size and rate that are best for
each goal. Records are written at once. Started again, it goes on with what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from arsm_experiments.runs import lines
from arsm_experiments.sequences.curves import (
    GOALS,
    Choice,
    Ending,
    Run,
    Trial,
    best_choice,
    crossing,
    finished,
    train,
)
from arsm_experiments.sequences.measure import LEVELS, checkpoint_path, measure_level, pretrain
from arsm_experiments.sequences.methods import SMALL, Size
from arsm_experiments.sequences.tasks import load

FIRST = ("likeliest", "token baseline 8", "value head", "branch rloo 64, chance", "group", "grpo 8")
"""The methods that are trained first; "group" stands for the task's own one."""
LAST = ("vineppo 2",)
MEASURED = (
    *("group 2", "group 4", "group 8", "group 16", "token baseline 8", "value head", "vineppo 2"),
    *(
        "branch rloo 16, true returns",
        "branch rloo 16",
        "branch rloo 64, chance",
        "branch all, chance",
    ),
    *("likeliest, greedy", "likeliest", "branch rloo 16, fresh prompts", "group 8, fresh prompts"),
)
"""Methods whose variance is measured."""


@dataclass(frozen=True)
class Setting:
    """How a task is trained. Every method chooses a size and a rate from the same grid."""

    sizes: tuple[int, ...]
    """Generated tokens per update."""
    rates: tuple[float, ...]
    """The rates that win most often come first: a trial ends when it can no longer win."""
    longest: int = 600_000
    """Most generated tokens of a run."""
    lost: int = 40_000
    """Generated tokens after which a trial ends if its accuracy has halved."""
    group: str = "group 4"
    seeds: tuple[int, ...] = (1, 2, 3)

    def shrink(self, factor: float) -> Setting:
        """As many times fewer tokens."""
        longest, lost, *sizes = (
            int(tokens / factor) for tokens in (self.longest, self.lost, *self.sizes)
        )
        return replace(self, longest=longest, lost=lost, sizes=tuple(sizes))


Settings = dict[str, Setting]
SETTINGS = {
    "spiral_matrix": Setting((400, 2_000), (1e-3, 3e-3, 3e-4, 1e-4)),
    "spell_backward": Setting(
        (400, 1_000), (1e-3, 3e-3, 3e-4, 1e-4), 300_000, 20_000, "group 8", (1, 2, 3, 4, 5)
    ),
    "small_sorting": Setting((1_000, 2_000), (1e-4, 3e-4, 3e-5)),
    "small_filtering": Setting((4_000, 8_000), (3e-4, 1e-4), 2_400_000),
}


@dataclass(frozen=True)
class Job:
    """Something that one worker does in one go."""

    kind: str
    """pretrain, variance or train."""
    task: str
    level: float = LEVELS[0]
    """Of the checkpoint to start from; the last one to reach for a pretraining."""
    method: str = ""
    choice: Choice | None = None
    """None: the best of seed 0 for the goal."""
    seed: int = 0
    goal: float = GOALS[-1]
    """The accuracy to reach."""

    def name(self) -> str:
        """Of the file that says who does it."""
        words = (
            self.kind,
            self.task,
            self.level,
            self.method,
            *(self.choice or ("best",)),
            self.seed,
            self.goal,
        )
        return "-".join(str(word).replace(" ", "_") for word in words)


def jobs(settings: Settings, measured: set[tuple[str, float]]) -> list[Job]:
    """All jobs, the most important ones first, without the variances that were measured by (task,
    level).
    """
    wanted = itertools.product((LEVELS[-1], *LEVELS[:-1]), settings)
    variances = [
        Job("variance", task, level) for level, task in wanted if (task, level) not in measured
    ]
    first = [
        Job(
            "pretrain",
            task,
            max([LEVELS[0], *(job.level for job in variances if job.task == task)]),
        )
        for task in settings
    ]
    *quick, slowest = settings.items()
    trained = [
        (methods, task)
        for tasks in (quick, [slowest])
        for methods in (FIRST, LAST)
        for task in tasks
    ]
    return (
        first
        + variances
        + [job for methods, (task, setting) in trained for job in trainings(methods, task, setting)]
    )


def trainings(methods: tuple[str, ...], task: str, setting: Setting) -> list[Job]:
    """Seed 0 with every size and rate, then the reported seeds for every goal."""
    names = [setting.group if method == "group" else method for method in methods]
    grid = [(size, rate) for rate, size in itertools.product(setting.rates, setting.sizes)]
    trials = [
        Job("train", task, method=name, choice=choice)
        for choice, name in itertools.product(grid, names)
    ]
    reported = itertools.product(reversed(GOALS), setting.seeds, names)
    return trials + [
        Job("train", task, method=name, seed=seed, goal=goal) for goal, seed, name in reported
    ]


class Worker:
    """Does one job after the other."""

    def __init__(
        self, data: Path, out: Path, device: str, size: Size, settings: Settings, deadline: float
    ) -> None:
        self.data, self.out, self.device, self.size, self.settings = (
            data,
            out,
            device,
            size,
            settings,
        )
        self.deadline = deadline
        self.load = cache(lambda task: load(data / f"{task}.pt", device))

    def work(self) -> None:
        """Until nothing is left or the time is over."""
        todo = jobs(self.settings, self.measured())
        while time.time() < self.deadline:
            todo = [job for job in todo if not self._claim(job).exists()]
            job = next((job for job in todo if self.ready(job)), None)
            if job is not None and self._take(job):
                self.do(job)
            elif not todo:
                return
            elif job is None:
                time.sleep(0.5)

    def measured(self) -> set[tuple[str, float]]:
        """The tasks and levels at which every variance was measured."""
        found: dict[tuple[str, float], set[str]] = defaultdict(set)
        for task in self.settings:
            for record in lines.read(self.out / f"variance-{task}.jsonl"):
                found[task, record["level"]].add(record["method"])
        return {key for key, names in found.items() if names >= set(MEASURED)}

    def _claim(self, job: Job) -> Path:
        return self.out / "claims" / job.name()

    def _take(self, job: Job) -> bool:
        try:
            self._claim(job).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def ready(self, job: Job) -> bool:
        """Is there the checkpoint to start from, and a choice?"""
        if job.kind == "pretrain":
            return True
        there = checkpoint_path(self.out, job.task, job.level).exists()
        return there and (job.kind == "variance" or self.choice(job) is not None)

    def runs(self, job: Job, seed: int) -> dict[Choice, Run]:
        """The method's finished runs of a seed."""
        path = self._curves(job.task)
        found = _finished(path, path.stat().st_size) if path.exists() else {}
        return found.get((job.level, job.method, seed), {})

    def limit(self, job: Job, seed: int) -> float:
        """Most tokens of a run. A trial can no longer win when another one has reached the last
        goal with fewer.
        """
        trials = {} if seed else self.runs(job, 0)
        reached = [
            known[0] for run in trials.values() if (known := crossing(run, GOALS[-1])) is not None
        ]
        return min([self.settings[job.task].longest, *reached])

    def done(self, job: Job, seed: int) -> dict[Choice, Run]:
        """The method's finished runs of a seed, without trials that could still win."""
        runs, limit = self.runs(job, seed), self.limit(job, 0)
        lost = {choice for choice, run in runs.items() if run[-1]["accuracy"] < job.level / 2}
        return {
            choice: run
            for choice, run in runs.items()
            if seed or choice in lost or run[-1]["tokens"] >= limit
        }

    def choice(self, job: Job) -> Choice | None:
        """The tokens per update and the rate to train with; none before all have been tried on seed
        0.
        """
        if job.choice is not None:
            return job.choice
        setting = self.settings[job.task]
        grid = set(itertools.product(setting.sizes, setting.rates))
        tried = {choice: run for choice, run in self.done(job, 0).items() if choice in grid}
        return best_choice(tried, job.goal) if tried.keys() == grid else None

    def _curves(self, task: str) -> Path:
        return self.out / f"curves-{task}.jsonl"

    def do(self, job: Job) -> None:
        """One job."""
        print(f"{time.time() - self.deadline:.0f} s: {job.name()}", flush=True)
        if job.kind == "pretrain":
            levels = tuple(level for level in LEVELS if level <= job.level)
            pretrain(
                job.task,
                self.load(job.task),
                self.size,
                self.out,
                self.device,
                self.deadline,
                levels,
            )
        elif job.kind == "variance":
            arguments = (self.load(job.task), self.size, self.out, self.device, 4096, self.deadline)
            measure_level(job.task, job.level, MEASURED, *arguments)
        else:
            self._train(job)

    def _train(self, job: Job) -> None:
        setting, choice, path = self.settings[job.task], self.choice(job), self._curves(job.task)
        assert choice is not None
        higher = [replace(job, goal=goal) for goal in GOALS if goal > job.goal]
        if choice in self.done(job, job.seed) or choice in map(self.choice, higher):
            return  # a run to a higher goal passes this one
        train(
            Trial(job.task, job.level, job.method, *choice, job.seed),
            Ending(
                job.goal,
                lambda: self.limit(job, job.seed),
                math.inf if job.seed else setting.lost,
                self.deadline,
            ),
            self.load(job.task),
            self.size,
            checkpoint_path(self.out, job.task, job.level),
            path,
            self.device,
            4096,
        )


@lru_cache(maxsize=8)
def _finished(path: Path, size: int) -> dict[tuple[float, str, int], dict[Choice, Run]]:
    """Reads the file again when it has grown to another size."""
    return finished(lines.read(path))


def supervise(workers: int, seconds: float, words: list[str]) -> None:
    """Start the workers, and start one again that died; its job is left out."""
    deadline, command = time.time() + seconds, [sys.executable, "-m", __spec__.name, *words]
    running = [subprocess.Popen([*command, "--until", str(deadline)]) for _ in range(workers)]
    while running and time.time() < deadline + 20:
        time.sleep(0.5)
        died = [process for process in running if process.poll() not in (None, 0)]
        running = [process for process in running if process.poll() is None]
        running += [
            subprocess.Popen([*command, "--until", str(deadline)])
            for _ in died
            if time.time() < deadline - 20
        ]
    for process in running:
        process.kill()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1100)
    parser.add_argument(
        "--small",
        type=float,
        default=0,
        help="A tiny model and as many times fewer tokens, for a trial",
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until is not None:
        torch.set_num_threads(1)
        size = replace(SMALL, patience=0.1) if options.small else Size()
        settings = {task: setting.shrink(options.small or 1) for task, setting in SETTINGS.items()}
        Worker(options.data, options.out, options.device, size, settings, options.until).work()
        return
    claims = options.out / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for claim in claims.iterdir():
        claim.unlink()
    supervise(options.workers, options.seconds, sys.argv[1:])


if __name__ == "__main__":
    main()
