"""`arsm.kernels.merge` as Triton kernels: static shapes, no synchronisation.

`gpu_rank` puts the elements below the limit in order. One pass over all categories then
looks each theta up in that order. Sums that atomics add up are int64 in fixed point,
the same in every order of summation, so that a run repeats to the bit.
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
    LARGEST,
    LIMIT,
    Chunks,
    below_largest,
    bucket_of,
    chunks_of,
    fixed_noise,
    load_both,
    load_bounds,
    noise_at,
    swaps,
)
from arsm.kernels.gpu_rank import (
    BINS,
    COPIES,
    CURSORS,
    NOISES,
    PER_VALUE,
    SCALES,
    UNIT,
    WEIGHT_Z,
    WEIGHTS,
    add_published,
    copies_of,
    fill,
    publish,
    rank,
    take_turn,
)

AT_ONCE = 1 << 23
"""Categories whose order and sums are held at one time, 24 bytes each."""
EACH, PROGRAMS, CHUNKS, REGISTERS = 2, 8192, 2048, 128
"""Sizes of the kernel that takes most time, as in `gpu_order`; its programs are one warp each."""
RANKED, ALONG, TURNS, TAKERS = 256, 1024, 4096, 4096
"""Elements that a program ranks at once; elements per chunk of the order; the most
chunks, so that very long rows have longer ones; and programs that sum along the order,
over all rows."""


@triton.jit
def swapped_with_z(c, code, second, d, d_second, d_third):
    """d of the winner of the pair (z, c)."""
    return tl.where(
        code == 1, d, tl.where(code == 2, tl.where(c == second, d_third, d_second), 0.0)
    )


@triton.jit
def _load(logits, log_pi, f, at, mask):
    """Logit, ln pi and f."""
    x, noise = load_both(logits, log_pi, at, mask)
    return x, noise, tl.load(f + at, mask=mask, other=0.0)


@triton.jit
def _load_row(state, scales, f, z, second, third, C):
    """The numbers of a row that `_terms` needs, the limit of the order, and w_z."""
    best, sum_z, bound_c, bound_z, with_second = load_bounds(state)
    largest = tl.load(state + LARGEST)
    limit = tl.load(state + LIMIT)
    f_z = tl.load(f + z).to(tl.float64)
    # differences to f(z): equal values then cancel exactly, whatever their size
    d_second = tl.load(f + second).to(tl.float64) - f_z
    d_third = tl.load(f + third).to(tl.float64) - f_z
    w_z = tl.load(scales + WEIGHT_Z)
    # two literals would be divided in float32
    even = tl.full([], 1.0, tl.float64) / C
    values = (f_z, d_second, d_third, even, largest, z, second)
    return (values, (best, sum_z, bound_c, bound_z, with_second)), limit, w_z


@triton.jit
def _terms(c, x, noise, value, row):
    """theta, w, d, and d of the winner of the pair (z, c); row is that of `_load_row`."""
    f_z, d_second, d_third, even, largest, z, second = row[0]
    best, sum_z, bound_c, bound_z, with_second = row[1]
    a = fixed_noise(noise)
    phi = below_largest(x, largest)
    d = value.to(tl.float64) - f_z
    theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
    w = even - tl.exp(noise.to(tl.float64))
    return theta, w, d, swapped_with_z(c, code, second, d, d_second, d_third)


@triton.jit
def _rank_below(theta, limit, starts, ranked, log_pi, mask, BUCKETS: tl.constexpr):
    """r: how many of the ordered a lie below theta."""
    # all of the buckets before theta's own do
    at = starts + bucket_of(tl.minimum(theta, limit), limit, BUCKETS)
    r = tl.load(at, mask=mask, other=0)
    stop = tl.load(at + 1, mask=mask, other=0)
    k = r
    while tl.max(stop - k, 0) > 0:
        member = tl.load(ranked + k, mask=k < stop, other=0)
        below = (k < stop) & (noise_at(log_pi, member, k < stop) < theta)
        r += below.to(tl.int32)
        # in order of rank: the first that is not below ends it
        k = tl.where(below, k + 1, stop)
    return r


@triton.jit
def _load_first_noises(scales):
    """The noise of the first ranks, which many thetas exceed: they are counted in registers."""
    # one name for each, because a block of six would be spread over the threads
    a0 = tl.load(scales + NOISES)
    a1 = tl.load(scales + NOISES + 1)
    a2 = tl.load(scales + NOISES + 2)
    a3 = tl.load(scales + NOISES + 3)
    a4 = tl.load(scales + NOISES + 4)
    a5 = tl.load(scales + NOISES + 5)
    return a0, a1, a2, a3, a4, a5


@triton.jit
def _count_below(theta, first):
    """r, as far as the first ranks tell: how many of their a lie below theta."""
    a0, a1, a2, a3, a4, a5 = first
    r = (a0 < theta).to(tl.int32) + (a1 < theta).to(tl.int32) + (a2 < theta).to(tl.int32)
    return r + (a3 < theta).to(tl.int32) + (a4 < theta).to(tl.int32) + (a5 < theta).to(tl.int32)


@triton.jit
def _add_above(s0, s1, s2, s3, s4, s5, term, theta, first):
    """The second sum of rank k collects w d of every theta above its noise."""
    a0, a1, a2, a3, a4, a5 = first
    s0 += tl.where(a0 < theta, term, 0.0)
    s1 += tl.where(a1 < theta, term, 0.0)
    s2 += tl.where(a2 < theta, term, 0.0)
    s3 += tl.where(a3 < theta, term, 0.0)
    s4 += tl.where(a4 < theta, term, 0.0)
    s5 += tl.where(a5 < theta, term, 0.0)
    return s0, s1, s2, s3, s4, s5


@triton.jit
def _queue_up(queue, end, c, chosen):
    """Append the chosen categories to the queue; its new end."""
    found = chosen.to(tl.int32)
    count = tl.sum(found, 0)
    # most blocks have none: they need no cumulative sum
    if count > 0:
        tl.store(queue + end + tl.cumsum(found, 0) - 1, c, mask=chosen)
        end += count
    return end


@triton.jit
def _sum_queued(
    queue, begin, end, logits, log_pi, f, row, total, limit, w_z, scales, starts, ranked,
    noise_sums, value_sums, sums,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Sums of the queued categories, whose rank is looked up; the corrected total."""
    unit = tl.load(scales + UNIT)
    per_value = tl.load(scales + PER_VALUE)
    w5 = tl.load(scales + WEIGHTS + BINS)
    while begin < end:
        place = begin + tl.arange(0, BLOCK)
        mask = place < end
        c = tl.load(queue + place, mask=mask, other=0)
        x, noise, value = _load(logits, log_pi, f, c, mask)
        theta, w, d, swapped = _terms(c, x, noise, value, row)
        r = _rank_below(theta, limit, starts, ranked, log_pi, mask, BUCKETS)
        more = mask & (r > BINS)
        # replaces what the first pass stored, and corrects the total by the difference
        first = tl.load(noise_sums + r, mask=more, other=0).to(tl.float64) * unit
        tl.store(sums + c, d * first + swapped * w_z, mask=more)
        total += tl.where(more, d * (first - w5), 0.0)
        tl.atomic_add(value_sums + r, (w * d * per_value).to(tl.int64), mask=more, sem="relaxed")
        begin += BLOCK
    return total


