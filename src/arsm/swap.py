r"""Pseudo actions: who wins the race when two elements of the noise change places.

z = argmin_i (a_i - phi_i) with a = ln pi; z^{c<->j} is the winner after a_c and a_j are swapped. The definition costs
O(C) a pair. Three facts make it O(1) a pair, and all pairs of one variable together O(C log C).
Write o_i = a_i - phi_i and o_z for its minimum; ties go to the lowest index, so that "x beats z" below means
(value of x, index of x) < (o_z, z) in lexicographic order.

**1. A pair that leaves z alone has one challenger at most.** For c, j != z everybody but c and j keeps a value that z
beats, so the winner is z, or c if a_j - phi_c beats z, or j if a_c - phi_j beats z. Both cannot hold: z beats c
before the swap, so if c beats z with a_j in place of a_c, then a_j < a_c; if j beats z with a_c, then a_c < a_j.

**2. Each test is a threshold on one variable.** In fixed point (`noise.fixed_point`) sums are exact and "c beats z with
a_j" reads a_j < theta_c, with theta_c = o_z + phi_c, plus one unit of the resolution where c < z.

**3. A pair (z, c)** gives z the value a_c - phi_z and c the value a_z - phi_c; the best of the others is the runner-up
of o, or the third where c is the runner-up. The first of these three wins.

Hence for one variable, with w_j = 1/C - pi_j and d_c = f(c) - f(z), the sums R_c = sum_j (f(z^{c<->j}) - f(z)) w_j are

    R_c = d_c sum_{j != z} w_j [a_j < theta_c]  +  sum_{j != z} w_j d_j [a_c < theta_j]  +  d(z^{c<->z}) w_z,   c != z
    R_z = sum_j d(z^{z<->j}) w_j

(j = c adds nothing to either sum, as z beats c). The first sum is a prefix sum of w in the order of a, the second a
prefix sum of w d in the descending order of theta. Since sum_j w_j = 0, the ARSM gradient
g_c = sum_j (F_cj - mean_m F_mj) w_j is R_c - mean(R).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.noise import RESOLUTION, fixed_point


class Race(NamedTuple):
    """One race a variable, in fixed point."""

    phi: Tensor
    """[..., C] logits."""
    a: Tensor
    """[..., C] ln pi."""
    z: Tensor
    """[...] the winner."""
    best: Tensor
    """[...] its value o_z."""


def run_race(logits: Tensor, log_pi: Tensor) -> Race:
    """Find the winner z and its value: [..., C] -> [...]."""
    phi, a = fixed_point(logits, log_pi)
    best, z = (a - phi).min(-1)
    return Race(phi, a, z, best)


def replace(x: Tensor, index: Tensor, value: float) -> Tensor:
    """x [..., C] with x[..., index] = value, for index [...]."""
    return torch.where(torch.arange(x.shape[-1], device=x.device) == index.unsqueeze(-1), value, x)


def swap_with(race: Race, reference: Tensor) -> Tensor:
    """z^{c<->j} of every c with one j = reference: [...] -> [..., C]."""
    phi, a, _, _ = race
    j = reference.unsqueeze(-1)
    c = torch.arange(phi.shape[-1], device=phi.device)
    others = replace(a - phi, reference, torch.inf)
    first_value, first = others.min(-1, keepdim=True)
    second_value, second = replace(others, first.squeeze(-1), torch.inf).min(-1, keepdim=True)
    winner = torch.where(c == first, second, first)
    value = torch.where(c == first, second_value, first_value)
    for index, challenge in ((c, a.gather(-1, j) - phi), (j, a - phi.gather(-1, j))):
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


# ---------------------------------------------------------------- one variable, sorted


class Sorted(NamedTuple):
    """What the O(C log C) form keeps of a race, [..., C] each: see the formula for R above."""

    weight: Tensor
    """w = 1/C - pi, float64."""
    z: Tensor
    """[...] the winner."""
    with_z: Tensor
    """z^{z<->c}."""
    noise_order: Tensor
    """Order of a."""
    wins: Tensor
    """How many j, in that order, c wins against."""
    threshold_order: Tensor
    """Descending order of theta."""
    losses: Tensor
    """How many j, in that order, win against c."""

    @property
    def can_win(self) -> Tensor:
        """[..., C] bool: the categories that are some pair's pseudo action; f is wanted at no others."""
        return (self.wins > 0).scatter(-1, self.with_z, True)


def sort_race(race: Race, log_pi: Tensor) -> Sorted:
    """Sort once by noise and once by threshold: [..., C]."""
    a, theta = replace(race.a, race.z, torch.inf), replace(threshold(race), race.z, -torch.inf)
    weight = 1 / a.shape[-1] - log_pi.detach().double().exp()
    return Sorted(weight, race.z, swap_with(race, race.z), *_count_below(a, theta), *_count_below(-theta, -a))


def _count_below(keys: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """The keys' order, and how many keys lie strictly below each limit."""
    ordered, order = keys.sort(-1)
    return order, torch.searchsorted(ordered, limits)


def arsm_sorted(race: Sorted, f: Tensor) -> Tensor:
    """The ARSM gradient of one variable from f at every category: [..., C] -> [..., C].

    Where a category cannot win, its f must equal f(z).
    """
    w = race.weight
    f = f.to(w.dtype)
    d = f - f.gather(-1, race.z.unsqueeze(-1))
    swapped = d.gather(-1, race.with_z)
    sums = (
        d * _prefix_sum(w, race.noise_order, race.wins)
        + _prefix_sum(w * d, race.threshold_order, race.losses)
        + swapped * w.gather(-1, race.z.unsqueeze(-1))
    )
    of_z = (swapped * w).sum(-1, keepdim=True)
    sums = sums.scatter(-1, race.z.unsqueeze(-1), of_z)
    return sums - sums.mean(-1, keepdim=True)


def _prefix_sum(x: Tensor, order: Tensor, count: Tensor) -> Tensor:
    """The sum of the first `count` elements of x in this order."""
    return F.pad(x.gather(-1, order).cumsum(-1), (1, 0)).gather(-1, count)


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
