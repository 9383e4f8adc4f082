"""Rollouts on a Ray cluster."""

from __future__ import annotations

import os
import socket
from typing import Any

from arsm.rl.branching import EnvironmentFailure
from arsm.rl.environments import Environment
from arsm.rl.play import Branches, Played, play_elsewhere
from arsm.rl.policies import Policy
from arsm.rl.rollouts import WorkerFailure, gather, share_out

ANSWER_WITHIN = 5.0


def import_ray() -> Any:
    """Ray, or what to do about its absence."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError("The Ray engine needs ray; install it with `pip install 'arsm[cluster]'`.") from None
    return ray


class Ray:
    """Ray actors, each with the environment of its own; Ray replaces one that dies and plays its rollouts again."""

    patience = 3
    """How often one part may be played again."""

    def __init__(self, environment: Environment, workers: int | None = None, address: str | None = None) -> None:
        ray = import_ray()
        self.environment, self._ray = environment, ray
        self._started = not ray.is_initialized()
        if self._started:
            if address is not None:
                _check_answers(address)
            options: dict[str, Any] = {"num_cpus": workers} if address is None and workers else {}
            ray.init(address=address or "local", log_to_driver=False, include_dashboard=False, **options)
        count = workers or int(ray.cluster_resources().get("CPU", os.cpu_count() or 1))
        actor: Any = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=self.patience)(Player)
        self._actors = [actor.remote(environment) for _ in range(count)]

    def play(self, policy: Policy, branches: Branches) -> Played:
        ray = self._ray
        parts = share_out(self.environment, branches, len(self._actors))
        shared = ray.put(policy)
        tasks = [
            self._actors[number % len(self._actors)].play.remote(shared, branches.part(part))
            for number, part in enumerate(parts)
        ]
        try:
            return gather(parts, ray.get(tasks))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, EnvironmentFailure) else None
            raise cause or EnvironmentFailure(f"A worker failed: {error.cause!r}") from None
        except ray.exceptions.RayActorError as error:
            raise WorkerFailure(
                f"A worker of {self.environment.name} died {self.patience} times over the same rollouts; play them in "
                "this process to see why."
            ) from error

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._started:
            self._ray.shutdown()


class Player:
    """What an actor does."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def play(self, policy: Policy, branches: Branches) -> Played:
        return play_elsewhere(self.environment, policy, branches)


def _check_answers(address: str) -> None:
    """Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f'"{address}" is no address of a Ray cluster; write HOST:PORT.')
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN).close()
    except OSError as error:
        raise ValueError(
            f"Nothing answers at {address} ({error}); start a cluster there with `ray start --head`, or leave the "
            "address out for a local one."
        ) from None
