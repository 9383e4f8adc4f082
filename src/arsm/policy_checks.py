"""Refuse episodes and returns that `arsm.policy` cannot plan or learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arsm.capabilities import require
from arsm.checks import NotFiniteError, check_logits, describe
from arsm.types import Estimator

if TYPE_CHECKING:
    from arsm.policy import Rollouts


def check_episodes(
    estimator: Estimator, logits: Tensor, actions: Tensor, mask: Tensor | None
) -> None:
    """Require episodes of the shapes that `plan` takes, and an estimator that can plan them."""
    # a surrogate learned at other steps would bias an episode's gradient: its steps depend on each
    # other
    require(
        estimator,
        "an episode",
        "values_only",
        "mean",
        "given_sample",
        "independent_rows",
        subset=None,
    )
    check_logits(logits, read=False)
    if logits.ndim != 4:
        raise ValueError(
            f"Episodes' logits must be [B, T, K, C], but are {list(logits.shape)}; one action per "
            "step is logits.unsqueeze(-2), and one episode logits.unsqueeze(0)."
        )
    if (
        not isinstance(actions, Tensor)
        or actions.dtype != torch.int64
        or actions.shape != logits.shape[:3]
    ):
        raise ValueError(
            f"actions must be int64 [B, T, K] = {list(logits.shape[:3])}, but are "
            f"{describe(actions)}."
        )
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != logits.shape[:2]
    ):
        raise ValueError(
            f"mask must be bool [B, T] = {list(logits.shape[:2])}, but is {describe(mask)}."
        )


def check_returns(
    rollouts: Rollouts, returns: Tensor, rollout_returns: Tensor, discount: Tensor | None
) -> None:
    """Require finite returns of all played steps and rollouts."""
    for what, values in (("returns", returns), ("rollout_returns", rollout_returns)):
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(
                f"{what} must be a floating tensor, but are {describe(values)}; convert them with "
                ".float()."
            )
    if returns.shape != rollouts.weight.shape or rollout_returns.shape != rollouts.step.shape:
        raise ValueError(
            f"One return per step, {list(rollouts.weight.shape)}, and one per rollout, "
            f"{list(rollouts.step.shape)}, are wanted, but there are {list(returns.shape)} and "
            f"{list(rollout_returns.shape)}."
        )
    # steps that were not played may hold anything
    played = returns.flatten()[rollouts.played]
    for what, values in (("returns", played), ("rollout_returns", rollout_returns)):
        if not bool(values.isfinite().all()):
            raise NotFiniteError(f"{what} must be finite; look for the reward that is not.")
    if discount is not None and (
        not isinstance(discount, Tensor) or discount.shape != rollouts.weight.shape
    ):
        raise ValueError(
            f"discount must be a tensor {list(rollouts.weight.shape)}, such as gamma ** "
            "torch.arange(T).expand(B, T), but is "
            f"{list(discount.shape) if isinstance(discount, Tensor) else discount}."
        )
