"""The multi-sample bound through layers against enumeration, under the suite's one false-alarm
rate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm.bound import estimate_bound
from tests.statistics import deviations
from tests.test_layers import THREE, TWO, Network

ROWS = 1 << 14


def log_q(zs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
    """[N]: of whole paths."""
    each = [
        arsm.log_prob(phi.log_softmax(-1), z).sum(-1) for phi, z in zip(logits, zs, strict=True)
    ]
    return torch.stack(each).sum(0)


def truth(network: Network, f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """E[ln 1/2 (exp f_1 + exp f_2)] and its gradient in all parameters, over all pairs of paths."""
    parameters = tuple(p.requires_grad_() for p in network.parameters())
    paths = torch.tensor(
        list(itertools.product(*(range(c) for k, c in network.sizes for _ in range(k))))
    )
    zs = list(paths.split([k for k, _ in network.sizes], -1))
    rows = tuple(p.expand(len(paths), *p.shape) for p in parameters)
    logits = [network.layer(t, zs[:t], *rows) for t in range(len(zs))]
    q, values = log_q(zs, logits).exp(), f(zs, logits, *rows)
    bound = torch.logaddexp(values.unsqueeze(-1), values) - math.log(2)
    expected = (q.unsqueeze(-1) * q * bound).sum()
    return (expected.detach(), *torch.autograd.grad(expected, parameters))


def deviation(network: Network, f: Callable[..., Tensor]) -> float:
    """Of value and gradients, the largest."""
    parameters = tuple(
        p.repeat(ROWS, *(1,) * p.ndim).requires_grad_() for p in network.parameters()
    )
    generator = torch.Generator().manual_seed(1)
    out = estimate_bound(arsm.VIMCO(samples=2), network.layers, f, *parameters, generator=generator)
    samples = (out.value.detach(), *torch.autograd.grad(out.value.sum(), parameters))
    expected = truth(network, network.f)
    return max(
        float(deviations(found, mean).max()) for found, mean in zip(samples, expected, strict=True)
    )


@pytest.mark.parametrize("network", [TWO, THREE], ids=["two", "three"])
def test_all_parameters_get_the_gradient_of_the_bound(network: Network) -> None:
    assert deviation(network, network.f) <= 1


def test_a_log_q_without_its_graph_is_caught() -> None:
    """In a bound of several samples that part of the gradient is not zero in the mean."""
    assert (
        deviation(TWO, lambda zs, logits, *p: TWO.f(zs, [phi.detach() for phi in logits], *p)) > 1
    )


def test_one_layer_is_vimco() -> None:
    network = Network(((3, 4),))
    parameters = tuple(p.repeat(5, *(1,) * p.ndim).requires_grad_() for p in network.parameters())
    out = estimate_bound(arsm.VIMCO(samples=3), network.layers, network.f, *parameters)
    logits = network.layer(0, [], *parameters)
    queries = arsm.extend.Queries(
        out.z.movedim(1, 0), out.z, torch.arange(3).expand(5, 3).T, torch.ones(3)
    )
    rows = tuple(p.repeat(3, *(1,) * (p.ndim - 1)) for p in parameters)
    values = network.f([out.z.movedim(1, 0).flatten(0, 1)], [logits.repeat(3, 1, 1)], *rows).view(
        3, 5
    )
    torch.testing.assert_close(out.value, arsm.VIMCO(samples=3).value(queries, values))
    signals = arsm.VIMCO(samples=3).tell(logits, queries, values.detach())
    assert signals is not None
    expected = torch.autograd.grad(
        (out.value.detach() + values.logsumexp(0)).sum(), logits, retain_graph=True
    )[0]
    assert out.info["distinct"].tolist() == [3] * 5
    total = torch.autograd.grad(out.value.sum(), parameters)[0]
    (by_definition,) = torch.autograd.grad(logits, parameters[0], grad_outputs=signals + expected)
    torch.testing.assert_close(total, by_definition)


def test_layers_and_f_may_write_into_their_samples() -> None:
    network = Network(((2, 3), (2, 2)))
    parameters = tuple(p.repeat(5, *(1,) * p.ndim).requires_grad_() for p in network.parameters())

    def writing(function: Any) -> Any:
        def run(zs: list[Tensor], *rest: Any) -> Tensor:
            out = function(zs, *rest)
            for z in zs:
                z.zero_()
            return out

        return run

    def estimated(layers: Any, f: Any) -> tuple[Tensor, ...]:
        out = estimate_bound(
            arsm.VIMCO(3), layers, f, *parameters, generator=torch.Generator().manual_seed(0)
        )
        return out.value, out.z, *torch.autograd.grad(out.value.sum(), parameters)

    def f(zs: list[Tensor], logits: list[Tensor], *parameters: Tensor) -> Tensor:
        return torch.cos((torch.cat(network.one_hot(zs), -1) * parameters[-1]).sum(-1))

    expected = estimated(network.layers, f)
    found = estimated([writing(layer) for layer in network.layers], writing(f))
    assert all(map(torch.equal, found, expected))


def test_values_of_the_wrong_shape_are_refused_in_a_sentence() -> None:
    values: list[tuple[Any, str]] = [
        (torch.zeros(4, 1), r"torch.float32 \[4, 1\]"),
        (torch.zeros(4).long(), r"torch.int64 \[4\]"),
        (0.5, "float"),
    ]
    for value, words in values:
        with pytest.raises(
            ValueError, match=rf"one floating value per path, \[4\], but returned {words}"
        ):
            estimate_bound(
                arsm.VIMCO(samples=2), [lambda zs: torch.zeros(2, 1, 3)], lambda zs, phi, v=value: v
            )


@pytest.mark.parametrize(
    "estimate",
    [partial(estimate_bound, arsm.VIMCO(2)), partial(arsm.estimate_layers, arsm.RLOO(2))],
)
@pytest.mark.parametrize(
    "context", [(torch.zeros(()),), (torch.zeros(4), torch.zeros(5)), ([1, 2],)], ids=str
)
def test_context_that_has_no_rows_is_refused_in_a_sentence(estimate: Any, context: Any) -> None:
    with pytest.raises(ValueError, match=r"Context \d must be a tensor .*, but is"):
        estimate(
            [lambda zs, *context: torch.zeros(4, 2, 3)],
            lambda zs, phi, *context: zs[0].sum(-1).float(),
            *context,
        )


def test_rows_whose_logits_or_values_are_not_finite_are_flagged() -> None:
    def f(zs: list[Tensor], logits: list[Tensor], x: Tensor) -> Tensor:
        return x[:, 0] + zs[1].sum(-1)

    x = torch.zeros(5, 2)
    x[1, 0], x[3, 1] = torch.inf, torch.nan
    layers = [lambda zs, x: torch.zeros(5, 2, 3), lambda zs, x: x[:, 1:, None].expand(-1, 2, 3)]
    out = estimate_bound(arsm.VIMCO(samples=3), layers, f, x)
    assert out.info["finite"].tolist() == [True, False, True, False, True]


def test_what_estimate_layers_refuses_is_refused_here() -> None:
    def f(zs: list[Tensor], logits: list[Tensor]) -> Tensor:
        return zs[0].sum(-1).float()

    for wrong, sentence in (
        (arsm.RLOO(4), "RLOO estimates the gradient of E"),
        ("vimco", "must be an estimator"),
        (arsm.Average(arsm.VIMCO(2), 2), "Average does not weigh whole samples"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            estimate_bound(wrong, [lambda zs: torch.zeros(2, 2, 3)], f)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least one layer"):
        estimate_bound(arsm.VIMCO(2), [], f)
    with pytest.raises(TypeError, match="a list of functions that return logits"):
        estimate_bound(arsm.VIMCO(2), torch.zeros(2, 2, 3), f)  # pyright: ignore[reportArgumentType]
    top, whole = (
        (lambda zs: torch.zeros(2, 2, 3)),
        (lambda zs: torch.zeros(4 if zs else 2, 2, 3).long()),
    )
    for layers in ([whole], [top, whole]):
        with pytest.raises(
            TypeError, match=r"logits must be a floating tensor .* convert them with \.float"
        ):
            estimate_bound(arsm.VIMCO(2), layers, f)
    with pytest.raises(ValueError, match=r"Layer 0 must return logits"):
        estimate_bound(arsm.VIMCO(2), [lambda zs: torch.zeros(2, 6)], f)
