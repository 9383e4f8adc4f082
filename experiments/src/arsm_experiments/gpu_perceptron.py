"""`arsm_experiments.perceptron` with Triton kernels: a layer, and the slopes of a layer."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from arsm_experiments.perceptron import SLOPE

Blocks = Mapping[str, int]
MANY = 1000
"""Rows of all replicas from which on larger blocks fill the GPU, too."""
FORWARD = (
    {"BLOCK_N": 32, "BLOCK_O": 32, "BLOCK_I": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_O": 64, "BLOCK_I": 32, "num_warps": 4, "num_stages": 4},
)
"""For few and for many rows, as BACKWARD."""
# With four warps Triton takes the instructions of a warp group. They need TF32 operands whose rows run along the summed
# dimension; here they do not, and to transpose them costs more than the instructions save.
BACKWARD = (
    {"BLOCK_N": 32, "BLOCK_O": 64, "BLOCK_I": 32, "num_warps": 2, "num_stages": 4},
    {"BLOCK_N": 32, "BLOCK_O": 64, "BLOCK_I": 64, "num_warps": 2, "num_stages": 3},
)


@triton.jit
def _rounded(x):
    """What a product of TF32 reads as the nearest to x: it cuts off the last 13 bits of float32.

    Cut off alone, all numbers would become smaller, and products by a relative 7e-4 on average.
    """
    if x.dtype == tl.float32:
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF)  # nan, with all bits set, stays nan
        x = (bits + 0x1000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _layer(
    x, weight, bias, out, INPUTS, OUTPUTS, BIAS_STRIDE,
    SLOPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """out [R, N, O] = leaky(x weight^T + bias) from x [R, N, I], weight [R, O, I] and bias [R, O].

    Tensors of three dimensions come as descriptors: what lies outside them reads as 0 and is not written.
    """
    at_o, at_n, replica = tl.program_id(0) * BLOCK_O, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    total = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for at_i in range(0, INPUTS, BLOCK_I):
        a = tl.reshape(x.load([replica, at_n, at_i]), [BLOCK_N, BLOCK_I])
        b = tl.reshape(weight.load([replica, at_o, at_i]), [BLOCK_O, BLOCK_I])
        total = tl.dot(_rounded(a), tl.trans(_rounded(b)), total)
    o = at_o + tl.arange(0, BLOCK_O)
    total += tl.load(bias + replica.to(tl.int64) * BIAS_STRIDE + o, mask=o < OUTPUTS, other=0.0)[None, :]
    total = tl.maximum(total, SLOPE * total)
    out.store([replica, at_n, at_o], tl.reshape(total.to(out.dtype), [1, BLOCK_N, BLOCK_O]))


@triton.jit
def _of_x(slope, x, weight, of_x, OUTPUTS, replica, at_n, at_i, SLOPE: tl.constexpr):
    """A block of (slope weight) leaky'(x)."""
    BLOCK_N: tl.constexpr = slope.block_shape[1]
    BLOCK_O: tl.constexpr = slope.block_shape[2]
    BLOCK_I: tl.constexpr = x.block_shape[2]
    total = tl.zeros([BLOCK_N, BLOCK_I], tl.float32)
    for at_o in range(0, OUTPUTS, BLOCK_O):
        a = tl.reshape(slope.load([replica, at_n, at_o]), [BLOCK_N, BLOCK_O])
        b = tl.reshape(weight.load([replica, at_o, at_i]), [BLOCK_O, BLOCK_I])
        total = tl.dot(_rounded(a), _rounded(b), total)
    active = tl.reshape(x.load([replica, at_n, at_i]), [BLOCK_N, BLOCK_I]) > 0
    of_x.store([replica, at_n, at_i], tl.reshape(tl.where(active, total, SLOPE * total), [1, BLOCK_N, BLOCK_I]))


@triton.jit
def _of_weight(slope, x, of_weight, N, replica, at_o, at_i):
    """A block of slope^T x."""
    BLOCK_N: tl.constexpr = slope.block_shape[1]
    BLOCK_O: tl.constexpr = slope.block_shape[2]
    BLOCK_I: tl.constexpr = x.block_shape[2]
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for at_n in range(0, N, BLOCK_N):
        a = tl.reshape(slope.load([replica, at_n, at_o]), [BLOCK_N, BLOCK_O])
        b = tl.reshape(x.load([replica, at_n, at_i]), [BLOCK_N, BLOCK_I])
        total = tl.dot(tl.trans(_rounded(a)), _rounded(b), total)
    of_weight.store([replica, at_o, at_i], tl.reshape(total, [1, BLOCK_O, BLOCK_I]))


