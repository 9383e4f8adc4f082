"""`order`, `ask`, `merge` and `swap_with` of `arsm.kernels` for few categories, as one Triton kernel each: a program
holds all categories of one row or of several.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import Found
from arsm.kernels.gpu_merge import swapped_with_z
from arsm.kernels.gpu_order import STEP, below_largest, bounds_of, noise_at, swaps
from arsm.kernels.gpu_queries import pack_room, room_for, room_for_samples, rows_from
from arsm.kernels.gpu_rank import weight_at
from arsm.kernels.launch import in_one_warp, launch


@triton.jit
def _race(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """phi, a [ROWS, BLOCK], and the first three of each row's race with their values [ROWS, 1]: rows [ROWS, 1]."""
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    x = tl.load(logits + row * C + c, mask=mask, other=float("-inf")).to(tl.float64)
    phi, a = below_largest(x, tl.max(x, 1, keep_dims=True)), noise_at(log_pi, row * C + c, mask)
    o = tl.where(mask, a - phi, float("inf"))
    best, z = _first(o)
    o = tl.where(c == z, float("inf"), o)
    of_second, second = _first(o)
    o = tl.where(c == second, float("inf"), o)
    of_third, third = _first(o)
    return phi, a, best, z, of_second, second, of_third, third


@triton.jit
def _first(o):
    """The least of each row and its index; ties go to the lowest."""
    return tl.min(o, 1, return_indices=True, return_indices_tie_break_left=True, keep_dims=True)


@triton.jit
def _at(x, c, index):
    """x of each row at an index: [ROWS, BLOCK], [ROWS, 1] -> [ROWS, 1]."""
    return tl.sum(tl.where(c == index, x, 0.0), 1, keep_dims=True)


