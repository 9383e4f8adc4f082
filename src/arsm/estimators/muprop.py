"""MuProp: REINFORCE with a Taylor expansion at the mean as its control variate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.draws import SampleNoise, sample_noise, samples
from arsm.noise import working_dtype
from arsm.relaxations import sample_and_point, slopes_at_queries
from arsm.scores import centred, probabilities, score
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class MuProp(Estimator):
    """Score only what the first-order expansion of f at the mean leaves over.

        g_k = [f(z) - f(p) - h . (z - p)] (z_k - p_k) + (diag(p_k) - p_k p_k') h_k,    h = df(p)/dp

    with z_k ~ Cat(p_k) one-hot and p_k = softmax(phi_k). Two evaluations of f and one
    slope. Reference: Gu, Levine, Sutskever and Mnih, MuProp: unbiased backpropagation
    for stochastic neural networks, ICLR 2016.
    """

    unbiased = True
    needs_gradient = True
    vmappable = False  # tell calls torch.autograd.grad

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, 1, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        mean = logits.to(working_dtype(logits.dtype)).softmax(-1)
        return sample_and_point(logits, samples(logits, noise).squeeze(-2), mean)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        p = probabilities(logits)
        h = slopes_at_queries(queries, values[1])[1].to(p.dtype)
        z, mean = queries.points.detach().to(p.dtype)
        sampled, expanded = values.detach()
        residual = sampled - expanded - (h * (z - mean)).sum((-2, -1))
        # the expansion is linear in z, so that its own gradient is exact: G h = p centred(h)
        return residual[..., None, None] * score(logits, queries.z) + p * centred(p, h)
