"""The noise of estimators that need only samples: one uniform number per sample and variable."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from arsm.checks import check_generator, check_given, check_logits
from arsm.distinct import share
from arsm.sampling import inverse_sample, uniforms
from arsm.types import Queries

EDGE = 1e-12
"""A conditioned uniform number this close to a threshold is moved away from it:
rounding must not decide.
"""


class SampleNoise(NamedTuple):
    """The noise of n samples of Cat(softmax(logits)): g given samples, then n - g fresh ones.

    Attributes:
        uniform: [*B, n - g, K] float64 in [0, 1).
        given: [*B, g, K] int64: samples that were drawn elsewhere.
    """

    uniform: Tensor
    given: Tensor


def sample_noise(
    logits: Tensor, n: int, generator: torch.Generator | None = None, z: Tensor | None = None
) -> SampleNoise:
    """The noise of n independent samples; the first is z [*B, K] if it is given."""
    if z is None:
        return SampleNoise(uniforms(logits, n, generator), _no_samples(logits))
    check_given(logits, z)
    return SampleNoise(uniforms(logits, n - 1, generator), z.unsqueeze(-2))


def _no_samples(logits: Tensor) -> Tensor:
    return torch.empty(
        (*logits.shape[:-2], 0, logits.shape[-2]), dtype=torch.int64, device=logits.device
    )


def samples(logits: Tensor, noise: SampleNoise) -> Tensor:
    """The samples: [*B, n, K] int64."""
    if not isinstance(noise, tuple):
        raise TypeError(
            "noise must be what estimator.noise(logits) draws, uniform numbers, but is "
            f"{type(noise).__name__}."
        )
    if noise.uniform.shape[-2] == 0:
        return noise.given
    # most noise is fresh: no part to join
    if _is_fresh(noise):
        return inverse_sample(logits, noise.uniform)
    return torch.cat([noise.given, inverse_sample(logits.detach(), noise.uniform)], -2)


def ask_samples(logits: Tensor, noise: SampleNoise, live: int) -> Queries:
    """The samples as queries, with the mean of the first `live` as the value."""
    z = samples(logits, noise)
    points = z.movedim(-2, 0)
    return Queries(points, z, share(points), mean_weight(live, z.device))


def _is_fresh(noise: SampleNoise) -> bool:
    """Whether no samples are given."""
    return isinstance(noise, SampleNoise) and noise.given.shape[-2] == 0


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One sample of Cat(softmax(logits)): [*B, K, C] -> [*B, K] int64; [C] -> [1]."""
    # a batch may be empty, such as that of the rollouts where every action agrees
    if not isinstance(logits, Tensor) or 0 not in logits.shape[:-1]:
        check_logits(logits, read=True)
    if generator is not None:
        check_generator(generator, logits)
    return draw_one(logits if logits.ndim > 1 else logits.unsqueeze(0), generator)


def draw_one(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`sample` of logits that are checked elsewhere, without reading them."""
    return samples(logits, sample_noise(logits, 1, generator)).squeeze(-2)


def open_uniforms(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Uniform numbers in (0, 1), float64."""
    u = torch.empty(shape, dtype=torch.float64, device=device).uniform_(generator=generator)
    # uniform_ may draw 0, whose logarithm is infinite
    return u.clamp_min(torch.finfo(torch.float64).tiny)


def one_sample(z: Tensor, aux: Any = None) -> Queries:
    """Ask for f only at the true sample z [*B, K]."""
    same_as = torch.zeros_like(z[..., 0]).unsqueeze(0)
    return Queries(z.unsqueeze(0), z, same_as, torch.ones(1, device=z.device), aux)


def mean_weight(live: int, device: torch.device) -> Tensor:
    """The weights of a mean over the first `live` queries: [L]."""
    return torch.full((live,), 1 / live, dtype=torch.float64, device=device)
