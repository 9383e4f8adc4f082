"""The training comparison of results/language_model/PROTOCOL.md: trials of rates, then fresh seeds.

`python -m arsm_experiments.sequences.trials TASK --model FOLDER --start FILE --root RUNS
--at-once 10` starts so many workers. A worker takes the next job that nobody works on; workers of
several commands share the jobs, if only their --methods, --micro-batch and numbers differ. A run's
folder is RUNS/language_model/NAME; `--seconds` ends the workers, which first write checkpoints, and
the same command later goes on from them. A method's seeds begin when its trials are done. Workers
may be started before their weights exist, and wait for them.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from arsm.sequences import Transformers
from arsm_experiments.runs.files import plain_name, write_atomically
from arsm_experiments.runs.reader import Record, read_header, read_run
from arsm_experiments.runs.writer import open_run
from arsm_experiments.sequences.levels import CHOSEN_ON, REPORTED, held_out, load_level
from arsm_experiments.sequences.named import named_method
from arsm_experiments.sequences.pretrained import Pretrained, load_parts, load_pretrained
from arsm_experiments.sequences.texts import WRITTEN, Texts, load_texts
from arsm_experiments.sequences.trainer import Learning, Trainer, weights

EXPERIMENT = "language_model"
METHODS = {
    "branch": "branch:rloo:samples=32",
    "branch, 4 epochs": "4*branch:rloo:samples=32",
    "group": "group:8",
    "token baseline": "token-baseline:8",
    "grpo": "grpo:8",
    "grpo, 4 epochs": "4*grpo:8",
    "ppo": "4*ppo",
    "raft": "raft:8",
}
"""Strategies by their names on the page."""
RATES = (4e-6, 1e-5, 2.5e-5)
TRIAL = 0
"""The seed of the trials, which is not reported."""
SEEDS = (1, 2, 3)
TOKENS = 240_000
TOKENS_PER_UPDATE = 8_000
MEASURE_EVERY = 10
FAILURE = "failure.txt"
"""In a run's folder: what made it fail."""
LEAST_MICRO_BATCH = 8
"""A run that does not fit with so few answers per pass fails."""


@dataclass(frozen=True)
class Plan:
    """What every run has in common."""

    task: str
    tokens: int = TOKENS
    tokens_per_update: int = TOKENS_PER_UPDATE
    measure_every: int = MEASURE_EVERY
    reported: int = REPORTED
    chosen_on: int = CHOSEN_ON
    start: str = ""
    """The name of the file of weights."""


@dataclass(frozen=True)
class Job:
    """One run."""

    method: str
    """In words."""
    rate: float
    seed: int

    def name(self, plan: Plan) -> str:
        return f"{plan.task}-{plain_name(self.method)}-rate{self.rate:g}-seed{self.seed}"

    def config(self, plan: Plan) -> dict[str, Any]:
        return {"strategy": self.method, "rate": self.rate, "seed": self.seed, **asdict(plan)}


