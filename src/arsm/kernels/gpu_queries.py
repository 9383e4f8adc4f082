"""Samples, queries, sharing and packing in eager mode on a GPU, as one Triton kernel each: launching takes longer than
running them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import SMALL, Found, Packed
from arsm.kernels.launch import in_one_block, in_tiles, launch

STEPS = 128
"""Most steps that one program takes for all rows."""

# ---------------------------------------------------------------- packing


@triton.jit
def _not_finite(x):
    """1 where x is NaN or infinite."""
    return 1 - (tl.abs(x.to(tl.float64)) < float("inf")).to(tl.int32)


@triton.jit
def pack_all(points, same_as, packed, logits, N, R, K, LIVE, L, BLOCK: tl.constexpr):
    """Pack N queries in one program, since places depend on all queries before: packed has z, row, place and counts."""
    row, place, counts = packed + N * K, packed + N * (K + 1), packed + N * (K + 2)
    count, live, start = 0, 0, 0
    while start < N:
        query = start + tl.arange(0, BLOCK)
        speaks = tl.load(same_as + query, mask=query < N, other=-1) == query // R
        one = speaks.to(tl.int32)
        at = count + tl.cumsum(one, 0) - one
        tl.store(row + at, (query % R).to(tl.int64), mask=speaks)
        tl.store(place + query, at.to(tl.int64), mask=speaks)
        k = 0
        while k < K:
            tl.store(packed + at * K + k, tl.load(points + query * K + k, mask=speaks, other=0), mask=speaks)
            k += 1
        count += tl.sum(one, 0)
        live += tl.sum((speaks & (query < LIVE)).to(tl.int32), 0)
        start += BLOCK
    tl.debug_barrier()
    start = 0
    while start < N:
        query = start + tl.arange(0, BLOCK)
        same = tl.load(same_as + query, mask=query < N, other=0)
        silent = (query < N) & (same != query // R)
        first = tl.load(place + same * R + query % R, mask=silent, other=0)
        tl.store(place + query, first, mask=silent)
        start += BLOCK
    bad = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < L:
        at = start + tl.arange(0, BLOCK)
        bad |= _not_finite(tl.load(logits + at, mask=at < L, other=0.0))
        start += BLOCK
    tl.store(counts, count + (live.to(tl.int64) << 20) + (tl.max(bad, 0).to(tl.int64) << 40))


@triton.jit
def _pack(points, same_as, packed, logits, N, R, K, LIVE, L, BLOCK: tl.constexpr):
    pack_all(points, same_as, packed, logits, N, R, K, LIVE, L, BLOCK)


def pack(points: Tensor, same_as: Tensor, live: int, logits: Tensor) -> Packed:
    """`arsm.kernels.pack` for contiguous tensors."""
    count, variables = points.shape
    packed = torch.empty(count * (variables + 2) + 1, dtype=torch.int64, device=points.device)
    z, row, place, counts = packed.split_with_sizes((count * variables, count, count, 1))
    rows = count // same_as.shape[0]
    launch(_pack, 1, points, same_as, packed, logits, count, rows, variables, live, logits.numel(), BLOCK=1024)
    return Packed(z.view(count, variables), row, place, counts)


class Room(NamedTuple):
    """Memory for queries that a kernel asks for, and how it fills it."""

    whole: Tensor
    """The points, then same_as, then what `pack_all` finds."""
    points: Tensor
    same_as: Tensor | None
    packed: Packed | None
    programs: int
    sizes: dict[str, int]
    """The kernel's constants."""

    def found(self, weight: Tensor) -> Found:
        """The queries, once the kernel has run."""
        return Found(self.points, self.same_as, weight, self.packed)


