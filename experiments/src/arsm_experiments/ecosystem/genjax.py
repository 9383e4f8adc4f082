"""GenJAX's estimators of coin flips (ADEV)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arsm.referee.measure import Loss
from arsm.referee.problems import Function
from arsm_experiments.ecosystem.entry import (
    BINARY,
    UNBIASED,
    Entry,
    audited,
    from_gradient,
    from_package,
)


def flip(name: str) -> Callable[[], Loss]:
    """The gradient of E[f] in the coins' probabilities, and from there in the logits."""

    def build() -> Loss:
        jax, numpy, adev = from_package("jax"), from_package("numpy"), from_package("genjax.adev")
        jnp, primitive = jax.numpy, getattr(adev, name)

        def estimate(key: Any, p: Any, weights: Any, bend: Any, scale: Any, constant: Any) -> Any:
            @adev.expectation
            def value(p: Any) -> Any:
                u = 0.0
                for k in range(weights.shape[0]):
                    u = u + jnp.where(primitive(p[k]), weights[k, 1], weights[k, 0])
                return scale * (u + bend * jnp.cos(3 * u)) + constant

            (found,) = value.grad_estimate(key, (p,))
            return found

        compiled = jax.jit(jax.vmap(estimate, in_axes=(0, 0, None, None, None, None)))

        def gradient(logits: Tensor, f: Function) -> Tensor:
            rows = len(logits)
            p = logits.detach().softmax(-1)[..., 1]  # [rows, variables]
            keys = jax.random.split(jax.random.PRNGKey(int(torch.randint(2**31 - 1, ()))), rows)
            f.rows += rows
            found = compiled(keys, p.numpy(), f.weights.numpy(), f.bend, f.scale, f.constant)
            slope = torch.from_numpy(numpy.array(found)) * p * (1 - p)
            return torch.stack([-slope, slope], -1)

        return from_gradient(gradient)

    return build


ENTRIES = (
    *(
        Entry(
            f"genjax: {name}, 2 categories",
            "genjax",
            "genjax",
            UNBIASED,
            audited(flip(name), BINARY),
        )
        for name in ("flip_reinforce", "flip_mvd")
    ),
    Entry(
        "genjax: flip_enum, 2 categories",
        "genjax",
        "genjax",
        "exact",
        audited(flip("flip_enum"), BINARY),
    ),
)
