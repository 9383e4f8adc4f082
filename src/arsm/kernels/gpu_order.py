"""`arsm.kernels.order` as Triton kernels: static shapes, no synchronisation.

Rows are cut into chunks, one program each. Two passes find the first of each chunk's
race, a third says who can win.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import STATE, buckets_of
from arsm.noise import LOWEST, RESOLUTION, TO_FIXED

CHUNKS = 512
"""Most chunks per row: one program reduces what they found."""
PROGRAMS = 16_384
"""Enough to keep a GPU busy; a chunk has as many blocks as then remain."""
EACH = 4
"""Elements per thread."""
STEP = tl.constexpr(RESOLUTION)
LEAST_LOGIT = tl.constexpr(LOWEST)
LEAST_NOISE = tl.constexpr(LOWEST / 2)
ROUND = tl.constexpr(TO_FIXED)

# what `order` keeps of a race for `merge`: the places of state [R, STATE]
BEST = tl.constexpr(0)
"""o_z."""
SUM_Z = tl.constexpr(1)
"""a_z + phi_z."""
BOUND_C = tl.constexpr(2)
"""a_z - o of the second: c beats the second, in the pair (z, c), if phi_c is above."""
BOUND_Z = tl.constexpr(3)
"""The second beats z, in the pair (z, c), if a_c is above."""
WITH_SECOND = tl.constexpr(4)
"""The winner of the pair (z, second), as `winner_with_z` says it."""
LIMIT = tl.constexpr(5)
"""Above every theta but z's."""
LEAST = tl.constexpr(6)
"""min a, z left out."""
HIGHEST = tl.constexpr(7)
"""max a."""
LARGEST = tl.constexpr(8)
"""The largest logit."""
PER_LN2 = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------- what all kernels compute alike


@triton.jit
def noise_at(log_pi, at, mask):
    """a at a place."""
    return fixed_noise(tl.load(log_pi + at, mask=mask, other=0.0))


@triton.jit
def fixed_noise(x):
    """a: ln pi in fixed point, as `noise.fixed_point` rounds it."""
    return tl.maximum(x, LEAST_NOISE).to(tl.float64) + ROUND - ROUND


@triton.jit
def below_largest(x, largest):
    """phi: a logit below the largest in fixed point. A masked one becomes the lowest,
    which never wins either.
    """
    phi = x.to(tl.float64) - largest
    return tl.where(phi < LEAST_LOGIT, LEAST_LOGIT, phi) + ROUND - ROUND


@triton.jit
def logit_at(logits, at, mask, largest):
    """phi of the logits."""
    return below_largest(tl.load(logits + at, mask=mask, other=float("-inf")), largest)


@triton.jit
def load_both(logits, log_pi, at, mask):
    """Logit and ln pi, and -inf outside the mask, which neither wins nor loses a pair.

    A loop that computes for long loads the next block before it computes: its loads
    then do not wait for one another.
    """
    never = float("-inf")
    return tl.load(logits + at, mask=mask, other=never), tl.load(
        log_pi + at, mask=mask, other=never
    )


@triton.jit
def bounds_of(a_z, phi_z, z, a_second, phi_second, second, third, of_third):
    """The bounds of `swaps`: the state from BEST to WITH_SECOND. In fixed point,
    one step breaks a tie.
    """
    of_second = a_second - phi_second
    lower = tl.where(second < z, STEP, 0.0)
    # the pair (z, second) gives z the noise of the second and the second that of z; the best of the
    # others is the third
    of_c, of_z = a_z - phi_second, a_second - phi_z
    c_wins = (of_c < of_z + lower) & (of_c < of_third + tl.where(second < third, STEP, 0.0))
    other_wins = of_third < of_z + tl.where(third < z, STEP, 0.0)
    with_second = tl.where(c_wins, 1, tl.where(other_wins, 2, 0))
    return a_z - phi_z, a_z + phi_z, a_z - of_second, of_second + phi_z - lower, with_second


@triton.jit
def keep_bounds(state, best, sum_z, bound_c, bound_z, with_second):
    """Write them."""
    tl.store(state + BEST, best)
    tl.store(state + SUM_Z, sum_z)
    tl.store(state + BOUND_C, bound_c)
    tl.store(state + BOUND_Z, bound_z)
    tl.store(state + WITH_SECOND, with_second.to(tl.float64))


