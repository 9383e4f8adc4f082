"""DisARM: antithetic pairs, for categories as trees of binary choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.evaluate import share
from arsm.noise import dirichlet, working_dtype
from arsm.types import Queries

Coupling = Literal["tree", "stick-breaking"]


class Choices(NamedTuple):
    """The two walks down the trees, for `tell`."""

    left: Tensor
    """[2, *B, K, N] bool: the choice at every node."""
    reached: Tensor
    """[2, *B, K, N] bool: whether the walk came by."""


@dataclass(frozen=True)
class DisARM:
    """Two antithetic samples, each a walk down a tree of C - 1 binary choices.

    Node i goes left with probability sigma(alpha_i), where alpha_i is the log odds of its left against its right
    categories; logistic noise l_i decides for the first walk (left iff l_i < alpha_i), -l_i for the second. With
    b_i = 1[left], and ~ for the second walk,

        dE[f]/dalpha_i ~ 1/2 (f(z) - f(z~)) * { (b_i - b~_i) sigma(|alpha_i|)   where both walks come by node i
                                              {  b_i - sigma(alpha_i)           where only the first does
                                              {  sigma(alpha_i) - b~_i          where only the second does
        g_c = sum_i dE[f]/dalpha_i dalpha_i/dphi_c

    At C = 2 there is one node, and this is DisARM. References: Dong, Mnih and Tucker, DisARM, NeurIPS 2020; Yin, Ho,
    Yan, Qian and Zhou, Probabilistic best subset selection (U2G), 2020; Dong, Mnih and Tucker, Coupled gradient
    estimators for discrete latent variables, NeurIPS 2021.
    """

    coupling: Coupling = "tree"
    """"tree": halve the categories in their order at every node. "stick-breaking": take or leave one category after
    the other, the least likely first."""

    unbiased = True
    needs_gradient = False

    def __post_init__(self) -> None:
        if self.coupling not in SHAPES:
            raise ValueError(f'coupling must be "tree" or "stick-breaking", but is {self.coupling!r}.')

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """l [*B, K, N], logistic; N nodes a variable."""
        nodes = SHAPES[self.coupling].nodes(logits.shape[-1])
        pair = dirichlet(logits.detach()[..., :1, None].expand(*logits.shape[:-1], nodes, 2), generator)
        return pair[..., 0] - pair[..., 1]

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        shape = SHAPES[self.coupling]
        alpha = shape.log_odds(log_probability(logits))
        left = torch.stack([noise < alpha, -noise < alpha])
        points, reached = shape.walk(log_probability(logits), left)
        weight = torch.full((2,), 0.5, dtype=torch.float64, device=logits.device)
        return Queries(points, points.movedim(0, -2), share(points), weight, Choices(left, reached))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        left, reached = queries.aux
        shape = SHAPES[self.coupling]
        log_p = log_probability(logits).to(torch.promote_types(values.dtype, working_dtype(logits.dtype)))
        alpha = shape.log_odds(log_p)
        b = left.to(alpha.dtype)
        both = (b[0] - b[1]) * alpha.abs().sigmoid()
        first, second = b[0] - alpha.sigmoid(), alpha.sigmoid() - b[1]
        by_node = torch.where(reached.all(0), both, torch.where(reached[0], first, second))
        by_node = torch.where(reached.any(0), by_node, 0)
        return shape.pull_back(log_p, (values[0] - values[1])[..., None, None] / 2 * by_node)


def log_probability(logits: Tensor) -> Tensor:
    """ln p = ln softmax(phi), detached: [..., C]."""
    return logits.detach().to(working_dtype(logits.dtype)).log_softmax(-1)


class Shape(NamedTuple):
    """A family of trees over C categories; ln p [*B, K, C]."""

    nodes: Callable[[int], int]
    """C -> N."""
    log_odds: Callable[[Tensor], Tensor]
    """ln p -> alpha [*B, K, N]."""
    walk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """ln p, left [2, *B, K, N] -> z [2, *B, K], reached [2, *B, K, N]."""
    pull_back: Callable[[Tensor, Tensor], Tensor]
    """ln p, gradient by alpha [*B, K, N] -> gradient by phi [*B, K, C]."""


# ---------------------------------------------------------------- stick-breaking


def ascending(log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the least to the most likely category: the order, ln p in it, and the ln of the mass from each one on."""
    log_p, order = log_p.sort(dim=-1, stable=True)
    return order, log_p, log_p.flip(-1).logcumsumexp(-1).flip(-1)


def _stick_log_odds(log_p: Tensor) -> Tensor:
    _, log_p, mass = ascending(log_p)
    return log_p[..., :-1] - mass[..., 1:]


def first_stop(order: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The first node that stops, else the last category: [..., C], [..., C - 1] -> position and z [...]."""
    position = F.pad(stop.to(torch.uint8), (0, 1), value=1).argmax(-1)
    return position, order.expand(*position.shape, -1).gather(-1, position.unsqueeze(-1)).squeeze(-1)


def _stick_walk(log_p: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    position, z = first_stop(ascending(log_p)[0], left)
    return z, torch.arange(left.shape[-1], device=z.device) <= position.unsqueeze(-1)


def _stick_pull_back(log_p: Tensor, gradient: Tensor) -> Tensor:
    """dalpha_i/dphi_c = 1[c = i] - 1[c > i] p_c / sum_{m > i} p_m; in ascending order no such sum is below 1/C."""
    order, log_p, mass = ascending(log_p)
    passed = F.pad((gradient / mass[..., 1:].exp()).cumsum(-1), (1, 0))
    sorted_gradient = F.pad(gradient, (0, 1)) - log_p.exp() * passed
    return torch.empty_like(sorted_gradient).scatter(-1, order, sorted_gradient)


# ---------------------------------------------------------------- balanced tree


def _depth(categories: int) -> int:
    return (categories - 1).bit_length()


def _levels(log_p: Tensor) -> list[Tensor]:
    """The ln mass below every node, from the root [..., 1] to the leaves [..., 2^depth]; absent leaves have none."""
    depth = _depth(log_p.shape[-1])
    levels = [F.pad(log_p, (0, 2**depth - log_p.shape[-1]), value=-torch.inf)]
    for _ in range(depth):
        levels.append(levels[-1].unflatten(-1, (-1, 2)).logsumexp(-1))
    return levels[::-1]


def _tree_log_odds(log_p: Tensor) -> Tensor:
    odds = [level[..., 0::2] - level[..., 1::2] for level in _levels(log_p)[1:]]
    return torch.cat([log_p[..., :0], *odds], -1).nan_to_num(0.0, torch.inf, -torch.inf)


def _tree_walk(log_p: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    here = torch.ones_like(log_p[..., :1], dtype=torch.bool).expand(*left.shape[:-1], 1)
    reached = []
    for turn in left.split([2**level for level in range(_depth(log_p.shape[-1]))], -1):
        reached.append(here)
        here = torch.stack([here & turn, here & ~turn], -1).flatten(-2)
    return here.to(torch.uint8).argmax(-1), torch.cat([left[..., :0], *reached], -1)


def _tree_pull_back(log_p: Tensor, gradient: Tensor) -> Tensor:
    """dalpha_i/dphi_c = p_c / p_left for c on the left, -p_c / p_right for c on the right."""
    leaves = torch.arange(log_p.shape[-1], device=log_p.device)
    depth = _depth(log_p.shape[-1])
    total = torch.zeros_like(log_p, dtype=gradient.dtype)
    by_level = gradient.split([2**level for level in range(depth)], -1)
    for level, (mass, node_gradient) in enumerate(zip(_levels(log_p)[1:], by_level, strict=True)):
        child = leaves >> (depth - level - 1)
        share_of_child = (log_p - mass[..., child]).exp().nan_to_num(0.0)
        total = total + (1 - 2 * (child & 1)) * share_of_child * node_gradient[..., child >> 1]
    return total


SHAPES = {
    "tree": Shape(lambda C: 2 ** _depth(C) - 1, _tree_log_odds, _tree_walk, _tree_pull_back),
    "stick-breaking": Shape(lambda C: C - 1, _stick_log_odds, _stick_walk, _stick_pull_back),
}
