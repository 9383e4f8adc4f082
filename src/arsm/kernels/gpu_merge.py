"""`arsm.kernels.merge` as Triton kernels: static shapes, no synchronisation.

The elements below the limit are picked and put in order by a counting sort: they fall into buckets that are evenly
filled, since pi is uniform below a small limit, and are compared exactly within a bucket. Atomics decide which element
takes which place of a bucket, and nothing else depends on them. One pass over all categories then looks each theta up
in that order. Sums over categories are int64 in fixed point, the same in every order of summation, so that a run
repeats to the bit.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import STATE
from arsm.kernels.gpu_order import (
    HIGHEST,
    LIMIT,
    chunks_of,
    noise_at,
    swaps_of,
)

AT_ONCE = 1 << 23
"""Categories whose order and sums are held at one time, 28 bytes each."""
BUCKETS = 8192
"""Most buckets per row."""
BINS = tl.constexpr(8)
"""Most categories win against fewer references than this: each chunk adds those up by itself before all chunks do."""
PER_LN2 = tl.constexpr(1.4426950408889634)


@triton.jit
def _bucket(x, limit, count: tl.constexpr):
    """A bucket that never decreases with x <= limit, near count e^(x - limit): 2^-n (1 - r/2) for n + r nats / ln 2."""
    s = tl.minimum((limit - x) * PER_LN2, 1000.0)
    n = tl.floor(s)
    power = ((1023 - n.to(tl.int64)) << 52).to(tl.float64, bitcast=True)
    return tl.minimum((power * (1 - 0.5 * (s - n)) * count).to(tl.int32), count - 1)


@triton.jit
def weight_at(log_pi, at, mask, C):
    """w = 1/C - pi; the division of two literals would be one of float32."""
    pi = tl.exp(tl.load(log_pi + at, mask=mask, other=0.0).to(tl.float64))
    return tl.full([], 1.0, tl.float64) / C - pi


@triton.jit
def _per_weight(state, C):
    """Units per 1 of the sums of w, chosen so that no sum of C terms overflows."""
    top = tl.maximum(tl.exp(tl.load(state + HIGHEST)), tl.full([], 1.0, tl.float64) / C)
    return 2305843009213693952.0 / (top * C)  # 2^61


@triton.jit
def _per_value(state, spread, C, P, BLOCK_P: tl.constexpr):
    """The same for the sums of w d: spread [P] has the largest |d| of each chunk."""
    p = tl.arange(0, BLOCK_P)
    largest = tl.max(tl.load(spread + p, mask=p < P, other=0.0), 0)
    return _per_weight(state, C) / tl.where(largest > 0, largest, 1.0)


# ---------------------------------------------------------------- the order


@triton.jit
def _select(log_pi, ahead, state, f, totals, members, spread, C, P, S, BLOCK: tl.constexpr):
    """The elements below the limit, in any order, and the largest |d|: members [R, C], totals [R], spread [R, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    z = tl.load(ahead + row * 3)
    f_z = tl.load(f + row * C + z).to(tl.float64)
    d = tl.where(mask, tl.load(f + at, mask=mask, other=0.0).to(tl.float64) - f_z, 0.0)
    tl.store(spread + row * P + chunk, tl.max(tl.abs(d), 0))
    active = mask & (c != z) & (noise_at(log_pi, at, mask) < tl.load(state + row * S + LIMIT))
    found = active.to(tl.int32)
    total = tl.sum(found, 0)
    if total > 0:
        start = tl.atomic_add(totals + row, total)
        tl.store(members + row * C + start + tl.cumsum(found, 0) - 1, c, mask=active)


@triton.jit
def _count(log_pi, state, totals, members, counts, C, S, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """How many elements fall into each bucket: counts [R, BUCKETS]."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    total = tl.load(totals + row)
    if start < total:
        k = start + tl.arange(0, BLOCK)
        c = tl.load(members + row * C + k, mask=k < total, other=0)
        limit = tl.load(state + row * S + LIMIT)
        bucket = _bucket(tl.minimum(noise_at(log_pi, row * C + c, k < total), limit), limit, BUCKETS)
        tl.atomic_add(counts + row * BUCKETS + bucket, 1, mask=k < total)


@triton.jit
def _starts(counts, starts, cursors, BUCKETS: tl.constexpr):
    """Where each bucket starts, and their total: [R, BUCKETS + 1]; cursors [R, BUCKETS] start there."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BUCKETS)
    count = tl.load(counts + row * BUCKETS + b)
    start = tl.cumsum(count, 0) - count
    tl.store(starts + row * (BUCKETS + 1) + b, start)
    tl.store(starts + row * (BUCKETS + 1) + BUCKETS, tl.sum(count, 0))
    tl.store(cursors + row * BUCKETS + b, start)


@triton.jit
def _fill(
    log_pi, state, starts, cursors, members, bucketed, value_sums, C, S, BLOCK: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """Put the elements into their buckets, bucketed [R, C], and zeros where values will be summed, [R, C + 1]."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    k = start + tl.arange(0, BLOCK)
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    if start <= count:
        tl.store(value_sums + row * (C + 1) + k, tl.zeros([BLOCK], tl.int64), mask=k <= count)
    if start < count:
        mask = k < count
        c = tl.load(members + row * C + k, mask=mask, other=0)
        limit = tl.load(state + row * S + LIMIT)
        bucket = _bucket(tl.minimum(noise_at(log_pi, row * C + c, mask), limit), limit, BUCKETS)
        place = tl.atomic_add(cursors + row * BUCKETS + bucket, 1, mask=mask)
        tl.store(bucketed + row * C + place, c, mask=mask)


@triton.jit
def _rank(
    log_pi, state, starts, bucketed, members, ordered, noise_sums, C, S, BLOCK: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """Put index, a and w at their ranks: members and ordered [R, C], noise_sums [R, C + 1]."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    if start < count:
        k = start + tl.arange(0, BLOCK)
        mask = k < count
        c = tl.load(bucketed + row * C + k, mask=mask, other=0)
        a, limit = noise_at(log_pi, row * C + c, mask), tl.load(state + row * S + LIMIT)
        at = starts + row * (BUCKETS + 1) + _bucket(tl.minimum(a, limit), limit, BUCKETS)
        first = tl.load(at, mask=mask, other=0)
        stop = tl.load(at + 1, mask=mask, other=0)
        rank = first
        longest = tl.max(stop - first, 0)
        i = 0
        while i < longest:
            inside = first + i < stop
            member = tl.load(bucketed + row * C + first + i, mask=inside, other=0)
            other = noise_at(log_pi, row * C + member, inside)
            rank += (inside & ((other < a) | ((other == a) & (member < c)))).to(tl.int32)
            i += 1
        tl.store(members + row * C + rank, c, mask=mask)
        tl.store(ordered + row * C + rank, a, mask=mask)
        w = weight_at(log_pi, row * C + c, mask, C) * _per_weight(state + row * S, C)
        tl.store(noise_sums + row * (C + 1) + rank, w.to(tl.int64), mask=mask)


@triton.jit
def _prefix(
    log_pi, ahead, state, spread, starts, noise_sums, scales, C, P, S,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """In place: the sum of w over the ranks below r, r = 0..count; scales [R, 3]: the units of both sums, and w_z."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    k = tl.arange(0, BLOCK)
    before = tl.zeros([1], tl.int64)
    start = 0
    while start <= count:
        at = noise_sums + row * (C + 1) + start + k
        w = tl.load(at, mask=start + k < count, other=0)
        tl.store(at, before + tl.cumsum(w, 0) - w, mask=start + k <= count)
        before += tl.sum(w, 0)
        start += BLOCK
    own = state + row * S
    tl.store(scales + row * 3, 1 / _per_weight(own, C))
    tl.store(scales + row * 3 + 1, _per_value(own, spread + row * P, C, P, BLOCK_P))
    tl.store(scales + row * 3 + 2, weight_at(log_pi, row * C + tl.load(ahead + row * 3), True, C))


# ---------------------------------------------------------------- the sums


@triton.jit
def _sum(
    logits, log_pi, ahead, state, f, scales, starts, ordered, noise_sums, value_sums, sums, parts, C, P, S,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """R_c without its second sum, whose terms w d are added at place r_c of value_sums.

    sums [R, C] are zero for z; parts [R, 2, P] are this chunk's shares of sum_c R_c and of R_z.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    z, second, third = tl.load(ahead + row * 3), tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    theta, code = swaps_of(logits, log_pi, ahead, state, row, c, mask, C, S)

    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    r = tl.zeros([BLOCK], tl.int32)  # how many of the ordered a lie below theta, by bisection
    length = count
    while length > 0:
        half = (length + 1) // 2
        r += tl.where(tl.load(ordered + row * C + r + half - 1) < theta, half, 0)
        length -= half

    f_z = tl.load(f + row * C + z).to(tl.float64)
    d = tl.load(f + at, mask=mask, other=0.0).to(tl.float64) - f_z
    d_second = tl.load(f + row * C + second).to(tl.float64) - f_z
    d_third = tl.load(f + row * C + third).to(tl.float64) - f_z
    swapped = tl.where(code == 1, d, tl.where(code == 2, tl.where(c == second, d_third, d_second), 0.0))
    w, w_z = weight_at(log_pi, at, mask, C), tl.load(scales + row * 3 + 2)
    wins = mask & (r > 0)
    first = tl.load(noise_sums + row * (C + 1) + r, mask=wins, other=0).to(tl.float64)
    result = d * (first * tl.load(scales + row * 3)) + swapped * w_z
    result = tl.where(mask & (c != z), result, 0.0)
    tl.store(sums + at, result, mask=mask)
    tl.store(parts + row * 2 * P + chunk, tl.sum(result, 0))
    tl.store(parts + (row * 2 + 1) * P + chunk, tl.sum(tl.where(mask, swapped * w, 0.0), 0))

    value = (w * d * tl.load(scales + row * 3 + 1)).to(tl.int64)
    place = value_sums + row * (C + 1)
    bins = 1 + tl.arange(0, BINS)
    binned = tl.sum(tl.where(wins[:, None] & (r[:, None] == bins[None, :]), value[:, None], 0), 0)
    tl.atomic_add(place + bins, binned, mask=(bins <= count) & (binned != 0))
    tl.atomic_add(place + r, value, mask=wins & (r > BINS) & (value != 0))


@triton.jit
def _beaten(
    scales, starts, members, value_sums, sums, parts, centre, C, P,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Add the second sum of the ordered elements, from the last rank down; centre [R, 2]: R_z and mean(R)."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    unit = tl.load(scales + row * 3 + 1)
    k = tl.arange(0, BLOCK)
    above = tl.zeros([1], tl.int64)
    total = tl.zeros([1], tl.float64)
    start = count // BLOCK * BLOCK
    while start >= 0:
        value = tl.load(value_sums + row * (C + 1) + start + k, mask=start + k <= count, other=0)
        here = tl.sum(value, 0)
        second = (above + here - tl.cumsum(value, 0)).to(tl.float64) / unit
        mask = start + k < count
        place = sums + row * C + tl.load(members + row * C + start + k, mask=mask, other=0)
        tl.store(place, tl.load(place, mask=mask, other=0.0).to(tl.float64) + second, mask=mask)
        total += tl.sum(tl.where(mask, second, 0.0), 0)
        above += here
        start -= BLOCK
    p = tl.arange(0, BLOCK_P)
    others = tl.sum(tl.load(parts + row * 2 * P + p, mask=p < P, other=0.0), 0)
    of_z = tl.sum(tl.load(parts + (row * 2 + 1) * P + p, mask=p < P, other=0.0), 0)
    tl.store(centre + row * 2, of_z)
    tl.store(centre + row * 2 + 1 + tl.zeros([1], tl.int32), (others + of_z + total) / C)


@triton.jit
def _subtract_mean(ahead, centre, sums, C, BLOCK: tl.constexpr):
    """Put R_z in its place and subtract the mean."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    result = tl.load(sums + row * C + c, mask=c < C, other=0.0).to(tl.float64)
    result = tl.where(c == tl.load(ahead + row * 3), tl.load(centre + row * 2), result)
    tl.store(sums + row * C + c, result - tl.load(centre + row * 2 + 1), mask=c < C)


def merge(logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, f: Tensor) -> Tensor:
    """`arsm.kernels.merge` for contiguous [..., C]."""
    sums = torch.empty_like(f)
    whole = [x.view(-1, x.shape[-1]) for x in (logits, log_pi, ahead, state, f, sums)]
    rows = len(whole[0])
    step = triton.cdiv(rows, triton.cdiv(f.numel(), AT_ONCE))
    for start in range(0, rows, step):
        _merge_rows(*(x[start : start + step] for x in whole))
    return sums


def _merge_rows(logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, f: Tensor, sums: Tensor) -> None:
    rows, categories = f.shape
    block, chunks = chunks_of(categories)
    grid = (rows, chunks)
    size = {"BLOCK": block, "num_warps": 8}
    buckets = min(BUCKETS, max(16, triton.next_power_of_2(categories)))
    block_p = max(16, triton.next_power_of_2(chunks))

    zeros = f.new_zeros(rows * (buckets + 1), dtype=torch.int32)
    totals, counts = zeros[:rows], zeros[rows:]
    starts, cursors, members = (
        f.new_empty((rows, count), dtype=torch.int32) for count in (buckets + 1, buckets, categories)
    )
    ordered, spread, scales, parts, centre = (
        f.new_empty((rows, count), dtype=torch.float64) for count in (categories, chunks, 3, 2 * chunks, 2)
    )
    noise_sums, value_sums = (f.new_empty((rows, categories + 1), dtype=torch.int64) for _ in range(2))
    bucketed = sums.view(torch.int32)  # nothing is summed before the order is known

    _select[grid](log_pi, ahead, state, f, totals, members, spread, categories, chunks, STATE, **size)
    _count[grid](log_pi, state, totals, members, counts, categories, STATE, BUCKETS=buckets, **size)
    _starts[(rows,)](counts, starts, cursors, BUCKETS=buckets, num_warps=16)
    _fill[(rows, triton.cdiv(categories + 1, block))](
        log_pi, state, starts, cursors, members, bucketed, value_sums, categories, STATE, BUCKETS=buckets, **size
    )
    _rank[grid](
        log_pi, state, starts, bucketed, members, ordered, noise_sums, categories, STATE, BUCKETS=buckets, **size
    )
    _prefix[(rows,)](
        log_pi, ahead, state, spread, starts, noise_sums, scales, categories, chunks, STATE,
        BLOCK=2048, BLOCK_P=block_p, BUCKETS=buckets, num_warps=8,
    )  # fmt: skip
    _sum[grid](
        logits, log_pi, ahead, state, f, scales, starts, ordered, noise_sums, value_sums, sums, parts,
        categories, chunks, STATE, BUCKETS=buckets, maxnreg=128, **size,
    )  # fmt: skip
    _beaten[(rows,)](
        scales, starts, members, value_sums, sums, parts, centre, categories, chunks,
        BLOCK=2048, BLOCK_P=block_p, BUCKETS=buckets, num_warps=8,
    )  # fmt: skip
    _subtract_mean[grid](ahead, centre, sums, categories, **size)
