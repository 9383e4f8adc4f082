"""The likelihood as an operator: what it declares, how it maps, and its Triton kernel in the interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from arsm_experiments.likelihood import log_likelihood
from arsm_experiments.vae import bernoulli


def drawn(replicas: int, queries: int, images: int, pixels: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """A product, a bias and images."""
    generator = torch.Generator().manual_seed(0)
    product = scale * torch.randn(replicas, queries * images, pixels, generator=generator)
    bias = torch.randn(replicas, pixels, generator=generator)
    return product.bfloat16(), bias, torch.rand(replicas, images, pixels, generator=generator).round()


def test_the_operator_is_the_likelihood_of_every_rows_image() -> None:
    product, bias, x = drawn(2, 5, 3, 28)
    expected = torch.stack([bernoulli(p.float() + b, y.repeat(5, 1)) for p, b, y in zip(product, bias, x, strict=True)])
    torch.testing.assert_close(vmap(log_likelihood)(product, bias, x), expected)
    torch.testing.assert_close(log_likelihood(product[0], bias[0], x[0]), expected[0])
    one_bias = vmap(log_likelihood, (0, None, 0))(product, bias[0], x)
    torch.testing.assert_close(one_bias[0], expected[0])
    torch.library.opcheck(torch.ops.arsm_experiments.log_likelihood.default, (product, bias, x))


def compare() -> None:
    """The kernel against PyTorch: several programs per image, large logits, one factor per logarithm."""
    from arsm_experiments import gpu_likelihood

    for given in (drawn(2, 17, 3, 784), drawn(1, 2, 2, 392, 100.0), drawn(3, 3, 1, 100)):
        torch.testing.assert_close(gpu_likelihood.log_likelihood(*given), log_likelihood(*given), rtol=1e-6, atol=1e-3)
    print("equal")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_triton_kernel_finds_what_pytorch_finds() -> None:
    command = [sys.executable, "-c", "from tests.experiments.test_likelihood import compare; compare()"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr
