"""Surrogates whose gradient is unbiased, as people write them, for the audit to pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Categorical

import arsm
from arsm.referee import PROBLEMS
from arsm.referee.measure import SMALL_SHARE, Loss

REDUCED = [p for p in PROBLEMS if p.role == "f" or p.name in ("two categories", "a batch of 2")]
REDUCED_SAMPLES = 320 * SMALL_SHARE
"""Draws per row, 320 of them in the small batch, which decide something in every problem."""


def leave_one_out(values: Tensor) -> Tensor:
    """f less the mean of the others: [n, B] -> [n, B]."""
    n = len(values)
    return (values - values.mean(0)) * n / (n - 1)


def group(
    advantage: Callable[[Tensor], Tensor], samples: int = 4, temperature: float = 1.0
) -> Loss:
    """The usual surrogate with torch.distributions: advantages of n samples times their
    log-probability.
    """

    def loss(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        distribution = Categorical(logits=logits)
        z = Categorical(logits=logits / temperature).sample((samples,))
        with torch.no_grad():
            weight = advantage(f(z))
        return (weight * distribution.log_prob(z).sum(-1)).sum() / samples

    return loss


def by_estimator(words: str) -> Loss:
    return lambda logits, f: arsm.estimate(
        arsm.estimator(words), logits, f, max_rows=None
    ).value.sum()


CORRECT: dict[str, Loss] = {
    "score function": group(lambda f: f, 1),
    "score function, 3 samples": group(lambda f: f, 3),
    "score function, fixed baseline": group(lambda f: f - 0.4, 1),
    "leave-one-out, 2 samples": group(leave_one_out, 2),
    "leave-one-out, 4 samples": group(leave_one_out, 4),
    "leave-one-out, rows of the batch": group(
        lambda f: f - (f.sum(1) - f) / max(1, f.shape[1] - 1), 1
    ),
    "half of the samples as the baseline": group(
        lambda f: 2 * (f - f[:2].mean(0)) * torch.tensor([[0], [0], [1], [1]]), 4
    ),
} | {
    words: by_estimator(words)
    for words in (
        "exact",
        "reinforce",
        "ar",
        "ars",
        "arsm",
        "arsm:pooled=True",
        "rloo:samples=3",
        "rloo:samples=5,ridge=1.0",
        "local-expectation",
        "disarm",
        "carms:samples=3",
        "muprop",
        "rebar",
    )
}
