"""Training R replicas of one model at once: seeds, learning rates, dropout rates.

One tensor [R, P] holds all parameters, one row per replica, so Adam, averaging and checkpoints are
a few operations on one tensor. Each replica has its own noise and its own order of the data, and
learns exactly what it would learn alone.

On a CPU the replicas are trained one after the other, eagerly, each with its own generator. With
`stacked=True` one `torch.vmap` trains all of them at once. On a GPU both ways are compiled, and
whole training steps, from picking the images to Adam, are captured in a CUDA graph: during an epoch
the host only launches graphs. Independent work (separate replicas, the losses of one replica)
overlaps there on separate streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from arsm_experiments.adam import BETA2, STATE, Optimiser, StackedAdam
from arsm_experiments.layout import Layout

WARM_UP = 3
"""Training steps before a CUDA graph is captured."""

Task = Callable[..., Any]


def compiles_slopes() -> bool:
    """Whether this torch compiles estimators that differentiate f inside `tell`; 2.11 is the first
    to.
    """
    return hasattr(torch._dynamo.config, "trace_autograd_ops")


def seed_of(words: str) -> int:
    """A well-mixed seed of 63 bits: a CPU generator only reads the lower 32."""
    return random.Random(words).getrandbits(63)


@dataclass(frozen=True)
class Stack:
    """Replicas that are trained by one call: all of them stacked, or a single one."""

    where: slice | int
    """Their rows; all fields below are views of these rows."""
    parameters: Tensor
    """[R, P] or [P]."""
    pieces: Mapping[str, Tensor]
    """The parameters by name."""
    buffers: Mapping[str, Tensor]
    """The module's buffers by name, which its tasks may change."""
    state: Sequence[Tensor]
    """The tensors that STATE lists."""
    settings: Mapping[str, Tensor]
    order: Tensor
    """[R, N] or [N]: which image comes when."""
    generator: torch.Generator | None
    """Source of noise; None for torch's global generator."""

    def leaves(self) -> dict[str, Tensor]:
        """Fresh leaves to differentiate: torch ties a leaf to the stream of its first use."""
        return {name: piece.detach().requires_grad_() for name, piece in self.pieces.items()}


@dataclass(frozen=True)
class Objective:
    """What a replica minimises: the sum of its losses.

    Attributes:
        encode: the first task of every loss: `encode(x, settings, generator=...) -> code`, a
            tensor, for images x [B, D] and a dict of this replica's settings.
        losses: the tasks whose sum is minimised: `loss(x, code, settings, generator=...) -> (loss
            [], seen)`, or `(y, seen, slope)` with the loss's derivative in y, if its value is not
            needed. Only the first loss has a gradient through the code; the others get it detached.
        prepare: a task `prepare(generator=..., images=...) -> {name: tensors}`, if any, whose
            result joins the settings of the losses; it runs without gradient, while the batch of so
            many images is encoded.
        metrics: `metrics(seen) -> {name: metric []}`, what to log of a loss, where it saw anything;
            computed beside its backward pass.
    """

    encode: Task
    losses: Sequence[Task]
    prepare: Task | None = None
    metrics: Callable[[Any], dict[str, Tensor]] = lambda seen: seen


