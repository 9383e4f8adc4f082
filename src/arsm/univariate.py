r"""ARSM of one variable: the sum over all pairs in O(C), without a table of pairs.

With w_j = 1/C - pi_j and d_c = f(c) - f(z), the sums R_c = sum_j (f(z^{c<->j}) - f(z))
w_j are, by the facts of `arsm.swap`,

    R_c = d_c sum_{j != z} w_j [a_j < theta_c] + sum_{j != z} w_j d_j [a_c < theta_j]
          + d(z^{c<->z}) w_z,   c != z
    R_z = sum_j d(z^{z<->j}) w_j

(j = c adds nothing to either sum, because z beats c). Since sum_j w_j = 0, the ARSM
gradient g_c = sum_j (F_cj - mean_m F_mj) w_j is R_c - mean(R).

Few categories are compared in pairs. Many are sorted by a: r_c, the number of a_j below
theta_c, is all that the sums need. The first sum is the sum of w over the first r_c
elements of the order; the second, for the element of rank k, is the sum of w_j d_j over
all j with r_j > k. Only elements below max theta need be ordered: about C max p of
them. `arsm.kernels` does this in one operator, which works with torch.compile, vmap and
CUDA graphs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from arsm import kernels


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
    found: kernels.Order | kernels.ComparedPairs
    """The result of `kernels.order`, of which z and can_win are the part that callers read."""


def swap_all(logits: Tensor, log_pi: Tensor) -> Swaps:
    """Find the winner of each pair: [..., C]."""
    # the winners are piecewise constant in both, so that there is nothing to differentiate
    logits = logits.detach()
    log_pi = log_pi.detach()
    found = kernels.order(logits, log_pi)
    return Swaps(logits, log_pi, found.z, found.can_win, found)


def merge(swaps: Swaps, f: Tensor) -> Tensor:
    """The ARSM gradient of one variable from f at every category: [..., C] -> [..., C],
    in f's dtype or float64.

    For a category that cannot win, f must be set to f(z).
    """
    # a GPU keeps little of the race, and looks the rest up again in logits and ln pi
    return kernels.merge(swaps.logits, swaps.log_pi, swaps.found, f)
