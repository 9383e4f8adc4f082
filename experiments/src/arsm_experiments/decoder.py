"""ln p(x | z) - ln q(z) for many choices z of each image, without gradient, as one operator.

    h_0 = one-hot z,    h_i = leaky(W_i h_{i-1} + b_i),    l = W h + b
    ln p = sum_d x_d l_d - ln(1 + e^{l_d})

It is nearly all of a training step's work. On a GPU a hidden layer's bias and leaky ReLU are part
of its product's kernel, and the logits of the pixels, the step's largest tensor, are read once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm_experiments.perceptron import SLOPE, lead

torch.library.define(
    "arsm_experiments::log_weight",
    "(Tensor z, Tensor log_q, Tensor[] weights, Tensor[] biases, Tensor x) -> Tensor",
)


def log_weight(
    z: Tensor, log_q: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], x: Tensor
) -> Tensor:
    """[N] for z [N, K], whose row n belongs to image n % B of x [B, D] and of log_q [B, K, C].

    weights: [O, I] per layer, all of one dtype; biases: [O] per layer.
    """
    return torch.ops.arsm_experiments.log_weight(z, log_q, weights, biases, x)


def _by_pytorch(
    z: Tensor, log_q: Tensor, weights: list[Tensor], biases: list[Tensor], x: Tensor
) -> Tensor:
    """For tensors that all lead with *R."""
    categories = log_q.shape[-1]
    one_hot = F.one_hot(z, categories)
    h = one_hot.flatten(-2).to(weights[0].dtype)
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        h = F.leaky_relu((h @ weight.mT).float() + bias.unsqueeze(-2), SLOPE).to(weight.dtype)
    logits = ((h @ weights[-1].mT).float() + biases[-1].unsqueeze(-2)).unflatten(
        -2, (-1, x.shape[-2])
    )
    log_p = (x.unsqueeze(-3) * logits - F.softplus(logits)).sum(-1)
    of_choices = (one_hot.unflatten(-3, (-1, x.shape[-2])) * log_q.unsqueeze(-4)).sum((-2, -1))
    return (log_p - of_choices).flatten(-2)


def _on_gpu(
    z: Tensor, log_q: Tensor, weights: list[Tensor], biases: list[Tensor], x: Tensor
) -> Tensor:
    kernels = importlib.import_module("arsm_experiments.gpu_decoder")
    return kernels.log_weight(
        *(each.contiguous() for each in (z, log_q)), weights, biases, x.contiguous()
    )


def _map(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    found = torch.ops.arsm_experiments.log_weight(
        *(lead(info, *each) for each in zip(args, in_dims, strict=True))
    )
    return found, 0


torch.library.impl("arsm_experiments::log_weight", "cpu", _by_pytorch)
torch.library.impl("arsm_experiments::log_weight", "cuda", _on_gpu)
torch.library.register_vmap("arsm_experiments::log_weight", _map)


@torch.library.register_fake("arsm_experiments::log_weight")
def _(z: Tensor, log_q: Tensor, weights: list[Tensor], biases: list[Tensor], x: Tensor) -> Tensor:
    return x.new_empty(z.shape[:-1])
