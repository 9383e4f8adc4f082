"""The average of independent draws of any estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.driver import check_estimator, check_whole
from arsm.evaluate import value_of
from arsm.noise import repeat_draws
from arsm.types import Estimator, Noise, Queries


@dataclass(frozen=True)
class Average:
    """n independent draws of an estimator, averaged: 1/n of its variance at n times its evaluations."""

    estimator: Estimator
    n: int

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        check_whole("n", self.n)
        if self.n < 1:
            raise ValueError(f"Average needs at least one draw, but n = {self.n}.")

    @property
    def unbiased(self) -> bool:
        return self.estimator.unbiased

    @property
    def needs_gradient(self) -> bool:
        return self.estimator.needs_gradient

    @property
    def learns(self) -> bool:
        return getattr(self.estimator, "learns", False)

    @property
    def couples_rows(self) -> bool:
        return getattr(self.estimator, "couples_rows", False)

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Noise:
        """The estimator's own, for logits [*B, n, K, C]."""
        return self.estimator.noise(repeat_draws(logits, self.n), generator)

    def ask(self, logits: Tensor, noise: Any) -> Queries:
        """Query m of draw i becomes query m n + i, so that the live ones stay in front."""
        inner = self.estimator.ask(repeat_draws(logits, self.n), noise)
        draws = logits.ndim - 1  # the draws' dimension of what leads with M

        def interleave(x: Tensor) -> Tensor:
            return x.movedim(draws, 1).flatten(0, 1)

        draw = torch.arange(self.n, device=logits.device)
        weight = inner.weight.double() / self.n
        return Queries(
            points=interleave(inner.points),
            z=inner.z,
            same_as=interleave(inner.same_as * self.n + draw),
            weight=weight.repeat_interleave(self.n) if weight.ndim == 1 else interleave(weight),
            aux=inner,
        )

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor | None:
        values = values.unflatten(0, (-1, self.n)).movedim(1, -1)
        gradient = self.estimator.tell(repeat_draws(logits, self.n), queries.aux, values)
        return None if gradient is None else gradient.mean(-3)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        return value_of(self.estimator, queries.aux, live.unflatten(0, (-1, self.n)).movedim(1, -1)).mean(-1)


def bounds(estimator: Estimator) -> bool:
    """Whether its value is not linear in f."""
    return bounds(estimator.estimator) if isinstance(estimator, Average) else hasattr(estimator, "value")
