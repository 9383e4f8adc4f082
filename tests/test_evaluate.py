"""Sharing, packing, chunking, and what f is handed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import arsm
from arsm.distinct import share
from arsm.evaluate import evaluate, with_context
from arsm.kernels.two_ways import PAIRS_COMPILED, first_three
from arsm.question import Evaluation, Question
from arsm.references import ReferenceNoise, by_category
from arsm.types import Queries
from tests.problems import PROBLEMS, Problem
from tests.roster import ROSTER, Entry

WAYS = [("packed", None), ("packed", 7), ("packed", 1), ("dense", None), ("dense", 7)]


@given(
    st.integers(1, 12),
    st.sampled_from([(), (3,), (2, 2)]),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_share_finds_the_first_identical_query(
    queries: int, batch: tuple[int, ...], variables: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(2, (queries, *batch, variables), generator=generator)
    same = (points.unsqueeze(0) == points.unsqueeze(1)).all(-1)  # [m, n, *B]
    assert torch.equal(share(points), same.long().argmax(1))


@pytest.mark.parametrize("queries", [1, 9, PAIRS_COMPILED, PAIRS_COMPILED + 1])
def test_share_compiled_finds_the_same(queries: int) -> None:
    points = torch.randint(0, 2, (queries, 3, 4), generator=torch.Generator().manual_seed(queries))
    compiled = torch.compile(share, fullgraph=True, dynamic=False, backend="eager")
    assert torch.equal(compiled(points), share(points))


@pytest.mark.parametrize("categories", [127, 128, 300])
def test_the_first_three_of_many_ties_have_the_lowest_indices(categories: int) -> None:
    """Small integers number up to 127 categories, wider ones more."""
    race = torch.full((categories, 64), 2.0)
    race[[5, categories - 9, categories - 3]] = 1.0
    values, indices = first_three(race)
    assert (values == 1).all()
    assert indices[:, 0].tolist() == [5, categories - 9, categories - 3]
    assert (indices == indices[:, :1]).all()


def test_share_never_merges_what_collides() -> None:
    """The hash of z is sum_k z_k m^k in 64 bits; these two vectors have the same."""
    multiplier = 6364136223846793005
    wrapped = (multiplier + 2**63) % 2**64 - 2**63
    points = torch.tensor([[wrapped, 0], [0, 1]])
    assert share(points).tolist() == [0, 1]


def test_each_distinct_query_is_evaluated_once() -> None:
    logits = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0))
    seen: list[tuple[int, ...]] = []

    def f(z: Tensor, row: Tensor) -> Tensor:
        seen.extend((int(r), *v) for r, v in zip(row, z.tolist(), strict=True))
        return z.sum(-1).float()

    out = arsm.estimate(
        arsm.ARSM(), logits, f, torch.arange(20), generator=torch.Generator().manual_seed(1)
    )
    assert len(seen) == len(set(seen)) == int(out.info["distinct"].sum())
    assert int(out.info["asked"]) == 7
    assert len(seen) < 20 * 7


def test_no_call_has_more_than_max_rows() -> None:
    sizes: list[int] = []

    def f(z: Tensor) -> Tensor:
        sizes.append(len(z))
        return z.sum(-1).float()

    arsm.estimate(arsm.RLOO(samples=8), torch.zeros(5, 6, 9), f, max_rows=16, evaluation="dense")
    assert sizes == [16, 16, 8]


def outputs(
    entry: Entry, problem: Problem, evaluation: Evaluation, max_rows: int | None
) -> list[Tensor]:
    logits = problem.logits.repeat(5, 1, 1, 1).requires_grad_()
    theta = problem.theta.repeat(5, 1, 1).requires_grad_()
    estimator = entry.make(*problem.size)
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))
    out = arsm.estimate(
        estimator, logits, problem.f, theta, noise=noise, evaluation=evaluation, max_rows=max_rows
    )
    return [out.value, out.z, *torch.autograd.grad(out.value.sum(), (logits, theta))]


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_how_f_is_called_changes_nothing(entry: Entry) -> None:
    for problem in (p for p in PROBLEMS if entry.fits(*p.size)):
        first, *others = [outputs(entry, problem, *way) for way in WAYS]
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("evaluation", ["packed", "dense"])
@pytest.mark.parametrize(
    "entry", [e for e in ROSTER if e.label in ("arsm", "rloo", "ars")], ids=lambda e: e.label
)
def test_a_frozen_f_is_called_once_and_gives_the_same(entry: Entry, evaluation: Evaluation) -> None:
    problem = next(p for p in PROBLEMS if entry.fits(*p.size))
    calls: list[bool] = []

    def f(z: Tensor, theta: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return problem.f(z, theta)

    estimator, theta = entry.make(*problem.size), problem.theta.clone().requires_grad_()
    logits = problem.logits.clone().requires_grad_()
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))
    options = {"noise": noise, "evaluation": evaluation, "max_rows": None}
    learning = arsm.estimate(estimator, logits, f, theta, **options)
    calls.clear()
    frozen = arsm.estimate(estimator, logits, f, theta, **options, frozen=True)
    assert calls == [False]
    torch.testing.assert_close(frozen.value, learning.value, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(frozen.value.sum(), (logits, theta), allow_unused=True)
    torch.testing.assert_close(found[0], learning.grad, rtol=1e-12, atol=1e-12)
    assert found[1] is None
    with pytest.raises(ValueError, match="needs f's derivative"):
        arsm.estimate(arsm.GumbelSoftmax(), logits, f, theta, frozen=True)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("evaluation", ["packed", "dense"])
def test_f_gets_the_context_of_its_row(batch: tuple[int, ...], evaluation: Evaluation) -> None:
    """Each row's z is forced, so that f can check that both contexts are that row's."""
    rows = torch.Size(batch).numel()
    number = torch.arange(rows).view(batch)
    logits = torch.zeros(*batch, 2, 6).masked_fill(
        torch.arange(6) != number[..., None, None], -torch.inf
    )
    matrix = number[..., None, None].expand(*batch, 2, 3).double()

    def f(z: Tensor, row: Tensor, x: Tensor) -> Tensor:
        assert row.shape == z.shape[:1]
        assert x.shape == (len(z), 2, 3)
        assert bool((z == row.unsqueeze(-1)).all())
        assert bool((x == row.view(-1, 1, 1)).all())
        return row.double()

    for estimator in (
        arsm.ARSM(),
        arsm.RLOO(samples=3),
        arsm.Average(arsm.ARS(), 2),
        arsm.LocalExpectation(),
    ):
        out = arsm.estimate(estimator, logits, f, number, matrix, evaluation=evaluation, max_rows=4)
        torch.testing.assert_close(out.value, number.double())


@pytest.mark.parametrize("evaluation", ["packed", "dense"])
def test_pseudo_actions_that_agree_give_exactly_zero_though_f_is_random(
    evaluation: Evaluation,
) -> None:
    logits = torch.zeros(8, 3, 5)
    logits[..., 2] = 100
    for estimator in (arsm.ARS(), arsm.ARSM(), arsm.ARSM(pooled=True), arsm.ARSM(references=2)):
        out = arsm.estimate(estimator, logits, lambda z: torch.randn(len(z)), evaluation=evaluation)
        assert out.grad is not None
        assert not out.grad.any()
        assert out.value.unique().numel() == 8


@pytest.mark.parametrize("evaluation", ["packed", "dense"])
@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_masked_categories_are_never_asked_and_get_no_gradient(
    entry: Entry, evaluation: Evaluation
) -> None:
    """f's own gradient would be NaN if a masked category were asked, even with weight zero."""
    for variables, categories, masked in (
        (1, 2, (1,)),
        (1, 4, (1, 3)),
        (2, 2, (0,)),
        (3, 4, (0, 2)),
    ):
        if not entry.fits(variables, categories):
            continue
        logits = torch.zeros(6, variables, categories, dtype=torch.float64)
        logits[..., masked] = -torch.inf
        logits.requires_grad_()
        legal = torch.ones(categories, dtype=torch.float64)
        legal[list(masked)] = 0
        scale = torch.ones(6, 1, dtype=torch.float64, requires_grad=True)

        def f(
            z: Tensor, scale: Tensor, categories: int = categories, legal: Tensor = legal
        ) -> Tensor:
            one_hot = arsm.one_hot(z, categories, torch.float64)
            chosen = (scale * (one_hot * legal).sum(-1)).log().sum(-1)
            return chosen + (one_hot * torch.arange(categories)).sum((-2, -1)).square()

        estimator = entry.make(variables, categories)
        noise = estimator.noise(logits, torch.Generator().manual_seed(0))
        out = arsm.estimate(estimator, logits, f, scale, noise=noise, evaluation=evaluation)
        by_logits, by_scale = torch.autograd.grad(out.value.sum(), (logits, scale))
        assert bool(out.value.isfinite().all())
        assert bool(by_scale.isfinite().all())
        assert bool(by_logits.isfinite().all())
        assert not by_logits[..., masked].any()
        assert out.grad is None or not out.grad[..., masked].any()


