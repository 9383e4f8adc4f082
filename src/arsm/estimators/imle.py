"""I-MLE: the sample, and where it moves if the logits follow the slope of f."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.checks import check_positive
from arsm.noise import argmin_sample, race_noise
from arsm.relaxations import sloped_point, slopes_at_queries
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class IMLE(Estimator):
    """The difference between a sample of a target distribution and the true sample.

        g_k = [z_k(phi_k + lambda h_k) - z_k(phi_k)] / lambda,    h = df(z)/dz at z = z(phi),
        z_k(theta) = onehot argmax_c (theta_c - ln pi_kc)

    with the same noise ln pi for both samples (perturb-and-MAP, which is exact for
    categorical variables). The target distribution has the logits phi + lambda h: a
    step along the slope of f. Zero for a variable whose choice does not change. A large
    lambda has bias, a small one variance: most estimates are then zero, and a few very
    large. One evaluation of f and one slope. The paper leaves out the factor 1 /
    lambda, which optimisers such as Adam do not notice. Reference: Niepert, Minervini
    and Franceschi, Implicit MLE: backpropagating through discrete exponential family
    distributions, NeurIPS 2021.

    Attributes:
        step: lambda, the size of the step.
    """

    step: float = 1.0

    unbiased = False
    needs_gradient = True
    vmappable = False  # tell calls torch.autograd.grad

    def __post_init__(self) -> None:
        check_positive("step", self.step)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        return sloped_point(logits, argmin_sample(logits, noise), aux=noise)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        slope = slopes_at_queries(queries, values)[0]
        # with the noise of the true sample: fresh noise would differ without any step
        moved = sample_at_step(logits, queries.aux, self.step * slope)
        there = one_hot(moved, logits.shape[-1], values.dtype)
        here = one_hot(queries.z, logits.shape[-1], values.dtype)
        return (there - here) / self.step


def sample_at_step(logits: Tensor, log_pi: Tensor, step: Tensor) -> Tensor:
    """The sample of the moved logits under the same noise: [*B, K, C] each -> [*B, K]."""
    # in float64: a step that is small beside the logits must not be rounded away
    return argmin_sample(logits.detach().double() + step.double(), log_pi)
