"""Training R replicas of one model at once: seeds, learning rates, dropout rates.

All parameters of a replica lie in one row of a tensor [R, P], so that Adam, averaging and checkpoints are a few
operations on one tensor. A replica has its own noise and its own order of the data, and learns what it would learn
alone.

On a CPU the replicas take turns, eagerly, each with its own generator. Stacked (`stacked=True`), one `torch.vmap`
computes all losses; on a GPU that function is compiled, and whole training steps, from picking the images to Adam, are
captured in a CUDA graph: between the start of an epoch and its end the host only launches graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
WARM_UP = 3
# how matrix products round depends on where their factors lie: all replicas begin at a multiple of 64 bytes
ALIGNMENT = 16
STATE = ("first_moment", "second_moment", "slow_moment", "average")

Schedule = Literal["constant", "cosine"]
Task = Callable[..., Any]


class Layout(NamedTuple):
    """Where each parameter of a module lies in a vector [P]."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        names, parameters = zip(*module.named_parameters(), strict=True)
        return cls(names, tuple(p.shape for p in parameters))

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """[P] -> views of it, by name."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = vector.split([*sizes, vector.shape[0] - sum(sizes)])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=False)}


def pack(module: nn.Module) -> Tensor:
    """All parameters as one vector [P], with zeros up to a multiple of ALIGNMENT."""
    vector = torch.cat([p.detach().flatten() for p in module.parameters()])
    return F.pad(vector, (0, -vector.shape[0] % ALIGNMENT))


class Engine:
    """R replicas in training.

    Args:
        module: the model; `module(task, *args)` runs one of its tasks.
        loss: the task to minimise: `loss(x, settings, generator=...) -> (loss [], {name: [] to average})`, for images
            x [B, D] and a dict of this replica's settings.
        parameters: [R, P], as `pack` makes them from the module.
        data: uint8 [N, D].
        settings: [R] each, the learning rate `rate` among them.
        seeds: R numbers, for the order of the data and the noise.
        batch: images a step, over all processes where there are several.
        watched: the gradient's variance is taken over the first so many parameters.
        schedule: the learning rate along `total_steps`.
        averaging: decay of the moving average of the parameters, 0 for none.
        stacked: all replicas in one vmap instead of in turns.
        compiled: compile it.
        steps_per_replay: steps in one CUDA graph, 0 for none; must divide the steps of an epoch.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Task,
        parameters: Tensor,
        data: Tensor,
        settings: Mapping[str, Tensor],
        seeds: list[int],
        *,
        batch: int,
        watched: int,
        schedule: Schedule = "constant",
        total_steps: int = 0,
        averaging: float = 0.0,
        stacked: bool,
        compiled: bool = False,
        steps_per_replay: int = 0,
    ) -> None:
        self.module, self.loss, self.data = module, loss, data
        self.device = data.device
        self.layout = Layout.of(module)
        self.settings = {name: value.to(self.device) for name, value in settings.items()}
        self.watched, self.schedule, self.total_steps, self.averaging = watched, schedule, total_steps, averaging
        self.stacked = stacked
        self.rank, self.processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if batch % self.processes:
            raise ValueError(f"A batch of {batch} cannot be shared by {self.processes} processes; choose a multiple.")
        self.batch = batch
        self.steps_per_epoch = data.shape[0] // batch
        if self.steps_per_epoch == 0:
            raise ValueError(f"A batch of {batch} is more than the {data.shape[0]} images; choose a smaller one.")
        if steps_per_replay and self.steps_per_epoch % steps_per_replay:
            raise ValueError(
                f"steps_per_replay = {steps_per_replay} must divide the {self.steps_per_epoch} steps of an epoch."
            )
        replicas = parameters.shape[0]
        parameters = parameters.to(self.device, torch.float32)
        self.parameters = parameters.clone().requires_grad_()
        self.state: dict[str, Tensor] = {
            "first_moment": torch.zeros_like(parameters),
            "second_moment": torch.zeros_like(parameters),
            "slow_moment": torch.zeros_like(parameters[:, :watched]),
            "average": parameters.clone() if averaging else parameters.new_empty(replicas, 0),
            "step": torch.zeros((), dtype=torch.int64, device=self.device),
        }
        self.order = torch.zeros(replicas, data.shape[0], dtype=torch.int64, device=self.device)
        # data order is the same in all processes, noise is not
        self.order_generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        self.seeds = seeds
        self.noise_generators = [torch.Generator(self.device) for _ in seeds]
        self._seed_noise()
        self.totals: dict[str, Tensor] = {}
        self._losses = self._losses_of_next_batch
        self._update = self._adam
        if compiled:
            self._losses = torch.compile(self._losses, fullgraph=True, dynamic=False)
            self._update = torch.compile(self._adam, fullgraph=True, dynamic=False)
        self.steps_per_replay = steps_per_replay
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def weights(self) -> Tensor:
        """[R, P]: what to evaluate with, the moving average where there is one."""
        return self.state["average"] if self.averaging else self.parameters.detach()

    def epoch(self) -> dict[str, Tensor]:
        """Train on all images once; the mean of every metric, [R] each, still on the device."""
        for row, generator in zip(self.order, self.order_generators, strict=True):
            row.copy_(torch.randperm(self.data.shape[0], generator=generator, device=self.device))
        if self.steps_per_replay and self._graph is None:
            self._capture()
        for total in self.totals.values():
            total.zero_()
        if self._graph is not None:
            for _ in range(self.steps_per_epoch // self.steps_per_replay):
                self._graph.replay()
        else:
            for _ in range(self.steps_per_epoch):
                self.train_step()
        means = {name: total / self.steps_per_epoch for name, total in self.totals.items()}
        if self.processes > 1:
            for mean in means.values():
                dist.all_reduce(mean)
                mean /= self.processes
        return means

    def train_step(self) -> None:
        """One step of all replicas."""
        losses, metrics = self._losses(self.parameters, self.settings)
        (gradient,) = torch.autograd.grad(losses.sum(), self.parameters)
        if self.processes > 1:
            dist.all_reduce(gradient)
            gradient /= self.processes
        with torch.no_grad():
            self._update(gradient)
        for name, value in metrics.items():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(value, dtype=torch.float32)
            self.totals[name] += value

    def next_batch(self) -> Tensor:
        """[R, B, D] as float32, this process's share."""
        share = self.batch // self.processes
        within = torch.arange(share, device=self.device) + self.rank * share
        position = self.state["step"] % self.steps_per_epoch * self.batch + within
        return self.data[self.order.index_select(1, position)].float()

    def run(self, task: Task, weights: Tensor, *args: Tensor, generators: list[torch.Generator]) -> Any:
        """A task of every replica without gradients: weights [R, P], other tensors [R, ...]; results [R, ...].

        Stacked replicas draw from torch's global random numbers instead of the generators.
        """
        with torch.no_grad():
            if self.stacked:
                return torch.vmap(partial(self._call, task), randomness="different")(weights, *args)
            rows = zip(generators, weights, *args, strict=True)
            return _stack([self._call(task, *row, generator=generator) for generator, *row in rows])

    def gradient_variance(self) -> Tensor:
        """[R]: the mean over the watched parameters of v - m^2, moving averages of the gradient with decay 0.999.

        v is Adam's own second moment, which has the same decay.
        """
        count = self.state["step"].double()
        weight = (1 - BETA2**count).clamp_min(torch.finfo(torch.float64).tiny)
        first = self.state["slow_moment"].double() / weight
        second = self.state["second_moment"][:, : self.watched].double() / weight
        # row by row, so that a replica's rounding does not depend on the others
        return torch.stack([row.mean() for row in second - first.square()])

    def state_dict(self, replicas: slice) -> dict[str, Any]:
        """Everything that the next epoch of these replicas depends on, but for torch's global random numbers."""
        return {
            "parameters": self.parameters.detach()[replicas].clone(),
            "step": self.state["step"].clone(),
            **{name: self.state[name][replicas].clone() for name in STATE},
            "order": [generator.get_state() for generator in self.order_generators[replicas]],
            "noise": [generator.get_state() for generator in self.noise_generators[replicas]],
        }

    def load_state_dict(self, replicas: slice, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.parameters[replicas].copy_(state["parameters"])
        self.state["step"].copy_(state["step"])
        for name in STATE:
            self.state[name][replicas].copy_(state[name])
        for generators, saved in ((self.order_generators, state["order"]), (self.noise_generators, state["noise"])):
            for generator, own in zip(generators[replicas], saved, strict=True):
                generator.set_state(own)
        if self.rank > 0:  # the states saved are the first process's
            self._seed_noise()

    def _seed_noise(self) -> None:
        for seed, generator in zip(self.seeds, self.noise_generators, strict=True):
            generator.manual_seed(seed + (1 + self.rank) * 2**32 + int(self.state["step"]) * 2**40)

    def _call(self, task: Task, vector: Tensor, *args: Any, **options: Any) -> Any:
        return functional_call(self.module, self.layout.unpack(vector), (task, *args), options)

    def _losses_of_next_batch(
        self, parameters: Tensor, settings: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self._stacked_losses if self.stacked else self._losses_in_turn
        return losses(parameters, self.next_batch(), settings)

    def _losses_in_turn(
        self, parameters: Tensor, x: Tensor, settings: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        parts = []
        for r, (vector, generator) in enumerate(zip(parameters, self.noise_generators, strict=True)):
            own = {name: value[r] for name, value in settings.items()}
            parts.append(self._call(self.loss, vector, x[r], own, generator=generator))
        return _stack(parts)

    def _stacked_losses(
        self, parameters: Tensor, x: Tensor, settings: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def one(vector: Tensor, x: Tensor, own: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return self._call(self.loss, vector, x, own)

        return torch.vmap(one, randomness="different")(parameters, x, settings)

    def _adam(self, gradient: Tensor) -> None:
        """Adam (Kingma and Ba, ICLR 2015) with a rate for every replica, and the moving averages."""
        state = self.state
        step = state["step"].add_(1).double()
        rate = self.settings["rate"].double()
        if self.schedule == "cosine":
            rate = rate * 0.5 * (1 + torch.cos(math.pi * (step - 1) / self.total_steps))
        size = (rate * (1 - BETA2**step).sqrt() / (1 - BETA1**step)).float().unsqueeze(-1)
        small = (EPSILON * (1 - BETA2**step).sqrt()).float()
        state["first_moment"].lerp_(gradient, 1 - BETA1)
        state["second_moment"].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        state["slow_moment"].lerp_(gradient[:, : self.watched], 1 - BETA2)
        self.parameters.sub_((size * state["first_moment"]).div_(state["second_moment"].sqrt().add_(small)))
        if self.averaging:
            fresh = (1 / step).clamp_min(1 - self.averaging).float()
            state["average"].lerp_(self.parameters, fresh)

    def _capture(self) -> None:
        """Record `steps_per_replay` steps as a CUDA graph, leaving all state as it was."""
        kept = {name: tensor.clone() for name, tensor in self.state.items()}
        parameters, random = self.parameters.detach().clone(), torch.cuda.get_rng_state(self.device)
        noise = [generator.get_state() for generator in self.noise_generators]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.train_step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for generator in self.noise_generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            for _ in range(self.steps_per_replay):
                self.train_step()
        self._graph = graph
        with torch.no_grad():
            self.parameters.copy_(parameters)
        for name, tensor in self.state.items():
            tensor.copy_(kept[name])
        torch.cuda.set_rng_state(random, self.device)
        for generator, state in zip(self.noise_generators, noise, strict=True):
            generator.set_state(state)


def _stack(parts: list[Any]) -> Any:
    """Results of single replicas, tensors or tuples and dicts of them, as [R, ...]."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack(parts)
    if isinstance(first, dict):
        return {name: _stack([part[name] for part in parts]) for name in first}
    return tuple(_stack(list(column)) for column in zip(*parts, strict=True))
