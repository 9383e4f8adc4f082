"""All of results/language_model/PROTOCOL.md on one GPU, within a given time.

`python -m arsm_experiments.sequences.protocol --model FOLDER --data DATA --out OUT --seconds 1200`
runs `levels`, `noise` and `trials` side by side, each as soon as the weights exist that it needs,
and ends all of them when the time is over. OUT/starts, OUT/noise and OUT/runs are what
`language_model pack` reads, OUT/logs has what every process said.

Training on countdown comes first. So the value head's runs, which take longest, have processes of
their own from the beginning; noise is measured by two processes beside the trainings; and
translation gets the processes that have nothing left to do.

On an NVIDIA GPU start MPS before (`nvidia-cuda-mps-control -d`), or the processes take turns. Give
no process a priority (CUDA_MPS_CLIENT_PRIORITY) and share the GPU with nobody: three value heads
that go first leave hardly anything to all others.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from arsm_experiments.sequences.trials import METHODS, RATES, SEEDS, TRIAL, Plan, open_jobs

FIRST = "countdown"
LEVEL = 0.3
"""The level of chain's and countdown's starts."""
PPO = METHODS["ppo"]
OTHERS = tuple(words for words in METHODS.values() if words != PPO)
AGAIN = (
    "group 8",
    "group 16",
    "token baseline 8",
    "branch 8",
    "branch 16",
    "branch 32",
    "branch 64",
    "branch 32, chance",
    "branch 32, chance by value",
)
"""Methods of the second measurement of noise."""
LONG = (
    "group 8",
    "group 4",
    "token baseline 8",
    "coin 0.02, group 4, branch 8",
    "coin by doubt 0.1, group 4, branch 8",
    "coin by doubt 0.3, group 4, branch 8",
    "branch 2, budget 40 per prompt",
)
"""Methods for long answers; to train a value head would take longer than to measure all these."""
SIZES = {
    "countdown": Plan("countdown"),
    "translate": Plan("translate", 120_000, 4_000, 10, 128, 68),
}


@dataclass(frozen=True)
class Scale:
    """Times in seconds, and options that make everything small."""

    fine_tuning: dict[str, float] = field(
        default_factory=lambda: {"countdown": 170, "chain": 200, "long": 200, "translate": 60}
    )
    noise_share: float = 0.4
    """Share of the time after fine-tuning for the first level that a noise process measures."""
    levels: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()
    plans: dict[str, Plan] = field(default_factory=lambda: dict(SIZES))


TINY = Scale(
    fine_tuning=dict.fromkeys(("countdown", "chain", "long", "translate"), 5.0),
    levels=("--every", "2", "--batch", "4", "--measured", "4"),
    noise=(
        *("--prompts", "2", "--repeats", "3", "--rounds", "1"),
        *("--critic-steps", "1", "--critic-rows", "4"),
    ),
    plans={
        "countdown": Plan("countdown", 600, 300, 1, 8, 8),
        "translate": Plan("translate", 400, 200, 1, 8, 8),
    },
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
    ) -> None:
        self.model, self.data, self.out = model, data, out
        self.seconds, self.workers = seconds, workers
        self.device, self.precision, self.scale = device, precision, scale
        self.starts, self.runs = out / "starts", out / "runs"
        self.begun = time.monotonic()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.done: set[str] = set()
        """Names of processes that have ended."""

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
        """Fine-tuning, and the workers, which wait for its weights."""
        self._fine_tune(FIRST, (LEVEL,))
        self._fine_tune("chain", (LEVEL, 0.8))
        for number in range(len(RATES)):
            self._train(FIRST, f"ppo-{number}", (PPO,))
        for number in range(self.workers):
            self._train(FIRST, f"{number}", OTHERS)

    def _follow(self) -> None:
        """Whatever became possible."""
        if self._start(FIRST) is None:
            return
        self._fine_tune("translate", (0.3,))
        self._use_the_room_of_ppo()
        self._measure(f"{FIRST}-{LEVEL:g}b", self._start(FIRST), AGAIN)
        high = self._start("chain", 0.8)
        self._measure("chain-0.8b", high, AGAIN)
        if "levels-chain" in self.done and (high is None or "noise-chain-0.8b" in self.done):
            self._measure("chain-0.3b", self._start("chain"), AGAIN)
        if {"levels-long", f"noise-{FIRST}-{LEVEL:g}b"} <= self.done:
            level = LEVEL if self._start("long") else 0.1
            self._measure(f"long-{level:g}", self._start("long", level), LONG)
        self._translate()

    def _use_the_room_of_ppo(self) -> None:
        """What begins when runs with a value head end: they hold twice the memory of others."""
        ended = [n for n in range(len(RATES)) if f"{FIRST}-ppo-{n}" in self.done]
        for number in ended:
            self._train(FIRST, f"{self.workers + number}", OTHERS)
        if len(ended) == len(RATES):
            self._fine_tune("long", (0.1, LEVEL), micro_batch=12)

    def _translate(self) -> None:
        """Workers for translation in place of those that have nothing left to do."""
        if "levels-translate" not in self.done or self._trials_are_open():
            return
        for number in range(self.workers + len(RATES)):
            if f"{FIRST}-{number}" in self.done:
                self._train("translate", f"{number}", (PPO, *OTHERS))

    def _trials_are_open(self) -> bool:
        plan = self._plan(FIRST)
        jobs, _ = open_jobs(plan, self.runs, tuple(METHODS.values()), RATES, SEEDS)
        return any(job.seed == TRIAL for job in jobs)

    # ------------------------------------------------------------ one process each

    def _fine_tune(self, task: str, levels: tuple[float, ...], *, micro_batch: int = 64) -> None:
        words = [task, "--out", str(self.starts), "--micro-batch", str(micro_batch)]
        words += ["--seconds", f"{self.scale.fine_tuning[task]:g}"]
        words += ["--levels", *map(str, levels)]
        self._launch(f"levels-{task}", "levels", [*words, *self.scale.levels])

    def _measure(self, name: str, weights: Path | None, methods: tuple[str, ...]) -> None:
        """Noise at some weights, in a file of that name."""
        if weights is None:
            return
        link = self.out / "second" / f"{name}.safetensors"
        link.parent.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(weights.resolve())
        rest = self.left - 20
        first = name.startswith(FIRST) or name == "chain-0.8b"
        seconds = rest * self.scale.noise_share if first else rest
        words = ["--starts", str(self.starts), "--out", str(self.out / "noise")]
        words += ["--only", str(link), "--seconds", f"{seconds:.0f}", "--rounds", "8"]
        words += ["--micro-batch", "8" if name.startswith("long") else "32"]
        words += [*self.scale.noise, "--methods", *methods]
        self._launch(f"noise-{name}", "noise", words)

    def _train(
        self,
        task: str,
        name: str,
        methods: tuple[str, ...],
    ) -> None:
        start = self.starts / f"{task}-{LEVEL:g}.safetensors"
        plan = self._plan(task)
        words = [task, "--start", str(start), "--root", str(self.runs), "--at-once", "1"]
        words += ["--tokens", str(plan.tokens), "--tokens-per-update", str(plan.tokens_per_update)]
        words += ["--measure-every", str(plan.measure_every), "--reported", str(plan.reported)]
        words += [
            "--chosen-on",
            str(plan.chosen_on),
            "--micro-batch",
            "48" if methods == (PPO,) else "32",
        ]
        # measured on 140 GB: with 0.062, runs with 512 questions to answer found no room
        words += ["--memory", "0.11" if methods == (PPO,) else "0.09"]
        words += ["--seconds", f"{max(1.0, self.left):.0f}", "--no-checkpoints"]
        words += [*self.scale.trials, "--methods", *methods]
        self._launch(f"{task}-{name}", "trials", words)

    def _launch(self, name: str, module: str, words: list[str]) -> None:
        """Start a process once."""
        if name in self.running or name in self.done:
            return
        words = [*words, "--model", str(self.model), "--data", str(self.data)]
        words += ["--device", self.device, "--precision", self.precision]
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-u", "-m", f"arsm_experiments.sequences.{module}", *words],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._say(f"{name} begins")

    # ------------------------------------------------------------ what is known

    def _plan(self, task: str) -> Plan:
        return replace(self.scale.plans[task], start=f"{task}-{LEVEL:g}")

    def _start(self, task: str, level: float = LEVEL) -> Path | None:
        path = self.starts / f"{task}-{level:g}.safetensors"
        return path if path.exists() else None

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                self.done.add(name)
                self._say(f"{name} ends with {process.returncode}")

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
    parser.add_argument("--workers", type=int, default=6, help="Trainings at once, without PPO's 3")
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
    ).run()


if __name__ == "__main__":
    main()
