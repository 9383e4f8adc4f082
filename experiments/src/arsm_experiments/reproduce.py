"""`arsm reproduce`: all of the paper's experiments, one after the other, with one command."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arsm_experiments.cli import command_words
from arsm_experiments.compare import Compare
from arsm_experiments.plans import FULL, SMOKE, Experiment
from arsm_experiments.progress import PlanBars
from arsm_experiments.report.command import Report
from arsm_experiments.runs.files import RunError, make_folder
from arsm_experiments.runs.reader import is_finished

PLANS = {"smoke": SMOKE, "full": FULL}


@dataclass(frozen=True)
class Reproduce:
    """Run all experiments of the paper and make their report; started again, it continues.

    Finished runs are skipped, interrupted ones continue from their last checkpoints, and a failure
    does not stop the others.
    """

    scale: Literal["smoke", "full"] = "smoke"
    """smoke: every experiment, shortened to minutes on two cores; full: as in results/, hours even
    on a GPU.
    """
    only: str = ""
    """Experiments to run, separated by commas, such as toy,vae, or only those with a prefix of
    their run folders, such as conditional/sampled; empty for all.
    """
    root: Path | None = None
    """Folder for run folders and report.html; None for runs/SCALE."""
    resume: ClassVar[bool] = True

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        planned = list(dict.fromkeys(name for each in PLANS[self.scale] for name in named(each)))
        for name in self.names():
            if name not in planned:
                raise ValueError(
                    f'--only has "{name}", but the {self.scale} plan consists of '
                    f"{', '.join(planned)}."
                )

    def names(self) -> list[str]:
        """The experiments to run; empty for all."""
        return [name.strip() for name in self.only.split(",")] if self.only else []

    def folder(self) -> Path:
        """The folder for all output."""
        return self.root or Path("runs") / self.scale

    def plan(self) -> list[Experiment]:
        """The requested experiments and those that they depend on, with their folders set and ready
        to resume.
        """
        everything = [placed(experiment, self.folder()) for experiment in PLANS[self.scale]]
        names = set(self.names())
        asked = [each for each in everything if not names or not names.isdisjoint(named(each))]
        needed = {each.checkpoint for each in asked if isinstance(each, Compare)}
        return [each for each in everything if each in asked or not needed.isdisjoint(each.runs())]

    def run(self, console: Console) -> None:
        """Print the plan, run it, and make the report."""
        make_folder(self.folder())
        plan = self.plan()
        done = [finished_runs(experiment) for experiment in plan]
        print_plan(console, plan, done, self.folder())
        failures = carry_out(console, plan, done)
        for experiment, sentence in failures:
            command = shlex.join(["arsm", *command_words(experiment)])
            console.print(
                f"[red]Failed:[/] {escape(command)}\n  {escape(sentence)}", soft_wrap=True
            )
        Report(root=self.folder()).run(console)
        if failures:
            raise RunError(
                f"{len(failures)} of {len(plan)} experiments failed (see above); run the same "
                "command again."
            )


def named(experiment: Experiment) -> tuple[str, ...]:
    """What --only may call it: its experiment and, if it has a prefix, both together."""
    name = command_words(experiment)[0]
    return (name, f"{name}/{experiment.name}") if experiment.name else (name,)


def placed(experiment: Experiment, root: Path) -> Experiment:
    """The experiment with its run folders under root, set to resume."""
    place: dict[str, Any] = {"root": root, "resume": True}
    if isinstance(experiment, Compare) and experiment.checkpoint is not None:
        place["checkpoint"] = root / experiment.checkpoint
    return dataclasses.replace(experiment, **place)


def finished_runs(experiment: Experiment) -> int:
    """How many of its runs are finished."""
    return sum(is_finished(folder, config) for folder, config in experiment.runs().items())


def print_plan(
    console: Console, plan: Sequence[Experiment], done: Sequence[int], root: Path
) -> None:
    """Print the experiments, the number of runs of each, and how many are done."""
    runs = [len(experiment.runs()) for experiment in plan]
    title = (
        f"{len(plan)} experiments of {sum(runs)} runs, {sum(done)} of them done; all goes into "
        f"{root}"
    )
    table = Table(
        "", "experiment", "runs", "done", box=SIMPLE_HEAD, title=title, title_justify="left"
    )
    for number, (experiment, count, finished) in enumerate(zip(plan, runs, done, strict=True), 1):
        command = shlex.join(
            command_words(
                dataclasses.replace(experiment, root=type(experiment)().root, resume=False)
            )
        )
        table.add_row(
            str(number),
            escape(command),
            str(count),
            "all" if finished == count else str(finished or ""),
        )
    console.print(table)


def carry_out(
    console: Console, plan: Sequence[Experiment], done: Sequence[int]
) -> list[tuple[Experiment, str]]:
    """Run what is not finished. Returns the failures and their reasons."""
    failures = []
    with PlanBars(console, runs=sum(len(each.runs()) for each in plan), done=sum(done)) as bars:
        for number, (experiment, finished) in enumerate(zip(plan, done, strict=True), 1):
            runs = len(experiment.runs())
            if finished == runs:
                continue
            title = f"{command_words(experiment)[0]} ({number} of {len(plan)})"
            start = time.monotonic()
            with bars.part(title, runs=runs, done=finished):
                sentence = attempt(experiment)
            if sentence is not None:
                failures.append((experiment, sentence))
            outcome = "[red]failed[/]" if sentence else "done"
            console.print(
                f"{title}: {outcome} after {timedelta(seconds=int(time.monotonic() - start))}"
            )
    return failures


def attempt(experiment: Experiment) -> str | None:
    """Run it without printing. Returns the error, if any."""
    threads = torch.get_num_threads()
    try:
        experiment.check()
        experiment.run(Console(quiet=True))
    except (RunError, ValueError) as error:
        return str(error)
    except Exception as error:  # one failure must not stop the other experiments
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)
    return None
