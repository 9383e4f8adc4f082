r"""Predicting the lower half of a binarized MNIST digit from its upper half, through two stochastic
layers.

    maximise E[ln p(x_l | z2)],    z1 ~ p(z1 | x_u),  z2 ~ p(z2 | z1),
    K variables of C categories each

by three linear maps, 392-200-200-392 at K = 20 and C = 10. The trained network is also the one that
samples: there is no KL. With M paths per image the objective is E[ln 1/M sum_m p(x_l | z2^m)]. Both
upper maps learn through a gradient estimator, the last one by autograd. The test reports -ln 1/S
sum_s p(x_l | z2^s). Reference: Yin, Yue and Zhou, ARSM, ICML 2019, table 2; the task is that of
Raiko, Berglund, Alain and Dinh, ICLR 2015.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import arsm
from arsm.bound import estimate_bound
from arsm.diagnostics import pseudo_action_share
from arsm.layers import estimate_layers
from arsm.noise import dirichlet, repeat_draws
from arsm_experiments.checks import check_least
from arsm_experiments.data import PIXELS, Mnist
from arsm_experiments.model import Model, learning_loss, seen, step_metrics
from arsm_experiments.replicas import Replicas, Task
from arsm_experiments.training.measure import (
    DIAGNOSTIC_IMAGES,
    PICTURES,
    multi_sample_bound,
    probes,
    run_on,
)
from arsm_experiments.training.options import Training
from arsm_experiments.vae import bernoulli, draw, dropout

HALF = PIXELS // 2
COMPLETIONS = 4
GREY = 0.5
# bounds for the frequency of pixels that are never or always on, whose log-odds would be infinite
RAREST = 1e-3


@dataclass(frozen=True)
class Conditional(Training):
    """Train p(lower half | upper half) of binarized MNIST, all seeds and rates of one estimator
    together.

    Writes one run folder per learning rate and dropout rate, with all seeds in it. Run it under
    torchrun to split each batch over several processes.
    """

    rates: tuple[float, ...] = (1e-4,)
    """Learning rates of Adam; one run folder each."""
    epochs: int = 2000
    """Passes over the training images."""
    batch: int = 100
    """Images per step."""
    dropouts: tuple[float, ...] = (0.0,)
    """Dropout rates of both layers; whole variables are dropped, the same ones on all paths of an
    image.
    """
    input_dropout: float = 0.0
    """Dropout rate of the upper half's pixels."""
    pixel_bias: Literal["zero", "mean"] = "zero"
    """Initial biases of the last map: 0, or the log-odds of the mean training image."""
    bound_samples: int = 1
    """M, the number of paths in the training bound, with any estimator; at least 2 for `vimco`."""
    measure_samples: int = 10
    """Samples for validation and test during the run; a multiple of 100 if above 100."""
    test_samples: int = 1000
    """S, the samples for the test at the end; a multiple of 100 if above 100."""

    experiment = "conditional"
    unlabelled = (*Training.unlabelled, "measure_samples", "test_samples")

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        # before the estimator is tried on its paths
        check_least(self, bound_samples=1, measure_samples=1, test_samples=1)
        super().check()
        for field in ("measure_samples", "test_samples"):
            self.check_draws(field)
        if "vimco" in self.estimator and (self.estimator != "vimco" or self.bound_samples < 2):
            raise ValueError(
                '"vimco" takes its samples from --bound-samples, 2 or more, and has no options '
                f'here, but is "{self.estimator}" with {self.bound_samples}.'
            )

    @property
    def kind(self) -> str:
        """E.g. bound8; empty for one sample."""
        return f"bound{self.bound_samples}" if self.bound_samples > 1 else ""

    @property
    def paths(self) -> int:
        """P: the paths of the bound, or 1 for VIMCO, which draws them itself."""
        return 1 if self.estimator == "vimco" else self.bound_samples

    def model(self, *, dense: bool = False) -> ConditionalNetwork:
        """The three maps with fresh parameters."""
        return ConditionalNetwork(self, dense=dense)

    def begin(self, images: Tensor) -> ConditionalNetwork:
        """The initial network, for training on images [N, 784]."""
        network = self.model()
        if self.pixel_bias == "mean":
            often = images[:, HALF:].sum(0, dtype=torch.int64) / len(images)
            network.last.bias.data.copy_(often.clamp(RAREST, 1 - RAREST).logit())
        return network

    def measure(
        self, replicas: Replicas, weights: Tensor, data: Mnist, step: int
    ) -> dict[str, Tensor]:
        """Validation and test loss from a few samples, gradient variance and diagnostics of z: [R]
        each.
        """
        task, generators = ConditionalNetwork.log_likelihood, probes(self, replicas, step)
        found = {
            part: multi_sample_bound(
                replicas, task, weights, getattr(data, part), self.measure_samples, generators
            )
            for part in ("validation", "test")
        }
        diagnostics = ConditionalNetwork.diagnostics
        found |= run_on(
            replicas, diagnostics, weights, data.validation[:DIAGNOSTIC_IMAGES], generators
        )
        found["gradient_variance"] = replicas.gradient_variance()
        return found

    def final_metrics(
        self, replicas: Replicas, weights: Tensor, data: Mnist, step: int
    ) -> dict[str, Tensor]:
        """-ln p(x_l | x_u) of the test images, from many samples."""
        task, generators = ConditionalNetwork.log_likelihood, probes(self, replicas, step)
        return {
            "best_test": multi_sample_bound(
                replicas, task, weights, data.test, self.test_samples, generators
            )
        }

    def pictures(self, replicas: Replicas, weights: Tensor, data: Mnist, step: int) -> Tensor:
        """Test images, their upper halves and several completions of each: [R, 2 + completions, N,
        784].
        """
        generators = probes(self, replicas, step)
        return run_on(
            replicas, ConditionalNetwork.pictures, weights, data.test[:PICTURES], generators
        )


