r"""Measuring an estimator: variance, bias, share of pseudo actions.

`entropy`, the remaining diagnostic of the paper, is in `arsm.categorical`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arsm.capabilities import check_estimator, require
from arsm.checks import check_context, check_logits
from arsm.driver import estimate
from arsm.estimators.exact import Exact
from arsm.types import Estimator
from arsm.univariate import swap_all

ELEMENTS_AT_ONCE = 1 << 16
"""Elements of the draws that are made together, about, which limits the memory."""


class Bias(NamedTuple):
    """The error of an estimator's mean.

    Attributes:
        error: Shaped like the logits: the mean of the estimates minus the exact
            gradient.
        standard_error: The standard error of that mean.
    """

    error: Tensor
    standard_error: Tensor


class Moments(NamedTuple):
    """Moments of an estimate, each shaped like the logits."""

    mean: Tensor
    variance: Tensor


def gradient_moments(
    estimator: Estimator,
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    samples: int = 100,
    generator: torch.Generator | None = None,
    max_rows: int | None = 1024,
) -> Moments:
    """Mean and variance of one estimate at fixed logits, from independent draws: [*B,
    K, C] each, in float64.

    Memory is bounded for any `samples`: draws are processed in blocks, which are merged
    (Chan, Golub and LeVeque, 1979).
    """
    if samples < 2:
        raise ValueError(f"A variance needs at least 2 samples, but samples = {samples}.")
    count = 0
    mean = squares = torch.zeros_like(logits, dtype=torch.float64, requires_grad=False)
    for block in _draws(estimator, logits, f, context, samples, generator, max_rows):
        n = block.shape[0]
        block = block.double().view(n, *logits.shape)
        # squares within the block, and between its mean and that of the blocks before it
        step = block.mean(0) - mean
        within = (block - block.mean(0)).square().sum(0)
        squares = squares + within + step.square() * (count * n / (count + n))
        count += n
        mean = mean + step * (n / count)
    return Moments(mean, squares / (samples - 1))


def gradient_variance(
    estimator: Estimator,
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    samples: int = 100,
    generator: torch.Generator | None = None,
    max_rows: int | None = 1024,
) -> Tensor:
    """Var[g_kc] of one estimate at fixed logits, from independent draws: [*B, K, C] ->
    [*B, K, C] in float64.

        1/(n-1) sum_i (g_i - mean(g))^2

    Memory is bounded for any `samples`.
    """
    check_estimator(estimator)
    check_logits(logits, read=True)
    if estimator.deterministic:  # only rounding would be left
        return torch.zeros_like(logits, dtype=torch.float64, requires_grad=False)
    return gradient_moments(
        estimator, logits, f, *context, samples=samples, generator=generator, max_rows=max_rows
    ).variance


def bias(
    estimator: Estimator,
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    samples: int = 1000,
    generator: torch.Generator | None = None,
    max_rows: int | None = 1024,
) -> Bias:
    """E[g_kc] - dE[f]/dphi_kc, the exact gradient by enumeration: [*B, K, C] in float64."""
    require(estimator, "bias", "mean", instead="leave it out here")
    exact = estimate(Exact(), logits.detach(), f, *context, max_rows=max_rows, frozen=True).grad
    assert exact is not None
    mean, variance = gradient_moments(
        estimator, logits, f, *context, samples=samples, generator=generator, max_rows=max_rows
    )
    return Bias(mean - exact, (variance / samples).sqrt())


def pseudo_action_share(logits: Tensor, log_pi: Tensor) -> Tensor:
    """|{z^{c<->j}} without z| / (C - 1), the distinct pseudo actions of each variable:
    [..., C] -> [...].
    """
    if logits.shape[-1] < 2:
        raise ValueError(
            "A variable of one category has no pseudo actions; give logits of at least 2 "
            "categories."
        )
    swaps = swap_all(logits, log_pi)
    # z itself wins pairs too, but is no pseudo action
    differ = swaps.can_win.scatter(-1, swaps.z.unsqueeze(-1), False)
    return differ.sum(-1) / (logits.shape[-1] - 1)


class MovingVariance:
    r"""The variance of a gradient along training, around a moving average of it.

        d_t = g_t - m_{t-1},    b_t = (1 - beta) / w_t
        m_t = m_{t-1} + b_t d_t,    v_t = (1 - b_t) (v_{t-1} + b_t d_t^2)
        Var = v_t / (1 - s_t / w_t^2)

    where w and s are the sums of the averages' weights beta^i (1 - beta) and of their
    squares. For independent, identically distributed gradients the variance is unbiased
    from the second on; after the first it is zero. Nothing synchronises with the
    device.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), but is {decay}.")
        self.decay = decay
        self._mean: list[Tensor] = []
        self._spread: list[Tensor] = []
        self._weight: list[Tensor] = []

    def update(self, gradients: Sequence[Tensor]) -> None:
        """Add one step's gradients, always for the same tensors in the same order."""
        if any(g is None for g in gradients):
            raise TypeError(
                "One of the gradients is None; give those of parameters that backward() has "
                "reached."
            )
        gradients = [g.detach() for g in gradients]
        if not self._weight:
            self._begin(gradients)
        if [g.shape for g in gradients] != [m.shape for m in self._mean]:
            raise ValueError(
                f"The gradients have shapes {[list(g.shape) for g in gradients]}, but began as "
                f"{[list(m.shape) for m in self._mean]}; give the same ones at every update."
            )
        # the sums of the weights and of their squares
        fresh = 1 - self.decay
        w, s = self._weight
        w.mul_(self.decay).add_(fresh)
        s.mul_(self.decay * self.decay).add_(fresh * fresh)

        # the averages, in place: they are as large as the model
        b = fresh / w
        for m, v, g in zip(self._mean, self._spread, gradients, strict=True):
            d = g - m
            m.add_(b * d)
            v.add_(b * d.square()).mul_(1 - b)

    def _begin(self, gradients: Sequence[Tensor]) -> None:
        """Start all sums at 0, for gradients like these."""
        self._mean = []
        for g in gradients:
            # half precision would lose small steps of an average
            dtype = torch.promote_types(g.dtype, torch.float32)
            self._mean.append(torch.zeros_like(g, dtype=dtype))
        self._spread = [torch.zeros_like(m) for m in self._mean]
        # on the device, so that nothing synchronises with it
        zero = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        self._weight = [zero, zero.clone()]

    def variance(self) -> list[Tensor]:
        """Each element's variance, shaped like the gradients."""
        if not self._weight:
            raise ValueError(
                "There is no variance before the first update; call update(gradients) first."
            )
        w, s = self._weight
        # 0 after the first gradient, which says nothing about a spread
        rest = 1 - s / w.square()
        scale = torch.where(rest > 0, 1 / rest, 0.0)
        return [v * scale for v in self._spread]

    def mean(self) -> Tensor:
        """[]: the mean of the variances of all elements."""
        variances = self.variance()
        total = torch.stack([x.sum() for x in variances]).sum()
        return total / sum(x.numel() for x in variances)

    def state_dict(self) -> dict[str, Any]:
        return {
            "decay": self.decay,
            "mean": [m.clone() for m in self._mean],
            "spread": [v.clone() for v in self._spread],
            "weight": [w.clone() for w in self._weight],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["decay"] != self.decay:
            raise ValueError(
                f"The state was averaged with decay {state['decay']}, but this one has "
                f"{self.decay}."
            )
        # copies, because updates are in place
        self._mean = [x.clone() for x in state["mean"]]
        self._spread = [x.clone() for x in state["spread"]]
        self._weight = [x.clone() for x in state["weight"]]


def _draws(
    estimator: Estimator,
    logits: Tensor,
    f: Callable[..., Tensor],
    context: tuple[Tensor, ...],
    samples: int,
    generator: torch.Generator | None,
    max_rows: int | None,
) -> Iterator[Tensor]:
    """Independent estimates as blocks [n, *B, K, C], the draws being the first batch dimension."""
    check_estimator(estimator)
    logits = logits.detach()
    if logits.ndim == 1:
        logits = logits.unsqueeze(0)
    check_context(context, logits.shape[:-2], logits.device)
    elements = logits.numel()
    # several variables need a table of pairs, C entries per logit
    if logits.shape[-2] > 1:
        elements *= logits.shape[-1]
    # coupled rows must belong to one draw
    apart = estimator.couples_rows
    at_once = 1 if apart else max(1, ELEMENTS_AT_ONCE // elements)
    for start in range(0, samples, at_once):
        n = min(at_once, samples - start)
        lead = () if apart else (n,)
        rows = (x.detach().expand(*lead, *x.shape) for x in context)
        with torch.set_grad_enabled(estimator.needs_gradient):
            repeated = logits.expand(*lead, *logits.shape).clone()
            repeated.requires_grad_(estimator.needs_gradient)
            out = estimate(estimator, repeated, f, *rows, generator=generator, max_rows=max_rows)
            gradient = out.grad
            # the estimate of a relaxation is what autograd finds
            if gradient is None:
                (gradient,) = torch.autograd.grad(out.value.sum(), repeated)
        yield gradient.unsqueeze(0) if apart else gradient
