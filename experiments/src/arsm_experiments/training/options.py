"""The options that experiments share, and the methods that each must define."""

from __future__ import annotations

import dataclasses
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

import arsm
from arsm_experiments.adam import Schedule
from arsm_experiments.checks import (
    check_asks,
    check_device,
    check_least,
    check_name,
    check_positive,
)
from arsm_experiments.data import TRAINING, VALIDATION, Mnist
from arsm_experiments.model import Model
from arsm_experiments.progress import progress_bars
from arsm_experiments.replicas import Replicas
from arsm_experiments.runs.files import plain_name
from arsm_experiments.training.loop import train
from arsm_experiments.training.measure import BLOCK_DRAWS

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Training(ABC):
    """The options that all experiments share, and the methods that each must define."""

    estimator: str = "arsm"
    """Estimator, such as "arsm", "arsm:pooled=True", "rloo:samples=46,live=1" or
    "gumbel-softmax".
    """
    rates: tuple[float, ...] = (3e-4,)
    """Learning rates of Adam; one run folder each."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; every rate is trained with each of them."""
    epochs: int = 1000
    """Passes over the training images."""
    images: int = 55_000
    """Number of training images."""
    batch: int = 200
    """Images per step."""
    variables: int = 20
    """K, the variables per layer."""
    categories: int = 10
    """C, the categories per variable."""
    dropouts: tuple[float, ...] = (0.0,)
    """Dropout rates of the hidden layers."""
    input_dropout: float = 0.0
    """Dropout rate of the encoder's input."""
    averaging: float = 0.0
    """Decay of a moving average of the weights, used for evaluation; 0 for none."""
    schedule: Schedule = "constant"
    """Schedule of the learning rate."""
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    """Precision of matrix products on a GPU; bf16 applies to f at pseudo samples only, with tf32
    elsewhere.
    """
    measure_every: int = 10
    """Epochs between measurements and checkpoints."""
    data: Path | None = None
    """Folder with MNIST's original files; None for the images that ship with the package."""
    sampled_pixels: bool = False
    """Binarize by drawing each pixel once, with its grey value as the probability."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda if there is one."""
    root: Path = Path("runs")
    """Folder for the run folders, ROOT/EXPERIMENT/NAME."""
    name: str = ""
    """Prefix of the run folders' names."""
    resume: bool = False
    """Continue existing run folders from their last checkpoints."""

    experiment: ClassVar[str]
    """Its folder under the root."""
    settings: ClassVar[tuple[str, ...]] = ("rate", "dropout", "input_dropout")
    """Settings of a run that its replicas get as tensors, so that runs that differ in them can
    train together.
    """
    unlabelled: ClassVar[tuple[str, ...]] = (
        "rate",
        "estimator",
        "seeds",
        "precision",
        "measure_every",
    )
    """Settings that a run's label leaves out."""

    @abstractmethod
    def model(self, *, dense: bool = False) -> Model:
        """A model with fresh parameters; `dense` gives it the static shapes that a GPU and vmap
        need.
        """

    def begin(self, images: Tensor) -> Model:
        """The initial model, for training on images [N, 784]."""
        return self.model()

    @abstractmethod
    def measure(
        self, replicas: Replicas, weights: Tensor, data: Mnist, step: int
    ) -> dict[str, Tensor]:
        """Metrics of weights [R, P] during the run, [R] each; must contain `validation`, where
        lower is better.
        """

    @abstractmethod
    def final_metrics(
        self, replicas: Replicas, weights: Tensor, data: Mnist, step: int
    ) -> dict[str, Tensor]:
        """Metrics of the best weights by validation, [R] each."""

    @abstractmethod
    def pictures(self, replicas: Replicas, weights: Tensor, data: Mnist, step: int) -> Tensor:
        """A sheet of images made with the best weights: [R, rows, columns, 784] in 0..1."""

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        arsm.estimator(self.estimator)
        check_name(self.name)
        check_least(self, epochs=1, batch=1, variables=1, categories=2, measure_every=1)
        for field in ("rates", "seeds", "dropouts"):
            if len(set(getattr(self, field))) != len(getattr(self, field)) or not getattr(
                self, field
            ):
                raise ValueError(
                    f"--{field} must be one or more different numbers, but is "
                    f"{getattr(self, field)}."
                )
        check_positive(rates=self.rates)
        if not all(0 <= p < 1 for p in (*self.dropouts, self.input_dropout, self.averaging)):
            raise ValueError("--dropouts, --input-dropout and --averaging must lie in [0, 1).")
        check_least(self, images=self.batch)
        if self.images > (most := TRAINING - VALIDATION):
            raise ValueError(
                f"--images must be at most {most:,}, the number of training images, but is "
                f"{self.images}."
            )
        if self.batch % (processes := int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(
                f"--batch must be a multiple of the {processes} processes, but is {self.batch}."
            )
        # some estimators only take one variable
        check_asks(self.estimator, torch.zeros(2, self.paths * self.variables, self.categories))
        if self.data is not None and not self.data.is_dir():
            raise ValueError(
                "--data must be a folder with MNIST's original files, but there is none at "
                f"{self.data}."
            )
        check_device(self.device)

    def check_draws(self, field: str) -> None:
        """Refuse a number of samples that `multi_sample_bound` cannot draw in blocks."""
        if (samples := getattr(self, field)) > BLOCK_DRAWS and samples % BLOCK_DRAWS:
            raise ValueError(
                f"--{field.replace('_', '-')} must be a multiple of {BLOCK_DRAWS} if more, but is "
                f"{samples}."
            )

    def run(self, console: Console) -> None:
        """Train, with a progress bar."""
        with progress_bars(console) as progress:
            task = progress.add_task(self.estimator, total=self.epochs)
            train(self, on_epoch=lambda epoch: progress.update(task, completed=epoch))

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders of this command, each with the settings that determine its results."""
        pairs = itertools.product(self.rates, self.dropouts)
        return {
            self.root / self.experiment / self.folder_name(*pair): self.config(*pair)
            for pair in pairs
        }

    def config(self, rate: float, dropout: float) -> dict[str, Any]:
        """The settings that determine the results of one run folder."""
        everything = dataclasses.asdict(self)
        apart = ("rates", "dropouts", "data", "device", "root", "name", "resume")
        return {
            "rate": rate,
            "dropout": dropout,
            **{k: v for k, v in everything.items() if k not in apart},
        }

    @classmethod
    def label(cls, config: Mapping[str, Any]) -> str:
        """A run's estimator, and the settings that differ from the defaults, which are the
        paper's.
        """
        defaults = cls().config(rate=0.0, dropout=0.0)
        changed = [
            key for key in defaults if key not in cls.unlabelled and config[key] != defaults[key]
        ]
        words = [f"{key.replace('_', ' ')} {config[key]}" for key in changed]
        return ", ".join((config["estimator"], *words))

    @property
    def kind(self) -> str:
        """Prefix of run folders' names, after `name`; may be empty."""
        return ""

    @property
    def paths(self) -> int:
        """Number of samples that f sees side by side, as one sample with that many times the
        variables.
        """
        return 1

    def folder_name(self, rate: float, dropout: float) -> str:
        """E.g. arsm-rate0.0003, then the first seed if it is not 0."""
        words = plain_name(self.estimator)
        dropped = f"dropout{dropout:g}" if dropout else ""
        seed = f"seed-{self.seeds[0]}" if self.seeds[0] else ""
        return "-".join(filter(None, (self.name, self.kind, words, f"rate{rate:g}", dropped, seed)))