# ---------------------------------------------------------------- the model


class ConditionalNetwork(Model):
    """x_u -> logits of z1 -> logits of z2 -> logits of x_l, linear maps of one-hot samples.

    A row holds P paths side by side, as P K variables; P > 1 only when training on a bound. The
    estimator then sees one f of P K variables.
    """

    def __init__(self, config: Conditional, *, dense: bool = False) -> None:
        estimator = arsm.estimator(config.estimator)
        if estimator.target == "bound":
            estimator = estimator.within(config.bound_samples) or estimator
        super().__init__(estimator, dense=dense)
        self.config, self.paths = config, config.paths
        self.shape = (config.variables, config.categories)
        width = config.variables * config.categories
        self.first = nn.Linear(HALF, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, HALF)
        self.initialise(self.paths * config.variables, config.categories)

    @property
    def encoder_size(self) -> int:
        """Number of parameters of the two maps whose outputs are sampled; they come first in the
        module.
        """
        return sum(p.numel() for part in (self.first, self.second) for p in part.parameters())

    def apply_map(self, layer: nn.Module, z: Tensor, kept: Tensor | None = None) -> Tensor:
        """Apply a linear map to the one-hot z, with dropout mask `kept`: [N, P K] -> [N P, D]."""
        bf16 = self.config.precision == "bf16" and z.is_cuda and not torch.is_grad_enabled()
        z = z.unflatten(1, (-1, self.shape[0])).flatten(0, 1)
        if kept is not None:
            kept = kept.unflatten(1, (-1, self.shape[0])).flatten(0, 1)
        with torch.autocast(z.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            return self.of_choices(layer, z, kept).float()

    def likelihood(self, z2: Tensor, x_l: Tensor, kept: Tensor | None = None) -> Tensor:
        """ln 1/P sum_p p(x_l | z2^p): [N, P K], [N, 392] -> [N]."""
        pixels = self.apply_map(self.last, z2, kept)
        if self.paths == 1:
            return bernoulli(pixels, x_l)
        log_p = bernoulli(pixels.unflatten(0, (-1, self.paths)), x_l.unsqueeze(1))
        return log_p.logsumexp(-1) - math.log(self.paths)

    # ------------------------------------------------------------ tasks

    @property
    def losses(self) -> tuple[Task, ...]:
        """One loss, which trains all three maps."""
        return (ConditionalNetwork.loss,)

    def encode(
        self, x: Tensor, settings: Mapping[str, Tensor], generator: torch.Generator | None = None
    ) -> Tensor:
        """The logits of z1: [N, 784] -> [N, K, C]."""
        x_u = x[:, :HALF]
        if self.config.input_dropout:
            x_u = dropout(x_u, settings["input_dropout"], generator)
        return self.first(x_u).unflatten(-1, self.shape)

    def loss(
        self,
        x: Tensor,
        code: Tensor,
        settings: Mapping[str, Tensor],
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The negative bound of a batch [N, 784], with the estimates of its gradient, and what it
        has seen.
        """
        context = [x[:, HALF:]]
        if any(self.config.dropouts):
            whole = x.new_ones(x.shape[0], self.config.variables, 1)
            context += [
                dropout(whole, settings["dropout"], generator).repeat(1, self.paths, 1)
                for _ in range(2)
            ]
        top = code.repeat(1, self.paths, 1)

        def second(zs: list[Tensor], x_l: Tensor, *kept: Tensor) -> Tensor:
            return self.apply_map(self.second, zs[0], *kept[:1]).reshape(-1, *top.shape[1:])

        def f(zs: list[Tensor], logits: list[Tensor], x_l: Tensor, *kept: Tensor) -> Tensor:
            return self.likelihood(zs[1], x_l, *kept[1:])

        layers = [lambda zs, *context: top, second]
        if self.estimator.target == "bound":
            out = estimate_bound(self.estimator, layers, f, *context, generator=generator)
            made = (out,)
        else:
            out = estimate_layers(
                self.estimator,
                layers,
                f,
                *context,
                generator=generator,
                evaluation="dense" if self.dense else "packed",
                max_rows=None if self.dense else 1024,
            )
            made = out.layers
        self.adapt(made)
        return learning_loss(made) - out.value.mean(), seen(out.value, made)

    def metrics(self, seen: Mapping[str, Any]) -> dict[str, Tensor]:
        """What to log of the loss; an evaluation has several paths."""
        found = step_metrics(seen)
        return found | {"evaluations": found["evaluations"] * self.paths}

    def log_likelihood(
        self, x: Tensor, generator: torch.Generator | None = None, *, draws: int
    ) -> Tensor:
        """ln 1/S sum_s p(x_l | z2^s) of S draws: [N, 784] -> [N]."""
        x_u, x_l = x.split(HALF, -1)
        _, zs = self.sample(x_u, generator, draws)
        log_p = bernoulli(
            self.apply_map(self.last, zs[1]).unflatten(0, (-1, draws)), x_l.unsqueeze(1)
        )
        return log_p.logsumexp(-1) - math.log(draws)

    def sample(
        self, x_u: Tensor, generator: torch.Generator | None, draws: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Both layers' logits [N S, K, C] and samples [N S, K] for S draws of each of x_u [N,
        392].
        """
        logits = [repeat_draws(self.first(x_u).unflatten(-1, self.shape), draws).flatten(0, 1)]
        zs = [draw(logits[0], generator)]
        logits.append(self.apply_map(self.second, zs[0]).unflatten(-1, self.shape))
        zs.append(draw(logits[1], generator))
        return logits, zs

    def diagnostics(self, x: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Entropy of z1 and z2 in nats and share of distinct pseudo actions, over images and
        variables: [] each.
        """
        logits = torch.stack(self.sample(x[:, :HALF], generator, 1)[0])
        share = pseudo_action_share(logits, dirichlet(logits, generator))
        return {"entropy": arsm.entropy(logits).mean(), "pseudo_action_share": share.mean()}

    def pictures(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images, their upper halves and completions: [N, 784] -> [2 + COMPLETIONS, N, 784] in
        0..1.
        """
        x_u, x_l = x.split(HALF, -1)
        _, zs = self.sample(x_u, generator, COMPLETIONS)
        completions = (
            self.apply_map(self.last, zs[1]).sigmoid().unflatten(0, (-1, COMPLETIONS)).unbind(1)
        )
        return torch.stack(
            [torch.cat([x_u, half], -1) for half in (x_l, torch.full_like(x_l, GREY), *completions)]
        )


if __name__ == "__main__":
    from arsm_experiments.cli import main

    sys.exit(main(["conditional", *sys.argv[1:]]))
