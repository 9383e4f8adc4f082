"""`order` and `merge` of `arsm.kernels` in plain PyTorch for few categories, whose
pairs are all compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from arsm.kernels.two_ways import sorts_faster
from arsm.noise import LOWEST, TO_FIXED
from arsm.swap import run_race, swap_with, without_winner

BITS = 10
"""Bits of a key that hold its category."""
INDEX = (1 << BITS) - 1
NEVER = 2**62
"""A key that loses to all others."""
TABLE = 1 << 14
"""From this many numbers on, a CPU takes longer to allocate C times as many than to add
them up one by one.
"""


class ComparedPairs(NamedTuple):
    """All swaps of one variable, pair by pair."""

    z: Tensor
    """[...] the winner."""
    can_win: Tensor
    """[..., C] bool."""
    with_z: Tensor
    """[C, ...] the winner z^{z<->c}."""
    wins: Tensor
    """[C, C, ...] bool: whether c wins against j."""


def order(logits: Tensor, log_pi: Tensor) -> ComparedPairs:
    """Find the winner of each pair: [..., C]."""
    # torch 2.11's vmap has no rule for viewing numbers as integers, which is how keys are made
    mapped = torch._C._are_functorch_transforms_active()
    if sorts_faster(logits.movedim(-1, 0)) and not mapped:
        z, with_z, a, theta = _with_keys(logits, log_pi)
    else:
        race = run_race(logits, log_pi)
        z = race.z
        with_z = swap_with(race, race.z).long()
        a, theta = without_winner(race)
    # c wins a pair without z iff it beats the least noise of the others; z may lose its own pairs
    can_win = (theta > a.amin(0)).scatter(0, with_z, True).movedim(0, -1)
    return ComparedPairs(z, can_win, with_z, a < theta.unsqueeze(1))


def _with_keys(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z [...], z^{z<->c} [C, ...], and a and theta [C, ...] as `swap.without_winner`
    has them, by fewer operations.

    A key has a value in fixed point, as an integer, and below it the category: the
    least of several keys says who wins, ties included. For few numbers: a CPU finds the
    least of many integers slowly.
    """
    phi, a = _keys(logits, log_pi)
    o = a - phi
    best, second = o.sort(0).values[:2]
    z = (best & INDEX).unsqueeze(0)
    # the pair (z, c): c with the noise of z, z with the noise of c, and the best of the others
    of_c = a.gather(0, z) - phi
    of_z = a - phi.gather(0, z)
    # c itself may be second: of_c + of_z = o_z + o_c, so that one of these two is at most o_c
    with_z = torch.minimum(of_c, of_z).minimum(second).bitwise_and_(INDEX)
    return z.squeeze(0), with_z, a.scatter(0, z, NEVER), phi + best


def _keys(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """phi and a of `noise.fixed_point` as integers, [..., C] -> [C, ...]: a_j - phi_c
    is the key of c with j's noise.

    Both have the bits of `TO_FIXED` above them. Masked logits become the lowest: they
    lose to the largest logit.
    """
    phi = _categories_in_front(logits)
    phi = _shifted(phi - phi.amax(0), LOWEST)
    a = _shifted(_categories_in_front(log_pi), LOWEST / 2)
    # the key a_j - phi_c must hold c: phi_c less c
    c = torch.arange(len(phi), device=phi.device)
    return phi.sub_(c.view(-1, *(1,) * (phi.ndim - 1))), a


def _categories_in_front(x: Tensor) -> Tensor:
    """[..., C] -> [C, ...], contiguous and in float64: a CPU compares many rows at once."""
    return x.movedim(-1, 0).to(torch.float64, memory_format=torch.contiguous_format)


def _shifted(x: Tensor, lowest: float) -> Tensor:
    """x in fixed point as an integer, above BITS free bits; the addition rounds it."""
    return x.clamp_min(lowest).add_(TO_FIXED).view(torch.int64).bitwise_left_shift_(BITS)


def merge(log_pi: Tensor, found: ComparedPairs, f: Tensor) -> Tensor:
    """The ARSM gradient [..., C] from f at every category, in f's dtype."""
    z = found.z.unsqueeze(0)
    # w_c = 1/C - pi_c and d_c = f(c) - f(z), as `arsm.univariate` has them
    w = 1 / f.shape[-1] - _categories_in_front(log_pi).exp()
    d = _categories_in_front(f)
    d = d - d.gather(0, z)
    swapped = d.gather(0, found.with_z)
    sums = _sum_pairs(found.wins, swapped, z, w, d)
    return (sums - sums.mean(0)).movedim(0, -1).to(f.dtype, memory_format=torch.contiguous_format)


def _sum_pairs(wins: Tensor, swapped: Tensor, z: Tensor, w: Tensor, d: Tensor) -> Tensor:
    """R [C, ...]: wins [C, C, ...], d of the swaps with z [C, ...], z [1, ...], w and d
    [C, ...].
    """
    if w.numel() < TABLE:
        # the pair of z and c: its winner's d stands in the row and the column of z
        won = (wins * d.unsqueeze(1)).scatter(0, z.expand_as(d).unsqueeze(0), swapped.unsqueeze(0))
        return ((won + won.transpose(0, 1)) * w).sum(1)
    # the same sums, one reference j after the other, without a table of all pairs
    sums = swapped * w.gather(0, z)
    for j in range(len(w)):
        won = (wins[:, j].to(d.dtype) * d).addcmul_(wins[j].to(d.dtype), d[j])
        sums.addcmul_(won, w[j])
    return sums.scatter_(0, z, (swapped * w).sum(0, keepdim=True))
