"""REINFORCE, the score-function estimator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.draws import SampleNoise, one_sample, sample_noise, samples
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class Reinforce(Estimator):
    """The score-function estimator with a constant baseline.

        g_kc = (f(z) - b) (1[z_k = c] - softmax(phi_k)_c)

    Reference: Williams, Simple statistical gradient-following algorithms, 1992. With
    several samples, `RLOO` has a baseline that needs no tuning.

    Attributes:
        baseline: b: a number or a tensor [*B]; it must not depend on the sample.
    """

    baseline: float | Tensor | None = None

    unbiased = True
    paths = 1

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, 1, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        return one_sample(samples(logits, noise).squeeze(-2))

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """f(z) - b."""
        baseline = 0.0 if self.baseline is None else self.baseline
        # any other shape would be broadcast to a batch that nobody meant
        if isinstance(baseline, Tensor) and baseline.ndim not in (0, values.ndim - 1):
            raise ValueError(
                f"baseline must be a number or shaped like the batch {list(values.shape[1:])}, but "
                f"is {list(baseline.shape)}; inside Average the batch is [*B, n], so unsqueeze(-1) "
                "it."
            )
        return values - baseline
