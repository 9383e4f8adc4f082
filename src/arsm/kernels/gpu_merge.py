"""`arsm.kernels.merge` as Triton kernels: static shapes, no synchronisation, sums in fixed point.

int64 sums are the same in every order of summation, so that a run repeats to the bit.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.gpu_order import chunks_of

AT_ONCE = 1 << 22
"""Categories whose sums are held at one time, 16 bytes each."""


@triton.jit
def _weight(log_pi, at, mask, C):
    """w = 1/C - pi; the division of two literals would be one of float32."""
    pi = tl.exp(tl.load(log_pi + at, mask=mask, other=0.0).to(tl.float64))
    return tl.full([], 1.0, tl.float64) / C - pi


@triton.jit
def _clear(ahead, noise_sums, value_sums, C, BLOCK: tl.constexpr):
    """Zeros where the ordered elements will be summed: [R, C + 1] int64 each."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    count = tl.load(ahead + row * 4 + 3)
    if start <= count:
        k = start + tl.arange(0, BLOCK)
        zero = tl.zeros([BLOCK], tl.int64)
        tl.store(noise_sums + row * (C + 1) + k, zero, mask=k <= count)
        tl.store(value_sums + row * (C + 1) + k, zero, mask=k <= count)


@triton.jit
def _scales(highest, low, high, f, ahead, row, C):
    """f(z), and units per 1 of the sums of w and of w d, chosen so that no sum of C terms overflows."""
    f_z = tl.load(f + row * C + tl.load(ahead + row * 4)).to(tl.float64)
    top = tl.maximum(tl.exp(tl.load(highest + row).to(tl.float64)), tl.full([], 1.0, tl.float64) / C)
    spread = tl.maximum(tl.load(high + row).to(tl.float64) - f_z, f_z - tl.load(low + row).to(tl.float64))
    of_noise = 2305843009213693952.0 / (top * C)  # 2^61
    return f_z, of_noise, of_noise / tl.where(spread > 0, spread, 1.0)


@triton.jit
def _deposit(log_pi, ahead, wins, rank, f, highest, low, high, noise_sums, value_sums, C, BLOCK: tl.constexpr):
    """w at its rank, w d at the number of wins."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    f_z, of_noise, of_values = _scales(highest, low, high, f, ahead, row, C)
    w = _weight(log_pi, at, mask, C)
    d = tl.load(f + at, mask=mask, other=0.0).to(tl.float64) - f_z
    place, won = tl.load(rank + at, mask=mask, other=0), tl.load(wins + at, mask=mask, other=0)
    ordered = mask & (place < tl.load(ahead + row * 4 + 3))
    tl.store(noise_sums + row * (C + 1) + place, (w * of_noise).to(tl.int64), mask=ordered)
    tl.atomic_add(value_sums + row * (C + 1) + won, (w * d * of_values).to(tl.int64), mask=mask & (won > 0))


@triton.jit
def _accumulate(ahead, noise_sums, value_sums, totals, C, BLOCK: tl.constexpr):
    """In place: the sums of w before each rank, and those of w d up to each number of wins; totals [R]."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(ahead + row * 4 + 3)
    k = tl.arange(0, BLOCK)
    before = tl.zeros([1], tl.int64)
    total = tl.zeros([1], tl.int64)
    start = 0
    while start <= count:
        mask = start + k <= count
        at = row * (C + 1) + start + k
        w = tl.load(noise_sums + at, mask=mask, other=0)
        v = tl.load(value_sums + at, mask=mask, other=0)
        tl.store(noise_sums + at, before + tl.cumsum(w, 0) - w, mask=mask)
        tl.store(value_sums + at, total + tl.cumsum(v, 0), mask=mask)
        before += tl.sum(w, 0)
        total += tl.sum(v, 0)
        start += BLOCK
    tl.store(totals + row + tl.zeros([1], tl.int32), total)


