"""Dr. GRPO: REINFORCE with the group's mean as its baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from arsm.estimators.independent_samples import IndependentSamples
from arsm.scores import less_mean


@dataclass(frozen=True, eq=False)
class DrGRPO(IndependentSamples):
    """Subtract the mean of a group of n samples, each sample's own value in it.

        g = 1/n sum_i (f_i - mean(f)) x_i,    x_i = onehot(z_i) - softmax(phi)

    This is (n - 1)/n of `RLOO`: biased by that factor, which a learning rate absorbs as
    long as n stays the same. Reference: Liu, Chen, Li, Qi, Pang, Du, Lee and Lin,
    Understanding R1-Zero-like training: a critical perspective, 2025.

    Attributes:
        samples: n, the number of samples.
        live: Number of samples that keep f's graph (None: all); f's parameters get
            their average gradient.
    """

    unbiased = False
    centred = True

    @property
    def paths(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.samples

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """(f_i - mean(f)) / n."""
        # RLOO divides by n - 1
        return less_mean(values) / self.samples
