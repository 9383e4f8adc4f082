"""Common base of estimators that compare a group of samples and use f's slope at each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from arsm.checks import check_samples
from arsm.distinct import share
from arsm.draws import SampleNoise, mean_weight, sample_noise, samples
from arsm.relaxations import sloped_points, slopes_at_queries
from arsm.types import Estimator, Queries, at_most_all


@dataclass(frozen=True, eq=False)
class SlopedGroup(Estimator):
    """n independent samples with f's slopes; `control` holds the learned parts, and
    `tell` compares the samples.
    """

    samples: int = 4
    """n, the number of samples."""
    control: nn.Module = field(init=False, repr=False)
    learned: nn.ModuleList = field(init=False, repr=False)

    unbiased = True
    needs_gradient = True
    vmappable = False  # tell calls torch.autograd.grad

    def __post_init__(self) -> None:
        check_samples(type(self).__name__, self.samples)
        self._learn(self.new_control())

    def new_control(self) -> nn.Module:
        """The initial learned part."""
        raise NotImplementedError

    def _learn(self, control: nn.Module) -> None:
        object.__setattr__(self, "control", control)
        object.__setattr__(self, "learned", nn.ModuleList([control]))

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, self.samples, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        z = samples(logits, noise)
        points = sloped_points(logits, z.movedim(-2, 0))
        return Queries(points, z, share(z.movedim(-2, 0)), mean_weight(self.samples, z.device))

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.samples, logits)

    def within(self, budget: int) -> Self:
        resized = replace(self, samples=max(2, budget))
        resized._learn(self.control)  # shared: what one learns, the other has learned
        return resized

    def slopes(self, queries: Queries, values: Tensor, dtype: torch.dtype) -> Tensor:
        """df/dz at every sample, detached: [n, *B, K, C]. Equal samples share the mean
        of their slopes.
        """
        slopes = slopes_at_queries(queries, values).to(dtype)
        # queries that share an evaluation have their slopes at the one that was evaluated
        same_as = queries.same_as
        where = same_as[..., None, None].expand_as(slopes)
        total = torch.zeros_like(slopes).scatter_add(0, where, slopes)
        count = torch.zeros_like(same_as).scatter_add(0, same_as, torch.ones_like(same_as))
        return (total / count.clamp_min(1)[..., None, None]).gather(0, where)
