"""`order`, `ask`, `merge` and `swap_with` of `arsm.kernels` for few categories, as one Triton kernel each: one program
per row.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.gpu_merge import swapped_with_z, weight_at
from arsm.kernels.gpu_noise import in_one_block
from arsm.kernels.gpu_order import STEP, below_largest, bounds_of, noise_at, swaps


@triton.jit
def _race(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """phi, a, and the first three of a row's race with their values."""
    c = tl.arange(0, BLOCK)
    mask = c < C
    x = tl.load(logits + row * C + c, mask=mask, other=float("-inf")).to(tl.float64)
    phi, a = below_largest(x, tl.max(x, 0)), noise_at(log_pi, row * C + c, mask)
    o = tl.where(mask, a - phi, float("inf"))
    best, z = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    o = tl.where(c == z, float("inf"), o)
    of_second, second = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    o = tl.where(c == second, float("inf"), o)
    of_third, third = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    return phi, a, best, z, of_second, second, of_third, third


@triton.jit
def _swaps(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """a, theta, who wins the pair (z, c) as `swaps` says it, and the first three of a row's race."""
    c = tl.arange(0, BLOCK)
    phi, a, _, z, _, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
    a_z, phi_z = tl.sum(tl.where(c == z, a, 0.0), 0), tl.sum(tl.where(c == z, phi, 0.0), 0)
    a_second, phi_second = tl.sum(tl.where(c == second, a, 0.0), 0), tl.sum(tl.where(c == second, phi, 0.0), 0)
    phi_second = tl.where(second == z, float("-inf"), phi_second)  # there is one category alone
    best, sum_z, bound_c, bound_z, with_second = bounds_of(a_z, phi_z, z, a_second, phi_second, second, third, of_third)
    theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
    return a, theta, code, z, second, third


@triton.jit
def _who_can_win(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """The first three of a row's race, and whether each category wins some pair."""
    c = tl.arange(0, BLOCK)
    mask = c < C
    a, theta, code, z, second, third = _swaps(logits, log_pi, row, C, BLOCK)
    least = tl.min(tl.where(mask & (c != z), a, float("inf")), 0)
    wins = (theta > least) | (code == 1) | (c == z)
    second_wins = tl.max((mask & (code == 2) & (c != second)).to(tl.int32), 0)
    third_wins = tl.max(((code == 2) & (c == second)).to(tl.int32), 0)
    return z, second, third, wins | ((c == second) & (second_wins > 0)) | ((c == third) & (third_wins > 0))


@triton.jit
def _order(logits, log_pi, ahead, can_win, C, BLOCK: tl.constexpr):
    """Run a row's race and say who can win."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    z, second, third, wins = _who_can_win(logits, log_pi, row, C, BLOCK)
    tl.store(ahead + row * 3, z.to(tl.int64))
    tl.store(ahead + row * 3 + 1, second.to(tl.int64))
    tl.store(ahead + row * 3 + 2, third.to(tl.int64))
    tl.store(can_win + row * C + c, wins.to(tl.int8), mask=c < C)


@triton.jit
def _ask(logits, log_pi, points, same_as, weight, R, C, BLOCK: tl.constexpr):
    """Run a row's race and ask for z, then for every other category that can win."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    z, _, _, wins = _who_can_win(logits, log_pi, row, C, BLOCK)
    tl.store(points + row, z.to(tl.int64))
    tl.store(same_as + row, tl.zeros([], tl.int64))
    at = (c + 1) * R + row
    tl.store(points + at, c.to(tl.int64), mask=c < C)
    tl.store(same_as + at, tl.where(wins & (c != z), c + 1, 0).to(tl.int64), mask=c < C)
    tl.store(weight, tl.full([], 1.0, tl.float32), mask=row == 0)


@triton.jit
def _merge(logits, log_pi, f, result, C, ROW, COLUMN, BLOCK: tl.constexpr):
    """A row's sums over all its pairs, less their mean."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    a, theta, code, z, second, third = _swaps(logits, log_pi, row, C, BLOCK)
    a = tl.where(mask & (c != z), a, float("inf"))
    theta = tl.where(mask & (c != z), theta, float("-inf"))
    d = tl.load(f + row * ROW + c * COLUMN, mask=mask, other=0.0).to(tl.float64)
    d = tl.where(mask, d - tl.sum(tl.where(c == z, d, 0.0), 0), 0.0)
    d_second, d_third = tl.sum(tl.where(c == second, d, 0.0), 0), tl.sum(tl.where(c == third, d, 0.0), 0)
    w = weight_at(log_pi, at, mask, C)
    w_z = tl.sum(tl.where(c == z, w, 0.0), 0)
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
    phi, a, best, z, of_second, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
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


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """ahead [..., 3] and can_win [..., C] for contiguous [..., C]; `merge` runs the race again."""
    batch, categories = logits.shape[:-1], logits.shape[-1]
    ahead = torch.empty((*batch, 3), dtype=torch.int64, device=logits.device)
    can_win = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    _order[(batch.numel(),)](logits, log_pi, ahead, can_win, categories, **in_one_block(categories))
    return ahead, can_win


def ask(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`arsm.kernels.ask` for contiguous [*B, 1, C]."""
    batch, categories = logits.shape[:-2], logits.shape[-1]
    points = torch.empty((1 + categories, *batch, 1), dtype=torch.int64, device=logits.device)
    same_as = torch.empty(points.shape[:-1], dtype=torch.int64, device=logits.device)
    weight = torch.empty(1, device=logits.device)
    rows = batch.numel()
    _ask[(rows,)](logits, log_pi, points, same_as, weight, rows, categories, **in_one_block(categories))
    return points, same_as, weight


def merge(logits: Tensor, log_pi: Tensor, f: Tensor) -> Tensor:
    """The gradient for contiguous [..., C]; f may have the categories first in memory."""
    rows, categories = f.shape[:-1].numel(), f.shape[-1]
    if f.movedim(-1, 0).is_contiguous():
        strides = (1, rows)
    else:
        f, strides = f.contiguous(), (categories, 1)
    gradient = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    _merge[(rows,)](logits, log_pi, f, gradient, categories, *strides, **in_one_block(categories))
    return gradient


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
