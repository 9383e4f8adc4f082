"""Progress on the terminal: how far, how fast, how long still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Throughput(ProgressColumn):
    """Steps per second, or whatever the task's `unit` says."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed or "before" in task.fields:
            return Text("")
        unit = f" {task.fields['unit']}" if "unit" in task.fields else ""
        rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        return Text(f"{rate}{unit}/s", style="progress.data.speed")


class TimeLeft(TimeRemainingColumn):
    """By the last few steps or, for a task that tells what was done `before` it began, by all steps
    since.
    """

    def render(self, task: Task) -> Text:
        if "before" not in task.fields:
            return super().render(task)
        done = task.completed - task.fields["before"]
        if not task.total or not task.elapsed or done <= 0:
            return Text("")
        left = timedelta(seconds=int(task.elapsed * (task.total - task.completed) / done))
        return Text(f"about {left} left" if left else "", style="progress.remaining")


def columns() -> tuple[ProgressColumn, ...]:
    """What every bar shows."""
    description = TextColumn("{task.description}")
    return (
        description,
        BarColumn(),
        MofNCompleteColumn(),
        Throughput(),
        TimeLeft(elapsed_when_finished=True),
    )


_outer: ContextVar[PlanBars | None] = ContextVar("_outer", default=None)


@contextlib.contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """One bar per task, with its throughput and the time left; inside `PlanBars.part` they are
    added to its display.
    """
    outer = _outer.get()
    if outer is not None:
        yield outer
        return
    with Progress(*columns(), console=console) as progress:
        yield progress


class PlanBars(Progress):
    """One bar over the runs of several experiments, and under it that of the run at work."""

    def __init__(self, console: Console, *, runs: int, done: int) -> None:
        super().__init__(*columns(), console=console)
        whole = self.add_task("", total=runs, completed=done, before=done)
        self._move_whole = partial(super().update, whole)
        self._before = self._runs = 0.0

    @contextlib.contextmanager
    def part(self, description: str, *, runs: int, done: int) -> Iterator[None]:
        """One experiment, whose bars stand for so many runs together, some of which were done
        before.
        """
        self._before, self._runs = self.tasks[0].completed - done, runs
        self._move_whole(description=description)
        token = _outer.set(self)
        try:
            yield
        finally:
            _outer.reset(token)
            for bar in self.tasks[1:]:
                self.remove_task(bar.id)
        self._move_whole(completed=self._before + runs)

    def update(self, *task: Any, **changes: Any) -> None:
        """Move a bar, and the whole with it."""
        super().update(*task, **changes)
        bars = self.tasks[1:]
        share = sum(bar.percentage for bar in bars) / 100 / len(bars)
        self._move_whole(completed=self._before + self._runs * share)

    def get_renderables(self) -> Iterable[RenderableType]:
        at_work = [bar for bar in self.tasks[1:] if not bar.finished][:1]
        yield self.make_tasks_table([*self.tasks[:1], *at_work])
