"""A multilayer perceptron and its gradient as two operators.

    h_0 = x,    h_i = leaky(W_i h_{i-1} + b_i),    out = W h + b

On a GPU, each layer is one kernel in the forward pass, including bias and leaky ReLU, and one in
the backward pass. The latter computes the gradients of the weight, of the bias and of the layer
below at the same time, because each of them alone is too small to fill the GPU. Products are in
TF32.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOPE = 0.2
"""Of all leaky ReLUs."""
ALIGNMENT = 16
"""The kernels read rows that are multiples of this many bytes."""

torch.library.define(
    "arsm_experiments::perceptron", "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]"
)
torch.library.define(
    "arsm_experiments::perceptron_backward",
    "(Tensor grad_out, Tensor[] inputs, Tensor[] weights) -> Tensor[]",
)


def aligned(widths: Iterable[int], dtype: torch.dtype) -> bool:
    """Whether the kernels can read rows of these widths."""
    return all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)


def perceptron(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """[N, O] for x [N, I], which gets no gradient; weights [O, I] and biases [O] per layer."""
    return torch.ops.arsm_experiments.perceptron(x, weights, biases)[-1]


def _by_pytorch(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """The output of every layer, for tensors that all lead with *R."""
    found = [x]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True), 1):
        out = found[-1] @ weight.mT + bias.unsqueeze(-2)
        found.append(F.leaky_relu(out, SLOPE) if i < len(weights) else out)
    return found[1:]


def _backward_by_pytorch(
    grad_out: Tensor, inputs: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """The gradients of the weights, then of the biases, from grad_out and the input of every
    layer.
    """
    grad_weights, grad_biases = [], []
    for i in reversed(range(len(weights))):
        grad_weights.append(grad_out.mT @ inputs[i])
        grad_biases.append(grad_out.sum(-2))
        if i:
            below = grad_out @ weights[i]
            grad_out = torch.ops.aten.leaky_relu_backward(
                below, inputs[i], SLOPE, self_is_result=True
            )
    return [*reversed(grad_weights), *reversed(grad_biases)]


def _on_gpu(*args: Any) -> list[Tensor]:
    return importlib.import_module("arsm_experiments.gpu_perceptron").perceptron(*args)


def _backward_on_gpu(*args: Any) -> list[Tensor]:
    return importlib.import_module("arsm_experiments.gpu_perceptron").backward(*args)


def lead(info: Any, x: Any, dim: Any) -> Any:
    """A mapped operator's arguments with the mapped dimension first."""
    if isinstance(x, (list, tuple)):
        return [lead(info, *each) for each in zip(x, dim, strict=True)]
    return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def _map(operator: Any) -> Any:
    def mapped(info: Any, in_dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
        found = operator(*(lead(info, *each) for each in zip(args, in_dims, strict=True)))
        return found, [0] * len(found)

    return mapped


def _keep(
    ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor]], output: list[Tensor]
) -> None:
    x, weights, _ = inputs
    ctx.save_for_backward(x, *output[:-1], *weights)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[None, list[Tensor], list[Tensor]]:
    layers = len(grads)
    inputs, weights = list(ctx.saved_tensors[:layers]), list(ctx.saved_tensors[layers:])
    found = torch.ops.arsm_experiments.perceptron_backward(grads[-1], inputs, weights)
    return None, found[:layers], found[layers:]


for name, by_pytorch, on_gpu in (
    ("perceptron", _by_pytorch, _on_gpu),
    ("perceptron_backward", _backward_by_pytorch, _backward_on_gpu),
):
    torch.library.impl(f"arsm_experiments::{name}", "cpu", by_pytorch)
    torch.library.impl(f"arsm_experiments::{name}", "cuda", on_gpu)
    torch.library.register_vmap(
        f"arsm_experiments::{name}", _map(getattr(torch.ops.arsm_experiments, name))
    )
torch.library.register_autograd("arsm_experiments::perceptron", _backward, setup_context=_keep)


@torch.library.register_fake("arsm_experiments::perceptron")
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[-2])) for weight in weights]


@torch.library.register_fake("arsm_experiments::perceptron_backward")
def _(grad_out: Tensor, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    made = [weight.new_empty(weight.shape) for weight in weights]
    return [*made, *(weight.new_empty(weight.shape[:-1]) for weight in weights)]
