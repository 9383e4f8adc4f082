"""The Triton kernels, run by Triton's interpreter on a CPU, against the operators in plain PyTorch.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported: `TRITON_INTERPRET=1
python -m tests.interpreted`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from torch import Tensor
from triton.runtime import interpreter

import arsm
from arsm import kernels
from arsm.categorical import one_hot
from arsm.distinct import share
from arsm.draws import sample_noise
from arsm.kernels import (
    eager,
    gpu_few,
    gpu_merge,
    gpu_noise,
    gpu_order,
    gpu_pairs,
    gpu_queries,
    gpu_rank,
    gpu_tell,
)
from arsm.noise import dirichlet
from arsm.references import by_category, compare_swaps, swap_references
from arsm.sampling import inverse_sample
from arsm.scores import leave_one_out
from arsm.swap import merge_pairs, pair_table, run_race
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
        # categories first in memory, or rows of a wider tensor
        if merge is gpu_merge.merge:
            other = torch.sub(
                *merge(logits, log_pi, ahead, *ordered, F.pad(f, (1, 0)).to(dtype)[:, 1:])
            ).to(dtype)
        else:
            other = merge(logits, log_pi, f.to(dtype).mT.contiguous().mT)
        torch.testing.assert_close(
            other, gradient.to(dtype), rtol=0, atol=1e-11 if dtype == torch.float64 else 1e-5
        )


@settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate])
@given(races(max_variables=2))
def compare_races(drawn: Drawn) -> None:
    """Ties, masks and extremes, in one chunk."""
    compare(drawn.logits.flatten(0, -2)[:2], drawn.log_pi.flatten(0, -2)[:2])
    compare_queries(Drawn(*(x.flatten(0, -3)[:3] if x.ndim > 2 else x.unsqueeze(0) for x in drawn)))
    if drawn.logits.shape[-1] <= 16:
        table, same_as = gpu_pairs.pairs(*drawn)
        expected = pair_table(run_race(*drawn)).long()
        assert torch.equal(table, expected)
        assert torch.equal(same_as, share(expected))
        outer = drawn.logits.ndim - 2
        for found, wanted in zip(gpu_pairs.pairs(*drawn, outer), (table, same_as), strict=True):
            assert torch.equal(found, wanted.movedim(0, outer))
        generator = torch.Generator().manual_seed(0)
        for dtype, rounding in ((torch.float32, 1e-5), (torch.float64, 1e-7)):
            f = torch.randn(table.shape[:-1], generator=generator, dtype=dtype)
            wanted = merge_pairs((f - f[0]).double(), drawn.log_pi.double())
            found = gpu_pairs.merge_pairs(f, drawn.log_pi).double()
            mapped = gpu_pairs.merge_pairs(
                f.movedim(0, outer).contiguous(), drawn.log_pi, outer
            ).double()
            assert torch.equal(found, mapped)
            torch.testing.assert_close(
                found, wanted, rtol=0, atol=rounding * float(f.abs().max()) * f.shape[0]
            )


def compare_queries(drawn: Drawn) -> None:
    """Swaps with references, queries by category, and the gradient."""
    logits, log_pi = drawn  # [B, K, C]
    variables, categories = logits.shape[-2:]
    generator = torch.Generator().manual_seed(0)
    references = torch.randint(categories, (*logits.shape[:-2], 2, variables), generator=generator)
    expected = swap_references(logits, log_pi, references)
    found = gpu_few.swap_references(logits, log_pi, references)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one.to(other.dtype), rtol=0, atol=1e-12)
    z, pseudo, weight = expected
    if variables == 1:
        won = torch.rand(logits.shape, generator=generator) < 0.5
        for one, other in zip(by_category(z, won), gpu_queries.by_category(z, won), strict=True):
            assert torch.equal(one, other)
    count = 1 + (1 if variables == 1 else 2) * categories
    f = torch.randn(count, *z.shape[:-1], dtype=torch.float64, generator=generator)
    told = gpu_tell.compare_swaps(f, pseudo.long(), weight, torch.float64)
    torch.testing.assert_close(
        told, compare_swaps(f, pseudo, weight, torch.float64), rtol=0, atol=1e-12
    )


def compare_samples(logits: Tensor, count: int) -> None:
    """Samples of logits [B, K, C], and leave-one-out."""
    generator = torch.Generator().manual_seed(0)
    noise = sample_noise(logits, count, generator)
    z = inverse_sample(logits, noise.uniform)
    assert torch.equal(gpu_queries.inverse_sample(logits, noise.uniform), z)
    points = z.movedim(-2, 0).contiguous()
    f = torch.randn(points.shape[:-1], generator=generator, dtype=torch.float64)
    expected = leave_one_out(points, f, logits.shape[-1], torch.float64)
    found = gpu_tell.leave_one_out(points, f, logits.shape[-1], torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def compare_tiles() -> None:
    """More rows than a program holds at once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 1, 4, generator=generator)
    compare_samples(logits, 3)
    compare_queries(Drawn(logits, dirichlet(logits, generator)))