def test_only_live_queries_carry_a_graph() -> None:
    graphs: list[bool] = []
    weight = torch.ones((), requires_grad=True)

    def f(z: Tensor) -> Tensor:
        value = z.sum(-1) * weight
        graphs.append(value.requires_grad)
        return value

    arsm.estimate(arsm.ARSM(), torch.zeros(4, 2, 3), f, evaluation="dense")
    assert graphs == [True, False]


def test_parameters_of_f_get_their_ordinary_gradient() -> None:
    """The gradient of f at the true sample, whatever the estimator asks besides."""
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    logits = torch.randn(7, 3, 4, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return decoder(arsm.one_hot(z, 4, torch.float64).flatten(1)).squeeze(-1)

    for estimator in (arsm.ARSM(), arsm.ARS(), arsm.RLOO(samples=3), arsm.Average(arsm.ARSM(), 2)):
        out = arsm.estimate(estimator, logits, f)
        found = torch.autograd.grad(out.value.sum(), list(decoder.parameters()))
        draws = out.z.flatten(0, -2)
        ordinary = f(draws).sum() * len(logits) / len(draws)
        expected = torch.autograd.grad(ordinary, list(decoder.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_dense_flags_the_rows_that_packed_refuses() -> None:
    def f(z: Tensor, bad: Tensor) -> Tensor:
        return torch.where(bad & (z[:, 0] == 2), torch.inf, z.sum(-1).float())

    bad = torch.arange(50) % 7 == 3
    logits = torch.zeros(50, 2, 3)
    # category 2 is missed once in 10^10
    for estimator in (
        arsm.RLOO(samples=60),
        arsm.Average(arsm.ARSM(), 20),
    ):
        out = arsm.estimate(estimator, logits, f, bad, evaluation="dense")
        assert out.info["finite"].tolist() == (~bad).tolist()
    masked = logits.clone()
    masked[3, 1] = -torch.inf
    out = arsm.estimate(arsm.ARSM(), masked, f, torch.zeros_like(bad), evaluation="dense")
    assert out.info["finite"].logical_not().nonzero().tolist() == [[3]]


def test_a_query_takes_the_value_that_it_names() -> None:
    """Rows of their own: query 2 stands for query 1 in row 0 only."""
    points = torch.tensor([[[0], [1]], [[2], [3]], [[9], [5]]])
    same_as = torch.tensor([[0, 0], [1, 1], [1, 2]])
    queries = Queries(points, points[0], same_as, torch.ones(1))
    for evaluation in ("packed", "dense"):
        f = with_context(lambda z: z.sum(-1).double(), (), same_as.shape[1:])
        question = Question(arsm.ARSM(), torch.zeros(1), queries)
        values = evaluate(f, question, question.asked(evaluation))
        assert values.all.tolist() == [[0, 1], [2, 3], [2, 5]]
        assert values.live.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "estimator", [arsm.ARSM(), arsm.MuProp()]
)  # the second needs f's gradient at all queries
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("evaluation", "max_rows"), WAYS)
def test_silent_queries_take_the_first_ones_value_though_f_differs_between_equal_rows(
    evaluation: Evaluation, max_rows: int | None, frozen: bool, estimator: arsm.Estimator
) -> None:
    points, same_as = by_category(
        torch.tensor([[2], [0]]), torch.tensor([[[True, False, True]], [[True, True, False]]])
    )
    assert same_as.tolist() == [[0, 0], [1, 0], [0, 2], [0, 0]]
    called = itertools.count()
    queries = Queries(points, points[0], same_as, torch.ones(1))
    f = with_context(
        lambda z: torch.tensor([float(next(called)) for _ in z]), (), same_as.shape[1:]
    )
    question = Question(estimator, torch.zeros(1), queries)
    values = evaluate(f, question, question.asked(evaluation), max_rows=max_rows, frozen=frozen)
    assert torch.equal(values.all, values.all.gather(0, same_as))
    assert torch.equal(values.live, values.all[:1])
    assert values.all.unique().numel() == 4


def test_f_may_write_all_its_values_into_one_place() -> None:
    buffer = torch.empty(16)

    def simulator(z: Tensor) -> Tensor:
        return buffer[: len(z)].copy_(z.sum(-1).square())

    logits = torch.randn(30, 2, 6, generator=torch.Generator().manual_seed(0))
    noise = arsm.ARSM().noise(logits)
    found, expected = (
        arsm.estimate(arsm.ARSM(), logits, f, noise=noise, max_rows=16).grad
        for f in (simulator, lambda z: simulator(z).clone())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("evaluation", ["packed", "dense"])
@pytest.mark.parametrize(
    "estimator",
    [e for entry in ROSTER if entry.fits(2, 3) and not (e := entry.make(2, 3)).needs_gradient],
    ids=repr,
)
def test_f_may_write_into_its_input(estimator: arsm.Estimator, evaluation: Evaluation) -> None:
    logits = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    noise = estimator.noise(logits)

    def f(z: Tensor) -> Tensor:
        return arsm.one_hot(z, 3, torch.float64).flatten(1).cumsum(-1).sin().sum(-1)

    def writing(z: Tensor) -> Tensor:
        value = f(z)
        z.zero_()
        return value

    found, expected = (
        arsm.estimate(estimator, logits, each, noise=noise, evaluation=evaluation)
        for each in (writing, f)
    )
    assert torch.equal(found.z, expected.z)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


def test_several_references_share_their_evaluations() -> None:
    logits = torch.zeros(2, 3)
    log_pi = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]).log()
    noise = ReferenceNoise(log_pi, torch.tensor([0, 1, 2]))
    out = arsm.estimate(arsm.ARSM(references=3), logits, lambda z: z.sum(-1).float(), noise=noise)
    assert int(out.info["asked"]) == 10
    assert int(out.info["distinct"]) == 4  # z and three pairs
