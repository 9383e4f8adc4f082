"""Input of `estimate_layers`: what is refused, and what a layer may do with what it gets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm.layers import Layer, LayersEstimate, estimate_layers
from tests.test_layers import EVALUATIONS, Network


def test_wrong_layers_are_refused_in_a_sentence() -> None:
    def f(zs: list[Tensor], logits: list[Tensor], *context: Tensor) -> Tensor:
        return zs[0].sum(-1).float()

    with pytest.raises(ValueError, match="one for each, but there are 2 layers and 1 estimators"):
        estimate_layers([arsm.ARSM()], [lambda zs: torch.zeros(2, 2, 3)] * 2, f)
    for wrong in (torch.zeros(2, 2, 3), [torch.zeros(2, 2, 3)]):
        with pytest.raises(
            TypeError, match=r"a list of functions that return logits.* use arsm\.estimate"
        ):
            estimate_layers(arsm.ARSM(), wrong, f)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Layer 1 must return logits \[2, K, C\]"):
        estimate_layers(
            arsm.ARSM(), [lambda zs: torch.zeros(2, 2, 3), lambda zs: torch.zeros(3, 2, 3)], f
        )
    for estimator in (arsm.VIMCO(), arsm.Average(arsm.VIMCO(), 2)):
        with pytest.raises(
            ValueError, match=r"estimates a multi-sample bound.* arsm\.estimate_bound"
        ):
            estimate_layers(estimator, [lambda zs: torch.zeros(2, 2, 3)] * 2, f)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_value_is_the_same_and_detached(mode: type[torch.no_grad]) -> None:
    weight = torch.randn(6, 6, requires_grad=True)
    x = torch.randn(4, 6)
    layers: list[Layer] = [
        lambda zs, x: x.view(-1, 2, 3),
        lambda zs, x: (arsm.one_hot(zs[0], 3).flatten(1) @ weight).view(-1, 2, 3),
    ]

    def estimated() -> LayersEstimate:
        generator = torch.Generator().manual_seed(1)
        return estimate_layers(
            arsm.ARSM(), layers, lambda zs, logits, x: zs[1].sum(-1).float(), x, generator=generator
        )

    learning = estimated()
    with mode():
        found = estimated()
    assert not found.value.requires_grad
    torch.testing.assert_close(found.value, learning.value.detach(), rtol=0, atol=0)


def test_a_layer_that_forgets_the_state_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Layer 0 must return \(logits, state\) where a state is given"
    ):
        estimate_layers(
            arsm.ARSM(),
            [lambda state, zs: torch.zeros(2, 1, 3)],
            lambda zs, logits: zs[0][:, 0].float(),
            state=torch.ones(2),
        )


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(
    "words", ["arsm", "rloo:samples=3,live=1", "local-expectation", "exact", "reinforce"]
)
def test_a_layer_that_writes_into_its_samples_changes_nothing(words: str, evaluation: Any) -> None:
    """Nor does an f that writes into them."""
    network = Network(((2, 3), (1, 3), (2, 2)))
    parameters = tuple(p.repeat(5, *(1,) * p.ndim).requires_grad_() for p in network.parameters())

    def writing(layer: Layer) -> Layer:
        def run(zs: list[Tensor], *rest: Any) -> Tensor:
            out = layer(zs, *rest)
            for z in zs:
                z.zero_()
            return out

        return run

    def estimated(layers: list[Layer], f: Layer) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        out = estimate_layers(
            arsm.estimator(words),
            layers,
            f,
            *parameters,
            generator=generator,
            evaluation=evaluation,
            max_rows=7,
        )
        return (
            out.value,
            *(layer.z for layer in out.layers),
            *torch.autograd.grad(out.value.sum(), parameters),
        )

    expected = estimated(network.layers, network.f)
    found = estimated([writing(layer) for layer in network.layers], writing(network.f))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("context", [(), (torch.zeros(4, 2),)], ids=["no context", "context"])
@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            torch.zeros(5, 2),
            "state must hold tensors [4, ...], one row for each path, but holds torch.float32 [5, "
            "2].",
        ),
        (
            (torch.zeros(4), {"a": torch.zeros(3)}),
            "state must hold tensors [4, ...], one row for each path, but holds",
        ),
        (
            [torch.zeros(4), 7],
            "state must hold tensors [4, ...], one row for each path, but holds int.",
        ),
    ],
)
def test_a_state_of_other_rows_is_refused(
    state: Any, context: tuple[Tensor, ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        estimate_layers(
            arsm.ARSM(),
            [lambda state, zs, *context: (torch.zeros(4, 2, 3), state)],
            lambda zs, logits, *context: zs[0].sum(-1).float(),
            *context,
            state=state,
        )


def test_a_layer_that_loses_rows_of_its_state_is_refused() -> None:
    layers = [
        lambda state, zs: (torch.zeros(4, 2, 3), state[:3]),
        lambda state, zs: (torch.zeros(4, 2, 3), state),
    ]
    with pytest.raises(ValueError, match=r"The state below layer 0 must hold tensors \[4, ...\]"):
        estimate_layers(
            arsm.ARSM(), layers, lambda zs, logits: zs[0].sum(-1).float(), state=torch.zeros(4)
        )


def test_words_are_no_estimator() -> None:
    words: Any = "arsm"
    with pytest.raises(
        TypeError, match=r"such as arsm.ARSM\(\), but is 'arsm'; arsm.estimator\('arsm'\) makes one"
    ):
        estimate_layers(
            words, [lambda zs: torch.zeros(2, 2, 3)], lambda zs, logits: zs[0].sum(-1).float()
        )


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_given_noise_is_that_of_the_top_layer(evaluation: Any) -> None:
    logits = torch.randn(6, 2, 3)
    noise = arsm.ARSM().noise(logits, torch.Generator().manual_seed(0))
    expected = arsm.ARSM().ask(logits, noise).z
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        layers: list[Layer] = [
            lambda zs: logits,
            lambda zs: zs[0].new_zeros((len(zs[0]), 2, 3), dtype=torch.float32),
        ]
        out = estimate_layers(
            arsm.ARSM(),
            layers,
            lambda zs, _: zs[0].sum(-1).float(),
            noise=noise,
            generator=generator,
            evaluation=evaluation,
        )
        assert torch.equal(out.layers[0].z, expected)
