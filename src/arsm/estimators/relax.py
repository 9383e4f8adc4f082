"""RELAX: REINFORCE with a learned network as its control variate."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from arsm.checks import check_temperature
from arsm.draws import one_sample
from arsm.noise import argmin_sample, race_noise
from arsm.relaxations import perturbed, relaxed, tied_gradient
from arsm.scores import probabilities
from arsm.types import Estimator, Queries


class ZeroNetwork(nn.Module):
    """A network with one smooth hidden layer, [N, ...] -> [N].

    It starts as the constant 0: a random control variate would add variance. Its input
    size comes from the first logits that it sees: estimate once before `torch.compile`
    or `vmap`.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = nn.LazyLinear(hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def value(self, x: Tensor) -> Tensor:
        """The network's value in every row: [N]."""
        x = x.flatten(1).to(self.out.weight.dtype)
        return self.out(self.hidden(x).tanh()).squeeze(-1)


class MLPControl(ZeroNetwork):
    """A network of relaxed sample and probabilities, (s, p) -> [N], with which RELAX
    starts as REINFORCE.
    """

    def forward(self, s: Tensor, p: Tensor) -> Tensor:
        return self.value(torch.cat([s, p], -1))


@dataclass(frozen=True, eq=False)
class RELAX(Estimator):
    """Score only what a learned c leaves over, and add back c's gradient.

        g = [f(z) - c(s)] dln q(z)/dphi + dc/dphi - dc~/dphi,    s = softmax((phi - ln pi) / tau)

    with the noises of c and c~ tied as in `REBAR`, whose formula this shares. One
    evaluation of f, which need not be differentiable. Unbiased for all c, which is
    learned: `estimate` returns the squared norm of g as `estimator_loss`, which depends
    on c's parameters alone. Reference: Grathwohl, Choi, Wu, Roeder and Duvenaud,
    Backpropagation through the void: optimizing control variates for black-box gradient
    estimation, ICLR 2018.

    Attributes:
        control: c(s, p) -> [N], row by row and twice differentiable in s: the relaxed
            sample s [N, K, C] and the probabilities p = softmax(phi) [N, K, C], by
            which it can tell the rows of a batch apart.
        temperature: tau, the temperature of the relaxed sample.
        learned: The learned parts, for the optimiser, `.to(device)` and checkpoints;
            empty for most estimators.
    """

    control: nn.Module = field(default_factory=MLPControl)
    temperature: float = 0.5

    learned: nn.ModuleList = field(init=False, repr=False)

    unbiased = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not isinstance(self.control, nn.Module):
            raise TypeError(
                f"control must be an nn.Module (s, p) -> [N], but is {type(self.control).__name__}."
            )
        object.__setattr__(self, "learned", nn.ModuleList([self.control]))

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Tensor:
        """ln pi [*B, K, C]."""
        return race_noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        return one_sample(argmin_sample(logits, noise), aux=noise)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        zeta = perturbed(logits.detach(), queries.aux)
        s = relaxed(zeta, self.temperature)
        rows = (-1, *s.shape[-2:])
        c, slope = self._control_and_slope(s.reshape(rows), probabilities(logits).reshape(rows))
        residual = values[0] - c.reshape(values[0].shape)
        return tied_gradient(
            logits, queries.z, zeta, self.temperature, s, slope.reshape(s.shape), residual
        )

    def _control_and_slope(self, s: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """c [N] and dc/ds [N, K, C], both attached to c's parameters."""
        give_size(self.control, "RELAX", s, p)

        # rows are independent, so that the slope of the sum holds the slope of each
        def total(s: Tensor) -> tuple[Tensor, Tensor]:
            c = self.control(s, p)
            if c.shape != s.shape[:1]:
                raise ValueError(
                    f"control must return one value per row, shape {list(s.shape[:1])}, but "
                    f"returned {list(c.shape)}."
                )
            return c.sum(), c

        # torch.func, unlike torch.autograd.grad, works inside vmap
        slope, c = torch.func.grad(total, has_aux=True)(s)
        return c, slope


def give_size(network: nn.Module, owner: str, *inputs: Tensor) -> None:
    """Give a lazy network of an estimator its size, from its first inputs."""
    if not any(isinstance(each, UninitializedParameter) for each in network.parameters()):
        return
    # private, so not imported at the top
    from torch._C._functorch import is_functorch_wrapped_tensor

    # parameters created here would not outlive the transform
    if is_functorch_wrapped_tensor(inputs[0]):
        raise RuntimeError(
            f"{owner}'s network has no size yet; estimate once before you map it by vmap."
        )
    # parameters made in inference mode could never be trained
    with torch.inference_mode(False), torch.no_grad():
        network(*(each.clone() for each in inputs))
