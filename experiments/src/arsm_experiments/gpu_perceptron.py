"""`arsm_experiments.perceptron` with Triton kernels: a layer, and its backward pass."""

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
"""From this many rows on, counted over all replicas, larger blocks fill the GPU too."""
FORWARD = (
    {"BLOCK_N": 32, "BLOCK_O": 32, "BLOCK_I": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_O": 64, "BLOCK_I": 32, "num_warps": 4, "num_stages": 4},
)
"""For few and for many rows, as BACKWARD."""
# With four warps, Triton uses the instructions for warp groups. They need TF32 operands that are
# contiguous along the summed dimension. Here the operands are not, and transposing them costs more
# than the instructions save.
BACKWARD = (
    {"BLOCK_N": 32, "BLOCK_O": 64, "BLOCK_I": 32, "num_warps": 2, "num_stages": 4},
    {"BLOCK_N": 32, "BLOCK_O": 64, "BLOCK_I": 64, "num_warps": 2, "num_stages": 3},
)


@triton.jit
def _rounded(x):
    """Round float32 to TF32.

    A product of TF32 ignores the last 13 bits of its operands. Without rounding, it would be too
    small, by a relative 7e-4 on average.
    """
    if x.dtype == tl.float32:
        # nan, with all bits set, stays nan
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF)
        x = (bits + 0x1000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _block(x, replica, i, j):
    """A block of the matrix of one replica."""
    return tl.reshape(x.load([replica, i, j]), [x.block_shape[1], x.block_shape[2]])


@triton.jit
def _layer(
    x, weight, bias, out, INPUTS, OUTPUTS, BIAS_STRIDE,
    SLOPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """out [R, N, O] = leaky(x weight^T + bias) from x [R, N, I], weight [R, O, I] and bias [R, O].

    Tensors of three dimensions come as descriptors: what lies outside them reads as 0 and is not
    written.
    """
    at_o, at_n, replica = tl.program_id(0) * BLOCK_O, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    total = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for at_i in range(0, INPUTS, BLOCK_I):
        a, b = _block(x, replica, at_n, at_i), _block(weight, replica, at_o, at_i)
        total = tl.dot(_rounded(a), tl.trans(_rounded(b)), total)
    o = at_o + tl.arange(0, BLOCK_O)
    total += tl.load(bias + replica.to(tl.int64) * BIAS_STRIDE + o, mask=o < OUTPUTS, other=0.0)[
        None, :
    ]
    total = tl.maximum(total, SLOPE * total)
    out.store([replica, at_n, at_o], tl.reshape(total.to(out.dtype), [1, BLOCK_N, BLOCK_O]))


@triton.jit
def _grad_x(
    grad_out, x, weight, grad_x, OUTPUTS, replica, at_n, at_i,
    SLOPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A block of (grad_out weight) leaky'(x)."""
    total = tl.zeros([BLOCK_N, BLOCK_I], tl.float32)
    for at_o in range(0, OUTPUTS, BLOCK_O):
        a, b = _block(grad_out, replica, at_n, at_o), _block(weight, replica, at_o, at_i)
        total = tl.dot(_rounded(a), _rounded(b), total)
    total = tl.where(_block(x, replica, at_n, at_i) > 0, total, SLOPE * total)
    grad_x.store([replica, at_n, at_i], tl.reshape(total, [1, BLOCK_N, BLOCK_I]))


@triton.jit
def _grad_weight(
    grad_out, x, grad_weight, N, replica, at_o, at_i,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A block of grad_out^T x."""
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for at_n in range(0, N, BLOCK_N):
        a, b = _block(grad_out, replica, at_n, at_o), _block(x, replica, at_n, at_i)
        total = tl.dot(tl.trans(_rounded(a)), _rounded(b), total)
    grad_weight.store([replica, at_o, at_i], tl.reshape(total, [1, BLOCK_O, BLOCK_I]))


@triton.jit
def _grad_bias(
    grad_out, grad_bias, N, OUTPUTS, replica, at_o, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr
):
    """A block of sum_n grad_out."""
    total, o = tl.zeros([BLOCK_O], tl.float32), at_o + tl.arange(0, BLOCK_O)
    for at_n in range(0, N, BLOCK_N):
        total += tl.sum(_block(grad_out, replica, at_n, at_o), 0)
    tl.store(grad_bias + replica.to(tl.int64) * OUTPUTS + o, total, mask=o < OUTPUTS)


@triton.jit
def _layer_backward(
    grad_out, x, weight, grad_x, grad_weight, grad_bias, N, INPUTS, OUTPUTS,
    HIDDEN: tl.constexpr, SLOPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """From grad_out [R, N, O], the gradients of a layer's weight, of its bias and, if x is a hidden
    layer, of x.

    Each program computes one block of one of them.
    """
    at, replica, across = tl.program_id(0), tl.program_id(1), tl.cdiv(INPUTS, BLOCK_I)
    x_blocks = tl.cdiv(N, BLOCK_N) * across if HIDDEN else 0
    weight_blocks = tl.cdiv(OUTPUTS, BLOCK_O) * across
    if at < x_blocks:
        at_n, at_i = at // across * BLOCK_N, at % across * BLOCK_I
        _grad_x(
            grad_out,
            x,
            weight,
            grad_x,
            OUTPUTS,
            replica,
            at_n,
            at_i,
            SLOPE,
            BLOCK_N,
            BLOCK_O,
            BLOCK_I,
        )
    elif at < x_blocks + weight_blocks:
        at -= x_blocks
        at_o, at_i = at // across * BLOCK_O, at % across * BLOCK_I
        _grad_weight(grad_out, x, grad_weight, N, replica, at_o, at_i, BLOCK_N, BLOCK_O, BLOCK_I)
    else:
        at_o = (at - x_blocks - weight_blocks) * BLOCK_O
        _grad_bias(grad_out, grad_bias, N, OUTPUTS, replica, at_o, BLOCK_N, BLOCK_O)


def layer(x: Tensor, weight: Tensor, bias: Tensor, slope: float, blocks: Blocks) -> Tensor:
    """leaky(x weight^T + bias) for contiguous x [R, N, I], with weight [R, O, I] and bias [R,
    O].
    """
    (replicas, rows, inputs), outputs = x.shape, weight.shape[-2]
    out = x.new_empty(replicas, rows, outputs)
    tiles = triton.cdiv(outputs, blocks["BLOCK_O"]), triton.cdiv(rows, blocks["BLOCK_N"])
    _layer[(*tiles, replicas)](
        _tiles(x, blocks, "NI"), _tiles(weight, blocks, "OI"), bias, _tiles(out, blocks, "NO"),
        inputs, outputs, bias.stride(0), SLOPE=slope, **blocks,
    )  # fmt: skip
    return out


def layer_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, *, hidden: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the weight, of the bias and, if x is a hidden layer, of x, from grad_out [R,
    N, O].
    """
    (replicas, rows, inputs), outputs = x.shape, weight.shape[-2]
    grad_weight, grad_bias = x.new_empty(weight.shape), x.new_empty(replicas, outputs)
    grad_x = torch.empty_like(x) if hidden else x
    blocks = BACKWARD[replicas * rows >= MANY]
    sizes = ((rows, "N"), (outputs, "O"), (inputs, "I"))
    down, out, across = (triton.cdiv(size, blocks[f"BLOCK_{name}"]) for size, name in sizes)
    given = ((grad_out, "NO"), (x, "NI"), (weight, "OI"), (grad_x, "NI"), (grad_weight, "OI"))
    _layer_backward[(((down if hidden else 0) + out) * across + out, replicas)](
        *(_tiles(tensor, blocks, names) for tensor, names in given),
        grad_bias, rows, inputs, outputs, HIDDEN=hidden, SLOPE=SLOPE, **blocks,
    )  # fmt: skip
    return grad_weight, grad_bias, grad_x


def perceptron(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """For tensors that all lead with *R."""
    blocks, found = FORWARD[x.shape[:-1].numel() >= MANY], [flat(x.contiguous(), 2)]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True), 1):
        found.append(
            layer(
                found[-1],
                flat(weight, 2),
                flat(bias, 1),
                SLOPE if i < len(weights) else 1.0,
                blocks,
            )
        )
    return [each.view(*x.shape[:-1], -1) for each in found[1:]]


def backward(grad_out: Tensor, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The gradients of the weights, then of the biases, for tensors that all lead with *R."""
    grad_weights, grad_biases = [], []
    grad_out = flat(grad_out.contiguous(), 2)
    for i in reversed(range(len(weights))):
        x, weight = flat(inputs[i].contiguous(), 2), flat(weights[i], 2)
        grad_weight, grad_bias, grad_out = layer_backward(grad_out, x, weight, hidden=i > 0)
        grad_weights.append(grad_weight.view(weights[i].shape))
        grad_biases.append(grad_bias.view(weights[i].shape[:-1]))
    return [*reversed(grad_weights), *reversed(grad_biases)]


def flat(x: Tensor, dims: int) -> Tensor:
    """[R, ...] from [*R, ...]; stacked parameters keep their strides."""
    return x.reshape(-1, *x.shape[-dims:])


def _tiles(x: Tensor, blocks: Blocks, sizes: str) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [1, *(blocks[f"BLOCK_{size}"] for size in sizes)])
