"""AIMLE: I-MLE with a step that adapts to how many estimates are zero."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arsm.categorical import one_hot
from arsm.checks import check_decay, check_positive
from arsm.estimators.imle import sample_at_step
from arsm.noise import argmin_sample, race_noise
from arsm.relaxations import sloped_point, slopes_at_queries
from arsm.types import Estimate, Estimator, Queries


class StepSize(nn.Module):
    """AIMLE's step, relative to the logits, and how dense its estimates have been."""

    alpha: Tensor
    density: Tensor

    def __init__(self, alpha: float, density: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(float(alpha), dtype=torch.float64))
        self.register_buffer("density", torch.tensor(float(density), dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class AIMLE(Estimator):
    """I-MLE by central differences, with a step in proportion to the logits.

        g_k = [z_k(phi_k + lambda h_k) - z_k(phi_k - lambda h_k)] / (2 lambda),
        lambda = alpha |phi| / |h|,    h = df(z)/dz at z = z(phi),
        z_k(theta) = onehot argmax_c (theta_c - ln pi_kc)

    |phi| and |h| are Euclidean norms over a row [K, C]; |phi| is taken of the logits
    less their mean in each variable, which changes no probability, and as at least 1,
    so that equal logits have a gradient too. `adapt` moves alpha after an estimate: up
    by `rate` while fewer than `density` entries per row differ from zero, in a running
    average, else down. Without it alpha stays as given. Biased; one evaluation of f and
    one slope. Reference: Minervini, Franceschi and Niepert, Adaptive perturbation-based
    gradient estimation for discrete latent variable models, AAAI 2023.

    Attributes:
        alpha: Initial value of the relative step.
        central: Step in both directions; if False, only to phi + lambda h, as `IMLE`
            does.
        density: Nonzero entries of the estimate per row that `adapt` aims at.
        rate: Change of alpha per call of `adapt`.
        decay: Weight of the past in the running average of the density.
        state: Holds alpha as it is adapted.
        learned: The adapted parts, for `.to(device)` and checkpoints; none of them has
            a gradient.
    """

    alpha: float = 1.0
    central: bool = True
    density: float = 1.0
    rate: float = 1e-3
    decay: float = 0.9
    state: StepSize = field(init=False, repr=False)

    learned: nn.ModuleList = field(init=False, repr=False)

    unbiased = False
    needs_gradient = True
    adapts = True
    vmappable = False  # tell calls torch.autograd.grad

    def __post_init__(self) -> None:
        for name in ("alpha", "density", "rate"):
            check_positive(name, getattr(self, name))
        check_decay(self.decay)
        object.__setattr__(self, "state", StepSize(self.alpha, self.density))
        object.__setattr__(self, "learned", nn.ModuleList([self.state]))

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        return sloped_point(logits, argmin_sample(logits, noise), aux=noise)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        slope = slopes_at_queries(queries, values)[0].double()
        slope = slope.masked_fill(logits == -torch.inf, 0)
        step = self._step(logits, slope)[..., None, None]

        there = sample_at_step(logits, queries.aux, step * slope)
        back = queries.z
        width = step
        if self.central:
            back = sample_at_step(logits, queries.aux, -step * slope)
            width = 2 * step
        categories = logits.shape[-1]
        difference = one_hot(there, categories, torch.float64)
        difference = difference - one_hot(back, categories, torch.float64)

        # no step, no difference: 0 / 1 instead of 0 / 0
        width = torch.where(step > 0, width, 1.0)
        return (difference / width).to(torch.promote_types(values.dtype, logits.dtype))

    def _step(self, logits: Tensor, slope: Tensor) -> Tensor:
        """lambda of every row, 0 where f has no slope: [*B]."""
        masked = logits == -torch.inf
        phi = logits.detach().double().masked_fill(masked, 0)
        count = (~masked).sum(-1, keepdim=True)
        phi = (phi - phi.sum(-1, keepdim=True) / count).masked_fill(masked, 0)
        length = phi.square().sum((-2, -1)).sqrt().clamp_min(1.0)
        steepness = slope.square().sum((-2, -1)).sqrt()
        return torch.where(steepness > 0, self.state.alpha * length / steepness, 0.0)

    @torch.no_grad()
    def adapt(self, out: Estimate) -> None:
        """Move alpha by `rate`: up if the estimates have had too few nonzero entries,
        else down, to 0 at the least.
        """
        if out.grad is None:
            raise ValueError("AIMLE adapts to out.grad, but this estimate has none.")
        rows = out.grad.shape[:-2].numel()
        found = (out.grad != 0).sum() / rows
        density = self.state.density
        density.mul_(self.decay).add_((1 - self.decay) * found)
        direction = torch.where(density < self.density, 1.0, -1.0)
        self.state.alpha.add_(direction, alpha=self.rate).clamp_min_(0.0)
