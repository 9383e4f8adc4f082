"""The whole experiment, unattended: `python -m arsm_experiments.sequences.schedule --seconds 1100 --workers 6`.

Worker processes take the next job whose requirements are met, from one list in order of importance: cross-entropy to
the checkpoints, variances, the rates on seed 0, then the reported seeds, each method at its better rate. Records are
written at once. Started again, it goes on with what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from arsm_experiments.sequences.curves import best_rates, train
from arsm_experiments.sequences.measure import LEVELS, checkpoint_path, measure_level, pretrain
from arsm_experiments.sequences.methods import SMALL, Size, read_lines
from arsm_experiments.sequences.tasks import load

FIRST = ("likeliest", "value head", "branch rloo 64, chance", "token baseline 8", "group")
"""The methods that are trained first; "group" stands for the task's best one."""
SECOND = ("grpo 8", "vineppo 2")
MEASURED = (
    *("group 2", "group 4", "group 8", "group 16", "token baseline 8", "value head", "vineppo 2"),
    *("branch rloo 16, true returns", "branch rloo 16", "branch rloo 64, chance", "branch all, chance"),
    *("likeliest, greedy", "likeliest", "branch rloo 16, fresh prompts", "group 8, fresh prompts"),
)
"""Methods whose variance is measured."""


@dataclass(frozen=True)
class Setting:
    """How a task is trained."""

    per_update: int
    """Generated tokens of an update."""
    rates: tuple[float, ...]
    group: str = "group 4"
    seeds: tuple[int, ...] = (1, 2, 3)


Settings = dict[str, Setting]
SETTINGS = {
    "spiral_matrix": Setting(2_000, (1e-4, 3e-4, 1e-3)),
    "small_sorting": Setting(2_000, (1e-4, 3e-4, 1e-3)),
    "small_filtering": Setting(2_000, (1e-4, 3e-4, 1e-3)),
    "spell_backward": Setting(1_000, (1e-4, 3e-4, 1e-3), "group 8", (1, 2, 3, 4, 5)),
}
SMALL_UPDATES = {
    "spiral_matrix": Setting(400, (3e-4, 1e-3, 3e-3), "group 8"),
    "spell_backward": Setting(400, (3e-4, 1e-3, 3e-3), "group 8"),
}
"""Updates so small that noise limits the rate; with `NARROW` a CPU does them."""
NARROW = Size(width=96, layers=3, heads=3, batch=128, tested=256)
TRIAL = 60
"""Updates of a run that chooses the rate."""
LONGEST = 300
"""Most updates of a reported run."""


@dataclass(frozen=True)
class Job:
    """Something that one worker does in one go."""

    kind: str
    """pretrain, variance or train."""
    task: str
    level: float = LEVELS[0]
    """Of the checkpoint to start from; the last one to reach for a pretraining."""
    method: str = ""
    rate: float | None = None
    """None: the best of seed 0."""
    seed: int = 0

    def name(self) -> str:
        """Of the file that says who does it."""
        words = (self.kind, self.task, self.level, self.method, self.rate, self.seed)
        return "-".join(str(word).replace(" ", "_") for word in words)


def jobs(settings: Settings, seeds: int = 3) -> list[Job]:
    """All jobs, the most important ones first; every task has at least `seeds` seeds."""
    found = [Job("pretrain", task, LEVELS[-1]) for task in settings]
    found += [Job("variance", task, LEVELS[-1]) for task in settings]
    for methods in (FIRST, SECOND):
        found += trainings(methods, settings, range(seeds))
        if methods == FIRST:
            found += [Job("variance", task, level) for level in LEVELS[:-1] for task in settings]
    most = max(len(setting.seeds) for setting in settings.values())
    return found + trainings((*FIRST, *SECOND), settings, range(seeds, most))


def trainings(methods: tuple[str, ...], settings: Settings, seeds: range) -> list[Job]:
    """Seed 0 at every rate, then the reported seeds with these numbers."""
    pairs = [
        (task, setting.group if method == "group" else method)
        for method, (task, setting) in itertools.product(methods, settings.items())
    ]
    trials = [Job("train", task, method=name, rate=rate) for task, name in pairs for rate in settings[task].rates]
    reported = [
        Job("train", task, method=name, seed=seed)
        for number, (task, name) in itertools.product(seeds, pairs)
        for seed in settings[task].seeds[number : number + 1]
    ]
    return ([] if seeds.start else trials) + reported


