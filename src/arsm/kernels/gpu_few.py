"""`order` and `merge` of `arsm.kernels` and `swap_references` for few categories, as
one Triton kernel each: a program holds all categories of one row or of several.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.gpu_merge import swapped_with_z
from arsm.kernels.gpu_order import STEP, below_largest, bounds_of, noise_at, swaps
from arsm.kernels.gpu_rank import weight_at
from arsm.kernels.launch import in_one_warp, in_warps, launch


@triton.jit
def rows_from(start, R, ROWS: tl.constexpr):
    """The next ROWS of R rows, [ROWS, 1]; the last one again and again when there are no more."""
    return tl.minimum(start + tl.arange(0, ROWS), R - 1).to(tl.int64)[:, None]


@triton.jit
def _race(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """phi, a [ROWS, BLOCK], and the first three of each row's race with their values
    [ROWS, 1]: rows [ROWS, 1].
    """
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    x = tl.load(logits + row * C + c, mask=mask, other=float("-inf")).to(tl.float64)
    phi = below_largest(x, tl.max(x, 1, keep_dims=True))
    a = noise_at(log_pi, row * C + c, mask)
    # the first three, each taken out of the race before the next is looked for
    o = tl.where(mask, a - phi, float("inf"))
    best, z = _first(o)
    o = tl.where(c == z, float("inf"), o)
    of_second, second = _first(o)
    o = tl.where(c == second, float("inf"), o)
    of_third, third = _first(o)
    # NaN logits, which the caller reports later, lose to what is outside the mask: an index beyond
    # the last category would stop the GPU
    z = tl.minimum(z, C - 1)
    second = tl.minimum(second, C - 1)
    third = tl.minimum(third, C - 1)
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
    """a, theta, who wins the pair (z, c) as `swaps` says it, and the first three of
    each row's race.
    """
    c = tl.arange(0, BLOCK)[None, :]
    phi, a, _, z, _, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
    a_z = _at(a, c, z)
    phi_z = _at(phi, c, z)
    a_second = _at(a, c, second)
    phi_second = _at(phi, c, second)
    phi_second = tl.where(second == z, float("-inf"), phi_second)  # there is one category alone
    best, sum_z, bound_c, bound_z, with_second = bounds_of(
        a_z, phi_z, z, a_second, phi_second, second, third, of_third
    )
    theta, code = swaps(c, a, phi, z, second, best, sum_z, bound_c, bound_z, with_second)
    return a, theta, code, z, second, third


@triton.jit
def _who_can_win(logits, log_pi, row, C, BLOCK: tl.constexpr):
    """The first three of each row's race, and whether each category wins some pair."""
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    a, theta, code, z, second, third = _swaps(logits, log_pi, row, C, BLOCK)
    # c wins a pair without z iff it beats the least noise of the others
    least = tl.min(tl.where(mask & (c != z), a, float("inf")), 1, keep_dims=True)
    wins = (theta > least) | (code == 1) | (c == z)
    # the first of the others wins a pair (z, c): the second, or the third where c is the second
    second_wins = tl.max((mask & (code == 2) & (c != second)).to(tl.int32), 1, keep_dims=True)
    third_wins = tl.max(((code == 2) & (c == second)).to(tl.int32), 1, keep_dims=True)
    return (
        z,
        second,
        third,
        wins | ((c == second) & (second_wins > 0)) | ((c == third) & (third_wins > 0)),
    )