@triton.jit
def _swaps(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """a, theta, who wins the pair (z, c) as `swaps` says it, and the first three of each row's race."""
    c = tl.arange(0, BLOCK)[None, :]
    phi, a, _, z, _, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
    a_z, phi_z, a_second, phi_second = _at(a, c, z), _at(phi, c, z), _at(a, c, second), _at(phi, c, second)
    phi_second = tl.where(second == z, float("-inf"), phi_second)  # there is one category alone
    best, sum_z, bound_c, bound_z, with_second = bounds_of(a_z, phi_z, z, a_second, phi_second, second, third, of_third)
    theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
    return a, theta, code, z, second, third


@triton.jit
def _who_can_win(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """The first three of each row's race, and whether each category wins some pair."""
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    a, theta, code, z, second, third = _swaps(logits, log_pi, row, C, BLOCK)
    least = tl.min(tl.where(mask & (c != z), a, float("inf")), 1, keep_dims=True)
    wins = (theta > least) | (code == 1) | (c == z)
    second_wins = tl.max((mask & (code == 2) & (c != second)).to(tl.int32), 1, keep_dims=True)
    third_wins = tl.max(((code == 2) & (c == second)).to(tl.int32), 1, keep_dims=True)
    return z, second, third, wins | ((c == second) & (second_wins > 0)) | ((c == third) & (third_wins > 0))


@triton.jit
def _order(logits, log_pi, ahead, can_win, C, R, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Run the races of ROWS rows and say who can win."""
    row, c = rows_from(tl.program_id(0) * ROWS, R, ROWS), tl.arange(0, BLOCK)[None, :]
    z, second, third, wins = _who_can_win(logits, log_pi, row, C, BLOCK)
    tl.store(ahead + row * 3, z.to(tl.int64))
    tl.store(ahead + row * 3 + 1, second.to(tl.int64))
    tl.store(ahead + row * 3 + 2, third.to(tl.int64))
    tl.store(can_win + row * C + c, wins.to(tl.int8), mask=c < C)


@triton.jit
def _ask(logits, log_pi, room, weight, C, R, BLOCK: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr):
    """Run the races of ROWS rows and ask for z, then for every other category that can win."""
    c = tl.arange(0, BLOCK)[None, :]
    same_as = room + (C + 1) * R
    start = tl.program_id(0) * ROWS
    while start < R:
        row = rows_from(start, R, ROWS)
        z, _, _, wins = _who_can_win(logits, log_pi, row, C, BLOCK)
        tl.store(room + row, z.to(tl.int64))
        tl.store(same_as + row, tl.zeros([ROWS, 1], tl.int64))
        at = (c + 1) * R + row
        tl.store(room + at, (c + tl.zeros([ROWS, 1], tl.int32)).to(tl.int64), mask=c < C)
        tl.store(same_as + at, tl.where(wins & (c != z), c + 1, 0).to(tl.int64), mask=c < C)
        tl.store(weight, tl.full([], 1.0, tl.float32), mask=start == 0)
        start += tl.num_programs(0) * ROWS
    if PACK:
        pack_room(room, logits, (C + 1) * R, R, R, C)


@triton.jit
def _merge(logits, log_pi, f, result, C, R, START, ROW, COLUMN, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The sums of ROWS rows over all their pairs, less their means."""
    row, c = rows_from(tl.program_id(0) * ROWS, R, ROWS), tl.arange(0, BLOCK)[None, :]
    mask = c < C
    at = row * C + c
    a, theta, code, z, second, third = _swaps(logits, log_pi, row, C, BLOCK)
    a = tl.where(mask & (c != z), a, float("inf"))
    theta = tl.where(mask & (c != z), theta, float("-inf"))
    d = tl.load(f + START + row * ROW + c * COLUMN, mask=mask, other=0.0).to(tl.float64)
    d = tl.where(mask, d - _at(d, c, z), 0.0)
    w = weight_at(log_pi, at, mask, C)
    swapped = tl.where(mask, swapped_with_z(c, code, second, d, _at(d, c, second), _at(d, c, third)), 0.0)

    first = tl.sum(tl.where(a[:, None, :] < theta[:, :, None], w[:, None, :], 0.0), 2)
    second_sum = tl.sum(tl.where(a[:, :, None] < theta[:, None, :], (w * d)[:, None, :], 0.0), 2)
    of_z = tl.sum(swapped * w, 1, keep_dims=True)
    sums = tl.where(c == z, of_z, d * first + second_sum + swapped * _at(w, c, z))
    tl.store(result + at, sums - tl.sum(tl.where(mask, sums, 0.0), 1, keep_dims=True) / C, mask=mask)


@triton.jit
def _swap_with(
    logits, log_pi, references, room, one, pseudo, weight, C, J, K, R,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Swap every c of ROWS rows with each of their references; for one variable, also ask for those that win."""
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    same_as = room + (C + 1) * R
    start = tl.program_id(0) * ROWS
    while start < R * K:
        row = rows_from(start, R * K, ROWS)
        phi, a, best, z, of_second, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
        tl.store(room + row, z.to(tl.int64))
        tl.store(one, tl.full([], 1.0, tl.float32), mask=start == 0)
        if K == 1:
            query = (c + 1) * R + row
            tl.store(room + query, (c + tl.zeros([ROWS, 1], tl.int32)).to(tl.int64), mask=mask)
            tl.store(same_as + query, tl.zeros([ROWS, BLOCK], tl.int64), mask=mask)
            tl.store(same_as + row, tl.zeros([ROWS, 1], tl.int64))
            tl.debug_barrier()
        i = 0
        while i < J:
            at = (row // K * J + i) * K + row % K
            j = tl.load(references + at).to(tl.int32)
            # the best two without j, then the best without j and c
            is_z, low = j == z, (j == z) | (j == second)
            first, of_first = tl.where(is_z, second, z), tl.where(is_z, of_second, best)
            other = tl.where(c == first, tl.where(low, third, second), first)
            of_other = tl.where(c == first, tl.where(low, of_third, of_second), of_first)
            of_c, of_j = _at(a, c, j) - phi, a - _at(phi, c, j)
            c_wins = (of_c < of_j + tl.where(c < j, STEP, 0.0)) & (of_c < of_other + tl.where(c < other, STEP, 0.0))
            j_wins = of_j < of_other + tl.where(j < other, STEP, 0.0)
            found = tl.where(c_wins, c, tl.where(j_wins, j, other))
            tl.store(pseudo + at * C + c, found.to(tl.int64), mask=mask)
            tl.store(weight + at, C * weight_at(log_pi, row * C + j, True, C))
            if K == 1:
                asked = mask & (found < C) & (found != z)  # NaN logits, which the caller reports, may make found C
                tl.store(same_as + (found + 1) * R + row, (found + 1).to(tl.int64), mask=asked)
            i += 1
        start += tl.num_programs(0) * ROWS
    if PACK:
        pack_room(room, logits, (C + 1) * R, R, R, C)


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """ahead [..., 3] and can_win [..., C] for contiguous [..., C]; `merge` runs the race again."""
    batch, categories = logits.shape[:-1], logits.shape[-1]
    ahead = torch.empty((*batch, 3), dtype=torch.int64, device=logits.device)
    can_win = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    rows, sizes = batch.numel(), in_one_warp(categories)
    launch(_order, -(-rows // sizes["ROWS"]), logits, log_pi, ahead, can_win, categories, rows, **sizes)
    return ahead, can_win


def ask(logits: Tensor, log_pi: Tensor) -> Found:
    """`arsm.kernels.ask` for contiguous [*B, 1, C]."""
    categories = logits.shape[-1]
    room = room_for(1 + categories, 1, logits)
    weight = torch.empty(1, device=logits.device)
    rows = logits.numel() // categories
    launch(_ask, room.programs, logits, log_pi, room.whole, weight, categories, rows, **room.sizes)
    return room.found(weight)


def merge(logits: Tensor, log_pi: Tensor, f: Tensor) -> Tensor:
    """The gradient for contiguous [..., C]; f may have the categories first in memory."""
    rows, categories = f.shape[:-1].numel(), f.shape[-1]
    if f.movedim(-1, 0).is_contiguous():
        return _merged(logits, log_pi, f, 0, 1, rows)
    return _merged(logits, log_pi, f.contiguous(), 0, categories, 1)


def tell(logits: Tensor, log_pi: Tensor, values: Tensor) -> Tensor:
    """`arsm.kernels.tell` for contiguous tensors."""
    rows = values.numel() // values.shape[0]
    return _merged(logits, log_pi, values, rows, 1, rows)


def _merged(logits: Tensor, log_pi: Tensor, f: Tensor, start: int, row: int, column: int) -> Tensor:
    """f of row r and category c lies at start + r row + c column."""
    categories = logits.shape[-1]
    gradient = torch.empty(logits.shape, dtype=f.dtype, device=f.device)
    rows, sizes = logits.numel() // categories, in_one_warp(categories)
    programs = -(-rows // sizes["ROWS"])
    launch(_merge, programs, logits, log_pi, f, gradient, categories, rows, start, row, column, **sizes)
    return gradient


def swap_with(logits: Tensor, log_pi: Tensor, references: Tensor) -> tuple[Found, Tensor, Tensor]:
    """`arsm.kernels.swap_with` for contiguous tensors."""
    batch, count, (variables, categories) = logits.shape[:-2], references.shape[-2], logits.shape[-2:]
    room = room_for(1 + categories, count, logits) if variables == 1 else room_for_samples(logits)
    one = torch.empty(1, device=logits.device)
    pseudo = torch.empty((*batch, count, variables, categories), dtype=torch.int64, device=logits.device)
    weight = torch.empty((*batch, count, variables), dtype=torch.float64, device=logits.device)
    launch(
        _swap_with, room.programs, logits, log_pi, references, room.whole, one, pseudo, weight,
        categories, count, variables, batch.numel(), **room.sizes,
    )  # fmt: skip
    return room.found(one), pseudo, weight