class Replicas:
    """R replicas in training.

    Args:
        module: the model; `module(task, *args)` runs one of its tasks.
        objective: what is minimised.
        parameters: [R, P], made by `layout.pack`.
        data: uint8 [N, D].
        settings: [R] each; must contain the learning rate, `rate`; `weight_decay` is AdamW's, of
            matrices only.
        seeds: R numbers, for the order of the data and the noise.
        batch: images per step, over all processes.
        watched: number of leading parameters for the gradient's variance; must end at a parameter's
            end.
        optimiser: Adam's options.
        stacked: train all replicas in one vmap instead of one after the other.
        compiled: compile the steps. Stacked and compiled replicas draw from torch's global
            generator.
        steps_per_replay: steps in one CUDA graph, 0 for none; must divide the steps of an epoch.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        parameters: Tensor,
        data: Tensor,
        settings: Mapping[str, Tensor],
        seeds: list[int],
        *,
        batch: int,
        watched: int,
        optimiser: Optimiser | None = None,
        stacked: bool,
        compiled: bool = False,
        steps_per_replay: int = 0,
    ) -> None:
        self.module = module
        self.data = data
        self.device = data.device
        self.layout = Layout.of(module)
        self.settings = {name: value.to(self.device) for name, value in settings.items()}
        self.watched = watched
        self.stacked = stacked
        self.optimiser = optimiser or Optimiser()
        self._share_batch(batch, steps_per_replay)
        self.parameters = parameters.to(self.device, torch.float32, copy=True)
        decays = "weight_decay" in settings and bool(settings["weight_decay"].any())
        self.adam = StackedAdam(
            self.optimiser, self.layout, self.parameters, watched, decays=decays
        )
        self.state = self.adam.state
        self._seed(seeds)
        self.totals: dict[str, Tensor] = {}
        replicas = parameters.shape[0]
        self.buffers = {
            name: buffer.to(self.device).repeat(replicas, *(1,) * buffer.ndim)
            for name, buffer in module.named_buffers()
        }
        """[R, ...] each: every replica has running statistics of its own."""
        rows = [slice(None)] if stacked else range(replicas)
        self.stacks = [self._make_stack(where, own_noise=not compiled) for where in rows]
        self._ones = torch.ones(replicas, device=self.device)
        self._streams: dict[tuple[torch.cuda.Stream, str, int], torch.cuda.Stream] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._make_steps(objective)
        if compiled:
            self._compile_steps()

    def _share_batch(self, batch: int, steps_per_replay: int) -> None:
        """Share the batch among the processes, and the epoch's steps among CUDA graphs."""
        self.rank, self.processes = 0, 1
        if dist.is_initialized():
            self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        if batch % self.processes:
            raise ValueError(
                f"A batch of {batch} cannot be shared by {self.processes} processes; choose a "
                "multiple."
            )
        images = self.data.shape[0]
        self.batch = batch
        self.steps_per_epoch = images // batch
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"A batch of {batch} is more than the {images} images; choose a smaller one."
            )
        if steps_per_replay and self.steps_per_epoch % steps_per_replay:
            raise ValueError(
                f"steps_per_replay = {steps_per_replay} must divide the {self.steps_per_epoch} "
                "steps of an epoch."
            )
        self.steps_per_replay = steps_per_replay

    def _seed(self, seeds: list[int]) -> None:
        """Each replica's order of the data, the same in all processes, and its noise, which is
        not.
        """
        replicas, images = self.parameters.shape[0], self.data.shape[0]
        self.seeds = seeds
        self.order = torch.zeros(replicas, images, dtype=torch.int64, device=self.device)
        self.order_generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        self.noise_generators = [torch.Generator(self.device) for _ in seeds]
        self._seed_noise()

    def _make_steps(self, objective: Objective) -> None:
        """The parts of a training step."""
        images = self.batch // self.processes
        self._begin: Callable[..., Any] = partial(self._encode_next_batch, objective.encode)
        self._prepare: Callable[..., Any] | None = None
        if objective.prepare is not None:
            self._prepare = partial(self._each, partial(objective.prepare, images=images))
        self._losses: list[Callable[..., Any]] = [
            partial(self._each, loss) for loss in objective.losses
        ]
        self._metrics: Callable[[Any], dict[str, Tensor]] = objective.metrics
        if self.stacked:
            self._metrics = torch.vmap(objective.metrics)
        self._scale: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] = self.adam.scale
        self._update: Callable[..., None] = self.adam.update
        self._follow: Callable[..., None] = self.adam.follow

    def _compile_steps(self) -> None:
        """Compile all parts of a training step."""
        torch.compiler.reset()  # steps compiled earlier count against the limit
        if compiles_slopes():
            torch._dynamo.config.trace_autograd_ops = True
        build = partial(torch.compile, fullgraph=True, dynamic=False)
        self._begin = build(self._begin)
        self._scale = build(self._scale)
        self._metrics = build(self._metrics)
        self._prepare = build(self._prepare) if self._prepare else None
        self._losses = [build(loss) for loss in self._losses]
        # the update reads every gradient where it lies
        options = {"max_pointwise_cat_inputs": len(self.layout.names) + 1}
        own: dict[str, Any] = {"options": options} if self.device.type == "cuda" else {}
        self._update = build(self._update, **own)
        self._follow = build(self._follow, **own)

    @property
    def weights(self) -> Tensor:
        """[R, P]: the weights to evaluate: the moving average if there is one, else the
        parameters.
        """
        return self.state["average"] if self.optimiser.averaging else self.parameters

    def epoch(self) -> dict[str, Tensor]:
        """Train on all images once. Returns the mean of every metric, [R] each, still on the
        device.
        """
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
        kept = []
        with self._side_by_side("stack", len(self.stacks)) as contexts:
            for stack, context in zip(self.stacks, contexts, strict=True):
                with context:
                    kept.append(self._train(stack))
        # Tensors that one stream makes and another one reads. Freed earlier, their memory would go
        # to whatever the next stack does on the first stream, while the second one still reads.
        del kept
        if len(self.stacks) > 1:
            self.state["step"] += 1

    def next_batch(self, order: Tensor) -> Tensor:
        """This process's share as float32: [R, B, D], or [B, D] of one replica, by the order [R, N]
        or [N].
        """
        share = self.batch // self.processes
        within = torch.arange(share, device=self.device) + self.rank * share
        position = self.state["step"] % self.steps_per_epoch * self.batch + within
        return self.data[order.index_select(-1, position)].float()

    def run(
        self, task: Task, weights: Tensor, *args: Tensor, generators: list[torch.Generator]
    ) -> Any:
        """Run a task for every replica without gradients: weights [R, P], other tensors [R, ...];
        results [R, ...].

        Stacked replicas draw from torch's global generator instead of `generators`.
        """
        with torch.no_grad():
            if self.stacked:
                return self._each(task, None, self.layout.unpack(weights), *args)
            rows = zip(generators, weights, *args, strict=True)
            found = [
                self._each(task, generator, self.layout.unpack(row), *own)
                for generator, row, *own in rows
            ]
            return _stack_results(found)

    def gradient_variance(self) -> Tensor:
        """[R]: the mean over the watched parameters of v - m^2, moving averages of the gradient
        with decay 0.999.

        v is Adam's own second moment, which has the same decay.
        """
        count = self.state["step"].double()
        weight = (1 - BETA2**count).clamp_min(torch.finfo(torch.float64).tiny)
        first = self.state["slow_moment"].double() / weight
        second = self.state["second_moment"][:, : self.watched].double() / weight
        # row by row: a replica's rounding must not depend on the others
        return torch.stack([row.mean() for row in second - first.square()])

    def state_dict(self, replicas: slice) -> dict[str, Any]:
        """Everything that the next epoch of these replicas depends on, except torch's global
        generator.
        """
        return {
            "parameters": self.parameters[replicas].clone(),
            "step": self.state["step"].clone(),
            **{name: self.state[name][replicas].clone() for name in STATE},
            "buffers": {name: buffer[replicas].clone() for name, buffer in self.buffers.items()},
            "order": [generator.get_state() for generator in self.order_generators[replicas]],
            "noise": [generator.get_state() for generator in self.noise_generators[replicas]],
        }

    def load_state_dict(self, replicas: slice, state: Mapping[str, Any]) -> None:
        self.parameters[replicas].copy_(state["parameters"])
        self.state["step"].copy_(state["step"])
        for name in STATE:
            self.state[name][replicas].copy_(state[name])
        for name, buffer in state.get("buffers", {}).items():
            self.buffers[name][replicas].copy_(buffer)
        for generators, saved in (
            (self.order_generators, state["order"]),
            (self.noise_generators, state["noise"]),
        ):
            for generator, own in zip(generators[replicas], saved, strict=True):
                generator.set_state(own)
        if self.rank > 0:  # the saved states are those of the first process
            self._seed_noise()

    def _seed_noise(self) -> None:
        for seed, generator in zip(self.seeds, self.noise_generators, strict=True):
            generator.manual_seed(seed_of(f"noise {seed} {self.rank} {int(self.state['step'])}"))

    def _make_stack(self, where: slice | int, *, own_noise: bool) -> Stack:
        parameters = self.parameters[where]
        return Stack(
            where,
            parameters,
            self.layout.unpack(parameters),
            {name: buffer[where] for name, buffer in self.buffers.items()},
            [self.state[name][where] for name in STATE],
            {name: value[where] for name, value in self.settings.items()},
            self.order[where],
            self.noise_generators[where] if own_noise and isinstance(where, int) else None,
        )

    def _train(self, stack: Stack) -> tuple[Any, ...]:
        """One step of a stack. Returns the tensors that were made on a stream of their own."""
        settings, leaves = stack.settings, stack.leaves()
        found: list[tuple[Tensor | None, ...]] = []
        with self._side_by_side("encode", 2) as (_, aside):
            with aside, torch.no_grad():
                prepared = self._prepare(stack.generator, leaves) if self._prepare else {}
                scale = self._scale(settings)
            x, code = self._begin(stack.order, stack.generator, leaves, settings)
        with self._side_by_side("loss", len(self._losses)) as contexts:
            for loss, context in zip(self._losses, contexts, strict=True):
                with context:
                    found.append(
                        self._learn(stack, loss, leaves, x, code, {**settings, **prepared})
                    )
                leaves, code = stack.leaves(), code.detach()
        gradients = [_sum(each) for each in zip(*found, strict=True)]
        gradients = [
            p.new_zeros(p.shape) if g is None else g
            for p, g in zip(stack.pieces.values(), gradients, strict=True)
        ]
        if self.processes > 1:
            for each in (*gradients, *stack.buffers.values()):
                dist.all_reduce(each)
                each /= self.processes
        with torch.no_grad(), self._side_by_side("update", 2) as (_, aside):
            self._update(stack.parameters, stack.state, gradients, *scale)
            with aside:
                self._follow(stack.state[STATE.index("slow_moment")], gradients)
                if len(self.stacks) == 1:  # otherwise the other stacks may still read it
                    self.state["step"] += 1
        return prepared, scale, found

    def _learn(
        self,
        stack: Stack,
        loss: Callable[..., Any],
        leaves: dict[str, Tensor],
        x: Tensor,
        code: Tensor,
        settings: Mapping[str, Tensor],
    ) -> tuple[Tensor | None, ...]:
        """The gradient of one loss; its metrics are counted meanwhile."""
        named = {**leaves, **stack.buffers}
        values, seen, *slopes = loss(stack.generator, named, x, code, settings)
        (slope,) = slopes or (self._ones[stack.where],)
        with self._side_by_side("metrics", 2) as (_, aside):
            if seen:
                with aside, torch.no_grad():
                    self._count(stack.where, self._metrics(seen))
            return torch.autograd.grad(values, list(leaves.values()), slope, allow_unused=True)

    def _encode_next_batch(
        self,
        encode: Task,
        order: Tensor,
        generator: torch.Generator | None,
        parameters: dict[str, Tensor],
        settings: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        x = self.next_batch(order)
        return x, self._each(encode, generator, parameters, x, settings)

    def _each(
        self,
        task: Task,
        generator: torch.Generator | None,
        parameters: dict[str, Tensor],
        *args: Any,
    ) -> Any:
        """Run a task for the stacked replicas or for one, with these parameters and buffers by
        name.
        """

        def one(parameters: dict[str, Tensor], *args: Any) -> Any:
            return functional_call(self.module, parameters, (task, *args), {"generator": generator})

        return (
            torch.vmap(one, randomness="different")(parameters, *args)
            if self.stacked
            else one(parameters, *args)
        )

    def _count(self, where: slice | int, metrics: dict[str, Tensor]) -> None:
        for name in metrics:
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(self._ones)
        totals = [self.totals[name][where] for name in metrics]
        torch._foreach_add_(totals, list(metrics.values()))  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def _side_by_side(
        self, what: str, count: int
    ) -> Iterator[list[AbstractContextManager[object]]]:
        """Contexts whose work overlaps on a GPU; work after the `with` waits for all of it."""
        first: list[AbstractContextManager[object]] = [nullcontext()]
        if self.device.type != "cuda":
            yield first * count
            return
        main = torch.cuda.current_stream(self.device)
        streams = []
        for number in range(1, count):
            key = main, what, number
            # only where it is missing: a device has 32 streams, and hands out the same ones again
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(self.device)
            streams.append(self._streams[key])
        for stream in streams:
            stream.wait_stream(main)
        yield [*first, *map(torch.cuda.stream, streams)]
        for stream in streams:
            main.wait_stream(stream)

    def _capture(self) -> None:
        """Record `steps_per_replay` steps as a CUDA graph; all state is restored afterwards."""
        kept = {name: tensor.clone() for name, tensor in self.state.items()}
        parameters, random = self.parameters.clone(), torch.cuda.get_rng_state(self.device)
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
        # on the same stream: a device has few of them, and each needs side streams of its own
        with torch.cuda.graph(graph, stream=side):
            for _ in range(self.steps_per_replay):
                self.train_step()
        self._graph = graph
        self.parameters.copy_(parameters)
        for name, tensor in self.state.items():
            tensor.copy_(kept[name])
        torch.cuda.set_rng_state(random, self.device)
        for generator, state in zip(self.noise_generators, noise, strict=True):
            generator.set_state(state)


def _sum(gradients: tuple[Tensor | None, ...]) -> Tensor | None:
    """Their sum; None where there is none."""
    return reduce(torch.add, found) if (found := [g for g in gradients if g is not None]) else None


def _stack_results(parts: list[Any]) -> Any:
    """Stack results of single replicas (tensors, or tuples and dicts of them) as [R, ...]."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.stack(parts)
    if isinstance(first, dict):
        return {name: _stack_results([part[name] for part in parts]) for name in first}
    return tuple(_stack_results(list(column)) for column in zip(*parts, strict=True))
