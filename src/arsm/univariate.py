r"""ARSM of one variable: the sum over all pairs in O(C), without a table of pairs.

With w_j = 1/C - pi_j and d_c = f(c) - f(z), the sums R_c = sum_j (f(z^{c<->j}) - f(z)) w_j are, by the facts of
`arsm.swap`,

    R_c = d_c sum_{j != z} w_j [a_j < theta_c]  +  sum_{j != z} w_j d_j [a_c < theta_j]  +  d(z^{c<->z}) w_z,   c != z
    R_z = sum_j d(z^{z<->j}) w_j

(j = c adds nothing to either sum, because z beats c). Since sum_j w_j = 0, the ARSM gradient
g_c = sum_j (F_cj - mean_m F_mj) w_j is R_c - mean(R).

Few categories are compared in pairs. Many are sorted by a: r_c, the number of a_j below theta_c, is all that the sums
need. The first sum is the sum of w over the first r_c elements of the order; the second, for the
element of rank k, is the sum of w_j d_j over all j with r_j > k. Only elements below max theta need be ordered: about
C max p of them. `arsm.kernels` does this in one operator, which works with torch.compile, vmap and CUDA graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from arsm import kernels
from arsm.kernels import FEW
from arsm.noise import LOWEST, TO_FIXED
from arsm.swap import SMALL as SMALL_RACE
from arsm.swap import Race, run_race, swap_with, without_winner

BITS = 10
"""How many bits of a key hold its category."""
INDEX = (1 << BITS) - 1
NEVER = 2**62
"""A key that loses to all others."""
SMALL = 1 << 14
"""From this many numbers on, a CPU takes longer to allocate C times as many than to add them up one by one."""


class Swaps(NamedTuple):
    """All swaps of one variable."""

    logits: Tensor
    """[..., C]."""
    log_pi: Tensor
    """[..., C]."""
    z: Tensor
    """[...] the winner."""
    can_win: Tensor
    """[..., C] bool: the categories that are some pair's pseudo action; f is only needed there."""
    compared: tuple[Tensor, Tensor] | None
    """z^{z<->c} [C, ...], and whether c wins against j [C, C, ...]: few categories."""
    ordered: kernels.Order | None
    """What `kernels.order` found: many categories, or a GPU."""


def swap_all(logits: Tensor, log_pi: Tensor, race: Race | None = None) -> Swaps:
    """Find the winner of each pair: [..., C]; `race`, if it was run already."""
    logits, log_pi = logits.detach(), log_pi.detach()
    categories = logits.shape[-1]
    if categories > FEW or kernels.on_gpu(logits):
        found = kernels.order(logits, log_pi)
        return Swaps(logits, log_pi, found.ahead[..., 0], found.can_win, None, found)
    if categories >= 3 and logits.numel() < SMALL_RACE and not torch.compiler.is_compiling():
        z, with_z, a, theta = _with_keys(logits, log_pi)
    else:
        race = race or run_race(logits, log_pi)
        z, with_z = race.z, swap_with(race, race.z).long()
        a, theta = without_winner(race)
    can_win = (theta > a.amin(0)).scatter(0, with_z, True).movedim(0, -1)
    return Swaps(logits, log_pi, z, can_win, (with_z, a < theta.unsqueeze(1)), None)


def _with_keys(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z [...], z^{z<->c} [C, ...], and a and theta [C, ...] as `swap.without_winner` has them, by fewer operations.

    A key has a value in fixed point, as an integer, and below it the category: the least of several keys says who wins,
    ties included. For few numbers: a CPU finds the least of many integers slowly.
    """
    phi, a = _keys(logits, log_pi)
    o = a - phi
    best, second = o.sort(0).values[:2]
    z = (best & INDEX).unsqueeze(0)
    of_c, of_z = a.gather(0, z) - phi, a - phi.gather(0, z)
    # c itself may be second: of_c + of_z = o_z + o_c, so that one of these two is at most o_c
    with_z = torch.minimum(of_c, of_z).minimum(second).bitwise_and_(INDEX)
    return z.squeeze(0), with_z, a.scatter(0, z, NEVER), phi + best


def _keys(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """phi and a of `noise.fixed_point` as integers, [..., C] -> [C, ...]: a_j - phi_c is the key of c with j's noise.

    Both have the bits of `TO_FIXED` above them. Masked logits become the lowest: they lose to the largest logit.
    """
    phi, a = (x.movedim(-1, 0).to(torch.float64, memory_format=torch.contiguous_format) for x in (logits, log_pi))
    phi, a = (
        x.clamp_min(lowest).add_(TO_FIXED).view(torch.int64).bitwise_left_shift_(BITS)
        for x, lowest in ((phi - phi.amax(0), LOWEST), (a, LOWEST / 2))
    )
    c = torch.arange(len(phi), device=phi.device)
    return phi.sub_(c.view(-1, *(1,) * (phi.ndim - 1))), a


def merge(swaps: Swaps, f: Tensor) -> Tensor:
    """The ARSM gradient of one variable from f at every category: [..., C] -> [..., C], in f's dtype or float64.

    For a category that cannot win, f must be set to f(z).
    """
    if swaps.ordered is not None:
        sums, mean = kernels.merge(swaps.logits, swaps.log_pi, swaps.ordered, f)
        if mean.shape[-1] == 0:
            return sums
        # a compiled graph keeps the sums for its backward, which are smaller, and subtracts the mean there
        return sums - mean if torch.compiler.is_compiling() else sums.sub_(mean)
    assert swaps.compared is not None
    with_z, wins = swaps.compared
    z = swaps.z.unsqueeze(0)
    w, d = (x.movedim(-1, 0).to(torch.float64, memory_format=torch.contiguous_format) for x in (swaps.log_pi, f))
    w, d = 1 / f.shape[-1] - w.exp(), d - d.gather(0, z)
    swapped = d.gather(0, with_z)
    sums = _sum_pairs(wins, swapped, z, w, d)
    return (sums - sums.mean(0)).movedim(0, -1).to(f.dtype, memory_format=torch.contiguous_format)


def _sum_pairs(wins: Tensor, swapped: Tensor, z: Tensor, w: Tensor, d: Tensor) -> Tensor:
    """R [C, ...]: wins [C, C, ...], d of the swaps with z [C, ...], z [1, ...], w and d [C, ...]."""
    if w.numel() < SMALL:
        won = (wins * d.unsqueeze(1)).scatter(0, z.expand_as(d).unsqueeze(0), swapped.unsqueeze(0))
        return ((won + won.transpose(0, 1)) * w).sum(1)
    sums = swapped * w.gather(0, z)
    for j in range(len(w)):
        won = (wins[:, j].to(d.dtype) * d).addcmul_(wins[j].to(d.dtype), d[j])
        sums.addcmul_(won, w[j])
    return sums.scatter_(0, z, (swapped * w).sum(0, keepdim=True))
