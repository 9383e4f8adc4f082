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
    """[1 + J C, *B]: each query's share of a distinct pair, for pooling: z is asked once more for every reference, a
    pair of two references twice. None for one variable, which needs no pooling."""


def by_category(z: Tensor, can_win: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of one variable: z, then every category; those that cannot win take the value of z.

    z [*B, 1], can_win [*B, 1, C] -> points [1 + C, *B, 1], same_as [1 + C, *B].
    """
    if kernels.eager_on_gpu(z):
        return kernels.by_category(z, can_win)
    z = z.unsqueeze(0)
    number = torch.arange(1 + can_win.shape[-1], device=z.device).view(-1, *(1,) * (z.ndim - 1))
    category = number - 1
    # where and pad, unlike cat, are compiled without memory of their own
    speaks = F.pad(can_win, (1, 0), value=True).movedim(-1, 0) & (category != z)
    return torch.where(number > 0, category, z), (number * speaks).squeeze(-1)


def values_by_category(values: Tensor) -> Tensor:
    """f at every category, [1 + C, *B] -> [*B, 1, C]."""
    return values[1:].movedim(0, -1).unsqueeze(-2)


def pool(points: Tensor, values: Tensor, weight: Tensor, categories: int) -> Tensor:
    """The weighted mean of the evaluations in which variable k took value c, 0 where it never did.

    points [M, *B, K], values and weight [M, *B] -> [*B, K, C].
    """
    index = points.movedim(0, -1)
    zero = values.new_zeros(*index.shape[:-1], categories)
    total, count = (
        zero.scatter_add(-1, index, x.movedim(0, -1).unsqueeze(-2).expand(index.shape))
        for x in (values * weight, weight)
    )
    return total / torch.where(count > 0, count, 1)


def ask_references(logits: Tensor, log_pi: Tensor, references: Tensor) -> Queries:
    """z, then the pseudo vector of every reference and category; references [*B, J, 1 or K]."""
    variables, categories = logits.shape[-2:]
    if references.shape[-1] < variables:
        references = references.expand(*references.shape[:-1], variables)
    found, pseudo, weight = swap_references(logits, log_pi, references)
    points, same_as, one, packed = found
    cells = None
    if same_as is None:
        points = torch.cat([points, pseudo.movedim((-3, -1), (0, 1)).flatten(0, 1).long()])
        same_as = share(points)
        cells = _cells(references, categories)
    aux, first_for_rest = Swapped(weight, pseudo, cells), variables == 1
    return Queries(points, points[0], same_as, one, aux, first_for_rest=first_for_rest, packed=packed)


def swap_references(logits: Tensor, log_pi: Tensor, references: Tensor) -> tuple[kernels.Found, Tensor, Tensor]:
    """What to ask for, the swaps z_k^{c<->j} [*B, J, K, C], and the weights 1 - C pi_kj [*B, J, K]; references
    [*B, J, K]. For one variable the queries are `by_category`; for several, they are only z [1, *B, K].
    """
    variables, categories = logits.shape[-2:]
    if kernels.in_one_block(logits):
        return kernels.swap_with(logits, log_pi, references)
    race, count, log_pi = run_race(logits, log_pi), references.shape[-2], log_pi.detach()
    each = Race(*(x.unsqueeze(-2).expand(*x.shape[:-1], count, variables) for x in race))
    pseudo = swap_with(each, references).movedim(0, -1)
    pi = log_pi.double().gather(-1, references.movedim(-2, -1)).exp().movedim(-1, -2)
    points, same_as = race.z.unsqueeze(0), None
    if variables == 1:
        won = torch.zeros((*logits.shape[:-2], 1, categories), dtype=torch.bool, device=pi.device)
        won = won.scatter(-1, pseudo.movedim(-3, -2).flatten(-2).long(), True)
        points, same_as = by_category(race.z, won)
    one = torch.ones(1, device=logits.device)
    return kernels.Found(points, same_as, one, None), pseudo, 1 - categories * pi


def _cells(references: Tensor, categories: int) -> Tensor:
    """[1 + J C, *B] from references [*B, J, K] that are common to all variables."""
    j = references[..., :1]
    c = torch.arange(categories, device=j.device)
    also_reference = (j == c).any(-2, keepdim=True)
    cells = torch.where(j == c, 0.0, torch.where(also_reference, 0.5, 1.0)).movedim((-2, -1), (0, 1)).flatten(0, 1)
    return torch.cat([torch.ones_like(cells[:1]), cells])


def tell_references(logits: Tensor, queries: Queries, values: Tensor, *, pooled: bool) -> Tensor:
    """mean_j [F_cj - mean_m F_mj] (1 - C pi_kj): values [M, *B] -> [*B, K, C]."""
    weight, pseudo, cells = queries.aux
    dtype = torch.promote_types(values.dtype, logits.dtype)
    count, variables, categories = pseudo.shape[-3:]
    if kernels.in_one_block(pseudo) and not (pooled and variables > 1):
        return kernels.compare_swaps(values, pseudo, weight, dtype)
    if variables > 1 and not pooled:
        f = values[1:].unflatten(0, (count, categories)).movedim((0, 1), (-2, -1)).unsqueeze(-2)
    else:
        q = values_by_category(values)
        if cells is not None:
            q = pool(queries.points, values - values[0], cells.to(values.dtype), categories)
        f = q.unsqueeze(-3).expand(pseudo.shape).gather(-1, pseudo.long())
    f = f - f[..., :1]  # equal values give exactly zero
    f = f - f.mean(-1, keepdim=True)
    return (f * weight.unsqueeze(-1)).mean(-3).to(dtype)
