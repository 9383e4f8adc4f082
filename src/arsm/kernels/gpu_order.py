"""`arsm.kernels.order` as Triton kernels: static shapes, no synchronisation.

Rows are cut into chunks, one program each. Two passes find the first of each chunk's race, a third says who can win.
The last program of a row to finish does what is left to do for the row.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import STATE, buckets_of
from arsm.noise import LOWEST, RESOLUTION

CHUNKS = 2048
"""Most chunks per row: one program reduces what they found."""
PROGRAMS = 2048
"""About as many as a large GPU runs at a time."""
UNIT = tl.constexpr(1 / RESOLUTION)
STEP = tl.constexpr(RESOLUTION)
LEAST_LOGIT = tl.constexpr(LOWEST)
LEAST_NOISE = tl.constexpr(LOWEST / 2)
INTEGERS = tl.constexpr(1.5 * 2.0**52)
"""Added and subtracted, it rounds to an integer, half to even."""

# what `order` keeps of a race for `merge`: the places of state [R, STATE]
BEST, SECOND, THIRD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The values o of the first three."""
NOISE_Z, LOGIT_Z = tl.constexpr(3), tl.constexpr(4)
"""a and phi of the winner."""
LIMIT = tl.constexpr(5)
"""Above every theta but z's."""
LEAST = tl.constexpr(6)
"""min a, z left out."""
HIGHEST = tl.constexpr(7)
"""max a."""
LARGEST = tl.constexpr(8)
"""The largest logit."""
TOTAL, COUNTS = tl.constexpr(2), tl.constexpr(3)
"""Where a row's scratch has the number of elements below the limit, and their number in each bucket."""
PER_LN2 = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------- what all kernels compute alike


@triton.jit
def noise_at(log_pi, at, mask):
    """a: ln pi in fixed point, as `noise.fixed_point` rounds it."""
    a = tl.load(log_pi + at, mask=mask, other=0.0).to(tl.float64)
    return (tl.maximum(a, LEAST_NOISE) * UNIT + INTEGERS - INTEGERS) * STEP


@triton.jit
def below_largest(x, largest):
    """phi: a logit below the largest in fixed point; -inf where it is masked."""
    rounded = (tl.maximum(x - largest, LEAST_LOGIT) * UNIT + INTEGERS - INTEGERS) * STEP
    return tl.where(x == float("-inf"), float("-inf"), rounded)


@triton.jit
def logit_at(logits, at, mask, largest):
    """phi of the logits; -inf outside the mask."""
    return below_largest(tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float64), largest)


@triton.jit
def winner_with_z(c, a, phi, z, a_z, phi_z, second, of_second, third, of_third):
    """Who wins the pair (z, c): 0 for z, 1 for c, 2 for the first of the others.

    The pair gives c the value a_z - phi_c and z the value a_c - phi_z; in fixed point, one step breaks a tie.
    """
    other = tl.where(c == second, third, second)
    of_other = tl.where(c == second, of_third, of_second)
    of_c, of_z = a_z - phi, a - phi_z
    c_wins = (of_c < of_z + tl.where(c < z, STEP, 0.0)) & (of_c < of_other + tl.where(c < other, STEP, 0.0))
    other_wins = of_other < of_z + tl.where(other < z, STEP, 0.0)
    return tl.where(c == z, 0, tl.where(c_wins, 1, tl.where(other_wins, 2, 0)))


@triton.jit
def threshold(c, phi, z, best):
    """theta_c; -inf for z."""
    return tl.where(c == z, float("-inf"), best + phi + tl.where(c < z, STEP, 0.0))


@triton.jit
def swaps_of(logits, log_pi, ahead, state, row, c, mask, C, S):
    """Of a row's categories c: a, theta and who wins the pair (z, c)."""
    z, second, third = tl.load(ahead + row * 3), tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    own, at = state + row * S, row * C + c
    phi = logit_at(logits, at, mask, tl.load(own + LARGEST))
    a_z, phi_z = tl.load(own + NOISE_Z), tl.load(own + LOGIT_Z)
    of_second, of_third = tl.load(own + SECOND), tl.load(own + THIRD)
    a = noise_at(log_pi, at, mask)
    code = winner_with_z(c, a, phi, z, a_z, phi_z, second, of_second, third, of_third)
    return a, threshold(c, phi, z, tl.load(own + BEST)), code


# ---------------------------------------------------------------- order


