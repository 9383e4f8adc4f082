"""Gapped straight-through: the Gumbel noise replaced by the least shift that makes the
sample win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.checks import check_temperature
from arsm.draws import SampleNoise, samples
from arsm.estimators.relaxation import Relaxation
from arsm.noise import working_dtype
from arsm.relaxations import hard_point, softmax_tangent
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class GappedStraightThrough(Relaxation):
    """Shift the logits, without noise, until the sample leads by a gap.

        zeta_z = max phi,    zeta_i = min(phi_i, max phi - gap) for i != z,
        s = softmax(zeta / tau)
        g_k = (diag(s_k) - s_k s_k') / tau  df(z)/dz_k

    Biased. Reference: Fan, Chi, Rudnicky and Ramadge, Training discrete deep generative
    models via gapped straight-through estimator, ICML 2022.

    Attributes:
        temperature: tau, the temperature of the softmax.
        gap: Minimum lead of the sample's logit over the others.
    """

    temperature: float = 1.0
    gap: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not 0 <= self.gap < math.inf:
            raise ValueError(f"gap must be at least 0 and finite, but is {self.gap}.")

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits, noise).squeeze(-2)
        phi = logits.detach().to(working_dtype(logits.dtype))
        below = phi - phi.amax(-1, keepdim=True)
        # all relative to max phi, which is where the sample's logit goes
        wins = torch.arange(logits.shape[-1], device=z.device) == z.unsqueeze(-1)
        zeta = torch.where(wins, 0, below.clamp_max(-self.gap))
        tangent = softmax_tangent(logits, (zeta / self.temperature).softmax(-1)) / self.temperature
        return hard_point(logits, z, tangent)
