"""Rollouts of sequences on Ray actors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from arsm.cluster import import_ray, join_cluster
from arsm.sequences.decode import Completions, Decoding, Prefixes
from arsm.sequences.engines import EngineFailure, Part, gather, split, weights_version
from arsm.sequences.model import Model


class Cluster:
    """An `Engine` on Ray actors, each with a copy of the model; Ray replaces an actor that dies.

    Prefixes are played in parts of `rows`, each with a seed of its own: the number of
    actors changes no result. Weights are sent when they have changed, once per machine.
    """

    patience = 3
    """Most times that one part is played again."""

    def __init__(
        self,
        model: Model,
        module: nn.Module,
        *,
        workers: int | None = None,
        address: str | None = None,
        rows: int = 64,
    ) -> None:
        """
        Args:
            model: what actors sample from.
            module: its weights; where they lie on a GPU, every actor takes one.
            workers: number of actors, by default one per CPU of the cluster.
            address: of the cluster, HOST:PORT; None starts a local one.
            rows: prefixes per part.
        """
        self._ray, self._started, count = join_cluster(workers, address)
        self.module = module
        self.rows = rows
        device = next(module.parameters()).device.type
        own, copied = copy.deepcopy((model, module))
        copied.cpu()
        resources: dict[str, Any] = (
            {"num_gpus": 1, "num_cpus": 0} if device == "cuda" else {"num_cpus": 1}
        )
        actor: Any = self._ray.remote(max_restarts=-1, max_task_retries=self.patience, **resources)(
            Player
        )
        # kept, since an actor that is replaced asks for it again
        self._shared = self._ray.put((own, copied))
        self._actors = [actor.remote([self._shared], device) for _ in range(count)]
        self._version = ""
        self._weights = None

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Completions:
        """Complete every prefix, like `arsm.sequences.complete`."""
        ray = self._ray
        version = weights_version(self.module)
        if version != self._version:
            self._weights = ray.put({name: x.cpu() for name, x in self.module.state_dict().items()})
            self._version = version
        parts = split(prompts, mask, prefixes, decoding, self.rows, generator)
        tasks = [
            # inside a list, weights are fetched by the actor that needs them, not sent with every
            # part
            self._actors[number % len(self._actors)].play.remote(
                [self._weights], version, part.to("cpu")
            )
            for number, part in enumerate(parts)
        ]
        try:
            return gather(parts, ray.get(tasks), prefixes, decoding)
        except ray.exceptions.RayTaskError as error:
            raise EngineFailure(f"A worker failed over its rollouts: {error.cause!r}.") from error
        except ray.exceptions.RayActorError as error:
            raise EngineFailure(
                f"A worker died {1 + self.patience} times over the same rollouts; sample without "
                "an engine to see why: nothing was changed."
            ) from error
        except ray.exceptions.RayError as error:
            raise EngineFailure(
                f"The Ray cluster failed ({type(error).__name__}); start it again and go on."
            ) from error

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._started:
            self._ray.shutdown()


class Player:
    """Completes parts of the prefixes in an actor's process."""

    def __init__(self, shared: list[Any], device: str) -> None:
        torch.set_num_threads(1)
        self.model: Model
        self.module: nn.Module
        self.model, self.module = import_ray().get(shared[0])
        self.module.to(device)
        self.device = device
        self.version = ""

    def play(self, weights: list[Any], version: str, part: Part) -> Completions:
        """Complete a part with these weights."""
        if version != self.version:
            self.module.load_state_dict(import_ray().get(weights[0]))
            self.version = version
        done = part.to(self.device).play(self.model)
        return Completions(done.tokens.cpu(), done.log_probs.cpu())
