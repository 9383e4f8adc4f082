"""ln p(x | z) of binary images from a decoder's last product of matrices, as one operator: on a GPU one kernel.

    ln p = sum_d x_d l_d - ln(1 + e^{l_d}),    l = product + bias

The product is a training step's largest tensor, and the kernel reads it once. It shares logarithms: ln(1 + e^l) = l/2 +
|l|/2 + ln(1 + e^{-|l|}), and several pixels multiply their factors, each between 1 and 2, before one logarithm.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FACTORS = 7

torch.library.define("arsm_experiments::log_likelihood", "(Tensor product, Tensor bias, Tensor x) -> Tensor")


def log_likelihood(product: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """[N], without gradient: product [N, D], whose row n belongs to image n % B of x [B, D], and bias [D]."""
    return torch.ops.arsm_experiments.log_likelihood(product, bias, x)


def _by_pytorch(product: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """For [*R, N, D], [*R, D] and [*R, B, D]."""
    logits = (product.float() + bias.unsqueeze(-2)).unflatten(-2, (-1, x.shape[-2]))
    return (x.unsqueeze(-3) * logits - F.softplus(logits)).sum(-1).flatten(-2)


def _on_gpu(product: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    kernel = importlib.import_module("arsm_experiments.gpu_likelihood").log_likelihood
    return kernel(product.contiguous(), bias.contiguous(), x.contiguous())


def _map(info: Any, in_dims: tuple[int | None, ...], *xs: Tensor) -> tuple[Tensor, int]:
    leading = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(xs, in_dims, strict=True)
    ]
    return torch.ops.arsm_experiments.log_likelihood(*leading), 0


torch.library.impl("arsm_experiments::log_likelihood", "cpu", _by_pytorch)
torch.library.impl("arsm_experiments::log_likelihood", "cuda", _on_gpu)
torch.library.register_vmap("arsm_experiments::log_likelihood", _map)


@torch.library.register_fake("arsm_experiments::log_likelihood")
def _(product: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(product.shape[:-1])
