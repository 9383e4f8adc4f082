"""GRPO: REINFORCE with values normalised within their group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from arsm.checks import check_positive
from arsm.estimators.independent_samples import IndependentSamples
from arsm.scores import less_mean


@dataclass(frozen=True, eq=False)
class GRPO(IndependentSamples):
    """Divide f by its standard deviation within a group of n samples.

        g = 1/n sum_i (f_i - mean(f)) / (sd(f) + epsilon) x_i,    x_i = onehot(z_i) - softmax(phi)

    with sd^2 = 1/(n-1) sum_i (f_i - mean(f))^2. Biased: the direction is that of
    another objective, which weighs rows by 1/sd, and the length does not depend on f's.
    `RLOO` is unbiased at the same cost. Reference: Shao et al., DeepSeekMath: pushing
    the limits of mathematical reasoning in open language models, 2024.

    Attributes:
        samples: n, the number of samples.
        live: Number of samples that keep f's graph (None: all); f's parameters get
            their average gradient.
        epsilon: Added to the standard deviation.
    """

    epsilon: float = 1e-4

    unbiased = False
    centred = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("epsilon", self.epsilon)

    @property
    def paths(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.samples

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """(f_i - mean(f)) / (sd(f) + epsilon) / n."""
        f = less_mean(values)
        # epsilon: equal values have no deviation to divide by
        deviation = (f.square().sum(0) / (self.samples - 1)).sqrt()
        return f / (deviation + self.epsilon) / self.samples
