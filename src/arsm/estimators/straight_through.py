"""Straight-through: a hard sample forward, a softmax backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.relaxations import hard_point, softmax_tangent
from arsm.samples import Draws, draw, samples
from arsm.scores import probabilities
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class StraightThrough(Estimator):
    """Use the slope of f at the hard sample as if it were the slope at the probabilities.

        g_k = (diag(p_k) - p_k p_k') df(z)/dz_k,    z_k ~ Cat(p_k) one-hot,    p_k = softmax(phi_k)

    Biased unless f is linear in z. Reference: Bengio, Leonard and Courville, Estimating or propagating gradients
    through stochastic neurons for conditional computation, 2013.
    """

    unbiased = False
    needs_gradient = True
    pathwise = True

    def noise(self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None) -> Draws:
        return draw(logits, 1, generator, z)

    def ask(self, logits: Tensor, noise: Draws) -> Queries:
        return hard_point(logits, samples(logits, noise).squeeze(-2), softmax_tangent(logits, probabilities(logits)))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