@triton.jit
def _of_bias(slope, of_bias, N, OUTPUTS, replica, at_o):
    """A block of sum_n slope."""
    BLOCK_N: tl.constexpr = slope.block_shape[1]
    BLOCK_O: tl.constexpr = slope.block_shape[2]
    total, o = tl.zeros([BLOCK_O], tl.float32), at_o + tl.arange(0, BLOCK_O)
    for at_n in range(0, N, BLOCK_N):
        total += tl.sum(tl.reshape(slope.load([replica, at_n, at_o]), [BLOCK_N, BLOCK_O]), 0)
    tl.store(of_bias + replica.to(tl.int64) * OUTPUTS + o, total, mask=o < OUTPUTS)


@triton.jit
def _slopes(
    slope, x, weight, of_x, of_weight, of_bias, N, INPUTS, OUTPUTS,
    HIDDEN: tl.constexpr, SLOPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """From the slope [R, N, O] in a layer's output: those in its weight, in its bias and, if hidden, in its input x.

    A program computes one block of one of them.
    """
    at, replica, across = tl.program_id(0), tl.program_id(1), tl.cdiv(INPUTS, BLOCK_I)
    of_inputs = tl.cdiv(N, BLOCK_N) * across if HIDDEN else 0
    of_weights = tl.cdiv(OUTPUTS, BLOCK_O) * across
    if at < of_inputs:
        _of_x(slope, x, weight, of_x, OUTPUTS, replica, at // across * BLOCK_N, at % across * BLOCK_I, SLOPE)
    elif at < of_inputs + of_weights:
        at -= of_inputs
        _of_weight(slope, x, of_weight, N, replica, at // across * BLOCK_O, at % across * BLOCK_I)
    else:
        _of_bias(slope, of_bias, N, OUTPUTS, replica, (at - of_inputs - of_weights) * BLOCK_O)


def layer(x: Tensor, weight: Tensor, bias: Tensor, slope: float, blocks: Blocks) -> Tensor:
    """leaky(x weight^T + bias) for contiguous x [R, N, I], with weight [R, O, I] and bias [R, O]."""
    (replicas, rows, inputs), outputs = x.shape, weight.shape[-2]
    out = x.new_empty(replicas, rows, outputs)
    _layer[(triton.cdiv(outputs, blocks["BLOCK_O"]), triton.cdiv(rows, blocks["BLOCK_N"]), replicas)](
        _tiles(x, blocks, "NI"), _tiles(weight, blocks, "OI"), bias, _tiles(out, blocks, "NO"), inputs, outputs,
        bias.stride(0), SLOPE=slope, **blocks,
    )  # fmt: skip
    return out


def slopes_of_layer(slope: Tensor, x: Tensor, weight: Tensor, *, hidden: bool) -> tuple[Tensor, Tensor, Tensor]:
    """In the weight, in the bias and, if hidden, in x, from the slope [R, N, O] in the output."""
    (replicas, rows, inputs), outputs = x.shape, weight.shape[-2]
    of_weight, of_bias = x.new_empty(weight.shape), x.new_empty(replicas, outputs)
    of_x = torch.empty_like(x) if hidden else x
    blocks = BACKWARD[replicas * rows >= MANY]
    sizes = ((rows, "N"), (outputs, "O"), (inputs, "I"))
    down, out, across = (triton.cdiv(size, blocks[f"BLOCK_{name}"]) for size, name in sizes)
    given = ((slope, "NO"), (x, "NI"), (weight, "OI"), (of_x, "NI"), (of_weight, "OI"))
    _slopes[(((down if hidden else 0) + out) * across + out, replicas)](
        *(_tiles(tensor, blocks, names) for tensor, names in given),
        of_bias, rows, inputs, outputs, HIDDEN=hidden, SLOPE=SLOPE, **blocks,
    )  # fmt: skip
    return of_weight, of_bias, of_x


def perceptron(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """For tensors that all lead with *R."""
    blocks, found = FORWARD[x.shape[:-1].numel() >= MANY], [flat(x.contiguous(), 2)]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True), 1):
        found.append(layer(found[-1], flat(weight, 2), flat(bias, 1), SLOPE if i < len(weights) else 1.0, blocks))
    return [each.view(*x.shape[:-1], -1) for each in found[1:]]


def slopes(slope: Tensor, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Of weights, then of biases, for tensors that all lead with *R."""
    of_weights, of_biases = [], []
    slope = flat(slope.contiguous(), 2)
    for i in reversed(range(len(weights))):
        x, weight = flat(inputs[i].contiguous(), 2), flat(weights[i], 2)
        of_weight, of_bias, slope = slopes_of_layer(slope, x, weight, hidden=i > 0)
        of_weights.append(of_weight.view(weights[i].shape))
        of_biases.append(of_bias.view(weights[i].shape[:-1]))
    return [*reversed(of_weights), *reversed(of_biases)]


def flat(x: Tensor, dims: int) -> Tensor:
    """[R, ...] from [*R, ...]; stacked parameters keep their strides."""
    return x.reshape(-1, *x.shape[-dims:])


def _tiles(x: Tensor, blocks: Blocks, sizes: str) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [1, *(blocks[f"BLOCK_{size}"] for size in sizes)])
