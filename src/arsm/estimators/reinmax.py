"""ReinMax: straight-through of second order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from arsm.categorical import one_hot
from arsm.checks import check_temperature
from arsm.draws import SampleNoise, samples
from arsm.estimators.relaxation import Relaxation
from arsm.relaxations import hard_point, softmax_tangent
from arsm.scores import probabilities
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class ReinMax(Relaxation):
    """Heun's second-order rule for the differences of f, where straight-through uses Euler's.

        g_k = [2 J(m_k) - J(p_k) / 2] df(z)/dz_k,
        m_k = (z_k + softmax(phi_k / tau)) / 2,    J(q) = diag(q) - q q'

    with z_k ~ Cat(p_k) one-hot and p_k = softmax(phi_k). At tau = 1 it is unbiased for
    one variable if f is quadratic in z, and biased otherwise; tau above 1 lowers the
    variance. At tau = 1 it equals ZGR (Shekhovtsov 2023), [J(p_k) + (z_k - p_k)(z_k -
    p_k)'] / 2 df(z)/dz_k, sample by sample. Reference: Liu, Dong, Liu, Yu and Gao,
    Bridging discrete and backpropagation: straight-through and beyond, NeurIPS 2023.

    Attributes:
        temperature: tau; above 1 it lowers the variance.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits, noise).squeeze(-2)
        p = probabilities(logits)
        # halfway between the sample and the (tempered) mean
        mean = probabilities(logits, self.temperature)
        middle = (one_hot(z, logits.shape[-1], p.dtype) + mean) / 2
        tangent = 2 * softmax_tangent(logits, middle) - softmax_tangent(logits, p) / 2
        return hard_point(logits, z, tangent)
