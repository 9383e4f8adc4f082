"""REINFORCE, the score-function estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.categorical import score
from arsm.noise import argmin_sample, dirichlet
from arsm.types import Queries


def one_sample(z: Tensor, aux: Any = None) -> Queries:
    """Ask for f at the true sample z [*B, K] and nowhere else."""
    return Queries(z.unsqueeze(0), z, torch.zeros_like(z[..., 0]).unsqueeze(0), torch.ones(1, device=z.device), aux)


@dataclass(frozen=True, eq=False)
class Reinforce:
    """The score-function estimator with a constant baseline.

        g_kc = (f(z) - b) (1[z_k = c] - softmax(phi_k)_c)

    Reference: Williams, Simple statistical gradient-following algorithms, 1992. With several samples, `RLOO` has
    a baseline that needs no tuning.
    """

    baseline: float | Tensor | None = None
    """b: a number or a tensor [*B]; it must not depend on the sample."""

    unbiased = True
    needs_gradient = False

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """ln pi [*B, K, C]."""
        return dirichlet(logits, generator)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        return one_sample(argmin_sample(logits, noise))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        baseline = 0.0 if self.baseline is None else self.baseline
        if isinstance(baseline, Tensor) and baseline.ndim not in (0, values.ndim - 1):
            raise ValueError(
                f"baseline must be a number or shaped like the batch {list(values.shape[1:])}, but is "
                f"{list(baseline.shape)}; inside Average the batch is [*B, n], so unsqueeze(-1) it."
            )
        return (values[0] - baseline)[..., None, None] * score(logits, queries.z)
