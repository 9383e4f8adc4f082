"""The operators in plain PyTorch, on any device: shapes follow the data, and only what somebody beats is ordered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.noise import RESOLUTION, fixed_point

Z, SELF, OTHER = 0, 1, 2


def order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`arsm.kernels.order` for rows [R, C]."""
    phi, a = fixed_point(logits, log_pi)
    c = torch.arange(phi.shape[-1], device=phi.device)

    o = a - phi
    first_three = []
    for _ in range(3):
        first_three.append(o.min(-1, keepdim=True))
        o.scatter_(-1, first_three[-1].indices, torch.inf)
    (best, z), second, third = first_three

    # The pair (z, c) gives c the value a_z - phi_c and z the value a_c - phi_z.
    of_c, of_z = torch.sub(a.gather(-1, z), phi, out=o), a - phi.gather(-1, z)
    with_z = _winner(c, of_c, z, of_z, *second[::-1])
    at = second.indices
    with_z.scatter_(-1, at, _winner(at, of_c.gather(-1, at), z, of_z.gather(-1, at), *third[::-1]))
    with_z.scatter_(-1, z, Z)
    can_win = (with_z == SELF).scatter_(-1, z, True)
    others = (with_z == OTHER).sum(-1, keepdim=True)
    third_wins = with_z.gather(-1, at) == OTHER
    _set(can_win, third.indices, third_wins)
    _set(can_win, at, others > third_wins)

    theta = phi.add_(best).add_(RESOLUTION * (c < z)).scatter_(-1, z, -torch.inf)
    wins, rank, count = _order(a.scatter_(-1, z, torch.inf), theta)
    ahead = torch.cat([*(x.indices for x in first_three), count], -1)
    return ahead, can_win.logical_or_(wins > 0), with_z, wins, rank


def _winner(c: Tensor, of_c: Tensor, z: Tensor, of_z: Tensor, other: Tensor, of_other: Tensor) -> Tensor:
    """Who wins among c, z and the first of the others, int8; values are in fixed point, ties go to the lowest index."""
    z_limit = of_z + RESOLUTION * (c < z)
    wins = (of_c < z_limit) & (of_c < of_other + RESOLUTION * (c < other))
    other_beats_z = of_other < of_z + RESOLUTION * (other < z)
    return torch.where(wins, SELF, other_beats_z * OTHER).to(torch.int8)


def _set(flags: Tensor, index: Tensor, value: Tensor) -> None:
    """flags[index] |= value: [R, C], [R, 1]."""
    flags.scatter_(-1, index, flags.gather(-1, index) | value)


def _order(a: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many a lie below each theta, the rank of each a below some theta, [R, C] int32, and how many these are."""
    active = a < theta.amax(-1, keepdim=True)
    rank = torch.full_like(a, a.shape[-1], dtype=torch.int32)
    count = active.sum(-1, keepdim=True)
    most = int(count.max())
    if most == 0:
        return torch.zeros_like(rank), rank, count
    row, column = active.nonzero(as_tuple=True)
    place = torch.arange(row.shape[0], device=a.device) - (count.cumsum(0) - count)[row, 0]
    packed = a.new_full((a.shape[0], most), torch.inf)
    packed[row, place] = a[row, column]
    ordered, order = packed.sort(-1)
    ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(most, device=a.device).expand_as(order))
    rank[row, column] = ranks[row, place].int()
    return torch.searchsorted(ordered, theta, out_int32=True), rank, count


def merge(log_pi: Tensor, ahead: Tensor, with_z: Tensor, wins: Tensor, rank: Tensor, f: Tensor) -> Tensor:
    """`arsm.kernels.merge` for rows [R, C]."""
    z, second, third, count = ahead.unsqueeze(-1).unbind(-2)
    w = log_pi.double().exp().neg_().add_(1 / f.shape[-1])
    d = f.double() - f.gather(-1, z)

    swapped = torch.where(with_z == SELF, d, (with_z == OTHER) * d.gather(-1, second))
    third_wins = with_z.gather(-1, second) == OTHER
    swapped.scatter_(-1, second, torch.where(third_wins, d.gather(-1, third), swapped.gather(-1, second)))
    of_z = (swapped * w).sum(-1, keepdim=True)
    sums = swapped.mul_(w.gather(-1, z))

    most = int(count.max())
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
    return sums.sub_(sums.mean(-1, keepdim=True)).to(f.dtype)
