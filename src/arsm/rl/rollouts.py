"""Rollout engines: in this process, or spread over others. The same seeds give the same
returns from every one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch

from arsm.checks import check_count
from arsm.rl.environment import Array, Environment, EnvironmentFailure
from arsm.rl.play import EpisodeBranches, play_elsewhere, play_rollouts
from arsm.rl.policies import Policy


class RolloutEngine(Protocol):
    """Plays rollouts somewhere."""

    def play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class InProcess:
    """All rollouts as one batch in this process."""

    environment: Environment

    def play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches:
        return play_rollouts(self.environment, policy, branches)

    def close(self) -> None:
        pass


def share_out(environment: Environment, branches: EpisodeBranches, workers: int) -> list[Array]:
    """Deal the rollouts into parts, long and short ones alike in each.

    One part per worker for arrays, whose steps cost as much for few rollouts as for
    many; several for other environments, so no worker waits long for the last.
    """
    if not workers:
        raise RuntimeError("The workers were ended by close(); make another agent.")
    parts = max(1, min(len(branches), workers * (1 if environment.lanes is None else 4)))
    return [np.arange(first, len(branches), parts) for first in range(parts)]


class WorkerFailure(RuntimeError):
    """A worker process died again and again."""


class Pool:
    """Worker processes that stay, each with the environment of its own; one that dies
    is replaced, and its rollouts are played again."""

    patience = 3
    """Maximum number of workers that may die on the same part."""

    def __init__(self, environment: Environment, workers: int | None = None) -> None:
        self.environment = environment
        try:
            # here the caller is told; in a worker it would only die
            ForkingPickler.dumps(environment)
        except Exception as error:
            raise ValueError(
                f"{environment.name} cannot be sent to worker processes ({error}); give its name, "
                "or a class or function that a module defines."
            ) from None
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context(
            "forkserver" if "forkserver" in methods else "spawn"
        )
        # imported once and forked, instead of once per worker
        self._context.set_forkserver_preload([__name__])
        self._workers = [self._start() for _ in range(workers or os.cpu_count() or 1)]

    def _start(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(there, self.environment), daemon=True)
        process.start()
        # otherwise the pipe would not end when the worker does
        there.close()
        return process, here

    def play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches:
        parts = share_out(self.environment, branches, len(self._workers))
        played: list[EpisodeBranches | None] = [None] * len(parts)
        # popped from the end: in order
        waiting = list(range(len(parts)))[::-1]
        lives = [self.patience] * len(parts)
        busy: dict[int, int] = {}
        # no queue between them: one that dies would take its rollouts with it
        idle = list(range(len(self._workers)))
        try:
            while waiting or busy:
                while waiting and idle:
                    worker = idle.pop()
                    part = waiting.pop()
                    busy[worker] = part
                    # one that died idle: the wait below finds its pipe closed
                    with suppress(OSError):
                        self._workers[worker][1].send((policy, branches.part(parts[part])))
                for worker in self._answering(busy):
                    part = busy[worker]
                    try:
                        answer = self._workers[worker][1].recv()
                    except (EOFError, OSError):
                        answer = None
                        lives[part] -= 1
                        self._replace_dead(worker, lives[part])
                        waiting.append(part)
                    del busy[worker]
                    idle.append(worker)
                    if isinstance(answer, Exception):
                        raise answer
                    played[part] = answer
        finally:
            for worker in busy:  # its late answer would meet the next question
                self._replace(worker)
        return branches.answered(parts, [one for one in played if one is not None])

    def _answering(self, busy: Iterable[int]) -> list[int]:
        """Wait until some of the workers have answered, or died."""
        by_pipe = {self._workers[worker][1]: worker for worker in busy}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe))]  # pyright: ignore[reportArgumentType]

    def _replace_dead(self, worker: int, lives: int) -> None:
        """Replace a worker that died, unless another would die as well."""
        self._workers[worker][0].join(1)  # then the exit code is its own
        code = self._replace(worker)
        if code == 1:  # where an environment raises, a worker says so and lives
            raise WorkerFailure(
                f"A worker could not import {self.environment.name}; define it in a module, not in "
                'a notebook, and let a script begin under `if __name__ == "__main__":`.'
            ) from None
        if not lives:
            raise WorkerFailure(
                f"A worker of {self.environment.name} died {self.patience} times over the same "
                f"rollouts (exit code {code}); play them in this process to see why."
            ) from None

    def _replace(self, worker: int) -> int | None:
        process, pipe = self._workers[worker]
        pipe.close()
        process.kill()
        process.join()
        self._workers[worker] = self._start()
        return process.exitcode

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.terminate()
        self._workers = []


def _work(pipe: Connection, environment: Environment) -> None:
    # Ctrl-C reaches every process, and is the main one's to answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # there is a worker per core, and a forked process would wait for threads that it lost
    torch.set_num_threads(1)
    while True:
        try:
            policy, branches = pipe.recv()
        except (EOFError, OSError):
            environment.close()
            return
        try:
            answer: Any = play_elsewhere(environment, policy, branches)
        except Exception as error:
            answer = (
                error
                if isinstance(error, EnvironmentFailure)
                else EnvironmentFailure(f"A worker failed: {error!r}")
            )
        pipe.send(answer)


ENGINES = ("in-process", "pool", "ray")


def check_engine_options(name: str, workers: int | None, address: str | None) -> None:
    """Refuse an engine that does not exist, and options that it would ignore."""
    if name not in ENGINES:
        raise ValueError(f'There is no engine "{name}": choose "in-process", "pool" or "ray".')
    if workers is not None:
        check_count("workers", workers)
    if name == "in-process" and workers not in (None, 1):
        raise ValueError(
            f'{workers} workers need the engine "pool" or "ray": "in-process" has none.'
        )
    if name != "ray" and address is not None:
        raise ValueError(f'The engine "{name}" has no address; choose the engine "ray".')


def make_engine(
    name: str, environment: Environment, workers: int | None = None, address: str | None = None
) -> RolloutEngine:
    """An engine by name: "in-process", "pool" or "ray"."""
    check_engine_options(name, workers, address)
    if name == "ray":
        from arsm.rl.cluster import Ray  # ray is an extra of its own

        return Ray(environment, workers, address)
    return Pool(environment, workers) if name == "pool" else InProcess(environment)
