"""Find equal queries of a row, which share one evaluation of f."""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.kernels.two_ways import first_equal, four_at_once


def share(points: Tensor) -> Tensor:
    """same_as [M, *B]: the number of the first identical query of the row, for points
    [M, *B, K] of any integer type.

    Points of several variables are compared by a hash, and then in full. A collision of
    hashes costs an evaluation, but never gives a wrong value.
    """
    points = four_at_once(points)
    variables = points.shape[-1]
    code = points.squeeze(-1) if variables == 1 else _hash(points)
    first = first_equal(code)
    if variables == 1:
        return first
    # two different points may have the same hash: they must not share a value
    number = torch.arange(len(points), device=points.device).view(-1, *(1,) * (points.ndim - 2))
    flat = points.flatten(0, -2)
    # compare in full; on a CPU several times faster than (x == y).all(-1)
    same = ((flat.index_select(0, flat_index(first)) - flat).abs().amax(-1) == 0).view(first.shape)
    return torch.where(same, first, number)


def flat_index(same_as: Tensor) -> Tensor:
    """The flat index of query same_as[m, *B] among all queries and rows: [M, *B] -> [M B]."""
    batch = same_as.shape[1:]
    rows = batch.numel()
    if rows == 1:
        return same_as.flatten()
    row = torch.arange(rows, device=same_as.device)
    if len(batch) != 1:
        row = row.view(batch)
    return torch.add(row, same_as, alpha=rows).flatten()  # same_as * rows + row, in one kernel


def speakers(same_as: Tensor) -> Tensor:
    """[M, *B]: whether a query is evaluated, for itself and all identical ones."""
    number = torch.arange(same_as.shape[0], device=same_as.device)
    return same_as == number.view(-1, *(1,) * (same_as.ndim - 1))


def _hash(points: Tensor) -> Tensor:
    """A 32-bit code by wrapping multiplication with the high halves of an odd 64-bit
    constant's powers.
    """
    base = torch.full(
        points.shape[-1:], 6364136223846793005, dtype=torch.int64, device=points.device
    )
    powers = (base.cumprod(0) >> 32).int()  # the low bits of a product are the least random
    return (points.int() * powers).sum(-1, dtype=torch.int32)
