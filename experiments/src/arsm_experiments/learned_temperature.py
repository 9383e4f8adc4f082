"""Straight-through Gumbel-Softmax whose temperature is trained with the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arsm.categorical import one_hot
from arsm.noise import argmin_sample, race_noise
from arsm.relaxations import one_point, perturbed
from arsm.types import Estimator, Queries


class Temperature(nn.Module):
    """The temperature tau; starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))


@dataclass(frozen=True, eq=False)
class LearnedTemperature(Estimator):
    """f at the one-hot sample; its slope is propagated through the relaxed sample to the logits and
    to tau.

        z_k = argmin_i (ln pi_ki - phi_ki),    s_k = softmax((phi_k - ln pi_k) / tau),
        g = ds/d(phi, tau)' df(z)/dz

    The same as `arsm.GumbelSoftmax(hard=True)`, except that tau is trained as a parameter of the
    model, as the paper's authors do.
    """

    learned: nn.ModuleList = field(
        default_factory=lambda: nn.ModuleList([Temperature()]), repr=False
    )

    unbiased = False
    needs_gradient = True
    pathwise = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        (temperature,) = self.learned.parameters()
        z = argmin_sample(logits, noise)
        soft = (perturbed(logits, noise) / temperature).softmax(-1).to(logits.dtype)
        return one_point(one_hot(z, logits.shape[-1], logits.dtype) + (soft - soft.detach()), z)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
