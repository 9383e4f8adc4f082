"""Training: one run folder per learning rate and dropout rate, all replicas together, from
checkpoints.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from arsm.checks import NotFiniteError
from arsm_experiments.adam import Optimiser
from arsm_experiments.checks import pick_device
from arsm_experiments.data import Mnist, load_mnist
from arsm_experiments.layout import pack
from arsm_experiments.replicas import Objective, Replicas, compiles_slopes, seed_of
from arsm_experiments.runs.writer import Run, open_run
from arsm_experiments.training.pictures import save_sheet
from arsm_experiments.training.processes import process_group, share_checkpoint

if TYPE_CHECKING:
    from arsm_experiments.training.options import Training

STEPS_PER_REPLAY = 5


@dataclass
class Group:
    """The replicas of one run folder."""

    run: Run | None
    """None except in the first process."""
    config: dict[str, Any]
    epoch: int
    state: dict[str, Any] | None


def train(config: Training, on_epoch: Callable[[int], object] = lambda epoch: None) -> list[Path]:
    """Train all replicas to the end, resuming from checkpoints. Returns the run folders.

    A checkpoint holds the last weights and, as `best`, each replica's best weights on the
    validation images.
    """
    config.check()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(process_group(torch.device(pick_device(config.device))))
        train_images, validation, test = (
            part.to(place) for part in load_mnist(folder=config.data, sampled=config.sampled_pixels)
        )
        data = Mnist(train_images[: config.images], validation, test)
        steps_per_epoch = len(data.train) // config.batch
        groups = []
        for folder, own in config.runs().items():
            run = None
            if not dist.is_initialized() or dist.get_rank() == 0:
                words = {"group": config.name, "label": config.label(own)}
                options = {**words, "resume": config.resume, "device": place}
                run = stack.enter_context(
                    open_run(config.root, config.experiment, folder.name, own, **options)
                )
            step, state = share_checkpoint(run)
            groups.append(Group(run, own, step // steps_per_epoch, state))
        # a process killed between two checkpoints leaves folders at different epochs: let the
        # others catch up
        while unfinished := [group for group in groups if group.epoch < config.epochs]:
            start = min(group.epoch for group in unfinished)
            until = min(
                [group.epoch for group in unfinished if group.epoch > start], default=config.epochs
            )
            train_together(
                config, [g for g in unfinished if g.epoch == start], until, data, on_epoch
            )
    return list(config.runs())


def _set_up_gpu(config: Training, *, fresh: bool) -> None:
    """Set the precision of products, and the noise of a fresh training."""
    torch.set_float32_matmul_precision("highest" if config.precision == "float32" else "high")
    if fresh:
        # stacked replicas draw from the device's own generator, which a checkpoint restores
        rank = dist.get_rank() if dist.is_initialized() else 0
        words = f"device {config.seeds} {config.rates} {config.dropouts} {rank}"
        torch.cuda.manual_seed(seed_of(words))


def _save_pictures(members: list[tuple[Group, int]], sheets: Iterable[Any]) -> None:
    """Write each replica's pictures into its run folder, in the process that has one."""
    for (group, seed), sheet in zip(members, sheets, strict=True):
        if group.run is not None:
            save_sheet(sheet, group.run.folder / f"pictures-seed{seed}.png")


def train_together(
    config: Training,
    groups: list[Group],
    until: int,
    data: Mnist,
    on_epoch: Callable[[int], object],
) -> None:
    """Train the replicas of these groups, all at one epoch, as one stack."""
    if data.train.device.type == "cuda":
        _set_up_gpu(config, fresh=groups[0].epoch == 0)
    stack = _Stack(config, groups, data)
    for epoch in range(groups[0].epoch + 1, until + 1):
        try:
            metrics = stack.replicas.epoch()
        except NotFiniteError as error:
            raise not_finite_in(epoch) from error
        for group in groups:
            group.epoch = epoch
        if epoch % config.measure_every == 0 or epoch == config.epochs:
            stack.measure(epoch, metrics)
        on_epoch(epoch)
    for group, own in stack.rows():
        group.state = stack.checkpoint(own)