@triton.jit
def load_bounds(state):
    """Read them."""
    bound_c = tl.load(state + BOUND_C)
    bound_z = tl.load(state + BOUND_Z)
    with_second = tl.load(state + WITH_SECOND).to(tl.int32)
    return tl.load(state + BEST), tl.load(state + SUM_Z), bound_c, bound_z, with_second


@triton.jit
def swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second):
    """theta_c, and who wins the pair (z, c): 0 for z, 1 for c, 2 for the first of the others.

    The pair gives c the value a_z - phi_c and z the value a_c - phi_z.
    """
    raised = phi + tl.where(c < z, STEP, 0.0)
    c_wins = (sum_z < a + raised) & (phi > tl.where(c < second, bound_c - STEP, bound_c))
    code = tl.where(c_wins, 1, tl.where(a > bound_z, 2, 0))
    return best + raised, tl.where(c == second, with_second, code)


# ---------------------------------------------------------------- order


@triton.jit
def bucket_of(x, limit, count: tl.constexpr):
    """A bucket that never decreases with x <= limit, near count e^(x - limit): 2^-n (1
    - r/2) for n + r nats / ln 2.
    """
    s = tl.minimum((limit - x) * PER_LN2, 1000.0)
    n = tl.floor(s)
    power = ((1023 - n.to(tl.int64)) << 52).to(tl.float64, bitcast=True)
    return tl.minimum((power * (1 - 0.5 * (s - n)) * count).to(tl.int32), count - 1)


@triton.jit
def _largest(logits, tops, counts, C, P, SPAN, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """The largest logit of each chunk: tops [R, P]; zeros in counts [R, BUCKETS]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += row * C
    k = tl.arange(0, BLOCK)
    largest = _native(logits, chunk * SPAN * BLOCK + k, chunk * SPAN * BLOCK + k < C)
    for i in range(1, SPAN):
        c = (chunk * SPAN + i) * BLOCK + k
        largest = tl.maximum(largest, _native(logits, c, c < C))
    tl.store(tops + row * P + chunk, tl.max(largest, 0).to(tl.float64))
    start = chunk * BLOCK
    while start < BUCKETS:
        tl.store(
            counts + row * BUCKETS + start + k,
            tl.zeros([BLOCK], tl.int32),
            mask=start + k < BUCKETS,
        )
        start += P * BLOCK


@triton.jit
def _native(x, at, mask):
    """Values to compare: float32 or float64, -inf outside the mask."""
    found = tl.load(x + at, mask=mask, other=float("-inf"))
    if found.dtype != tl.float64:
        found = found.to(tl.float32)
    return found


@triton.jit
def _first(
    logits, log_pi, tops, values, indices, C, P, SPAN, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr
):
    """The first of each chunk's race, its least and its largest noise: values [R, 3,
    P], indices [R, P].
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += row * C
    log_pi += row * C
    p = tl.arange(0, BLOCK_P)
    after = chunk * SPAN * BLOCK + tl.arange(0, BLOCK)
    next_x, next_noise = load_both(logits, log_pi, after, after < C)
    largest = tl.max(tl.load(tops + row * P + p, mask=p < P, other=float("-inf")), 0)
    first = after
    highest = next_noise
    least = tl.where(after < C, next_noise, 0.0)
    best = tl.full([BLOCK], float("inf"), tl.float64)
    for i in range(SPAN):
        c, x, noise = after, next_x, next_noise
        after = c + BLOCK
        next_x, next_noise = load_both(logits, log_pi, after, (after < C) & (i + 1 < SPAN))
        highest = tl.maximum(highest, noise)
        noise = tl.where(c < C, noise, 0.0)
        o = fixed_noise(noise) - below_largest(x, largest)
        first = tl.where(o < best, c, first)
        best = tl.where(o < best, o, best)
        least = tl.minimum(least, noise)
    value, index = _least_of(best, first)
    at = values + row * 3 * P + chunk
    tl.store(at, value)
    tl.store(at + P, fixed_noise(tl.min(least, 0)))
    tl.store(at + 2 * P, fixed_noise(tl.max(highest, 0)))
    tl.store(indices + row * P + chunk, index)


