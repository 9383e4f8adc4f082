r"""Pseudo actions: who wins the race when two elements of the noise change places.

z = argmin_i (a_i - phi_i) with a = ln pi; z^{c<->j} is the winner after a_c and a_j are swapped. The definition costs
O(C) per pair. Three facts make it O(1) per pair; `arsm.univariate` sums all pairs of one variable in O(C).
Write o_i = a_i - phi_i and o_z for its minimum. Ties go to the lowest index: "x beats z" means
(value of x, index of x) < (o_z, z) in lexicographic order.

**1. A pair without z has at most one challenger.** For c, j != z every other element keeps a value that z beats. The
winner is z, or c if a_j - phi_c beats z, or j if a_c - phi_j beats z. Both cannot hold: z beats c before the swap, so
if c beats z with a_j in place of a_c, then a_j < a_c; if j beats z with a_c, then a_c < a_j.

**2. Each test is a threshold on one variable.** In fixed point (`noise.fixed_point`) sums are exact and "c beats z with
a_j" reads a_j < theta_c, with theta_c = o_z + phi_c, plus one unit of the resolution where c < z.

**3. A pair (c, j) leaves one of the first three of the race to the others.** The best of the others is the first of the
race's first three that is neither c nor j. The winner is c with a_j - phi_c, j with a_c - phi_j, or that one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.noise import RESOLUTION, fixed_point


class Race(NamedTuple):
    """One race per variable, in fixed point."""

    phi: Tensor
    """[..., C] logits."""
    a: Tensor
    """[..., C] ln pi."""
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
    phi, a = fixed_point(logits, log_pi)
    o = a - phi
    best, z = o.min(-1)
    o = replace(o, z, torch.inf)
    second_value, second = o.min(-1)
    third_value, third = replace(o, second, torch.inf).min(-1)
    return Race(phi, a, z, best, second, second_value, third, third_value)


def replace(x: Tensor, index: Tensor, value: float) -> Tensor:
    """x [..., C] with x[..., index] = value, for index [...]."""
    return torch.where(torch.arange(x.shape[-1], device=x.device) == index.unsqueeze(-1), value, x)


def swap_with(race: Race, reference: Tensor) -> Tensor:
    """z^{c<->j} of every c with one j = reference: [...] -> [..., C]."""
    j = reference.unsqueeze(-1)
    z, best, second, second_value, third, third_value = (x.unsqueeze(-1) for x in race[2:])
    c = torch.arange(race.phi.shape[-1], device=race.phi.device)
    # the best two without j, then the best without j and c
    first, first_value = torch.where(j == z, second, z), torch.where(j == z, second_value, best)
    low = (j == z) | (j == second)
    next_, next_value = torch.where(low, third, second), torch.where(low, third_value, second_value)
    winner, value = torch.where(c == first, next_, first), torch.where(c == first, next_value, first_value)
    for index, challenge in ((c, race.a.gather(-1, j) - race.phi), (j, race.a - race.phi.gather(-1, j))):
        beats = (challenge < value) | ((challenge == value) & (index < winner))
        winner, value = torch.where(beats, index, winner), torch.where(beats, challenge, value)
    return winner


def threshold(race: Race) -> Tensor:
    """theta [..., C]: for a pair without z, c wins iff a_j < theta_c."""
    c = torch.arange(race.phi.shape[-1], device=race.phi.device)
    return race.best.unsqueeze(-1) + race.phi + RESOLUTION * (c < race.z.unsqueeze(-1))


# ---------------------------------------------------------------- all pairs, as a table


def pair_row(c: Tensor, j: Tensor, categories: int) -> Tensor:
    """The row of the pair {c, j} in `pair_table`: 0 where c == j, else 1.. in the order of `torch.triu_indices`."""
    low, high = torch.minimum(c, j), torch.maximum(c, j)
    return torch.where(c == j, 0, (low * (2 * categories - low - 1) >> 1) + high - low)


def pair_table(race: Race) -> Tensor:
    """z, then z^{c<->j} of all pairs c < j: [*B, K, C] race -> [1 + C(C-1)/2, *B, K]."""
    categories, device = race.phi.shape[-1], race.phi.device
    a, theta = race.a.movedim(-1, 0).contiguous(), threshold(race).movedim(-1, 0).contiguous()
    z = race.z.int()
    c = torch.arange(categories, device=device)
    low, high = F.pad(torch.triu_indices(categories, categories, 1, device=device), (1, 0))  # row 0: the pair (0, 0)
    low_column, high_column = (x.int().view(-1, *(1,) * z.ndim) for x in (low, high))
    # One of the two wins at most; sums of products are several times faster than torch.where on a CPU.
    table = z + (a[high] < theta[low]) * (low_column - z) + (a[low] < theta[high]) * (high_column - z)
    rows_with_z = pair_row(c.unsqueeze(-1), c, categories)[race.z]  # [*B, K, C]
    with_z = swap_with(race, race.z).int()
    return table.scatter(0, rows_with_z.movedim(-1, 0), with_z.movedim(-1, 0)).long()


# ---------------------------------------------------------------- the definition, as a reference


def pseudo_actions_reference(logits: Tensor, log_pi: Tensor) -> Tensor:
    """z^{c<->j} for all c and j by its definition, one race a pair: [..., C] -> [..., C, C]."""
    phi, a = fixed_point(logits, log_pi)
    categories = a.shape[-1]
    rows = []
    for c in range(categories):
        for j in range(categories):
            order = list(range(categories))
            order[c], order[j] = j, c
            rows.append((a[..., order] - phi).argmin(-1))
    return torch.stack(rows, -1).unflatten(-1, (categories, categories))


def arsm_reference(f: Tensor, log_pi: Tensor) -> Tensor:
    """g_kc = sum_j (F_cj - mean_m F_mj) (1/C - pi_kj): f [*B, C, C], ln pi [*B, K, C] -> [*B, K, C]."""
    f, pi = f.double(), log_pi.double().exp()
    centred = f - f.mean(-2, keepdim=True)
    return torch.einsum("...cj,...kj->...kc", centred, 1 / f.shape[-1] - pi)
