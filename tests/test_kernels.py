"""ARSM of one variable, in pairs and in order, against its definition; how its operators compile
and map.
"""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

import arsm
from arsm import kernels, swap
from arsm.kernels.launch import launch
from arsm.noise import dirichlet
from arsm.univariate import Swaps, merge, swap_all
from tests.by_definition import arsm_of_table, pseudo_actions
from tests.interpreting import assert_equal, needs_triton
from tests.races import Drawn, races, rounding

FORMS = {"compared": 1 << 20, "ordered": 0}
"""Up to how many categories each form compares pairs."""


def with_form(form: str, logits: Tensor, log_pi: Tensor) -> Swaps:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FEW", FORMS[form])
        return swap_all(logits, log_pi)


def values_where_wanted(swaps: Swaps, seed: int, offset: float = 0.0) -> Tensor:
    """Random f at the categories that can win, f(z) elsewhere."""
    f = (
        torch.randn(
            swaps.can_win.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        + offset
    )
    return torch.where(swaps.can_win, f, f.gather(-1, swaps.z.unsqueeze(-1)))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(races(), st.floats(-1e3, 1e3), st.integers(0, 2**32))
def test_all_pairs_are_the_definition(form: str, drawn: Drawn, offset: float, seed: int) -> None:
    swaps = with_form(form, *drawn)
    pseudo = pseudo_actions(*drawn)
    assert torch.equal(swaps.z, pseudo[..., 0, 0])
    assert torch.equal(
        swaps.can_win, torch.zeros_like(swaps.can_win).scatter(-1, pseudo.flatten(-2), True)
    )

    f = values_where_wanted(swaps, seed, offset)
    table = f.unsqueeze(-2).expand(pseudo.shape).gather(-1, pseudo)
    expected = arsm_of_table(table, drawn.log_pi.unsqueeze(-2)).squeeze(-2)
    bound = rounding(
        drawn.logits.shape[-1], drawn.total_weight, float(f.abs().max()), torch.float64
    )
    torch.testing.assert_close(merge(swaps, f), expected, rtol=0, atol=bound)


def many(scale: float, *shape: int) -> tuple[Tensor, Tensor]:
    """Logits of many categories, some of them masked, and their noise."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(shape, generator=generator)
    return logits.masked_fill(torch.rand(shape, generator=generator) < 0.1, -torch.inf), dirichlet(
        logits, generator
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("shape", [(2, 3, 300), (1_000,)])
def test_the_two_forms_agree_on_many_categories(scale: float, shape: tuple[int, ...]) -> None:
    compared, ordered = (with_form(form, *many(scale, *shape)) for form in FORMS)
    assert torch.equal(ordered.can_win, compared.can_win)
    f = values_where_wanted(ordered, 1)
    torch.testing.assert_close(merge(ordered, f), merge(compared, f), rtol=0, atol=1e-12)


def both_operators(logits: Tensor, log_pi: Tensor, f: Tensor) -> Tensor:
    return merge(swap_all(logits, log_pi), f)


def test_the_operators_compile_and_map() -> None:
    logits, log_pi = many(1.0, 4, 2, 100)
    f = values_where_wanted(swap_all(logits, log_pi), 0)
    expected = both_operators(logits, log_pi, f)
    assert torch.equal(vmap(both_operators)(logits, log_pi, f), expected)
    assert torch.equal(vmap(both_operators, (1, 1, 1), 1)(logits, log_pi, f), expected)
    by_row = vmap(both_operators, (None, 0, 0))(logits[0], log_pi, f)
    assert torch.equal(by_row[0], expected[0])
    torch.compiler.reset()
    assert torch.equal(
        torch.compile(both_operators, fullgraph=True, backend="aot_eager")(logits, log_pi, f),
        expected,
    )


def test_the_operators_are_what_they_declare() -> None:
    logits, log_pi = (x.double() for x in many(1.0, 2, 40))  # nothing is copied on the way in
    found = kernels.order(logits, log_pi)
    torch.library.opcheck(torch.ops.arsm.order.default, (logits, log_pi))
    ahead, can_win, *rest = found
    torch.library.opcheck(
        torch.ops.arsm.merge.default, (logits, log_pi, ahead, *rest, can_win.double())
    )


def test_pairs_are_asked_for_alike_by_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, 6, generator=generator)
    estimator, noise = arsm.ARSM(pooled=True), dirichlet(logits, generator)

    def ask(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries = estimator.ask(logits, noise)
        return queries.points, queries.z, queries.same_as

    expected = ask(logits, noise)
    monkeypatch.setattr(kernels, "_has_pairs", lambda logits: True)
    mapped = vmap(ask, out_dims=(1, 0, 1))
    torch.compiler.reset()
    for call in (ask, mapped, torch.compile(mapped, fullgraph=True, backend="aot_eager")):
        for found, wanted in zip(call(logits, noise), expected, strict=True):
            assert torch.equal(found, wanted)
    for outer in (0, 1, 2):
        torch.library.opcheck(torch.ops.arsm.pairs.default, (logits, noise, outer))


def test_pairs_are_summed_alike_by_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_pairs", lambda logits: True)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, 6, generator=generator)
    log_pi, f = dirichlet(logits, generator), torch.randn(16, 3, 5, generator=generator)
    mapped = vmap(kernels.merge_pairs, (1, 0))
    for call in (kernels.merge_pairs, mapped, vmap(mapped, (2, 1), 1)):
        torch.testing.assert_close(call(f, log_pi), swap.merge_pairs(f, log_pi))
    torch.testing.assert_close(
        vmap(kernels.merge_pairs, (None, 0))(f[:, 0], log_pi)[1],
        swap.merge_pairs(f[:, 0], log_pi[1]),
    )
    whole = f.round()
    assert torch.equal(swap.merge_pairs(whole + 2**20, log_pi), swap.merge_pairs(whole, log_pi))
    torch.library.opcheck(torch.ops.arsm.merge_pairs.default, (f, log_pi, 0))
    torch.library.opcheck(torch.ops.arsm.merge_pairs.default, (f.movedim(0, 2), log_pi, 2))


def test_a_repetition_is_the_same_to_the_bit() -> None:
    logits, log_pi = many(1.0, 20_000)
    f = values_where_wanted(swap_all(logits, log_pi), 0)
    assert torch.equal(both_operators(logits, log_pi, f), both_operators(logits, log_pi, f))


@needs_triton
def test_the_triton_kernels_find_what_pytorch_finds() -> None:
    assert_equal("-m", "tests.interpreted")


@pytest.mark.slow
@needs_triton
def test_every_launch_of_a_triton_kernel_compiles_for_gpus() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.offline"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("kernels compile"), done.stderr


@pytest.mark.parametrize("name", ["order", "merge", "pairs", "merge_pairs", "log_dirichlet"])
def test_operators_can_be_called_without_dispatch(name: str) -> None:
    assert inspect.isfunction(getattr(kernels, f"_{name}"))
    assert hasattr(torch.ops.arsm, name)


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(int(device.index))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", entered)
    where = kernels._on_its_gpu(lambda x, *args: (current[-1], *args))
    for index in (0, 1):
        x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        assert where(x, "more") == (index, "more")  # pyright: ignore[reportArgumentType]
    assert where(torch.zeros(1)) == (0,)
    assert {"order", "merge"} <= set(vars(kernels._in("eager")))


class Compiling:
    """A kernel that counts how often it is compiled, and a compiled one that keeps how it was
    launched.
    """

    def __init__(self) -> None:
        self.fn, self.compiled, self.launched = self, 0, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Callable[..., None] | Compiling]:
        def compile_and_launch(*args: object, num_warps: int, **constants: int) -> Compiling:
            self.compiled += 1
            return self

        def launch_again(*args: object) -> None:
            self.launched.append((grid, args))

        return compile_and_launch if len(grid) == 1 else launch_again  # pyright: ignore[reportReturnType]


def test_a_compiled_kernel_is_launched_again_only_for_what_it_was_compiled_for() -> None:
    x, kernel = torch.zeros(64), Compiling()
    first = (x, 32, 5)
    launch(kernel, 7, *first, num_warps=4, BLOCK=16)
    # other numbers of the same kind
    launch(kernel, 9, torch.ones(64), 48, 6, num_warps=4, BLOCK=16)
    assert kernel.compiled == 1
    ((grid, (y, *others)),) = kernel.launched
    assert grid == (9, 1, 1)
    assert isinstance(y, Tensor)
    assert others == [48, 6, 16]
    others_kinds = (
        ((x[1:], 32, 5), 4, 16),  # not aligned
        ((x.double(), 32, 5), 4, 16),
        ((x, 33, 5), 4, 16),  # not a multiple of 16
        ((x, 32, 1), 4, 16),
        ((x, 1 << 32, 5), 4, 16),
        (first, 8, 16),
        (first, 4, 32),
    )
    for count, (args, warps, block) in enumerate(others_kinds, 2):
        launch(kernel, 7, *args, num_warps=warps, BLOCK=block)
        assert kernel.compiled == count
    assert len(kernel.launched) == 1
