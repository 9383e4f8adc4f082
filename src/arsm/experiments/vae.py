r"""The categorical variational autoencoder on binarized MNIST.

    maximise E_q[ln p(x, z) - ln q(z | x)],    z = K variables of C categories a layer
    one layer     p(x | z) p(z),                  q(z | x)
    two layers    p(x | z1) p(z1 | z2) p(z2),     q(z1 | x) q(z2 | z1)

with a uniform prior of the last layer. The encoder learns through a gradient estimator, the decoder by autograd.
Reference: Yin, Yue and Zhou, ARSM, ICML 2019, section 5.2; what the paper leaves open follows its authors' code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm.diagnostics import pseudo_action_share
from arsm.experiments.data import PIXELS, Mnist, load_mnist
from arsm.experiments.engine import Engine, Schedule, pack
from arsm.experiments.record import Run, open_run
from arsm.layers import estimate_layers
from arsm.noise import argmin_sample, dirichlet

if TYPE_CHECKING:
    from rich.console import Console

SLOPE = 0.2
EVALUATION_ROWS = 1000
DIAGNOSTIC_IMAGES = 200
BOUND_DRAWS = 100
BOUND_ROWS = {"cpu": 1_000, "cuda": 10_000}
PICTURES = 10


@dataclass(frozen=True)
class Vae:
    """Train a categorical VAE on binarized MNIST, all seeds and rates of one estimator together.

    Writes one run folder for every learning rate and dropout rate, holding all seeds. Run it under torchrun to share
    each batch among several processes.
    """

    estimator: str = "arsm"
    """In words, e.g. "arsm", "arsm:pooled=True", "rloo:samples=46,live=1", "gumbel-softmax"."""
    layers: Literal[1, 2] = 1
    """Stochastic layers."""
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
    hidden: tuple[int, ...] = (512, 256)
    """Widths of the encoder; the decoder has them in reverse."""
    first_logit_fixed: bool = True
    """Fix the first logit of every variable at 0, as the authors' code does; otherwise all C are learned."""
    independent_decoder_sample: bool = True
    """Train the decoder on a sample of its own, as the authors' code does; otherwise on the true sample."""
    kl: Literal["sampled", "analytic"] = "sampled"
    """ln q(z1 | x) inside f, as the authors' code has it, or its expectation outside f with its exact gradient.
    ln q(z2 | z1) is always inside."""
    dropouts: tuple[float, ...] = (0.0,)
    """Dropout rates after each hidden layer of the encoder."""
    input_dropout: float = 0.0
    """Dropout rate of the encoder's input."""
    averaging: float = 0.0
    """Decay of a moving average of the weights, which is then what is evaluated; 0 for none."""
    schedule: Schedule = "constant"
    """The learning rate along the run."""
    precision: Literal["tf32", "bf16"] = "tf32"
    """Of the decoder where it evaluates f at pseudo samples, on a GPU; all else is tf32."""
    measure_every: int = 10
    """Epochs between measurements and checkpoints."""
    bound_samples: int = 1000
    """Samples of the importance-weighted bound at the end, a multiple of 100 if more; 0 for none."""
    data: Path | None = None
    """A folder with MNIST's original files, instead of the images that ship with the package."""
    device: str = "auto"
    """cpu, cuda, or cuda where there is one."""
    root: Path = Path("runs")
    """Where the run folders go."""
    name: str = ""
    """Put in front of the run folders' names."""
    resume: bool = False
    """Go on from the last checkpoint where there is one."""

    def check(self) -> None:
        """Refuse what cannot run, before anything does."""
        arsm.estimator(self.estimator)
        for field in ("epochs", "batch", "variables", "categories", "measure_every"):
            if getattr(self, field) < (least := 2 if field == "categories" else 1):
                raise ValueError(
                    f"--{field.replace('_', '-')} must be at least {least}, but is {getattr(self, field)}."
                )
        for field in ("rates", "seeds", "dropouts"):
            if len(set(getattr(self, field))) != len(getattr(self, field)) or not getattr(self, field):
                raise ValueError(f"--{field} must be one or more different numbers, but is {getattr(self, field)}.")
        if self.bound_samples > BOUND_DRAWS and self.bound_samples % BOUND_DRAWS:
            raise ValueError(f"--bound-samples must be a multiple of {BOUND_DRAWS}, but is {self.bound_samples}.")
        if min(self.rates) <= 0:
            raise ValueError(f"--rates must be positive, but is {self.rates}.")
        if not all(0 <= p < 1 for p in (*self.dropouts, self.input_dropout, self.averaging)):
            raise ValueError("--dropouts, --input-dropout and --averaging must lie in [0, 1).")

    def run(self, console: Console) -> None:
        """Train, with a progress bar, then print the last measurement of every seed."""
        from arsm.experiments.progress import progress_bars
        from arsm.experiments.record import read_run

        with progress_bars(console) as progress:
            task = progress.add_task(self.estimator, total=self.epochs)
            folders = train(self, on_epoch=lambda epoch: progress.update(task, completed=epoch))
        for folder in folders:
            for key in ("train", "validation", "test", "best_test", "bound"):
                steps, values = read_run(folder).series(key)
                if steps:
                    console.print(f"{folder.name}: {key} " + ", ".join(f"{seed[-1]:.2f}" for seed in values))

    def config(self, rate: float, dropout: float) -> dict[str, Any]:
        """What decides the results of one run folder."""
        everything = dataclasses.asdict(self)
        apart = ("rates", "dropouts", "data", "device", "root", "name", "resume")
        return {"rate": rate, "dropout": dropout, **{k: v for k, v in everything.items() if k not in apart}}

    def folder_name(self, rate: float, dropout: float) -> str:
        """E.g. 1layer-arsm-rate0.0003."""
        words = self.estimator.translate(str.maketrans({":": "-", ",": "-", "*": "x", " ": "", "/": "-"}))
        dropped = f"dropout{dropout:g}" if dropout else ""
        return "-".join(filter(None, (self.name, f"{self.layers}layer", words, f"rate{rate:g}", dropped)))


