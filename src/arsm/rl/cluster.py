"""Rollouts on a Ray cluster."""

from __future__ import annotations

from typing import Any

from arsm.cluster import join_cluster
from arsm.rl.environment import Environment, EnvironmentFailure
from arsm.rl.play import EpisodeBranches, play_elsewhere
from arsm.rl.policies import Policy
from arsm.rl.rollouts import WorkerFailure, share_out


class Ray:
    """Ray actors, each with the environment of its own; Ray replaces one that dies and
    plays its rollouts again.
    """

    patience = 3
    """Most times that one part is played again."""

    def __init__(
        self, environment: Environment, workers: int | None = None, address: str | None = None
    ) -> None:
        self.environment = environment
        self._ray, self._started, count = join_cluster(workers, address)
        # a rollout is a function of its arguments, so playing one again gives the same
        actor: Any = self._ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=self.patience)(
            RolloutActor
        )
        self._actors = [actor.remote(environment) for _ in range(count)]

    def play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches:
        ray = self._ray
        parts = share_out(self.environment, branches, len(self._actors))
        # once to the store instead of once per task
        shared = ray.put(policy)
        tasks = [
            self._actors[number % len(self._actors)].play.remote(shared, branches.part(part))
            for number, part in enumerate(parts)
        ]
        try:
            return branches.answered(parts, ray.get(tasks))
        except ray.exceptions.RayTaskError as error:
            # an environment's own sentence says more than Ray's traceback
            cause = error.cause if isinstance(error.cause, EnvironmentFailure) else None
            raise cause or EnvironmentFailure(f"A worker failed: {error.cause!r}") from None
        except ray.exceptions.RayActorError as error:
            raise WorkerFailure(
                f"A worker of {self.environment.name} died {self.patience} times over the same "
                "rollouts; play them in this process to see why."
            ) from error

    def close(self) -> None:
        # kill instead of waiting: nothing in an actor is worth saving
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        # a cluster that was there before is not ours to end
        if self._started:
            self._ray.shutdown()


class RolloutActor:
    """Plays parts of rollouts in an actor's process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches:
        return play_elsewhere(self.environment, policy, branches)
