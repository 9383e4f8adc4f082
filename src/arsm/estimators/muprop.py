"""MuProp: REINFORCE with a Taylor expansion at the mean as its control variate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot, score
from arsm.estimators.straight_through import probabilities
from arsm.noise import argmin_sample, dirichlet, working_dtype
from arsm.types import Queries


def sample_and_point(logits: Tensor, z: Tensor, point: Tensor) -> Queries:
    """Ask for f at the one-hot z [*B, K], which is the value, and at a floating point [*B, K, C] to differentiate."""
    point = point.to(logits.dtype)
    points = torch.stack([one_hot(z, logits.shape[-1], logits.dtype), point])
    if not points.requires_grad:
        points.requires_grad_()
    same_as = torch.stack([torch.zeros_like(z[..., 0]), torch.ones_like(z[..., 0])])
    return Queries(points, z, same_as, torch.ones(1, device=z.device))


def slopes_at_queries(queries: Queries, values: Tensor, *, create_graph: bool = False) -> Tensor:
    """df/dz at every query, [M, *B, K, C], from all or some of their values; zero where there is none."""
    slopes = None
    if values.requires_grad:
        # what is left of the graph serves f's own parameters
        (slopes,) = torch.autograd.grad(
            values.sum(), queries.points, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    if slopes is None and not torch.is_grad_enabled():
        raise ValueError("This estimator differentiates f in z, but gradients are switched off here; enable them.")
    if slopes is None:
        raise ValueError(
            "This estimator differentiates f in z, but autograd finds no way from f's values to z; make f "
            "differentiable in one-hot z, or choose one that only evaluates f, such as RLOO."
        )
    return slopes


@dataclass(frozen=True)
class MuProp:
    """Score only what the first-order expansion of f at the mean leaves over.

        g_k = [f(z) - f(p) - h . (z - p)] (z_k - p_k) + (diag(p_k) - p_k p_k') h_k,    h = df(p)/dp

    with z_k ~ Cat(p_k) one-hot and p_k = softmax(phi_k). Two evaluations of f and one slope. Reference: Gu, Levine,
    Sutskever and Mnih, MuProp: unbiased backpropagation for stochastic neural networks, ICLR 2016.
    """

    unbiased = True
    needs_gradient = True

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """ln pi [*B, K, C]."""
        return dirichlet(logits, generator)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        mean = logits.to(working_dtype(logits.dtype)).softmax(-1)
        return sample_and_point(logits, argmin_sample(logits, noise), mean)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        p = probabilities(logits)
        h = slopes_at_queries(queries, values[1])[1].to(p.dtype)
        z, mean = queries.points.detach().to(p.dtype)
        sampled, expanded = values.detach()
        residual = sampled - expanded - (h * (z - mean)).sum((-2, -1))
        return residual[..., None, None] * score(logits, queries.z) + p * (h - (p * h).sum(-1, keepdim=True))