class _Stack:
    """The replicas of several groups, one for every seed of each, and the best weights so far."""

    def __init__(self, config: Training, groups: list[Group], data: Mnist) -> None:
        self.config = config
        self.groups = groups
        self.data = data
        self.members = [(group, seed) for group in groups for seed in config.seeds]
        self.steps_per_epoch = len(data.train) // config.batch
        self.replicas = self._make()
        self.best = self.replicas.weights.clone()
        device = data.train.device
        self.best_validation = torch.full((len(self.members),), torch.inf, device=device)
        for group, own in self.rows():
            if group.state is not None:
                self.replicas.load_state_dict(own, group.state)
                self.best[own].copy_(group.state["best"])
                self.best_validation[own].copy_(group.state["best_validation"])

    def _make(self) -> Replicas:
        config = self.config
        images = self.data.train
        on_gpu = images.device.type == "cuda"
        module = config.model(dense=on_gpu).to(images.device)
        # replicas that cannot be stacked run one after the other on a GPU too, inside the same CUDA
        # graph; running statistics change in every step, and are neither compiled nor captured
        fixed = on_gpu and not module.estimator.adapts
        stacked = fixed and module.estimator.vmappable
        # several processes share their gradients in every step, outside of any graph
        captured = fixed and not dist.is_initialized()
        steps = math.gcd(self.steps_per_epoch, STEPS_PER_REPLAY) if captured else 0
        settings = {
            name: torch.tensor([group.config[name] for group, _ in self.members])
            for name in config.settings
        }
        return Replicas(
            module,
            Objective(type(module).encode, module.losses, module.prepare, module.metrics),
            initial_parameters(config, images).repeat(len(self.groups), 1),
            images,
            settings,
            [seed for _, seed in self.members],
            batch=config.batch,
            watched=module.encoder_size,
            optimiser=Optimiser(
                config.schedule,
                config.epochs * self.steps_per_epoch,
                config.averaging,
                module.paces,
            ),
            stacked=stacked,
            compiled=stacked or (fixed and compiles_slopes()),
            steps_per_replay=steps,
        )

    def rows(self) -> Iterator[tuple[Group, slice]]:
        """Each group, and where its replicas are."""
        count = len(self.config.seeds)
        for i, group in enumerate(self.groups):
            yield group, slice(i * count, (i + 1) * count)

    def checkpoint(self, own: slice) -> dict[str, Any]:
        """The state of some replicas."""
        return self.replicas.state_dict(own) | {
            "best": self.best[own].clone(),
            "best_validation": self.best_validation[own].clone(),
        }

    def measure(self, epoch: int, metrics: dict[str, Tensor]) -> None:
        """Measure the replicas after an epoch, with its metrics; log and save them."""
        config = self.config
        step = epoch * self.steps_per_epoch
        metrics = metrics | config.measure(self.replicas, self.replicas.weights, self.data, step)
        improved = metrics["validation"] < self.best_validation
        self.best_validation = torch.where(improved, metrics["validation"], self.best_validation)
        self.best = torch.where(improved.unsqueeze(-1), self.replicas.weights, self.best)
        if epoch == config.epochs:
            metrics = metrics | config.final_metrics(self.replicas, self.best, self.data, step)
            _save_pictures(self.members, config.pictures(self.replicas, self.best, self.data, step))
        # before log and checkpoint are written: a run keeps its last finite one
        check_finite(metrics.pop("not_finite"), epoch)
        # a gradient that overflows Adam's second moments ends all learning without another sign
        check_finite(~metrics["gradient_variance"].isfinite(), epoch)
        for group, own in self.rows():
            if group.run is not None:
                values = {name: value[own].tolist() for name, value in metrics.items()}
                log(group.run, step, epoch, config, values)
                group.run.save(step, self.checkpoint(own))


def initial_parameters(config: Training, images: Tensor) -> Tensor:
    """[seeds, P]: the initial parameters of each seed, for training on images [N, 784]."""
    rows = []
    for seed in config.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rows.append(pack(config.begin(images)))
    return torch.stack(rows)


def check_finite(not_finite: Tensor, epoch: int) -> None:
    """Check a flag of every replica, such as the one that training steps keep on the device; read
    once per measurement.
    """
    if bool((not_finite > 0).any()):
        raise not_finite_in(epoch)


def not_finite_in(epoch: int) -> FloatingPointError:
    """The error to raise; it says what to do."""
    return FloatingPointError(
        f"Logits, values of f or gradients were not finite in epoch {epoch}; try a smaller "
        "learning rate."
    )


def log(run: Run, step: int, epoch: int, config: Training, metrics: dict[str, list[float]]) -> None:
    """Write one line per seed; each metric is a list over seeds."""
    for i, seed in enumerate(config.seeds):
        run.log(
            step, {"epoch": epoch, **{name: values[i] for name, values in metrics.items()}}, seed
        )
