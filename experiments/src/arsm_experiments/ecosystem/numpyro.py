"""NumPyro's ELBOs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

OLD = "0.10.1"
"""A release whose TraceGraph_ELBO had an extra d ln q (numpyro 1512). Its mean is 0 where
probabilities sum to 1, as those of logits do: noise here, and a bias in free probabilities. It does
not run: its provenance tracking needs a jax before 0.4.12, and PyPI has no jaxlib before 0.4.13.
"""


def numpyro_elbo(name: str, enumerate_: bool = False) -> Callable[[], Loss]:
    """The ELBO of `arsm_experiments.ecosystem.pyro`; the key of each call comes from torch's
    generator.
    """

    def build() -> Loss:
        jax, numpy = from_package("jax"), from_package("numpy")
        numpyro, infer = from_package("numpyro"), from_package("numpyro.infer")
        distributions = from_package("numpyro.distributions")
        jnp = jax.numpy

        def value(z: Any, weights: Any, bend: Any, scale: Any, constant: Any) -> Any:
            u = sum(weights[k][z[..., k]] for k in range(weights.shape[0]))
            return scale * (u + bend * jnp.cos(3 * u)) + constant

        def objective(logits: Any, key: Any, *f: Any) -> Any:
            rows, variables, _ = logits.shape

            def sample(phi: Any, **options: Any) -> list[Any]:
                return [
                    numpyro.sample(f"z{k}", distributions.Categorical(logits=phi[:, k]), **options)
                    for k in range(variables)
                ]

            def model() -> None:
                with numpyro.plate("rows", rows):
                    z = sample(jax.lax.stop_gradient(logits))
                    numpyro.factor("f", value(jnp.stack(jnp.broadcast_arrays(*z), -1), *f))

            def guide() -> None:
                with numpyro.plate("rows", rows):
                    sample(logits, **({"infer": {"enumerate": "parallel"}} if enumerate_ else {}))

            elbo = getattr(infer, name)(**({"max_plate_nesting": 1} if enumerate_ else {}))
            return elbo.loss(key, {}, model, guide)

        compiled = jax.jit(jax.grad(objective))

        def gradient(logits: Tensor, f: Function) -> Tensor:
            key = jax.random.PRNGKey(int(torch.randint(2**31 - 1, ())))
            numbers = (f.weights.numpy(), f.bend, f.scale, f.constant)
            f.rows += len(logits)
            found = compiled(logits.detach().numpy(), key, *numbers)
            return -torch.from_numpy(numpy.array(found))

        return from_gradient(gradient)

    return build


ENTRIES = (
    Entry(
        "numpyro: Trace_ELBO",
        "numpyro",
        "numpyro",
        "reparameterised latents only; discrete ones are not supported",
        audited(numpyro_elbo("Trace_ELBO")),
        ("numpyro", "funsor"),
    ),
    Entry(
        "numpyro: TraceGraph_ELBO",
        "numpyro",
        "numpyro",
        UNBIASED,
        audited(numpyro_elbo("TraceGraph_ELBO")),
        ("numpyro", "funsor"),
    ),
    Entry(
        "numpyro: TraceEnum_ELBO, enumerated guide, one variable",
        "numpyro",
        "numpyro",
        "exact",
        audited(numpyro_elbo("TraceEnum_ELBO", True), ONE_VARIABLE),
        ("numpyro", "funsor"),
    ),
    Entry(
        f"numpyro {OLD}: TraceGraph_ELBO",
        "numpyro",
        "numpyro",
        UNBIASED,
        audited(numpyro_elbo("TraceGraph_ELBO")),
        # the last versions that it runs with
        (f"numpyro=={OLD}", "jax==0.4.13", "jaxlib==0.4.13", "scipy==1.11.4", "numpy==1.26.4"),
    ),
)