class Worker:
    """Does one job after the other."""

    def __init__(
        self, data: Path, out: Path, device: str, size: Size, settings: Settings, deadline: float, shrink: float
    ) -> None:
        self.data, self.out, self.device, self.size, self.settings = data, out, device, size, settings
        self.deadline, self.shrink = deadline, shrink
        self.load = cache(lambda task: load(data / f"{task}.pt", device))

    def work(self, todo: list[Job]) -> None:
        """Until nothing is left or the time is over."""
        while time.time() < self.deadline:
            todo = [job for job in todo if not self._claim(job).exists()]
            job = next((job for job in todo if self.ready(job)), None)
            if job is not None and self._take(job):
                self.do(job)
            elif not todo:
                return
            elif job is None:
                time.sleep(0.5)

    def _claim(self, job: Job) -> Path:
        return self.out / "claims" / job.name()

    def _take(self, job: Job) -> bool:
        try:
            self._claim(job).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def ready(self, job: Job) -> bool:
        """Is there the checkpoint to start from, and a rate?"""
        if job.kind == "pretrain":
            return True
        there = checkpoint_path(self.out, job.task, job.level).exists()
        return there and (job.kind == "variance" or self.rates(job) != ())

    def rates(self, job: Job) -> tuple[float, ...]:
        """The rate to train with; none before all rates have been tried on seed 0."""
        if job.rate is not None:
            return (job.rate,)
        records = [r for r in read_lines(self._curves(job.task)) if (r["method"], r["seed"]) == (job.method, 0)]
        tried = {r["rate"] for r in records if r["end"] and r["start"] == job.level}
        return tuple(best_rates(records, job.method, job.level)) if tried >= set(self.settings[job.task].rates) else ()

    def _curves(self, task: str) -> Path:
        return self.out / f"curves-{task}.jsonl"

    def do(self, job: Job) -> None:
        """One job."""
        print(f"{time.time() - self.deadline:.0f} s: {job.name()}", flush=True)
        if job.kind == "pretrain":
            levels = tuple(level for level in LEVELS if level <= job.level)
            rate = 1e-3 if self.size == NARROW else 5e-4
            pretrain(job.task, self.load(job.task), self.size, self.out, self.device, self.deadline, levels, rate)
        elif job.kind == "variance":
            arguments = (self.load(job.task), self.size, self.out, self.device, 4096, self.deadline)
            measure_level(job.task, job.level, MEASURED, *arguments)
        else:
            self._train(job)

    def _train(self, job: Job) -> None:
        setting, (rate,) = self.settings[job.task], self.rates(job)
        done = {(r["start"], r["method"], r["rate"], r["seed"]) for r in read_lines(self._curves(job.task)) if r["end"]}
        if (job.level, job.method, rate, job.seed) in done:
            return
        tokens = setting.per_update * (LONGEST if job.seed else TRIAL)
        train(
            job.method,
            rate,
            job.seed,
            job.task,
            job.level,
            self.load(job.task),
            self.size,
            checkpoint_path(self.out, job.task, job.level),
            self._curves(job.task),
            self.device,
            int(tokens / self.shrink),
            int(setting.per_update / self.shrink),
            4096,
            self.deadline,
        )


def supervise(workers: int, seconds: float, words: list[str]) -> None:
    """Start the workers, and start one again that died; its job is left out."""
    deadline, command = time.time() + seconds, [sys.executable, "-m", __spec__.name, *words]
    running = [subprocess.Popen([*command, "--until", str(deadline)]) for _ in range(workers)]
    while running and time.time() < deadline + 20:
        time.sleep(0.5)
        died = [process for process in running if process.poll() not in (None, 0)]
        running = [process for process in running if process.poll() is None]
        running += [subprocess.Popen([*command, "--until", str(deadline)]) for _ in died if time.time() < deadline - 20]
    for process in running:
        process.kill()


def pack(out: Path, archive: Path) -> None:
    """All records, without the checkpoints."""
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:xz") as files:
        for path in sorted(out.glob("*.jsonl")):
            files.add(path, path.name)
    os.replace(part, archive)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1100)
    parser.add_argument("--pack", type=Path, help="Where an archive of all records goes at the end")
    parser.add_argument(
        "--small", type=float, default=0, help="A tiny model and as many times fewer tokens, for a trial"
    )
    parser.add_argument("--small-updates", action="store_true", help="The narrow model with small updates, on a CPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until is not None:
        torch.set_num_threads(1)
        size = replace(SMALL, patience=0.1) if options.small else NARROW if options.small_updates else Size()
        settings = SMALL_UPDATES if options.small_updates else SETTINGS
        worker = Worker(options.data, options.out, options.device, size, settings, options.until, options.small or 1)
        if options.small_updates:
            first = [Job("pretrain", task, LEVELS[0]) for task in settings]
            worker.work(
                first + [job for task in settings for job in trainings(FIRST, {task: settings[task]}, range(3))]
            )
        else:
            worker.work(jobs(settings))
        return
    claims = options.out / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    for claim in claims.iterdir():
        claim.unlink()
    supervise(options.workers, options.seconds, sys.argv[1:])
    if options.pack is not None:
        pack(options.out, options.pack)


if __name__ == "__main__":
    main()
