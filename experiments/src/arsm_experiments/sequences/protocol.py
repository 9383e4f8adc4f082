"""All of results/language_model/PROTOCOL.md on one GPU, within a given time.

`python -m arsm_experiments.sequences.protocol --model FOLDER --data DATA --out OUT --seconds 1200`
runs `levels`, `noise` and `trials` side by side, each as soon as what it needs exists, and ends all
of them when the time is over. OUT/starts, OUT/noise and OUT/runs are what `language_model pack`
reads, OUT/logs has what every process said. Weights that lie in OUT/starts and runs that have ended
in OUT/runs are not made again.

There are so many lanes for training, which take the tasks one after the other; one lane that
measures noise; and one that fine-tunes. `--stage candidates` trains nothing: it measures the
methods of the fourth amendment and, side by side at every level, goes on until the time is over.

On an NVIDIA GPU start MPS before (`nvidia-cuda-mps-control -d`), or the processes take turns. Give
no process a priority (CUDA_MPS_CLIENT_PRIORITY): three value heads that go first leave hardly
anything to all others.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from arsm_experiments.runs.lines import read as read_lines
from arsm_experiments.sequences.language_model_rules import (
    CANDIDATE,
    PLAIN,
    choose,
    read_noise,
)
from arsm_experiments.sequences.noise import FRESH
from arsm_experiments.sequences.trials import METHODS, Plan

LEVEL = 0.3
"""The level of all starts."""
FURTHER_ATTEMPTS = 2
"""How often a process that failed begins again."""
COSTLY = ("ppo", "grpo, 4 epochs", "branch, 4 epochs")
"""Methods whose runs take longest. They begin first, so that a short run is the last to end."""
AGAIN = (
    "group 8",
    "branch 16",
    "token baseline 8",
    "branch 32",
    "group 16",
    "branch 8",
    "branch 64",
    "group 8, fresh",
    "branch 16, fresh",
    "group 4, fresh",
    "branch 8, fresh",
    "token baseline 8, fresh",
    "branch 32, fresh",
)
"""Methods of the second measurement of noise."""
SIZES = (
    *(f"group {size}, fresh" for size in (2, 4, 8, 16)),
    *(f"branch {draws}, fresh" for draws in (2, 4, 8, 16, 32)),
)
"""Methods whose noise decides the sizes of the training on translation."""
LONG = (
    "group 8",
    "coin by doubt 0.1, group 4, branch 8",
    "group 4",
    "coin 0.02, group 4, branch 8",
    "token baseline 8",
    "coin by doubt 0.3, group 4, branch 8",
    "branch 2, budget 40 per prompt",
)
"""Methods for long answers; to train a value head would take longer than to measure all these."""


LONG_AGAIN = (
    *(name for name in LONG if name != "coin 0.02, group 4, branch 8"),
    "value or branch 8, by doubt 0.1",
    "value head",
)
"""The same again without the worst, and methods that need a value model, which is fitted when the
others were measured once.
"""
CANDIDATES = (
    "own 0.25, branch 8",
    "own 0.5, branch 8",
    "own 0.5, value, branch 8",
    "own 0.5, value, branch 4",
    "shared, group 2, branch 4",
    "critic, branch 8",
    "critic, branch 4",
    "value or branch 8",
)
"""Methods of the fourth amendment."""
BESIDE = (
    "group 4",
    "group 2, branch 4",
    "branch 4",
    "value head",
    "group 8",
    "branch 16",
)
"""Methods that are measured beside them."""
FIXED_FROM = 4
"""The first round with fixed questions, which decide nothing."""


@dataclass(frozen=True)
class Measurement:
    """One measurement of noise."""

    name: str
    """Of its file, TASK-LEVEL."""
    task: str
    level: float
    """Of its weights."""
    methods: tuple[str, ...]
    seconds: float = math.inf
    """No method is begun later."""
    rounds: int = 8
    repeats: int = 5
    fixed_from: int = 0
    """The first round in which fixed questions are measured too."""


MEASUREMENTS = (
    Measurement("translate-0.3", "translate", LEVEL, SIZES, 100, 2),
    Measurement("countdown-0.3b", "countdown", LEVEL, AGAIN, 300),
    Measurement("chain-0.8b", "chain", 0.8, AGAIN, 300),
    Measurement("long-0.1", "long", 0.1, LONG, 300),
)
"""In this order, one at a time."""


def _of_candidates(task: str, level: float) -> Measurement:
    """At fresh questions, which decide, those first that the rule compares; later at fixed ones."""
    fresh = (name + FRESH for name in (PLAIN, *CANDIDATES, *BESIDE))
    return Measurement(
        f"{task}-{level:g}{CANDIDATE}",
        task,
        level,
        (*fresh, PLAIN, *CANDIDATES, "group 8"),
        rounds=100,
        repeats=4,
        fixed_from=FIXED_FROM,
    )


@dataclass(frozen=True)
class Stage:
    """What is run in one go."""

    levels: dict[str, tuple[float, ...]]
    """Fine-tuned first; long answers follow, from chain's weights at 0.8."""
    measurements: tuple[Measurement, ...]
    at_once: int
    """Measurements side by side."""
    trains: bool
    fine_tuning: dict[str, float]
    """Most seconds for all levels of a task."""


