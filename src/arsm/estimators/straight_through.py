"""Straight-through: a hard sample forward, a softmax backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.estimators.gumbel_softmax import one_point
from arsm.noise import argmin_sample, dirichlet, working_dtype
from arsm.types import Queries


def softmax_tangent(logits: Tensor, p: Tensor) -> Tensor:
    """Zero, with the derivative diag(p) - p p' in the logits, which softmax has where it equals p: [..., C]."""
    phi = logits.masked_fill(logits == -torch.inf, 0).to(p.dtype)
    moved = phi - phi.detach()
    return p * (moved - (p * moved).sum(-1, keepdim=True))


def hard_point(logits: Tensor, z: Tensor, tangent: Tensor) -> Queries:
    """Ask for f at the one-hot z [*B, K], whose derivative in the logits is that of the tangent [*B, K, C]."""
    return one_point(one_hot(z, logits.shape[-1], logits.dtype) + tangent.to(logits.dtype), z)


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(phi / tau) in the type to compute in, detached: [..., C]."""
    return (logits.detach().to(working_dtype(logits.dtype)) / temperature).softmax(-1)


@dataclass(frozen=True)
class StraightThrough:
    """Take the slope of f at the hard sample for its slope at the probabilities.

        g_k = (diag(p_k) - p_k p_k') df(z)/dz_k,    z_k ~ Cat(p_k) one-hot,    p_k = softmax(phi_k)

    Biased unless f is linear in z. Reference: Bengio, Leonard and Courville, Estimating or propagating gradients
    through stochastic neurons for conditional computation, 2013.
    """

    unbiased = False
    needs_gradient = True

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """ln pi [*B, K, C]."""
        return dirichlet(logits, generator)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        return hard_point(logits, argmin_sample(logits, noise), softmax_tangent(logits, probabilities(logits)))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
