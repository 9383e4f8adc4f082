"""REBAR: REINFORCE with f at a relaxed sample as its control variate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arsm.checks import check_temperature
from arsm.noise import argmin_sample, race_noise
from arsm.relaxations import (
    IMPOSSIBLE,
    perturbed,
    relaxed,
    sample_and_point,
    slopes_at_queries,
    tied_gradient,
)
from arsm.types import Estimator, Queries


class RelaxedObjective(nn.Module):
    """REBAR's control variate c(zeta) = eta f(softmax(zeta / tau)): its two numbers."""

    def __init__(self, temperature: float, scale: float) -> None:
        super().__init__()
        # the logarithm, so that a step cannot make tau negative
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.scale = nn.Parameter(torch.tensor(float(scale)))


@dataclass(frozen=True, eq=False)
class REBAR(Estimator):
    """Score only what f at a relaxed sample leaves over, and add back that control
    variate's gradient.

        c = eta f(s),    s = softmax(zeta / tau),    zeta = phi - ln pi,    z = argmax zeta
        g = [f(z) - c] dln q(z)/dphi + dc/dphi - dc~/dphi

    where c~ is c with the noise rewritten as what is left of it given z
    (`relaxations.conditional_perturbed`): zeta_z - max does not move with phi then, and
    the others do by dzeta_i/dln p_i = 1 - k_i, k_i = exp(zeta_i - zeta_z). The paper
    ties the two noises, so c~ = c in value, and for each variable k what remains of the
    slopes w = dc/dzeta_k is

        g_k = [f(z) - c] (z_k - p_k) + x - p_k sum_i x_i,    x_i = exp(zeta_i - max zeta) w_i

    Two evaluations of f and one slope. Unbiased for all eta and tau, which are learned:
    `estimate` returns the squared norm of g as `estimator_loss`, which depends on them
    alone. Learning tau costs a second derivative of f in z; to keep both fixed, say
    `control.requires_grad_(False)`. Reference: Tucker, Mnih, Maddison, Lawson and
    Sohl-Dickstein, REBAR: low-variance, unbiased gradient estimates for discrete latent
    variable models, NeurIPS 2017.

    Attributes:
        temperature: Initial tau.
        scale: Initial eta.
        control: Holds ln tau and eta, which are learned.
        learned: The learned parts, for the optimiser, `.to(device)` and checkpoints;
            empty for most estimators.
    """

    temperature: float = 0.5
    scale: float = 1.0
    control: RelaxedObjective = field(init=False, repr=False)

    learned: nn.ModuleList = field(init=False, repr=False)

    unbiased = True
    needs_gradient = True
    vmappable = False  # tell calls torch.autograd.grad

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        object.__setattr__(self, "control", RelaxedObjective(self.temperature, self.scale))
        object.__setattr__(self, "learned", nn.ModuleList([self.control]))

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        s = relaxed(perturbed(logits, noise), self.control.log_temperature.detach().exp())
        queries = sample_and_point(logits, argmin_sample(logits, noise), s)
        return Queries(queries.points, queries.z, queries.same_as, queries.weight, noise)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        log_temperature = self.control.log_temperature
        scale = self.control.scale
        zeta = perturbed(logits.detach(), queries.aux)
        s = relaxed(zeta, log_temperature.exp())
        # a graph of the slope only where tau is learned, which costs a second derivative
        slope = slopes_at_queries(queries, values[1], create_graph=s.requires_grad)[1]
        sampled, at_relaxed = values.detach()
        if s.requires_grad:
            # f's expansion along tau keeps f's own parameters out of the estimator's loss
            bend = _bend(queries, slope, _along_log_temperature(zeta, log_temperature))
            slope = slope.detach().to(s.dtype)
            at_relaxed = at_relaxed + (slope * (s - s.detach())).sum((-2, -1))
            slope = slope + (log_temperature - log_temperature.detach()) * bend
        slope = slope.to(s.dtype)
        residual = sampled - scale * at_relaxed
        return tied_gradient(
            logits, queries.z, zeta, log_temperature.exp(), s, scale * slope, residual
        )


def _along_log_temperature(zeta: Tensor, log_temperature: Tensor) -> Tensor:
    """ds/dln tau, detached: [..., C]."""
    temperature = log_temperature.detach().exp()
    s = relaxed(zeta, temperature)
    u = zeta.masked_fill(zeta < IMPOSSIBLE, 0) / temperature  # s is 0 there, and 0 inf is NaN
    return s * ((s * u).sum(-1, keepdim=True) - u)


def _bend(queries: Queries, slope: Tensor, direction: Tensor) -> Tensor:
    """The second derivative of f at the relaxed sample along a direction: [*B, K, C]."""
    if not slope.requires_grad:  # f is linear in z
        return torch.zeros_like(direction)
    (bend,) = torch.autograd.grad(
        slope, queries.points, direction.to(slope.dtype), retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(direction) if bend is None else bend[1].to(direction.dtype)
