"""ReinMax: straight-through of second order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.checks import check_temperature
from arsm.relaxations import hard_point, softmax_tangent
from arsm.samples import Draws, draw, samples
from arsm.scores import probabilities
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class ReinMax(Estimator):
    """Heun's second-order rule for the differences of f, where straight-through uses Euler's.

        g_k = [2 J(m_k) - J(p_k) / 2] df(z)/dz_k,    m_k = (z_k + softmax(phi_k / tau)) / 2,    J(q) = diag(q) - q q'

    with z_k ~ Cat(p_k) one-hot and p_k = softmax(phi_k). At tau = 1 it is unbiased for one variable if f is quadratic
    in z, and biased otherwise; tau above 1 lowers the variance. Reference: Liu, Dong, Liu, Yu and Gao, Bridging
    discrete and backpropagation: straight-through and beyond, NeurIPS 2023.
    """

    temperature: float = 1.0
    """tau; above 1 it lowers the variance."""

    unbiased = False
    needs_gradient = True
    pathwise = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    def noise(self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None) -> Draws:
        return draw(logits, 1, generator, z)

    def ask(self, logits: Tensor, noise: Draws) -> Queries:
        z = samples(logits, noise).squeeze(-2)
        p = probabilities(logits)
        middle = (one_hot(z, logits.shape[-1], p.dtype) + probabilities(logits, self.temperature)) / 2
        tangent = 2 * softmax_tangent(logits, middle) - softmax_tangent(logits, p) / 2
        return hard_point(logits, z, tangent)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