@triton.jit
def _least_of(values, indices):
    """The least value and the lowest of its indices."""
    least = tl.min(values, 0)
    return least, tl.min(tl.where(values == least, indices, 2147483647), 0)


@triton.jit
def _before(value, index, other, other_index):
    """Whether an element of the race comes before another."""
    return (value < other) | ((value == other) & (index < other_index))


@triton.jit
def _keep_two(best, index, worse, index_worse, value, c):
    """The best two of the elements met so far, with the new ones c."""
    lower = _before(value, c, best, index)
    between = _before(value, c, worse, index_worse)
    worse = tl.where(lower, best, tl.where(between, value, worse))
    index_worse = tl.where(lower, index, tl.where(between, c, index_worse))
    best = tl.where(lower, value, best)
    index = tl.where(lower, c, index)
    return best, index, worse, index_worse


@triton.jit
def _next_two(best, index, worse, index_worse, of_third, third):
    """The second and the third of the race, from the best two that every thread has met
    and the first of a third chunk; the third's value.
    """
    # the best of all threads, then the best of what is left
    second_best, second = _least_of(best, index)
    taken = (best == second_best) & (index == second)
    other_best, other = _least_of(tl.where(taken, worse, best), tl.where(taken, index_worse, index))
    third = tl.where(_before(of_third, third, other_best, other), third, other)
    return second, third, tl.minimum(of_third, other_best)


@triton.jit
def _first_two_chunks(o, p, P):
    """The chunk of z, the chunk whose first comes next (P if there is none), and the
    first of a third chunk: its value and its chunk.
    """
    of_z = tl.argmin(o, 0)
    o = tl.where(p == of_z, float("inf"), o)
    of_next = tl.where(P > 1, tl.argmin(o, 0), P)
    o = tl.where(p == of_next, float("inf"), o)
    of_third, chunk = tl.min(o, 0, return_indices=True)
    return of_z, of_next, of_third, chunk


@triton.jit
def _store_bounds(state, logits, log_pi, largest, z, a_z, phi_z, second, third, of_third):
    """Keep what decides swaps; the best of the race."""
    a_second = noise_at(log_pi, second, True)
    phi_second = logit_at(logits, second, True, largest)
    # there may be one category alone
    phi_second = tl.where(second == z, float("-inf"), phi_second)
    best_z, sum_z, bound_c, bound_z, with_second = bounds_of(
        a_z, phi_z, z, a_second, phi_second, second, third, of_third
    )
    keep_bounds(state, best_z, sum_z, bound_c, bound_z, with_second)
    return best_z


