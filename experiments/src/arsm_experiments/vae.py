r"""The categorical variational autoencoder on binarized MNIST.

    maximise E_q[ln p(x, z) - ln q(z | x)],    z = K variables of C categories per layer
    one layer     p(x | z) p(z),                  q(z | x)
    two layers    p(x | z1) p(z1 | z2) p(z2),     q(z1 | x) q(z2 | z1)

with a uniform prior on the last layer. The encoder learns through a gradient estimator, the decoder
by autograd. Reference: Yin, Yue and Zhou, ARSM, ICML 2019, section 5.2. Details that the paper
omits follow the authors' code.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm.diagnostics import pseudo_action_share
from arsm.kernels import on_gpu
from arsm.layers import estimate_layers
from arsm.noise import argmin_sample, dirichlet
from arsm_experiments.checks import check_least, check_positive
from arsm_experiments.data import PIXELS, Mnist
from arsm_experiments.decoder import log_weight
from arsm_experiments.learned_temperature import LearnedTemperature
from arsm_experiments.model import Model, learning_loss, seen, weights_and_biases
from arsm_experiments.perceptron import SLOPE, aligned, perceptron
from arsm_experiments.replicas import Replicas, Task
from arsm_experiments.training.measure import (
    DIAGNOSTIC_IMAGES,
    PICTURES,
    multi_sample_bound,
    probes,
    run_on,
)
from arsm_experiments.training.options import Training

FACTORS = 7
EVALUATION_ROWS = 1000
STRAIGHT_THROUGH = "gumbel-softmax:hard=True"


@dataclass(frozen=True)
class Vae(Training):
    """Train a categorical VAE on binarized MNIST, all seeds and rates of one estimator together.

    Writes one run folder per learning rate and dropout rate, with all seeds in it. Run it under
    torchrun to split each batch over several processes.
    """

    layers: Literal[1, 2] = 1
    """Stochastic layers."""
    hidden: tuple[int, ...] = (512, 256)
    """Hidden widths of the encoder; reversed for the decoder."""
    first_logit_fixed: bool = True
    """Fix the first logit of every variable at 0 and learn the others, as the authors' code does.
    If not (--no-first-logit-fixed), learn all C logits.
    """
    independent_decoder_sample: bool = True
    """Train the decoder on a sample of its own, as the authors' code does. If not
    (--no-independent-decoder-sample), train it on the true sample.
    """
    kl: Literal["sampled", "analytic"] = "sampled"
    """sampled: ln q(z1 | x) is inside f, as in the authors' code; analytic: outside f, with its
    exact gradient.
    """
    afresh: bool = False
    """Draw z2 afresh for every pseudo vector of z1, as in the paper's Algorithm 2; otherwise paths
    share noise.
    """
    as_released: bool = False
    """Train as the authors' two-layer script does: the second encoder is not trained, the first
    takes two Adam steps per step, and f contains the entropy of q(z2 | z1) instead of -ln q(z2 |
    z1)."""
    learned_temperature: bool = False
    """Train the temperature of "gumbel-softmax:hard=True" too, starting at 1, as the authors' code
    does.
    """
    dropouts: tuple[float, ...] = (0.0,)
    """Dropout rates after each hidden layer of the encoder."""
    decoder_dropout: float = 0.0
    """Dropout rate after each hidden layer of the decoder, for its own sample only: f has none."""
    weight_decay: float = 0.0
    """Decay of all weights, as in AdamW; biases do not decay."""
    bound_samples: int = 1000
    """Samples of the importance-weighted bound at the end; a multiple of 100 if above 100, 0 for
    none.
    """

    experiment = "vae"
    settings = (*Training.settings, "decoder_dropout", "weight_decay")
    unlabelled = (*Training.unlabelled, "layers", "bound_samples")

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        super().check()
        check_least(self, bound_samples=0, weight_decay=0)
        check_positive(hidden=self.hidden)
        self.check_draws("bound_samples")
        if arsm.estimator(self.estimator).target == "bound":
            raise ValueError(
                f'"{self.estimator}" needs a bound of several samples; use `arsm conditional`.'
            )
        for field in ("afresh", "as_released"):
            if getattr(self, field) and self.layers == 1:
                raise ValueError(f"--{field.replace('_', '-')} needs two layers; add --layers 2.")
        if not 0 <= self.decoder_dropout < 1:
            raise ValueError(
                f"--decoder-dropout must lie in [0, 1), but is {self.decoder_dropout}."
            )
        if self.decoder_dropout and not self.independent_decoder_sample:
            raise ValueError("--decoder-dropout needs the decoder's own sample.")
        if self.learned_temperature and self.estimator.rpartition("*")[2] != STRAIGHT_THROUGH:
            raise ValueError(
                f'--learned-temperature is for "{STRAIGHT_THROUGH}", but the estimator is '
                f'"{self.estimator}".'
            )

    @property
    def kind(self) -> str:
        """E.g. 1layer."""
        return f"{self.layers}layer"

    def folder_name(self, rate: float, dropout: float) -> str:
        """E.g. 1layer-arsm-rate0.0003, then the other settings against overfitting."""
        others = {
            "input": self.input_dropout,
            "decoder": self.decoder_dropout,
            "decay": self.weight_decay,
        }
        words = (f"{word}{value:g}" for word, value in others.items() if value)
        return "-".join((super().folder_name(rate, dropout), *words))

    def model(self, *, dense: bool = False) -> VaeNetwork:
        """Encoder and decoder with fresh parameters."""
        return VaeNetwork(self, dense=dense)

    def make_estimator(self) -> arsm.Estimator:
        """The estimator of every layer."""
        if not self.learned_temperature:
            return arsm.estimator(self.estimator)
        draws = self.estimator.rpartition("*")[0]
        return arsm.Average(LearnedTemperature(), int(draws)) if draws else LearnedTemperature()

    def measure(
        self, replicas: Replicas, weights: Tensor, data: Mnist, step: int
    ) -> dict[str, Tensor]:
        """Validation and test -ELBO from one sample per image, gradient variance and diagnostics of
        q: [R] each.
        """
        generators = probes(self, replicas, step)
        found = {}
        for part in ("validation", "test"):
            images = getattr(data, part)
            found[part] = torch.zeros(weights.shape[0], device=weights.device)
            for x in images.split(EVALUATION_ROWS):
                found[part] += run_on(
                    replicas, VaeNetwork.negative_elbo, weights, x, generators
                ) / len(images)
        found |= run_on(
            replicas,
            VaeNetwork.diagnostics,
            weights,
            data.validation[:DIAGNOSTIC_IMAGES],
            generators,
        )
        found["gradient_variance"] = replicas.gradient_variance()
        return found

    def final_metrics(
        self, replicas: Replicas, weights: Tensor, data: Mnist, step: int
    ) -> dict[str, Tensor]:
        """Test -ELBO, and the importance-weighted bound -ln 1/S sum_s p(x, z_s) / q(z_s | x) on the
        test images.
        """
        found = {"best_test": self.measure(replicas, weights, data, step)["test"]}
        if self.bound_samples:
            task, generators = VaeNetwork.log_mean_weight, probes(self, replicas, step)
            found["bound"] = multi_sample_bound(
                replicas, task, weights, data.test, self.bound_samples, generators
            )
        return found

    def pictures(self, replicas: Replicas, weights: Tensor, data: Mnist, step: int) -> Tensor:
        """Rows of test images, their reconstructions, and samples from the prior: [R, 3, N,
        784].
        """
        generators = probes(self, replicas, step)
        return run_on(replicas, VaeNetwork.pictures, weights, data.test[:PICTURES], generators)


# ---------------------------------------------------------------- the model


class VaeNetwork(Model):
    """Encoder and decoder. ln q is given as normalised logits of each layer, [N, K, C]."""

    def __init__(self, config: Vae, *, dense: bool = False) -> None:
        super().__init__(config.make_estimator(), dense=dense)
        self.config = config
        k, c = config.variables, config.categories
        free = k * (c - 1) if config.first_logit_fixed else k * c
        self.encoder = linear_layers(PIXELS, *config.hidden, free)
        self.lower_encoder = nn.ModuleList([nn.Linear(k * c, free)] if config.layers == 2 else [])
        self.decoder = linear_layers(k * c, *reversed(config.hidden), PIXELS)
        self.lower_decoder = nn.ModuleList([nn.Linear(k * c, k * c)] if config.layers == 2 else [])
        self.initialise(k, c)

    @property
    def encoder_size(self) -> int:
        """Number of encoder parameters; they come first in the module."""
        return sum(
            p.numel() for part in (self.encoder, self.lower_encoder) for p in part.parameters()
        )

    @property
    def bf16(self) -> bool:
        """Whether f is computed in bfloat16 where it needs no gradient: on a GPU alone."""
        return self.config.precision == "bf16" and next(self.parameters()).is_cuda

    @property
    def paces(self) -> Tensor | None:
        """2 for the first encoder if it takes two steps: two equal Adam steps move twice as far as
        one.
        """
        if not self.config.as_released:
            return None
        first = {id(p) for p in self.encoder.parameters()}
        return torch.cat(
            [p.new_full((p.numel(),), 2.0 if id(p) in first else 1.0) for p in self.parameters()]
        )

    def encode(
        self,
        x: Tensor,
        settings: Mapping[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """ln q(z1 | x), with dropout if settings are given: [N, 784] -> [N, K, C]."""
        if (
            self.fused
            and settings is not None
            and not (self.config.input_dropout or any(self.config.dropouts))
        ):
            return self.normalise(perceptron(x, *weights_and_biases(self.encoder)))
        h = x
        if settings is not None and self.config.input_dropout:
            h = dropout(h, settings["input_dropout"], generator)
        for layer in self.encoder[:-1]:
            h = F.leaky_relu(self.linear(layer, h), SLOPE)
            if settings is not None and any(self.config.dropouts):
                h = dropout(h, settings["dropout"], generator)
        return self.normalise(self.linear(self.encoder[-1], h))

    def encode_lower(self, z1: Tensor) -> Tensor:
        """ln q(z2 | z1): [N, K] -> [N, K, C]."""
        return self.normalise(
            self.of_choices(self.lower_encoder[0], z1, frozen=self.config.as_released)
        )

    def normalise(self, logits: Tensor) -> Tensor:
        logits = logits.unflatten(-1, (self.config.variables, -1))
        if self.config.first_logit_fixed:
            logits = F.pad(logits, (1, 0))
        return logits.log_softmax(-1)

    def decode(
        self,
        z1: Tensor,
        settings: Mapping[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
        *,
        frozen: bool = False,
    ) -> Tensor:
        """The logits of the pixels, with dropout if settings are given: [N, K] -> [N, 784]."""
        if self.fused and settings is not None and not (self.config.decoder_dropout or frozen):
            one_hot = arsm.one_hot(z1, self.config.categories).flatten(1)
            return perceptron(one_hot, *weights_and_biases(self.decoder))
        h = self.of_choices(self.decoder[0], z1, frozen=frozen)
        for layer in self.decoder[1:]:
            h = F.leaky_relu(h, SLOPE, inplace=True)
            if settings is not None and self.config.decoder_dropout:
                h = dropout(h, settings["decoder_dropout"], generator)
            h = self.linear(layer, h, frozen=frozen)
        return h

    def decode_upper(self, z2: Tensor, *, frozen: bool = False) -> Tensor:
        """The logits of z1: [N, K] -> [N, K, C]."""
        return self.of_choices(self.lower_decoder[0], z2, frozen=frozen).unflatten(
            -1, (self.config.variables, -1)
        )

    def log_joint(
        self, zs: list[Tensor], x: Tensor, *, frozen: bool = False, bf16: bool = False
    ) -> Tensor:
        """ln p(x, z): [N]. If frozen, the decoder's parameters get no gradient."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            pixels = self.decode(zs[0], frozen=frozen)
        return self.with_prior(bernoulli(pixels, x), zs, frozen=frozen)

    def with_prior(self, log_p: Tensor, zs: list[Tensor], *, frozen: bool) -> Tensor:
        """ln p(x, z) from ln p(x | z): [N]."""
        if self.config.layers == 2:
            log_p = log_p + log_q(self.decode_upper(zs[1], frozen=frozen).log_softmax(-1), zs[0])
        return log_p - self.config.variables * math.log(self.config.categories)

    def sample(
        self, log_q1: Tensor, generator: torch.Generator | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """A sampled path through q and its ln q: [N, K] and [N, K, C] per layer."""
        zs, logits = [draw(log_q1, generator)], [log_q1]
        if self.config.layers == 2:
            logits.append(self.encode_lower(zs[0]))
            zs.append(draw(logits[1], generator))
        return zs, logits

    # ------------------------------------------------------------ tasks

    @property
    def losses(self) -> tuple[Task, ...]:
        """The estimate's loss and, with a separate decoder sample, the decoder's."""
        return (
            (VaeNetwork.loss, VaeNetwork.decoder_loss)
            if self.config.independent_decoder_sample
            else (VaeNetwork.loss,)
        )

    @property
    def fused(self) -> bool:
        """Whether `perceptron` and `log_weight` replace single layers."""
        weights, _ = weights_and_biases([*self.encoder, *self.decoder])
        widths, below = (
            [size for w in weights for size in w.shape],
            [w.shape[1] for w in self.frozen_decoder()[0]],
        )
        fits = aligned(widths, torch.float32) and aligned(below, torch.bfloat16)
        return self.dense and self.bf16 and fits and on_gpu(weights[0])

    @property
    def prepare(self) -> Task | None:
        """What `loss` needs besides the code, where `log_weight` can replace `log_joint`."""
        return VaeNetwork.prepare_loss if self.fused else None

    def prepare_loss(
        self, generator: torch.Generator | None = None, *, images: int
    ) -> dict[str, Any]:
        """The estimator's noise, and the decoder's weights as `log_weight` reads them."""
        weights, _ = self.frozen_decoder()
        like = weights[0].new_empty(images, self.config.variables, self.config.categories)
        rounded = {f"decoder.{i}": weight.bfloat16() for i, weight in enumerate(weights)}
        return {"noise": self.estimator.noise(like, generator), **rounded}

    def frozen_decoder(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and biases of the decoder's layers, without gradient."""
        return weights_and_biases(self.decoder, frozen=True)

    def loss(
        self,
        x: Tensor,
        log_q1: Tensor,
        settings: Mapping[str, Tensor],
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """-ELBO of a batch [N, 784], with the estimated gradient in ln q, and what it has seen."""
        config, images = self.config, x
        sampled = config.kl == "sampled"
        weights = [
            settings[f"decoder.{i}"] for i in range(len(self.decoder)) if f"decoder.{i}" in settings
        ]
        _, biases = self.frozen_decoder()

        def elbo(zs: list[Tensor], logits: list[Tensor], x: Tensor) -> Tensor:
            inside = list(zip(logits, zs, strict=True))[
                0 if sampled else 1 : 1 if config.as_released else None
            ]
            frozen = not torch.is_grad_enabled()
            if weights and frozen and not zs[0].is_floating_point():
                top = log_q1.detach() if sampled else torch.zeros_like(log_q1)
                inside = inside[sampled:]
                log_p = self.with_prior(
                    log_weight(zs[0], top, weights, biases, images), zs, frozen=True
                )
            else:
                log_p = self.log_joint(
                    zs, x, frozen=config.independent_decoder_sample, bf16=self.bf16 and frozen
                )
            if config.as_released:
                log_p = log_p + arsm.entropy(logits[1]).sum(-1)
            return log_p - sum(log_q(phi, z) for phi, z in inside)

        layers = [lambda zs, x: log_q1, lambda zs, x: self.encode_lower(zs[0])][: config.layers]
        # the second encoder is then not trained, and its estimate is not used
        below = arsm.Reinforce() if config.as_released else self.estimator
        out = estimate_layers(
            [self.estimator, below][: config.layers],
            layers,
            elbo,
            x,
            noise=settings.get("noise"),
            generator=generator,
            evaluation="dense" if self.dense else "packed",
            max_rows=None if self.dense else 1024,
            frozen=config.independent_decoder_sample and not self.estimator.needs_gradient,
            afresh=config.afresh,
        )
        self.adapt(out.layers[:1] if config.as_released else out.layers)
        value = out.value if sampled else out.value + arsm.entropy(log_q1).sum(-1)
        return learning_loss(out.layers) - value.mean(), seen(value, out.layers)

    def decoder_loss(
        self,
        x: Tensor,
        log_q1: Tensor,
        settings: Mapping[str, Tensor],
        generator: torch.Generator | None = None,
    ) -> tuple[Any, ...]:
        """-ln p(x, z) of a batch [N, 784], with a fresh sample z from q.

        With one layer it returns the logits of the pixels and the loss's slope in them.
        """
        zs, _ = self.sample(log_q1, generator)
        pixels = self.decode(zs[0], settings, generator)
        if self.config.layers == 1:
            return pixels, {}, (pixels.detach().sigmoid() - x) / len(x)
        return -self.with_prior(bernoulli(pixels, x), zs, frozen=False).mean(), {}

    def negative_elbo(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The sum of -ELBO over images, from one sample each: [N, 784] -> []."""
        return -self.log_weight(x, generator).sum()

    def log_weight(
        self, x: Tensor, generator: torch.Generator | None = None, draws: int = 1
    ) -> Tensor:
        """ln p(x, z) - ln q(z | x) without dropout: [N, 784] -> [N draws], all draws of an image in
        a row.
        """
        log_q1, x = (each.repeat_interleave(draws, 0) for each in (self.encode(x), x))
        zs, logits = self.sample(log_q1, generator)
        log_weight = self.log_joint(zs, x)
        for phi, z in zip(logits, zs, strict=True):
            log_weight = log_weight - log_q(phi, z)
        return log_weight

    def log_mean_weight(
        self, x: Tensor, generator: torch.Generator | None = None, *, draws: int
    ) -> Tensor:
        """ln 1/S sum_s p(x, z_s) / q(z_s | x) of S draws: [N, 784] -> [N]."""
        log_weights = self.log_weight(x, generator, draws).unflatten(0, (-1, draws))
        return log_weights.logsumexp(-1) - math.log(draws)

    def diagnostics(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Entropy of q(z1 | x) in nats and share of distinct pseudo actions, over images and
        variables: [] each.
        """
        logits = self.encode(x)
        share = pseudo_action_share(logits, dirichlet(logits, generator))
        return {"entropy": arsm.entropy(logits).mean(), "pseudo_action_share": share.mean()}

    def pictures(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images, their reconstructions, and samples from the prior: [N, 784] -> [3, N, 784] in
        0..1.
        """
        log_q1 = self.encode(x)
        zs, _ = self.sample(log_q1, generator)
        z = draw(torch.zeros_like(log_q1), generator)
        if self.config.layers == 2:
            z = draw(self.decode_upper(z), generator)
        return torch.stack([x, *(self.decode(sample).sigmoid() for sample in (zs[0], z))])


def linear_layers(*sizes: int) -> nn.ModuleList:
    """Linear layers between these widths."""
    return nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def dropout(h: Tensor, rate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Keep each element with probability 1 - rate and scale it up; the rate, a tensor, differs
    between replicas.
    """
    kept = torch.rand(h.shape, generator=generator, device=h.device) >= rate
    return h * kept / (1 - rate)


def bernoulli(logits: Tensor, x: Tensor) -> Tensor:
    """ln p(x) = sum_d x_d l_d - ln(1 + e^{l_d}): [N, D] -> [N]."""
    logits = logits.float()
    if torch.is_grad_enabled() or not torch.compiler.is_compiling() or logits.shape[-1] % FACTORS:
        return (x * logits).sub_(F.softplus(logits)).sum(-1)
    # ln(1 + e^l) = l/2 + |l|/2 + ln(1 + e^{-|l|}). The compiled kernel is limited by arithmetic,
    # and the logarithm is its most expensive part: take one logarithm of a product of several
    # factors, each between 1 and 2.
    linear, product = logits.new_zeros(()), logits.new_ones(())
    for phi, y in zip(
        *(each.unflatten(-1, (FACTORS, -1)).unbind(-2) for each in (logits, x)), strict=True
    ):
        linear = linear + (y - 0.5) * phi - 0.5 * phi.abs()
        product = product * (1 + (-phi.abs()).exp())
    return (linear - product.log()).sum(-1)


def draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """z ~ Cat(softmax(logits)): [N, K, C] -> [N, K]."""
    return argmin_sample(logits, dirichlet(logits, generator))


def log_q(logits: Tensor, z: Tensor) -> Tensor:
    """ln q(z) from normalised logits [N, K, C]: [N]."""
    return arsm.log_prob(logits, z).sum(-1)


if __name__ == "__main__":
    from arsm_experiments.cli import main

    sys.exit(main(["vae", *sys.argv[1:]]))
