"""Gumbel-Softmax, the concrete distribution, and its straight-through form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.noise import argmin_sample, dirichlet, working_dtype
from arsm.types import Queries


def one_point(point: Tensor, z: Tensor) -> Queries:
    """Ask for f at one floating point [*B, K, C] a row, whose true sample is z [*B, K]."""
    same_as = torch.zeros_like(z[..., 0]).unsqueeze(0)
    return Queries(point.unsqueeze(0), z, same_as, torch.ones(1, device=z.device))


def perturbed(logits: Tensor, log_pi: Tensor) -> Tensor:
    """phi - ln pi, the logits with Gumbel noise up to a constant a row, whose argmax is z; attached to the logits.

    With pi = E / sum(E) for exponentials E, -ln pi_i is the Gumbel -ln E_i plus ln sum(E), which softmax ignores.
    """
    dtype = working_dtype(logits.dtype)
    phi = logits.to(dtype)
    return phi - phi.detach().amax(-1, keepdim=True) - log_pi.to(dtype)


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that softmax cannot be divided by."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, but is {temperature}.")


@dataclass(frozen=True)
class GumbelSoftmax:
    """Replace the argmax of the noisy logits by a softmax, and differentiate through it.

        s_k = softmax((phi_k - ln pi_k) / tau),    g = ds/dphi' df(s)/ds

    f is asked at s, and the value is f(s); with `hard`, f is asked at the one-hot z_k = argmin_i (ln pi_ki - phi_ki)
    and the slope there is pulled back through s. Biased either way: a low temperature tau trades bias for variance.
    References: Jang, Gu and Poole, Categorical reparameterization with Gumbel-Softmax, ICLR 2017; Maddison, Mnih and
    Teh, The concrete distribution, ICLR 2017.
    """

    temperature: float = 1.0
    hard: bool = False

    unbiased = False
    needs_gradient = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """ln pi [*B, K, C]."""
        return dirichlet(logits, generator)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        z = argmin_sample(logits, noise)
        soft = (perturbed(logits, noise) / self.temperature).softmax(-1).to(logits.dtype)
        if self.hard:
            soft = one_hot(z, logits.shape[-1], logits.dtype) + (soft - soft.detach())
        return one_point(soft, z)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