STAGES = {
    "training": Stage(
        {"countdown": (LEVEL,), "chain": (LEVEL, 0.8), "translate": (LEVEL,)},
        MEASUREMENTS,
        at_once=1,
        trains=True,
        fine_tuning={"countdown": 170, "chain": 200, "translate": 90, "long": 240},
    ),
    "candidates": Stage(
        {"countdown": (LEVEL, 0.5), "chain": (LEVEL, 0.8), "translate": (LEVEL,)},
        (
            _of_candidates("countdown", LEVEL),
            _of_candidates("countdown", 0.5),
            _of_candidates("chain", LEVEL),
            _of_candidates("chain", 0.8),
            _of_candidates("translate", LEVEL),
            Measurement("long-0.1b", "long", 0.1, LONG_AGAIN, rounds=100, repeats=3),
        ),
        at_once=6,
        trains=False,
        fine_tuning={"countdown": 240, "chain": 200, "translate": 90, "long": 240},
    ),
}
PLANS = (
    Plan("countdown"),
    Plan("translate", 120_000, 4_000, 10, 128, 68),
    Plan("chain"),
)
"""Trainings, in this order."""


@dataclass(frozen=True)
class Scale:
    """Times in seconds, and options that make everything small."""

    fine_tuning: dict[str, float] = field(default_factory=dict[str, float])
    """Other limits than the stage's."""
    measuring: float = 1.0
    """Factor of the measurements' times."""
    levels: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = PLANS


TINY = Scale(
    fine_tuning=dict.fromkeys(("countdown", "chain", "translate", "long"), 5.0),
    levels=("--every", "2", "--batch", "4", "--measured", "4"),
    noise=(
        *("--prompts", "2", "--repeats", "3", "--rounds", "1", "--fixed-from", "0"),
        *("--critic-steps", "2", "--critic-rows", "4"),
    ),
    plans=(
        Plan("countdown", 600, 300, 1, 8, 8),
        Plan("translate", 400, 200, 1, 8, 8),
        Plan("chain", 600, 300, 1, 8, 8),
    ),
)
"""For a look at whether everything runs."""


