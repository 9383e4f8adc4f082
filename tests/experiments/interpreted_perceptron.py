"""The perceptron's Triton kernels, run by Triton's interpreter on a CPU, against plain PyTorch.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported: `TRITON_INTERPRET=1
python -m tests.experiments.interpreted_perceptron`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from arsm_experiments import gpu_perceptron, perceptron
from arsm_experiments.gpu_perceptron import _rounded
from tests.experiments.test_perceptron import drawn


@triton.jit
def _copy_rounded(x: Any, out: Any, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, _rounded(tl.load(x + i)))


def check_rounding() -> None:
    """What is left of a number without its last 13 bits is the nearest of TF32, with 10 bits;
    infinity and nan stay.
    """
    given = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    given[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    given.view(torch.int32)[3] = 0x7FFFFFFF  # the nan of a GPU
    found = torch.empty_like(given)
    _copy_rounded[(1,)](given, found, BLOCK=1024)  # pyright: ignore[reportArgumentType]
    found.view(torch.int32).bitwise_and_(-(1 << 13))
    assert torch.equal(found[:2], given[:2])
    assert found[2:4].isnan().all()
    mantissa, exponent = given[4:].frexp()
    assert torch.equal(found[4:], torch.ldexp((mantissa * 2**11).round(), exponent - 11))


def compare() -> None:
    """Several programs everywhere, sizes that fill no block, few and many rows."""
    for given in (drawn(2, 70, 36, 72, 140, 20), drawn(1, 33, 8, 4), drawn(2, 530, 40, 132, 64)):
        x, weights, _ = given
        expected = perceptron._by_pytorch(*given)
        torch.testing.assert_close(
            gpu_perceptron.perceptron(*given), expected, rtol=1e-4, atol=1e-4
        )
        asked = torch.randn_like(expected[-1]), [x, *expected[:-1]], weights
        found = gpu_perceptron.backward(*asked)
        torch.testing.assert_close(
            found, perceptron._backward_by_pytorch(*asked), rtol=1e-4, atol=1e-3
        )


if __name__ == "__main__":
    check_rounding()
    # the interpreter multiplies in float32
    with mock.patch.object(gpu_perceptron, "_rounded", lambda x: x):
        compare()
    print("equal")
