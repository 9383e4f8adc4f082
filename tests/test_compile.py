"""Dense evaluation as one compiled graph, and mapped over stacked replicas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.utils._pytree import tree_map

import arsm
from arsm.types import Noise
from tests.roster import ROSTER, Entry

ROWS = 6


def make_model(variables: int, categories: int, seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "encoder": nn.Linear(5, variables * categories),
            "decoder": nn.Sequential(
                nn.Linear(variables * categories, 7), nn.Tanh(), nn.Linear(7, 5)
            ),
        }
    ).double()


class Loss(nn.Module):
    """A small variational model: noise and data in, the negative mean value out."""

    def __init__(
        self, estimator: arsm.Estimator, variables: int, categories: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.estimator, self.shape = estimator, (variables, categories)
        self.model = make_model(variables, categories, seed)

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        one_hot = arsm.one_hot(z, self.shape[1], torch.float64)
        return -(self.model["decoder"](one_hot.flatten(-2)) - x).square().sum(-1)

    def forward(self, x: Tensor, noise: Noise) -> Tensor:
        logits = self.model["encoder"](x).unflatten(-1, self.shape)
        out = arsm.estimate(
            self.estimator, logits, self.f, x, noise=noise, evaluation="dense", max_rows=None
        )
        return -out.value.mean()


def inputs(loss: Loss, seed: int) -> tuple[Tensor, Noise]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
    return x, loss.estimator.noise(torch.zeros(ROWS, *loss.shape, dtype=torch.float64), generator)


def gradients(
    loss: nn.Module, call: Callable[..., Tensor], x: Tensor, noise: Noise
) -> list[Tensor]:
    value = call(x, noise)
    return [value.detach(), *torch.autograd.grad(value, list(loss.parameters()))]


CASES = [
    ("arsm", 1, 6),
    ("arsm", 3, 4),
    ("arsm:pooled=True", 3, 4),
    ("ars", 3, 4),
    ("rloo:ridge=1.0", 3, 4),
    ("carms", 3, 4),
]


# "aot_eager" traces everything and generates no code, in a tenth of the time
BACKENDS = [("aot_eager", case) for case in CASES]
BACKENDS += [
    pytest.param("inductor", case, marks=() if case == CASES[1] else pytest.mark.slow)
    for case in CASES
]


@pytest.mark.parametrize(
    ("backend", "case"), BACKENDS, ids=lambda x: x if isinstance(x, str) else " ".join(map(str, x))
)
def test_one_graph_with_the_same_numbers_and_no_second_compilation(
    backend: str, case: tuple[str, int, int]
) -> None:
    torch.compiler.reset()
    words, variables, categories = case
    loss = Loss(arsm.estimator(words), variables, categories)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for seed in range(3):
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            found = gradients(loss, compiled, *inputs(loss, seed))
        torch.testing.assert_close(
            found, gradients(loss, loss, *inputs(loss, seed)), rtol=1e-10, atol=1e-12
        )


def fitting_loss(entry: Entry, seed: int = 0) -> Loss:
    size = next(size for size in ((3, 4), (1, 4), (3, 2)) if entry.fits(*size))
    return Loss(entry.make(*size), *size, seed)


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_replicas_mapped_are_replicas_one_by_one(entry: Entry) -> None:
    replicas = [fitting_loss(entry, seed) for seed in range(3)]
    drawn = [inputs(loss, seed) for seed, loss in enumerate(replicas)]
    expected = [gradients(loss, loss, *pair) for loss, pair in zip(replicas, drawn, strict=True)]
    parameters, buffers = stack_module_state(replicas)  # pyright: ignore[reportArgumentType]

    def value(parameters: dict[str, Tensor], x: Tensor, noise: Noise) -> Tensor:
        return functional_call(replicas[0], (parameters, buffers), (x, noise))

    stacked = tree_map(lambda *parts: torch.stack(parts), *drawn)
    by_parameter, values = vmap(grad_and_value(value))(parameters, *stacked)
    if replicas[0].estimator.vmappable:
        torch.testing.assert_close(vmap(value)(parameters, *stacked), values)
    for i, loss in enumerate(replicas):
        found = [
            values[i].detach(),
            *(by_parameter[name][i].detach() for name, _ in loss.named_parameters()),
        ]
        torch.testing.assert_close(found, expected[i], rtol=1e-10, atol=1e-12)
