"""The logarithm of Dirichlet noise, as Triton kernels."""

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
def exponential(bits, dtype: tl.constexpr):
    """Exp(1) noise -ln w, w uniform, from a random int32 or int64: positive, finite,
    and precise near 0 as elsewhere.

    The sign says on which side of 1/2 w is, the other bits how far from 0 or 1. Near 1,
    w is rounded, and what it lost is added.
    """
    size: tl.constexpr = bits.dtype.primitive_bitwidth
    # the bits without their sign, and half a unit, so that v is never 0
    v = ((bits ^ (bits >> (size - 1))).to(dtype) + 0.5) * 0.5**size
    w = tl.where(bits < 0, v, 1 - v)
    return tl.where(bits < 0, 0, v - (1 - w)) - tl.log(w)


@triton.jit
def _put(noise, at, mask, bits):
    """Store exponential noise; returns it in float64, and 0 outside the mask."""
    dtype: tl.constexpr = noise.dtype.element_ty
    x = exponential(bits.to(tl.int64 if dtype == tl.float64 else tl.int32, bitcast=True), dtype)
    tl.store(noise + at, x, mask=mask)
    return tl.where(mask, x, 0.0).to(tl.float64)


@triton.jit
def _join(high, low):
    """64 bits from two halves."""
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def _draw(seed, noise, parts, C, P, PART, SPAN, BLOCK: tl.constexpr):
    """Exponential noise [R, C], and the sum of each chunk: parts [R, P].

    Philox gives 128 bits per place of the row's first part: for four elements of
    float32 or two of float64, PART apart.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    key = tl.load(seed)
    noise += row.to(tl.int64) * C
    total = tl.zeros([BLOCK], tl.float64)
    for i in range(SPAN):
        k = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        inside = k < PART
        # counted by place and row: a number does not depend on how rows are cut into programs
        b0, b1, b2, b3 = tl.philox(key, k, k * 0 + row, k * 0, k * 0)
        if noise.dtype.element_ty == tl.float64:
            total += _put(noise, k, inside, _join(b0, b1))
            total += _put(noise, k + PART, inside & (k + PART < C), _join(b2, b3))
        else:
            total += _put(noise, k, inside, b0)
            total += _put(noise, k + PART, inside & (k + PART < C), b1)
            total += _put(noise, k + 2 * PART, inside & (k + 2 * PART < C), b2)
            total += _put(noise, k + 3 * PART, inside & (k + 3 * PART < C), b3)
    tl.store(parts + row * P + chunk, tl.sum(total, 0))


@triton.jit
def _normalise(noise, parts, C, P, SPAN, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """In place: the logarithm of the noise over its sum."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    # every program adds up the parts of its row again, in the same order
    p = tl.arange(0, BLOCK_P)
    total = tl.log(tl.sum(tl.load(parts + row * P + p, mask=p < P, other=0.0), 0))
    for i in range(SPAN):
        c = (chunk * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(noise + row * C + c, mask=c < C, other=1.0)
        tl.store(noise + row * C + c, tl.log(x) - total.to(x.dtype), mask=c < C)


def log_dirichlet(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill a tensor [..., C] with ln pi."""
    categories = noise.shape[-1]
    if categories <= ONE_BLOCK:
        # PyTorch launches three kernels sooner than Triton launches one
        return noise.exponential_(generator=generator).log_().log_softmax(-1)
    rows = noise.numel() // categories
    # a seed on the device: no synchronisation, and a CUDA graph draws another at each replay
    seed = noise.new_empty(1, dtype=torch.int64).random_(generator=generator)
    part = triton.cdiv(categories, 16 // noise.itemsize)
    block, warps, span, chunks = chunks_of(rows, part, 2)
    parts = noise.new_empty(rows * chunks, dtype=torch.float64)
    _draw[(rows, chunks)](
        seed, noise, parts, categories, chunks, part, span, BLOCK=block, num_warps=warps
    )
    block_p = max(16, triton.next_power_of_2(chunks))
    block, warps, span, own_chunks = chunks_of(rows, categories, 8)
    _normalise[(rows, own_chunks)](
        noise, parts, categories, chunks, span, BLOCK=block, BLOCK_P=block_p, num_warps=warps
    )
    return noise
