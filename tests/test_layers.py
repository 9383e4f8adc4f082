"""Stochastic layers against enumeration, under the suite's one false-alarm rate
(`tests.statistics`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import arsm
from arsm.layers import Layer, LayersEstimate, _draw, estimate_layers
from tests.statistics import deviations

SAMPLES = 1 << 14
EVALUATIONS = ("packed", "dense")


@dataclass(frozen=True)
class Network:
    """Layers of K_t variables of C_t categories; layer t's logits are linear in the one-hot samples
    above it.

    All parameters travel as context, a row of their own for every row of the batch, so that the
    gradients of the rows are independent samples.
    """

    sizes: tuple[tuple[int, int], ...]
    scale: float = 1.0

    def parameters(self) -> tuple[Tensor, ...]:
        """A weight [inputs, K_t C_t] for each layer, and f's theta [sum K_t C_t]."""
        generator = torch.Generator().manual_seed(len(self.sizes))
        widths = [k * c for k, c in self.sizes]
        shapes = [(1 + sum(widths[:t]), width) for t, width in enumerate(widths)] + [(sum(widths),)]
        return tuple(
            self.scale * torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in shapes
        )

    def one_hot(self, zs: Sequence[Tensor]) -> list[Tensor]:
        return [
            arsm.one_hot(z, c, torch.float64).flatten(1)
            for z, (_, c) in zip(zs, self.sizes, strict=False)
        ]

    def layer(self, t: int, zs: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        weight = parameters[t]
        inputs = torch.cat([weight.new_ones(weight.shape[0], 1), *self.one_hot(zs)], -1)
        return torch.einsum("ni,nio->no", inputs, weight).unflatten(-1, self.sizes[t])

    @property
    def layers(self) -> list[Layer]:
        return [lambda zs, *p, t=t: self.layer(t, zs, *p) for t in range(len(self.sizes))]

    def f(self, zs: Sequence[Tensor], logits: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        """A cosine of all layers together, less ln q as an ELBO has it."""
        inner = (torch.cat(self.one_hot(zs), -1) * parameters[-1]).sum(-1)
        log_q = sum(
            arsm.log_prob(phi.log_softmax(-1), z).sum(-1) for phi, z in zip(logits, zs, strict=True)
        )
        return torch.cos(inner) + 0.3 * inner.square() - log_q

    def truth(self) -> tuple[Tensor, ...]:
        """E[f] and its gradient in all parameters, by enumeration and autograd."""
        parameters = tuple(p.requires_grad_() for p in self.parameters())
        ranges = [range(c) for k, c in self.sizes for _ in range(k)]
        paths = torch.tensor(list(itertools.product(*ranges)))
        zs = paths.split([k for k, _ in self.sizes], -1)
        rows = tuple(p.expand(len(paths), *p.shape) for p in parameters)
        logits = [self.layer(t, zs[:t], *rows) for t in range(len(zs))]
        log_q = sum(
            arsm.log_prob(phi.log_softmax(-1), z).sum(-1) for phi, z in zip(logits, zs, strict=True)
        )
        assert isinstance(log_q, Tensor)
        value = (log_q.exp() * self.f(zs, logits, *rows)).sum()
        return (value.detach(), *torch.autograd.grad(value, parameters))


TWO = Network(((2, 3), (2, 3)))
THREE = Network(((1, 3), (2, 2), (1, 4)))


class Drawn(NamedTuple):
    out: LayersEstimate
    samples: tuple[Tensor, ...]
    """Values [n], then gradients [n, ...] of all parameters."""


def draw(
    estimators: arsm.Estimator | list[arsm.Estimator],
    network: Network,
    evaluation: str,
    n: int = SAMPLES,
) -> Drawn:
    parameters = tuple(p.repeat(n, *(1,) * p.ndim).requires_grad_() for p in network.parameters())
    out = estimate_layers(
        estimators,
        network.layers,
        network.f,
        *parameters,
        generator=torch.Generator().manual_seed(1),
        evaluation=evaluation,  # pyright: ignore[reportArgumentType]
        max_rows=1 << 14,
    )
    return Drawn(out, (out.value.detach(), *torch.autograd.grad(out.value.sum(), parameters)))


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("network", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize(
    "words",
    [
        "arsm",
        "arsm:pooled=True",
        "ars",
        "rloo:samples=3",
        "rloo:samples=4,live=1",
        "reinforce",
        "2*arsm",
    ],
)
def test_all_parameters_get_the_gradient_of_the_expectation(
    words: str, network: Network, evaluation: str
) -> None:
    drawn = draw(arsm.estimator(words), network, evaluation)
    for samples, mean in zip(drawn.samples, network.truth(), strict=True):
        assert float(deviations(samples, mean).max()) <= 1


@pytest.mark.parametrize(
    ("network", "estimators"),
    [
        (THREE, [arsm.Reinforce(), arsm.Exact(), arsm.ARSM()]),
        (TWO, [arsm.ARSM(), arsm.Exact()]),
        (TWO, [arsm.ARSM(), arsm.RLOO(samples=3)]),
    ],
)
def test_each_layer_may_have_its_own_estimator(
    network: Network, estimators: list[arsm.Estimator]
) -> None:
    drawn = draw(estimators, network, "packed")
    for samples, mean in zip(drawn.samples, network.truth(), strict=True):
        assert float(deviations(samples, mean).max()) <= 1


@pytest.mark.parametrize("network", [TWO, THREE], ids=["two", "three"])
def test_exact_layers_enumerate_all_paths(network: Network) -> None:
    for samples, mean in zip(
        draw(arsm.Exact(), network, "packed", n=1).samples, network.truth(), strict=True
    ):
        torch.testing.assert_close(samples[0], mean, rtol=1e-12, atol=1e-12)


def test_layers_drawn_afresh_below_every_query_agree_too() -> None:
    """Algorithm 2 as printed: equal queries are evaluated once each, and the layer above has more
    variance.
    """
    parameters = tuple(p.repeat(SAMPLES, *(1,) * p.ndim).requires_grad_() for p in TWO.parameters())
    generator = torch.Generator().manual_seed(1)
    out = estimate_layers(
        arsm.ARSM(),
        TWO.layers,
        TWO.f,
        *parameters,
        generator=generator,
        max_rows=1 << 14,
        afresh=True,
    )
    samples = (out.value.detach(), *torch.autograd.grad(out.value.sum(), parameters))
    for each, mean in zip(samples, TWO.truth(), strict=True):
        assert float(deviations(each, mean).max()) <= 1
    assert (out.layers[0].info["distinct"] == 4).all()
    shared = draw(arsm.ARSM(), TWO, "packed").out
    assert float(shared.layers[0].info["distinct"].float().mean()) < 4
    assert out.layers[0].grad is not None
    assert shared.layers[0].grad is not None
    assert float(out.layers[0].grad.var(0).sum() / shared.layers[0].grad.var(0).sum()) > 1.1


@pytest.mark.parametrize("estimator", [arsm.ARSM(), arsm.RLOO(samples=3)], ids=str)
def test_a_state_is_passed_down_and_selected_for_branches(estimator: arsm.Estimator) -> None:
    """The one-hot samples so far as the state: the same numbers as from zs, and no layer runs twice
    for a branch.
    """
    network = THREE
    parameters = tuple(p.repeat(50, *(1,) * p.ndim).requires_grad_() for p in network.parameters())
    calls: list[int] = []

    def layer(
        t: int, state: dict[str, Tensor], zs: list[Tensor], *p: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(t)
        above = [state["inputs"], network.one_hot(zs)[-1]] if zs else [state["inputs"]]
        inputs = torch.cat(above, -1)
        return torch.einsum("ni,nio->no", inputs, p[t]).unflatten(-1, network.sizes[t]), {
            "inputs": inputs
        }

    plain, with_state = (
        estimate_layers(
            estimator,
            layers,
            network.f,
            *parameters,
            state=state,
            generator=torch.Generator().manual_seed(1),
        )
        for layers, state in (
            (network.layers, None),
            (
                [lambda *x, t=t: layer(t, *x) for t in range(3)],
                {"inputs": torch.ones(50, 1, dtype=torch.float64)},
            ),
        )
    )
    torch.testing.assert_close(plain.value, with_state.value)
    for a, b in zip(
        torch.autograd.grad(plain.value.sum(), parameters),
        torch.autograd.grad(with_state.value.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert calls.count(0) == 1  # nothing above a branch is computed twice


def test_every_layer_returns_the_logits_of_the_true_path() -> None:
    out = draw(arsm.ARSM(), TWO, "packed", n=3).out
    parameters = tuple(p.repeat(3, *(1,) * p.ndim) for p in TWO.parameters())
    for t, layer in enumerate(out.layers):
        assert layer.logits is not None
        assert layer.logits.requires_grad
        torch.testing.assert_close(
            layer.logits, TWO.layer(t, [x.z for x in out.layers[:t]], *parameters)
        )


def test_gradients_through_a_fixed_draw_of_the_layers_below_are_caught() -> None:
    """The test can fail: a layer that hides from f what its sample does to the layers below."""
    blind = Network(TWO.sizes)
    layers = [blind.layers[0], lambda zs, *p: blind.layer(1, [torch.zeros_like(zs[0])], *p)]
    parameters = tuple(
        p.repeat(SAMPLES, *(1,) * p.ndim).requires_grad_() for p in blind.parameters()
    )
    generator = torch.Generator().manual_seed(1)
    out = estimate_layers(arsm.ARSM(), layers, blind.f, *parameters, generator=generator)
    gradients = torch.autograd.grad(out.value.sum(), parameters)
    wrong = [
        float(deviations(g, mean).max())
        for g, mean in zip(gradients, blind.truth()[1:], strict=True)
    ]
    assert max(wrong) > 1


def test_where_all_pseudo_actions_agree_f_is_evaluated_once_and_the_gradient_is_zero() -> None:
    """f is random given the layer above, yet sharing one draw makes the estimate exactly zero."""
    rows, evaluated = 8, []
    certain = torch.zeros(rows, 2, 3).index_fill(-1, torch.tensor([1]), 80.0).requires_grad_()

    def f(zs: list[Tensor], logits: list[Tensor], x: Tensor) -> Tensor:
        evaluated.append(len(x))
        return zs[1].sum(-1) + x

    layers = [lambda zs, x: certain, lambda zs, x: torch.zeros(len(x), 20, 7)]
    out = estimate_layers(
        arsm.ARSM(), layers, f, torch.arange(8.0), generator=torch.Generator().manual_seed(0)
    )
    (gradient,) = torch.autograd.grad(out.value.sum(), certain)
    assert not gradient.any()
    assert out.layers[0].info["distinct"].tolist() == [1] * rows
    assert sum(evaluated) == int(out.layers[1].info["distinct"].sum())


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("max_rows", [7, None])
@pytest.mark.parametrize(
    "words", ["arsm", "arsm:pooled=True", "ars", "rloo:samples=5,live=1", "local-expectation"]
)
def test_layers_that_a_pseudo_vector_does_not_reach_are_those_of_the_true_path(
    words: str, max_rows: int | None, evaluation: str
) -> None:
    """The second layer does not hear of the first, nor f: all paths of a row have one value, and
    the gradient is 0.
    """
    top = torch.randn(
        20, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    x = torch.randn(20, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layers = [
        lambda zs, x: top,
        lambda zs, x: x[:, 0],
        lambda zs, x: x[:, 1] + zs[1].sum(-1)[:, None, None],
    ]
    seen = []

    def f(zs: list[Tensor], logits: list[Tensor], x: Tensor) -> Tensor:
        seen.append(zs[0])
        return zs[1].sum(-1) + 7.0 * zs[2].sum(-1) + x.sum((-3, -2, -1))

    out = estimate_layers(
        arsm.estimator(words),
        layers,
        f,
        x,
        generator=torch.Generator().manual_seed(2),
        evaluation=evaluation,  # pyright: ignore[reportArgumentType]
        max_rows=max_rows,
    )
    gradient = out.layers[0].grad
    assert gradient is not None
    assert float(gradient.abs().max()) < 1e-12
    assert torch.cat(seen).unique(dim=0).shape[0] > 1


def test_common_noise_lowers_the_variance_of_the_layers_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against fresh draws below every pseudo vector; the lowest layer's variance is the same."""
    # the less a layer changes those below, the more there is to gain
    weak = Network(TWO.sizes, scale=0.5)
    common = draw(arsm.ARSM(), weak, "packed").out
    monkeypatch.setattr(
        "arsm.layers._draw", lambda estimator, logits, noise, g: _draw(estimator, logits, None, g)
    )
    fresh = draw(arsm.ARSM(), weak, "packed").out
    upper, lower = (
        float(a.grad.var(0).sum() / b.grad.var(0).sum())
        for a, b in zip(fresh.layers, common.layers, strict=True)
        if a.grad is not None and b.grad is not None
    )
    assert upper > 1.2
    assert 0.95 < lower < 1.05


def test_the_value_is_f_at_the_true_path() -> None:
    out = draw(arsm.ARSM(), THREE, "packed", n=50).out
    zs = [layer.z for layer in out.layers]
    rows = tuple(p.expand(50, *p.shape) for p in THREE.parameters())
    logits = [THREE.layer(t, zs[:t], *rows) for t in range(len(zs))]
    torch.testing.assert_close(out.value.detach(), THREE.f(zs, logits, *rows))


def test_the_true_path_comes_back_whole_when_rows_are_evaluated_in_chunks() -> None:
    parameters = tuple(p.repeat(50, *(1,) * p.ndim) for p in THREE.parameters())
    out = estimate_layers(arsm.ARSM(), THREE.layers, THREE.f, *parameters, max_rows=7)
    assert [tuple(layer.z.shape) for layer in out.layers] == [(50, k) for k, _ in THREE.sizes]
    logits = [THREE.layer(t, [layer.z for layer in out.layers[:t]], *parameters) for t in range(3)]
    torch.testing.assert_close(
        out.value, THREE.f([layer.z for layer in out.layers], logits, *parameters)
    )


def test_the_loss_of_learned_parts_is_the_mean_over_rows_in_chunks_of_any_size() -> None:
    parameters = tuple(p.repeat(5, *(1,) * p.ndim) for p in TWO.parameters())
    out = estimate_layers(
        [arsm.ARSM(), arsm.RELAX()], TWO.layers, TWO.f, *parameters, max_rows=4
    ).layers[1]
    assert out.grad is not None
    assert out.estimator_loss is not None
    torch.testing.assert_close(out.estimator_loss.detach(), out.grad.square().sum((-2, -1)).mean())


def test_one_layer_is_estimate() -> None:
    network = Network(((3, 4),))
    parameters = tuple(p.repeat(5, *(1,) * p.ndim) for p in network.parameters())
    logits = network.layer(0, [], *parameters)
    both = [
        estimate_layers(
            arsm.ARSM(),
            network.layers,
            network.f,
            *parameters,
            generator=torch.Generator().manual_seed(0),
        ).layers[0],
        arsm.estimate(
            arsm.ARSM(),
            logits,
            lambda z, phi, *p: network.f([z], [phi], *p),
            logits,
            *parameters,
            generator=torch.Generator().manual_seed(0),
        ),
    ]
    assert both[0].grad is not None
    assert both[1].grad is not None
    assert torch.equal(both[0].grad, both[1].grad)
    assert torch.equal(both[0].value, both[1].value)


def test_relaxing_estimators_run_one_differentiable_path() -> None:
    """The gradient is that of f at the relaxed path, by finite differences under the same noise."""
    network, estimator = TWO, arsm.estimator("gumbel-softmax:temperature=0.7")
    parameters = tuple(p.unsqueeze(0).requires_grad_() for p in network.parameters())
    evaluated = []

    def value(*parameters: Tensor) -> Tensor:
        def f(zs: list[Tensor], logits: list[Tensor], *p: Tensor) -> Tensor:
            evaluated.append(len(p[0]))
            return (torch.cat([z.flatten(1) for z in zs], -1) * p[-1]).sum(-1).cos()

        generator = torch.Generator().manual_seed(3)
        return estimate_layers(estimator, network.layers, f, *parameters, generator=generator).value

    assert torch.autograd.gradcheck(value, parameters)
    assert set(evaluated) == {1}


@pytest.mark.parametrize("words", ["arsm:pooled=True", "gumbel-softmax"])
def test_dense_layers_trace_as_one_graph_and_vmap(words: str) -> None:
    estimator, network = arsm.estimator(words), TWO
    stacked = tuple(p.expand(3, 5, *p.shape).clone().requires_grad_() for p in network.parameters())

    def value(*parameters: Tensor) -> Tensor:
        out = estimate_layers(
            estimator, network.layers, network.f, *parameters, evaluation="dense", max_rows=None
        )
        return out.value

    def total(*parameters: Tensor) -> Tensor:
        return torch.vmap(value, randomness="different")(*parameters)

    traced = torch.compile(total, fullgraph=True, dynamic=False, backend="eager")
    for gradient in torch.autograd.grad(traced(*stacked).sum(), stacked):
        assert bool(gradient.isfinite().all())
        assert bool((gradient[0] != gradient[1]).any())