@triton.jit
def last_of(counter, count):
    """Whether this program is the last of `count` to arrive; it sees what the others stored before they arrived."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1) == count - 1


@triton.jit
def bucket_of(x, limit, count: tl.constexpr):
    """A bucket that never decreases with x <= limit, near count e^(x - limit): 2^-n (1 - r/2) for n + r nats / ln 2."""
    s = tl.minimum((limit - x) * PER_LN2, 1000.0)
    n = tl.floor(s)
    power = ((1023 - n.to(tl.int64)) << 52).to(tl.float64, bitcast=True)
    return tl.minimum((power * (1 - 0.5 * (s - n)) * count).to(tl.int32), count - 1)


@triton.jit
def _largest(logits, tops, can_win, scratch, C, P, SPAN, N, BLOCK: tl.constexpr):
    """The largest logit of each chunk: tops [R, P]; zeros in can_win [R, C] and scratch [R, N]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    largest = _native(logits, row * C + chunk * SPAN * BLOCK + k, chunk * SPAN * BLOCK + k < C)
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + k
        largest = tl.maximum(largest, _native(logits, row * C + c, c < C))
        tl.store(can_win + row * C + c, tl.zeros([BLOCK], tl.int8), mask=c < C)
    tl.store(tops + row * P + chunk, tl.max(largest, 0).to(tl.float64))
    start = chunk * BLOCK
    while start < N:
        tl.store(scratch + row * N + start + k, tl.zeros([BLOCK], tl.int32), mask=start + k < N)
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
    logits, log_pi, tops, values, indices, ahead, state, scratch, C, P, SPAN, N, S,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The first of each chunk's race, its least and its largest noise: values [R, 3, P], indices [R, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    largest = tl.max(tl.load(tops + row * P + p, mask=p < P, other=float("-inf")), 0)
    k = tl.arange(0, BLOCK)
    first = chunk * SPAN * BLOCK + k
    best = tl.full([BLOCK], float("inf"), tl.float64)
    least = best
    highest = -best
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + k
        mask = c < C
        phi, a = logit_at(logits, row * C + c, mask, largest), noise_at(log_pi, row * C + c, mask)
        o = tl.where(mask, a - phi, float("inf"))
        first = tl.where(o < best, c, first)
        best = tl.minimum(best, o)
        least = tl.minimum(least, tl.where(mask, a, float("inf")))
        highest = tl.maximum(highest, tl.where(mask, a, float("-inf")))
    value, index = _least_of(best, first)
    at = values + row * 3 * P + chunk
    tl.store(at, value)
    tl.store(at + P, tl.min(least, 0))
    tl.store(at + 2 * P, tl.max(highest, 0))
    tl.store(indices + row * P + chunk, index)
    if last_of(scratch + row * N, P):
        _finish(logits, log_pi, tops, values, indices, ahead, state, row, C, P, SPAN, S, BLOCK, BLOCK_P)


@triton.jit
def _least_of(values, indices):
    """The least value and the lowest of its indices."""
    least = tl.min(values, 0)
    return least, tl.min(tl.where(values == least, indices, 2147483647), 0)