# ---------------------------------------------------------------- the model


class VAE(nn.Module):
    """Encoder and decoder of one replica. `forward(task, ...)` runs one of the methods below.

    Log q is the normalised logits of every layer, [N, K, C].
    """

    def __init__(self, config: Vae, *, stacked: bool = False) -> None:
        super().__init__()
        self.config, self.stacked = config, stacked
        self.estimator = arsm.estimator(config.estimator)
        k, c = config.variables, config.categories
        free = k * (c - 1) if config.first_logit_fixed else k * c
        self.encoder = perceptron(PIXELS, *config.hidden, free)
        self.lower_encoder = nn.ModuleList([nn.Linear(k * c, free)] if config.layers == 2 else [])
        self.decoder = perceptron(k * c, *reversed(config.hidden), PIXELS)
        self.lower_decoder = nn.ModuleList([nn.Linear(k * c, k * c)] if config.layers == 2 else [])
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        self.learned = nn.ModuleList(arsm.learned_parts(self.estimator))
        if self.learned:  # they learn their sizes from their first logits
            arsm.estimate(self.estimator, torch.zeros(1, k, c), lambda z: z.flatten(1).float().sum(-1))

    @property
    def encoder_size(self) -> int:
        """How many parameters the encoder has; they are the module's first."""
        return sum(p.numel() for part in (self.encoder, self.lower_encoder) for p in part.parameters())

    def forward(self, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return task(self, *args, **options)

    def encode(
        self, x: Tensor, settings: Mapping[str, Tensor] | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """ln q(z1 | x), with dropout where settings are given: [N, 784] -> [N, K, C]."""
        h = x
        if settings is not None and self.config.input_dropout:
            h = dropout(h, settings["input_dropout"], generator)
        for layer in self.encoder[:-1]:
            h = F.leaky_relu(layer(h), SLOPE)
            if settings is not None and any(self.config.dropouts):
                h = dropout(h, settings["dropout"], generator)
        return self.normalise(self.encoder[-1](h))

    def encode_lower(self, z1: Tensor) -> Tensor:
        """ln q(z2 | z1): [N, K] -> [N, K, C]."""
        return self.normalise(self.lower_encoder[0](self.one_hot(z1)))

    def normalise(self, logits: Tensor) -> Tensor:
        logits = logits.unflatten(-1, (self.config.variables, -1))
        if self.config.first_logit_fixed:
            logits = F.pad(logits, (1, 0))
        return logits.log_softmax(-1)

    def one_hot(self, z: Tensor) -> Tensor:
        return arsm.one_hot(z, self.config.categories).flatten(1)

    def log_joint(self, zs: list[Tensor], x: Tensor, *, frozen: bool = False, bf16: bool = False) -> Tensor:
        """ln p(x, z): [N]; frozen, the decoder's parameters get no gradient."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            h = self.one_hot(zs[0])
            for layer in self.decoder[:-1]:
                h = F.leaky_relu(linear(layer, h, frozen), SLOPE)
            pixels = linear(self.decoder[-1], h, frozen)
        log_p = bernoulli(pixels, x)
        if self.config.layers == 2:
            logits = linear(self.lower_decoder[0], self.one_hot(zs[1]), frozen)
            log_p = log_p + log_q(logits.unflatten(-1, (self.config.variables, -1)).log_softmax(-1), zs[0])
        return log_p - self.config.variables * math.log(self.config.categories)

    def sample(self, log_q1: Tensor, generator: torch.Generator | None) -> tuple[list[Tensor], list[Tensor]]:
        """A path through q and its log q: [N, K] and [N, K, C] a layer."""
        zs, logits = [draw(log_q1, generator)], [log_q1]
        if self.config.layers == 2:
            logits.append(self.encode_lower(zs[0]))
            zs.append(draw(logits[1], generator))
        return zs, logits

    # ------------------------------------------------------------ tasks

    def loss(
        self, x: Tensor, settings: Mapping[str, Tensor], generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The training loss of a batch [N, 784], and what to log of it."""
        config = self.config
        sampled = config.kl == "sampled"
        log_q1 = self.encode(x, settings, generator)

        def elbo(zs: list[Tensor], logits: list[Tensor], x: Tensor) -> Tensor:
            inside = list(zip(logits, zs, strict=True))[0 if sampled else 1 :]
            bf16 = config.precision == "bf16" and x.is_cuda and not torch.is_grad_enabled()
            log_p = self.log_joint(zs, x, frozen=config.independent_decoder_sample, bf16=bf16)
            return log_p - sum(log_q(phi, z) for phi, z in inside)

        layers = [lambda zs, x: log_q1, lambda zs, x: self.encode_lower(zs[0])][: config.layers]
        out = estimate_layers(
            self.estimator,
            layers,
            elbo,
            x,
            generator=generator,
            evaluation="dense" if self.stacked else "packed",
            max_rows=None if self.stacked else 1024,
        )
        value = out.value if sampled else out.value + arsm.entropy(log_q1).sum(-1)
        objective = value
        if config.independent_decoder_sample:
            zs, _ = self.sample(log_q1, generator)
            log_p = self.log_joint(zs, x)
            objective = objective + log_p - log_p.detach()
        loss = -objective.mean()
        for layer in out.layers:
            if layer.estimator_loss is not None:
                loss = loss + layer.estimator_loss
        # a true sample above another layer is evaluated as that layer's
        below = sum(layer.value.shape[0] for layer in out.layers[1:])
        distinct = torch.stack([layer.info["distinct"].sum() for layer in out.layers]).sum()
        finite = torch.stack([layer.info["finite"] for layer in out.layers]).all()
        return loss, {
            "train": -value.detach().mean(),
            "evaluations": (distinct - below) / x.shape[0],
            "not_finite": 1 - finite.float(),
        }

    def negative_elbo(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The sum of -ELBO over images, from one sample each: [N, 784] -> []."""
        return -self.log_weight(x, generator).sum()

    def log_weight(self, x: Tensor, generator: torch.Generator | None = None, draws: int = 1) -> Tensor:
        """ln p(x, z) - ln q(z | x), z without dropout: [N, 784] -> [N draws], the draws of an image together."""
        log_q1, x = (each.repeat_interleave(draws, 0) for each in (self.encode(x), x))
        zs, logits = self.sample(log_q1, generator)
        log_weight = self.log_joint(zs, x)
        for phi, z in zip(logits, zs, strict=True):
            log_weight = log_weight - log_q(phi, z)
        return log_weight

    def log_mean_weight(self, x: Tensor, generator: torch.Generator | None = None, *, draws: int) -> Tensor:
        """ln 1/S sum_s p(x, z_s) / q(z_s | x) of S draws: [N, 784] -> [N]."""
        log_weights = self.log_weight(x, generator, draws).unflatten(0, (-1, draws))
        return log_weights.logsumexp(-1) - math.log(draws)

    def diagnostics(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Entropy of q(z1 | x) in nats and share of distinct pseudo actions, over images and variables: [] each."""
        logits = self.encode(x)
        share = pseudo_action_share(logits, dirichlet(logits, generator))
        return {"entropy": arsm.entropy(logits).mean(), "pseudo_action_share": share.mean()}

    def pictures(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images, their reconstructions, and samples of the prior: [N, 784] -> [3, N, 784] in 0..1."""
        log_q1 = self.encode(x)
        zs, _ = self.sample(log_q1, generator)
        z = draw(torch.zeros_like(log_q1), generator)
        if self.config.layers == 2:
            logits = linear(self.lower_decoder[0], self.one_hot(z), True)
            z = draw(logits.unflatten(-1, (self.config.variables, -1)), generator)
        means = []
        for sample in (zs[0], z):
            h = self.one_hot(sample)
            for layer in self.decoder[:-1]:
                h = F.leaky_relu(layer(h), SLOPE)
            means.append(self.decoder[-1](h).sigmoid())
        return torch.stack([x, *means])


def perceptron(*sizes: int) -> nn.ModuleList:
    """Linear layers between these widths."""
    return nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def linear(layer: nn.Module, h: Tensor, frozen: bool) -> Tensor:
    """A linear layer, whose parameters get no gradient if frozen."""
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight, layer.bias
    return F.linear(h, weight.detach(), bias.detach()) if frozen else F.linear(h, weight, bias)


def dropout(h: Tensor, rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Each element is kept with probability 1 - rate and scaled up; the rate is a tensor, a replica's own."""
    kept = torch.rand(h.shape, generator=generator, device=h.device) >= rate
    return h * kept / (1 - rate)


def bernoulli(logits: Tensor, x: Tensor) -> Tensor:
    """ln p(x) = sum_d x_d l_d - ln(1 + e^{l_d}): [N, D] -> [N]."""
    logits = logits.float()
    if torch.compiler.is_compiling():
        # the kernel that this becomes is bound by its arithmetic, and log1p is several times slower than log
        softplus = logits.relu() + (1 + (-logits.abs()).exp()).log()
    else:
        softplus = F.softplus(logits)
    return (x * logits - softplus).sum(-1)


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """z ~ Cat(softmax(logits)): [N, K, C] -> [N, K]."""
    return argmin_sample(logits, dirichlet(logits, generator))


def log_q(logits: Tensor, z: Tensor) -> Tensor:
    """ln q(z) from normalised logits [N, K, C]: [N]."""
    return arsm.log_prob(logits, z).sum(-1)


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


def train(config: Vae, device: str | None = None, on_epoch: Callable[[int], object] = lambda epoch: None) -> list[Path]:
    """Train all replicas to the end, from their checkpoints where there are any; returns the run folders.

    A checkpoint holds the last weights and, as `best`, each replica's best on the validation images.
    """
    config.check()
    device = device or config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(process_group(torch.device(device)))
        train_images, validation, test = (part.to(place) for part in load_mnist(folder=config.data))
        data = Mnist(train_images[: config.images], validation, test)
        steps_per_epoch = len(data.train) // config.batch
        groups, folders = [], []
        for rate, dropout_rate in itertools.product(config.rates, config.dropouts):
            name = config.folder_name(rate, dropout_rate)
            folders.append(config.root / "vae" / name)
            run = None
            if not dist.is_initialized() or dist.get_rank() == 0:
                options = {"resume": config.resume, "device": place}
                run = stack.enter_context(
                    open_run(config.root, "vae", name, config.config(rate, dropout_rate), **options)
                )
            step, state = share_checkpoint(run)
            groups.append(Group(run, rate, dropout_rate, step // steps_per_epoch, state))
        # a process killed between two checkpoints leaves folders at different epochs: the last ones catch up first
        while unfinished := [group for group in groups if group.epoch < config.epochs]:
            start = min(group.epoch for group in unfinished)
            until = min([group.epoch for group in unfinished if group.epoch > start], default=config.epochs)
            train_together(config, [g for g in unfinished if g.epoch == start], until, data, on_epoch)
    return folders


def train_together(
    config: Vae, groups: list[Group], until: int, data: Mnist, on_epoch: Callable[[int], object]
) -> None:
    """Train the replicas of these groups, all at one epoch, as one stack."""
    device = data.train.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    replicas = [(group, seed) for group in groups for seed in config.seeds]
    count = len(config.seeds)
    rows = [slice(i * count, (i + 1) * count) for i in range(len(groups))]
    module = VAE(config, stacked=on_gpu).to(device)
    settings = {
        "rate": torch.tensor([group.rate for group, _ in replicas]),
        "dropout": torch.tensor([group.dropout for group, _ in replicas]),
        "input_dropout": torch.full((len(replicas),), config.input_dropout),
    }
    steps_per_epoch = len(data.train) // config.batch
    engine = Engine(
        module,
        VAE.loss,
        initial_parameters(config).repeat(len(groups), 1),
        data.train,
        settings,
        [seed for _, seed in replicas],
        batch=config.batch,
        watched=module.encoder_size,
        schedule=config.schedule,
        total_steps=config.epochs * steps_per_epoch,
        averaging=config.averaging,
        stacked=on_gpu,
        compiled=on_gpu,
        steps_per_replay=int(on_gpu and not dist.is_initialized()),
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
        metrics = engine.epoch()
        for group in groups:
            group.epoch = epoch
        if epoch % config.measure_every == 0 or epoch == config.epochs:
            step = epoch * steps_per_epoch
            metrics = metrics | measure(engine, engine.weights, data, config, step)
            improved = metrics["validation"] < best_validation
            best_validation = torch.where(improved, metrics["validation"], best_validation)
            best = torch.where(improved.unsqueeze(-1), engine.weights, best)
            if epoch == config.epochs:
                metrics = metrics | final_metrics(engine, best, data, config, step)
                save_pictures(engine, best, data, config, groups, step)
            check_finite(metrics.pop("not_finite"), epoch)
            for group, own in zip(groups, rows, strict=True):
                if group.run is not None:
                    log(group.run, step, epoch, config, {name: value[own].tolist() for name, value in metrics.items()})
                    group.run.save(step, checkpoint(own))
        on_epoch(epoch)
    for group, own in zip(groups, rows, strict=True):
        group.state = checkpoint(own)


def initial_parameters(config: Vae) -> Tensor:
    """[seeds, P]: Glorot-uniform weights and zero biases."""
    rows = []
    for seed in config.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rows.append(pack(VAE(config)))
    return torch.stack(rows)


def probes(config: Vae, engine: Engine, step: int) -> list[torch.Generator]:
    """A generator for every replica, so that measuring changes no update."""
    seeds = config.seeds * (engine.parameters.shape[0] // len(config.seeds))
    return [torch.Generator(engine.device).manual_seed(seed * 1_000_003 + step) for seed in seeds]


def measure(engine: Engine, weights: Tensor, data: Mnist, config: Vae, step: int) -> dict[str, Tensor]:
    """Validation and test -ELBO from one sample an image, the gradient's variance and the state of q: [R] each."""
    generators = probes(config, engine, step)
    replicas = weights.shape[0]
    found = {}
    for part in ("validation", "test"):
        images = getattr(data, part)
        found[part] = torch.zeros(replicas, device=weights.device)
        for x in images.float().split(EVALUATION_ROWS):
            rows = x.expand(replicas, -1, -1)
            found[part] += engine.run(VAE.negative_elbo, weights, rows, generators=generators) / len(images)
    x = data.validation[:DIAGNOSTIC_IMAGES].float().expand(replicas, -1, -1)
    found |= engine.run(VAE.diagnostics, weights, x, generators=generators)
    found["gradient_variance"] = engine.gradient_variance()
    return found


def final_metrics(engine: Engine, weights: Tensor, data: Mnist, config: Vae, step: int) -> dict[str, Tensor]:
    """Of the weights that were best on the validation images: test -ELBO, and the bound -ln 1/S sum_s w_s on them."""
    found = {"best_test": measure(engine, weights, data, config, step)["test"]}
    if config.bound_samples:
        found["bound"] = importance_bound(engine, weights, data.test, config, step)
    return found


def importance_bound(engine: Engine, weights: Tensor, images: Tensor, config: Vae, step: int) -> Tensor:
    """-E[ln 1/S sum_s p(x, z_s) / q(z_s | x)] over the images, in pieces of bounded memory: [R]."""
    generators = probes(config, engine, step)
    draws = min(config.bound_samples, BOUND_DRAWS)
    task, blocks = partial(VAE.log_mean_weight, draws=draws), config.bound_samples // draws
    total = torch.zeros(weights.shape[0], device=weights.device)
    for x in images.split(max(1, BOUND_ROWS[weights.device.type] // draws)):
        rows = x.float().expand(weights.shape[0], -1, -1)
        log_means = [engine.run(task, weights, rows, generators=generators) for _ in range(blocks)]
        log_mean = torch.stack(log_means).logsumexp(0) - math.log(blocks)
        total -= torch.stack([row.sum() for row in log_mean])
    return total / len(images)


def check_finite(not_finite: Tensor, epoch: int) -> None:
    """The flag that a step keeps on the device, read once a measurement."""
    if bool((not_finite > 0).any()):
        raise FloatingPointError(
            f"Logits or values of f were not finite in epoch {epoch}; try a smaller learning rate."
        )


def log(run: Run, step: int, epoch: int, config: Vae, metrics: dict[str, list[float]]) -> None:
    """One line a seed: metrics hold a list over the seeds each."""
    for i, seed in enumerate(config.seeds):
        run.log(step, {"epoch": epoch, **{name: values[i] for name, values in metrics.items()}}, seed)


def save_pictures(engine: Engine, weights: Tensor, data: Mnist, config: Vae, groups: list[Group], step: int) -> None:
    """Test images above their reconstructions above samples of the prior, a file a seed."""
    x = data.test[:PICTURES].float().expand(weights.shape[0], -1, -1)
    sheets = engine.run(VAE.pictures, weights, x, generators=probes(config, engine, step))
    names = [(group, seed) for group in groups for seed in config.seeds]
    for (group, seed), sheet in zip(names, sheets, strict=True):
        if group.run is not None:
            grid = sheet.view(3, PICTURES, 28, 28).movedim(1, 2).reshape(3 * 28, PICTURES * 28)
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


if __name__ == "__main__":
    from arsm.experiments.cli import main

    sys.exit(main(["vae", *sys.argv[1:]]))
