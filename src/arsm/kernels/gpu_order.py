"""`arsm.kernels.order` as Triton kernels: static shapes, no synchronisation.

Rows are cut into chunks, one program each. Two passes find the first of each chunk's race, a third says who can win.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import STATE
from arsm.noise import LOWEST, RESOLUTION

CHUNKS = 2048
"""Most chunks per row: one program reduces what they found."""
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
    """Of a row's categories c: theta and who wins the pair (z, c)."""
    z, second, third = tl.load(ahead + row * 3), tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    own, at = state + row * S, row * C + c
    phi = logit_at(logits, at, mask, tl.load(own + LARGEST))
    a_z, phi_z = tl.load(own + NOISE_Z), tl.load(own + LOGIT_Z)
    of_second, of_third = tl.load(own + SECOND), tl.load(own + THIRD)
    code = winner_with_z(c, noise_at(log_pi, at, mask), phi, z, a_z, phi_z, second, of_second, third, of_third)
    return threshold(c, phi, z, tl.load(own + BEST)), code


# ---------------------------------------------------------------- order


@triton.jit
def _largest(logits, tops, C, P, BLOCK: tl.constexpr):
    """The largest logit of each chunk: [R, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * C + c, mask=c < C, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    tl.store(tops + row * P + chunk, tl.max(x, 0).to(tl.float64))


@triton.jit
def _first(logits, log_pi, tops, values, indices, C, P, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """The first of each chunk's race, its least and its largest noise: values [R, 3, P], indices [R, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    p = tl.arange(0, BLOCK_P)
    largest = tl.max(tl.load(tops + row * P + p, mask=p < P, other=float("-inf")), 0)
    phi, a = logit_at(logits, row * C + c, mask, largest), noise_at(log_pi, row * C + c, mask)
    o = tl.where(mask, a - phi, float("inf"))
    best, place = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
    at = values + row * 3 * P + chunk
    tl.store(at, best)
    tl.store(at + P, tl.min(tl.where(mask, a, float("inf")), 0))
    tl.store(at + 2 * P, tl.max(tl.where(mask, a, float("-inf")), 0))
    tl.store(indices + row * P + chunk, chunk * BLOCK + place)


@triton.jit
def _finish(
    logits, log_pi, tops, values, indices, ahead, state, C, P, S, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Reduce the chunks: ahead [R, 3] and state [R, S]; a chunk that loses its first is looked at again."""
    row = tl.program_id(0).to(tl.int64)
    own = state + row * S
    p = tl.arange(0, BLOCK_P)
    value = values + row * 3 * P + p
    top = tl.load(tops + row * P + p, mask=p < P, other=float("-inf"))
    largest = tl.max(top, 0)
    o = tl.load(value, mask=p < P, other=float("inf"))
    first = tl.load(indices + row * P + p, mask=p < P, other=0)
    least = tl.load(value + P, mask=p < P, other=float("inf"))
    z = -1
    second = -1
    for place in tl.static_range(3):
        best, chunk = tl.min(o, 0, return_indices=True, return_indices_tie_break_left=True)
        winner = tl.minimum(tl.sum(tl.where(p == chunk, first, 0), 0), C - 1)
        tl.store(ahead + row * 3 + place, winner.to(tl.int64))
        tl.store(own + place, best)
        if place < 2:
            if place == 0:
                z = winner
            second = winner
            c = chunk * BLOCK + tl.arange(0, BLOCK)
            left = (c < C) & (c != z) & (c != second)
            x = tl.load(logits + row * C + c, mask=left, other=float("-inf")).to(tl.float64)
            phi, a = below_largest(x, largest), noise_at(log_pi, row * C + c, left)
            if place == 0:
                least = tl.where(p == chunk, tl.min(tl.where(left, a, float("inf")), 0), least)
                top = tl.where(p == chunk, tl.max(x, 0), top)
            again, at = tl.min(
                tl.where(left, a - phi, float("inf")), 0, return_indices=True, return_indices_tie_break_left=True
            )
            o = tl.where(p == chunk, again, o)
            first = tl.where(p == chunk, chunk * BLOCK + at, first)
    a_z = noise_at(log_pi, row * C + z, True)
    phi_z = logit_at(logits, row * C + z, True, largest)
    tl.store(own + NOISE_Z, a_z)
    tl.store(own + LOGIT_Z, phi_z)
    tl.store(own + LIMIT, a_z - phi_z + below_largest(tl.max(top, 0), largest) + STEP)
    tl.store(own + LEAST, tl.min(least, 0))
    tl.store(own + HIGHEST, tl.max(tl.load(value + 2 * P, mask=p < P, other=float("-inf")), 0))
    tl.store(own + LARGEST, largest)


@triton.jit
def _who_can_win(logits, log_pi, ahead, state, can_win, C, S, BLOCK: tl.constexpr):
    """Write ones into can_win [R, C]: z, who wins against some reference or against z, and the first of the others."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    z, second, third = tl.load(ahead + row * 3), tl.load(ahead + row * 3 + 1), tl.load(ahead + row * 3 + 2)
    theta, code = swaps_of(logits, log_pi, ahead, state, row, c, mask, C, S)
    wins = (theta > tl.load(state + row * S + LEAST)) | (code == 1) | (c == z)
    tl.store(can_win + row * C + c, tl.full([BLOCK], 1, tl.int8), mask=mask & wins)
    other_wins = mask & (code == 2)
    second_wins = tl.max((other_wins & (c != second)).to(tl.int32), 0)
    third_wins = tl.max((other_wins & (c == second)).to(tl.int32), 0)
    one = tl.full([], 1, tl.int8)
    tl.store(can_win + row * C + second, one, mask=second_wins > 0)
    tl.store(can_win + row * C + third, one, mask=third_wins > 0)


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ahead [..., 3], can_win [..., C] and state [..., STATE] for contiguous [..., C]."""
    batch, categories = logits.shape[:-1], logits.shape[-1]
    rows = batch.numel()
    block, chunks = chunks_of(categories)
    grid, size = (rows, chunks), {"BLOCK": block, "num_warps": 8}
    block_p = max(16, triton.next_power_of_2(chunks))
    tops, values = (logits.new_empty(rows * count * chunks, dtype=torch.float64) for count in (1, 3))
    indices = logits.new_empty(rows * chunks, dtype=torch.int32)
    ahead = logits.new_empty((*batch, 3), dtype=torch.int64)
    state = logits.new_empty((*batch, STATE), dtype=torch.float64)
    can_win = logits.new_zeros(logits.shape, dtype=torch.bool)
    _largest[grid](logits, tops, categories, chunks, **size)
    _first[grid](logits, log_pi, tops, values, indices, categories, chunks, BLOCK_P=block_p, **size)
    _finish[(rows,)](
        logits, log_pi, tops, values, indices, ahead, state, categories, chunks, STATE, BLOCK_P=block_p, **size
    )
    _who_can_win[grid](logits, log_pi, ahead, state, can_win.view(torch.int8), categories, STATE, **size)
    return ahead, can_win, state


def chunks_of(categories: int) -> tuple[int, int]:
    """Categories per chunk and chunks per row."""
    block = max(1024, triton.next_power_of_2(triton.cdiv(categories, CHUNKS)))
    block = min(block, max(16, triton.next_power_of_2(categories)))
    return block, triton.cdiv(categories, block)
