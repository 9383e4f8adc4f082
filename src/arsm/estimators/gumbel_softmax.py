"""Gumbel-Softmax, the concrete distribution, and its straight-through form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.checks import check_temperature
from arsm.estimators.relaxation import Relaxation
from arsm.noise import argmin_sample, race_noise
from arsm.relaxations import one_point, perturbed
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class GumbelSoftmax(Relaxation):
    """Replace the argmax of the noisy logits by a softmax, and differentiate through it.

        s_k = softmax((phi_k - ln pi_k) / tau),    g = ds/dphi' df(s)/ds

    f is asked at s, and the value is f(s); with `hard`, f is asked at the one-hot z_k =
    argmin_i (ln pi_ki - phi_ki) and the slope there is pulled back through s. Biased
    either way: a low temperature tau trades bias for variance. References: Jang, Gu and
    Poole, Categorical reparameterization with Gumbel-Softmax, ICLR 2017; Maddison, Mnih
    and Teh, The concrete distribution, ICLR 2017.

    Attributes:
        temperature: tau, the temperature of the relaxed sample.
        hard: Evaluate f at the one-hot sample (straight-through) instead of the relaxed
            one.
    """

    temperature: float = 1.0
    hard: bool = False

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        z = argmin_sample(logits, noise)
        soft = (perturbed(logits, noise) / self.temperature).softmax(-1).to(logits.dtype)
        if self.hard:
            # z in value, with the derivative of the relaxed sample
            soft = one_hot(z, logits.shape[-1], logits.dtype) + (soft - soft.detach())
        return one_point(soft, z)