def compare_estimates(words: str, *shape: int) -> None:
    """The same numbers from the same noise, by way of the kernels that an eager estimate uses on a
    GPU.
    """
    estimator, results = arsm.estimator(words), []
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    logits[0, :, 1] = -torch.inf
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = estimator.noise(logits, generator)
    for on_gpu in (False, True):
        theta, phi = weight.clone().requires_grad_(), logits.clone().requires_grad_()
        with mock.patch.object(kernels, "on_gpu", lambda _, on_gpu=on_gpu: on_gpu):
            out = arsm.estimate(
                estimator,
                phi,
                lambda z, own: (one_hot(z, shape[-1]) * own).sum((-2, -1)),
                theta,
                noise=noise,
            )
            out.value.square().sum().backward()
            estimator.noise(logits, generator)
        results.append([out.value, out.z, out.info["distinct"], phi.grad, theta.grad])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)


def check_errors() -> None:
    """Logits are checked before f is called, and then its values."""
    logits = torch.zeros(5, 1, 4)
    with mock.patch.object(kernels, "on_gpu", return_value=True):
        for words in ("arsm", "ars", "rloo"):
            for value in (torch.nan, torch.inf):
                logits[2, 0, 1] = value
                with pytest.raises(arsm.NotFiniteError, match=r"logits\[2, 0, 1\]"):
                    arsm.estimate(
                        arsm.estimator(words), logits, lambda z: pytest.fail("f was called")
                    )
                logits[2, 0, 1] = 0
        for wrong in (torch.nan, torch.inf):
            with pytest.raises(arsm.NotFiniteError, match=r"z = \[2\]"):
                arsm.estimate(
                    arsm.Exact(),
                    logits,
                    lambda z, wrong=wrong: torch.where(z[:, 0] == 2, wrong, 1.0),
                )


@triton.jit
def _exponentials(bits, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, gpu_noise.exponential(tl.load(bits + i), out.dtype.element_ty))


def check_exponential() -> None:
    """Random integers become the quantiles of Exp(1) that they stand for, to rounding, from the
    smallest on.
    """
    for integer, dtype in ((torch.int32, torch.float32), (torch.int64, torch.float64)):
        size = 8 * integer.itemsize
        powers = [2**k - 1 for k in range(size)]
        bits = torch.tensor([i for k in powers for i in (k, -1 - k)], dtype=integer)
        found = torch.empty(len(bits), dtype=dtype)
        _exponentials[(1,)](bits, found, BLOCK=len(bits))  # pyright: ignore[reportArgumentType]
        for i, x in zip(bits.tolist(), found.tolist(), strict=True):
            v = Fraction(2 * (i if i >= 0 else -1 - i) + 1, 2 ** (size + 1))
            assert x == pytest.approx(
                -math.log1p(-v) if i >= 0 else -math.log(v), rel=2 * torch.finfo(dtype).eps
            )


