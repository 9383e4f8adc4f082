"""CARMS: several mutually antithetic samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.checks import check_given, check_samples
from arsm.distinct import share
from arsm.draws import EDGE, mean_weight, open_uniforms
from arsm.noise import dirichlet
from arsm.scores import less_mean, log_probability
from arsm.trees import ascending, first_stop, stick_position
from arsm.types import Estimator, Queries, at_most_all


class Stick(NamedTuple):
    """Data for `tell`."""

    position: Tensor
    """[n, *B, K]: where the samples stand in the order."""
    order: Tensor
    """[*B, K, C]."""
    log_stop: Tensor
    """ln pi [*B, K, C - 1]."""


@dataclass(frozen=True, eq=False)
class CARMS(Estimator):
    """Leave-one-out REINFORCE over n antithetic samples, with the ratio that makes
    every pair count as independent.

        g_k = 1/(n (n-1)) sum_{i<j} r_k(z_ik, z_jk) (f_i - f_j) (onehot(z_ik) - onehot(z_jk))
        r_k(a, b) = p_ka p_kb / P(z_ik = a, z_jk = b)

    The samples of variable k break the stick of its categories, the least likely first:
    sample i takes category c, if it has come so far, iff (1 - d_ci)^(n-1) < pi_c = p_c
    / sum_{m >= c} p_m, with d_c ~ Dir(1_n). These n uniforms have the pairwise copula
    Phi(s) = P(both < s) = max(0, 2 s^{1/(n-1)} - 1)^(n-1). For the earlier of a and b,
    c:

        r(a, b) = pi_c (1 - pi_c) / (pi_c - Phi(pi_c))
                  * prod_{m < c} (1 - pi_m)^2 / (1 - 2 pi_m + Phi(pi_m))

    The order makes pi_m <= 1/2, hence every pair of categories possible and every ratio
    finite. At n = 2 and C = 2 this is DisARM. Reference: Dimitriev and Zhou, CARMS,
    NeurIPS 2021; for C = 2: ARMS, ICML 2021.

    Attributes:
        samples: n, the number of antithetic samples.
        live: Number of samples that keep f's graph (None: all); f's parameters get
            their average gradient.
    """

    samples: int = 4
    live: int | None = None

    unbiased = True

    def __post_init__(self) -> None:
        check_samples("CARMS", self.samples, self.live)

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln d [*B, K, C - 1, n]. Given z, the first sample passes every node before
        z's and stops there.
        """
        nodes = logits.detach()[..., 1:, None]
        if z is None:
            return dirichlet(nodes.expand(*nodes.shape[:-1], self.samples), generator)
        check_given(logits, z)
        order, log_stop = _stick(logits)
        log_stop = log_stop.double()
        position = stick_position(order, z).unsqueeze(-1)
        node = torch.arange(log_stop.shape[-1], device=z.device)

        # ln of the first sample's uniforms: above pi before z's node, below pi there, free after it
        v = open_uniforms(log_stop.shape, logits.device, generator).clamp(EDGE, 1 - EDGE)
        passes = torch.log(v + (1 - v) * log_stop.exp())
        stops = v.log() + log_stop
        log_u = torch.where(node < position, passes, torch.where(node == position, stops, v.log()))

        # given its first element, the rest of Dir(1_n) is a smaller Dirichlet of what is left
        log_others = (log_u / (self.samples - 1)).unsqueeze(-1)  # ln(1 - d_0)
        rest = dirichlet(nodes.double().expand(*nodes.shape[:-1], self.samples - 1), generator)
        return torch.cat([(-log_others.exp()).log1p(), log_others + rest], -1)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        order, log_stop = _stick(logits)
        d = noise.double().exp()
        all_but_one = 1 - torch.eye(self.samples, dtype=d.dtype, device=d.device)
        others = (d @ all_but_one).movedim(-1, 0)  # 1 - d without cancellation, [n, *B, K, C - 1]
        stop = others.log() < log_stop / (self.samples - 1)
        position, points = first_stop(order, stop)
        weight = mean_weight(self.live or self.samples, points.device)
        return Queries(
            points, points.movedim(0, -2), share(points), weight, Stick(position, order, log_stop)
        )

    def most_queries(self, logits: Tensor) -> int:
        return at_most_all(self.samples, logits)

    def within(self, budget: int) -> CARMS:
        return replace(self, samples=max(2, budget))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        n = self.samples
        position, order, log_stop = queries.aux
        ratio = F.pad(pair_ratio(log_stop, n), (0, 1))
        position = position.movedim(0, -1)  # [*B, K, n]
        f = less_mean(values).to(torch.promote_types(values.dtype, ratio.dtype))
        f = f.movedim(0, -1).unsqueeze(-2)  # [*B, 1, n]

        # how many samples took each category, and the sum of their f
        zero = torch.zeros_like(ratio, dtype=f.dtype)
        count = zero.scatter_add(-1, position, torch.ones_like(f).expand(position.shape))
        total = zero.scatter_add(-1, position, f.expand(position.shape))
        # The ratio is the earlier category's: the pairs with all later and all earlier categories
        # are sums over them.
        gradient = (
            ratio * (total * _after(count) - count * _after(total))
            + total * _before(ratio * count)
            - count * _before(ratio * total)
        ) / (n * (n - 1))
        return zero.scatter(-1, order, gradient)


def _before(x: Tensor) -> Tensor:
    """sum_{m < c} x_m: [..., C]."""
    return F.pad(x.cumsum(-1), (1, 0))[..., :-1]


def _after(x: Tensor) -> Tensor:
    """sum_{m > c} x_m, exactly zero where those are zero: [..., C]."""
    return _before(x.flip(-1)).flip(-1)


def pair_ratio(log_stop: Tensor, samples: int) -> Tensor:
    """r of a pair whose earlier category is each but the last: ln pi [..., C - 1] ->
    [..., C - 1].
    """
    stop = log_stop.exp()
    # Phi(pi) / pi
    both_given_one = (2 - (-log_stop / (samples - 1)).exp()).clamp_min(0) ** (samples - 1)
    log_pass = 2 * torch.log1p(-stop) - torch.log1p(stop * (both_given_one - 2))
    return (1 - stop) / (1 - both_given_one) * _before(log_pass).exp()


def _stick(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The order of the categories [*B, K, C] and ln pi_c [*B, K, C - 1] in it."""
    order, log_p, mass = ascending(log_probability(logits))
    return order, (log_p - mass)[..., :-1]
