"""Relaxed samples, their slopes, and the points at which f is differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arsm.categorical import one_hot
from arsm.noise import given_winner, working_dtype
from arsm.scores import probabilities, score
from arsm.types import Queries

IMPOSSIBLE = -1e30
"""A logit below this is effectively masked, and would overflow when divided by a temperature."""


def perturbed(logits: Tensor, log_pi: Tensor) -> Tensor:
    """phi - ln pi, the logits with Gumbel noise up to a constant per row, whose argmax
    is z; attached to the logits.

    With pi = E / sum(E) for exponentials E, -ln pi_i is the Gumbel -ln E_i plus ln
    sum(E), which softmax ignores.
    """
    dtype = working_dtype(logits.dtype)
    phi = logits.to(dtype)
    return phi - phi.detach().amax(-1, keepdim=True) - log_pi.to(dtype)


def conditional_perturbed(logits: Tensor, z: Tensor, log_pi: Tensor) -> Tensor:
    """The noisy logits given that z wins, up to a constant per row: [..., C], z [...]
    -> [..., C], detached.
    """
    noise = given_winner(logits, z, log_pi)
    return logits.detach().to(noise.dtype).log_softmax(-1) - noise


def relaxed(zeta: Tensor, temperature: Tensor | float) -> Tensor:
    """softmax(zeta / tau), also differentiable in tau where a category is masked: [..., C]."""
    masked = zeta < IMPOSSIBLE
    # 0 / tau instead of -inf / tau, whose derivative in tau is NaN
    return (zeta.masked_fill(masked, 0) / temperature).masked_fill(masked, -torch.inf).softmax(-1)


def tied_gradient(
    logits: Tensor,
    z: Tensor,
    zeta: Tensor,
    temperature: Tensor | float,
    s: Tensor,
    slope: Tensor,
    residual: Tensor,
) -> Tensor:
    """The gradient of REBAR and RELAX from the control variate's slope at s [*B, K, C]
    and f(z) - c(s) [*B].
    """
    p = probabilities(logits)
    w = s * (slope - (s * slope).sum(-1, keepdim=True)) / temperature
    x = (zeta - zeta.amax(-1, keepdim=True)).exp() * w
    return residual[..., None, None] * score(logits, z) + x - p * x.sum(-1, keepdim=True)


def softmax_tangent(logits: Tensor, p: Tensor) -> Tensor:
    """Zero, with derivative diag(p) - p p' in the logits, which is that of softmax at
    p: [..., C].
    """
    phi = logits.masked_fill(logits == -torch.inf, 0).to(p.dtype)  # -inf - -inf is NaN
    moved = phi - phi.detach()
    return p * (moved - (p * moved).sum(-1, keepdim=True))


def one_point(point: Tensor, z: Tensor) -> Queries:
    """Ask for f at one floating point [*B, K, C] per row, whose true sample is z [*B, K]."""
    same_as = torch.zeros_like(z[..., 0]).unsqueeze(0)
    return Queries(point.unsqueeze(0), z, same_as, torch.ones(1, device=z.device))


def hard_point(logits: Tensor, z: Tensor, tangent: Tensor) -> Queries:
    """Ask for f at the one-hot z [*B, K], whose derivative in the logits is that of the
    tangent [*B, K, C].
    """
    return one_point(one_hot(z, logits.shape[-1], logits.dtype) + tangent.to(logits.dtype), z)


def sloped_points(logits: Tensor, z: Tensor) -> Tensor:
    """One-hot z [..., *B, K] as points at which f is differentiated: [..., *B, K, C]."""
    # attached to the logits with zero slope: compiled code cannot start a graph of its own
    no_slope = 0 * logits.masked_fill(logits == -torch.inf, 0)
    points = one_hot(z, logits.shape[-1], logits.dtype) + no_slope
    return points if points.requires_grad else points.requires_grad_()


def sloped_point(logits: Tensor, z: Tensor, aux: Any = None) -> Queries:
    """Ask for f and its slope at the one-hot z [*B, K] alone."""
    asked = one_point(sloped_points(logits, z), z)
    return Queries(asked.points, asked.z, asked.same_as, asked.weight, aux)


def sample_and_point(logits: Tensor, z: Tensor, point: Tensor) -> Queries:
    """Ask for f at the one-hot z [*B, K], which is the value, and at a floating point
    [*B, K, C] to differentiate.
    """
    point = point.to(logits.dtype)
    points = torch.stack([one_hot(z, logits.shape[-1], logits.dtype), point])
    if not points.requires_grad:
        points.requires_grad_()
    same_as = torch.stack([torch.zeros_like(z[..., 0]), torch.ones_like(z[..., 0])])
    return Queries(points, z, same_as, torch.ones(1, device=z.device))


def slopes_at_queries(queries: Queries, values: Tensor, *, create_graph: bool = False) -> Tensor:
    """df/dz at every query, [M, *B, K, C], from all or some of their values; zero where
    there is none.
    """
    slopes = None
    # values without a graph are a mistake that the two messages below explain
    if values.requires_grad:
        # keep the graph for f's own parameters
        (slopes,) = torch.autograd.grad(
            values.sum(),
            queries.points,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    if slopes is None and not torch.is_grad_enabled():
        raise ValueError(
            "This estimator differentiates f in z, but gradients are switched off here; enable "
            "them."
        )
    if slopes is None:
        raise ValueError(
            "This estimator differentiates f in z, but autograd finds no way from f's values to "
            "z; make f differentiable in one-hot z, or choose one that only evaluates f, such as "
            "RLOO."
        )
    return slopes
