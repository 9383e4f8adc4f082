"""Dirichlet noise in log space, and the fixed-point race that it runs against the logits."""

from __future__ import annotations

import torch
from torch import Tensor

# The race is run in fixed point: sums, differences and comparisons of integers are exact, so that
# every way of computing a pseudo action decides every near tie alike.
RESOLUTION = 2.0**40
LOWEST_NOISE = -(2.0**12)
LOWEST_LOGIT = -(2.0**20)
MASKED = -(2**61)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float32, or float64 where the input is float64."""
    return torch.promote_types(dtype, torch.float32)


def dirichlet(logits: Tensor, generator: torch.Generator | None = None, draws: int | None = None) -> Tensor:
    """ln pi with pi ~ Dir(1_C): [*B, K, C], or [*B, draws, K, C]."""
    if draws is not None:
        logits = repeat_draws(logits, draws)
    dtype = working_dtype(logits.dtype)
    # float32 has too few values near zero for the smallest of this many exponentials: they would tie.
    exact = torch.float64 if logits.shape[-1] >= 100_000 else dtype
    exponential = torch.empty_like(logits, dtype=exact, requires_grad=False, memory_format=torch.contiguous_format)
    exponential = exponential.exponential_(generator=generator).clamp_min(torch.finfo(exact).tiny)
    return exponential.log() - exponential.sum(-1, keepdim=True).log()


def repeat_draws(logits: Tensor, draws: int) -> Tensor:
    """[*B, K, C] -> [*B, draws, K, C], without copying."""
    return logits.unsqueeze(-3).expand(*logits.shape[:-2], draws, *logits.shape[-2:])


def fixed_point(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """(Phi, A), int64: the logits below their maximum and ln pi, as multiples of 2^-40.

    A logit more than 2^20 below the maximum cannot win against any noise above -2^12, so that where it is
    clamped changes nothing; masked logits (-inf) lie below all of them.
    """
    logits, log_pi = logits.detach().double(), log_pi.detach().double()
    below = (logits - logits.amax(-1, keepdim=True)).clamp_min(LOWEST_LOGIT)
    phi = torch.where(logits == -torch.inf, MASKED, (below * RESOLUTION).round().long())
    return phi, (log_pi.clamp_min(LOWEST_NOISE) * RESOLUTION).round().long()


def argmin_sample(logits: Tensor, log_pi: Tensor) -> Tensor:
    """z = argmin_i (ln pi_i - phi_i), a sample of Cat(softmax(phi)): [..., C] -> [...]; ties go to the lowest index."""
    phi, a = fixed_point(logits, log_pi)
    return (a - phi).argmin(-1)
