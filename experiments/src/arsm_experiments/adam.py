"""Adam for stacked replicas: R rows of P parameters, a learning rate for every row, weight decay
of matrices, and a moving average.

Reference: Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from arsm_experiments.layout import Layout, padded

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
STATE = ("first_moment", "second_moment", "slow_moment", "average")
"""Tensors that have a row for every replica."""

Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True)
class Optimiser:
    """Adam's options that all replicas share.

    Attributes:
        schedule: the learning rate along `total_steps`.
        averaging: decay of the moving average of the parameters, 0 for none.
        paces: [P], relative learning rate of each parameter; None if all are equal.
    """

    schedule: Schedule = "constant"
    total_steps: int = 0
    averaging: float = 0.0
    paces: Tensor | None = None


class StackedAdam:
    """Adam's state for all replicas, and the parts of its step.

    Args:
        options: what all replicas share.
        layout: where every parameter lies in a row.
        parameters: [R, P].
        watched: number of leading parameters for the gradient's variance.
        decays: whether any replica has weight decay.
    """

    def __init__(
        self, options: Optimiser, layout: Layout, parameters: Tensor, watched: int, *, decays: bool
    ) -> None:
        self.options = options
        self.watched = watched
        device = parameters.device
        self.paces = None if options.paces is None else padded(options.paces).to(device)
        self.decaying = _matrices(layout).to(device) if decays else None
        averaged = parameters.shape[1] if options.averaging else 0
        self.state = {
            "first_moment": torch.zeros_like(parameters),
            "second_moment": torch.zeros_like(parameters),
            "slow_moment": torch.zeros_like(parameters[:, :watched]),
            "average": parameters[:, :averaged].clone(),
            "step": torch.zeros((), dtype=torch.int64, device=device),
        }

    def scale(self, settings: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The step size, the epsilon of the denominator, the weight of the new value in the moving
        average, the decay.

        Separate from `update`: compiled into it, they would be computed again for every parameter.
        """
        # in float64: at the first step 1 - BETA2**step loses three of float32's seven digits
        step = (self.state["step"] + 1).double()
        rate = settings["rate"].double()
        if self.options.schedule == "cosine":
            rate = rate * 0.5 * (1 + torch.cos(math.pi * (step - 1) / self.options.total_steps))
        # both corrections of the bias in one factor, as the paper's section 2 suggests
        size = (rate * (1 - BETA2**step).sqrt() / (1 - BETA1**step)).float().unsqueeze(-1)
        small = (EPSILON * (1 - BETA2**step).sqrt()).float()
        # at first a plain mean of all steps, so that the start is forgotten soon
        fresh = (1 / step).clamp_min(1 - self.options.averaging).float()
        if self.decaying is None:
            return size, small, fresh, None
        return size, small, fresh, (rate * settings["weight_decay"]).float().unsqueeze(-1)

    def update(
        self,
        parameters: Tensor,
        state: Sequence[Tensor],
        gradients: list[Tensor],
        size: Tensor,
        small: Tensor,
        fresh: Tensor,
        decay: Tensor | None,
    ) -> None:
        """One step of the parameters [..., P], in place, with what `scale` returned."""
        # rows are padded to a multiple that kernels read at once
        flat = [each.flatten(parameters.ndim - 1) for each in gradients]
        padding = parameters.shape[-1] - sum(each.shape[-1] for each in flat)
        gradient = torch.cat([*flat, parameters.new_zeros((*parameters.shape[:-1], padding))], -1)
        first, second, _, average = state
        first.lerp_(gradient, 1 - BETA1)
        second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        if self.paces is not None:
            size = size * self.paces
        # decoupled from the gradient, as in AdamW
        if decay is not None and self.decaying is not None:
            parameters.mul_(1 - decay * self.decaying)
        parameters.sub_((size * first).div_(second.sqrt().add_(small)))
        if self.options.averaging:
            average.lerp_(parameters, fresh)

    def follow(self, slow: Tensor, gradients: list[Tensor]) -> None:
        """The watched parameters' gradient, averaged as slowly as Adam's second moment."""
        flat = [each.flatten(slow.ndim - 1) for each in gradients]
        ends = itertools.accumulate(each.shape[-1] for each in flat)
        watched = [each for each, end in zip(flat, ends, strict=True) if end <= self.watched]
        slow.lerp_(torch.cat(watched, -1), 1 - BETA2)


def _matrices(layout: Layout) -> Tensor:
    """[P]: 1 for the elements of matrices, 0 for those of vectors and for padding."""
    parts = [torch.full((shape.numel(),), float(len(shape) > 1)) for shape in layout.shapes]
    return padded(torch.cat(parts))
