"""The elements below the limit in order, as Triton kernels, and the sums of their weights along it.

`order` picked the elements. A counting sort puts them in order: they fall into buckets
that are evenly filled, since pi is uniform below a small limit, and are compared
exactly within a bucket. Atomics decide which element takes which place of a bucket, and
nothing else depends on them. Sums along the order are computed in chunks: a program
publishes the sum of its chunk and adds the sums that the chunks before it have
published.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

from arsm.kernels.gpu_order import HIGHEST, LIMIT, bucket_of, noise_at

BINS = tl.constexpr(6)
"""Most categories win against no more references than this: their sums need no look-up
in memory.
"""
CURSORS = tl.constexpr(2)
"""Offset in a row's scratch of the numbers of elements that each bucket holds so far.
The counters of two kernels' turns come first."""
UNIT, PER_VALUE, WEIGHT_Z, NOISES, WEIGHTS = (tl.constexpr(i) for i in (0, 1, 2, 3, 9))
"""Offsets in a row's scales of the unit of the sums of w, the units per 1 of those of
w d, w_z, the noise of the first ranks, and the sums of w below rank r = 0..BINS."""
SCALES = tl.constexpr(16)
COPIES, PER_COPY = tl.constexpr(8), tl.constexpr(1 << 16)
"""Copies of the sums that atomics add up, at most, and categories per copy: of a long
row, many programs would wait for one sum."""


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


