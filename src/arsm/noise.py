"""Dirichlet noise in log space, and the fixed-point race that it runs against the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from arsm import kernels
from arsm.checks import check_given
from arsm.kernels.two_ways import exponential

# The race is run in fixed point, multiples of 2^-40 below 2^13: float64 adds, subtracts and
# compares those exactly, so all ways of computing a pseudo action agree at near ties.
RESOLUTION = 2.0**-40
LOWEST = -(2.0**11)
LARGEST = 2.0**10
TO_FIXED = 1.5 * 2.0**52 * RESOLUTION
"""Added to x, it rounds x to a multiple of the resolution, half to even, in the last
bits of the sum.
"""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 if the input is float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def race_noise(
    logits: Tensor,
    generator: torch.Generator | None = None,
    z: Tensor | None = None,
    draws: int | None = None,
) -> Tensor:
    """ln pi from `dirichlet`; with z [*B, K], given that z wins the (first) race."""
    log_pi = dirichlet(logits, generator, draws)
    if z is None:
        return log_pi
    check_given(logits, z)
    if draws is None:
        return _given_winner_exactly(logits, z, log_pi)
    # z is the sample of the first race, the others are free
    first = _given_winner_exactly(logits, z, log_pi[..., 0, :, :])
    rest = log_pi[..., 1:, :, :].double()
    return torch.cat([first.unsqueeze(-3), rest], -3)


def _given_winner_exactly(logits: Tensor, z: Tensor, log_pi: Tensor) -> Tensor:
    """As `given_winner`, normalised, in float64, and adjusted so that z wins the
    fixed-point race despite rounding.
    """
    logits = logits.detach().double()
    log_pi = given_winner(logits, z, log_pi.double())
    log_pi = log_pi - log_pi.logsumexp(-1, keepdim=True)
    wins = torch.arange(logits.shape[-1], device=z.device) == z.unsqueeze(-1)
    phi = logits - logits.amax(-1, keepdim=True)
    runner_up = (log_pi - phi).masked_fill(wins, torch.inf).amin(-1, keepdim=True)
    # each of the numbers compared is rounded by at most half a unit
    highest = runner_up + phi - 4 * RESOLUTION
    return torch.where(wins, torch.minimum(log_pi, highest), log_pi)


def dirichlet(
    logits: Tensor, generator: torch.Generator | None = None, draws: int | None = None
) -> Tensor:
    """ln pi with pi ~ Dir(1_C): [*B, K, C], or [*B, draws, K, C]."""
    if draws is not None:
        logits = repeat_draws(logits, draws)
    like = logits.detach()
    dtype = _noise_dtype(logits)
    return kernels.log_dirichlet(
        like, dtype, generator, lambda: _normalised(like, dtype, generator)
    )


def _normalised(like: Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """ln pi = ln E - ln sum E with exponentials E: [..., C] in a dtype."""
    clocks = _exponential(like, generator)
    total = clocks.sum(-1, keepdim=True).log()
    # in place, since a CPU takes longer to allocate than to compute
    return clocks.log_().sub_(total).to(dtype)


def _noise_dtype(logits: Tensor) -> torch.dtype:
    """With very many categories draw in float64: the smallest exponentials would tie in float32."""
    return torch.float64 if logits.shape[-1] >= 100_000 else working_dtype(logits.dtype)


def _exponential(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Positive and finite Exp(1) noise."""
    noise = exponential(like, _noise_dtype(like), generator)
    # compiled for a GPU, one draw in 2^31 is infinite
    return noise.clamp(torch.finfo(noise.dtype).tiny, LARGEST)


def given_winner(logits: Tensor, z: Tensor, log_pi: Tensor) -> Tensor:
    """The noise of a race that z won, up to a constant per row, from fresh noise: [...,
    C], z [...] -> [..., C].

        E_z = p_z pi_z,    E_i = pi_i + p_i pi_z,    p = softmax(phi)

    Without the noise's sum, E_i / p_i are exponential clocks of rates p_i: the first to
    ring does so after an Exp(1) time, whichever it is, and the others, having no
    memory, start afresh from there. If z is a sample of Cat(p), ln E has the
    distribution of fresh noise.
    """
    dtype = working_dtype(logits.dtype)
    log_p = logits.detach().to(dtype).log_softmax(-1)
    log_pi = log_pi.to(dtype)
    first = log_p + log_pi.gather(-1, z.unsqueeze(-1))
    wins = torch.arange(logits.shape[-1], device=z.device) == z.unsqueeze(-1)
    return torch.where(wins, first, torch.logaddexp(log_pi, first))


def repeat_draws(logits: Tensor, draws: int) -> Tensor:
    """[*B, K, C] -> [*B, draws, K, C], without copying."""
    return logits.unsqueeze(-3).expand(*logits.shape[:-2], draws, *logits.shape[-2:])


def fixed_point(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """(phi, a): the logits below their maximum and ln pi, in float64 rounded to multiples of 2^-40.

    ln pi of a float64 draw is above -800: a logit 2^11 below the maximum never wins,
    nor does any lower one. Masked logits stay -inf.
    """
    logits = logits.detach()
    log_pi = log_pi.detach()
    phi = _round(logits.double() - logits.amax(-1, keepdim=True), LOWEST)
    phi = phi.masked_fill_(logits == -torch.inf, -torch.inf)
    a = _round(log_pi.to(torch.float64, copy=True), LOWEST / 2)  # a copy, as it rounds in place
    return phi, a


def _round(x: Tensor, lowest: float) -> Tensor:
    """x in fixed point, clamped to the lowest value; in place, since a CPU takes longer
    to allocate than to round.
    """
    return x.clamp_min_(lowest).mul_(1 / RESOLUTION).round_().mul_(RESOLUTION)


def argmin_sample(logits: Tensor, log_pi: Tensor) -> Tensor:
    """z = argmin_i (ln pi_i - phi_i), a sample of Cat(softmax(phi)): [..., C] -> [...];
    ties go to the lowest index.

    In the noise's own precision: the fixed point is for comparing swaps.
    """
    logits = logits.detach().to(torch.promote_types(logits.dtype, log_pi.dtype))
    return (log_pi - (logits - logits.amax(-1, keepdim=True))).argmin(-1)
