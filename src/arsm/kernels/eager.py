"""The operators in plain PyTorch, on any device: shapes follow the data, and only what
somebody beats is ordered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.distinct import share
from arsm.noise import RESOLUTION, fixed_point
from arsm.swap import merge_pairs as merge_pairs
from arsm.swap import pair_table, run_race

# codes of `Order.with_z`: c wins the pair (z, c), or the first of the others does
SELF = 1
OTHER = 2
LONG = 1 << 12
"""From this many categories on, a loop over rows takes less time than a mask of all numbers."""


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`arsm.kernels.order` for rows [R, C], without a state; in place, since a CPU
    takes longer to allocate.
    """
    phi, a = fixed_point(logits, log_pi)
    o = a - phi
    best, z = _take_first(o)
    of_second, second = _take_first(o)
    of_third, third = _take_first(o)
    # of two that tie, the one with the lower number wins
    lower = second < z

    # The pair (z, c) gives c the value a_z - phi_c and z the value a_c - phi_z; the first of the
    # others is the second, or the third where c is the second. In fixed point one unit decides a
    # tie. First for all c, as if c were not the second.
    a_z = a.gather(-1, z)
    phi_z = a_z - best
    raised = _raise_before(phi, z)
    c_wins = torch.add(a, raised, out=o) > a_z + phi_z
    c_wins &= _above(raised, a_z - of_second, z, second)
    other_wins = a > torch.add(of_second + phi_z, lower, alpha=-RESOLUTION)
    other_wins &= ~c_wins

    # the pair (z, second), whose other is the third
    a_second = a.gather(-1, second)
    of_c = a_z - (a_second - of_second)
    of_z = a_second - phi_z
    wins = (of_c < torch.add(of_z, lower, alpha=RESOLUTION)) & (
        of_c < torch.add(of_third, second < third, alpha=RESOLUTION)
    )
    third_wins = (of_third < torch.add(of_z, third < z, alpha=RESOLUTION)) & ~wins & (second != z)
    # z has no pair with itself
    second_wins = (
        other_wins.scatter_(-1, second, False).scatter_(-1, z, False).amax(-1, keepdim=True)
    )
    c_wins.scatter_(-1, second, wins).scatter_(-1, z, False)
    other_wins.scatter_(-1, second, third_wins)
    with_z = torch.add(c_wins.view(torch.int8), other_wins.view(torch.int8), alpha=OTHER)

    # the pairs without z: c wins against every reference whose a lies below theta_c
    theta = raised.add_(best).scatter_(-1, z, -torch.inf)
    wins, rank = _order(a.scatter_(-1, z, torch.inf), theta)

    # whoever wins any pair: alone, as the first of the others, or z itself
    can_win = c_wins.logical_or_(wins > 0).scatter_(-1, z, True)
    for index, flag in ((second, second_wins), (third, third_wins)):
        can_win.scatter_(-1, index, can_win.gather(-1, index) | flag)
    return torch.cat([z, second, third], -1), can_win, with_z, wins, rank


def _take_first(o: Tensor) -> tuple[Tensor, Tensor]:
    """The value and the number [R, 1] of the first of the race o [R, C], which leaves it."""
    value, number = o.min(-1, keepdim=True)
    o.scatter_(-1, number, torch.inf)
    return value, number


def _raise_before(x: Tensor, z: Tensor) -> Tensor:
    """x [R, C], with one unit more where c < z [R, 1]; in place."""
    if x.shape[-1] < LONG:
        return x.add_(torch.arange(x.shape[-1], device=x.device) < z, alpha=RESOLUTION)
    for row, end in zip(x, z.flatten().tolist(), strict=True):
        row[:end] += RESOLUTION
    return x


def _above(raised: Tensor, bound: Tensor, z: Tensor, second: Tensor) -> Tensor:
    """Whether phi is above the bound [R, 1], less one unit where c < second, from what
    `_raise_before` left of phi.
    """
    if raised.shape[-1] < LONG:
        c = torch.arange(raised.shape[-1], device=raised.device)
        return raised > torch.add(bound, (c < z).char() - (c < second).char(), alpha=RESOLUTION)
    # the two units cancel except between z and second: compare that part again
    found = raised > bound
    ends = zip(z.flatten().tolist(), second.flatten().tolist(), strict=True)
    for row, own, limit, (first, last) in zip(found, raised, bound, ends, strict=True):
        part = slice(min(first, last), max(first, last))
        unit = RESOLUTION if last < first else -RESOLUTION
        torch.gt(own[part], limit + unit, out=row[part])
    return found


def _order(a: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The number of a below each theta, and the rank of each a below some theta: [R, C] int32."""
    # nobody beats the others: about C max p of them are left
    active = a < theta.amax(-1, keepdim=True)
    rank = torch.full_like(a, a.shape[-1], dtype=torch.int32)
    count = active.sum(-1, keepdim=True)
    most = int(count.max())
    if most == 0:
        return torch.zeros_like(rank), rank

    # pack them to the left, as wide as the row that has the most, and sort
    row, column = active.nonzero(as_tuple=True)
    place = torch.arange(row.shape[0], device=a.device) - (count.cumsum(0) - count)[row, 0]
    packed = a.new_full((a.shape[0], most), torch.inf)
    packed[row, place] = a[row, column]
    ordered, order = packed.sort(-1)

    # the inverse of the order says which rank each has
    number = torch.arange(most, device=a.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, number)
    rank[row, column] = ranks[row, place].int()
    return torch.searchsorted(ordered, theta, out_int32=True), rank


def pairs(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.pairs`."""
    table = pair_table(run_race(logits, log_pi))
    return table.long(), share(table)  # small integers are compared faster


def merge(
    log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor
) -> tuple[Tensor, Tensor]:
    """`arsm.kernels.merge` for rows [R, C]."""
    z, second, third = ahead.unsqueeze(-1).unbind(-2)
    # w_c = 1/C - pi_c and d_c = f(c) - f(z), as `arsm.univariate` has them
    w = log_pi.double().exp().neg_().add_(1 / f.shape[-1])
    d = f.double() - f.gather(-1, z)

    # d of the winner of each pair (z, c): of c, of the second, or, for c = second, of the third
    swapped = d.masked_fill(with_z != SELF, 0)
    torch.where(with_z == OTHER, d.gather(-1, second), swapped, out=swapped)
    third_wins = with_z.gather(-1, second) == OTHER
    swapped.scatter_(
        -1, second, torch.where(third_wins, d.gather(-1, third), swapped.gather(-1, second))
    )
    of_z = swapped.unsqueeze(-2).bmm(w.unsqueeze(-1)).squeeze(-1)
    sums = swapped.mul_(w.gather(-1, z))

    # the pairs without z, by prefix sums over the elements that somebody beats
    most = int(wins.max())
    if most:
        row, column = (rank < most).nonzero(as_tuple=True)
        place = rank[row, column].long()
        index = wins.long()
        prefix = w.new_zeros(w.shape[0], most)
        prefix[row, place] = w[row, column]
        sums.addcmul_(d, F.pad(prefix.cumsum(-1), (1, 0)).gather(-1, index))
        # at place r_c, then summed from the end
        beaten = w.new_zeros(w.shape[0], most + 1).scatter_add_(-1, index, d.mul_(w))
        above = beaten.flip(-1).cumsum(-1).flip(-1)
        sums[row, column] += above[row, place + 1]
    sums.scatter_(-1, z, of_z)
    return sums.to(f.dtype), sums.mean(-1, keepdim=True)
