"""`arsm.kernels.pairs` and `merge_pairs` as Triton kernels.

A thread runs one race and swaps all its pairs; a program then compares the pairs of a
row, or sums them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.gpu_order import STEP, logit_at, noise_at

RACES = 32
"""Races per program, one for each thread."""
PARTS = 5
"""Programs that share the pairs of a race."""


@triton.jit
def _winner(
    a_low, phi_low, low, a_high, phi_high, high, z, best, second, of_second, third, of_third
):
    """z^{low<->high}: the first of low with the noise of high, high with that of low,
    and the best of the others.
    """
    of_low, of_high = a_high - phi_low, a_low - phi_high
    first_left = (z != low) & (z != high)
    second_left = (second != low) & (second != high)
    other = tl.where(first_left, z, tl.where(second_left, second, third))
    of_other = tl.where(first_left, best, tl.where(second_left, of_second, of_third))
    low_wins = (of_low < of_high + STEP) & (of_low < of_other + tl.where(low < other, STEP, 0.0))
    high_wins = (of_high < of_other + tl.where(high < other, STEP, 0.0)) & (low_wins == 0)
    return tl.where(low_wins, low, tl.where(high_wins, high, other))


@triton.jit
def _swap(logits, log_pi, table, N, INNER, C: tl.constexpr, BLOCK: tl.constexpr):
    """table [N / INNER, M, INNER]: each of N races, then all its pairs; programs share
    the pairs of a race.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = n < N
    # the first query of this race: M = 1 + C (C - 1) / 2 queries of INNER races lie together
    table += n + n // INNER * (C * (C - 1) // 2) * INNER
    largest = tl.full([BLOCK], float("-inf"), tl.float64)
    for c in tl.static_range(C):
        x = tl.load(logits + n * C + c, mask=here, other=0.0).to(tl.float64)
        largest = tl.maximum(largest, x)
    # the first three of the race, in one pass; ties leave the lower category ahead
    best = tl.full([BLOCK], float("inf"), tl.float64)
    of_second, of_third = best, best
    z = tl.zeros([BLOCK], tl.int32)
    second, third = z, z
    for c in tl.static_range(C):
        o = noise_at(log_pi, n * C + c, here) - logit_at(logits, n * C + c, here, largest)
        is_first = o < best
        is_second = o < of_second
        is_third = o < of_third
        of_third = tl.where(is_second, of_second, tl.where(is_third, o, of_third))
        third = tl.where(is_second, second, tl.where(is_third, c, third))
        of_second = tl.where(is_first, best, tl.where(is_second, o, of_second))
        second = tl.where(is_first, z, tl.where(is_second, c, second))
        best = tl.where(is_first, o, best)
        z = tl.where(is_first, c, z)
    tl.store(table, z.to(tl.int64), mask=here)
    # programs take turns with `low`: a small one has more pairs than a large one
    for low in range(tl.program_id(1), C, tl.num_programs(1)):
        a_low = noise_at(log_pi, n * C + low, here)
        phi_low = logit_at(logits, n * C + low, here, largest)
        for high in range(low + 1, C):
            a_high = noise_at(log_pi, n * C + high, here)
            phi_high = logit_at(logits, n * C + high, here, largest)
            found = _winner(
                a_low, phi_low, low, a_high, phi_high, high, z, best, second, of_second, third,
                of_third
            )  # fmt: skip
            m = low * (2 * C - low - 1) // 2 + high - low  # as `swap.pair_row` counts them
            tl.store(table + tl.cast(INNER, tl.int64) * m, found.to(tl.int64), mask=here)


@triton.jit
def _share(table, same_as, INNER, M, K: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first equal query of each, in one row of table [R / INNER, M, INNER, K]."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    query = row + (row // INNER * (M - 1) + m) * INNER
    # all queries against all, eight variables in one comparison
    differ = tl.where((m < M)[None, :], 0, tl.full([BLOCK_M, 1], 1, tl.int32))
    for start in tl.static_range(0, K, 8):
        code = tl.zeros([BLOCK_M], tl.int32)  # four bits tell two categories apart
        for k in tl.static_range(start, min(start + 8, K)):
            code |= tl.load(table + query * K + k, mask=m < M, other=0).to(tl.int32) << (
                4 * (k - start)
            )
        differ |= code[:, None] ^ code[None, :]
    first = tl.min(tl.where(differ == 0, m[None, :], BLOCK_M), 1)
    tl.store(same_as + query, first.to(tl.int64), mask=m < M)


def pairs(logits: Tensor, log_pi: Tensor, outer: int = 0) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.pairs` for contiguous [*B, K, C]; `outer` batch dimensions come
    before that of the queries.
    """
    *batch, variables, categories = logits.shape
    queries = 1 + categories * (categories - 1) // 2
    rows = logits.shape[:-2].numel()
    shape = (*batch[:outer], queries, *batch[outer:])
    inner = logits.shape[outer:-2].numel()
    table = torch.empty((*shape, variables), dtype=torch.int64, device=logits.device)
    same_as = torch.empty(shape, dtype=torch.int64, device=logits.device)
    races = rows * variables
    _swap[(triton.cdiv(races, RACES), min(categories, PARTS))](
        logits, log_pi, table, races, inner * variables, C=categories, BLOCK=RACES, num_warps=1
    )
    block = triton.next_power_of_2(queries)
    _share[(rows,)](
        table,
        same_as,
        inner,
        queries,
        K=variables,
        BLOCK_M=block,
        num_warps=1 if block <= 64 else 4,
    )
    return table, same_as


@triton.jit
def _merge(
    values,
    log_pi,
    gradient,
    INNER,
    K,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradient of one row of values [R / INNER, M, INNER]."""
    kind = gradient.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    values += row + row // INNER * (C * (C - 1) // 2) * INNER
    k, c = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    first = tl.load(values)
    total = tl.zeros([BLOCK_K, BLOCK_C], kind)

    even = 1.0 / tl.full([BLOCK_K], C, kind)
    for j in tl.static_range(0, BLOCK_C):
        low, high = tl.minimum(c, j), tl.maximum(c, j)
        pair = tl.where(low == high, 0, low * (2 * C - low - 1) // 2 + high - low)
        f = tl.load(values + pair * INNER, mask=(c < C) & (j < C), other=0.0)
        x = tl.load(log_pi + (row * K + k) * C + j, mask=(k < K) & (j < C), other=0.0)
        f = tl.where((c < C) & (j < C), f - first, 0.0)  # a constant in f cancels here
        total += (even - tl.exp(x).to(kind))[:, None] * f[None, :]
    # the mean over m, subtracted once from the sum instead of from every F_cj
    total -= (tl.sum(total, 1) / C)[:, None]
    here = (k < K)[:, None] & (c < C)[None, :]
    tl.store(gradient + (row * K + k[:, None]) * C + c[None, :], total, mask=here)


def merge_pairs(values: Tensor, log_pi: Tensor, outer: int = 0) -> Tensor:
    """`arsm.kernels.merge_pairs` for contiguous [M, *B] and [*B, K, C]; M comes after
    `outer` dimensions of *B.
    """
    variables, categories = log_pi.shape[-2:]
    rows = log_pi.shape[:-2].numel()
    inner = log_pi.shape[outer:-2].numel()
    gradient = torch.empty(log_pi.shape, dtype=values.dtype, device=values.device)
    _merge[(rows,)](
        values, log_pi, gradient, inner, variables, C=categories, BLOCK_K=max(4,
        triton.next_power_of_2(variables)),
        BLOCK_C=max(4, triton.next_power_of_2(categories)), num_warps=1,
    )  # fmt: skip
    return gradient