@triton.jit
def _collect(
    log_pi,
    ahead,
    with_z,
    wins,
    rank,
    f,
    highest,
    low,
    high,
    noise_sums,
    value_sums,
    totals,
    sums,
    parts,
    C,
    P,
    BLOCK: tl.constexpr,
):
    """R_c for c != z, and this chunk's share of sum_c R_c and of R_z: parts [R, 2, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    z, second, third = tl.load(ahead + row * 4), tl.load(ahead + row * 4 + 1), tl.load(ahead + row * 4 + 2)
    f_z, of_noise, of_values = _scales(highest, low, high, f, ahead, row, C)
    w = _weight(log_pi, at, mask, C)
    w_z = _weight(log_pi, row * C + z, True, C)
    d = tl.load(f + at, mask=mask, other=0.0).to(tl.float64) - f_z
    d_second = tl.load(f + row * C + second).to(tl.float64) - f_z
    d_third = tl.load(f + row * C + third).to(tl.float64) - f_z

    code = tl.load(with_z + at, mask=mask, other=0)
    swapped = tl.where(code == 1, d, tl.where(code == 2, tl.where(c == second, d_third, d_second), 0.0))
    place, won = tl.load(rank + at, mask=mask, other=0), tl.load(wins + at, mask=mask, other=0)
    ordered = mask & (place < tl.load(ahead + row * 4 + 3))
    first = tl.load(noise_sums + row * (C + 1) + won, mask=mask & (won > 0), other=0).to(tl.float64)
    total = tl.load(totals + row)
    above = total - tl.load(value_sums + row * (C + 1) + place, mask=ordered, other=0)
    second_sum = tl.where(ordered, above.to(tl.float64), 0.0)
    result = d * (first / of_noise) + second_sum / of_values + swapped * w_z
    result = tl.where(mask & (c != z), result, 0.0)
    tl.store(sums + at, result, mask=mask)
    tl.store(parts + row * 2 * P + chunk, tl.sum(result, 0))
    tl.store(parts + row * 2 * P + P + chunk, tl.sum(tl.where(mask, swapped * w, 0.0), 0))


@triton.jit
def _centre(ahead, sums, parts, C, P, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """Put R_z in its place and subtract the mean."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, BLOCK_P)
    others = tl.sum(tl.load(parts + row * 2 * P + p, mask=p < P, other=0.0), 0)
    of_z = tl.sum(tl.load(parts + row * 2 * P + P + p, mask=p < P, other=0.0), 0)
    result = tl.load(sums + row * C + c, mask=c < C, other=0.0).to(tl.float64)
    result = tl.where(c == tl.load(ahead + row * 4), of_z, result) - (others + of_z) / C
    tl.store(sums + row * C + c, result, mask=c < C)


def merge(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    """`arsm.kernels.merge` for rows [R, C]."""
    rows, categories = f.shape
    sums = torch.empty_like(f)
    highest, (low, high) = log_pi.amax(-1), f.aminmax(dim=-1)
    step = max(1, AT_ONCE // categories)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _merge_rows(*(x[part] for x in (log_pi, ahead, with_z, wins, rank, f, highest, low, high, sums)))
    return sums


def _merge_rows(
    log_pi: Tensor,
    ahead: Tensor,
    with_z: Tensor,
    wins: Tensor,
    rank: Tensor,
    f: Tensor,
    highest: Tensor,
    low: Tensor,
    high: Tensor,
    sums: Tensor,
) -> None:
    rows, categories = f.shape
    block, chunks = chunks_of(categories)
    grid = (rows, chunks)
    noise_sums, value_sums = (f.new_empty((rows, categories + 1), dtype=torch.int64) for _ in range(2))
    totals = f.new_empty(rows, dtype=torch.int64)
    parts = f.new_empty((rows, 2, chunks), dtype=torch.float64)
    scale = (highest, low, high)
    _clear[(rows, triton.cdiv(categories + 1, block))](ahead, noise_sums, value_sums, categories, BLOCK=block)
    _deposit[grid](log_pi, ahead, wins, rank, f, *scale, noise_sums, value_sums, categories, BLOCK=block)
    _accumulate[(rows,)](ahead, noise_sums, value_sums, totals, categories, BLOCK=4096, num_warps=16)
    _collect[grid](
        log_pi, ahead, with_z, wins, rank, f, *scale, noise_sums, value_sums, totals, sums, parts, categories, chunks,
        BLOCK=block,
    )  # fmt: skip
    _centre[grid](ahead, sums, parts, categories, chunks, BLOCK=block, BLOCK_P=max(16, triton.next_power_of_2(chunks)))
