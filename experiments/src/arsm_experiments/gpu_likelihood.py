"""`arsm_experiments.likelihood` as a Triton kernel: a program sums some rows of one image."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm_experiments.likelihood import FACTORS

ROWS, WARPS = 16, 4
"""Rows and warps per program."""


@triton.jit
def _sum(
    product, bias, x, out, M, B,
    D: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [R, M B] from product [R, M B, D], bias [R, D] and x [R, B, D]."""
    image, replica = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = (replica * M + m) * B + image
    d, SIZE = tl.arange(0, WIDTH), D // FACTORS
    linear = tl.zeros([ROWS, WIDTH], tl.float32)
    factors = tl.full([ROWS, WIDTH], 1.0, tl.float32)
    for part in tl.static_range(FACTORS):
        here = d < SIZE
        at = part * SIZE + d
        y = tl.load(x + (replica * B + image) * D + at, mask=here, other=0.5) - 0.5
        b = tl.load(bias + replica * D + at, mask=here, other=0.0)
        phi = tl.load(product + row[:, None] * D + at[None, :], mask=(m < M)[:, None] & here[None, :], other=0.0)
        phi = phi.to(tl.float32) + b[None, :]
        size = tl.abs(phi)
        linear += y[None, :] * phi - 0.5 * size
        factors *= 1.0 + tl.exp(-size)
    total = tl.where((d < SIZE)[None, :], linear - tl.log(factors), 0.0)
    tl.store(out + row, tl.sum(total, 1), mask=m < M)


def log_likelihood(product: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """For contiguous [*R, N, D], [*R, D] and [*R, B, D]."""
    images, pixels = x.shape[-2:]
    out = torch.empty(product.shape[:-1], dtype=torch.float32, device=product.device)
    queries = product.shape[-2] // images
    factors = FACTORS if pixels % FACTORS == 0 else 1
    _sum[(images, triton.cdiv(queries, ROWS), bias.numel() // pixels)](
        product, bias, x, out, queries, images, D=pixels, FACTORS=factors, ROWS=ROWS,
        WIDTH=triton.next_power_of_2(pixels // factors), num_warps=WARPS,
    )  # fmt: skip
    return out
