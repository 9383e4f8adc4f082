"""Samples and queries in eager mode on a GPU, as one Triton kernel each: launching
takes longer than running them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels.launch import in_one_block, launch

WARP = 32
"""Threads."""


@triton.jit
def _sums(logits, row, C, BLOCK: tl.constexpr):
    """The sums that `arsm.sampling` compares, [ROWS, BLOCK], and the last of them,
    [ROWS, 1]: rows [ROWS, 1].
    """
    c = tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * C + c, mask=c < C, other=float("-inf"))
    # in the working dtype of `arsm.sampling`, whose samples these must be
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    p = tl.exp(x - tl.max(x, 1, keep_dims=True))
    p = p / tl.sum(p, 1, keep_dims=True)
    sums = tl.cumsum(tl.floor(p.to(tl.float64) * 4503599627370496.0 + 0.5), 1)  # 2^52
    last = tl.sum(tl.where(c == C - 1, sums, 0.0), 1, keep_dims=True)
    # the last category takes what rounding leaves: its sum is never exceeded
    return tl.where(c < C - 1, sums, float("inf")), last


@triton.jit
def _sample(logits, uniform, z, C, R, COUNT, BLOCK: tl.constexpr, SAMPLES: tl.constexpr):
    """Samples of one row, SAMPLES at once."""
    row = tl.program_id(0).to(tl.int64)
    sums, last = _sums(logits, row + tl.zeros([1, 1], tl.int64), C, BLOCK)
    # the sums stay in registers, whatever the number of samples
    start = 0
    while start < COUNT:
        i = start + tl.arange(0, SAMPLES)[:, None]
        u = tl.load(uniform + i * R + row, mask=i < COUNT, other=0.0) * last
        found = tl.sum((sums <= u).to(tl.int64), 1, keep_dims=True)
        tl.store(z + i * R + row, found, mask=i < COUNT)
        start += SAMPLES


def inverse_sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """`arsm.sampling.inverse_sample` of at most ONE_BLOCK categories, laid out as [n, *B, K]."""
    count, categories = uniform.shape[-2], logits.shape[-1]
    rows = logits.numel() // categories
    uniform = uniform.movedim(-2, 0).contiguous()
    z = torch.empty(uniform.shape, dtype=torch.int64, device=uniform.device)
    # at least a warp of categories: of fewer, its threads hold copies, and Triton's cumulative sum
    # runs on through the copies
    sizes = in_one_block(max(WARP, categories))
    launch(
        _sample, rows, logits.contiguous(), uniform, z, categories, rows, count,
        **sizes, SAMPLES=min(16, 1 << (count - 1).bit_length()),
    )  # fmt: skip
    return z.movedim(0, -2)


@triton.jit
def _by_category(z, can_win, points, same_as, N, R, C, STRIDE, BLOCK: tl.constexpr):
    # a thread per query, numbered [1 + C, R]: neighbours write next to each other
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
    count = same_as.numel()
    wins = can_win.contiguous().view(torch.int8)
    z = z.flatten()
    rows = batch.numel()
    launch(
        _by_category,
        -(-count // 1024),
        z,
        wins,
        points,
        same_as,
        count,
        rows,
        categories,
        z.stride(0),
        BLOCK=1024,
    )
    return points, same_as