@triton.jit
def _finish(
    logits, log_pi, tops, values, indices, ahead, state, C, P, LENGTH, S, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the chunks, at most BLOCK of them: ahead [R, 3] and state [R, S].

    The first three of the race are in the chunk that has z, in the one whose first
    comes next, or the first of a third chunk. Those two chunks are looked at again.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * C
    log_pi += row * C
    tops += row * P
    values += row * 3 * P
    indices += row * P
    ahead += row * 3
    state += row * S

    p = tl.arange(0, BLOCK)
    o = tl.load(values + p, mask=p < P, other=float("inf"))
    top = tl.load(tops + p, mask=p < P, other=float("-inf"))
    least = tl.load(values + P + p, mask=p < P, other=float("inf"))
    highest = tl.load(values + 2 * P + p, mask=p < P, other=float("-inf"))
    of_z, of_next, of_third, chunk = _first_two_chunks(o, p, P)
    z = tl.load(indices + of_z)
    third = tl.load(indices + tl.minimum(chunk, P - 1))
    largest = tl.max(top, 0)
    a_z = noise_at(log_pi, z, True)
    phi_z = logit_at(logits, z, True, largest)

    # least noise and largest logit without z: of its chunk they are found again below
    least = tl.where(p == of_z, float("inf"), least)
    top = tl.where(p == of_z, float("-inf"), top)

    # every thread keeps the best two of what it meets in both chunks
    best = tl.full([BLOCK], float("inf"), tl.float64)
    worse = best
    index = tl.zeros([BLOCK], tl.int32)
    index_worse = index
    for start in range(0, LENGTH, 4 * BLOCK):
        # eight loads at once, from both chunks in turns; the lower chunk first, for ties
        for part in tl.static_range(8):
            i = start + part // 2 * BLOCK + p
            c = (tl.maximum(of_z, of_next) if part % 2 else tl.minimum(of_z, of_next)) * LENGTH + i
            left = (c < C) & (i < LENGTH) & (c != z)
            x = tl.load(logits + c, mask=left, other=float("-inf"))
            a = noise_at(log_pi, c, left)
            a = tl.where(left, a, float("inf"))
            of_c = a - below_largest(x, largest)
            best, index, worse, index_worse = _keep_two(best, index, worse, index_worse, of_c, c)
            least = tl.minimum(least, a)
            top = tl.maximum(top, x.to(tl.float64))

    second, third, of_third = _next_two(best, index, worse, index_worse, of_third, third)
    # there may be fewer than three categories
    second = tl.minimum(second, C - 1)
    third = tl.minimum(third, C - 1)

    tl.store(ahead, z.to(tl.int64))
    tl.store(ahead + 1, second.to(tl.int64))
    tl.store(ahead + 2, third.to(tl.int64))
    best_z = _store_bounds(state, logits, log_pi, largest, z, a_z, phi_z, second, third, of_third)
    tl.store(state + LIMIT, best_z + below_largest(tl.max(top, 0), largest) + STEP)
    tl.store(state + LEAST, tl.min(least, 0))
    tl.store(state + HIGHEST, tl.max(highest, 0))
    tl.store(state + LARGEST, largest)


@triton.jit
def _who_can_win(
    logits, log_pi, ahead, state, can_win, flags, counts, members, C, P, SPAN, S,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """can_win [R, C]: z, and who wins against some reference or against z; flags [R,
    P]: whether the second wins.

    Elements below the limit are counted by their buckets and go to members [R, C]:
    those of a chunk from its start on, then -1.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    z = tl.load(ahead + row * 3).to(tl.int32)
    second = tl.load(ahead + row * 3 + 1).to(tl.int32)
    logits += row * C
    log_pi += row * C
    can_win += row * C
    members += row * C
    state += row * S
    counts += row * BUCKETS
    best, sum_z, bound_c, bound_z, with_second = load_bounds(state)
    largest = tl.load(state + LARGEST)
    limit = tl.load(state + LIMIT)
    least = tl.load(state + LEAST)
    second_wins = tl.zeros([BLOCK], tl.int1)
    end = chunk * SPAN * BLOCK
    after = end + tl.arange(0, BLOCK)
    next_x, next_noise = load_both(logits, log_pi, after, after < C)
    for i in range(SPAN):
        c, x, noise = after, next_x, next_noise
        after = c + BLOCK
        next_x, next_noise = load_both(logits, log_pi, after, (after < C) & (i + 1 < SPAN))
        mask = c < C
        a, phi = fixed_noise(noise), below_largest(x, largest)
        theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
        # c wins some pair (c, j) if a reference's noise lies below theta_c
        wins = (theta > least) | (code == 1) | (c == z)
        tl.store(can_win + c, wins.to(tl.int8), mask=mask)
        second_wins = second_wins | ((code == 2) & (c != second))

        # only noise below the limit is below any theta: `merge` puts these in order
        active = mask & (c != z) & (a < limit)
        found = active.to(tl.int32)
        total = tl.sum(found, 0)
        if total > 0:
            tl.store(members + end + tl.cumsum(found, 0) - 1, c, mask=active)
            bucket = bucket_of(tl.minimum(a, limit), limit, BUCKETS)
            tl.atomic_add(counts + bucket, 1, mask=active, sem="relaxed")
            end += total
    # behind the last member, unless they fill the chunk
    tl.store(members + end, -1, mask=end < tl.minimum((chunk + 1) * SPAN * BLOCK, C))
    tl.store(flags + row * P + chunk, tl.max(second_wins.to(tl.int32), 0))


@triton.jit
def _starts(
    ahead, state, can_win, flags, counts, starts, C, P, S, BLOCK_P: tl.constexpr,
    BUCKETS: tl.constexpr
):  # fmt: skip
    """The start of each bucket, and the number of members: starts [R, BUCKETS + 1]; the
    second and third that win.
    """
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BUCKETS)
    count = tl.load(counts + row * BUCKETS + b)
    tl.store(starts + row * (BUCKETS + 1) + b, tl.cumsum(count, 0) - count)
    tl.store(starts + row * (BUCKETS + 1) + BUCKETS, tl.sum(count, 0))
    p = tl.arange(0, BLOCK_P)
    second_wins = tl.max(tl.load(flags + row * P + p, mask=p < P, other=0), 0)
    one = tl.full([], 1, tl.int8)
    tl.store(can_win + row * C + tl.load(ahead + row * 3 + 1), one, mask=second_wins > 0)
    third_wins = tl.load(state + row * S + WITH_SECOND) == 2.0
    tl.store(can_win + row * C + tl.load(ahead + row * 3 + 2), one, mask=third_wins)


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ahead [..., 3], can_win [..., C], state [..., STATE], starts [..., buckets + 1]
    and members [..., C]: the inputs are [..., C] and contiguous.
    """
    batch, categories = logits.shape[:-1], logits.shape[-1]
    rows, buckets = batch.numel(), buckets_of(categories)
    block, warps, span, chunks = chunks_of(rows, categories)
    grid = (rows, chunks)
    size = {"BLOCK": block, "num_warps": warps}
    block_p = max(16, triton.next_power_of_2(chunks))
    tops, values = (
        logits.new_empty(rows * count * chunks, dtype=torch.float64) for count in (1, 3)
    )
    indices, flags, counts = (
        logits.new_empty(rows * count, dtype=torch.int32) for count in (chunks, chunks, buckets)
    )
    ahead = logits.new_empty((*batch, 3), dtype=torch.int64)
    state = logits.new_empty((*batch, STATE), dtype=torch.float64)
    can_win = logits.new_empty(logits.shape, dtype=torch.bool)
    starts = logits.new_empty((*batch, buckets + 1), dtype=torch.int32)
    members = logits.new_empty(logits.shape, dtype=torch.int32)
    wins = can_win.view(torch.int8)
    _largest[grid](logits, tops, counts, categories, chunks, span, BUCKETS=buckets, **size)
    _first[grid](
        logits, log_pi, tops, values, indices, categories, chunks, span, BLOCK_P=block_p, **size
    )
    _finish[(rows,)](
        logits, log_pi, tops, values, indices, ahead, state, categories, chunks, span * block,
        STATE,
        BLOCK=max(256, block_p), num_warps=8,
    )  # fmt: skip
    _who_can_win[grid](
        logits, log_pi, ahead, state, wins, flags, counts, members, categories, chunks, span, STATE,
        BUCKETS=buckets, **size,
    )  # fmt: skip
    _starts[(rows,)](
        ahead, state, wins, flags, counts, starts, categories, chunks, STATE,
        BLOCK_P=block_p, BUCKETS=buckets, num_warps=8,
    )  # fmt: skip
    return ahead, can_win, state, starts, members


class Chunks(NamedTuple):
    """How rows are cut into programs."""

    block: int
    """Categories per block."""
    warps: int
    """Warps per program."""
    span: int
    """Blocks per chunk."""
    chunks: int
    """Chunks per row."""


def chunks_of(
    rows: int,
    categories: int,
    each: int = EACH,
    programs: int | None = None,
    most: int | None = None,
    warps: int | None = None,
) -> Chunks:
    """Chunks for rows of that many categories.

    Where there are enough chunks, a program is one warp, which never waits for others.
    """
    programs, most = programs or PROGRAMS, most or CHUNKS
    warps = warps or (1 if rows * min(most, categories // (32 * each)) >= programs else 4)
    block = min(32 * warps * each, max(16, triton.next_power_of_2(categories)))
    blocks = triton.cdiv(categories, block)
    span = min(blocks, max(triton.cdiv(blocks, most), rows * blocks // programs, 1))
    return Chunks(block, warps, span, triton.cdiv(blocks, span))
