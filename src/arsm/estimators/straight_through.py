"""Straight-through: a hard sample forward, a softmax backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from arsm.draws import SampleNoise, samples
from arsm.estimators.relaxation import Relaxation
from arsm.relaxations import hard_point, softmax_tangent
from arsm.scores import probabilities
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class StraightThrough(Relaxation):
    """Use the slope of f at the hard sample as if it were the slope at the probabilities.

        g_k = (diag(p_k) - p_k p_k') df(z)/dz_k,    z_k ~ Cat(p_k) one-hot,    p_k = softmax(phi_k)

    Biased unless f is linear in z. Reference: Bengio, Leonard and Courville, Estimating
    or propagating gradients through stochastic neurons for conditional computation,
    2013.
    """

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits, noise).squeeze(-2)
        return hard_point(logits, z, softmax_tangent(logits, probabilities(logits)))
