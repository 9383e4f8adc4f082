"""Callbacks of `PolicyGradient.learn`: evaluation, checkpoints and TensorBoard.

A callback is any function of an `Iteration`. It ends learning by returning False, and
may return {name: number} for TensorBoard.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arsm.checks import check_count
from arsm.rl.files import check_place

if TYPE_CHECKING:
    from arsm.rl.agent import Evaluation, PolicyGradient
    from arsm.rl.training import Iteration

Callback = Callable[["Iteration"], object]


@dataclass
class Evaluate:
    """Evaluate an agent every so many steps.

        watch = Evaluate(agent, every=10_000, best="best.pt")
        agent.learn(steps=100_000, callback=watch)
        print(watch.history[-1])

    Attributes:
        agent: The agent that learns.
        every: Steps of the environment between evaluations, rollouts included.
        episodes: Episodes per evaluation; they do not count as learning.
        best: File to which the best agent so far is saved.
        stop_at: Mean return at which learning ends.
        history: (steps, evaluation) of every evaluation so far.
    """

    agent: PolicyGradient
    every: int
    episodes: int = 20
    best: str | os.PathLike[str] | None = None
    stop_at: float = math.inf
    history: list[tuple[int, Evaluation]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._due = _Due(self.agent, self.every)
        if self.best is not None:
            check_place(self.best)

    def __call__(self, iteration: Iteration) -> Mapping[str, float] | bool:
        """Evaluate, if it is time."""
        if not self._due():
            return True
        found = self.agent.evaluate(self.episodes)
        # before this one is added: it must beat the others, not itself
        earlier = max((each.mean for _, each in self.history), default=-math.inf)
        self.history.append((iteration.steps, found))
        if self.best is not None and found.mean > earlier:
            self.agent.save(self.best)
        # after saving: the agent that reached the aim is the one to keep
        if found.mean >= self.stop_at:
            return False
        return {"evaluation/mean": found.mean, "evaluation/standard_error": found.standard_error}


@dataclass
class Checkpoint:
    """Save an agent every so many steps.

    Attributes:
        agent: The agent that learns.
        path: File to write; "{steps}" in its name makes one file per checkpoint.
        every: Steps of the environment between checkpoints, rollouts included.
    """

    agent: PolicyGradient
    path: str | os.PathLike[str]
    every: int

    def __post_init__(self) -> None:
        self._due = _Due(self.agent, self.every)
        check_place(self.path)

    def __call__(self, iteration: Iteration) -> None:
        """Save, if it is time."""
        if self._due():
            self.agent.save(os.fspath(self.path).replace("{steps}", str(iteration.steps)))


class _Due:
    """Whether the next multiple of `every` steps has been reached."""

    def __init__(self, agent: PolicyGradient, every: int) -> None:
        check_count("every", every)
        self._agent = agent
        self._every = every
        # an agent that has learned before is not due at once
        self._passed = agent.steps // every

    def __call__(self) -> bool:
        # an iteration may pass several multiples, which is one occasion
        before = self._passed
        self._passed = self._agent.steps // self._every
        return self._passed > before


class TensorBoard:
    """Writes iterations, and the numbers that callbacks return, against steps."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard.writer import SummaryWriter  # takes a second to import
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "tensorboard_log needs TensorBoard; install it with `pip install tensorboard`.",
                name="tensorboard",
            ) from None
        self._writer = SummaryWriter(os.fspath(folder))

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        # what the last iterations wrote may still wait to reach the disk
        if self._writer is not None:
            self._writer.close()

    def write(self, iteration: Iteration, further: Mapping[str, float]) -> None:
        """The record of an iteration, if there is a folder."""
        if self._writer is None:
            return
        numbers = {
            "return/mean": sum(iteration.returns) / len(iteration.returns),
            "episodes": iteration.episodes,
            "policy/entropy": iteration.entropy,
            "policy/log_variance": iteration.log_variance,
            "rollouts": iteration.rollouts,
            "time/seconds": iteration.seconds,
            **further,
        }
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, iteration.steps)


def listed_callbacks(given: object) -> list[Callback]:
    """Callbacks as a list: a single one need not stand in one."""
    if callable(given):
        return [given]
    if not isinstance(given, Sequence) or not all(map(callable, given)):
        raise TypeError(
            "callback must be a function of an Iteration, such as Evaluate(agent, every=1000), or "
            f"a list of them, but is {given!r}."
        )
    return list(given)


def call_all(callbacks: Sequence[Callback], iteration: Iteration) -> tuple[dict[str, float], bool]:
    """The numbers that the callbacks want written, and whether one of them ends learning."""
    numbers: dict[str, float] = {}
    ends = False
    for callback in callbacks:
        # all are called, even if an earlier one ends learning
        answer = callback(iteration)
        # only False ends: a function without a return answers None
        ends = ends or answer is False
        if isinstance(answer, Mapping):
            numbers.update(answer)
    return numbers, ends
