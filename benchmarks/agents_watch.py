"""The clock of a run of `benchmarks.agents`, and its evaluations at equal steps and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

WINDOW = 100
"""Episodes of learning whose average return tells whether a task is solved."""
Play = Callable[[bool], float]
"""The mean return of episodes with the likeliest (True) or with sampled actions."""


class Limits(Protocol):
    """The part of a job that a watch needs."""

    @property
    def seed(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def compared_at(self) -> int: ...
    @property
    def episodes(self) -> int: ...


class Watch:
    """Counts a run's CPU seconds without those of its evaluations, and evaluates when the steps
    are played.
    """

    def __init__(self, job: Limits, line: float) -> None:
        self.job, self.line = job, line
        self.solved: list[float] = []
        self._begin = time.process_time()
        self._at_steps: dict[str, float] = {}

    def spent(self) -> float:
        """CPU seconds of learning so far."""
        return time.process_time() - self._begin

    def look(self, steps: int, recent: Sequence[float], play: Play) -> None:
        """After an update: has the task been solved, and have the steps been played?"""
        if not self.solved and len(recent) == WINDOW and np.mean(recent) >= self.line:
            self.solved.append(self.spent())
        if not self._at_steps and steps >= self.job.compared_at:
            self._at_steps = self._evaluate(steps, play)

    def found(self, steps: int, play: Play) -> dict[str, Any]:
        """The end of a run. One that ended before the steps has its end in their place."""
        end = self._evaluate(steps, play)
        return {**end, "solved": self.solved, "at_steps": self._at_steps or end}

    def _evaluate(self, steps: int, play: Play) -> dict[str, float]:
        spent = self.spent()
        found = {"sampled": play(False), "likeliest": play(True), "cpu": spent, "steps": steps}
        # the evaluation's seconds do not count
        self._begin = time.process_time() - spent
        return found
