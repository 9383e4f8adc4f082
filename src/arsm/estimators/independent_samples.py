"""Common base of estimators that compare a group of independent samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from arsm.checks import check_samples
from arsm.draws import SampleNoise, ask_samples, sample_noise
from arsm.types import Estimator, Queries, at_most_all


@dataclass(frozen=True, eq=False)
class IndependentSamples(Estimator):
    """n independent samples; `weights` or `tell` compares them."""

    samples: int = 4
    """n, the number of samples."""
    live: int | None = field(default=None, kw_only=True)
    """Number of samples that keep f's graph (None: all); f's parameters get their
    average gradient.
    """

    def __post_init__(self) -> None:
        check_samples(type(self).__name__, self.samples, self.live)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, self.samples, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        return ask_samples(logits, noise, self.live or self.samples)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        """The mean over the live samples."""
        return live.mean(0)  # the weights are equal

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.samples, logits)

    def within(self, budget: int) -> Self:
        # two at least: a sample is compared with another
        return replace(self, samples=max(2, budget))
