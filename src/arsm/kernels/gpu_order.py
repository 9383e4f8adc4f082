"""`arsm.kernels.order` as Triton kernels: static shapes, no synchronisation.

Rows are cut into chunks, one program each. The order is a counting sort: elements fall into buckets that are evenly
filled, since pi is uniform below a small limit, and are compared exactly within a bucket. Atomics decide which element
takes which place of a bucket, and nothing else depends on them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.noise import LOWEST, RESOLUTION

BUCKETS = 8192
"""Most buckets per row."""
CHUNKS = 2048
"""Most chunks per row: one program reduces what they found."""
UNIT = tl.constexpr(1 / RESOLUTION)
STEP = tl.constexpr(RESOLUTION)
LEAST_LOGIT = tl.constexpr(LOWEST)
LEAST_NOISE = tl.constexpr(LOWEST / 2)
INTEGERS = tl.constexpr(1.5 * 2.0**52)
"""Added and subtracted, it rounds to an integer, half to even."""
PER_LN2 = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------- what all kernels compute alike


@triton.jit
def _noise(log_pi, at, mask):
    """a: ln pi in fixed point, as `noise.fixed_point` rounds it."""
    a = tl.load(log_pi + at, mask=mask, other=0.0).to(tl.float64)
    return (tl.maximum(a, LEAST_NOISE) * UNIT + INTEGERS - INTEGERS) * STEP


@triton.jit
def _logit(logits, at, mask, largest):
    """phi: the logits below their maximum in fixed point; -inf where masked or outside."""
    phi = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float64)
    rounded = (tl.maximum(phi - largest, LEAST_LOGIT) * UNIT + INTEGERS - INTEGERS) * STEP
    return tl.where(phi == float("-inf"), float("-inf"), rounded)


@triton.jit
def _bucket(x, limit, count: tl.constexpr):
    """A bucket that never decreases with x <= limit, near count e^(x - limit): 2^-n (1 - r/2) for n + r nats / ln 2."""
    s = tl.minimum((limit - x) * PER_LN2, 1000.0)
    n = tl.floor(s)
    power = ((1023 - n.to(tl.int64)) << 52).to(tl.float64, bitcast=True)
    return tl.minimum((power * (1 - 0.5 * (s - n)) * count).to(tl.int32), count - 1)


# ---------------------------------------------------------------- order


@triton.jit
def _first_three(logits, log_pi, largest, values, indices, C, P, BLOCK: tl.constexpr):
    """The first three of each chunk's race, and its largest two logits: values [R, 5, P], indices [R, 4, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = chunk * BLOCK
    c = tl.arange(0, BLOCK)
    mask = start + c < C
    at = row * C + start + c
    phi = _logit(logits, at, mask, tl.load(largest + row).to(tl.float64))
    o = tl.where(mask, _noise(log_pi, at, mask) - phi, float("inf"))
    for place in tl.static_range(3):
        value, index = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + (row * 5 + place) * P + chunk, value)
        tl.store(indices + (row * 4 + place) * P + chunk, start + index)
        o = tl.where(c == index, float("inf"), o)
    for place in tl.static_range(3, 5):
        value, index = tl.max(phi, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + (row * 5 + place) * P + chunk, value)
        if place == 3:
            tl.store(indices + (row * 4 + place) * P + chunk, start + index)
        phi = tl.where(c == index, float("-inf"), phi)


