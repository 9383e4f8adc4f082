"""The perceptron as an operator: its gradient, how it maps, and its Triton kernels in the
interpreter.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from arsm_experiments import perceptron as operators
from arsm_experiments.perceptron import SLOPE, perceptron
from arsm_experiments.vae import Vae, VaeNetwork
from tests.interpreting import assert_equal, needs_triton

Given = tuple[Tensor, list[Tensor], list[Tensor]]


def drawn(replicas: int, rows: int, *sizes: int) -> Given:
    """Inputs, and weights and biases between these sizes, as views of one tensor [R, P]."""
    generator = torch.Generator().manual_seed(0)
    count = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))
    rest = 0.2 * torch.randn(replicas, count + 16, generator=generator)
    weights, biases = [], []
    for inputs, outputs in itertools.pairwise(sizes):
        weight, bias, rest = rest.split(
            [inputs * outputs, outputs, rest.shape[1] - (inputs + 1) * outputs], 1
        )
        weights.append(weight.view(replicas, outputs, inputs))
        biases.append(bias)
    return torch.randn(replicas, rows, sizes[0], generator=generator), weights, biases


def layer_by_layer(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = F.leaky_relu(F.linear(x, weight, bias), SLOPE)
    return F.linear(x, weights[-1], biases[-1])


@pytest.mark.parametrize("sizes", [(8, 12, 4), (8, 4), (4, 16, 8, 20)])
def test_output_and_gradient_are_those_of_single_layers(sizes: tuple[int, ...]) -> None:
    x, weights, biases = drawn(3, 5, *sizes)
    learned = [
        each.requires_grad_() for each in (*map(torch.clone, weights), *map(torch.clone, biases))
    ]
    found = []
    for way in (perceptron, layer_by_layer):
        out = vmap(way)(x, learned[: len(weights)], learned[len(weights) :])
        found.append((out, *torch.autograd.grad(out.square().sum(), learned)))
    torch.testing.assert_close(*found)


def test_the_operators_are_declared_as_they_behave() -> None:
    x, weights, biases = drawn(2, 5, 8, 12, 4)
    given = (
        x,
        [w.clone().requires_grad_() for w in weights],
        [b.clone().requires_grad_() for b in biases],
    )
    torch.library.opcheck(torch.ops.arsm_experiments.perceptron.default, given)
    out = operators._by_pytorch(x, weights, biases)
    backward = torch.ops.arsm_experiments.perceptron_backward.default
    torch.library.opcheck(backward, (out[-1], [x, *out[:-1]], weights))
    one_x = vmap(perceptron, (None, 0, 0))(x[0], weights, biases)
    torch.testing.assert_close(
        one_x[1], perceptron(x[0], [w[1] for w in weights], [b[1] for b in biases])
    )


def test_only_rows_of_whole_sixteen_bytes_are_aligned() -> None:
    assert operators.aligned([4, 180, 784], torch.float32)
    assert operators.aligned([8, 200], torch.bfloat16)
    assert not operators.aligned([4, 6], torch.float32)
    assert not operators.aligned([180], torch.bfloat16)


def test_a_network_encodes_and_decodes_alike_by_the_operator() -> None:
    network = VaeNetwork(Vae(hidden=(20, 12), variables=3, categories=4), dense=True)
    x, z = torch.rand(6, 784).round(), torch.randint(4, (6, 3))
    found = []
    for fused in (False, True):
        with (
            mock.patch.object(VaeNetwork, "fused", fused),
            mock.patch("arsm_experiments.vae.perceptron", side_effect=perceptron) as called,
        ):
            out = network.encode(x, {}), network.decode(z, {})
            assert called.call_count == 2 * fused
            assert network.encode(x).isfinite().all()  # without settings, nothing is learned
            assert called.call_count == 2 * fused
        total = out[0].square().sum() + out[1].sum()
        found.append((*out, *torch.autograd.grad(total, list(network.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    with (
        mock.patch.object(VaeNetwork, "fused", True),
        mock.patch("arsm_experiments.vae.perceptron") as called,
    ):
        dropping = VaeNetwork(
            Vae(hidden=(20, 12), dropouts=(0.5,), decoder_dropout=0.5), dense=True
        )
        z = torch.zeros(6, dropping.config.variables, dtype=torch.int64)
        dropping.encode(x, {"dropout": torch.tensor(0.5)})
        dropping.decode(z, {"decoder_dropout": torch.tensor(0.5)})
        called.assert_not_called()


@needs_triton
def test_the_triton_kernels_find_what_pytorch_finds() -> None:
    assert_equal("-m", "tests.experiments.interpreted_perceptron")