@triton.jit
def _finish(
    logits, log_pi, tops, values, indices, ahead, state, row, C, P, SPAN, S,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Reduce the chunks: ahead [R, 3] and state [R, S]; a chunk that loses its first is looked at again."""
    own = state + row * S
    p, k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK)
    value = values + row * 3 * P + p
    top = tl.load(tops + row * P + p, mask=p < P, other=float("-inf"))
    largest = tl.max(top, 0)
    o = tl.load(value, mask=p < P, other=float("inf"))
    first = tl.load(indices + row * P + p, mask=p < P, other=0)
    least = tl.load(value + P, mask=p < P, other=float("inf"))
    z = -1
    second = -1
    for place in tl.static_range(3):
        best, winner = _least_of(o, first)
        winner = tl.minimum(winner, C - 1)
        chunk = winner // (SPAN * BLOCK)
        tl.store(ahead + row * 3 + place, winner.to(tl.int64))
        tl.store(own + place, best)
        if place < 2:
            if place == 0:
                z = winner
            second = winner
            again = tl.full([BLOCK], float("inf"), tl.float64)
            index = chunk * SPAN * BLOCK + k
            noise = again
            logit = -again
            for i in range(SPAN):
                c = (chunk * SPAN + i) * BLOCK + k
                left = (c < C) & (c != z) & (c != second)
                x = tl.load(logits + row * C + c, mask=left, other=float("-inf")).to(tl.float64)
                phi, a = below_largest(x, largest), noise_at(log_pi, row * C + c, left)
                of_c = tl.where(left, a - phi, float("inf"))
                index = tl.where(of_c < again, c, index)
                again = tl.minimum(again, of_c)
                noise = tl.minimum(noise, tl.where(left, a, float("inf")))
                logit = tl.maximum(logit, x)
            if place == 0:
                least = tl.where(p == chunk, tl.min(noise, 0), least)
                top = tl.where(p == chunk, tl.max(logit, 0), top)
            next_value, next_index = _least_of(again, index)
            o = tl.where(p == chunk, next_value, o)
            first = tl.where(p == chunk, next_index, first)
    a_z = noise_at(log_pi, row * C + z, True)
    phi_z = logit_at(logits, row * C + z, True, largest)
    tl.store(own + NOISE_Z, a_z)
    tl.store(own + LOGIT_Z, phi_z)
    tl.store(own + LIMIT, a_z - phi_z + below_largest(tl.max(top, 0), largest) + STEP)
    tl.store(own + LEAST, tl.min(least, 0))
    tl.store(own + HIGHEST, tl.max(tl.load(value + 2 * P, mask=p < P, other=float("-inf")), 0))
    tl.store(own + LARGEST, largest)


@triton.jit
def _who_can_win(
    logits, log_pi, ahead, state, can_win, scratch, starts, members, C, P, SPAN, N, S,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Ones in can_win [R, C]: z, who wins against some reference or against z, and the first of the others.

    Elements below the limit go to members [R, C], in any order, and are counted by their buckets: starts [R,
    BUCKETS + 1] says where each bucket starts, and their total.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    second, third = tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    z, limit, least = tl.load(ahead + row * 3), tl.load(state + row * S + LIMIT), tl.load(state + row * S + LEAST)
    second_wins = tl.zeros([BLOCK], tl.int32)
    third_wins = tl.zeros([BLOCK], tl.int32)
    own = scratch + row * N
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        mask = c < C
        a, theta, code = swaps_of(logits, log_pi, ahead, state, row, c, mask, C, S)
        wins = (theta > least) | (code == 1) | (c == z)
        tl.store(can_win + row * C + c, tl.full([BLOCK], 1, tl.int8), mask=mask & wins)
        other_wins = mask & (code == 2)
        second_wins = second_wins | (other_wins & (c != second)).to(tl.int32)
        third_wins = third_wins | (other_wins & (c == second)).to(tl.int32)
        active = mask & (c != z) & (a < limit)
        found = active.to(tl.int32)
        total = tl.sum(found, 0)
        if total > 0:
            start = tl.atomic_add(own + TOTAL, total)
            tl.store(members + row * C + start + tl.cumsum(found, 0) - 1, c, mask=active)
            tl.atomic_add(own + COUNTS + bucket_of(tl.minimum(a, limit), limit, BUCKETS), 1, mask=active)
    one = tl.full([], 1, tl.int8)
    tl.store(can_win + row * C + second, one, mask=tl.max(second_wins, 0) > 0)
    tl.store(can_win + row * C + third, one, mask=tl.max(third_wins, 0) > 0)
    if last_of(own + 1, P):
        b = tl.arange(0, BUCKETS)
        count = tl.load(own + COUNTS + b)
        tl.store(starts + row * (BUCKETS + 1) + b, tl.cumsum(count, 0) - count)
        tl.store(starts + row * (BUCKETS + 1) + BUCKETS, tl.sum(count, 0))


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ahead [..., 3], can_win [..., C], state [..., STATE], starts [..., buckets + 1] and members [..., C]: the inputs
    are [..., C] and contiguous.
    """
    batch, categories = logits.shape[:-1], logits.shape[-1]
    rows, buckets = batch.numel(), buckets_of(categories)
    block, span, chunks = chunks_of(rows, categories)
    grid, size = (rows, chunks), {"BLOCK": block, "num_warps": 8}
    block_p = max(16, triton.next_power_of_2(chunks))
    taken = int(COUNTS) + buckets
    tops, values = (logits.new_empty(rows * count * chunks, dtype=torch.float64) for count in (1, 3))
    indices, scratch = (logits.new_empty(rows * count, dtype=torch.int32) for count in (chunks, taken))
    ahead = logits.new_empty((*batch, 3), dtype=torch.int64)
    state = logits.new_empty((*batch, STATE), dtype=torch.float64)
    can_win = logits.new_empty(logits.shape, dtype=torch.bool)
    starts = logits.new_empty((*batch, buckets + 1), dtype=torch.int32)
    members = logits.new_empty(logits.shape, dtype=torch.int32)
    flags = can_win.view(torch.int8)
    _largest[grid](logits, tops, flags, scratch, categories, chunks, span, taken, **size)
    _first[grid](
        logits, log_pi, tops, values, indices, ahead, state, scratch, categories, chunks, span, taken, STATE,
        BLOCK_P=block_p, **size,
    )  # fmt: skip
    _who_can_win[grid](
        logits, log_pi, ahead, state, flags, scratch, starts, members, categories, chunks, span, taken, STATE,
        BUCKETS=buckets, **size,
    )  # fmt: skip
    return ahead, can_win, state, starts, members


def chunks_of(rows: int, categories: int, block: int = 1024) -> tuple[int, int, int]:
    """Categories per block, blocks per chunk and chunks per row: enough programs to keep a GPU busy, and no more."""
    block = min(block, max(16, triton.next_power_of_2(categories)))
    blocks = triton.cdiv(categories, block)
    span = min(blocks, max(triton.cdiv(blocks, CHUNKS), rows * blocks // PROGRAMS, 1))
    return block, span, triton.cdiv(blocks, span)