def trials(methods: tuple[str, ...], rates: tuple[float, ...]) -> list[Job]:
    """Every method with every rate; the middle rate first."""
    by_middle = sorted(rates, key=lambda rate: abs(rates.index(rate) - len(rates) // 2))
    return [Job(method, rate, TRIAL) for rate in by_middle for method in methods]


def final_accuracy(record: Record) -> float:
    """The accuracy at the end of a run."""
    return record.metrics[-1]["accuracy"]


def chosen_rate(runs: list[Record]) -> float:
    """The rate whose trial ended with the highest accuracy; of equal ones the smaller."""
    return max(
        (run.config["rate"] for run in runs),
        key=lambda rate: (
            max(final_accuracy(run) for run in runs if run.config["rate"] == rate),
            -rate,
        ),
    )


def finished(folder: Path) -> bool:
    """Whether a run has reached its end."""
    return (folder / "config.json").exists() and bool(read_header(folder).get("finished"))


def ended(folder: Path) -> bool:
    """Whether a run has reached its end or has failed; it is not tried again."""
    return finished(folder) or (folder / FAILURE).exists()


def open_jobs(
    plan: Plan,
    root: Path,
    methods: tuple[str, ...],
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
) -> tuple[list[Job], bool]:
    """Jobs that may begin and are not finished, and whether others will follow."""

    def folder(job: Job) -> Path:
        return root / EXPERIMENT / job.name(plan)

    first = trials(methods, rates)
    found = [job for job in first if not ended(folder(job))]
    later = False
    for seed in seeds:
        for method in methods:
            own = [job for job in first if job.method == method]
            if not all(ended(folder(job)) for job in own):
                later = True
                continue
            runs = [read_run(folder(job)) for job in own if finished(folder(job))]
            if not runs:
                continue
            job = Job(method, chosen_rate(runs), seed)
            if not ended(folder(job)):
                found.append(job)
    return found, later


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process now holds a lock; it is free again when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


@dataclass(frozen=True, eq=False)
class Worker:
    """A process that takes jobs until there are none, or its time is over."""

    plan: Plan
    root: Path
    pretrained: Pretrained
    texts: Texts
    device: str
    precision: torch.dtype | None
    micro_batch: int
    max_rows: int
    deadline: float
    checkpoints: bool = True
    """Write one when the time is over."""

    @cached_property
    def model(self) -> Transformers:
        """Made once: its slots and captured steps serve all runs."""
        return Transformers(self.pretrained.module)

    def work(
        self, methods: tuple[str, ...], rates: tuple[float, ...], seeds: tuple[int, ...]
    ) -> None:
        """Take jobs."""
        start = {name: x.cpu().clone() for name, x in weights(self.pretrained.module).items()}
        while time.monotonic() < self.deadline:
            jobs, later = open_jobs(self.plan, self.root, methods, rates, seeds)
            taken = False
            for job in jobs:
                with claimed(self.root / "locks" / job.name(self.plan)) as mine:
                    # somebody may have finished it since
                    folder = self.root / EXPERIMENT / job.name(self.plan)
                    if not mine or ended(folder):
                        continue
                    taken = True
                    try:
                        self._train_within_memory(job, start)
                    except Exception:
                        # such as a gradient that is not finite: another worker would fail as well
                        words = traceback.format_exc()
                        print(f"{job.name(self.plan)}: {words}", flush=True)
                        folder.mkdir(parents=True, exist_ok=True)
                        (folder / FAILURE).write_text(words)
                    # the last run's optimiser and value head
                    gc.collect()
                    torch.cuda.empty_cache()
                if taken:
                    break
            if not taken:
                # others work on all that is open, and nothing will follow
                if not later:
                    return
                time.sleep(1.0)

    def _train_within_memory(self, job: Job, start: dict[str, torch.Tensor]) -> None:
        """One run; where memory is too small, again from its start with half the micro-batch."""
        micro_batch = self.micro_batch
        while True:
            load_parts(self.pretrained.module, start)
            try:
                self.train(job, micro_batch)
                return
            except torch.OutOfMemoryError:
                if micro_batch <= LEAST_MICRO_BATCH:
                    raise
                micro_batch //= 2
                print(f"{job.name(self.plan)}: again, micro-batches of {micro_batch}", flush=True)
            # behind the handler, which holds the failed run's tensors
            gc.collect()
            torch.cuda.empty_cache()

    def train(self, job: Job, micro_batch: int) -> None:
        """One run, to its end or to the deadline."""
        plan, module = self.plan, self.pretrained.module
        name = job.name(plan)
        trained, others = self.texts.split(held_out(self.texts))
        if job.seed == TRIAL:
            tested = others.split(plan.reported)[0].first(plan.chosen_on)
        else:
            tested = others.first(plan.reported)
        options = {"label": job.method, "resume": True, "device": self.device}
        found = open_run(self.root, EXPERIMENT, name, job.config(plan), **options)
        # suppress stands outside: the folder must see the exception, or would mark the run finished
        with suppress(OutOfTime), found as run:
            method = named_method(
                job.method, module, micro_batch=micro_batch, precision=self.precision
            )
            trainer = Trainer(
                self.model,
                trained,
                method,
                rate=job.rate,
                seed=job.seed,
                tokens_per_update=plan.tokens_per_update,
                max_rows=self.max_rows,
                micro_batch=micro_batch,
                precision=self.precision,
            )
            learning = Learning(
                trainer,
                tested,
                run,
                seed=job.seed,
                tokens=plan.tokens,
                measure_every=plan.measure_every,
                saved=run.state,
                checkpoints=False,
                may_stop=True,
            )
            for _ in learning:
                if time.monotonic() > self.deadline:
                    if self.checkpoints:
                        learning.save()
                    raise OutOfTime
            self._finish(run.folder, learning)
            print(f"{name}: {float(_mean(learning)):.3f}, {learning.seconds:.0f} s", flush=True)

    def _finish(self, folder: Path, learning: Learning) -> None:
        """Keep the scores by question; a finished run needs no checkpoint."""
        assert learning.scores is not None
        scores = [round(x, 4) for x in learning.scores.tolist()]
        whole = json.dumps([int(x) if x == int(x) else x for x in scores]).encode()
        write_atomically(folder / "scores.json", lambda file: file.write(whole))
        (folder / "checkpoint.pt").unlink(missing_ok=True)


def _mean(learning: Learning) -> torch.Tensor:
    assert learning.scores is not None
    return learning.scores.mean()


class OutOfTime(Exception):
    """A run is not finished: raised through the run folder, which then is not marked so."""


def command_line() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(WRITTEN))
    parser.add_argument("--model", required=True)
    parser.add_argument("--start", type=Path, help="Weights that every run begins with")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=480, help="Stop after so long")
    parser.add_argument("--methods", nargs="+", default=list(METHODS.values()))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--tokens-per-update", type=int, default=TOKENS_PER_UPDATE)
    parser.add_argument("--measure-every", type=int, default=MEASURE_EVERY)
    parser.add_argument("--reported", type=int, default=REPORTED)
    parser.add_argument("--chosen-on", type=int, default=CHOSEN_ON)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument(
        "--memory", type=float, default=1.0, help="Share of the GPU's memory that a worker may hold"
    )
    parser.add_argument(
        "--checkpoints",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Write checkpoints when the time is over",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    words = command_line()
    begun = time.monotonic()
    if words.at_once > 1:
        command = [sys.executable, "-m", "arsm_experiments.sequences.trials", *sys.argv[1:]]
        workers = [subprocess.Popen([*command, "--at-once", "1"]) for _ in range(words.at_once)]
        sys.exit(max(worker.wait() for worker in workers))
    torch.backends.cuda.matmul.allow_tf32 = True
    if torch.device(words.device).type == "cuda":
        # a worker then frees what it keeps in store before it takes more
        torch.cuda.set_per_process_memory_fraction(words.memory)
    pretrained = load_pretrained(words.model, words.device)
    texts = load_texts(pretrained.tokenizer, words.task, words.data)
    if words.start is not None:
        _wait_for(words.start, begun, words.seconds)
        load_level(pretrained.module, words.start)
    plan = Plan(
        words.task,
        words.tokens,
        words.tokens_per_update,
        words.measure_every,
        words.reported,
        words.chosen_on,
        "" if words.start is None else words.start.stem,
    )
    worker = Worker(
        plan,
        words.root,
        pretrained,
        texts,
        words.device,
        torch.bfloat16 if words.precision == "bfloat16" else None,
        words.micro_batch,
        words.max_rows,
        begun + words.seconds,
        words.checkpoints,
    )
    worker.work(tuple(words.methods), tuple(words.rates), tuple(words.seeds))


def _wait_for(path: Path, begun: float, seconds: float) -> None:
    """Wait until another process has written the weights."""
    while not path.exists():
        if time.monotonic() - begun > seconds:
            sys.exit(f"There is no {path} after {seconds:g} s.")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
