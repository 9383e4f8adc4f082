"""rlax's policy gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.referee.measure import Loss
from arsm.referee.problems import Function
from arsm_experiments.ecosystem.entry import (
    ONE_VARIABLE,
    UNBIASED,
    Entry,
    audited,
    from_gradient,
    from_package,
)


def policy_gradient() -> Loss:
    """`policy_gradient_loss`, a mean over steps, with f as the advantage of one action per row."""
    jax, rlax, numpy = from_package("jax"), from_package("rlax"), from_package("numpy")

    def objective(logits, actions, advantages):
        return rlax.policy_gradient_loss(
            logits, actions, advantages, jax.numpy.ones_like(advantages)
        )

    compiled = jax.jit(jax.grad(objective))

    def gradient(logits: Tensor, f: Function) -> Tensor:
        z = torch.distributions.Categorical(logits=logits.detach()).sample()
        found = compiled(logits.detach()[:, 0].numpy(), z[:, 0].numpy(), f(z).detach().numpy())
        return -len(logits) * torch.from_numpy(numpy.array(found)).unsqueeze(1)

    return from_gradient(gradient)


ENTRIES = (
    Entry(
        "rlax: policy_gradient_loss, one variable",
        "rlax",
        "rlax",
        UNBIASED,
        audited(policy_gradient, ONE_VARIABLE),
    ),
)
