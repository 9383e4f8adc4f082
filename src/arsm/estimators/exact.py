"""The exact gradient by enumeration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import log_prob
from arsm.draws import SampleNoise, sample_noise, samples
from arsm.noise import working_dtype
from arsm.types import Estimator, Queries

LIMIT = 1 << 20
"""Most values of z per row."""


@dataclass(frozen=True, eq=False)
class Exact(Estimator):
    """Enumerate all C^K values of z.

        dE[f]/dphi_kc = sum_z q(z) f(z) (1[z_k = c] - softmax(phi_k)_c)

    The value is the expectation itself, and f's parameters get the gradient of the
    expectation. Values of probability zero are not evaluated.
    """

    unbiased = True
    given_sample = False
    deterministic = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        """For the true sample alone."""
        if z is not None:
            raise ValueError(
                "Exact enumerates and has no true sample; use LocalExpectation() to try every "
                "category."
            )
        return sample_noise(logits, 1, generator)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        variables, categories = logits.shape[-2:]
        count = categories**variables
        if count > LIMIT:
            raise ValueError(
                f"Exact would enumerate {categories}^{variables} values of z per row, and stops at "
                f"{LIMIT:,}; use an estimator that samples, such as ARSM or RLOO."
            )
        # the digits of 0..C^K - 1 in base C are all values of z
        batch = logits.shape[:-2]
        place = categories ** torch.arange(variables - 1, -1, -1, device=logits.device)
        number = torch.arange(count, device=logits.device).view(-1, *(1,) * len(batch))
        points = (number.unsqueeze(-1) // place % categories).expand(count, *batch, variables)
        log_q = logits.detach().to(working_dtype(logits.dtype)).log_softmax(-1)
        q = log_prob(log_q.expand(count, *log_q.shape), points).sum(-1).exp()
        # f need not be defined where a category is masked: such values share the mode's
        mode = q.argmax(0)
        same_as = torch.where(q > 0, number, mode)
        return Queries(points, samples(logits, noise).squeeze(-2), same_as, q)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        # less the expectation, which adds nothing, as scores have mean 0, but rounds less
        weighted = queries.weight * (values - (queries.weight * values).sum(0))
        p = logits.detach().to(weighted.dtype).softmax(-1)
        index = queries.points.movedim(0, -1)  # [*B, K, M]
        by_category = torch.zeros_like(p).scatter_add(
            -1, index, weighted.movedim(0, -1).unsqueeze(-2).expand_as(index)
        )
        return by_category - p * weighted.sum(0)[..., None, None]
