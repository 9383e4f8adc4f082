"""`arsm.kernels.pairs` as one Triton kernel: a program runs a row's K races, then swaps and compares its pairs."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.gpu_order import STEP, below_largest, logit_at, noise_at


@triton.jit
def _pair(m, C):
    """The pair of row m of `swap.pair_table`: (0, 0), then all low < high in order."""
    low = m * 0
    for i in range(1, C):
        low += (m > i * (2 * C - i - 1) // 2).to(tl.int32)
    return low, tl.where(m > 0, m - low * (2 * C - low - 1) // 2 + low, 0)


@triton.jit
def _value(logits, log_pi, own, of_noise, of_logit, largest, mask):
    """a_i - phi_j in fixed point, i = of_noise and j = of_logit."""
    return noise_at(log_pi, own + of_noise, mask) - logit_at(logits, own + of_logit, mask, largest)


@triton.jit
def _swap(logits, log_pi, own, low, high, largest, z, best, second, of_second, third, of_third, mask):
    """z^{low<->high}: the first of low with the noise of high, high with that of low, and the best of the others."""
    of_low = _value(logits, log_pi, own, high, low, largest, mask)
    of_high = _value(logits, log_pi, own, low, high, largest, mask)
    first_left = (z != low) & (z != high)
    second_left = (second != low) & (second != high)
    other = tl.where(first_left, z, tl.where(second_left, second, third))
    of_other = tl.where(first_left, best, tl.where(second_left, of_second, of_third))
    low_wins = (of_low < of_high + STEP) & (of_low < of_other + tl.where(low < other, STEP, 0.0))
    high_wins = (of_high < of_other + tl.where(high < other, STEP, 0.0)) & (low_wins == 0)
    winner = tl.where(low_wins, low, tl.where(high_wins, high, other))
    return tl.where(low == high, z, winner)


@triton.jit
def _pairs(
    logits, log_pi, table, same_as, R, M, K, C,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, c = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    inside = (k < K)[:, None] & (c < C)[None, :]
    at = row * K * C + k[:, None] * C + c[None, :]
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float64)
    largest = tl.max(x, 1)
    o = noise_at(log_pi, at, inside) - below_largest(x, largest[:, None])
    o = tl.where(inside, o, float("inf"))
    best, z = tl.min(o, 1, return_indices=True, return_indices_tie_break_left=True)
    o = tl.where(c[None, :] == z[:, None], float("inf"), o)
    of_second, second = tl.min(o, 1, return_indices=True, return_indices_tie_break_left=True)
    o = tl.where(c[None, :] == second[:, None], float("inf"), o)
    of_third, third = tl.min(o, 1, return_indices=True, return_indices_tie_break_left=True)

    m = tl.arange(0, BLOCK_M)
    mask = (m < M)[:, None] & (k < K)[None, :]
    own = row * K * C + k[None, :] * C
    low, high = _pair(m, C)
    low, high = low[:, None], high[:, None]
    largest = largest[None, :]
    z, best, second = z[None, :], best[None, :], second[None, :]
    of_second, third, of_third = of_second[None, :], third[None, :], of_third[None, :]
    found = _swap(logits, log_pi, own, low, high, largest, z, best, second, of_second, third, of_third, mask)
    place = (m[:, None] * R + row) * K + k[None, :]
    tl.store(table + place, found.to(tl.int64), mask=mask)

    # four bits per variable tell two vectors apart exactly, 16 variables at a time
    equal = (m < M)[None, :] & (m < M)[:, None]
    for start in tl.static_range(0, BLOCK_K, 16):
        inside = mask & (k >= start)[None, :] & (k < start + 16)[None, :]
        shift = ((k - start) * 4).to(tl.int64)[None, :]
        code = tl.sum(tl.where(inside, found.to(tl.int64) << shift, 0), 1)
        equal = equal & (code[:, None] == code[None, :])
    first = tl.min(tl.where(equal, m[None, :], BLOCK_M), 1)
    tl.store(same_as + m * R + row, first.to(tl.int64), mask=m < M)


def pairs(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.pairs` for contiguous [*B, K, C]."""
    *batch, variables, categories = logits.shape
    queries, rows = 1 + categories * (categories - 1) // 2, logits.shape[:-2].numel()
    table = torch.empty((queries, *batch, variables), dtype=torch.int64, device=logits.device)
    same_as = torch.empty((queries, *batch), dtype=torch.int64, device=logits.device)
    _pairs[(rows,)](
        logits, log_pi, table, same_as, rows, queries, variables, categories,
        BLOCK_M=triton.next_power_of_2(queries), BLOCK_K=max(4, triton.next_power_of_2(variables)),
        BLOCK_C=max(4, triton.next_power_of_2(categories)), num_warps=8,
    )  # fmt: skip
    return table, same_as
