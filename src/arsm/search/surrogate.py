r"""`Surrogate`: a regression of f on the points known so far, whose expectation has an
exact gradient.

    h(z) = m + s sum_i a_i (1 + k(z, z_i)),  k(z, z_i) = r^d(z, z_i),  r = exp(-DECAY / K)

d counts the variables in which two points differ; k is the diffusion kernel of the
graph whose edges change one variable. a solves (1 + k + NOISE I) a = (f - m) / s. Under
independent choices z_k ~ Cat(p_k) the expectation of h is a sum of products,

    E k(z, z_i) = prod_k t_ik,  t_ik = q_ik + r (1 - q_ik),  q_ik = p_k[z_ik]

so that a search can subtract h from f and add the gradient of E h: an estimate that is
unbiased stays so, because h does not depend on the samples of its round, and loses the
part of its variance that h explains.

Reference for the kernel: Kondor and Lafferty, Diffusion kernels on graphs and other
discrete structures, ICML 2002.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from arsm.search.space import Point

DECAY = 4.0
"""Nats that the kernel loses when all variables differ."""
NOISE = 0.01
"""Variance of what the kernel cannot explain, in units of the values' variance."""
LOWEST = 4.0
"""A value further below the median than this many times the best is above it counts as
one that far below: a penalty would hide all other differences.
"""


def exponent_of(values: Sequence[float]) -> int:
    """The power of 2 that brings the values into [-1, 1]: the squares of very large or
    small ones are not inf or 0 then.
    """
    return math.frexp(max(map(abs, values)))[1]


def in_units(values: Sequence[float], exponent: int) -> Tensor:
    """The values [N] in units of 2^exponent."""
    return torch.tensor([math.ldexp(value, -exponent) for value in values], dtype=torch.float64)


class Surrogate:
    """A kernel ridge regression.

    Args:
        points: int64 [N, K].
        values: float64 [N], not all equal, in units of 2^exponent.
        exponent: of the values' unit, in which h is, too.
    """

    def __init__(self, points: Tensor, values: Tensor, exponent: int = 0) -> None:
        self.points = points
        self.exponent = exponent
        self.mean = values.mean()
        deviation = values.std(correction=0)
        gram = self._kernel(points) + 1.0  # the constant is regressed on, too
        gram.diagonal().add_(NOISE)
        target = ((values - self.mean) / deviation).unsqueeze(-1)
        root = torch.linalg.cholesky(gram)
        self.weights = torch.cholesky_solve(target, root).squeeze(-1) * deviation  # [N]

    @classmethod
    def fitted(cls, points: Sequence[Point], values: Sequence[float]) -> Surrogate | None:
        """The regression on values in any unit; None if they are all equal."""
        middle = sorted(values)[len(values) // 2]
        best = max(values)
        lowest = middle - LOWEST * (best - middle)
        kept = [max(value, lowest) for value in values]
        exponent = exponent_of(kept)
        scaled = in_units(kept, exponent)
        if bool((scaled == scaled[0]).all()):
            return None
        return cls(torch.tensor(points), scaled, exponent)

    @property
    def _ratio(self) -> float:
        """r, the factor by which one more difference lowers the kernel."""
        return math.exp(-DECAY / self.points.shape[-1])

    def _kernel(self, z: Tensor) -> Tensor:
        """k(z, z_i): [M, K] -> [M, N]."""
        # the "norm" with p = 0 counts the differences
        differences = torch.cdist(z.double(), self.points.double(), p=0)
        return self._ratio**differences

    def __call__(self, z: Tensor) -> Tensor:
        """h at points [M, K]: [M]."""
        return self.mean + (self._kernel(z) + 1.0) @ self.weights

    def gradient(self, p: Tensor) -> Tensor:
        """dE[h]/dphi [K, C] where p = softmax(phi)."""
        places = self.points.T  # [K, N]
        q = p.gather(-1, places)
        t = q + self._ratio * (1 - q)
        log_t = t.log()  # sums of logarithms: a product of hundreds of factors could underflow
        # the products over all other variables, and with z_k = z_ik in the place of t_ik
        rest = (log_t.sum(0) - log_t).exp() * self.weights
        given = torch.zeros_like(p).scatter_add(-1, places, (1 - self._ratio) * rest)
        return p * (given - (p * given).sum(-1, keepdim=True))
