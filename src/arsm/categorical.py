"""Cat(softmax(logits)): what f and the estimators share."""

from __future__ import annotations

import torch
from torch import Tensor


def one_hot(z: Tensor, categories: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """int64 [..., K] -> [..., K, C]; a relaxed (floating) z [..., K, C] passes through
    unchanged.
    """
    if z.is_floating_point():
        if z.shape[-1:] != (categories,):
            raise ValueError(
                f"A floating z is relaxed and must be [..., K, {categories}], but is "
                f"{list(z.shape)}; categories are int64, as in z.long()."
            )
        return z
    # PyTorch's own one_hot returns int64, which would have to be converted
    return (z.unsqueeze(-1) == torch.arange(categories, device=z.device)).to(dtype)


def log_prob(log_q: Tensor, z: Tensor) -> Tensor:
    """ln q(z_k) of every variable: log_q [..., K, C] normalised, z [..., K] or relaxed
    [..., K, C] -> [..., K].
    """
    if z.is_floating_point():
        # a relaxed z is 0 at a masked category, and 0 times -inf would be NaN
        return (z * log_q.masked_fill(log_q == -torch.inf, 0)).sum(-1)
    # gather itself would take a z of fewer rows, and pair it with the wrong ones
    if z.shape != log_q.shape[:-1]:
        raise ValueError(
            f"z must be int64 [..., K] for log_q [..., K, C], but they are {list(z.shape)} and "
            f"{list(log_q.shape)}."
        )
    return log_q.gather(-1, z.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """-sum_c q_c ln q_c in nats: [..., C] -> [...]."""
    log_q = logits.log_softmax(-1)
    return -log_prob(log_q, log_q.exp())
