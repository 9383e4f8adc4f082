"""The steps that a budget or keep-probabilities leave, and their weights w_t.

`arsm.policy` says why both ways are unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.checks import check_whole, describe


def step_weights(
    counts: Tensor,
    played: Tensor,
    shape: torch.Size,
    budget: int | None,
    keep: Tensor | None,
    generator: torch.Generator | None,
    *,
    weighted: bool = True,
) -> Tensor:
    """w_t [S] from the numbers of pseudo actions [S] of the played steps [S] of [B, T]; 0
    for the steps that a budget or keep-probabilities leave out.
    """
    if budget is not None and keep is not None:
        raise ValueError("Give a budget or keep-probabilities, not both.")
    if keep is not None:
        return _tossed(counts, _check_keep(keep, shape).flatten()[played], generator)
    # a random order, so that which steps fit does not depend on where they are
    pending = counts.nonzero().squeeze(-1)
    order = pending[torch.randperm(pending.shape[0], generator=generator, device=played.device)]
    return walk(counts, order, budget, weighted=weighted)


def walk(counts: Tensor, order: Tensor, budget: int | None, *, weighted: bool = True) -> Tensor:
    """w_t [S] from the steps' numbers of pseudo actions |S_t| [S] and the order [M] of
    those that have any.

    A step without pseudo actions needs no rollout and keeps its weight of 1.
    """
    kept = order
    if budget is not None:
        # the sums never fall, so this stops at the first step that does not fit
        kept = order[counts[order].cumsum(0) <= budget]
    scale = order.shape[0] / max(kept.shape[0], 1) if weighted else 1.0
    weight = (counts == 0).double()
    return weight.index_fill(0, kept, scale)


def _tossed(counts: Tensor, keep: Tensor, generator: torch.Generator | None) -> Tensor:
    """w_t [S]: 1/rho_t for the steps that a coin keeps; steps without pseudo actions need none."""
    coin = torch.empty(keep.shape, dtype=torch.float64, device=keep.device)
    coin = coin.uniform_(generator=generator)
    weight = torch.where(coin < keep, 1 / keep, 0.0)
    return torch.where(counts == 0, 1.0, weight)


def check_room(budget: int, largest: int) -> None:
    """Require room for the pseudo actions of any one step."""
    check_whole("budget", budget)
    if budget < largest:
        raise ValueError(
            f"A budget of {budget} rollouts is less than the {largest} pseudo actions that one "
            f"step can have, and would bias the gradient; allow at least {largest}."
        )


def _check_keep(keep: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(keep, Tensor) or not keep.is_floating_point() or keep.shape != shape:
        raise ValueError(f"keep must be floating [B, T] = {list(shape)}, but is {describe(keep)}.")
    if not bool(((keep > 0) & (keep <= 1)).all()):
        raise ValueError(
            "keep must lie in (0, 1]; a step that is never kept would bias the gradient."
        )
    return keep.detach().double()
