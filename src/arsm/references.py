"""Swaps with chosen references, shared by ARS and ARSM with random references; and pooling."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm import kernels
from arsm.distinct import share
from arsm.swap import Race, run_race, swap_with
from arsm.types import Queries


class ReferenceNoise(NamedTuple):
    """The noise of estimators that draw their references."""

    log_pi: Tensor
    """[*B, K, C]."""
    references: Tensor
    """int64: [*B, K], one per variable (ARS), or [*B, J], each common to all variables (ARSM)."""


class Swapped(NamedTuple):
    """Data for `tell_references`."""

    weight: Tensor
    """[*B, J, K]: 1 - C pi_kj."""
    pseudo: Tensor
    """[*B, J, K, C]: z_k^{c<->j}, in any integer dtype."""
    cells: Tensor | None
    """[1 + J C, *B]: each query's share of a distinct pair, for pooling: z is asked
    once more for every reference, a pair of two references twice. None for one
    variable, which needs no pooling."""


@kernels.one_kernel("gpu_queries", lambda z, can_win: 1)  # rows of any length
def by_category(z: Tensor, can_win: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of one variable: z, then every category; those that cannot win take the value of z.

    z [*B, 1], can_win [*B, 1, C] -> points [1 + C, *B, 1], same_as [1 + C, *B].
    """
    z = z.unsqueeze(0)
    number = torch.arange(1 + can_win.shape[-1], device=z.device).view(-1, *(1,) * (z.ndim - 1))
    category = number - 1
    # where and pad, unlike cat, are compiled without memory of their own
    speaks = F.pad(can_win, (1, 0), value=True).movedim(-1, 0) & (category != z)
    points = torch.where(number > 0, category, z)
    same_as = (number * speaks).squeeze(-1)  # those that do not speak share with query 0, z
    return points, same_as


def values_by_category(values: Tensor) -> Tensor:
    """f at every category, [1 + C, *B] -> [*B, 1, C]."""
    return values[1:].movedim(0, -1).unsqueeze(-2)


def pool(points: Tensor, values: Tensor, weight: Tensor, categories: int) -> Tensor:
    """The weighted mean of the evaluations in which variable k took value c, 0 where it never did.

    points [M, *B, K], values and weight [M, *B] -> [*B, K, C].
    """
    index = points.movedim(0, -1)
    zero = values.new_zeros(*index.shape[:-1], categories)

    def by_value(x: Tensor) -> Tensor:
        # a query counts for the value that it gave to variable k, whatever the others were
        return zero.scatter_add(-1, index, x.movedim(0, -1).unsqueeze(-2).expand(index.shape))

    total = by_value(values * weight)
    count = by_value(weight)
    return total / torch.where(count > 0, count, 1)


def ask_references(logits: Tensor, log_pi: Tensor, references: Tensor) -> Queries:
    """z, then the pseudo vector of every reference and category; references [*B, J, 1 or K]."""
    variables, categories = logits.shape[-2:]
    references = references.expand(*references.shape[:-1], variables)
    z, pseudo, weight = swap_references(logits, log_pi, references)
    one = torch.ones(1, device=z.device)
    if variables == 1:
        # f is asked by category, since several swaps may have the same winner
        points, same_as = by_category(z, _winners(pseudo))
        return Queries(points, z, same_as, one, Swapped(weight, pseudo, None))
    vectors = pseudo.movedim((-3, -1), (0, 1)).flatten(0, 1)  # [J C, *B, K]
    points = torch.cat([z.unsqueeze(0), vectors.long()])
    swapped = Swapped(weight, pseudo, _cells(references, categories))
    return Queries(points, z, share(points), one, swapped)


@kernels.one_kernel("gpu_few", lambda logits, log_pi, references: logits.shape[-1])
def swap_references(
    logits: Tensor, log_pi: Tensor, references: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """z [*B, K], the swaps z_k^{c<->j} [*B, J, K, C], and the weights 1 - C pi_kj [*B,
    J, K]; references [*B, J, K].
    """
    categories = logits.shape[-1]
    # one race per variable, which serves all of its references
    race = run_race(logits, log_pi)
    each = Race(*(x.unsqueeze(-2).expand(*x.shape[:-1], *references.shape[-2:]) for x in race))
    pseudo = swap_with(each, references).movedim(0, -1)
    # in float64: the weights are differences, 1 - C pi
    log_pi_j = log_pi.detach().double().gather(-1, references.movedim(-2, -1))
    pi = log_pi_j.exp().movedim(-1, -2)
    return race.z, pseudo, 1 - categories * pi


def _winners(pseudo: Tensor) -> Tensor:
    """Whether each category wins some swap of one variable: [*B, J, 1, C] -> [*B, 1, C]."""
    winners = pseudo.movedim(-3, -2).flatten(-2).long()  # [*B, 1, J C]
    shape = (*winners.shape[:-1], pseudo.shape[-1])
    none = torch.zeros(shape, dtype=torch.bool, device=pseudo.device)
    return none.scatter(-1, winners, True)


def _cells(references: Tensor, categories: int) -> Tensor:
    """[1 + J C, *B] from references [*B, J, K] that are common to all variables."""
    j = references[..., :1]
    c = torch.arange(categories, device=j.device)
    also_reference = (j == c).any(-2, keepdim=True)
    # c = j is z again; a pair of two references is asked twice, and each counts for half
    cells = torch.where(j == c, 0.0, torch.where(also_reference, 0.5, 1.0))
    cells = cells.movedim((-2, -1), (0, 1)).flatten(0, 1)
    return torch.cat([torch.ones_like(cells[:1]), cells])


def tell_references(logits: Tensor, queries: Queries, values: Tensor, *, pooled: bool) -> Tensor:
    """mean_j [F_cj - mean_m F_mj] (1 - C pi_kj): values [M, *B] -> [*B, K, C]."""
    weight, pseudo, cells = queries.aux
    dtype = torch.promote_types(values.dtype, logits.dtype)
    if cells is None or not pooled:
        return compare_swaps(values, pseudo, weight, dtype)
    q = pool(queries.points, values - values[0], cells.to(values.dtype), logits.shape[-1])
    return _compare(_at_swaps(q, pseudo), weight, dtype)


@kernels.one_kernel("gpu_tell", lambda values, pseudo, weight, dtype: pseudo.shape[-1])
def compare_swaps(values: Tensor, pseudo: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`tell_references` without pooling, in a dtype."""
    count, variables, categories = pseudo.shape[-3:]
    if variables == 1:
        return _compare(_at_swaps(values_by_category(values), pseudo), weight, dtype)
    f = values[1:].unflatten(0, (count, categories)).movedim((0, 1), (-2, -1)).unsqueeze(-2)
    return _compare(f, weight, dtype)


def _at_swaps(q: Tensor, pseudo: Tensor) -> Tensor:
    """Values at the swaps from those at every category: [*B, K, C] -> [*B, J, K, C]."""
    return q.unsqueeze(-3).expand(pseudo.shape).gather(-1, pseudo.long())


def _compare(f: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """mean_j [F_cj - mean_m F_mj] w_kj: F [*B, J, 1 or K, C], w [*B, J, K] -> [*B, K, C]."""
    f = f - f[..., :1]  # equal values give exactly zero
    f = f - f.mean(-1, keepdim=True)
    return (f * weight.unsqueeze(-1)).mean(-3).to(dtype)
