"""The Triton kernels, run by Triton's interpreter on a CPU, against the operators in plain PyTorch.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported: `TRITON_INTERPRET=1 python -m
tests.interpreted`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import Phase, given, settings
from torch import Tensor
from triton.runtime import interpreter

from arsm import kernels
from arsm.evaluate import share
from arsm.kernels import eager, gpu_few, gpu_merge, gpu_noise, gpu_order, gpu_pairs
from arsm.noise import dirichlet
from arsm.swap import pair_table, run_race
from tests.races import Drawn, races


def compare(logits: Tensor, log_pi: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Equal winners, and gradients of f in a dtype equal to rounding."""
    first_three, can_win, with_z, wins, rank = eager.order(logits, log_pi)
    f = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    f = torch.where(can_win, f, f.gather(-1, first_three[:, :1]))
    gradient = torch.sub(*eager.merge(log_pi, first_three, with_z, wins, rank, f))
    ways: list[tuple[Callable[..., Any], Callable[..., Any]]] = [(gpu_order.order, gpu_merge.merge)]
    if logits.shape[-1] <= 40:
        ways.append((gpu_few.order, gpu_few.merge))
    for order, merge in ways:
        ahead, found, *ordered = order(logits, log_pi)
        assert torch.equal(ahead[:, 0], first_three[:, 0])
        assert torch.equal(found, can_win)
        other = torch.sub(*merge(logits, log_pi, ahead, *ordered, f.to(dtype))).to(dtype)
        torch.testing.assert_close(other, gradient.to(dtype), rtol=0, atol=1e-11 if dtype == torch.float64 else 1e-5)


@settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate])
@given(races(max_variables=2))
def compare_races(drawn: Drawn) -> None:
    """Ties, masks and extremes, in one chunk."""
    compare(drawn.logits.flatten(0, -2)[:2], drawn.log_pi.flatten(0, -2)[:2])
    if drawn.logits.shape[-1] <= 16:
        table, same_as = gpu_pairs.pairs(*drawn)
        expected = pair_table(run_race(*drawn)).long()
        assert torch.equal(table, expected)
        assert torch.equal(same_as, share(expected))


@contextlib.contextmanager
def backwards() -> Iterator[None]:
    """Run the programs of each launch in the opposite order: a GPU may choose any."""
    builder = interpreter.interpreter_builder
    real = builder.set_grid_idx

    def turned(x: int, y: int, z: int) -> None:
        real(*(size - 1 - i for i, size in zip((x, y, z), builder.grid_dim, strict=True)))

    with mock.patch.object(builder, "set_grid_idx", turned):
        yield


def main() -> None:
    """Few categories of every kind, then several chunks, crowded buckets, long chunks and several parts of the rows."""
    compare_races()
    generator = torch.Generator().manual_seed(0)
    kernels.BUCKETS, gpu_merge.AT_ONCE = 64, 1_500
    for scale, dtype, programs in ((0.0, torch.float32, 8_192), (1.0, torch.float16, 6), (4.0, torch.float64, 3)):
        gpu_order.PROGRAMS = gpu_merge.PROGRAMS = programs
        logits = scale * torch.randn(2, 1_100, generator=generator).to(dtype)
        values = torch.float64 if scale else torch.float32
        with backwards() if scale else contextlib.nullcontext():
            compare(logits.masked_fill(logits > 1, -torch.inf), dirichlet(logits, generator), values)
        noise = torch.empty(2, 1_100, dtype=values).exponential_(generator=generator)
        torch.testing.assert_close(gpu_noise.log_dirichlet(noise.clone()), (noise / noise.sum(-1, keepdim=True)).log())
    print("equal")


if __name__ == "__main__":
    main()
