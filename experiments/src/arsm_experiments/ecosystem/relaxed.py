"""torch's own surrogate and relaxations, and reinmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arsm.referee import PROBLEMS
from arsm.referee.measure import Loss
from arsm_experiments.ecosystem.entry import RELAXED, UNBIASED, Entry, audited, from_package


def torch_surrogate() -> Loss:
    """f times the log-probability of a sample."""

    def loss(logits: Tensor, f: Any) -> Tensor:
        q = torch.distributions.Categorical(logits=logits)
        z = q.sample()
        return (f(z).detach() * q.log_prob(z).sum(-1)).sum()

    return loss


def gumbel(hard: bool) -> Callable[[], Loss]:
    """f at torch's relaxed sample."""
    return lambda: (
        lambda logits, f: f(torch.nn.functional.gumbel_softmax(logits, tau=1.0, hard=hard)).sum()
    )


def reinmax_loss() -> Loss:
    """f at reinmax's hard sample."""
    reinmax = from_package("reinmax").reinmax
    return lambda logits, f: f(reinmax(logits, 1.0)[0]).sum()


ENTRIES = (
    Entry(
        "torch: Categorical.log_prob x f",
        "torch",
        "torch",
        UNBIASED,
        audited(torch_surrogate, PROBLEMS),
    ),
    Entry("torch: gumbel_softmax", "torch", "torch", RELAXED, audited(gumbel(False), PROBLEMS)),
    Entry(
        "torch: gumbel_softmax, hard", "torch", "torch", RELAXED, audited(gumbel(True), PROBLEMS)
    ),
    Entry(
        "reinmax: reinmax",
        "reinmax",
        "reinmax",
        "second-order accurate, not unbiased",
        audited(reinmax_loss, PROBLEMS),
    ),
)
