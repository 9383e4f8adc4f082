"""Gumbel-Rao: straight-through Gumbel-Softmax, averaged over the noise given the sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.checks import check_temperature, check_whole
from arsm.draws import SampleNoise, sample_noise, samples
from arsm.estimators.relaxation import Relaxation
from arsm.noise import dirichlet
from arsm.relaxations import conditional_perturbed, hard_point, softmax_tangent
from arsm.types import Queries


class RaoNoise(NamedTuple):
    """The sample's noise as in `SampleNoise`, and the noise that is drawn given the sample."""

    uniform: Tensor
    """[*B, 1 - g, K]."""
    given: Tensor
    """[*B, g, K]."""
    conditional: Tensor
    """[*B, samples, K, C]."""


@dataclass(frozen=True, eq=False)
class GumbelRao(Relaxation):
    """Straight-through Gumbel-Softmax, Rao-Blackwellised: its Jacobian is averaged over
    the noise given z.

        g_k = 1/n sum_m (diag(s_km) - s_km s_km') / tau  df(z)/dz_k,
        s_km = softmax(zeta_km / tau)

    with zeta_km the noisy logits of variable k, drawn n times given their argmax z_k.
    The bias of `GumbelSoftmax(tau, hard=True)` and less variance, still with one
    evaluation of f. Reference: Paulus, Maddison and Krause, Rao-Blackwellizing the
    straight-through Gumbel-Softmax gradient estimator, ICLR 2021.

    Attributes:
        temperature: tau, the temperature of the relaxed samples.
        samples: Number of noise samples to average; f is still evaluated once.
    """

    temperature: float = 1.0
    samples: int = 10

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_whole("samples", self.samples)
        if self.samples < 1:
            raise ValueError(
                f"GumbelRao needs at least one draw of the noise, but samples = {self.samples}."
            )

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> RaoNoise:
        uniform, given = sample_noise(logits, 1, generator, z)
        return RaoNoise(uniform, given, dirichlet(logits, generator, self.samples))

    def ask(self, logits: Tensor, noise: RaoNoise) -> Queries:
        z = samples(logits, SampleNoise(noise.uniform, noise.given)).squeeze(-2)
        # the noisy logits, n times given the same winner: [*B, n, K, C]
        each = logits.unsqueeze(-3)  # [*B, 1, K, C]
        winner = z.unsqueeze(-2).expand(noise.conditional.shape[:-1])
        zeta = conditional_perturbed(each, winner, noise.conditional)
        tangent = softmax_tangent(each, (zeta / self.temperature).softmax(-1)) / self.temperature
        return hard_point(logits, z, tangent.mean(-3))
