"""Functions with two implementations in plain PyTorch that give the same numbers:
sizes, the device and the compiler decide which one is faster.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arsm.kernels import FEW

SORTED = 1 << 12
"""Up to this many numbers, one sort takes less time than launching three reductions."""
PAIRS_EAGER = 16
"""Eager code compares up to this many queries in pairs, and sorts more: M^2 comparisons
need M^2 memory.
"""
PAIRS_COMPILED = 64
"""Compiled code compares up to this many, in one GPU kernel; sorting takes seven."""
COUNTED = 1 << 14
"""From this many samples of at most FEW categories on, a CPU counts sums faster than it
searches them.
"""


def sorts_faster(o: Tensor) -> bool:
    """Whether one sort finds the first three of a race [C, ...] faster than reductions
    do; a compiler fuses reductions.
    """
    return len(o) >= 3 and o.numel() < SORTED and not torch.compiler.is_compiling()


def first_three(o: Tensor) -> tuple[Tensor, Tensor]:
    """The three least values, ascending, and their indices; ties go to the lowest
    index: [C, ...] -> [3, ...].

    With fewer than three categories, anyone with the value infinity takes the places
    that are left.
    """
    if sorts_faster(o):
        values, order = o.sort(dim=0, stable=True)
        return values[:3], order[:3]
    values, indices = [], []
    for place in range(3):
        value, index = _first(o)
        values.append(value)
        indices.append(index)
        if place < 2:
            o = o.scatter(0, index.unsqueeze(0), torch.inf)
    return torch.stack(values), torch.stack(indices)


def _first(o: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum and the lowest index that has it: [C, ...] -> [...]."""
    if o.is_cuda:
        return o.min(0)
    # on a CPU twice as fast as min, which also tracks the index
    value = o.amin(0)
    return value, _first_true(o == value, 0)


def _first_true(flags: Tensor, dim: int) -> Tensor:
    """Lowest index along `dim` with a true flag, int64; the last index if there is none.

    On a CPU up to 23 times as fast as an argmax of the flags.
    """
    count = flags.shape[dim]
    small = torch.int8 if count < 128 else torch.int32
    # numbered downwards, so that the largest number belongs to the lowest index
    number = torch.arange(count, 0, -1, device=flags.device, dtype=small)
    number = number.view(-1, *(1,) * (flags.ndim - 1 - dim))
    largest = (flags * number).amax(dim)
    return count - largest.clamp_min(1).long()


def four_at_once(points: Tensor) -> Tensor:
    """Points [..., K] of 8 bits as [..., K / 4] of 32 bits, where that is possible:
    equal points stay equal, and are compared in a quarter of the time.
    """
    fits = points.dtype == torch.int8 and points.shape[-1] % 4 == 0
    # torch 2.11's vmap has no rule for such views
    mapped = torch._C._are_functorch_transforms_active()
    if fits and not mapped and not torch.compiler.is_compiling():
        return points.view(torch.int32)
    return points


def first_equal(code: Tensor) -> Tensor:
    """The number of the first query of each row with the same code: [M, *B] -> [M, *B] int64."""
    most = PAIRS_COMPILED if torch.compiler.is_compiling() else PAIRS_EAGER
    if code.shape[0] <= most:
        # not an argmax: it may be why compiled steps of several replicas missed equal queries on a
        # GPU
        return _first_true(code.unsqueeze(1) == code, 1)
    # equal codes become neighbours, in the order of their numbers as the sort is stable
    number = torch.arange(code.shape[0], device=code.device).view(-1, *(1,) * (code.ndim - 1))
    ordered, order = code.sort(dim=0, stable=True)
    starts = torch.where(ordered[1:] == ordered[:-1], 0, number[1:])
    first = order.gather(0, torch.cat([torch.zeros_like(order[:1]), starts]).cummax(0).values)
    return torch.empty_like(order).scatter(0, order, first)


def take(parts: list[Tensor], same_as: Tensor) -> Tensor:
    """f at every query [M, *B], from consecutive parts of its values [N] at all of them: a query
    takes the value of the one that it shares with.
    """
    queries, *batch = same_as.shape
    lives = len(parts[0]) // max(math.prod(batch), 1)
    in_two = len(parts) == 2 and len(parts[0]) == lives * math.prod(batch)
    if not in_two or not torch.compiler.is_compiling():
        return pick(join(parts).view(same_as.shape), same_as)
    # Each from its own part, and the whole is never made. The queries come last here, because a
    # compiler lays out the result as it is computed: ARSM's sums read a row's categories in order,
    # and would need a copy of f with rows and queries exchanged.
    number = same_as.movedim(0, -1)
    live = parts[0].view(lives, *batch).movedim(0, -1)
    rest = parts[1].view(queries - lives, *batch).movedim(0, -1)
    if lives > 1:
        live = pick(live, number, -1)
    return torch.where(number < lives, live, pick(rest, number - lives, -1)).movedim(-1, 0)


def pick(x: Tensor, number: Tensor, dim: int = 0) -> Tensor:
    """x at numbers of one dimension, as `gather` has it; a number outside of x, whose result nobody
    reads, may get anything.
    """
    # Compiled for a GPU, an index that may lie outside is checked, and all threads wait for each
    # other there. An eager gather checks at no price.
    if torch.compiler.is_compiling():
        number = number.clamp(0, x.shape[dim] - 1)
    return x.gather(dim, number)


def join(parts: list[Tensor]) -> Tensor:
    """One tensor [N] of consecutive parts."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def search(sums: Tensor, x: Tensor) -> Tensor:
    """The number of ascending sums that do not exceed x, at most all but one: [..., C],
    [..., n] -> [..., n] int64.
    """
    categories = sums.shape[-1]
    if categories > FEW or x.numel() < COUNTED or x.is_cuda:
        # The clamp is for logits that are NaN, which the caller reports: an index beyond the last
        # would stop a GPU.
        return torch.searchsorted(sums, x.contiguous(), right=True).clamp_max(categories - 1)
    of_category = sums.movedim(-1, 0).contiguous().unsqueeze(-1)
    count = torch.zeros_like(x, dtype=torch.uint8)
    for c in range(categories - 1):
        count = count + (of_category[c] <= x)
    return count.long()


def exponential(like: Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """Exp(1) noise shaped like a tensor, in a dtype; on a CPU in float64, whatever the dtype."""
    if like.device.type != "cpu":
        noise = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
        return noise.exponential_(generator=generator)
    # PyTorch's exponential_ draws one by one on a CPU; the logarithm of a float64 uniform is five
    # times faster.
    noise = torch.empty_like(like, dtype=torch.float64, memory_format=torch.contiguous_format)
    return noise.uniform_(generator=generator).neg_().log1p_().neg_()
