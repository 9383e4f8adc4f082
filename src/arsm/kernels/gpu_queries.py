"""Queries, sharing and packing in eager mode on a GPU, as one Triton kernel each: launching takes longer than running
them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    _by_category[(-(-count // 1024),)](
        z, wins, points, same_as, count, batch.numel(), categories, z.stride(0), BLOCK=1024
    )
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
    """`arsm.evaluate.share` for few queries and variables."""
    queries, *batch, variables = points.shape
    same_as = torch.empty((queries, *batch), dtype=torch.int64, device=points.device)
    rows = same_as[0].numel()
    _share[(-(-rows // 32),)](points.contiguous(), same_as, queries, rows, variables, ROWS=32, num_warps=1)
    return same_as


@triton.jit
def _pack(points, same_as, logits, z, row, place, counts, N, R, K, LIVE, L, BLOCK: tl.constexpr):
    """One program: places depend on all queries before."""
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
            tl.store(z + at * K + k, tl.load(points + query * K + k, mask=speaks, other=0), mask=speaks)
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
    tl.store(counts, count.to(tl.int64))
    tl.store(counts + 1, live.to(tl.int64))
    tl.store(counts + 2, tl.max(bad, 0).to(tl.int64))


@triton.jit
def _not_finite(x):
    """1 where x is NaN or infinite."""
    return 1 - (tl.abs(x.to(tl.float64)) < float("inf")).to(tl.int32)


def pack(points: Tensor, same_as: Tensor, live: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    """`arsm.kernels.pack` for contiguous tensors."""
    count, variables = points.shape
    z, row, place, counts = torch.empty(count * (variables + 2) + 3, dtype=torch.int64, device=points.device).split(
        (count * variables, count, count, 3)
    )
    _pack[(1,)](
        points, same_as, logits, z, row, place, counts,
        count, count // len(same_as), variables, live, logits.numel(), BLOCK=1024,
    )  # fmt: skip
    found, of_live, bad = counts.tolist()
    return z[: found * variables].view(found, variables), row[:found], place, of_live, not bad


@triton.jit
def _spread(first, rest, place, result, finite, M, FIRST, BLOCK: tl.constexpr):
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
    tl.store(finite, tl.max(bad, 0) == 0)


def spread(first: Tensor, rest: Tensor, place: Tensor, shape: torch.Size) -> tuple[Tensor, bool]:
    """`arsm.kernels.spread` for contiguous tensors."""
    result = torch.empty(shape, dtype=first.dtype, device=first.device)
    finite = torch.empty((), dtype=torch.bool, device=first.device)
    _spread[(1,)](first, rest, place, result, finite, place.shape[0], first.shape[0], BLOCK=1024)
    return result, bool(finite)
