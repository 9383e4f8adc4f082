"""Pyro's ELBOs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arsm.referee.measure import Loss
from arsm.referee.problems import Function
from arsm_experiments.ecosystem.entry import UNBIASED, Entry, audited, from_gradient, from_package


def pyro_elbo(name: str, enumerate_: bool = False) -> Callable[[], Loss]:
    """The ELBO whose prior is the guide's own distribution, detached: its gradient is that of
    E[f].
    """

    def build() -> Loss:
        pyro, infer = from_package("pyro"), from_package("pyro.infer")
        distributions = from_package("pyro.distributions")

        def gradient(logits: Tensor, f: Function) -> Tensor:
            def sample(phi: Tensor) -> list[Tensor]:
                return [
                    pyro.sample(f"z{k}", distributions.Categorical(logits=phi[:, k]))
                    for k in range(phi.shape[1])
                ]

            def model() -> None:
                with pyro.plate("rows", len(logits)):
                    z = sample(logits.detach())
                    pyro.factor("f", f(torch.stack(torch.broadcast_tensors(*z), -1)))

            def guide() -> None:
                with pyro.plate("rows", len(logits)):
                    sample(logits)

            if enumerate_:
                guide = infer.config_enumerate(guide, "parallel")
            elbo = getattr(infer, name)(max_plate_nesting=1)
            if name != "TraceGraph_ELBO":  # loss_and_grads of the others looks for pyro.param sites
                return torch.autograd.grad(-elbo.differentiable_loss(model, guide), logits)[0]
            elbo.loss_and_grads(model, guide)
            assert logits.grad is not None
            return -logits.grad

        return from_gradient(gradient)

    return build


ENTRIES = (
    Entry("pyro: Trace_ELBO", "pyro-ppl", "pyro", UNBIASED, audited(pyro_elbo("Trace_ELBO"))),
    Entry(
        "pyro: TraceGraph_ELBO", "pyro-ppl", "pyro", UNBIASED, audited(pyro_elbo("TraceGraph_ELBO"))
    ),
    Entry(
        "pyro: TraceEnum_ELBO, enumerated guide",
        "pyro-ppl",
        "pyro",
        "exact",
        audited(pyro_elbo("TraceEnum_ELBO", True)),
    ),
)