class Campaign:
    """Processes by name, and when the next ones may begin."""

    def __init__(
        self,
        model: Path,
        data: Path,
        out: Path,
        *,
        seconds: float,
        workers: int,
        device: str,
        precision: str,
        scale: Scale,
        stage: Stage,
    ) -> None:
        self.model, self.data, self.out = model, data, out
        self.seconds, self.workers = seconds, workers
        self.device, self.precision = device, precision
        self.scale, self.stage = scale, stage
        self.starts, self.runs = out / "starts", out / "runs"
        self.begun = time.monotonic()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.done: set[str] = set()
        """Names of processes that have ended."""
        self.commands: dict[str, list[str]] = {}
        self.failures: Counter[str] = Counter()

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - (time.monotonic() - self.begun)

    def run(self) -> None:
        """Start what may start, until all is done or the time is over."""
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            self._begin()
            while self.left > 0:
                self._collect()
                self._follow()
                if not self.running:
                    break
                time.sleep(0.5)
        finally:
            self._end()
        self._say("the end")

    # ------------------------------------------------------------ what is run

    def _begin(self) -> None:
        """Fine-tuning for the first trainings and measurements."""
        for task, levels in self.stage.levels.items():
            self._fine_tune(task, levels)

    def _follow(self) -> None:
        """Whatever became possible."""
        if {"levels-translate", "levels-chain"} <= self.done:
            self._fine_tune("long", (0.1,), start=self._start("chain", 0.8), micro_batch=16)
        self._measure_next()
        for lane in range(self.workers if self.stage.trains else 0):
            self._train_next(lane)

    def _measure_next(self) -> None:
        """The first measurements that are not done, as many as may be under way."""
        for each in self.stage.measurements:
            under_way = [name for name in self.running if name.startswith("noise-")]
            if len(under_way) == self.stage.at_once:
                return
            if f"noise-{each.name}" in self.done | self.running.keys():
                continue
            weights = self._start(each.task, each.level)
            if weights is not None:
                self._measure(each, weights)
                continue
            # its weights are still being made: others may go first, but for the one that decides
            # the sizes of a training
            if each.methods is SIZES and f"levels-{each.task}" not in self.done:
                return

    def _train_next(self, lane: int) -> None:
        """The first task that this lane has not worked on, unless it is busy."""
        for plan in self.scale.plans:
            name = f"{plan.task}-{lane}"
            if name in self.running:
                return
            if name not in self.done:
                methods = self._methods(plan.task)
                if self._start(plan.task) is not None and methods is not None:
                    self._train(name, plan, methods)
                return

    def _methods(self, task: str) -> tuple[str, ...] | None:
        """A task's strategies, the costly ones first; None while their sizes are not known."""
        words = list(METHODS.values())
        if task == "translate":
            if "noise-translate-0.3" not in self.done:
                return None
            measured = read_lines(self.out / "noise" / "noise-translate-0.3.jsonl")
            words = choose(read_noise(measured)) if measured else words
        by_name = dict(zip(METHODS, words, strict=True))
        first = [by_name.pop(name) for name in COSTLY]
        return (*first, *by_name.values())

    # ------------------------------------------------------------ one process each

    def _fine_tune(
        self,
        task: str,
        levels: tuple[float, ...],
        *,
        start: Path | None = None,
        micro_batch: int = 64,
    ) -> None:
        words = [task, "--out", str(self.starts), "--micro-batch", str(micro_batch)]
        seconds = (self.stage.fine_tuning | self.scale.fine_tuning)[task]
        words += ["--seconds", f"{seconds:g}", "--levels", *map(str, levels)]
        words += [] if start is None else ["--start", str(start)]
        self._launch(f"levels-{task}", "levels", [*words, *self.scale.levels])

    def _measure(self, what: Measurement, weights: Path) -> None:
        """Noise at some weights, in a file of the measurement's name."""
        link = self.out / "measured" / f"{what.name}.safetensors"
        link.parent.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(weights.resolve())
        seconds = min(what.seconds * self.scale.measuring, self.left - 20)
        words = ["--starts", str(self.starts), "--out", str(self.out / "noise")]
        words += ["--only", str(link), "--seconds", f"{seconds:.0f}", "--rounds", str(what.rounds)]
        words += ["--repeats", str(what.repeats), "--fixed-from", str(what.fixed_from)]
        words += ["--micro-batch", "8" if what.task == "long" else "32"]
        # so that all of them and what is beside them fit on one GPU of 140 GB
        words += ["--memory", "0.13"]
        words += [*self.scale.noise, "--methods", *what.methods]
        self._launch(f"noise-{what.name}", "noise", words)

    def _train(self, name: str, plan: Plan, methods: tuple[str, ...]) -> None:
        start = self.starts / f"{plan.task}-{LEVEL:g}.safetensors"
        words = [plan.task, "--start", str(start), "--root", str(self.runs), "--at-once", "1"]
        words += ["--tokens", str(plan.tokens), "--tokens-per-update", str(plan.tokens_per_update)]
        words += ["--measure-every", str(plan.measure_every), "--reported", str(plan.reported)]
        words += ["--chosen-on", str(plan.chosen_on), "--micro-batch", "48"]
        # so that all lanes and what is beside them fit on one GPU of 140 GB
        words += ["--memory", "0.115"]
        words += ["--seconds", f"{max(1.0, self.left):.0f}", "--no-checkpoints"]
        self._launch(name, "trials", [*words, "--methods", *methods])

    def _launch(self, name: str, module: str, words: list[str]) -> None:
        """Start a process once."""
        if name in self.running or name in self.done:
            return
        words = [*words, "--model", str(self.model), "--data", str(self.data)]
        words += ["--device", self.device, "--precision", self.precision]
        self.commands[name] = [
            *(sys.executable, "-u", "-m", f"arsm_experiments.sequences.{module}"),
            *words,
        ]
        self._begin_process(name)

    def _begin_process(self, name: str) -> None:
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            self.running[name] = subprocess.Popen(
                self.commands[name],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._say(f"{name} begins")

    # ------------------------------------------------------------ what is known

    def _start(self, task: str, level: float = LEVEL) -> Path | None:
        path = self.starts / f"{task}-{level:g}.safetensors"
        return path if path.exists() else None

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                self._say(f"{name} ends with {process.returncode}")
                self.failures[name] += process.returncode != 0
                # under MPS a fault of any process ends all: what is recorded is not made again
                if process.returncode and self.failures[name] <= FURTHER_ATTEMPTS:
                    self._begin_process(name)
                else:
                    self.done.add(name)

    def _end(self) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self.begun:6.1f} s: {words}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="End everything after so long")
    parser.add_argument("--stage", choices=list(STAGES), default="training")
    parser.add_argument("--workers", type=int, default=7, help="Trainings at once")
    parser.add_argument("--tiny", action="store_true", help="A look at whether everything runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    words = parser.parse_args()
    # whoever ends this process ends all others with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    Campaign(
        words.model,
        words.data,
        words.out,
        seconds=words.seconds,
        workers=words.workers,
        device=words.device,
        precision=words.precision,
        scale=TINY if words.tiny else Scale(),
        stage=STAGES[words.stage],
    ).run()


if __name__ == "__main__":
    main()
