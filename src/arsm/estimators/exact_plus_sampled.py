"""The likeliest categories exactly, the others by sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.checks import check_one_variable, check_whole
from arsm.distinct import share
from arsm.noise import fixed_point, race_noise, repeat_draws
from arsm.scores import probabilities_for, weighted_scores
from arsm.types import Estimator, Queries, at_most_all


@dataclass(frozen=True, eq=False)
class ExactPlusSampled(Estimator):
    """Sum the k likeliest categories H of one variable exactly, and sample m from the tail.

        E[f] ~ sum_{c in H} p_c f(c) + q/m sum_i f(v_i),    v_i ~ p / q outside H,
        q = 1 - sum_{c in H} p_c
        g    = 1/m sum_i [sum_{c in H} p_c (f(c) - b_i) x_c + q (f(v_i) - b_i) x_{v_i}],
        x_c = onehot(c) - p
        b_i  = sum_{c in H} p_c f(c) + q mean_{j != i} f(v_j),
        or the mean of f over H where m = 1

    Reference: Liu, Regier, Tripuraneni, Jordan and McAuliffe, Rao-Blackwellized
    stochastic gradients for discrete distributions, ICML 2019.

    Attributes:
        exact: k, from 1 to C - 1.
        samples: m.
    """

    exact: int = 1
    samples: int = 2

    unbiased = True

    def __post_init__(self) -> None:
        check_whole("exact", self.exact)
        check_whole("samples", self.samples)
        if self.exact < 1 or self.samples < 1:
            raise ValueError(
                "ExactPlusSampled needs at least one category of each kind, but exact = "
                f"{self.exact} and samples = {self.samples}; use RLOO to sample them all."
            )

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, m, 1, C]."""
        return race_noise(logits, generator, z, self.samples)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        check_one_variable(self, logits)
        if self.exact >= logits.shape[-1]:
            raise ValueError(
                f"exact = {self.exact} leaves none of the {logits.shape[-1]} categories to sample; "
                "use Exact."
            )
        p = logits.detach().double().softmax(-1).squeeze(-2)  # [*B, C]
        head_p, head = p.topk(self.exact)
        # a race without the head is won by a sample of the tail
        phi, a = fixed_point(repeat_draws(logits, self.samples), noise)
        taken = head[..., None, None, :].expand(*a.shape[:-1], self.exact)
        race = a - phi
        tail = race.scatter(-1, taken, torch.inf).argmin(-1)  # [*B, m, 1]
        # the true sample is in the head or is v_1: asking for it first costs nothing
        z = race[..., 0, :, :].argmin(-1)
        points = torch.cat([z.unsqueeze(0), head.movedim(-1, 0).unsqueeze(-1), tail.movedim(-2, 0)])
        tail_p = p.scatter(-1, head, 0).sum(-1, keepdim=True) / self.samples
        tail_p = tail_p.expand(*tail_p.shape[:-1], self.samples)
        weight = torch.cat([torch.zeros_like(head_p[..., :1]), head_p, tail_p], -1).movedim(-1, 0)
        # A tail without mass may hold masked categories alone: f is not asked there.
        same_as = torch.where(weight > 0, share(points), 0)
        return Queries(points, z, same_as, weight)

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.exact + self.samples, logits)

    def within(self, budget: int) -> ExactPlusSampled:
        return replace(self, samples=max(2, budget - self.exact))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        k = self.exact
        m = self.samples
        f = (values - values[0])[1:]  # the first query is the true sample, which is among the rest
        weight = queries.weight[1:]
        head = (weight[:k] * f[:k]).sum(0)
        tail = f[k:]
        if m == 1:  # no other sample of the tail
            baseline = (head / weight[:k].sum(0)).unsqueeze(0)
        else:
            baseline = head + m * weight[k] * (tail.sum(0) - tail) / (m - 1)  # [m, *B]
        advantage = torch.cat([f[:k] - baseline.mean(0), tail - baseline])
        p = probabilities_for(f, logits)
        return weighted_scores(p, queries.points[1:], (weight * advantage).to(p.dtype))
