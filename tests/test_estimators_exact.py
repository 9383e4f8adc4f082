"""Single estimates under fixed noise: against the definitions, by hand, and as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import arsm
from arsm.references import ReferenceNoise
from tests import by_definition
from tests.by_hand import assert_equal, normal
from tests.by_hand import given as drawn_before
from tests.races import Drawn, races, rounding

small = races(max_variables=4, max_categories=8)
seeds = st.integers(0, 2**32)


def wave(
    seed: int, variables: int, categories: int, dtype: torch.dtype = torch.float64
) -> by_definition.Function:
    """An f that no sum over variables equals, with a constant; within 4.5 of zero."""
    phase = 3 * torch.rand(
        variables, categories, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    k = torch.arange(variables)
    return lambda z: (3.5 + torch.sin(phase[k, z].sum(-1))).to(dtype)


LARGEST = 4.5


def check(
    estimator: arsm.Estimator,
    drawn: Drawn,
    noise: Any,
    f: by_definition.Function,
    by_row: Callable,
    terms: int,
) -> None:
    """estimate().grad against by_row(row) for every row of the batch, and zero where a category is
    masked.
    """
    found = arsm.estimate(estimator, drawn.logits, f, noise=noise).grad
    assert found is not None
    masked = rows_of(drawn.logits, 2) == -torch.inf
    expected = torch.stack([by_row(row) for row in range(len(masked))]).masked_fill(masked, 0)
    bound = rounding(terms, drawn.total_weight, LARGEST, drawn.logits.dtype)
    torch.testing.assert_close(found.double().view(expected.shape), expected, rtol=0, atol=bound)


def rows_of(x: Tensor, trailing: int) -> Tensor:
    """[*B, ...] -> [R, ...]."""
    return x.reshape(-1, *x.shape[x.ndim - trailing :])


def draw_references(drawn: Drawn, count: int, seed: int) -> Tensor:
    """Distinct references [*B, J]."""
    shape = (*drawn.logits.shape[:-2], drawn.logits.shape[-1])
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :count]


@settings(max_examples=60)
@given(small, seeds, st.booleans())
def test_arsm(drawn: Drawn, seed: int, pooled: bool) -> None:
    logits, log_pi = (rows_of(x, 2) for x in drawn)
    variables, categories = logits.shape[1:]
    f = wave(seed, variables, categories, logits.dtype)
    direct = by_definition.pooled_arsm if pooled else by_definition.arsm
    terms = categories**2 if pooled else categories
    check(
        arsm.ARSM(pooled=pooled),
        drawn,
        drawn.log_pi,
        f,
        lambda b: direct(logits[b], log_pi[b], f),
        terms,
    )


@settings(max_examples=60)
@given(small, seeds, st.booleans(), st.data())
def test_arsm_with_some_references(
    drawn: Drawn, seed: int, pooled: bool, data: st.DataObject
) -> None:
    logits, log_pi = (rows_of(x, 2) for x in drawn)
    variables, categories = logits.shape[1:]
    count = data.draw(st.integers(1, categories))
    references = draw_references(drawn, count, seed)
    by_row = rows_of(references, 1)
    f = wave(seed, variables, categories, logits.dtype)
    direct = by_definition.pooled_arsm if pooled else by_definition.arsm
    check(
        arsm.ARSM(references=count, pooled=pooled),
        drawn,
        ReferenceNoise(drawn.log_pi, references),
        f,
        lambda b: direct(logits[b], log_pi[b], f, by_row[b].tolist()),
        # (1 - C pi_j) / J weighs at most C times as much as 1/C - pi_j
        terms=categories * (categories**2 if pooled else categories),
    )


@settings(max_examples=60)
@given(small, seeds)
def test_ars(drawn: Drawn, seed: int) -> None:
    logits, log_pi = (rows_of(x, 2) for x in drawn)
    variables, categories = logits.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    references = torch.randint(categories, drawn.logits.shape[:-1], generator=generator)
    by_row = rows_of(references, 1)
    f = wave(seed, variables, categories, logits.dtype)
    noise = ReferenceNoise(drawn.log_pi, references)
    check(
        arsm.ARS(),
        drawn,
        noise,
        f,
        lambda b: by_definition.ars(logits[b], log_pi[b], by_row[b], f),
        terms=categories**2,
    )


@settings(max_examples=30)
@given(races(), seeds, st.booleans())
def test_all_references_are_arsm(drawn: Drawn, seed: int, pooled: bool) -> None:
    variables, categories = drawn.logits.shape[-2:]
    f = wave(seed, variables, categories)
    noise = ReferenceNoise(drawn.log_pi, draw_references(drawn, categories, seed))
    some = arsm.estimate(
        arsm.ARSM(references=categories, pooled=pooled), drawn.logits, f, noise=noise
    )
    full = arsm.estimate(arsm.ARSM(pooled=pooled), drawn.logits, f, noise=drawn.log_pi)
    assert some.grad is not None
    assert torch.equal(some.z, full.z)
    terms = categories**2 if pooled else categories
    # K > 1 keeps the weights in the noise's own type
    bound = rounding(terms, drawn.total_weight, LARGEST, drawn.logits.dtype)
    torch.testing.assert_close(some.grad, full.grad, rtol=0, atol=bound, check_dtype=False)


@settings(max_examples=30)
@given(races(max_variables=1), seeds)
def test_pooling_one_variable_changes_nothing(drawn: Drawn, seed: int) -> None:
    f = wave(seed, 1, drawn.logits.shape[-1])
    plain, pooled = (
        arsm.estimate(arsm.ARSM(pooled=x), drawn.logits, f, noise=drawn.log_pi)
        for x in (False, True)
    )
    assert plain.grad is not None
    assert pooled.grad is not None
    assert torch.equal(plain.grad, pooled.grad)


@settings(max_examples=30)
@given(st.integers(1, 4), seeds)
def test_two_categories_are_arm(variables: int, seed: int) -> None:
    """d/dphi_k = [f(1[u > sigmoid(-phi)]) - f(1[u < sigmoid(phi)])] (u_k - 1/2), with 1 for the
    first category.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(variables, 2, dtype=torch.float64, generator=generator)
    u = torch.rand(variables, dtype=torch.float64, generator=generator)
    f = wave(seed, variables, 2)
    phi = logits[:, 0] - logits[:, 1]
    first, second = u > torch.sigmoid(-phi), u < torch.sigmoid(phi)
    difference = f((~first).long().unsqueeze(0)) - f((~second).long().unsqueeze(0))
    arm = difference * (u - 0.5)
    expected = torch.stack([arm, -arm], -1)
    log_pi = torch.stack([u, 1 - u], -1).log()
    bound = rounding(2, 1.0, LARGEST, torch.float64)
    merged = arsm.estimate(arsm.ARSM(), logits, f, noise=log_pi)
    torch.testing.assert_close(merged.grad, expected, rtol=0, atol=bound)
    for j in range(2):
        noise = ReferenceNoise(log_pi, torch.full((variables,), j))
        swapped = arsm.estimate(arsm.ARS(), logits, f, noise=noise)
        torch.testing.assert_close(swapped.grad, expected, rtol=0, atol=bound)


