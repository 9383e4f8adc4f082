"""Common base of relaxations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.draws import sample_noise
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class Relaxation(Estimator):
    """One floating point per row, attached to the logits: autograd through it is the estimate."""

    unbiased = False
    needs_gradient = True
    pathwise = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Any:
        """`SampleNoise` of one sample."""
        return sample_noise(logits, 1, generator, z)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> None:
        return None
