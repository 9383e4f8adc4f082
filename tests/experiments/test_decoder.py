"""The decoder's likelihood as an operator: what it declares, how it maps, and its Triton kernels in
the interpreter.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from arsm_experiments.decoder import log_weight
from arsm_experiments.vae import Vae, VaeNetwork
from tests.interpreting import assert_equal, needs_triton

Given = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor]


def drawn(
    replicas: int,
    queries: int,
    images: int,
    variables: int,
    categories: int,
    *sizes: int,
    scale: float = 1.0,
) -> Given:
    """Choices, their ln q, weights and biases between these sizes, and images of the last size."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: scale * torch.randn(replicas, *shape, generator=generator)  # noqa: E731
    z = torch.randint(categories, (replicas, queries * images, variables), generator=generator)
    widths = itertools.pairwise((variables * categories, *sizes))
    weights = [normal(outputs, inputs) / inputs**0.5 for inputs, outputs in widths]
    x = torch.rand(replicas, images, sizes[-1], generator=generator).round()
    return (
        z,
        normal(images, variables, categories).log_softmax(-1),
        weights,
        [normal(o) for o in sizes],
        x,
    )


def one(given: Given, replica: int) -> Given:
    z, log_q, weights, biases, x = given
    return (
        z[replica],
        log_q[replica],
        [w[replica] for w in weights],
        [b[replica] for b in biases],
        x[replica],
    )


def test_the_operator_is_the_networks_own_likelihood_less_ln_q() -> None:
    network = VaeNetwork(Vae(hidden=(20, 12), variables=3, categories=4), dense=True)
    z, log_q, _, _, x = one(drawn(1, 5, 2, 3, 4, 784), 0)
    weights, biases = network.frozen_decoder()
    found = log_weight(z, log_q, weights, biases, x)
    of_choices = log_q.repeat(5, 1, 1).gather(-1, z.unsqueeze(-1)).sum((-2, -1))
    prior = network.with_prior(torch.zeros(()), [z], frozen=True)
    torch.testing.assert_close(found, network.log_joint([z], x.repeat(5, 1)) - prior - of_choices)


def test_the_operator_maps_over_replicas() -> None:
    given = drawn(2, 5, 3, 4, 3, 8, 6, 28)
    expected = torch.stack([log_weight(*one(given, replica)) for replica in range(2)])
    torch.testing.assert_close(vmap(log_weight)(*given), expected)
    same_z = vmap(log_weight, (None, 0, 0, 0, 0))(given[0][0], *given[1:])
    torch.testing.assert_close(same_z[0], expected[0])
    torch.library.opcheck(torch.ops.arsm_experiments.log_weight.default, given)


@pytest.mark.parametrize(
    "changes", [{}, {"kl": "analytic"}, {"layers": 2}, {"independent_decoder_sample": False}]
)
def test_a_loss_is_the_same_by_the_operator(changes: dict[str, object]) -> None:
    config = Vae(hidden=(20, 12), variables=3, categories=4, **changes)  # pyright: ignore[reportArgumentType]
    network, x = VaeNetwork(config, dense=True), torch.rand(6, 784).round()
    prepared = network.prepare_loss(torch.Generator().manual_seed(0), images=6)
    weights = {f"decoder.{i}": weight for i, weight in enumerate(network.frozen_decoder()[0])}
    assert all(torch.equal(prepared[name], weight.bfloat16()) for name, weight in weights.items())
    found = []
    for settings in ({"noise": prepared["noise"]}, prepared | weights):
        loss, _ = network.loss(x, network.encode(x), settings, torch.Generator().manual_seed(1))
        found.append((loss, *torch.autograd.grad(loss, list(network.encoder.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    if config.layers == 1 and config.independent_decoder_sample:  # all noise was prepared
        again, _ = network.loss(
            x, network.encode(x), prepared | weights, torch.Generator().manual_seed(2)
        )
        assert torch.equal(again, found[1][0])


def compare() -> None:
    """The kernels against PyTorch: several programs everywhere, sizes that fill no block, large
    logits.
    """
    from arsm_experiments import gpu_decoder, gpu_perceptron

    cases = (
        drawn(2, 17, 3, 4, 10, 24, 40, 784),
        drawn(1, 46, 4, 3, 8, 256, 136, 392, scale=3.0),
        drawn(3, 3, 1, 4, 2, 100),
    )
    # the interpreter multiplies in float32
    with mock.patch.object(gpu_perceptron, "_rounded", lambda x: x):
        for given in cases:
            torch.testing.assert_close(
                gpu_decoder.log_weight(*given), log_weight(*given), rtol=1e-5, atol=1e-3
            )
    print("equal")


@needs_triton
def test_the_triton_kernels_find_what_pytorch_finds() -> None:
    assert_equal("-c", "from tests.experiments.test_decoder import compare; compare()")
