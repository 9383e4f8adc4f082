"""VIMCO: gradients of a multi-sample bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.checks import check_samples
from arsm.distinct import share
from arsm.draws import SampleNoise, sample_noise, samples
from arsm.types import Estimator, Queries, at_most_all


@dataclass(frozen=True, eq=False)
class VIMCO(Estimator):
    """The multi-sample bound of n independent samples; f is the logarithm of an importance weight.

        L = E[L^],    L^(f_1..f_n) = ln 1/n sum_i exp f(z_i)
        g = sum_i (L^ - L^_{-i}) (onehot(z_i) - softmax(phi))

    where L^_{-i} has the mean of the other f_j in place of f_i. Its target is L and not
    E[f]: the value is L^, and g estimates the gradient of L through the samples. Where
    f itself depends on the logits, as ln p(x, z) - ln q(z) does, the rest of dL/dphi
    comes through f: hand f the log q with its graph. (In E[f] that part is zero in the
    mean, in L it is not.) Reference: Mnih and Rezende, Variational inference for Monte
    Carlo objectives, ICML 2016.

    Attributes:
        samples: n, the number of samples in the bound.
    """

    samples: int = 4

    unbiased = True
    target = "bound"

    def __post_init__(self) -> None:
        check_samples("VIMCO", self.samples)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, self.samples, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits, noise)
        points = z.movedim(-2, 0)
        return Queries(points, z, share(points), torch.ones(self.samples, device=z.device))

    @property
    def paths(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.samples

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """L^ - L^_{-i}."""
        return leave_one_out_signals(values)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        """L^ [*B]."""
        return log_mean_exp(live)

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.samples, logits)

    def within(self, budget: int) -> VIMCO:
        return replace(self, samples=max(2, budget))


def log_mean_exp(values: Tensor) -> Tensor:
    """ln 1/n sum_i exp f_i: [n, *B] -> [*B]."""
    return values.logsumexp(0) - math.log(values.shape[0])


def leave_one_out_signals(values: Tensor) -> Tensor:
    """L^ - L^_{-i} of every sample, from f's values: [n, *B] -> [n, *B]."""
    n = values.shape[0]
    values = values - values.amax(0)  # a log weight carries a large constant, which cancels
    others = (values.sum(0) - values) / (n - 1)
    # row i has the mean of the others in the place of sample i
    number = torch.arange(n, device=values.device)
    own = (number.unsqueeze(-1) == number).view(n, n, *(1,) * (values.ndim - 1))
    return values.logsumexp(0) - torch.where(own, others, values).logsumexp(1)
