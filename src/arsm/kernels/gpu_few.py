"""`arsm.kernels.order`, `arsm.kernels.merge` and `arsm.kernels.swap_with` of few categories as one Triton kernel each:
one program per row.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import STATE
from arsm.kernels.gpu_merge import swapped_with_z, weight_at
from arsm.kernels.gpu_noise import in_one_block
from arsm.kernels.gpu_order import (
    LARGEST,
    STEP,
    below_largest,
    bounds_of,
    keep_bounds,
    load_bounds,
    logit_at,
    noise_at,
    swaps,
)


@triton.jit
def _race(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """phi, a, the largest logit, and the first three of a row's race with their values."""
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = tl.load(logits + row * C + c, mask=mask, other=float("-inf")).to(tl.float64)
    largest = tl.max(x, 0)
    phi, a = below_largest(x, largest), noise_at(log_pi, row * C + c, mask)
    o = tl.where(mask, a - phi, float("inf"))
    best, z = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    o = tl.where(c == z, float("inf"), o)
    of_second, second = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    o = tl.where(c == second, float("inf"), o)
    of_third, third = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    return phi, a, largest, best, z, of_second, second, of_third, third


@triton.jit
def _order(logits, log_pi, ahead, state, can_win, C, S, BLOCK: tl.constexpr):
    """Run a row's race and say who can win."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    phi, a, largest, _, z, _, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
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
def _merge(logits, log_pi, ahead, state, f, result, C, S, ROW, COLUMN, BLOCK: tl.constexpr):
    """A row's sums over all its pairs, less their mean."""
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
    d = tl.load(f + row * ROW + c * COLUMN, mask=mask, other=0.0).to(tl.float64)
    d = tl.where(mask, d - tl.sum(tl.where(c == z, d, 0.0), 0), 0.0)
    d_second, d_third = tl.sum(tl.where(c == second, d, 0.0), 0), tl.sum(tl.where(c == third, d, 0.0), 0)
    w, w_z = weight_at(log_pi, at, mask, C), weight_at(log_pi, row * C + z, True, C)
    swapped = tl.where(mask, swapped_with_z(c, code, second, d, d_second, d_third), 0.0)

    first = tl.sum(tl.where(a[None, :] < theta[:, None], w[None, :], 0.0), 1)
    second_sum = tl.sum(tl.where(a[:, None] < theta[None, :], (w * d)[None, :], 0.0), 1)
    sums = tl.where(c == z, tl.sum(swapped * w, 0), d * first + second_sum + swapped * w_z)
    tl.store(result + at, sums - tl.sum(tl.where(mask, sums, 0.0), 0) / C, mask=mask)


@triton.jit
def _swap_with(logits, log_pi, references, winner, pseudo, weight, won, C, J, K, BLOCK: tl.constexpr):
    """Swap every c of a row with each of its references; for one variable, also say who wins."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    phi, a, _, best, z, of_second, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
    tl.store(winner + row, z.to(tl.int64))
    if K == 1:
        tl.store(won + row * C + c, tl.zeros([BLOCK], tl.int8), mask=mask)
        tl.debug_barrier()
    own, variable = row // K, row % K
    i = 0
    while i < J:
        at = (own * J + i) * K + variable
        j = tl.load(references + at).to(tl.int32)
        # the best two without j, then the best without j and c
        is_z, low = j == z, (j == z) | (j == second)
        first, of_first = tl.where(is_z, second, z), tl.where(is_z, of_second, best)
        other = tl.where(c == first, tl.where(low, third, second), first)
        of_other = tl.where(c == first, tl.where(low, of_third, of_second), of_first)
        of_c = tl.sum(tl.where(c == j, a, 0.0), 0) - phi
        of_j = a - tl.sum(tl.where(c == j, phi, 0.0), 0)
        c_wins = (of_c < of_j + tl.where(c < j, STEP, 0.0)) & (of_c < of_other + tl.where(c < other, STEP, 0.0))
        j_wins = of_j < of_other + tl.where(j < other, STEP, 0.0)
        found = tl.where(c_wins, c, tl.where(j_wins, j, other))
        tl.store(pseudo + at * C + c, found, mask=mask)
        tl.store(weight + at, C * weight_at(log_pi, row * C + j, True, C))
        if K == 1:
            tl.store(won + row * C + found, tl.full([BLOCK], 1, tl.int8), mask=mask)
        i += 1


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ahead [..., 3], can_win [..., C] and state [..., STATE] for contiguous [..., C]."""
    batch, categories = logits.shape[:-1], logits.shape[-1]
    ahead = torch.empty((*batch, 3), dtype=torch.int64, device=logits.device)
    state = torch.empty((*batch, STATE), dtype=torch.float64, device=logits.device)
    can_win = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    _order[(batch.numel(),)](logits, log_pi, ahead, state, can_win, categories, STATE, **in_one_block(categories))
    return ahead, can_win, state


def merge(logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient and no mean, for contiguous [..., C]; f may have the categories first in memory."""
    batch, categories = f.shape[:-1], f.shape[-1]
    rows = batch.numel()
    gradient = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    if f.movedim(-1, 0).is_contiguous():
        strides = (1, rows)
    else:
        f, strides = f.contiguous(), (categories, 1)
    _merge[(rows,)](logits, log_pi, ahead, state, f, gradient, categories, STATE, *strides, **in_one_block(categories))
    return gradient, torch.empty((*batch, 0), dtype=torch.float64, device=f.device)


def swap_with(logits: Tensor, log_pi: Tensor, references: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`arsm.kernels.swap_with` for contiguous tensors."""
    batch, count, (variables, categories) = logits.shape[:-2], references.shape[-2], logits.shape[-2:]
    z = torch.empty((*batch, variables), dtype=torch.int64, device=logits.device)
    pseudo = torch.empty((*batch, count, variables, categories), dtype=torch.int64, device=logits.device)
    weight = torch.empty((*batch, count, variables), dtype=torch.float64, device=logits.device)
    won = torch.empty((*batch, 1, categories if variables == 1 else 0), dtype=torch.bool, device=logits.device)
    _swap_with[(z.numel(),)](
        logits, log_pi, references, z, pseudo, weight, won.view(torch.int8), categories, count, variables,
        **in_one_block(categories),
    )  # fmt: skip
    return z, pseudo, weight, won