@triton.jit
def copies_of(count, C):
    """The number of copies of count + 1 sums that a row has."""
    return tl.maximum(tl.minimum(C // tl.maximum(count + 1, PER_COPY), COPIES), 1)


@triton.jit
def fill(
    log_pi, ahead, state, f, starts, members, scratch, bucketed, value_sums, spread, C, ROW, P,
    SPAN, N, S,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Put the members into their buckets, bucketed [R, C], and zeros where values will
    be summed, value_sums [R, C].

    spread [R, P] is the largest |d| of each chunk.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    starts += row * (BUCKETS + 1)
    f += row * ROW
    count = tl.load(starts + BUCKETS)
    limit = tl.load(state + row * S + LIMIT)

    # the largest |d|, from the least and the largest f of the chunk
    own = tl.load(f + tl.load(ahead + row * 3))
    low = tl.full([BLOCK], 0.0, own.dtype) + own
    high = low
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(f + c, mask=c < C, other=own)
        low = tl.minimum(low, value)
        high = tl.maximum(high, value)
    f_z = own.to(tl.float64)
    above = tl.max(high, 0).to(tl.float64) - f_z
    below = f_z - tl.min(low, 0).to(tl.float64)
    tl.store(spread + row * P + chunk, tl.maximum(above, below))

    # zeros for the chunk's part of the sums
    start = chunk * SPAN * BLOCK
    stop = tl.minimum(start + SPAN * BLOCK, C)
    summed = tl.minimum((count + 1) * copies_of(count, C), stop)
    while start < summed:
        k = start + tl.arange(0, BLOCK)
        tl.store(value_sums + row * C + k, tl.zeros([BLOCK], tl.int64), mask=k < summed)
        start += BLOCK

    # the chunk's members into their buckets; -1 stands behind the last of them
    start = chunk * SPAN * BLOCK
    while start < stop:
        k = start + tl.arange(0, BLOCK)
        c = tl.load(members + row * C + k, mask=k < stop, other=-1)
        end = tl.min(tl.where(c < 0, k, stop), 0)
        mask = k < end
        c = tl.where(mask, c, 0)
        bucket = bucket_of(tl.minimum(noise_at(log_pi, row * C + c, mask), limit), limit, BUCKETS)
        first = tl.load(starts + bucket, mask=mask, other=0)
        place = first + tl.atomic_add(
            scratch + row * N + CURSORS + bucket, 1, mask=mask, sem="relaxed"
        )
        tl.store(bucketed + row * C + place, c, mask=mask)
        start = tl.where(end < start + BLOCK, stop, start + BLOCK)


@triton.jit
def take_turn(turns, count):
    """The next of `count` turns."""
    turn = 0
    if count > 1:
        turn = tl.atomic_add(turns, 1, sem="relaxed")
    return turn


@triton.jit
def publish(published, turn, own):
    """Store the sum of one turn, int64 or float64, with its lowest bit set.

    The bit tells it from 0, where nothing was stored yet. An integer is shifted to make
    room for it.
    """
    word = own << 1 if own.dtype == tl.int64 else own.to(tl.int64, bitcast=True)
    tl.atomic_xchg(published + turn, word | 1, sem="relaxed")


@triton.jit
def add_published(published, turn, own, BLOCK_T: tl.constexpr):
    """Wait for the sums of all earlier turns and add them.

    A program takes its turn when it starts, so that those it waits for are already
    running.
    """
    total = own
    if turn > 0:
        t = tl.arange(0, BLOCK_T)
        words = tl.load(published + t, mask=t < turn, other=1, volatile=True)
        while tl.min(words & 1, 0) == 0:
            words = tl.load(published + t, mask=t < turn, other=1, volatile=True)
        each = words >> 1 if own.dtype == tl.int64 else words.to(tl.float64, bitcast=True)
        total += tl.sum(tl.where(t < turn, each, 0), 0)
    return total


@triton.jit
def _next_bucket(log_pi, bucketed, starts, limit, k, count, BUCKETS: tl.constexpr):
    """The first place from k on at which a bucket starts, or count."""
    c = tl.load(bucketed + k, mask=k < count, other=0)
    at = starts + bucket_of(tl.minimum(noise_at(log_pi, c, k < count), limit), limit, BUCKETS)
    return tl.where(k < count, tl.where(tl.load(at) == k, k, tl.load(at + 1)), count)


@triton.jit
def _rank_in_bucket(log_pi, bucketed, c, a, first, end):
    """The number of members before c: all of the earlier buckets, and in its own bucket those with
    less noise, or with as much and a lower index.
    """
    rank = first
    longest = tl.max(end - first, 0)
    j = 0
    while j < longest:
        inside = first + j < end
        member = tl.load(bucketed + first + j, mask=inside, other=0)
        other = noise_at(log_pi, member, inside)
        rank += (inside & ((other < a) | ((other == a) & (member < c)))).to(tl.int32)
        j += 1
    return rank


@triton.jit
def _store_scales(scales, log_pi, ranked, noise_sums, count, per_weight, per_value, w_z):
    """A row's scales: units, w_z, and the first ranks' noise and sums, which every program of
    `merge` reads first.
    """
    k = tl.arange(0, 8)
    c = tl.load(ranked + k, mask=k < count, other=0)
    w = tl.load(noise_sums + k, mask=k < count, other=0)
    # nothing exceeds the noise of a rank that does not exist
    a = tl.where(k < count, noise_at(log_pi, c, k < count), float("inf"))
    tl.store(scales + UNIT, 1 / per_weight)
    tl.store(scales + PER_VALUE, per_value)
    tl.store(scales + WEIGHT_Z, w_z)
    tl.store(scales + NOISES + k, a, mask=k < BINS)
    below = (tl.cumsum(w, 0) - w).to(tl.float64) / per_weight
    tl.store(scales + WEIGHTS + k, below, mask=k <= BINS)


@triton.jit
def _put_in_order(
    log_pi, bucketed, ranked, noise_sums, starts, limit, per_weight, begin, stop, C,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Put index and w of the elements at places begin..stop at their ranks; the sum of w."""
    own = tl.zeros([BLOCK], tl.int64)
    start = begin
    while start < stop:
        k = start + tl.arange(0, BLOCK)
        mask = k < stop
        c = tl.load(bucketed + k, mask=mask, other=0)
        a = noise_at(log_pi, c, mask)
        at = starts + bucket_of(tl.minimum(a, limit), limit, BUCKETS)
        first = tl.load(at, mask=mask, other=0)
        end = tl.load(at + 1, mask=mask, other=0)
        rank = _rank_in_bucket(log_pi, bucketed, c, a, first, end)
        tl.store(ranked + rank, c, mask=mask)
        w = (weight_at(log_pi, c, mask, C) * per_weight).to(tl.int64)
        tl.store(noise_sums + rank, w, mask=mask)
        own += tl.where(mask, w, 0)
        start += BLOCK
    return tl.sum(own, 0)


@triton.jit
def rank(
    log_pi, ahead, state, starts, scratch, published, bucketed, ranked, noise_sums, spread,
    scales, C, P, LENGTH, N, S,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BUCKETS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Put index and w at their ranks, ranked and noise_sums [R, C], then sum w over the
    ranks below r, r = 0..count.

    A turn is for the buckets that start within LENGTH places.
    """
    row = tl.program_id(0).to(tl.int64)
    starts += row * (BUCKETS + 1)
    log_pi += row * C
    bucketed += row * C
    ranked += row * C
    noise_sums += row * C
    state += row * S
    scales += row * SCALES
    published += row * BLOCK_T
    count = tl.load(starts + BUCKETS)
    limit = tl.load(state + LIMIT)
    per_weight = _per_weight(state, C)
    turns = tl.maximum(tl.cdiv(count, LENGTH), 1)
    # the grid has programs for the longest order; most rows need fewer
    if tl.program_id(1) < turns:
        turn = take_turn(scratch + row * N, turns)
        # whole buckets only: ranks within a bucket need all of its members
        begin = _next_bucket(log_pi, bucketed, starts, limit, turn * LENGTH, count, BUCKETS)
        stop = _next_bucket(log_pi, bucketed, starts, limit, (turn + 1) * LENGTH, count, BUCKETS)
        total = _put_in_order(
            log_pi, bucketed, ranked, noise_sums, starts, limit, per_weight, begin, stop, C,
            BLOCK, BUCKETS,
        )  # fmt: skip
        publish(published, turn, total)
        # the weights were stored by rank, and are read below by other threads
        tl.debug_barrier()

        if turn == 0:
            w_z = weight_at(log_pi, tl.load(ahead + row * 3), True, C)
            per_value = _per_value(state, spread + row * P, C, P, BLOCK_P)
            _store_scales(scales, log_pi, ranked, noise_sums, count, per_weight, per_value, w_z)
            # read before the weights become sums, in place
            tl.debug_barrier()

        # weights become sums of the weights before them, in place
        before = add_published(published, turn, total, BLOCK_T) - total
        start = begin
        while start < stop:
            k = start + tl.arange(0, TILE)
            w = tl.load(noise_sums + k, mask=k < stop, other=0)
            tl.store(noise_sums + k, before + tl.cumsum(w, 0) - w, mask=k < stop)
            before += tl.sum(w, 0)
            start += TILE
        tl.store(noise_sums + count, before, mask=stop == count)
