"""ARSM+: ARS+ averaged over all references."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.estimators.ars_plus import ask_integrated
from arsm.noise import race_noise
from arsm.references import tell_references
from arsm.types import Estimator, Queries, at_most_all


@dataclass(frozen=True, eq=False)
class ARSMPlus(Estimator):
    """ARSM whose noise is integrated out, one reference at a time.

        g_kc = sum_j [f(z^{c<->j}) - mean_m f(z^{m<->j})] (1/C - E_j[pi_kj])

    with the conditional mean E_j of `ARSPlus` and the same j in every row k: the
    evaluations of ARSM, C(C-1)/2 + 1 at most, and C^2 work per variable. Each
    reference's term is a conditional expectation of ARSM's term. Their sum has less
    variance than ARSM in every measurement, though nothing guarantees it, because each
    is given something else. At C = 2 this is DisARM. Reference: Dong, Mnih and Tucker,
    Coupled gradient estimators for discrete latent variables, NeurIPS 2021, where ARSM+
    sets to 0 the terms whose pseudo actions agree in row k, and no more.
    """

    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        # every category is a reference, the same for all variables: [*B, C, 1]
        references = torch.arange(logits.shape[-1], device=logits.device).unsqueeze(-1)
        return ask_integrated(logits, noise, references.expand(*logits.shape[:-2], -1, -1))

    def most_queries(self, logits: Tensor) -> int:
        variables, categories = logits.shape[-2:]
        if variables == 1:
            return at_most_all(categories, logits)
        # the pairs (c, j) and (j, c) ask for the same point
        return at_most_all(1 + categories * (categories - 1) // 2, logits)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        return tell_references(logits, queries, values, pooled=False)
