"""Check that noise given by a user is laid out as the estimator draws it."""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.checks import describe
from arsm.draws import SampleNoise
from arsm.types import Estimator


def check_noise(estimator: Estimator, logits: Tensor, noise: object) -> None:
    """Require noise such as `estimator.noise(logits)` draws for these logits [*B, K,
    C], or draws given a sample.

    Any other would be broadcast or misread, and the estimate would be wrong without an
    error.
    """
    batch = logits.shape[:-2]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        _check_leading(noise, batch)  # nothing can be drawn here to compare it with
        return
    expected = _noise_layout(estimator, logits)
    given = _layout(noise)
    if given != expected and given != _noise_layout(estimator, logits, given_sample=True):
        raise ValueError(
            f"noise must be {expected} for {type(estimator).__name__} and logits "
            f"{list(logits.shape)}, but is {given}; draw it by estimator.noise(logits) for these "
            "logits."
        )


def _check_leading(noise: object, batch: torch.Size) -> None:
    """Require tensors [*B, ...]."""
    for x in noise if isinstance(noise, tuple) else (noise,):
        if not isinstance(x, Tensor) or x.shape[: len(batch)] != batch:
            raise ValueError(
                f"noise must lead with the batch's shape {list(batch)}, but is {describe(x)}; draw "
                "it by estimator.noise(logits) for these logits."
            )


def _noise_layout(
    estimator: Estimator, logits: Tensor, *, given_sample: bool = False
) -> str | None:
    """The layout of `estimator.noise(logits)`, or of noise given a sample; None if the
    estimator takes no sample.
    """
    if given_sample and not estimator.given_sample:
        return None
    batch = logits.shape[:-2]
    variables = estimator.subset or logits.shape[-2]
    # Logits of no rows, on a CPU: no random number is drawn, and many categories cost no time.
    none = torch.empty(0, *logits.shape[-2:], dtype=logits.dtype)
    z = torch.empty(0, variables, dtype=torch.int64) if given_sample else None
    try:
        return _layout(estimator.noise(none, None, z), batch, 1)
    except Exception:
        # an estimator of a user, whose noise needs rows: draw for all, from another generator
        generator = torch.Generator(logits.device)
        if given_sample:
            z = torch.arange(variables, device=logits.device) % logits.shape[-1]
            z = z.expand(*batch, -1)
        drawn = estimator.noise(torch.zeros_like(logits), generator, z)
        return _layout(drawn, batch, len(batch))


def _layout(noise: object, batch: torch.Size | None = None, instead_of: int = 0) -> str:
    """Types and shapes of noise, in words; `batch` replaces the first `instead_of`
    dimensions of every shape.
    """
    if isinstance(noise, Tensor):
        shape = [*(batch or ()), *noise.shape[instead_of:]]
        # devices differ in the precision of their noise
        kind = "floating" if noise.dtype in (torch.float32, torch.float64) else str(noise.dtype)
        return f"{kind} {shape}"
    if isinstance(noise, SampleNoise) and _is_legal(noise.uniform, noise.given):
        # a sample counts the same whether it was given or is still to be drawn: noise given z fits
        # too
        *leading, given, variables = noise.given.shape
        samples = [*leading, noise.uniform.shape[-2] + given]
        return f"noise of samples {[*(batch or ()), *samples[instead_of:], variables]}"
    if isinstance(noise, tuple):
        parts = ", ".join(_layout(x, batch, instead_of) for x in noise)
        return f"{type(noise).__name__}({parts})"
    return type(noise).__name__


def _is_legal(uniform: object, given: object) -> bool:
    """Whether these are uniform numbers [*B, n - g, K] and samples [*B, g, K]."""
    if not isinstance(uniform, Tensor) or not isinstance(given, Tensor):
        return False
    if uniform.dtype != torch.float64 or given.dtype != torch.int64 or uniform.ndim < 2:
        return False
    return uniform.shape[:-2] == given.shape[:-2] and uniform.shape[-1:] == given.shape[-1:]