@settings(max_examples=40)
@given(
    st.integers(1, 3), st.integers(2, 4), st.integers(2, 7), st.sampled_from([0.1, 1.0, 1e4]), seeds
)
def test_ridge_is_a_regression_without_each_sample(
    variables: int, categories: int, samples: int, eta: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(variables, categories, dtype=torch.float64, generator=generator)
    f = wave(seed, variables, categories)
    estimator = arsm.RLOO(samples=samples, ridge=eta)
    out = arsm.estimate(estimator, logits, f, noise=estimator.noise(logits, generator))
    expected = by_definition.ridge_rloo(logits, out.z, f(out.z), eta)
    p = logits.softmax(-1)
    penalty = eta * float((p - p.square()).sum())
    condition = (2 * variables * samples + penalty) / penalty
    bound = 50 * samples * condition * torch.finfo(torch.float64).eps * LARGEST
    torch.testing.assert_close(out.grad, expected, rtol=0, atol=bound)


def test_a_large_ridge_is_plain_leave_one_out() -> None:
    logits = torch.randn(50, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    f = wave(1, 3, 4)
    noise = arsm.RLOO(5).noise(logits, torch.Generator().manual_seed(2))
    plain, ridge = (
        arsm.estimate(arsm.RLOO(5, eta), logits, f, noise=noise).grad for eta in (None, 1e9)
    )
    assert plain is not None
    torch.testing.assert_close(ridge, plain, rtol=0, atol=1e-7)


# ---------------------------------------------------------------- by hand: C = 3, pi = (.2, .3,
# .5), f = (1, 2, 4) Equal logits: z is the smallest element's index, 0; z^{0<->c} = c, z^{1<->2} =
# 0.

LOG_PI = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log().unsqueeze(0)
UNIFORM = torch.zeros(1, 3, dtype=torch.float64)
FIRST = drawn_before(torch.tensor([[0]]))
BOTH = drawn_before(torch.tensor([[0], [2]]))


def table_f(z: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)[z[:, 0]]


@pytest.mark.parametrize(
    ("estimator", "noise", "value", "gradient"),
    [
        (arsm.Exact(), FIRST, 7 / 3, [-4 / 9, -1 / 9, 5 / 9]),
        (arsm.Reinforce(), FIRST, 1, [2 / 3, -1 / 3, -1 / 3]),
        (arsm.Reinforce(baseline=3.0), FIRST, 1, [-4 / 3, 2 / 3, 2 / 3]),
        (arsm.AR(), LOG_PI, 1, [0.4, 0.1, -0.5]),
        (arsm.ARS(), ReferenceNoise(LOG_PI, torch.tensor([1])), 1, [1 / 15, -1 / 30, -1 / 30]),
        (
            arsm.ARSM(references=1),
            ReferenceNoise(LOG_PI, torch.tensor([1])),
            1,
            [1 / 15, -1 / 30, -1 / 30],
        ),
        (arsm.ARSM(), LOG_PI, 1, [-22 / 45, 5 / 45, 17 / 45]),
        (arsm.ARSM(pooled=True), LOG_PI, 1, [-22 / 45, 5 / 45, 17 / 45]),
        (arsm.RLOO(samples=2), BOTH, 2.5, [-1.5, 0, 1.5]),
        (arsm.RLOO(samples=2, live=1), BOTH, 1, [-1.5, 0, 1.5]),
        (arsm.RLOO(samples=2, ridge=1.0), BOTH, 2.5, [-1.5, 0, 1.5]),
        (arsm.LocalExpectation(), FIRST, 1, [-4 / 9, -1 / 9, 5 / 9]),
    ],
    ids=lambda x: repr(x) if hasattr(x, "ask") else "",
)
def test_one_variable_by_hand(
    estimator: arsm.Estimator, noise: Any, value: float, gradient: list[float]
) -> None:
    out = arsm.estimate(estimator, UNIFORM, table_f, noise=noise)
    assert float(out.value) == pytest.approx(value, abs=1e-14)
    torch.testing.assert_close(
        out.grad, torch.tensor([gradient], dtype=torch.float64), rtol=0, atol=1e-14
    )


def test_average_by_hand() -> None:
    """pi reversed: z = 2, F = [[4, 4, 1], [4, 4, 2], [1, 2, 4]], w = (-5, 1, 4) / 30, g = (-29,
    -17, 46) / 90.
    """
    out = arsm.estimate(
        arsm.Average(arsm.ARSM(), 2), UNIFORM, table_f, noise=torch.stack([LOG_PI, LOG_PI.flip(-1)])
    )
    assert float(out.value) == 2.5
    expected = torch.tensor([[-44 - 29, 10 - 17, 34 + 46]], dtype=torch.float64) / 180
    torch.testing.assert_close(out.grad, expected, rtol=0, atol=1e-14)


def test_two_variables_by_hand() -> None:
    """C = 2, equal logits: z = (0, 1), its swap (1, 0), g_k = (f(z) - f(swap)) / 2 * (pi_k2 -
    pi_k1, pi_k1 - pi_k2).
    """
    log_pi = torch.tensor([[0.1, 0.9], [0.7, 0.3]], dtype=torch.float64).log()
    out = arsm.estimate(
        arsm.ARSM(),
        torch.zeros_like(log_pi),
        lambda z: (3.0 * z[:, 0] - z[:, 1]).double(),
        noise=log_pi,
    )
    assert out.z.tolist() == [0, 1]
    assert float(out.value) == -1
    expected = torch.tensor([[-1.6, 1.6], [0.8, -0.8]], dtype=torch.float64)
    torch.testing.assert_close(out.grad, expected, rtol=0, atol=1e-14)


def test_local_expectation_of_two_variables_by_hand() -> None:
    """g_k = p_k (f(z_k = c, z_-k) - mean), at z = (0, 1) with equal logits, f = 3 z_1 - z_2 + 2 z_1
    z_2.
    """
    logits = torch.zeros(2, 2, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return (3.0 * z[:, 0] - z[:, 1] + 2 * z[:, 0] * z[:, 1]).double()

    out = arsm.estimate(
        arsm.LocalExpectation(), logits, f, noise=drawn_before(torch.tensor([[0, 1]]))
    )
    expected = torch.tensor([[-1.25, 1.25], [0.25, -0.25]], dtype=torch.float64)
    torch.testing.assert_close(out.grad, expected, rtol=0, atol=1e-14)


def test_indecater_is_an_average_of_local_expectations_sample_by_sample() -> None:
    """IndeCateR: sum_d sum_c dp(z_d = c)/dphi times the mean over N samples of f at z_d = c."""
    samples, variables, categories = 3, 2, 3
    logits = normal(0, variables, categories).requires_grad_()
    table = normal(1, categories, categories)
    z = torch.tensor([[0, 1], [2, 2], [1, 0]])

    def f(z: Tensor) -> Tensor:
        return table[z[:, 0], z[:, 1]]

    surrogate = torch.zeros((), dtype=torch.float64)
    for d in range(variables):
        for c in range(categories):
            changed = z.clone()
            changed[:, d] = c
            surrogate = surrogate + logits[d].softmax(-1)[c] * f(changed).mean()
    expected = torch.autograd.grad(surrogate, logits)[0]
    average = arsm.Average(arsm.LocalExpectation(), samples)
    found = arsm.estimate(average, logits.detach(), f, noise=drawn_before(z.unsqueeze(-2)))
    assert_equal(found.grad, expected)


# ---------------------------------------------------------------- as they were

GOLDEN = json.loads((Path(__file__).parent / "golden" / "estimates.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["estimator"])
def test_golden(case: dict[str, Any]) -> None:
    logits, log_pi, table = (
        torch.tensor(GOLDEN[x], dtype=torch.float64) for x in ("logits", "log_pi", "f")
    )
    estimator = arsm.estimator(case["estimator"])
    if "references" in case:
        noise: Any = ReferenceNoise(log_pi[:, 0], torch.tensor(case["references"]))
    else:
        noise = (
            drawn_before(torch.tensor(case["z"]))
            if isinstance(estimator, arsm.RLOO)
            else log_pi[:, 0]
        )
    out = arsm.estimate(estimator, logits, lambda z: table[z[:, 0], z[:, 1]], noise=noise)
    assert out.z.tolist() == case["z"]
    torch.testing.assert_close(
        out.value, torch.tensor(case["value"], dtype=torch.float64), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        out.grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=0, atol=1e-13
    )


def test_values_far_from_zero_or_of_impossible_categories_cost_no_precision() -> None:
    reward = torch.tensor([1.0, 2.0, 1e8])
    found = arsm.estimate(
        arsm.Exact(), torch.tensor([0.0, 0.0, -60.0]), lambda z: reward[z[:, 0]]
    ).grad
    torch.testing.assert_close(found, torch.tensor([-0.25, 0.25, 0.0]), rtol=0, atol=1e-7)
    logits = torch.tensor([0.0, 1.0, 2.0])
    values = torch.tensor([1.0, 2.0, 3.0])
    exact = arsm.estimate(arsm.Exact(), logits.double(), lambda z: values.double()[z[:, 0]]).grad
    for estimator in (arsm.Exact(), arsm.LocalExpectation()):
        found = arsm.estimate(estimator, logits, lambda z: (values + 2.0**20)[z[:, 0]]).grad
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-6, check_dtype=False)
