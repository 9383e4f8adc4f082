"""Categories as the leaves of binary trees, for couplings of binary choices: balanced
trees and stick-breaking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Shape(NamedTuple):
    """A family of trees over C categories; ln p [*B, K, C]."""

    nodes: Callable[[int], int]
    """C -> N."""
    log_odds: Callable[[Tensor], Tensor]
    """ln p -> alpha [*B, K, N]."""
    walk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """ln p, left [2, *B, K, N] -> z [2, *B, K], reached [2, *B, K, N]."""
    path: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """ln p, z [*B, K] -> left and reached [*B, K, N] of the walk that ends at z; left
    means nothing elsewhere.
    """
    pull_back: Callable[[Tensor, Tensor], Tensor]
    """ln p, gradient by alpha [*B, K, N] -> gradient by phi [*B, K, C]."""


# ---------------------------------------------------------------- stick-breaking


def ascending(log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Categories from least to most likely: the order, ln p in that order, and ln of
    the mass from each one on.
    """
    log_p, order = log_p.sort(dim=-1, stable=True)
    # the sums include the largest, so they do not underflow
    return order, log_p, log_p.exp().flip(-1).cumsum(-1).flip(-1).log()


def _stick_log_odds(log_p: Tensor) -> Tensor:
    _, log_p, mass = ascending(log_p)
    return log_p[..., :-1] - mass[..., 1:]


def first_stop(order: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The first node that stops, else the last category: [..., C], [..., C - 1] ->
    position and z [...].
    """
    # the last category has no node: whoever comes so far stops there
    position = F.pad(stop.to(torch.uint8), (0, 1), value=1).argmax(-1)
    z = order.expand(*position.shape, -1).gather(-1, position.unsqueeze(-1)).squeeze(-1)
    return position, z


def _stick_walk(log_p: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    position, z = first_stop(ascending(log_p)[0], left)
    return z, torch.arange(left.shape[-1], device=z.device) <= position.unsqueeze(-1)


def stick_position(order: Tensor, z: Tensor) -> Tensor:
    """The position of z [*B, K] in the order [*B, K, C]: [*B, K]."""
    return (order == z.unsqueeze(-1)).to(torch.uint8).argmax(-1)


def _stick_path(log_p: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    position = stick_position(ascending(log_p)[0], z).unsqueeze(-1)
    node = torch.arange(log_p.shape[-1] - 1, device=z.device)
    return node == position, node <= position


def _stick_pull_back(log_p: Tensor, gradient: Tensor) -> Tensor:
    """dalpha_i/dphi_c = 1[c = i] - 1[c > i] p_c / sum_{m > i} p_m; in ascending order
    no such sum is below 1/C.
    """
    order, log_p, mass = ascending(log_p)
    passed = F.pad((gradient / mass[..., 1:].exp()).cumsum(-1), (1, 0))
    sorted_gradient = F.pad(gradient, (0, 1)) - log_p.exp() * passed
    return torch.empty_like(sorted_gradient).scatter(-1, order, sorted_gradient)


# ---------------------------------------------------------------- balanced tree


def _depth(categories: int) -> int:
    return (categories - 1).bit_length()


def _levels(log_p: Tensor) -> list[Tensor]:
    """The ln mass below every node, from the root [..., 1] to the leaves [...,
    2^depth]; absent leaves have none.
    """
    depth = _depth(log_p.shape[-1])
    level = F.pad(log_p, (0, 2**depth - log_p.shape[-1]), value=-torch.inf)
    levels = [level]
    for _ in range(depth):
        level = torch.logaddexp(level[..., 0::2], level[..., 1::2])
        levels.append(level)
    return levels[::-1]


def _tree_log_odds(log_p: Tensor) -> Tensor:
    odds = [level[..., 0::2] - level[..., 1::2] for level in _levels(log_p)[1:]]
    # a node without mass on either side is never reached: any odds will do
    return torch.cat([log_p[..., :0], *odds], -1).nan_to_num(0.0, torch.inf, -torch.inf)


def _tree_walk(log_p: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    # all walks begin at the root; each level has twice the nodes of the one above
    here = torch.ones_like(log_p[..., :1], dtype=torch.bool).expand(*left.shape[:-1], 1)
    reached = []
    for turn in left.split([2**level for level in range(_depth(log_p.shape[-1]))], -1):
        reached.append(here)
        here = torch.stack([here & turn, here & ~turn], -1).flatten(-2)
    return here.to(torch.uint8).argmax(-1), torch.cat([left[..., :0], *reached], -1)


def _tree_path(log_p: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    depth = _depth(log_p.shape[-1])
    left = [torch.zeros_like(log_p[..., :0], dtype=torch.bool)]
    reached = [log_p[..., :0].bool()]
    # the bits of z, from the highest on, are the turns of the walk that ends there
    for level in range(depth):
        node = torch.arange(2**level, device=z.device)
        reached.append(node == (z >> (depth - level)).unsqueeze(-1))
        turn = (z >> (depth - level - 1)) & 1 == 0
        left.append(turn.unsqueeze(-1).expand(*z.shape, 2**level))
    return torch.cat(left, -1), torch.cat(reached, -1)


def _tree_pull_back(log_p: Tensor, gradient: Tensor) -> Tensor:
    """dalpha_i/dphi_c = p_c / p_left for c on the left, -p_c / p_right for c on the right."""
    leaves = torch.arange(log_p.shape[-1], device=log_p.device)
    depth = _depth(log_p.shape[-1])
    total = torch.zeros_like(log_p, dtype=gradient.dtype)
    by_level = gradient.split([2**level for level in range(depth)], -1)
    for level, (mass, node_gradient) in enumerate(zip(_levels(log_p)[1:], by_level, strict=True)):
        # every leaf belongs to one child of one node of the level
        child = leaves >> (depth - level - 1)
        sign = 1 - 2 * (child & 1)
        share_of_child = (log_p - mass[..., child]).exp().nan_to_num(0.0)
        total = total + sign * share_of_child * node_gradient[..., child >> 1]
    return total


SHAPES = {
    "tree": Shape(
        lambda C: 2 ** _depth(C) - 1, _tree_log_odds, _tree_walk, _tree_path, _tree_pull_back
    ),
    "stick-breaking": Shape(
        lambda C: C - 1, _stick_log_odds, _stick_walk, _stick_path, _stick_pull_back
    ),
}