def check_noise(dtype: torch.dtype, categories: int) -> None:
    """Rows of ln pi, all different, that a generator repeats and that have the right
    distribution.
    """
    generator = torch.Generator()
    one, again, other = (
        gpu_noise.log_dirichlet(
            torch.empty(3, categories, dtype=dtype), generator.manual_seed(seed)
        ).double()
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert torch.stack([one, other]).unique().numel() > 5.9 * categories
    torch.testing.assert_close(
        one.exp().sum(-1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-5
    )
    # C pi has the distribution function 1 - (1 - x/C)^(C-1)
    uniform = 1 - (1 - one.exp().flatten().sort().values) ** (categories - 1)
    assert (uniform - torch.linspace(0, 1, len(uniform))).abs().max() < 1.6 / len(uniform) ** 0.5


@contextlib.contextmanager
def backwards() -> Iterator[None]:
    """Run the programs of each launch in the opposite order, the first dimension fastest: a GPU may
    choose any.
    """
    builder = interpreter.interpreter_builder
    real = builder.set_grid_idx

    def turned(x: int, y: int, z: int) -> None:
        sizes = builder.grid_dim
        left = math.prod(sizes) - 1 - ((x * sizes[1] + y) * sizes[2] + z)
        real(left % sizes[0], left // sizes[0] % sizes[1], left // (sizes[0] * sizes[1]))

    with mock.patch.object(builder, "set_grid_idx", turned):
        yield


def compare_orders() -> None:
    """A long order, many chunks, crowded buckets, long chunks and parts of the rows."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 2, 16, generator=generator)
    table, same_as = gpu_pairs.pairs(logits, dirichlet(logits, torch.Generator().manual_seed(1)))
    assert torch.equal(same_as, share(table))  # categories that need all four bits
    logits = torch.randn(2, 3_000, generator=generator)
    logits[:, :2] += 9
    compare(logits, dirichlet(logits, generator))
    kernels.BUCKETS, gpu_merge.AT_ONCE, gpu_rank.PER_COPY, gpu_merge.ALONG = (
        64,
        1_500,
        tl.constexpr(100),
        32,
    )
    for scale, dtype, programs in (
        (0.0, torch.float32, 8_192),
        (1.0, torch.float16, 6),
        (4.0, torch.float64, 3),
    ):
        gpu_order.PROGRAMS = gpu_merge.PROGRAMS = programs
        logits = scale * torch.randn(2, 1_100, generator=generator).to(dtype)
        values = torch.float64 if scale else torch.float32
        with backwards() if scale else contextlib.nullcontext():
            compare(
                logits.masked_fill(logits > 1, -torch.inf), dirichlet(logits, generator), values
            )
        check_noise(values, 1_100)
        check_noise(values, 300)
        few = logits[:, :15].double()
        for shape, count in (((5, 2, 3), 3), ((6, 1, 5), 3), ((5, 1, 6), 20)):
            compare_samples(few.reshape(shape), count)
    compare_peaked(generator)


def compare_peaked(generator: torch.Generator) -> None:
    """Orders that are summed in turns."""
    peaked = torch.randn(2, 1_100, generator=generator)
    peaked[:, :2] += 8
    # few chunks of the order, many, and several per program
    for turns, takers in (
        (4, 99),
        (1024, 99),
        (1024, 4),
    ):
        with (
            mock.patch.multiple(gpu_merge, TURNS=turns, TAKERS=takers, AT_ONCE=1 << 20),
            backwards(),
        ):
            compare(peaked, dirichlet(peaked, torch.Generator().manual_seed(5)))


def main() -> None:
    """Few categories of every kind, orders of many, whole estimates, tiles and errors."""
    compare_races()
    check_exponential()
    compare_orders()
    for words in (
        "arsm",
        "ars",
        "rloo",
        "rloo:samples=5,live=2",
        "arsm:references=2",
        "arsm:pooled=True",
        "reinforce",
    ):
        compare_estimates(words, 5, 1, 4)
        compare_estimates(words, 3, 2, 3)
    compare_estimates("arsm", 2, 1, 40)
    compare_tiles()
    check_errors()
    print("equal")


if __name__ == "__main__":
    main()
