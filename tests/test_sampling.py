"""Samples by inverse cumulative sums: the right frequencies, the edges, and what compiles and
maps.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import arsm
from arsm.kernels import FEW
from arsm.kernels.two_ways import COUNTED
from arsm.sampling import BLOCK, IN_ONE_PIECE, inverse_sample, uniforms
from tests.statistics import deviations

LAST = 1 - 2.0**-53
SIZES = [1, 2, 10, FEW, FEW + 1, IN_ONE_PIECE, IN_ONE_PIECE + 1, 3 * BLOCK * 7 + 5, 10_000]


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def by_definition(logits: Tensor, u: Tensor) -> Tensor:
    """The first category whose cumulative probability exceeds u, one variable at a time."""
    sums = logits.double().softmax(-1).cumsum(-1)
    return (sums.unsqueeze(-3) <= u.unsqueeze(-1)).sum(-1)


@pytest.mark.parametrize("categories", SIZES)
def test_evenly_spaced_uniforms_give_every_category_its_share(categories: int) -> None:
    logits = random_logits(2, categories, seed=categories)
    # so many samples that few categories are counted, not searched
    count = max(4 * categories, COUNTED)
    u = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).unsqueeze(-1).expand(-1, 2)
    z = inverse_sample(logits, u)
    assert z.dtype == torch.int64
    for k in range(2):
        found = torch.bincount(z[:, k], minlength=categories)
        assert float((found - count * logits[k].softmax(-1)).abs().max()) <= 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("categories", SIZES)
def test_samples_are_the_definitions(categories: int, dtype: torch.dtype) -> None:
    logits = random_logits(3, 2, categories).to(dtype)
    u = uniforms(logits, 50, torch.Generator().manual_seed(1))
    assert u.shape == (3, 50, 2)
    assert u.dtype == torch.float64
    sums = logits.double().softmax(-1).cumsum(-1).unsqueeze(-3).expand(3, 50, 2, -1)
    near = torch.finfo(dtype).eps * 20
    clear = (sums - u.unsqueeze(-1)).abs().amin(-1) > near  # rounding decides no other
    assert float(clear.float().mean()) > 0.8
    assert torch.equal(inverse_sample(logits, u)[clear], by_definition(logits, u)[clear])


def test_frequencies_are_the_probabilities() -> None:
    logits = random_logits(2, 6)
    draws = 40_000
    z = inverse_sample(logits, uniforms(logits, draws, torch.Generator().manual_seed(0)))
    chosen = (z.unsqueeze(-1) == torch.arange(6)).double()
    assert float(deviations(chosen, logits.softmax(-1)).max()) <= 1
    assert float(deviations(chosen, (logits + 0.2 * torch.arange(6)).softmax(-1)).max()) > 1


def test_a_million_categories_with_tiny_probabilities() -> None:
    categories = 1_000_000
    logits = random_logits(1, categories, scale=10.0)
    logits[0, 123_456] = 60.0
    u = torch.cat(
        [
            torch.rand(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
            1 - 1e-13 * torch.rand(50, 1, dtype=torch.float64),
        ]
    )
    z = inverse_sample(logits, u).squeeze(-1)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), logits[0].softmax(-1).cumsum(-1)])
    sums = sums / sums[-1]
    assert bool((sums[z] <= u[:, 0] + 1e-12).all() and (u[:, 0] <= sums[z + 1] + 1e-12).all())
    assert len(set(z[-50:].tolist())) > 1  # the last 1e-13 of the mass is told apart


@pytest.mark.parametrize("categories", [4, 40, 1_000, 100_000])
@pytest.mark.parametrize("u", [0.0, LAST])
@pytest.mark.parametrize("draws", [1, COUNTED])
def test_a_masked_category_is_never_chosen(categories: int, u: float, draws: int) -> None:
    if categories > 40 and draws > 1:
        draws = 3
    logits = torch.full((2, categories), -torch.inf)
    first, last = categories // 2, categories // 2 + 1
    logits[0, first:last] = 0.0
    logits[1] = 0.0
    logits[1, :first] = logits[1, last:] = -torch.inf
    logits[1, last] = -1e30  # allowed, and as improbable as a masked one
    z = inverse_sample(logits, torch.full((draws, 2), u, dtype=torch.float64))
    assert bool((z == first).all())


@pytest.mark.parametrize("categories", [5, 50, 5_000])
def test_masks_at_both_ends(categories: int) -> None:
    logits = torch.zeros(1, categories)
    logits[0, 0] = logits[0, -1] = -torch.inf
    z = inverse_sample(logits, torch.tensor([[0.0], [LAST], [0.5]], dtype=torch.float64))
    assert z[:2, 0].tolist() == [1, categories - 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("categories", [7, 3_000])
def test_half_precision_logits_mean_what_they_say(dtype: torch.dtype, categories: int) -> None:
    logits = random_logits(2, categories).to(dtype)
    u = uniforms(logits, 64, torch.Generator().manual_seed(0))
    assert torch.equal(inverse_sample(logits, u), inverse_sample(logits.float(), u))


@pytest.mark.parametrize("categories", [3, 40, 2_000])
def test_meaningless_logits_give_an_index_that_can_be_looked_up(categories: int) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((1, categories), value)
        for draws in (2, COUNTED) if categories < 100 else (2,):
            z = inverse_sample(logits, uniforms(logits, draws))
            assert bool((z >= 0).all() and (z < categories).all())


@pytest.mark.parametrize(("categories", "draws"), [(7, 3), (7, COUNTED), (40, 3), (2_000, 3)])
def test_compiled_and_mapped_samples_are_the_same(categories: int, draws: int) -> None:
    logits = random_logits(4, 2, categories)
    u = uniforms(logits, draws, torch.Generator().manual_seed(0))
    expected = inverse_sample(logits, u)
    assert torch.equal(vmap(inverse_sample)(logits, u), expected)
    torch.compiler.reset()
    assert torch.equal(
        torch.compile(inverse_sample, fullgraph=True, backend="aot_eager")(logits, u), expected
    )


def test_mapped_replicas_draw_their_own_uniforms() -> None:
    logits = torch.zeros(5, 3, 2, 4)
    u = vmap(lambda x: uniforms(x, 7), randomness="different")(logits)
    assert u.shape == (5, 3, 7, 2)
    assert u.unique().numel() == u.numel()


def test_a_generator_repeats_its_draws() -> None:
    logits = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    one, two = (uniforms(logits, 5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


def test_a_batch_of_no_rows_has_no_samples() -> None:
    assert arsm.sample(torch.zeros(0, 2, 4)).shape == (0, 2)


def test_a_bare_vector_is_one_variable() -> None:
    one = arsm.sample(torch.zeros(4), torch.Generator().manual_seed(0))
    assert torch.equal(one, arsm.sample(torch.zeros(1, 4), torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ([0.0, torch.nan], "is nan; logits must be finite"),
        ([0.0, torch.inf], "is inf; logits must be finite"),
        ([-torch.inf, -torch.inf], "leave at least one finite"),
    ],
)
def test_nothing_is_drawn_from_meaningless_logits(logits: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arsm.sample(torch.tensor([logits]))


def test_a_sample_has_one_category_per_variable_of_log_q() -> None:
    """A function that is called with fewer rows than its log q has would read the wrong ones."""
    log_q = torch.zeros(5, 2, 3).log_softmax(-1)
    with pytest.raises(ValueError, match=r"they are \[4, 2\] and \[5, 2, 3\]"):
        arsm.log_prob(log_q, torch.zeros(4, 2, dtype=torch.int64))
