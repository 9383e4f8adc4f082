"""`arsm.kernels.order` and `arsm.kernels.merge` of few categories as one Triton kernel each: one program per row."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import STATE
from arsm.kernels.gpu_merge import weight_at
from arsm.kernels.gpu_order import (
    LARGEST,
    below_largest,
    bounds_of,
    keep_bounds,
    load_bounds,
    logit_at,
    noise_at,
    swaps,
)


@triton.jit
def _order(logits, log_pi, ahead, state, can_win, C, S, BLOCK: tl.constexpr):
    """Run a row's race and say who can win."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = tl.load(logits + row * C + c, mask=mask, other=float("-inf")).to(tl.float64)
    largest = tl.max(x, 0)
    phi, a = below_largest(x, largest), noise_at(log_pi, row * C + c, mask)
    o = tl.where(mask, a - phi, float("inf"))
    z = tl.argmin(o, 0)
    o = tl.where(c == z, float("inf"), o)
    second = tl.argmin(o, 0)
    o = tl.where(c == second, float("inf"), o)
    of_third, third = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    own = state + row * S
    a_z, phi_z = tl.sum(tl.where(c == z, a, 0.0), 0), tl.sum(tl.where(c == z, phi, 0.0), 0)
    a_second, phi_second = tl.sum(tl.where(c == second, a, 0.0), 0), tl.sum(tl.where(c == second, phi, 0.0), 0)
    phi_second = tl.where(second == z, float("-inf"), phi_second)  # there is one category alone
    best, sum_z, bound_c, bound_z, with_second = bounds_of(a_z, phi_z, z, a_second, phi_second, second, third, of_third)
    keep_bounds(own, best, sum_z, bound_c, bound_z, with_second)
    tl.store(own + LARGEST, largest)
    tl.store(ahead + row * 3, z.to(tl.int64))
    tl.store(ahead + row * 3 + 1, second.to(tl.int64))
    tl.store(ahead + row * 3 + 2, third.to(tl.int64))
    theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
    least = tl.min(tl.where(mask & (c != z), a, float("inf")), 0)
    wins = (theta > least) | (code == 1) | (c == z)
    second_wins = tl.max((mask & (code == 2) & (c != second)).to(tl.int32), 0)
    third_wins = tl.max(((code == 2) & (c == second)).to(tl.int32), 0)
    wins = wins | ((c == second) & (second_wins > 0)) | ((c == third) & (third_wins > 0))
    tl.store(can_win + row * C + c, wins.to(tl.int8), mask=mask)


@triton.jit
def _merge(logits, log_pi, ahead, state, f, result, centre, C, S, BLOCK: tl.constexpr):
    """A row's sums over all its pairs, and their mean."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    z, second, third = tl.load(ahead + row * 3), tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    a, phi = noise_at(log_pi, at, mask), logit_at(logits, at, mask, tl.load(state + row * S + LARGEST))
    best, sum_z, bound_c, bound_z, with_second = load_bounds(state + row * S)
    theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
    a = tl.where(mask & (c != z), a, float("inf"))
    theta = tl.where(mask & (c != z), theta, float("-inf"))
    f_z = tl.load(f + row * C + z).to(tl.float64)
    d = tl.where(mask, tl.load(f + at, mask=mask, other=0.0).to(tl.float64) - f_z, 0.0)
    d_second = tl.load(f + row * C + second).to(tl.float64) - f_z
    d_third = tl.load(f + row * C + third).to(tl.float64) - f_z
    w, w_z = weight_at(log_pi, at, mask, C), weight_at(log_pi, row * C + z, True, C)
    swapped = tl.where(code == 1, d, tl.where(code == 2, tl.where(c == second, d_third, d_second), 0.0))
    swapped = tl.where(mask, swapped, 0.0)

    first = tl.sum(tl.where(a[None, :] < theta[:, None], w[None, :], 0.0), 1)
    second_sum = tl.sum(tl.where(a[:, None] < theta[None, :], (w * d)[None, :], 0.0), 1)
    sums = tl.where(c == z, tl.sum(swapped * w, 0), d * first + second_sum + swapped * w_z)
    tl.store(result + at, sums, mask=mask)
    tl.store(centre + row, tl.sum(tl.where(mask, sums, 0.0), 0) / C)


def _size(categories: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(categories))
    return {"BLOCK": block, "num_warps": 1 if block == 16 else 4}


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ahead [..., 3], can_win [..., C] and state [..., STATE] for contiguous [..., C]."""
    batch, categories = logits.shape[:-1], logits.shape[-1]
    ahead = torch.empty((*batch, 3), dtype=torch.int64, device=logits.device)
    state = torch.empty((*batch, STATE), dtype=torch.float64, device=logits.device)
    can_win = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    _order[(batch.numel(),)](logits, log_pi, ahead, state, can_win, categories, STATE, **_size(categories))
    return ahead, can_win, state


def merge(logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.merge` for contiguous [..., C]."""
    batch, categories = f.shape[:-1], f.shape[-1]
    sums, centre = torch.empty_like(f), torch.empty((*batch, 1), dtype=torch.float64, device=f.device)
    _merge[(batch.numel(),)](logits, log_pi, ahead, state, f, sums, centre, categories, STATE, **_size(categories))
    return sums, centre
