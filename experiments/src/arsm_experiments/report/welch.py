"""Intervals for means of few seeds: Student's for one mean, Welch's for the difference of two."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


def student_quantile(freedom: float, inside: float = 0.95) -> float:
    """The number of standard errors around 0 that contains this fraction of Student's distribution.

    With t = sqrt(freedom) tan(a) its density is proportional to cos(a)^(freedom - 1).
    """
    angles = np.linspace(0, np.pi / 2, 100_001)
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    return float(math.sqrt(freedom) * np.tan(angles[np.searchsorted(mass, inside * mass[-1])]))


class Difference(NamedTuple):
    """The difference of two means, with half of its 95% interval."""

    mean: float
    half: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    @property
    def text(self) -> str:
        """The difference with its interval."""
        return f"{self.mean:.1f} ({self.mean - self.half:.1f} to {self.mean + self.half:.1f})"

    @property
    def short(self) -> str:
        """The difference ± half of its interval."""
        # adding 0 turns -0.0 into 0.0
        return f"{round(self.mean, 1) + 0.0:.1f} ± {self.half:.1f}"


def difference(
    mean: float, std: float, seeds: int, other_mean: float, other_std: float, other_seeds: int
) -> Difference:
    """The first mean minus the other.

    With v = std^2 / n of each, it has variance v1 + v2 and
    (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1)) degrees of freedom (Welch, 1947).
    """
    first, second = std**2 / seeds, other_std**2 / other_seeds
    if first + second == 0:
        return Difference(mean - other_mean, 0.0)
    freedom = (first + second) ** 2 / (
        first**2 / max(1, seeds - 1) + second**2 / max(1, other_seeds - 1)
    )
    half = student_quantile(freedom) * math.sqrt(first + second)
    return Difference(mean - other_mean, half)
