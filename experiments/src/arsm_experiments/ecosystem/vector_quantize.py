"""vector-quantize-pytorch's Gumbel sampling with straight-through gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from arsm.referee.measure import Loss
from arsm_experiments.ecosystem.entry import RELAXED, Entry, audited, from_package


def gumbel(**options: Any) -> Callable[[], Loss]:
    """f at the one-hot sample of its `gumbel_sample`, whose gradient is a relaxation's."""

    def build() -> Loss:
        sample = from_package("vector_quantize_pytorch.vector_quantize_pytorch").gumbel_sample

        def loss(logits: Tensor, f: Any) -> Tensor:
            _, one_hot = sample(logits, temperature=1.0, stochastic=True, training=True, **options)
            return f(one_hot).sum()

        return loss

    return build


NAME = "vector-quantize-pytorch"
ENTRIES = (
    Entry(
        f"{NAME}: gumbel_sample, straight_through",
        NAME,
        "vector_quantize_pytorch",
        RELAXED,
        audited(gumbel(straight_through=True)),
    ),
)
