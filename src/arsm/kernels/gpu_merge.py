"""`arsm.kernels.merge` as Triton kernels: static shapes, no synchronisation.

The elements below the limit, which `order` picked, are put in order by a counting sort: they fall into buckets that are
evenly filled, since pi is uniform below a small limit, and are compared exactly within a bucket. Atomics decide which
element takes which place of a bucket, and nothing else depends on them. One pass over all categories then looks each
theta up in that order. Sums that atomics add up are int64 in fixed point, the same in every order of summation, so that
a run repeats to the bit.
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
    bucket_of,
    chunks_of,
    last_of,
    noise_at,
    swaps_of,
)

AT_ONCE = 1 << 23
"""Categories whose order and sums are held at one time, 20 bytes each."""
BINS = tl.constexpr(6)
"""Most categories win against no more references than this: their sums need no look-up in memory."""
BLOCK, WARPS, REGISTERS = 512, 8, 128
"""Of the kernel that takes most of the time."""
CURSORS = tl.constexpr(2)
"""Where a row's scratch has the number of elements that each bucket holds so far."""


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
def _fill(
    log_pi, ahead, state, f, starts, members, scratch, bucketed, value_sums, spread, C, P, SPAN, N, S,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Put the members into their buckets, bucketed [R, C], and zeros where values will be summed, [R, C].

    spread [R, P] is the largest |d| of each chunk.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    limit = tl.load(state + row * S + LIMIT)
    own = tl.load(f + row * C + tl.load(ahead + row * 3))
    low = tl.full([BLOCK], 0.0, own.dtype) + own
    high = low
    for i in range(SPAN):
        start = (chunk * SPAN + i) * BLOCK
        k = start + tl.arange(0, BLOCK)
        value = tl.load(f + row * C + k, mask=k < C, other=own)
        low, high = tl.minimum(low, value), tl.maximum(high, value)
        if start <= count:
            tl.store(value_sums + row * C + k, tl.zeros([BLOCK], tl.int64), mask=k <= count)
        if start < count:
            mask = k < count
            c = tl.load(members + row * C + k, mask=mask, other=0)
            bucket = bucket_of(tl.minimum(noise_at(log_pi, row * C + c, mask), limit), limit, BUCKETS)
            first = tl.load(starts + row * (BUCKETS + 1) + bucket, mask=mask, other=0)
            place = first + tl.atomic_add(scratch + row * N + CURSORS + bucket, 1, mask=mask)
            tl.store(bucketed + row * C + place, c, mask=mask)
    f_z = own.to(tl.float64)
    above, below = tl.max(high, 0).to(tl.float64) - f_z, f_z - tl.min(low, 0).to(tl.float64)
    tl.store(spread + row * P + chunk, tl.maximum(above, below))


@triton.jit
def _rank(
    log_pi, ahead, state, starts, scratch, bucketed, ranked, noise_sums, spread, scales, C, P, SPAN, N, S,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Put index and w at their ranks, ranked and noise_sums [R, C], then sum w over the ranks below r, r = 0..count."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, limit = tl.load(starts + row * (BUCKETS + 1) + BUCKETS), tl.load(state + row * S + LIMIT)
    if (chunk * SPAN * BLOCK < count) | (chunk == 0):
        for i in range(SPAN):
            start = (chunk * SPAN + i) * BLOCK
            if start < count:
                k = start + tl.arange(0, BLOCK)
                mask = k < count
                c = tl.load(bucketed + row * C + k, mask=mask, other=0)
                a = noise_at(log_pi, row * C + c, mask)
                at = starts + row * (BUCKETS + 1) + bucket_of(tl.minimum(a, limit), limit, BUCKETS)
                first = tl.load(at, mask=mask, other=0)
                stop = tl.load(at + 1, mask=mask, other=0)
                rank = first
                longest = tl.max(stop - first, 0)
                j = 0
                while j < longest:
                    inside = first + j < stop
                    member = tl.load(bucketed + row * C + first + j, mask=inside, other=0)
                    other = noise_at(log_pi, row * C + member, inside)
                    rank += (inside & ((other < a) | ((other == a) & (member < c)))).to(tl.int32)
                    j += 1
                tl.store(ranked + row * C + rank, c, mask=mask)
                w = weight_at(log_pi, row * C + c, mask, C) * _per_weight(state + row * S, C)
                tl.store(noise_sums + row * C + rank, w.to(tl.int64), mask=mask)
        if last_of(scratch + row * N, tl.maximum(tl.cdiv(count, SPAN * BLOCK), 1)):
            _prefix(noise_sums + row * C, count, BLOCK)
            own = state + row * S
            tl.store(scales + row * 3, 1 / _per_weight(own, C))
            tl.store(scales + row * 3 + 1, _per_value(own, spread + row * P, C, P, BLOCK_P))
            tl.store(scales + row * 3 + 2, weight_at(log_pi, row * C + tl.load(ahead + row * 3), True, C))


@triton.jit
def _prefix(sums, count, BLOCK: tl.constexpr):
    """In place: the sum of the elements before each, up to the one after the last."""
    before = tl.zeros([1], tl.int64)
    start = 0
    while start <= count:
        k = start + tl.arange(0, BLOCK)
        w = tl.load(sums + k, mask=k < count, other=0)
        tl.store(sums + k, before + tl.cumsum(w, 0) - w, mask=k <= count)
        before += tl.sum(w, 0)
        start += BLOCK


# ---------------------------------------------------------------- the sums


@triton.jit
def _noise_of_rank(log_pi, ranked, row, k, count, C):
    """a of the element of rank k; infinity where there is none."""
    c = tl.load(ranked + row * C + k, mask=k < count, other=0)
    return tl.where(k < count, noise_at(log_pi, row * C + c, k < count), float("inf"))


@triton.jit
def _weight_below(noise_sums, row, r, count, unit, C):
    """The sum of w over the ranks below r."""
    return tl.load(noise_sums + row * C + r, mask=r <= count, other=0).to(tl.float64) * unit


@triton.jit
def _sum(
    logits, log_pi, ahead, state, f, scales, starts, ranked, noise_sums, value_sums, scratch, sums, parts, centre,
    C, P, SPAN, N, S, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """R_c without its second sum, sums [R, C]; then the second sum of the ordered elements, and the mean [R].

    parts [R, 2 + BINS, P] are this chunk's shares of sum_c R_c, of R_z, and of the second sum of the first ranks. The
    terms w d of the others are added at place r_c of value_sums.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z, second, third = tl.load(ahead + row * 3), tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    f_z = tl.load(f + row * C + z).to(tl.float64)
    d_second = tl.load(f + row * C + second).to(tl.float64) - f_z
    d_third = tl.load(f + row * C + third).to(tl.float64) - f_z
    unit, per_value, w_z = tl.load(scales + row * 3), tl.load(scales + row * 3 + 1), tl.load(scales + row * 3 + 2)
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    a0, w1 = _noise_of_rank(log_pi, ranked, row, 0, count, C), _weight_below(noise_sums, row, 1, count, unit, C)
    a1, w2 = _noise_of_rank(log_pi, ranked, row, 1, count, C), _weight_below(noise_sums, row, 2, count, unit, C)
    a2, w3 = _noise_of_rank(log_pi, ranked, row, 2, count, C), _weight_below(noise_sums, row, 3, count, unit, C)
    a3, w4 = _noise_of_rank(log_pi, ranked, row, 3, count, C), _weight_below(noise_sums, row, 4, count, unit, C)
    a4, w5 = _noise_of_rank(log_pi, ranked, row, 4, count, C), _weight_below(noise_sums, row, 5, count, unit, C)
    a5, w6 = _noise_of_rank(log_pi, ranked, row, 5, count, C), _weight_below(noise_sums, row, 6, count, unit, C)
    total = tl.zeros([BLOCK], tl.float64)
    of_z = total
    s0 = total
    s1 = total
    s2 = total
    s3 = total
    s4 = total
    s5 = total
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        mask = c < C
        at = row * C + c
        _, theta, code = swaps_of(logits, log_pi, ahead, state, row, c, mask, C, S)
        d = tl.load(f + at, mask=mask, other=0.0).to(tl.float64) - f_z
        w = weight_at(log_pi, at, mask, C)
        swapped = tl.where(code == 1, d, tl.where(code == 2, tl.where(c == second, d_third, d_second), 0.0))
        swapped = tl.where(mask, swapped, 0.0)
        of_z += swapped * w
        value = w * d

        first = tl.where(a0 < theta, w1, 0.0)
        first = tl.where(a1 < theta, w2, first)
        first = tl.where(a2 < theta, w3, first)
        first = tl.where(a3 < theta, w4, first)
        first = tl.where(a4 < theta, w5, first)
        first = tl.where(a5 < theta, w6, first)
        s0 += tl.where(a0 < theta, value, 0.0)
        s1 += tl.where(a1 < theta, value, 0.0)
        s2 += tl.where(a2 < theta, value, 0.0)
        s3 += tl.where(a3 < theta, value, 0.0)
        s4 += tl.where(a4 < theta, value, 0.0)
        s5 += tl.where(a5 < theta, value, 0.0)
        more = mask & (a5 < theta)
        if (count > BINS) & (tl.max(more.to(tl.int32), 0) > 0):
            r = tl.full([BLOCK], BINS, tl.int32)  # how many of the ordered a lie below theta, by bisection
            length = count - BINS
            while length > 0:
                half = (length + 1) // 2
                member = tl.load(ranked + row * C + r + half - 1, mask=more, other=0)
                r += tl.where(noise_at(log_pi, row * C + member, more) < theta, half, 0)
                length -= half
            more = more & (r > BINS)
            beaten = tl.load(noise_sums + row * C + r, mask=more, other=0).to(tl.float64) * unit
            first = tl.where(more, beaten, first)
            tl.atomic_add(value_sums + row * C + r, (value * per_value).to(tl.int64), mask=more)
        result = tl.where(mask & (c != z), d * first + swapped * w_z, 0.0)
        total += result
        tl.store(sums + at, result, mask=mask)
    part = parts + row * (2 + BINS) * P + chunk
    tl.store(part, tl.sum(total, 0))
    tl.store(part + P, tl.sum(of_z, 0))
    tl.store(part + 2 * P, tl.sum(s0, 0))
    tl.store(part + 3 * P, tl.sum(s1, 0))
    tl.store(part + 4 * P, tl.sum(s2, 0))
    tl.store(part + 5 * P, tl.sum(s3, 0))
    tl.store(part + 6 * P, tl.sum(s4, 0))
    tl.store(part + 7 * P, tl.sum(s5, 0))
    if last_of(scratch + row * N + 1, P):
        _beaten(
            ranked + row * C, value_sums + row * C, sums + row * C, parts + row * (2 + BINS) * P, centre + row,
            count, per_value, z, C, P, BLOCK, BLOCK_P,
        )  # fmt: skip


@triton.jit
def _beaten(ranked, value_sums, sums, parts, centre, count, unit, z, C, P, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """Add the second sum of the ordered elements, from the last rank down, put R_z in its place, and find mean(R)."""
    p = tl.arange(0, BLOCK_P)
    of_z = tl.sum(tl.load(parts + P + p, mask=p < P, other=0.0), 0)
    total = tl.sum(tl.load(parts + p, mask=p < P, other=0.0), 0) + of_z
    for rank in tl.static_range(BINS):
        of_rank = tl.sum(tl.load(parts + (2 + rank) * P + p, mask=p < P, other=0.0), 0)
        one = sums + tl.load(ranked + rank, mask=rank < count, other=0)
        tl.store(one, tl.load(one, mask=rank < count, other=0.0).to(tl.float64) + of_rank, mask=rank < count)
        total += tl.where(rank < count, of_rank, 0.0)
    above = tl.zeros([1], tl.int64)
    rest = tl.zeros([BLOCK], tl.float64)
    start = count // BLOCK * BLOCK
    if count > BINS:
        while start >= 0:
            k = start + tl.arange(0, BLOCK)
            value = tl.load(value_sums + k, mask=k <= count, other=0)
            here = tl.sum(value, 0)
            second = (above + here - tl.cumsum(value, 0)).to(tl.float64) / unit
            mask = (k >= BINS) & (k < count)
            place = sums + tl.load(ranked + k, mask=mask, other=0)
            tl.store(place, tl.load(place, mask=mask, other=0.0).to(tl.float64) + second, mask=mask)
            rest += tl.where(mask, second, 0.0)
            above += here
            start -= BLOCK
    tl.store(sums + z, of_z)
    tl.store(centre, (total + tl.sum(rest, 0)) / C)


def merge(
    logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, starts: Tensor, members: Tensor, f: Tensor
) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.merge` for contiguous [..., C]."""
    sums, centre = torch.empty_like(f), f.new_empty((*f.shape[:-1], 1), dtype=torch.float64)
    whole = [x.view(-1, x.shape[-1]) for x in (logits, log_pi, ahead, state, starts, members, f, sums, centre)]
    rows = len(whole[0])
    step = triton.cdiv(rows, triton.cdiv(f.numel(), AT_ONCE))
    for start in range(0, rows, step):
        _merge_rows(*(x[start : start + step] for x in whole))
    return sums, centre


def _merge_rows(
    logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, starts: Tensor, members: Tensor, f: Tensor,
    sums: Tensor, centre: Tensor,
) -> None:  # fmt: skip
    rows, categories = f.shape
    buckets = starts.shape[-1] - 1
    block, span, chunks = chunks_of(rows, categories)
    grid, taken = (rows, chunks), int(CURSORS) + buckets
    extent = (categories, chunks, span, taken, STATE)
    size = {"BLOCK": block, "BUCKETS": buckets, "num_warps": 8}
    block_p = max(16, triton.next_power_of_2(chunks))
    own_block, own_span, own_chunks = chunks_of(rows, categories, BLOCK)

    scratch = f.new_zeros(rows * taken, dtype=torch.int32)
    ranked = f.new_empty((rows, categories), dtype=torch.int32)
    noise_sums, value_sums = (f.new_empty((rows, categories), dtype=torch.int64) for _ in range(2))
    spread, scales, parts = (
        f.new_empty(rows * count, dtype=torch.float64) for count in (chunks, 3, (2 + BINS.value) * own_chunks)
    )
    bucketed = sums.view(torch.int32)  # nothing is summed before the order is known

    _fill[grid](log_pi, ahead, state, f, starts, members, scratch, bucketed, value_sums, spread, *extent, **size)
    _rank[grid](
        log_pi, ahead, state, starts, scratch, bucketed, ranked, noise_sums, spread, scales, *extent,
        BLOCK_P=block_p, **size,
    )  # fmt: skip
    _sum[(rows, own_chunks)](
        logits, log_pi, ahead, state, f, scales, starts, ranked, noise_sums, value_sums, scratch, sums, parts, centre,
        categories, own_chunks, own_span, taken, STATE, BLOCK=own_block,
        BLOCK_P=max(16, triton.next_power_of_2(own_chunks)), BUCKETS=buckets, num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
