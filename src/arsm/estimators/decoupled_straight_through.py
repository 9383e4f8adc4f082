"""Decoupled straight-through: one temperature for the sample, another for its slope."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from arsm.checks import check_temperature
from arsm.draws import SampleNoise, samples
from arsm.estimators.relaxation import Relaxation
from arsm.relaxations import hard_point, softmax_tangent
from arsm.scores import probabilities
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class DecoupledStraightThrough(Relaxation):
    """Straight-through with a temperature for each direction.

        z_k ~ Cat(softmax(phi_k / tau_f)) one-hot,    p_k = softmax(phi_k / tau_b)
        g_k = 1/tau_b (diag(p_k) - p_k p_k') df(z)/dz_k

    Biased; both temperatures 1 are `StraightThrough`. With tau_f != 1 the sample, and
    with it the value, is not one of softmax(phi). Reference: Shah, Yan, Mozer and Liu,
    Improving discrete optimisation via decoupled straight-through estimator, 2024.

    Attributes:
        forward: tau_f.
        backward: tau_b.
    """

    forward: float = 1.0
    backward: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.forward)
        check_temperature(self.backward)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits / self.forward, noise).squeeze(-2)
        p = probabilities(logits, self.backward)
        return hard_point(logits, z, softmax_tangent(logits, p) / self.backward)