@triton.jit
def _finish(logits, log_pi, largest, values, indices, ahead, state, C, P, BLOCK_P: tl.constexpr):
    """Reduce the chunks: ahead [R, 4], state [R, 6] = values of the three, a_z, phi_z, a bound of theta."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    mask = p < P
    value, index = values + row * 5 * P + p, indices + row * 4 * P + p
    o_1 = tl.load(value, mask=mask, other=float("inf"))
    o_2 = tl.load(value + P, mask=mask, other=float("inf"))
    o_3 = tl.load(value + 2 * P, mask=mask, other=float("inf"))
    i_1 = tl.load(index, mask=mask, other=0)
    i_2 = tl.load(index + P, mask=mask, other=0)
    i_3 = tl.load(index + 2 * P, mask=mask, other=0)
    _, chunk = tl.min(o_1, 0, return_indices=True, return_indices_tie_break_left=True)
    z = tl.sum(tl.where(p == chunk, i_1, 0), 0)
    for place in tl.static_range(3):
        best, chunk = tl.min(o_1, 0, return_indices=True, return_indices_tie_break_left=True)
        here = p == chunk
        winner = tl.sum(tl.where(here, i_1, 0), 0)
        tl.store(ahead + row * 4 + place, winner.to(tl.int64))
        tl.store(state + row * 6 + place, best)
        o_1, i_1 = tl.where(here, o_2, o_1), tl.where(here, i_2, i_1)
        o_2, i_2 = tl.where(here, o_3, o_2), tl.where(here, i_3, i_2)
        o_3 = tl.where(here, float("inf"), o_3)
    phi_1 = tl.load(value + 3 * P, mask=mask, other=float("-inf"))
    phi_2 = tl.load(value + 4 * P, mask=mask, other=float("-inf"))
    top = tl.load(index + 3 * P, mask=mask, other=-1)
    without_z = tl.max(tl.where(top == z, phi_2, phi_1), 0)
    a_z = _noise(log_pi, row * C + z, True)
    phi_z = _logit(logits, row * C + z, True, tl.load(largest + row).to(tl.float64))
    tl.store(state + row * 6 + 3, a_z)
    tl.store(state + row * 6 + 4, phi_z)
    tl.store(state + row * 6 + 5, a_z - phi_z + without_z + STEP)


@triton.jit
def _count(log_pi, ahead, state, counts, C, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """How many elements below the bound of theta fall into each bucket: counts [R, BUCKETS]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = _noise(log_pi, row * C + c, c < C)
    limit = tl.load(state + row * 6 + 5)
    active = (c < C) & (c != tl.load(ahead + row * 4)) & (a < limit)
    bucket = _bucket(tl.minimum(a, limit), limit, BUCKETS)
    tl.atomic_add(counts + row * BUCKETS + bucket, 1, mask=active)


@triton.jit
def _starts(counts, starts, cursors, ahead, BUCKETS: tl.constexpr):
    """Where each bucket starts: [R, BUCKETS + 1], twice; their total becomes ahead[3]."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BUCKETS)
    count = tl.load(counts + row * BUCKETS + b)
    start = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    tl.store(starts + row * (BUCKETS + 1) + b, start)
    tl.store(starts + row * (BUCKETS + 1) + BUCKETS, total)
    tl.store(cursors + row * BUCKETS + b, start)
    tl.store(ahead + row * 4 + 3, total.to(tl.int64))


@triton.jit
def _fill(log_pi, ahead, state, cursors, members, C, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """The elements of each bucket, in any order: members [R, C]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = _noise(log_pi, row * C + c, c < C)
    limit = tl.load(state + row * 6 + 5)
    active = (c < C) & (c != tl.load(ahead + row * 4)) & (a < limit)
    bucket = _bucket(tl.minimum(a, limit), limit, BUCKETS)
    place = tl.atomic_add(cursors + row * BUCKETS + bucket, 1, mask=active)
    tl.store(members + row * C + place, c, mask=active)


@triton.jit
def _below(log_pi, starts, members, row, C, x, tie, limit, mask, BUCKETS: tl.constexpr):
    """How many ordered elements lie below x, or at x with an index below `tie`."""
    bucket = _bucket(tl.where(mask, x, limit), limit, BUCKETS)
    at = starts + row * (BUCKETS + 1) + bucket
    start = tl.load(at, mask=mask, other=0)
    stop = tl.load(at + 1, mask=mask, other=0)
    below = start
    longest = tl.max(stop - start, 0)
    i = 0
    while i < longest:
        inside = start + i < stop
        member = tl.load(members + row * C + start + i, mask=inside, other=0)
        a = _noise(log_pi, row * C + member, inside)
        below += (inside & ((a < x) | ((a == x) & (member < tie)))).to(tl.int32)
        i += 1
    return below


