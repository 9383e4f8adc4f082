"""The average of independent draws of any estimator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from arsm.capabilities import check_estimator
from arsm.checks import check_whole
from arsm.draws import draw_one
from arsm.noise import repeat_draws
from arsm.types import Estimator, Noise, Queries

FORWARDED = (
    "unbiased",
    "needs_gradient",
    "target",
    "couples_rows",
    "given_sample",
    "vmappable",
    "deterministic",
    "subset",
)


@dataclass(frozen=True, eq=False)
class Average(Estimator):
    """n independent draws of an estimator, averaged: 1/n of its variance at n times its
    evaluations.

    Running statistics are those of single draws, so that `adapt` does nothing here:
    adapt the estimator from an estimate of its own.

    Attributes:
        estimator: The estimator to average.
        n: Number of draws.
        learned: The learned parts, for the optimiser, `.to(device)` and checkpoints;
            empty for most estimators.
    """

    estimator: Estimator
    n: int
    learned: nn.ModuleList = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        check_whole("n", self.n)
        if self.n < 1:
            raise ValueError(f"Average needs at least one draw, but n = {self.n}.")
        # on the object, since a frozen dataclass refuses assignments
        for name in (*FORWARDED, "learned"):
            object.__setattr__(self, name, getattr(self.estimator, name))

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Noise:
        """The estimator's own, for logits [*B, n, K, C]. Given z, the first draw's true
        sample is z.
        """
        each = repeat_draws(logits, self.n)
        if z is not None:
            # the estimator wants a sample for every draw: z for the first, fresh ones for the rest
            rest = draw_one(each[..., 1:, :, :], generator)
            z = torch.cat([z.unsqueeze(-2), rest], -2)
        return self.estimator.noise(each, generator, z)

    def ask(self, logits: Tensor, noise: Any) -> Queries:
        """Query m of draw i becomes query m n + i, which keeps the live ones in front."""
        inner = self.estimator.ask(repeat_draws(logits, self.n), noise)
        draws = logits.ndim - 1  # the draws' dimension of tensors that lead with M

        def interleave(x: Tensor) -> Tensor:
            return x.movedim(draws, 1).flatten(0, 1)

        draw = torch.arange(self.n, device=logits.device)
        weight = inner.weight.double() / self.n
        # a weight that is common to all rows has no dimension of draws
        weight = weight.repeat_interleave(self.n) if weight.ndim == 1 else interleave(weight)
        return Queries(
            points=interleave(inner.points),
            z=inner.z,
            same_as=interleave(inner.same_as * self.n + draw),
            weight=weight,
            aux=inner,
        )

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor | None:
        values = values.unflatten(0, (-1, self.n)).movedim(1, -1)
        gradient = self.estimator.tell(repeat_draws(logits, self.n), queries.aux, values)
        return None if gradient is None else gradient.mean(-3)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        by_draw = live.unflatten(0, (-1, self.n)).movedim(1, -1)  # [L, *B, n]
        return self.estimator.value(queries.aux, by_draw).mean(-1)

    def most_queries(self, logits: Tensor) -> int:
        """Draws do not share their evaluations."""
        return self.n * self.estimator.most_queries(logits)
