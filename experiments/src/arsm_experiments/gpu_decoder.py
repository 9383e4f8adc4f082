"""`arsm_experiments.decoder` with Triton kernels: one-hot choices, hidden layers, the
likelihood.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from arsm_experiments.gpu_perceptron import flat, layer
from arsm_experiments.perceptron import SLOPE

ONE_HOT = {"BLOCK_N": 8, "num_warps": 1}
LAYER = {"BLOCK_N": 128, "BLOCK_O": 128, "BLOCK_I": 64, "num_warps": 4, "num_stages": 2}
LIKELIHOOD = {"ROWS": 16, "SHARED": 8, "num_warps": 4}
PARTS = 7
"""Parts in which the pixels of an image are read; for 28 x 28 pixels, a part's size is a multiple
of 16.
"""
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _one_hot(
    z, log_q, one_hot, of_choices, N, B,
    K: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_KC: tl.constexpr,
):  # fmt: skip
    """one_hot [R, N, K C] of z [R, N, K], and of_choices [R, N] = sum_k ln q(z_k)."""
    replica = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, k, c = replica * N + n, tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_KC)
    here = (n < N)[:, None] & (k < K)[None, :]
    own = (k * C)[None, :] + tl.load(z + row[:, None] * K + k[None, :], mask=here, other=0).to(
        tl.int32
    )
    log_p = tl.load(log_q + (replica * B + n % B)[:, None] * (K * C) + own, mask=here, other=0.0)
    tl.store(of_choices + row, tl.sum(log_p, 1), mask=n < N)
    here = (n < N)[:, None] & (c < K * C)[None, :]
    own = tl.load(z + row[:, None] * K + (c // C)[None, :], mask=here, other=0).to(tl.int32)
    chosen = (own == (c % C)[None, :]).to(one_hot.dtype.element_ty)
    tl.store(one_hot + row[:, None] * (K * C) + c[None, :], chosen, mask=here)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _likelihood(
    product, bias, x, of_choices, out, M, B, BIAS_STRIDE,
    D: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """out [R, M B] from product [R, M B, D], bias [R, D], x [R, B, D] and ln q(z) [R, M B]; one
    image per program.

    ln(1 + e^l) = l/2 + |l|/2 + ln(1 + e^{-|l|}). PARTS x SHARED pixels multiply their factors 1 +
    e^{-|l|}, between 1 and 2, before one logarithm.
    """
    image, replica = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m, d, SIZE = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), D // PARTS
    row, here = (replica * M + m) * B + image, (d < SIZE)[None, :]
    linear, size = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    factors = tl.full([ROWS, WIDTH], 1.0, tl.float32)
    for part in tl.static_range(PARTS):
        # four neighbours per load: float32 and bfloat16 then share one layout
        at = tl.max_contiguous(part * SIZE + d, 4)
        y = tl.load(x + (replica * B + image) * D + at, mask=d < SIZE, other=0.0)
        b = tl.load(bias + replica * BIAS_STRIDE + at, mask=d < SIZE, other=0.0)
        phi = tl.load(
            product + row[:, None] * D + at[None, :], mask=(m < M)[:, None] & here, other=0.0
        )
        phi = phi.to(tl.float32) + b[None, :]
        linear = tl.fma(y[None, :] - 0.5, phi, linear)
        size += tl.abs(phi)
        factors = tl.fma(factors, tl.exp2(tl.abs(phi) * -LOG2_E), factors)
    factors = tl.reshape(tl.where(here, factors, 1.0), [ROWS, WIDTH // SHARED, SHARED])
    total = tl.sum(tl.where(here, linear - 0.5 * size, 0.0), 1) - tl.sum(
        tl.log(tl.reduce(factors, 2, _times)), 1
    )
    tl.store(out + row, total - tl.load(of_choices + row, mask=m < M, other=0.0), mask=m < M)


def log_weight(
    z: Tensor, log_q: Tensor, weights: list[Tensor], biases: list[Tensor], x: Tensor
) -> Tensor:
    """For tensors that all lead with *R; z, log_q and x are contiguous."""
    (*_, rows, variables), (images, pixels) = z.shape, x.shape[-2:]
    replicas = z.shape[:-2].numel()
    choices = weights[0].shape[-1]
    h, of_choices = weights[0].new_empty(replicas, rows, choices), x.new_empty(z.shape[:-1])
    _one_hot[(triton.cdiv(rows, ONE_HOT["BLOCK_N"]), replicas)](
        z, log_q, h, of_choices, rows, images, K=variables, C=choices // variables,
        BLOCK_K=triton.next_power_of_2(variables), BLOCK_KC=triton.next_power_of_2(choices),
        **ONE_HOT,
    )  # fmt: skip
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        h = layer(h, flat(weight, 2), flat(bias, 1), SLOPE, LAYER)
    h = h.view(*z.shape[:-1], -1)
    product, out = h @ weights[-1].mT, torch.empty_like(of_choices)
    queries, bias = rows // images, flat(biases[-1], 1)
    parts = PARTS if pixels % PARTS == 0 else 1
    _likelihood[(images, triton.cdiv(queries, LIKELIHOOD["ROWS"]), replicas)](
        product, bias, x, of_choices, out, queries, images, bias.stride(0), D=pixels, PARTS=parts,
        WIDTH=max(8, triton.next_power_of_2(pixels // parts)), **LIKELIHOOD,
    )  # fmt: skip
    return out
