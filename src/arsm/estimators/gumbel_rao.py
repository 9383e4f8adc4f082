"""Gumbel-Rao: straight-through Gumbel-Softmax, averaged over the noise given the sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.driver import check_whole
from arsm.estimators.gumbel_softmax import check_temperature
from arsm.estimators.straight_through import hard_point, softmax_tangent
from arsm.noise import argmin_sample, dirichlet, given_winner, repeat_draws
from arsm.types import Queries


class RaoNoise(NamedTuple):
    """The sample's noise, and what is drawn again given the sample."""

    log_pi: Tensor
    """[*B, K, C]."""
    conditional: Tensor
    """[*B, samples, K, C]."""


def conditional_perturbed(logits: Tensor, z: Tensor, log_pi: Tensor) -> Tensor:
    """The noisy logits given that z wins, up to a constant a row: [..., C], z [...] -> [..., C], detached."""
    noise = given_winner(logits, z, log_pi)
    return logits.detach().to(noise.dtype).log_softmax(-1) - noise


@dataclass(frozen=True)
class GumbelRao:
    """Straight-through Gumbel-Softmax, Rao-Blackwellised: its Jacobian is averaged over the noise given z.

        g_k = 1/n sum_m (diag(s_km) - s_km s_km') / tau  df(z)/dz_k,    s_km = softmax(zeta_km / tau)

    with zeta_km the noisy logits of variable k, drawn n times given their argmax z_k. The bias of
    `GumbelSoftmax(tau, hard=True)` and less variance, at one evaluation of f all the same. Reference: Paulus, Maddison
    and Krause, Rao-Blackwellizing the straight-through Gumbel-Softmax gradient estimator, ICLR 2021.
    """

    temperature: float = 1.0
    samples: int = 10

    unbiased = False
    needs_gradient = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_whole("samples", self.samples)
        if self.samples < 1:
            raise ValueError(f"GumbelRao needs at least one draw of the noise, but samples = {self.samples}.")

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> RaoNoise:
        return RaoNoise(dirichlet(logits, generator), dirichlet(logits, generator, self.samples))

    def ask(self, logits: Tensor, noise: RaoNoise) -> Queries:
        z = argmin_sample(logits, noise.log_pi)
        each = repeat_draws(logits, self.samples)
        zeta = conditional_perturbed(each, z.unsqueeze(-2).expand(each.shape[:-1]), noise.conditional)
        tangent = softmax_tangent(each, (zeta / self.temperature).softmax(-1)) / self.temperature
        return hard_point(logits, z, tangent.mean(-3))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
