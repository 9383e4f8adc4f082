"""AR: augment-REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.draws import one_sample
from arsm.noise import argmin_sample, race_noise
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class AR(Estimator):
    """Augment-REINFORCE: the score of the Dirichlet noise instead of the score of z.

        g_kc = f(z) (1 - C pi_kc),    z_k = argmin_i (ln pi_ki - phi_ki)

    Reference: Yin, Yue and Zhou, ARSM, ICML 2019, theorem 1. Its variance is higher
    than REINFORCE's; it is the first step of ARS and ARSM.
    """

    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        return one_sample(argmin_sample(logits, noise), aux=noise)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        log_pi = queries.aux
        # no baseline: theorem 1 as it stands
        return values[0][..., None, None] * (1 - logits.shape[-1] * log_pi.exp())
