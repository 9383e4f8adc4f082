"""Which queries of a row are equal: they share one evaluation of f."""

from __future__ import annotations

import torch
from torch import Tensor

from arsm import kernels

FEW = 64
"""Compiled code compares up to this many queries in pairs, in one GPU kernel; sorting takes seven."""
VERY_FEW = 8
"""Eager code compares up to this many in pairs, and sorts more: M^2 comparisons need M^2 memory."""


def share(points: Tensor) -> Tensor:
    """same_as [M, *B]: the number of the first identical query of the row, for points [M, *B, K] of any integer type.

    Points of several variables are compared by a hash, and then in full. A collision of hashes costs an evaluation, but
    never gives a wrong value.
    """
    if len(points) <= VERY_FEW and points.dtype == torch.int64 and kernels.eager_on_gpu(points):
        return kernels.share(points)
    if points.dtype == torch.int8 and points.shape[-1] % 4 == 0 and not torch.compiler.is_compiling():
        points = points.view(torch.int32)  # four variables at once
    queries, variables = points.shape[0], points.shape[-1]
    code = points.squeeze(-1) if variables == 1 else _hash(points)
    number = torch.arange(queries, device=points.device).view(-1, *(1,) * (points.ndim - 2))
    by_pairs = queries <= (FEW if torch.compiler.is_compiling() else VERY_FEW)
    first = _first_by_pairs(code) if by_pairs else _first_by_sorting(code, number)
    if variables == 1:
        return first
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
    return torch.add(row if len(batch) == 1 else row.view(batch), same_as, alpha=rows).flatten()


def speakers(same_as: Tensor) -> Tensor:
    """[M, *B]: whether a query is evaluated, for itself and all identical ones."""
    number = torch.arange(same_as.shape[0], device=same_as.device)
    return same_as == number.view(-1, *(1,) * (same_as.ndim - 1))


def _first_by_pairs(code: Tensor) -> Tensor:
    """The first query of a row with each query's code, M^2 comparisons: [M, *B]."""
    return (code.unsqueeze(1) == code).byte().argmax(1)


def _first_by_sorting(code: Tensor, number: Tensor) -> Tensor:
    """The same in M log M: equal codes become neighbours, in the order of their numbers as the sort is stable."""
    ordered, order = code.sort(dim=0, stable=True)
    starts = torch.where(ordered[1:] == ordered[:-1], 0, number[1:])
    first = order.gather(0, torch.cat([torch.zeros_like(order[:1]), starts]).cummax(0).values)
    return torch.empty_like(order).scatter(0, order, first)


def _hash(points: Tensor) -> Tensor:
    """A 32-bit code by wrapping multiplication with the high halves of an odd 64-bit constant's powers."""
    base = torch.full(points.shape[-1:], 6364136223846793005, dtype=torch.int64, device=points.device)
    return (points.int() * (base.cumprod(0) >> 32).int()).sum(-1, dtype=torch.int32)
