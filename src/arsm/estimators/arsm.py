"""ARSM: augment-REINFORCE-swap-merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from arsm import kernels
from arsm.checks import check_whole
from arsm.noise import race_noise
from arsm.references import (
    ReferenceNoise,
    ask_references,
    by_category,
    pool,
    tell_references,
    values_by_category,
)
from arsm.types import Estimator, Queries, at_most_all
from arsm.univariate import Swaps, merge, swap_all


class Merged(NamedTuple):
    """Data for `tell`."""

    log_pi: Tensor
    """[*B, K, C]."""
    swaps: Swaps | None
    """Each variable's swaps, where the univariate formula is applied to them."""


@dataclass(frozen=True, eq=False)
class ARSM(Estimator):
    """Average ARS over all references.

        g_kc = sum_j [f(z^{c<->j}) - mean_m f(z^{m<->j})] (1/C - pi_kj)

    where z^{c<->j} swaps c and j in every row k at once: C(C-1)/2 + 1 evaluations at
    most, whatever K is. For one variable f is asked only at the categories that can
    win, and all pairs are summed in expected O(C) (`arsm.univariate`). At C = 2 this is
    ARM. Reference: Yin, Yue and Zhou, ARSM, ICML 2019, theorem 2 and its multivariate
    form.

    Attributes:
        references: Average J random references instead of all C: J C + 1 evaluations at
            most; J = C is ARSM.
        pooled: Replace f(z^{c<->j}), for variable k, by the mean of all evaluations in
            which variable k took the same value. The other variables' values in them
            are samples that do not depend on row k's noise, so the mean has the same
            expectation given that noise: the same evaluations, a fraction of the
            variance.
    """

    references: int | None = None
    pooled: bool = False

    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor | ReferenceNoise:
        """ln pi [*B, K, C], with J distinct references where they are drawn."""
        log_pi = race_noise(logits, generator, z)
        if self.references is None:
            return log_pi
        check_whole("references", self.references)
        if not 1 <= self.references <= logits.shape[-1]:
            raise ValueError(
                f"references must lie between 1 and the {logits.shape[-1]} categories, but is "
                f"{self.references}."
            )
        # the J largest of C uniform numbers are J categories drawn without replacement
        order = torch.rand(
            *logits.shape[:-2], logits.shape[-1], generator=generator, device=logits.device
        )
        return ReferenceNoise(log_pi, order.topk(self.references).indices)

    def ask(self, logits: Tensor, noise: Tensor | ReferenceNoise) -> Queries:
        if isinstance(noise, ReferenceNoise):
            return ask_references(logits, noise.log_pi, noise.references.unsqueeze(-1))
        one = torch.ones(1, device=logits.device)
        # one variable has C values, however many of its pairs share one
        if logits.shape[-2] == 1:
            swaps = swap_all(logits, noise)
            points, same_as = by_category(swaps.z, swaps.can_win)
            return Queries(points, swaps.z, same_as, one, Merged(noise, swaps))
        points, same_as = kernels.pairs(logits.detach(), noise)
        swaps = swap_all(logits, noise) if self.pooled else None
        z = points[0].clone()  # a view would keep all points alive as long as the estimate
        return Queries(points, z, same_as, one, Merged(noise, swaps))

    def most_queries(self, logits: Tensor) -> int:
        variables, categories = logits.shape[-2:]
        if self.references is not None:
            return at_most_all(1 + self.references * categories, logits)
        if variables == 1:
            return at_most_all(categories, logits)
        return at_most_all(1 + categories * (categories - 1) // 2, logits)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        if not isinstance(queries.aux, Merged):
            return tell_references(logits, queries, values, pooled=self.pooled)
        log_pi, swaps = queries.aux
        if swaps is None:
            return kernels.merge_pairs(values, log_pi)
        if logits.shape[-2] == 1:
            return merge(swaps, values_by_category(values))
        # pooled, f of a variable depends on its own value alone: one variable after all
        each = torch.ones_like(values)
        f = pool(queries.points, values - values[0], each, logits.shape[-1])
        return merge(swaps, f)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        """f at z, whose weight is 1."""
        return live.squeeze(0)  # without the multiplication
