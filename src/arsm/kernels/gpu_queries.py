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
    _by_category[(triton.cdiv(count, 1024),)](
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
    _share[(triton.cdiv(rows, 32),)](points.contiguous(), same_as, queries, rows, variables, ROWS=32, num_warps=1)
    return same_as


@triton.jit
def _pack(points, same_as, number, row, place, z, counts, N, R, K, LIVE, BLOCK: tl.constexpr):
    """One program: places depend on all queries before."""
    count, live, start = 0, 0, 0
    while start < N:
        query = start + tl.arange(0, BLOCK)
        speaks = tl.load(same_as + query, mask=query < N, other=-1) == query // R
        one = speaks.to(tl.int32)
        at = count + tl.cumsum(one, 0) - one
        tl.store(number + at, query.to(tl.int64), mask=speaks)
        tl.store(row + at, (query % R).to(tl.int64), mask=speaks)
        tl.store(place + query, at, mask=speaks)
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
    tl.store(counts, count)
    tl.store(counts + 1, live)


def pack(points: Tensor, same_as: Tensor, live: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """`arsm.kernels.pack` for contiguous tensors."""
    count, variables = points.shape
    number, row = torch.empty((2, count), dtype=torch.int64, device=points.device).unbind()
    place, z = torch.empty(count, dtype=torch.int32, device=points.device), torch.empty_like(points)
    counts = torch.empty(2, dtype=torch.int32, device=points.device)
    _pack[(1,)](points, same_as, number, row, place, z, counts, count, same_as[0].numel(), variables, live, BLOCK=1024)
    found, of_live = counts.tolist()
    return z[:found], row[:found], place, number[:found], of_live