@triton.jit
def _rank(
    logits,
    log_pi,
    largest,
    ahead,
    state,
    starts,
    members,
    flags,
    can_win,
    with_z,
    wins,
    rank,
    C,
    BLOCK: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """How many references c wins against, its own rank, and who wins its pair with z; flags [R, 2]: other winners."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    at = row * C + c
    z, second, third = tl.load(ahead + row * 4), tl.load(ahead + row * 4 + 1), tl.load(ahead + row * 4 + 2)
    best, a_z, phi_z = tl.load(state + row * 6), tl.load(state + row * 6 + 3), tl.load(state + row * 6 + 4)
    limit = tl.load(state + row * 6 + 5)
    a = _noise(log_pi, at, mask)
    phi = _logit(logits, at, mask, tl.load(largest + row).to(tl.float64))

    theta = best + phi + tl.where(c < z, STEP, 0.0)
    challenges = mask & (c != z) & (phi > float("-inf"))
    won = _below(log_pi, starts, members, row, C, theta, -1, limit, challenges, BUCKETS)
    won = tl.where(challenges, won, 0)
    active = mask & (c != z) & (a < limit)
    own = _below(log_pi, starts, members, row, C, a, c, limit, active, BUCKETS)

    # The pair (z, c) gives c the value a_z - phi_c and z the value a_c - phi_z; in fixed point, one step breaks a tie.
    other = tl.where(c == second, third, second)
    of_other = tl.where(c == second, tl.load(state + row * 6 + 2), tl.load(state + row * 6 + 1))
    of_c, of_z = a_z - phi, a - phi_z
    c_wins = (of_c < of_z + tl.where(c < z, STEP, 0.0)) & (of_c < of_other + tl.where(c < other, STEP, 0.0))
    other_wins = of_other < of_z + tl.where(other < z, STEP, 0.0)
    code = tl.where(c_wins, 1, tl.where(other_wins, 2, 0))
    code = tl.where(mask & (c != z), code, 0)

    tl.store(wins + at, won, mask=mask)
    tl.store(rank + at, tl.where(active, own, C), mask=mask)
    tl.store(with_z + at, code.to(tl.int8), mask=mask)
    tl.store(can_win + at, ((won > 0) | (code == 1) | (c == z)).to(tl.int8), mask=mask)
    tl.atomic_max(flags + row * 2, tl.max(tl.where((code == 2) & (c != second), 1, 0), 0))
    tl.atomic_max(flags + row * 2 + 1, tl.max(tl.where((code == 2) & (c == second), 1, 0), 0))


@triton.jit
def _others(ahead, flags, can_win, C):
    """The first of the others can win too, if some pair said so."""
    row = tl.program_id(0).to(tl.int64)
    for place in tl.static_range(2):
        at = can_win + row * C + tl.load(ahead + row * 4 + 1 + place)
        if tl.load(flags + row * 2 + place) > 0:
            tl.store(at, 1)


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`arsm.kernels.order` for rows [R, C]."""
    rows, categories = logits.shape
    block, chunks = chunks_of(categories)
    grid = (rows, chunks)
    buckets = min(BUCKETS, max(16, triton.next_power_of_2(categories)))
    largest = logits.amax(-1)
    values = logits.new_empty((rows, 5, chunks), dtype=torch.float64)
    indices, members = (logits.new_empty(shape, dtype=torch.int32) for shape in ((rows, 4, chunks), (rows, categories)))
    ahead = logits.new_empty((rows, 4), dtype=torch.int64)
    state = logits.new_empty((rows, 6), dtype=torch.float64)
    zeros = logits.new_zeros(rows * (buckets + 2), dtype=torch.int32)
    counts, flags = zeros[: rows * buckets], zeros[rows * buckets :]
    starts, cursors = (logits.new_empty((rows, count), dtype=torch.int32) for count in (buckets + 1, buckets))
    can_win, with_z = (torch.empty_like(logits, dtype=torch.int8) for _ in range(2))
    wins, rank = (torch.empty_like(logits, dtype=torch.int32) for _ in range(2))

    _first_three[grid](logits, log_pi, largest, values, indices, categories, chunks, BLOCK=block)
    _finish[(rows,)](
        logits, log_pi, largest, values, indices, ahead, state, categories, chunks,
        BLOCK_P=max(16, triton.next_power_of_2(chunks)),
    )  # fmt: skip
    _count[grid](log_pi, ahead, state, counts, categories, BLOCK=block, BUCKETS=buckets)
    _starts[(rows,)](counts, starts, cursors, ahead, BUCKETS=buckets, num_warps=16)
    _fill[grid](log_pi, ahead, state, cursors, members, categories, BLOCK=block, BUCKETS=buckets)
    _rank[grid](
        logits, log_pi, largest, ahead, state, starts, members, flags, can_win, with_z, wins, rank, categories,
        BLOCK=block, BUCKETS=buckets,
    )  # fmt: skip
    _others[(rows,)](ahead, flags, can_win, categories)
    return ahead, can_win.view(torch.bool), with_z, wins, rank


def chunks_of(categories: int) -> tuple[int, int]:
    """Categories per chunk and chunks per row."""
    block = max(1024, triton.next_power_of_2(triton.cdiv(categories, CHUNKS)))
    block = min(block, max(16, triton.next_power_of_2(categories)))
    return block, triton.cdiv(categories, block)