def room_for(queries: int, steps: int, logits: Tensor) -> Room:
    """M queries of logits [*B, 1, C], found in so many steps per tile.

    If they are small, one program asks for all of them and packs them.
    """
    batch, categories = logits.shape[:-2], logits.shape[-1]
    rows, sizes = batch.numel(), in_tiles(categories, pack=True)
    count = queries * rows
    if count <= SMALL and logits.numel() <= SMALL and rows * steps <= STEPS * sizes["ROWS"]:
        whole = torch.empty(5 * count + 1, dtype=torch.int64, device=logits.device)
        points, same_as, z, row, place, counts = whole.split_with_sizes((count, count, count, count, count, 1))
        packed, programs = Packed(z.view(count, 1), row, place, counts), 1
    else:
        whole = torch.empty(2 * count, dtype=torch.int64, device=logits.device)
        points, same_as = whole.split_with_sizes((count, count))
        packed, programs, sizes = None, -(-rows // sizes["ROWS"]), in_tiles(categories, pack=False)
    return Room(whole, points.view(queries, *batch, 1), same_as.view(queries, *batch), packed, programs, sizes)


def room_for_samples(logits: Tensor) -> Room:
    """z [1, *B, K] of logits [*B, K, C]."""
    z = torch.empty((1, *logits.shape[:-1]), dtype=torch.int64, device=logits.device)
    sizes = in_tiles(logits.shape[-1], pack=False)
    return Room(z, z, None, None, -(-z.numel() // sizes["ROWS"]), sizes)


@triton.jit
def rows_from(start, R, ROWS: tl.constexpr):
    """The next ROWS of R rows, [ROWS, 1]; the last one again and again when there are no more."""
    return tl.minimum(start + tl.arange(0, ROWS), R - 1).to(tl.int64)[:, None]


@triton.jit
def pack_room(room, logits, N, R, LIVE, C):
    """Pack what this program has asked for."""
    tl.debug_barrier()
    pack_all(room, room + N, room + 2 * N, logits, N, R, 1, LIVE, R * C, 1024)


# ---------------------------------------------------------------- samples


@triton.jit
def _sums(logits, row, C, BLOCK: tl.constexpr):
    """The sums that `arsm.sampling` compares, [ROWS, BLOCK], and the last of them, [ROWS, 1]: rows [ROWS, 1]."""
    c = tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * C + c, mask=c < C, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    p = tl.exp(x - tl.max(x, 1, keep_dims=True))
    p = p / tl.sum(p, 1, keep_dims=True)
    sums = tl.cumsum(tl.floor(p.to(tl.float64) * 4503599627370496.0 + 0.5), 1)  # 2^52
    last = tl.sum(tl.where(c == C - 1, sums, 0.0), 1, keep_dims=True)
    return tl.where(c < C - 1, sums, float("inf")), last


@triton.jit
def _sample(logits, uniform, z, C, R, COUNT, BLOCK: tl.constexpr, SAMPLES: tl.constexpr):
    """Samples of one row, SAMPLES at once."""
    row = tl.program_id(0).to(tl.int64)
    sums, last = _sums(logits, row + tl.zeros([1, 1], tl.int64), C, BLOCK)
    start = 0
    while start < COUNT:
        i = start + tl.arange(0, SAMPLES)[:, None]
        u = tl.load(uniform + i * R + row, mask=i < COUNT, other=0.0) * last
        found = tl.sum((sums <= u).to(tl.int64), 1, keep_dims=True)
        tl.store(z + i * R + row, found, mask=i < COUNT)
        start += SAMPLES


def sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """`arsm.sampling.inverse_sample` of at most ONE_BLOCK categories, laid out as [n, *B, K]."""
    count, categories = uniform.shape[-2], logits.shape[-1]
    rows, uniform = logits.numel() // categories, uniform.movedim(-2, 0).contiguous()
    z = torch.empty(uniform.shape, dtype=torch.int64, device=uniform.device)
    launch(
        _sample, rows, logits.contiguous(), uniform, z, categories, rows, count,
        **in_one_block(categories), SAMPLES=min(16, 1 << (count - 1).bit_length()),
    )  # fmt: skip
    return z.movedim(0, -2)


@triton.jit
def _ask_samples(
    logits, uniform, room, weight, C, R, COUNT, LIVE, BLOCK: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """Samples of ROWS rows, the first one that equals each, and the weights of a mean."""
    c = tl.arange(0, BLOCK)[None, :]
    start = tl.program_id(0) * ROWS
    while start < R:
        row = rows_from(start, R, ROWS)
        sums, last = _sums(logits, row, C, BLOCK)
        first = tl.zeros([ROWS, BLOCK], tl.int64) + COUNT
        i = 0
        while i < COUNT:
            at = i * R + row
            found = tl.sum((sums <= tl.load(uniform + at) * last).to(tl.int64), 1, keep_dims=True)
            first = tl.where((c == found) & (first == COUNT), i, first)
            tl.store(room + at, found)
            tl.store(room + COUNT * R + at, tl.sum(tl.where(c == found, first, 0), 1, keep_dims=True))
            tl.store(weight + i, tl.full([], 1.0, tl.float64) / LIVE, mask=(i < LIVE) & (start == 0))
            i += 1
        start += tl.num_programs(0) * ROWS
    if PACK:
        pack_room(room, logits, COUNT * R, R, LIVE * R, C)


def ask_samples(logits: Tensor, uniform: Tensor, live: int) -> Found:
    """`arsm.kernels.ask_samples` for contiguous tensors."""
    count, categories = uniform.shape[0], logits.shape[-1]
    room = room_for(count, count, logits)
    weight = torch.empty(live, dtype=torch.float64, device=logits.device)
    rows = logits.numel() // categories
    launch(
        _ask_samples, room.programs, logits, uniform, room.whole, weight, categories, rows, count, live, **room.sizes
    )
    return room.found(weight)


# ---------------------------------------------------------------- queries and values


@triton.jit
def _by_category(z, can_win, points, same_as, N, R, C, STRIDE, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = query < N
    number, row = query // R, query % R
    winner = tl.load(z + row * STRIDE, mask=mask, other=0)
    wins = tl.load(can_win + row * C + number - 1, mask=mask & (number > 0), other=0) != 0
    tl.store(points + query, tl.where(number > 0, number - 1, winner), mask=mask)
    tl.store(same_as + query, tl.where(wins & (number - 1 != winner), number, 0), mask=mask)


def by_category(z: Tensor, can_win: Tensor) -> tuple[Tensor, Tensor]:
    """`arsm.references.by_category`."""
    batch, categories = can_win.shape[:-2], can_win.shape[-1]
    points = torch.empty((1 + categories, *batch, 1), dtype=torch.int64, device=z.device)
    same_as = torch.empty((1 + categories, *batch), dtype=torch.int64, device=z.device)
    count, wins, z = same_as.numel(), can_win.contiguous().view(torch.int8), z.flatten()
    rows = batch.numel()
    launch(_by_category, -(-count // 1024), z, wins, points, same_as, count, rows, categories, z.stride(0), BLOCK=1024)
    return points, same_as


@triton.jit
def _share(points, same_as, M, R, K, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < R
    query = 0
    while query < M:
        found = tl.full([ROWS], 0, tl.int64) + query
        other = query - 1
        while other >= 0:
            same = mask
            k = 0
            while k < K:
                one = tl.load(points + (query * R + row) * K + k, mask=mask, other=0)
                same = same & (one == tl.load(points + (other * R + row) * K + k, mask=mask, other=0))
                k += 1
            found = tl.where(same, other, found)
            other -= 1
        tl.store(same_as + query * R + row, found, mask=mask)
        query += 1


def share(points: Tensor) -> Tensor:
    """`arsm.distinct.share` for few queries and variables."""
    queries, *batch, variables = points.shape
    same_as = torch.empty((queries, *batch), dtype=torch.int64, device=points.device)
    rows = same_as[0].numel()
    launch(_share, -(-rows // 32), points.contiguous(), same_as, queries, rows, variables, ROWS=32, num_warps=1)
    return same_as


@triton.jit
def _spread(first, rest, place, result, flag, M, FIRST, BLOCK: tl.constexpr):
    """One program: value `place` of the FIRST first and then the rest, for each of M queries."""
    bad = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < M:
        query = start + tl.arange(0, BLOCK)
        mask = query < M
        at = tl.load(place + query, mask=mask, other=0)
        x = tl.load(first + at, mask=mask & (at < FIRST), other=0.0)
        x = tl.where(at < FIRST, x, tl.load(rest + at - FIRST, mask=mask & (at >= FIRST), other=0.0))
        bad |= _not_finite(x)
        tl.store(result + query, x, mask=mask)
        start += BLOCK
    tl.store(flag, tl.max(bad, 0).to(tl.int64))


def spread(first: Tensor, rest: Tensor, packed: Packed, shape: torch.Size) -> tuple[Tensor, bool]:
    """`arsm.kernels.spread` for contiguous tensors."""
    result, (_, _, place, flag) = torch.empty(shape, dtype=first.dtype, device=first.device), packed
    launch(_spread, 1, first, rest, place, result, flag, place.shape[0], first.shape[0], BLOCK=1024)
    return result, int(flag) == 0