@triton.jit
def _store_parts(part, P, s0, s1, s2, s3, s4, s5, total, of_z):
    """A chunk's shares, each summed over its block."""
    tl.store(part, tl.sum(s0, 0))
    tl.store(part + P, tl.sum(s1, 0))
    tl.store(part + 2 * P, tl.sum(s2, 0))
    tl.store(part + 3 * P, tl.sum(s3, 0))
    tl.store(part + 4 * P, tl.sum(s4, 0))
    tl.store(part + 5 * P, tl.sum(s5, 0))
    tl.store(part + 6 * P, tl.sum(total, 0))
    tl.store(part + 7 * P, tl.sum(of_z, 0))


@triton.jit
def _sum_chunk(
    logits, log_pi, f, row, first, w_z, scales, sums, queue, begin, after, x, noise, value, C, SPAN,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every category of the chunk, as if it beat no more than the first ranks: the chunk's
    shares of the second sum of the first ranks, of sum_c R_c and of R_z, and the end of
    the queue of those that may beat more.

    x, noise and value are those of the first block, which are on their way.
    """
    total = tl.zeros([BLOCK], tl.float64)
    of_z = total
    s0 = total
    s1 = total
    s2 = total
    s3 = total
    s4 = total
    s5 = total
    end = begin
    for i in range(SPAN):
        c, this_x, this_noise, this_value = after, x, noise, value
        after = c + BLOCK
        x, noise, value = _load(logits, log_pi, f, after, (after < C) & (i + 1 < SPAN))
        theta, w, d, swapped = _terms(c, this_x, this_noise, this_value, row)
        of_z += swapped * w
        s0, s1, s2, s3, s4, s5 = _add_above(s0, s1, s2, s3, s4, s5, w * d, theta, first)

        # the first sum is d_c times the weights below its rank
        r = _count_below(theta, first)
        result = d * tl.load(scales + WEIGHTS + r) + swapped * w_z  # of z: 0
        total += result
        tl.store(sums + c, result, mask=c < C)
        # who beats all of the first ranks may beat more: it waits in the queue
        end = _queue_up(queue, end, c, r == BINS)
    return s0, s1, s2, s3, s4, s5, total, of_z, end


@triton.jit
def _sum(
    logits, log_pi, ahead, state, f, scales, starts, ranked, noise_sums, value_sums, queue,
    sums, parts,
    C, ROW, P, SPAN, S, BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """R_c without its second sum: sums [R, C].

    parts [R, BINS + 2, P] are this chunk's shares of the second sum of the first ranks,
    of sum_c R_c and of R_z. The terms w d of the others are added at place r_c of a
    copy of value_sums; they wait in queue [R, C] until their chunk is done.
    """
    # 64 bits: rows times categories may exceed 2^31
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    third = tl.load(ahead + row * 3 + 2)
    z = tl.load(ahead + row * 3).to(tl.int32)
    second = tl.load(ahead + row * 3 + 1).to(tl.int32)
    logits += row * C
    log_pi += row * C
    f += row * ROW
    sums += row * C
    ranked += row * C
    noise_sums += row * C
    value_sums += row * C
    queue += row * C
    starts += row * (BUCKETS + 1)
    members = tl.load(starts + BUCKETS)
    state += row * S
    scales += row * SCALES

    # the first block is on its way while the row's numbers are read
    begin = chunk * SPAN * BLOCK
    after = begin + tl.arange(0, BLOCK)
    x, noise, value = _load(logits, log_pi, f, after, after < C)
    row_numbers, limit, w_z = _load_row(state, scales, f, z, second, third, C)
    first = _load_first_noises(scales)
    s0, s1, s2, s3, s4, s5, total, of_z, end = _sum_chunk(
        logits, log_pi, f, row_numbers, first, w_z, scales, sums, queue, begin, after,
        x, noise, value, C, SPAN, BLOCK,
    )  # fmt: skip

    # second pass: the queue, one block after the other, once all threads have written to it
    tl.debug_barrier()
    # chunks take turns with the copies, so that few of them add to the same sum
    value_sums += chunk % copies_of(members, C) * (members + 1)
    total = _sum_queued(
        queue, begin, end, logits, log_pi, f, row_numbers, total, limit, w_z, scales, starts,
        ranked, noise_sums, value_sums, sums, BLOCK, BUCKETS,
    )  # fmt: skip
    part = parts + row * (BINS + 2) * P + chunk
    _store_parts(part, P, s0, s1, s2, s3, s4, s5, total, of_z)


@triton.jit
def _at_place(value_sums, k, count, C):
    """The sum of w d at places k, from all copies."""
    copies = copies_of(count, C)
    value = tl.zeros_like(k).to(tl.int64)
    for copy in tl.static_range(COPIES):
        value += tl.load(
            value_sums + copy * (count + 1) + k, mask=(k <= count) & (copy < copies), other=0
        )
    return value


@triton.jit
def _beaten(
    ahead, starts, scratch, published, ranked, value_sums, sums, parts, scales, centre, C, P, N,
    LENGTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Add the second sum of the ordered elements, from the last rank down, put R_z in
    its place, and find mean(R).
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(starts + row * (BUCKETS + 1) + BUCKETS)
    per_value = tl.load(scales + row * SCALES + PER_VALUE)
    ranked += row * C
    value_sums += row * C
    sums += row * C
    published += row * 2 * BLOCK_T
    parts += row * (BINS + 2) * P
    # sums from the end: the first turn takes the last ranks, and the last turn, which knows all of
    # the others, finishes the row
    last = count // LENGTH
    p = tl.arange(0, BLOCK_P)
    q = tl.arange(0, BINS + 2)
    for _ in range(tl.program_id(1), last + 1, tl.num_programs(1)):
        turn = take_turn(scratch + row * N + 1, last + 1)
        # loaded early, for these loads take longest
        shares = tl.load(
            parts + q[:, None] * P + p[None, :], mask=(p < P)[None, :] & (turn == last), other=0.0
        )
        k = (last - turn) * LENGTH + tl.arange(0, LENGTH)
        value = _at_place(value_sums, k, count, C)
        own = tl.sum(value, 0)
        # sum_k sum_{r > k} v_r = sum_r (r - BINS) v_r, over the ranks k from BINS on
        rest = tl.sum(value.to(tl.float64) * tl.maximum(k - BINS, 0).to(tl.float64), 0) / per_value
        # published before this program reads others: nobody waits longer than it must
        publish(published, turn, own)
        publish(published + BLOCK_T, turn, rest)

        # the first ranks got their second sums in registers
        mask = (k >= BINS) & (k < count)
        place = sums + tl.load(ranked + k, mask=mask, other=0)
        first = tl.load(place, mask=mask, other=0.0).to(tl.float64)
        second = (add_published(published, turn, own, BLOCK_T) - tl.cumsum(value, 0)).to(
            tl.float64
        ) / per_value
        tl.store(place, first + second, mask=mask)

        if turn == last:
            found = tl.sum(shares, 1)
            ordered = (q < BINS) & (q < count)
            one = sums + tl.load(ranked + q, mask=ordered, other=0)
            tl.store(
                one, tl.load(one, mask=ordered, other=0.0).to(tl.float64) + found, mask=ordered
            )
            of_z = tl.sum(tl.where(q == BINS + 1, found, 0.0), 0)
            total = tl.sum(tl.where(ordered | (q >= BINS), found, 0.0), 0)
            tl.store(sums + tl.load(ahead + row * 3), of_z)
            tl.store(
                centre + row, (total + add_published(published + BLOCK_T, turn, rest, BLOCK_T)) / C
            )


def merge(
    logits: Tensor,
    log_pi: Tensor,
    ahead: Tensor,
    state: Tensor,
    starts: Tensor,
    members: Tensor,
    f: Tensor,
) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.merge` for contiguous [..., C]; only rows of f need be contiguous."""
    sums = f.new_empty(f.shape)
    centre = f.new_empty((*f.shape[:-1], 1), dtype=torch.float64)
    whole = [
        x.flatten(0, -2) for x in (logits, log_pi, ahead, state, starts, members, f, sums, centre)
    ]
    rows = len(whole[0])
    step = triton.cdiv(rows, triton.cdiv(f.numel(), AT_ONCE))
    of_members = chunks_of(rows, f.shape[-1])  # as `order` left them
    for start in range(0, rows, step):
        _merge_rows(*(x[start : start + step] for x in whole), of_members)
    return sums, centre


def _merge_rows(
    logits: Tensor, log_pi: Tensor, ahead: Tensor, state: Tensor, starts: Tensor,
    members: Tensor, f: Tensor,
    sums: Tensor, centre: Tensor, of_members: Chunks,
) -> None:  # fmt: skip
    """Fill the buckets, put them in order, sum along the order, and finish the rows."""
    rows, categories = f.shape
    buckets = starts.shape[-1] - 1
    taken = CURSORS.value + buckets
    length = max(ALONG, triton.next_power_of_2(triton.cdiv(categories, TURNS)))
    turns = triton.cdiv(categories, length)
    block_t = max(16, triton.next_power_of_2(turns))
    own = chunks_of(rows, categories, EACH, PROGRAMS, CHUNKS, 1)

    # everything that must start at 0 in one allocation, and so one fill
    zeros = f.new_zeros(rows * (3 * block_t + triton.cdiv(taken, 2)), dtype=torch.int64)
    published, of_values, scratch = zeros.split(
        [rows * block_t, 2 * rows * block_t, len(zeros) - 3 * rows * block_t]
    )
    scratch = scratch.view(torch.int32)
    ranked, queue = (f.new_empty((rows, categories), dtype=torch.int32) for _ in range(2))
    noise_sums, value_sums = (f.new_empty((rows, categories), dtype=torch.int64) for _ in range(2))
    spread, scales, parts = (
        f.new_empty(rows * count, dtype=torch.float64)
        for count in (of_members.chunks, SCALES.value, (2 + BINS.value) * own.chunks)
    )
    # nothing is summed before the order is known: until then the sums' memory holds the buckets
    bucketed = sums.view(torch.int32)

    fill[(rows, of_members.chunks)](
        log_pi, ahead, state, f, starts, members, scratch, bucketed, value_sums, spread,
        categories, f.stride(0), of_members.chunks, of_members.span, taken, STATE,
        BLOCK=of_members.block, BUCKETS=buckets, num_warps=of_members.warps,
    )  # fmt: skip
    along = {"BLOCK_T": block_t, "BUCKETS": buckets}
    rank[(rows, turns)](
        log_pi, ahead, state, starts, scratch, published, bucketed, ranked, noise_sums, spread,
        scales,
        categories, of_members.chunks, length, taken, STATE,
        BLOCK=RANKED, BLOCK_P=max(16, triton.next_power_of_2(of_members.chunks)), TILE=ALONG,
        num_warps=4, **along,
    )  # fmt: skip
    _sum[(rows, own.chunks)](
        logits, log_pi, ahead, state, f, scales, starts, ranked, noise_sums, value_sums, queue,
        sums, parts,
        categories, f.stride(0), own.chunks, own.span, STATE,
        BLOCK=own.block, BUCKETS=buckets, num_warps=own.warps, maxnreg=REGISTERS,
    )  # fmt: skip
    _beaten[(rows, min(turns, triton.cdiv(TAKERS, rows)))](
        ahead, starts, scratch, of_values, ranked, value_sums, sums, parts, scales, centre,
        categories, own.chunks, taken,
        LENGTH=length, BLOCK_P=max(16, triton.next_power_of_2(own.chunks)), num_warps=8, **along,
    )  # fmt: skip
