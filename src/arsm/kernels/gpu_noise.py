"""The logarithm of Dirichlet noise from exponential noise, as Triton kernels."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm.kernels import ONE_BLOCK
from arsm.kernels.gpu_order import chunks_of


@triton.jit
def _sum(noise, parts, C, P, SPAN, BLOCK: tl.constexpr):
    """The sum of each chunk: parts [R, P]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float64)
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(noise + row * C + c, mask=c < C, other=0.0).to(tl.float64)
    tl.store(parts + row * P + chunk, tl.sum(total, 0))


@triton.jit
def _normalise(noise, parts, C, P, SPAN, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """In place: the logarithm of the noise over its sum."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    total = tl.log(tl.sum(tl.load(parts + row * P + p, mask=p < P, other=0.0), 0))
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(noise + row * C + c, mask=c < C, other=1.0)
        tl.store(noise + row * C + c, tl.log(x) - total.to(x.dtype), mask=c < C)


def log_dirichlet(noise: Tensor) -> Tensor:
    """ln pi from positive exponential noise [..., C], which is overwritten."""
    categories = noise.shape[-1]
    if categories <= ONE_BLOCK:
        return noise.log_().log_softmax(-1)  # PyTorch launches both sooner than Triton launches one kernel
    rows = noise.numel() // categories
    block, warps, span, chunks = chunks_of(rows, categories)
    parts = noise.new_empty(rows * chunks, dtype=torch.float64)
    extent, size = (categories, chunks, span), {"BLOCK": block, "num_warps": warps}
    _sum[(rows, chunks)](noise, parts, *extent, **size)
    _normalise[(rows, chunks)](noise, parts, *extent, BLOCK_P=max(16, triton.next_power_of_2(chunks)), **size)
    return noise
