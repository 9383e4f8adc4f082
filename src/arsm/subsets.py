r"""Choices of k out of C categories, by the conditional Poisson distribution.

    q(S) = prod_{c in S} exp(phi_c) / Z,    Z = e_k(exp phi),    mu_c = P(c in S) = d ln Z / d phi_c

over all subsets S with k members; e_k is the elementary symmetric polynomial. The score
is onehot(S) - mu, and the covariance of the members is G = d mu / d phi. A subset is
written as its members in ascending order, int64 [..., k].

Everything follows from the polynomials of the first and of the last categories,
computed in logarithms:

    ln e_j(phi_i..phi_C) = logaddexp(ln e_j(phi_{i+1}..phi_C), phi_i + ln e_{j-1}(phi_{i+1}..phi_C))

Reference: Chen, Dempster and Liu, Weighted finite population sampling to maximize
entropy, Biometrika 1994.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.checks import check_count, check_one_variable
from arsm.types import Estimator

NOTHING = -1e30
"""The logarithm of zero; -inf would make NaN of its derivatives."""


def log_polynomials(phi: Tensor, k: int) -> Tensor:
    """ln e_j of the last C - i categories, j = 0..k, i = 0..C: phi [..., C] float64 ->
    [C + 1, ..., k + 1].
    """
    # of no categories: e_0 = 1, and all others are 0
    last = torch.full_like(phi[..., :1], NOTHING).expand(*phi.shape[:-1], k)
    last = torch.cat([torch.zeros_like(phi[..., :1]), last], -1)
    rows = [last]
    # one category more each time, from the last to the first
    for theta in phi.flip(-1).movedim(-1, 0):
        taken = (theta.unsqueeze(-1) + last[..., :-1]).clamp_min(NOTHING)
        last = torch.cat([last[..., :1], torch.logaddexp(last[..., 1:], taken)], -1)
        rows.append(last)
    return torch.stack(rows[::-1])


def below_maximum(logits: Tensor) -> Tensor:
    """The logits minus their maximum, in float64; masked ones are finite."""
    phi = logits.double()
    # detached: a constant in all logits changes no probability, and so no derivative
    return (phi - phi.detach().amax(-1, keepdim=True)).clamp_min(NOTHING)


def subset_marginals(logits: Tensor, k: int) -> Tensor:
    """mu_c, the probability that c is among the k chosen: [..., C] -> [..., C] float64,
    sum k; differentiable.

    mu_c = exp(phi_c) e_{k-1}(all but c) / e_k,    e_{k-1}(all but c) = sum_j e_j(before
    c) e_{k-1-j}(after c)

    NaN in a row with fewer than k categories that are not masked.
    """
    check_count("k", k)
    phi = below_maximum(logits)
    after = log_polynomials(phi, k)
    before = log_polynomials(phi.flip(-1), k).flip(0)  # of the first i categories
    others = (before[:-1, ..., :k] + after[1:, ..., :k].flip(-1)).logsumexp(-1).movedim(0, -1)
    total = after[0, ..., k:]  # ln e_k
    return (phi + others - total).exp().masked_fill(total <= NOTHING / 2, torch.nan)


def subset_log_prob(logits: Tensor, z: Tensor) -> Tensor:
    """ln q(S): logits [..., C], z [..., k] ascending -> [...] float64; differentiable."""
    phi = below_maximum(logits)
    return phi.gather(-1, z).sum(-1) - log_polynomials(phi, z.shape[-1])[0, ..., -1]


def draw_subsets(logits: Tensor, u: Tensor, k: int) -> Tensor:
    """n subsets from uniform numbers: logits [..., C], u [..., n, C] in [0, 1) -> int64
    [..., n, k] ascending.

    Categories are visited in order, each taken with its probability given how many are
    still to be chosen.
    """
    phi = below_maximum(logits.detach())
    after = log_polynomials(phi, k)
    z = torch.zeros(*u.shape[:-1], k, dtype=torch.int64, device=u.device)
    left = torch.full(u.shape[:-1], k, dtype=torch.int64, device=u.device)
    place = torch.arange(k, device=u.device)

    def log_polynomial(first: int, degree: Tensor) -> Tensor:
        """ln e_degree of the categories from `first` on."""
        each = after[first].unsqueeze(-2).expand(*u.shape[:-1], -1)
        return each.gather(-1, degree.unsqueeze(-1)).squeeze(-1)

    for c in range(phi.shape[-1]):
        # P(c is taken) = exp(phi_c) e_{left - 1}(after c) / e_left(from c on)
        still = log_polynomial(c, left)
        rest = log_polynomial(c + 1, (left - 1).clamp_min(0))
        taken = (left > 0) & (u[..., c] < (phi[..., c].unsqueeze(-1) + rest - still).exp())
        z = torch.where(taken.unsqueeze(-1) & (place == (k - left).unsqueeze(-1)), c, z)
        left = left - taken.long()
    return z


def members(z: Tensor, categories: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """1[c in S]: int64 [..., k] -> [..., C]; a floating z [..., 1, C] gives its [..., C]."""
    if z.is_floating_point():
        return z.squeeze(-2)
    return (z.unsqueeze(-1) == torch.arange(categories, device=z.device)).any(-2).to(dtype)


def check_subset(estimator: Estimator, logits: Tensor, k: int) -> None:
    """Require one variable with at least k categories that are not masked."""
    check_one_variable(estimator, logits)
    check_count("k", k)
    if logits.shape[-1] < k or not bool(((logits.detach() > -torch.inf).sum(-1) >= k).all()):
        raise ValueError(
            f"{type(estimator).__name__} chooses k = {k} categories, but a row of logits "
            f"{list(logits.shape)} has fewer that are not masked."
        )
