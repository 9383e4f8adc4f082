"""ReinMax-Rao: ReinMax whose first Jacobian is averaged over Gumbel noise given the sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.checks import check_count, check_temperature
from arsm.draws import SampleNoise, sample_noise, samples
from arsm.estimators.gumbel_rao import RaoNoise
from arsm.estimators.relaxation import Relaxation
from arsm.noise import dirichlet
from arsm.relaxations import conditional_perturbed, hard_point, softmax_tangent
from arsm.scores import probabilities
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class ReinMaxRao(Relaxation):
    """ReinMax with Gumbel-Rao's Jacobian at the midpoint, in place of the softmax's.

        g_k = [2/n sum_i J(s_ki) / tau - J(p_k) / 2] df(z)/dz_k,    s_ki = softmax(zeta_ki / tau)
        m_k = (z_k + p_k) / 2,    J(q) = diag(q) - q q'

    with z_k ~ Cat(p_k) one-hot, p_k = softmax(phi_k), and zeta_ki = ln m_k + Gumbel
    noise, drawn n times given that its argmax is z_k. `ReinMax` has J(m_k) there: this
    estimator has less variance, and a bias also where f is quadratic. Still one
    evaluation of f. Reference: Wang and Bui, Beyond ReinMax: low-variance gradient
    estimators for discrete latent variables, 2026.

    Attributes:
        temperature: tau, the temperature of the relaxed samples.
        samples: n, the number of noise samples to average; f is still evaluated once.
    """

    temperature: float = 1.0
    samples: int = 10

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_count("samples", self.samples)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> RaoNoise:
        uniform, given = sample_noise(logits, 1, generator, z)
        return RaoNoise(uniform, given, dirichlet(logits, generator, self.samples))

    def ask(self, logits: Tensor, noise: RaoNoise) -> Queries:
        z = samples(logits, SampleNoise(noise.uniform, noise.given)).squeeze(-2)
        p = probabilities(logits)
        midpoint = (one_hot(z, logits.shape[-1], p.dtype) + p) / 2

        # the race of Cat(m), run n times given that z wins it: [*B, n, K, C]
        winner = z.unsqueeze(-2).expand(noise.conditional.shape[:-1])
        zeta = conditional_perturbed(midpoint.log().unsqueeze(-3), winner, noise.conditional)
        s = (zeta / self.temperature).softmax(-1)
        at_midpoint = softmax_tangent(logits.unsqueeze(-3), s).mean(-3) / self.temperature
        return hard_point(logits, z, 2 * at_midpoint - softmax_tangent(logits, p) / 2)
