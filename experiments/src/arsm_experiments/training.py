"""Training replicas of one model on MNIST: the options, the loop and the run folders that experiments share.

An experiment is a `Training` that adds its own options and says which model to train and what to measure. `train` opens
one run folder for every learning rate and dropout rate, trains all replicas together (`engine.py`), measures them now
and then, and goes on from checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import arsm
from arsm.checks import NotFiniteError
from arsm_experiments.checks import check_asks, check_least, check_name, check_positive
from arsm_experiments.data import TRAINING, VALIDATION, Mnist, load_mnist
from arsm_experiments.engine import Engine, Schedule, Task, compiles_slopes, pack, seed_of
from arsm_experiments.model import Model
from arsm_experiments.record import Run, open_run, plain_name, read_run

if TYPE_CHECKING:
    from rich.console import Console

STEPS_PER_REPLAY = 5
DIAGNOSTIC_IMAGES = 200
PICTURES = 10
BLOCK_DRAWS = 100
BLOCK_ROWS = {"cpu": 1_000, "cuda": 10_000}

# ---------------------------------------------------------------- an experiment


@dataclass(frozen=True)
class Training(ABC):
    """The options that all experiments have, and what an experiment says of itself."""

    estimator: str = "arsm"
    """In words, e.g. "arsm", "arsm:pooled=True", "rloo:samples=46,live=1", "gumbel-softmax"."""
    rates: tuple[float, ...] = (3e-4,)
    """Adam's learning rates."""
    seeds: tuple[int, ...] = (0,)
    """One replica for each seed and rate."""
    epochs: int = 1000
    """Passes over the training images."""
    images: int = 55_000
    """Train on the first so many of the 55,000."""
    batch: int = 200
    """Images a step."""
    variables: int = 20
    """K, in each layer."""
    categories: int = 10
    """C."""
    dropouts: tuple[float, ...] = (0.0,)
    """Dropout rates of the hidden layers."""
    input_dropout: float = 0.0
    """Dropout rate of the encoder's input."""
    averaging: float = 0.0
    """Decay of a moving average of the weights, which is then what is evaluated; 0 for none."""
    schedule: Schedule = "constant"
    """The learning rate along the run."""
    precision: Literal["tf32", "bf16"] = "tf32"
    """Of f where it is evaluated at pseudo samples, on a GPU; all else is tf32."""
    measure_every: int = 10
    """Epochs between measurements and checkpoints."""
    data: Path | None = None
    """A folder with MNIST's original files, instead of the images that ship with the package."""
    sampled_pixels: bool = False
    """Binarize by drawing each pixel once, with its grey value as the probability; needs --data."""
    device: str = "auto"
    """cpu, cuda, or cuda where there is one."""
    root: Path = Path("runs")
    """Where the run folders go."""
    name: str = ""
    """Put in front of the run folders' names."""
    resume: bool = False
    """Go on from the last checkpoint where there is one."""

    experiment: ClassVar[str]
    """Its folder under the root."""
    figures: ClassVar[tuple[str, ...]] = ("train", "validation", "test", "best_test")
    """The metrics to print at the end."""

    @abstractmethod
    def model(self, *, dense: bool = False) -> Model:
        """A model with fresh parameters; `dense`, with the static shapes that a GPU and vmap need."""

    def begin(self, images: Tensor) -> Model:
        """A model as it is before it has trained on images [N, 784]."""
        return self.model()

    @abstractmethod
    def measure(self, engine: Engine, weights: Tensor, data: Mnist, step: int) -> dict[str, Tensor]:
        """Metrics of weights [R, P] along the run, [R] each; `validation`, the lower the better, among them."""

    @abstractmethod
    def final_metrics(self, engine: Engine, weights: Tensor, data: Mnist, step: int) -> dict[str, Tensor]:
        """Metrics of the weights that were best on the validation images, [R] each."""

    @abstractmethod
    def pictures(self, engine: Engine, weights: Tensor, data: Mnist, step: int) -> Tensor:
        """A sheet of images of the best weights: [R, rows, columns, 784] in 0..1."""

    def check(self) -> None:
        """Refuse what cannot run, before anything does."""
        arsm.estimator(self.estimator)
        check_name(self.name)
        check_least(self, epochs=1, batch=1, variables=1, categories=2, measure_every=1)
        for field in ("rates", "seeds", "dropouts"):
            if len(set(getattr(self, field))) != len(getattr(self, field)) or not getattr(self, field):
                raise ValueError(f"--{field} must be one or more different numbers, but is {getattr(self, field)}.")
        check_positive(rates=self.rates)
        if not all(0 <= p < 1 for p in (*self.dropouts, self.input_dropout, self.averaging)):
            raise ValueError("--dropouts, --input-dropout and --averaging must lie in [0, 1).")
        check_least(self, images=self.batch)
        if self.images > (most := TRAINING - VALIDATION):
            raise ValueError(f"--images must be at most the {most:,} that are trained on, but is {self.images}.")
        if self.batch % (processes := int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(f"--batch must be a multiple of the {processes} processes, but is {self.batch}.")
        # some are for one variable alone
        check_asks(self.estimator, torch.zeros(2, self.paths * self.variables, self.categories))
        if self.data is not None and not self.data.is_dir():
            raise ValueError(f"--data must be a folder with MNIST's original files, but there is none at {self.data}.")
        if self.sampled_pixels and self.data is None:
            raise ValueError("--sampled-pixels needs grey values; name a folder with MNIST's original files by --data.")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"--device {self.device} needs a GPU, but torch finds none; leave the option out.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"--device must be cpu, cuda or auto, but is {self.device}.")

    def check_draws(self, field: str) -> None:
        """Refuse a number of samples that `multi_sample_bound` cannot draw in blocks."""
        if (samples := getattr(self, field)) > BLOCK_DRAWS and samples % BLOCK_DRAWS:
            raise ValueError(
                f"--{field.replace('_', '-')} must be a multiple of {BLOCK_DRAWS} if more, but is {samples}."
            )

    def run(self, console: Console) -> None:
        """Train, with a progress bar, then print the last measurement of every seed."""
        from arsm_experiments.progress import progress_bars

        with progress_bars(console) as progress:
            task = progress.add_task(self.estimator, total=self.epochs)
            folders = train(self, on_epoch=lambda epoch: progress.update(task, completed=epoch))
        for folder in folders:
            record = read_run(folder)
            for key in self.figures:
                if values := record.series(key)[1]:
                    console.print(f"{folder.name}: {key} " + ", ".join(f"{seed[-1]:.2f}" for seed in values))

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders that it makes, each with what decides its results."""
        pairs = itertools.product(self.rates, self.dropouts)
        return {self.root / self.experiment / self.folder_name(*pair): self.config(*pair) for pair in pairs}

    def config(self, rate: float, dropout: float) -> dict[str, Any]:
        """What decides the results of one run folder."""
        everything = dataclasses.asdict(self)
        apart = ("rates", "dropouts", "data", "device", "root", "name", "resume")
        return {"rate": rate, "dropout": dropout, **{k: v for k, v in everything.items() if k not in apart}}

    @property
    def kind(self) -> str:
        """What run folders' names begin with, after `name`; may be empty."""
        return ""

    @property
    def paths(self) -> int:
        """How many samples of all variables f sees side by side, as one sample of so many times the variables."""
        return 1

    def folder_name(self, rate: float, dropout: float) -> str:
        """E.g. arsm-rate0.0003, then the first seed if it is not 0."""
        words = plain_name(self.estimator)
        dropped = f"dropout{dropout:g}" if dropout else ""
        seed = f"seed-{self.seeds[0]}" if self.seeds[0] else ""
        return "-".join(filter(None, (self.name, self.kind, words, f"rate{rate:g}", dropped, seed)))


# ---------------------------------------------------------------- the loop


@dataclass
class Group:
    """The replicas of one run folder."""

    run: Run | None
    """None in all processes but the first."""
    rate: float
    dropout: float
    epoch: int
    state: dict[str, Any] | None


def train(config: Training, on_epoch: Callable[[int], object] = lambda epoch: None) -> list[Path]:
    """Train all replicas to the end, from their checkpoints where there are any; returns the run folders.

    A checkpoint holds the last weights and, as `best`, each replica's best on the validation images.
    """
    config.check()
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = best if config.device == "auto" else config.device
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(process_group(torch.device(device)))
        train_images, validation, test = (
            part.to(place) for part in load_mnist(folder=config.data, sampled=config.sampled_pixels)
        )
        data = Mnist(train_images[: config.images], validation, test)
        steps_per_epoch = len(data.train) // config.batch
        groups = []
        for folder, own in config.runs().items():
            run = None
            if not dist.is_initialized() or dist.get_rank() == 0:
                options = {"resume": config.resume, "device": place}
                run = stack.enter_context(open_run(config.root, config.experiment, folder.name, own, **options))
            step, state = share_checkpoint(run)
            groups.append(Group(run, own["rate"], own["dropout"], step // steps_per_epoch, state))
        # a process killed between two checkpoints leaves folders at different epochs: the last ones catch up first
        while unfinished := [group for group in groups if group.epoch < config.epochs]:
            start = min(group.epoch for group in unfinished)
            until = min([group.epoch for group in unfinished if group.epoch > start], default=config.epochs)
            train_together(config, [g for g in unfinished if g.epoch == start], until, data, on_epoch)
    return list(config.runs())


def train_together(
    config: Training, groups: list[Group], until: int, data: Mnist, on_epoch: Callable[[int], object]
) -> None:
    """Train the replicas of these groups, all at one epoch, as one stack."""
    device = data.train.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        if groups[0].epoch == 0:  # stacked replicas draw from the device's own generator, which a checkpoint restores
            rank = dist.get_rank() if dist.is_initialized() else 0
            words = f"device {config.seeds} {config.rates} {config.dropouts} {rank}"
            torch.cuda.manual_seed(seed_of(words))
    replicas = [(group, seed) for group in groups for seed in config.seeds]
    count = len(config.seeds)
    rows = [slice(i * count, (i + 1) * count) for i in range(len(groups))]
    module = config.model(dense=on_gpu).to(device)
    # what cannot be stacked takes turns on a GPU too, inside the same CUDA graph
    stacked = on_gpu and module.estimator.vmappable
    settings = {
        "rate": torch.tensor([group.rate for group, _ in replicas]),
        "dropout": torch.tensor([group.dropout for group, _ in replicas]),
        "input_dropout": torch.full((len(replicas),), config.input_dropout),
    }
    steps_per_epoch = len(data.train) // config.batch
    engine = Engine(
        module,
        type(module).encode,
        module.losses,
        initial_parameters(config, data.train).repeat(len(groups), 1),
        data.train,
        settings,
        [seed for _, seed in replicas],
        batch=config.batch,
        watched=module.encoder_size,
        schedule=config.schedule,
        total_steps=config.epochs * steps_per_epoch,
        averaging=config.averaging,
        stacked=stacked,
        compiled=stacked or (on_gpu and compiles_slopes()),
        steps_per_replay=math.gcd(steps_per_epoch, STEPS_PER_REPLAY) if on_gpu and not dist.is_initialized() else 0,
    )
    best = engine.weights.clone()
    best_validation = torch.full((len(replicas),), torch.inf, device=device)
    for group, own in zip(groups, rows, strict=True):
        if group.state is not None:
            engine.load_state_dict(own, group.state)
            best[own].copy_(group.state["best"])
            best_validation[own].copy_(group.state["best_validation"])

    def checkpoint(own: slice) -> dict[str, Any]:
        return engine.state_dict(own) | {"best": best[own].clone(), "best_validation": best_validation[own].clone()}

    for epoch in range(groups[0].epoch + 1, until + 1):
        try:
            metrics = engine.epoch()
        except NotFiniteError as error:
            raise not_finite_in(epoch) from error
        for group in groups:
            group.epoch = epoch
        if epoch % config.measure_every == 0 or epoch == config.epochs:
            step = epoch * steps_per_epoch
            metrics = metrics | config.measure(engine, engine.weights, data, step)
            improved = metrics["validation"] < best_validation
            best_validation = torch.where(improved, metrics["validation"], best_validation)
            best = torch.where(improved.unsqueeze(-1), engine.weights, best)
            if epoch == config.epochs:
                metrics = metrics | config.final_metrics(engine, best, data, step)
                save_pictures(config.pictures(engine, best, data, step), config, groups)
            check_finite(metrics.pop("not_finite"), epoch)
            for group, own in zip(groups, rows, strict=True):
                if group.run is not None:
                    log(group.run, step, epoch, config, {name: value[own].tolist() for name, value in metrics.items()})
                    group.run.save(step, checkpoint(own))
        on_epoch(epoch)
    for group, own in zip(groups, rows, strict=True):
        group.state = checkpoint(own)


def initial_parameters(config: Training, images: Tensor) -> Tensor:
    """[seeds, P]: each seed's own, before it has trained on images [N, 784]."""
    rows = []
    for seed in config.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rows.append(pack(config.begin(images)))
    return torch.stack(rows)


def probes(config: Training, engine: Engine, step: int) -> list[torch.Generator]:
    """A generator for every replica, so that measuring changes no update."""
    seeds = config.seeds * (engine.parameters.shape[0] // len(config.seeds))
    return [torch.Generator(engine.device).manual_seed(seed * 1_000_003 + step) for seed in seeds]


def run_on(engine: Engine, task: Task, weights: Tensor, images: Tensor, generators: list[torch.Generator]) -> Any:
    """A task of every replica on the same images [N, 784]."""
    return engine.run(task, weights, images.float().expand(weights.shape[0], -1, -1), generators=generators)


def multi_sample_bound(
    engine: Engine, task: Task, weights: Tensor, images: Tensor, samples: int, generators: list[torch.Generator]
) -> Tensor:
    """-E[ln 1/S sum_s w_s] over the images, in pieces of bounded memory: [R].

    `task(x, generator, draws=n)` gives ln 1/n sum_s w_s of n fresh draws: [N, 784] -> [N].
    """
    draws = min(samples, BLOCK_DRAWS)
    block, blocks = partial(task, draws=draws), samples // draws
    total = torch.zeros(weights.shape[0], device=weights.device)
    for x in images.split(max(1, BLOCK_ROWS[weights.device.type] // draws)):
        log_means = [run_on(engine, block, weights, x, generators) for _ in range(blocks)]
        log_mean = torch.stack(log_means).logsumexp(0) - math.log(blocks)
        total -= torch.stack([row.sum() for row in log_mean])
    return total / len(images)


def check_finite(not_finite: Tensor, epoch: int) -> None:
    """The flag that a step keeps on the device, read once a measurement."""
    if bool((not_finite > 0).any()):
        raise not_finite_in(epoch)


def not_finite_in(epoch: int) -> FloatingPointError:
    """What to raise, with what to do."""
    return FloatingPointError(f"Logits or values of f were not finite in epoch {epoch}; try a smaller learning rate.")


def log(run: Run, step: int, epoch: int, config: Training, metrics: dict[str, list[float]]) -> None:
    """One line a seed: metrics hold a list over the seeds each."""
    for i, seed in enumerate(config.seeds):
        run.log(step, {"epoch": epoch, **{name: values[i] for name, values in metrics.items()}}, seed)


def save_pictures(sheets: Tensor, config: Training, groups: list[Group]) -> None:
    """A file a seed in each group's folder: sheets [R, rows, columns, 784] in 0..1."""
    names = [(group, seed) for group in groups for seed in config.seeds]
    for (group, seed), sheet in zip(names, sheets, strict=True):
        if group.run is not None:
            grid = sheet.unflatten(-1, (28, 28)).movedim(1, 2).flatten(2).flatten(0, 1)
            (group.run.folder / f"pictures-seed{seed}.png").write_bytes(png((grid * 255).round().byte().cpu()))


def png(grey: Tensor) -> bytes:
    """uint8 [height, width] as a PNG file."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = grey.shape
    lines = F.pad(grey, (1, 0)).numpy().tobytes()  # every line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


# ---------------------------------------------------------------- several processes


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Join the other processes where torchrun started several; this process's own device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def share_checkpoint(run: Run | None) -> tuple[int, dict[str, Any] | None]:
    """The first process's checkpoint, in all processes."""
    found: list[Any] = [run.step, run.state] if run is not None else [0, None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0], found[1]