@triton.jit
def _order(logits, log_pi, ahead, can_win, C, R, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Run the races of ROWS rows and say who can win."""
    row = rows_from(tl.program_id(0) * ROWS, R, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    z, second, third, wins = _who_can_win(logits, log_pi, row, C, BLOCK)
    tl.store(ahead + row * 3, z.to(tl.int64))
    tl.store(ahead + row * 3 + 1, second.to(tl.int64))
    tl.store(ahead + row * 3 + 2, third.to(tl.int64))
    tl.store(can_win + row * C + c, wins.to(tl.int8), mask=c < C)


@triton.jit
def _merge(logits, log_pi, f, result, C, R, ROW, COLUMN, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The sums of ROWS rows over all their pairs, less their means."""
    row = rows_from(tl.program_id(0) * ROWS, R, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    at = row * C + c
    a, theta, code, z, second, third = _swaps(logits, log_pi, row, C, BLOCK)
    # z, and what lies beyond the row, neither wins nor loses a pair
    a = tl.where(mask & (c != z), a, float("inf"))
    theta = tl.where(mask & (c != z), theta, float("-inf"))
    d = tl.load(f + row * ROW + c * COLUMN, mask=mask, other=0.0).to(tl.float64)
    d = tl.where(mask, d - _at(d, c, z), 0.0)
    w = weight_at(log_pi, at, mask, C)
    swapped = tl.where(
        mask, swapped_with_z(c, code, second, d, _at(d, c, second), _at(d, c, third)), 0.0
    )

    # the two sums of `arsm.univariate` over all pairs, compared one by one
    first = tl.sum(tl.where(a[:, None, :] < theta[:, :, None], w[:, None, :], 0.0), 2)
    second_sum = tl.sum(tl.where(a[:, :, None] < theta[:, None, :], (w * d)[:, None, :], 0.0), 2)
    of_z = tl.sum(swapped * w, 1, keep_dims=True)
    sums = tl.where(c == z, of_z, d * first + second_sum + swapped * _at(w, c, z))
    tl.store(
        result + at, sums - tl.sum(tl.where(mask, sums, 0.0), 1, keep_dims=True) / C, mask=mask
    )


@triton.jit
def _swap_references(
    logits, log_pi, references, winner, pseudo, weight, C, J, K, R, BLOCK: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    """Swap every c of ROWS of R variables with each of their references."""
    c = tl.arange(0, BLOCK)[None, :]
    mask = c < C
    row = rows_from(tl.program_id(0) * ROWS, R, ROWS)
    phi, a, best, z, of_second, second, of_third, third = _race(logits, log_pi, row, C, BLOCK)
    tl.store(winner + row, z.to(tl.int64))
    i = 0
    while i < J:
        at = (row // K * J + i) * K + row % K
        j = tl.load(references + at).to(tl.int32)
        # the best two without j, then the best without j and c
        is_z, low = j == z, (j == z) | (j == second)
        first = tl.where(is_z, second, z)
        of_first = tl.where(is_z, of_second, best)
        other = tl.where(c == first, tl.where(low, third, second), first)
        of_other = tl.where(c == first, tl.where(low, of_third, of_second), of_first)
        # c with the noise of j, and j with the noise of c; one step breaks a tie
        of_c, of_j = _at(a, c, j) - phi, a - _at(phi, c, j)
        c_wins = (of_c < of_j + tl.where(c < j, STEP, 0.0)) & (
            of_c < of_other + tl.where(c < other, STEP, 0.0)
        )
        j_wins = of_j < of_other + tl.where(j < other, STEP, 0.0)
        found = tl.where(c_wins, c, tl.where(j_wins, j, other))
        # NaN logits, which dense evaluation reports later, may make found C
        found = tl.minimum(found, C - 1)
        tl.store(pseudo + at * C + c, found.to(tl.int64), mask=mask)
        tl.store(weight + at, C * weight_at(log_pi, row * C + j, True, C))
        i += 1


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """ahead [..., 3] and can_win [..., C] for contiguous [..., C]; `merge` runs the race again."""
    batch, categories = logits.shape[:-1], logits.shape[-1]
    ahead = torch.empty((*batch, 3), dtype=torch.int64, device=logits.device)
    can_win = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
    rows, sizes = batch.numel(), in_one_warp(categories)
    launch(
        _order, -(-rows // sizes["ROWS"]), logits, log_pi, ahead, can_win, categories, rows, **sizes
    )
    return ahead, can_win


def merge(logits: Tensor, log_pi: Tensor, f: Tensor) -> Tensor:
    """The gradient for contiguous [..., C]; f may have the categories first in memory."""
    rows, categories = f.shape[:-1].numel(), f.shape[-1]
    if f.movedim(-1, 0).is_contiguous():
        return _merged(logits, log_pi, f, 1, rows)
    return _merged(logits, log_pi, f.contiguous(), categories, 1)


def _merged(logits: Tensor, log_pi: Tensor, f: Tensor, row: int, column: int) -> Tensor:
    """f of row r and category c lies at r row + c column."""
    categories = logits.shape[-1]
    gradient = torch.empty(logits.shape, dtype=f.dtype, device=f.device)
    rows = logits.numel() // categories
    sizes = in_one_warp(categories)
    programs = -(-rows // sizes["ROWS"])
    launch(_merge, programs, logits, log_pi, f, gradient, categories, rows, row, column, **sizes)
    return gradient


def swap_references(
    logits: Tensor, log_pi: Tensor, references: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`arsm.references.swap_references`, as one kernel."""
    *batch, variables, categories = logits.shape
    count = references.shape[-2]
    z = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    pseudo = torch.empty(
        (*batch, count, variables, categories), dtype=torch.int64, device=logits.device
    )
    weight = torch.empty((*batch, count, variables), dtype=torch.float64, device=logits.device)
    sizes = in_warps(categories)
    launch(
        _swap_references, -(-z.numel() // sizes["ROWS"]),
        logits.contiguous(), log_pi.contiguous(), references.contiguous(), z, pseudo, weight,
        categories, count, variables, z.numel(), **sizes,
    )  # fmt: skip
    return z, pseudo, weight
