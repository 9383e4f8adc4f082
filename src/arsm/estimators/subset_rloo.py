"""Leave-one-out REINFORCE for choices of k out of C."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.checks import check_count, check_samples
from arsm.distinct import share
from arsm.draws import mean_weight
from arsm.sampling import uniforms
from arsm.scores import less_mean
from arsm.subsets import check_subset, draw_subsets, members, subset_marginals
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class SubsetRLOO(Estimator):
    """Leave-one-out REINFORCE over n independent subsets of k categories (conditional
    Poisson distribution).

        g = 1/n sum_i (f_i - mean_{m != i} f_m) (1[c in S_i] - mu_c),    mu_c = P(c in S)

    The logits are [C] or [*B, 1, C], and f gets the members of each subset in ascending
    order, int64 [N, k]. k = 1 is `RLOO`. Reference for the distribution: Chen, Dempster
    and Liu, Weighted finite population sampling to maximize entropy, Biometrika 1994.

    Attributes:
        k: Number of chosen categories.
        samples: n, the number of sampled subsets.
        live: Number of samples that keep f's graph (None: all); f's parameters get
            their average gradient.
    """

    k: int
    samples: int = 4
    live: int | None = None

    unbiased = True
    given_sample = False

    def __post_init__(self) -> None:
        check_count("k", self.k)
        check_samples("SubsetRLOO", self.samples, self.live)

    @property
    def subset(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.k

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """Uniform numbers [*B, n, C], one per sample and category."""
        if z is not None:
            raise ValueError("SubsetRLOO draws its subsets itself; leave z out.")
        check_subset(self, logits, self.k)
        return uniforms(logits.mT, self.samples, generator)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        z = draw_subsets(logits.squeeze(-2), noise, self.k)
        points = z.movedim(-2, 0)
        return Queries(points, z, share(points), mean_weight(self.live or self.samples, z.device))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        mu = subset_marginals(logits.detach().squeeze(-2), self.k)
        weight = less_mean(values).double() / (self.samples - 1)
        score = members(queries.points, logits.shape[-1]) - mu
        gradient = (weight.unsqueeze(-1) * score).sum(0).unsqueeze(-2)
        return gradient.to(torch.promote_types(values.dtype, logits.dtype))

    def most_queries(self, logits: Tensor) -> int:
        return self.samples

    def within(self, budget: int) -> SubsetRLOO:
        return replace(self, samples=max(2, budget))
