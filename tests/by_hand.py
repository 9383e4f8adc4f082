"""What tests by hand share: random numbers, an f, its exact gradient, and noise that makes given
samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import arsm
from arsm.draws import SampleNoise
from tests.problems import interacting


def assert_equal(found: Tensor | None, expected: Tensor | None) -> None:
    """Up to the rounding of float64."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def forced(z: Tensor, categories: int) -> Tensor:
    """Noise that makes every race end with z: [...] -> [..., C]."""
    return -500 * arsm.one_hot(z, categories, torch.float64)


def cosine(z: Tensor, theta: Tensor) -> Tensor:
    return interacting(arsm.one_hot(z, theta.shape[-1], torch.float64), theta.flatten(1))


def exact(logits: Tensor, theta: Tensor) -> arsm.Estimate:
    return arsm.estimate(arsm.Exact(), logits, cosine, theta)


def given(z: Tensor) -> SampleNoise:
    """The noise of estimators that need samples alone, which makes these: [*B, n, K]."""
    return SampleNoise(torch.empty((*z.shape[:-2], 0, z.shape[-1]), dtype=torch.float64), z)


def noise_for(estimator: arsm.Estimator, logits: Tensor, log_pi: Tensor) -> Any:
    """This race's noise [*B, K, C], or just its winner for an estimator that needs samples
    alone.
    """
    needs = estimator.noise(logits)
    return (
        given(arsm.extend.argmin_sample(logits, log_pi).unsqueeze(-2))
        if isinstance(needs, SampleNoise)
        else log_pi
    )
