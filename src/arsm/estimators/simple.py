"""SIMPLE: straight-through for choices of k out of C."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.checks import check_count
from arsm.estimators.relaxation import Relaxation
from arsm.relaxations import one_point
from arsm.sampling import uniforms
from arsm.subsets import check_subset, draw_subsets, members, subset_marginals
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class SIMPLE(Relaxation):
    """Use the slope of f at a subset as if it were the slope at the marginals.

        g = G f'(S),    S by the conditional Poisson distribution,    G = d mu / d phi,
        mu_c = P(c in S)

    The logits are [C] or [*B, 1, C], and f gets 1[c in S] as floating [N, 1, C], with k
    ones. Biased unless f is linear in them; k = 1 is `StraightThrough`. Reference:
    Ahmed, Zeng, Niepert and Van den Broeck, SIMPLE: a gradient estimator for k-subset
    sampling, ICLR 2023.

    Attributes:
        k: Number of chosen categories.
    """

    k: int

    given_sample = False

    def __post_init__(self) -> None:
        check_count("k", self.k)

    @property
    def subset(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.k

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """Uniform numbers [*B, 1, C]."""
        if z is not None:
            raise ValueError("SIMPLE draws its subset itself; leave z out.")
        check_subset(self, logits, self.k)
        return uniforms(logits.mT, 1, generator)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        z = draw_subsets(logits.squeeze(-2), noise, self.k).squeeze(-2)
        mu = subset_marginals(logits, self.k)
        # the subset in value, with the derivative of the marginals
        point = members(z, logits.shape[-1]).unsqueeze(-2) + (mu - mu.detach())
        return one_point(point.to(logits.dtype), z)
