r"""Pseudo actions: the winner of the race after two elements of the noise are swapped.

z = argmin_i (a_i - phi_i) with a = ln pi; z^{c<->j} is the winner after a_c and a_j are
swapped. The definition costs O(C) per pair. Three facts make it O(1) per pair;
`arsm.univariate` sums all pairs of one variable in O(C). Write o_i = a_i - phi_i and
o_z for its minimum. Ties go to the lowest index: "x beats z" means (value of x, index
of x) < (o_z, z) in lexicographic order.

**1. A pair without z has at most one challenger.** For c, j != z every other element
keeps a value that z beats. The winner is z, or c if a_j - phi_c beats z, or j if a_c -
phi_j beats z. Both cannot hold: z beats c before the swap, so if c beats z with a_j in
place of a_c, then a_j < a_c; if j beats z with a_c, then a_c < a_j.

**2. Each test is a threshold on one variable.** In fixed point (`noise.fixed_point`)
sums are exact and "c beats z with a_j" reads a_j < theta_c, with theta_c = o_z + phi_c,
plus one unit of the resolution where c < z.

**3. A pair (c, j) leaves one of the first three of the race to the others.** The best
of the others is the first of the race's first three that is neither c nor j. The winner
is c with a_j - phi_c, j with a_c - phi_j, or that one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.kernels.two_ways import first_three
from arsm.noise import RESOLUTION, fixed_point


class Race(NamedTuple):
    """One race per variable, in fixed point; categories come first: a CPU then compares
    many rows at once.
    """

    phi: Tensor
    """[C, ...] logits."""
    a: Tensor
    """[C, ...] ln pi."""
    z: Tensor
    """[...] the winner."""
    best: Tensor
    """[...] its value o_z."""
    second: Tensor
    """[...] the runner-up."""
    second_value: Tensor
    third: Tensor
    """[...] the third; with fewer than three categories, anyone with the value infinity."""
    third_value: Tensor


def run_race(logits: Tensor, log_pi: Tensor) -> Race:
    """Find the first three: [..., C] -> [...]."""
    phi, a = fixed_point(_categories_first(logits), _categories_first(log_pi))
    phi = phi.movedim(-1, 0)
    a = a.movedim(-1, 0)
    values, order = first_three(a - phi)
    best, second_value, third_value = values.unbind()
    z, second, third = order.unbind()
    return Race(phi, a, z, best, second, second_value, third, third_value)


def _categories_first(x: Tensor) -> Tensor:
    """x [..., C] with the categories first in memory, but still last in shape."""
    return x.detach().movedim(-1, 0).contiguous().movedim(0, -1)


def replace(x: Tensor, index: Tensor, value: float) -> Tensor:
    """x [C, ...] with x[index, ...] = value, for index [...]."""
    return x.scatter(0, index.unsqueeze(0), value)


def index_dtype(categories: int) -> torch.dtype:
    """The smallest type that holds a category and the difference of two."""
    return torch.int8 if categories < 128 else torch.int32


def categories_of(race: Race) -> Tensor:
    """c = 0..C-1 as [C, 1, ...], in `index_dtype`."""
    categories = race.phi.shape[0]
    c = torch.arange(categories, device=race.phi.device, dtype=index_dtype(categories))
    return c.view(-1, *(1,) * (race.phi.ndim - 1))


def swap_with(race: Race, reference: Tensor) -> Tensor:
    """z^{c<->j} of every c with one j = reference: [...] -> [C, ...] in `index_dtype`."""
    c = categories_of(race)
    j = reference.to(c.dtype)
    z = race.z.to(c.dtype)
    second = race.second.to(c.dtype)
    third = race.third.to(c.dtype)

    # the best two of the race without j: if j is z, they are known
    first = second
    first_value = race.second_value
    next_ = third
    next_value = race.third_value
    if reference is not race.z:
        first = torch.where(j == z, second, z)
        first_value = torch.where(j == z, race.second_value, race.best)
        low = (j == z) | (j == second)
        next_ = torch.where(low, third, second)
        next_value = torch.where(low, race.third_value, race.second_value)

    # the best without j and c: the first of these two that is not c
    is_first = c == first
    other = first + is_first * (next_ - first)
    value = torch.where(is_first, next_value, first_value)

    # c with the noise of j, j with the noise of c, and the best of the others
    of_c = race.a.gather(0, reference.unsqueeze(0)) - race.phi
    of_j = race.a - race.phi.gather(0, reference.unsqueeze(0))
    c_wins = (of_c < _ties(of_j, c < j)) & (of_c < _ties(value, c < other))
    j_wins = (of_j < _ties(value, j < other)) & ~c_wins
    # sums of products are several times faster than torch.where on a CPU
    return other + c_wins * (c - other) + j_wins * (j - other)


def _ties(x: Tensor, lower: Tensor) -> Tensor:
    """The bound below which a value beats x: in fixed point, one unit more for a
    challenger of a lower index.
    """
    return torch.add(x, lower, alpha=RESOLUTION)


def threshold(race: Race) -> Tensor:
    """theta [C, ...]: for a pair without z, c wins iff a_j < theta_c."""
    c = categories_of(race)
    return _ties(race.best + race.phi, c < race.z.to(c.dtype))


def without_winner(race: Race) -> tuple[Tensor, Tensor]:
    """(a, theta) [C, ...], such that z neither wins nor loses a pair."""
    a = replace(race.a, race.z, torch.inf)
    theta = replace(threshold(race), race.z, -torch.inf)
    return a, theta


# ---------------------------------------------------------------- all pairs, as a table


def pair_row(c: Tensor, j: Tensor, categories: int) -> Tensor:
    """The row of the pair {c, j} in `pair_table`: 0 where c == j, else 1.. in the order
    of `torch.triu_indices`.
    """
    low = torch.minimum(c, j)
    high = torch.maximum(c, j)
    # the pairs of the categories below `low` come first, C - 1 - i of each i
    before = low * (2 * categories - low - 1) >> 1
    return torch.where(c == j, 0, before + high - low)


def pair_table(race: Race) -> Tensor:
    """z, then z^{c<->j} of all pairs c < j: [C, *B, K] race -> [1 + C(C-1)/2, *B, K] in
    `index_dtype`.
    """
    categories = race.phi.shape[0]
    pairs = torch.triu_indices(categories, categories, 1, device=race.phi.device)
    low, high = F.pad(pairs, (1, 0))  # row 0: the pair (0, 0), which changes nothing
    z = race.z.to(index_dtype(categories))

    # pairs without z: the one that wins, else z; fact 1 says that both cannot
    a, theta = without_winner(race)
    wins = (a < theta.unsqueeze(1)).flatten(0, 1)  # [c j, *B, K]: c wins against j
    low_wins = wins.index_select(0, low * categories + high)
    high_wins = wins.index_select(0, high * categories + low)
    of_low = low.to(z.dtype).view(-1, *(1,) * z.ndim)
    of_high = high.to(z.dtype).view(-1, *(1,) * z.ndim)
    table = z + low_wins * (of_low - z) + high_wins * (of_high - z)

    # pairs with z, for which the first part has left z
    is_z = categories_of(race) == z
    with_z = swap_with(race, race.z) - z
    for one, other in ((low, high), (high, low)):
        table = table + is_z.index_select(0, one) * with_z.index_select(0, other)
    return table


def merge_pairs(values: Tensor, log_pi: Tensor) -> Tensor:
    """g_kc = sum_j (F_cj - mean_m F_mj) (1/C - pi_kj), F from f at a pair table [M,
    *B]: ln pi [*B, K, C] -> same.
    """
    categories = log_pi.shape[-1]
    c = torch.arange(categories, device=values.device)
    values = values - values[0]  # a constant in f cancels before it can round
    f = values.movedim(0, -1)[..., pair_row(c.unsqueeze(-1), c, categories)]  # [*B, j, c]
    f = f - f.mean(-1, keepdim=True)
    weight = (1 / categories - log_pi.exp()).to(f.dtype)
    return weight @ f
