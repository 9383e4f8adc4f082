"""Scores of Cat(softmax(logits)): x = onehot(z) - p, their weighted sums, and their
covariance G = diag(p) - p p'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arsm import kernels
from arsm.categorical import one_hot
from arsm.noise import working_dtype


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(phi / tau) in the working dtype, detached: [..., C]."""
    return (logits.detach().to(working_dtype(logits.dtype)) / temperature).softmax(-1)


def probabilities_for(values: Tensor, logits: Tensor) -> Tensor:
    """softmax(phi) in a dtype that holds both values and logits, detached: [..., C]."""
    return logits.detach().to(torch.promote_types(values.dtype, logits.dtype)).softmax(-1)


def log_probability(logits: Tensor) -> Tensor:
    """ln p = ln softmax(phi), detached: [..., C]."""
    return logits.detach().to(working_dtype(logits.dtype)).log_softmax(-1)


def score(logits: Tensor, z: Tensor) -> Tensor:
    """d ln q(z) / d logits = 1[z = c] - softmax(logits)_c: [..., K, C], detached."""
    p = probabilities(logits)
    return one_hot(z, logits.shape[-1], p.dtype) - p


def weighted_scores(p: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """sum_i w_i (onehot(z_i) - p): p [*B, K, C], z [n, *B, K], w [n, *B] (or [n, *B,
    K]) -> [*B, K, C].
    """
    weight = _of_variables(weight, z).movedim(0, -1)
    z = z.movedim(0, -1)
    # -sum_i w_i p, to which every sample adds its weight: no one-hot vector is ever made
    return (-weight.sum(-1, keepdim=True) * p).scatter_add_(-1, z, weight)


def sum_by_category(z: Tensor, weight: Tensor, categories: int) -> Tensor:
    """sum_i w_i onehot(z_i): z [n, *B, K], w [n, *B] (or [n, *B, K]) -> [*B, K, C].

    Where the weights sum to 0, as they do in leave-one-out, these are the weighted
    scores.
    """
    weight = _of_variables(weight, z).movedim(0, -1)
    z = z.movedim(0, -1)
    return weight.new_zeros(*z.shape[:-1], categories).scatter_add_(-1, z, weight)


def _of_variables(weight: Tensor, z: Tensor) -> Tensor:
    """Weights [n, *B] or [n, *B, K] as [n, *B, K]."""
    return weight if weight.ndim == z.ndim else weight.unsqueeze(-1).expand(z.shape)


def energy(p: Tensor, z: Tensor) -> Tensor:
    """|onehot(z_k) - p_k|^2 = 1 - 2 p_k(z_k) + sum_c p_kc^2: p [*B, K, C], z [n, *B, K]
    -> [n, *B, K].
    """
    of_sample = p.expand(*z.shape, -1).gather(-1, z.unsqueeze(-1)).squeeze(-1)
    return 1 - 2 * of_sample + p.square().sum(-1)


@kernels.one_kernel("gpu_tell", lambda z, values, categories, dtype: categories)
def leave_one_out(z: Tensor, values: Tensor, categories: int, dtype: torch.dtype) -> Tensor:
    """1/(n - 1) sum_i (f_i - mean f) onehot(z_i) in a dtype: z [n, *B, K], f [n, *B] ->
    [*B, K, C].
    """
    return sum_by_category(z, less_mean(values).to(dtype) / (len(values) - 1), categories)


def less_mean(values: Tensor) -> Tensor:
    """f minus its mean over the samples, exact for any constant in f: [n, *B] -> [n, *B]."""
    # a mean of large, equal values would round; that of their differences does not
    f = values - values[0]
    return f - f.mean(0)


def centred(p: Tensor, h: Tensor) -> Tensor:
    """h minus its mean under p; G h = p centred(h) and h.x = sum_k centred(h)[k, z_k]:
    [*B, K, C].
    """
    return h - (p * h).sum(-1, keepdim=True)
