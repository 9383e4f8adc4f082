"""Estimators from several samples: UnorderedSet, ExactPlusSampled, VIMCO and RLOO's surrogate.

Each one sample at a time by hand, and in the mean by enumerating all its samples.
"""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

import arsm
from arsm.estimators.unordered_set import set_weights
from tests.by_hand import assert_equal, cosine, exact, forced, given, normal
from tests.problems import PROBLEMS
from tests.statistics import SAMPLES

# ---------------------------------------------------------------- UnorderedSet


def ordered(logits: Tensor, draws: tuple[int, ...]) -> tuple[Tensor, float]:
    """The noise [1, C] under which these categories come first, in this order, and their
    probability.
    """
    rank = torch.full_like(logits, 100)
    rank[0, list(draws)] = torch.arange(len(draws), dtype=torch.float64)
    p, probability, left = logits.softmax(-1)[0], 1.0, 1.0
    for s in draws:
        probability *= float(p[s]) / left
        left -= float(p[s])
    return rank + logits - logits.max() - 100, probability


@pytest.mark.parametrize("k", [2, 3, 4])
def test_unordered_sets_are_exact_in_the_mean(k: int) -> None:
    logits, theta = normal(0, 1, 4), normal(1, 1, 4)
    cases = [ordered(logits, draws) for draws in permutations(range(4), k)]
    noise = torch.stack([case[0] for case in cases])
    probability = torch.tensor([case[1] for case in cases], dtype=torch.float64)
    count = len(cases)
    torch.testing.assert_close(probability.sum(), torch.ones_like(probability[0]))
    out = arsm.estimate(
        arsm.UnorderedSet(k),
        logits.expand(count, 1, 4),
        cosine,
        theta.expand(count, 1, 4),
        noise=noise,
    )
    expected = exact(logits, theta)
    assert out.grad is not None
    assert_equal((probability[:, None, None] * out.grad).sum(0), expected.grad)
    assert_equal((probability * out.value).sum(), expected.value)
    if k == 4:
        assert_equal(out.grad[0], expected.grad)
        assert_equal(out.grad[-1], expected.grad)


def test_one_unordered_pair_by_hand() -> None:
    """p({a,b}) = p_a p_b / (1 - p_a) + p_a p_b / (1 - p_b), and p^{D\\a}({b}) = p_b / (1 - p_a)."""
    logits, theta = normal(2, 1, 5), normal(3, 1, 5)
    a, b = 3, 1
    out = arsm.estimate(
        arsm.UnorderedSet(2), logits, cosine, theta, noise=ordered(logits, (a, b))[0]
    )
    assert out.z.tolist() == [a]
    p = logits.softmax(-1)[0]
    f = [float(cosine(torch.tensor([[c]]), theta.unsqueeze(0))) for c in range(5)]
    pair = p[a] * p[b] / (1 - p[a]) + p[a] * p[b] / (1 - p[b])
    expected, value = torch.zeros(5, dtype=torch.float64), 0.0
    for s, other in ((a, b), (b, a)):
        weight = p[s] * p[other] / (1 - p[s]) / pair
        baseline = p[s] * f[s] + p[other] * f[other] / (p[other] / (1 - p[s]))
        expected += weight * (f[s] - baseline) * (torch.eye(5)[s] - p)
        value += float(weight) * f[s]
    torch.testing.assert_close(out.grad, expected.unsqueeze(0))
    assert float(out.value) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0, 3000.0])
def test_weights_of_a_set_by_its_permutations(scale: float) -> None:
    """In exact arithmetic over all orders, also where p spans hundreds of orders of magnitude."""
    log_p = (scale * normal(0, 7)).log_softmax(0)
    members = [1, 4, 0, 6]
    rest = log_p[[c for c in range(7) if c not in members]].logsumexp(0)
    first, second = set_weights(log_p[members], rest)

    def log_probability(subset: tuple[int, ...]) -> Tensor:
        """ln p^{D\\A}(T), A the members outside T."""
        orders = []
        for order in permutations(subset):
            total = torch.zeros((), dtype=torch.float64)
            for place in range(len(order)):
                remaining = torch.stack([rest, *(log_p[s] for s in order[place:])]).logsumexp(0)
                total = total + log_p[order[place]] - remaining
            orders.append(total)
        return torch.stack(orders).logsumexp(0)

    for i, s in enumerate(members):
        without = tuple(m for m in members if m != s)
        expected = log_p[s] + log_probability(without) - log_probability(tuple(members))
        torch.testing.assert_close(first[i], expected.exp(), rtol=1e-9, atol=1e-300)
        for j, other in enumerate(members):
            ratio = torch.zeros((), dtype=torch.float64)
            if other != s:
                ratio = log_probability(tuple(m for m in without if m != other)) - log_probability(
                    without
                )
            torch.testing.assert_close(
                second[i, j], (log_p[other] + ratio).exp(), rtol=1e-9, atol=1e-300
            )
    torch.testing.assert_close(first.sum(0), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(second.sum(1), torch.ones(4, dtype=torch.float64))


def test_a_set_of_all_unmasked_categories_is_exact() -> None:
    logits, theta = normal(0, 6, 1, 5), normal(1, 6, 1, 5)
    logits[..., [0, 3]] = -torch.inf
    asked: list[int] = []

    def f(z: Tensor, theta: Tensor) -> Tensor:
        asked.extend(z.flatten().tolist())
        return cosine(z, theta)

    out = arsm.estimate(arsm.UnorderedSet(4), logits, f, theta)
    assert_equal(out.grad, exact(logits, theta).grad)
    assert set(asked) == {1, 2, 4}


# ---------------------------------------------------------------- ExactPlusSampled


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_exact_plus_sampled_is_exact_in_the_mean(k: int, m: int) -> None:
    logits, theta = normal(0, 1, 5), normal(1, 1, 5)
    p, order = logits.softmax(-1)[0].sort(descending=True)
    tail, tail_p = order[k:], p[k:] / p[k:].sum()
    choice = torch.tensor(list(product(range(5 - k), repeat=m)))
    probability = tail_p[choice].prod(-1)
    count = len(choice)
    noise = forced(tail[choice].unsqueeze(-1), 5)
    out = arsm.estimate(
        arsm.ExactPlusSampled(k, m),
        logits.expand(count, 1, 5),
        cosine,
        theta.expand(count, 1, 5),
        noise=noise,
    )
    expected = exact(logits, theta)
    assert out.grad is not None
    assert_equal((probability[:, None, None] * out.grad).sum(0), expected.grad)
    assert_equal((probability * out.value).sum(), expected.value)


def test_one_exact_plus_sampled_by_hand() -> None:
    logits, theta = torch.tensor([[0.1, 2.0, -0.5, 1.0, 0.3]], dtype=torch.float64), normal(1, 1, 5)
    v = [0, 4, 0]
    noise = forced(torch.tensor(v).unsqueeze(-1), 5)
    out = arsm.estimate(arsm.ExactPlusSampled(2, 3), logits, cosine, theta, noise=noise)
    p = logits.softmax(-1)[0]
    f = [float(cosine(torch.tensor([[c]]), theta.unsqueeze(0))) for c in range(5)]
    q = 1 - p[1] - p[3]
    x = torch.eye(5, dtype=torch.float64) - p
    expected = torch.zeros(5, dtype=torch.float64)
    for i in range(3):
        baseline = p[1] * f[1] + p[3] * f[3] + q * sum(f[v[j]] for j in range(3) if j != i) / 2
        expected += sum(p[c] * (f[c] - baseline) * x[c] for c in (1, 3)) / 3
        expected += q * (f[v[i]] - baseline) * x[v[i]] / 3
    torch.testing.assert_close(out.grad, expected.unsqueeze(0))
    assert int(out.info["distinct"]) == 4  # the two likeliest, and 0 and 4


def test_the_true_sample_of_exact_plus_sampled_is_a_sample() -> None:
    """It is the first race's winner, which is among the evaluated ones, and needs no evaluation of
    its own.
    """
    logits = normal(0, 1, 4).expand(200, 1, 4)
    estimator = arsm.ExactPlusSampled(1, 2)
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))
    queries = estimator.ask(logits, noise)
    assert torch.equal(queries.z, arsm.extend.argmin_sample(logits, noise[:, 0]))
    assert torch.equal(queries.points[0], queries.z)
    number = torch.arange(len(queries.same_as)).unsqueeze(-1)
    assert ((queries.same_as == number).sum(0) <= 3).all()


# ---------------------------------------------------------------- VIMCO


def test_vimco_is_exact_in_the_mean() -> None:
    """Of the gradient of its bound, by autograd through the enumeration of all pairs of samples."""
    logits, theta = normal(0, 2, 3).requires_grad_(), normal(1, 2, 3)
    z = torch.tensor(list(product(range(3), repeat=2)))
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    log_q = arsm.log_prob(logits.log_softmax(-1).expand(9, 2, 3), z).sum(-1)
    f = cosine(z, theta.expand(9, 2, 3))
    bound = (log_q[pairs].sum(-1).exp() * (f[pairs].exp().mean(-1)).log()).sum()
    expected = torch.autograd.grad(bound, logits, retain_graph=True)[0]
    out = arsm.estimate(
        arsm.VIMCO(2),
        logits.detach().expand(81, 2, 3),
        cosine,
        theta.expand(81, 2, 3),
        noise=given(z[pairs]),
    )
    probability = log_q[pairs].sum(-1).exp().detach()
    assert out.grad is not None
    assert_equal((probability[:, None, None] * out.grad).sum(0), expected)
    assert_equal((probability * out.value).sum(), bound.detach())


def test_one_vimco_sample_by_hand() -> None:
    logits, theta = normal(0, 2, 3), normal(1, 2, 3)
    z = torch.tensor([[0, 2], [1, 1], [0, 0], [1, 1]])
    out = arsm.estimate(arsm.VIMCO(4), logits, cosine, theta, noise=given(z))
    f = cosine(z, theta.expand(4, 2, 3)).tolist()

    def bound(values: list[float]) -> float:
        return math.log(sum(map(math.exp, values)) / 4)

    expected = torch.zeros(2, 3, dtype=torch.float64)
    for i in range(4):
        others = [f[j] for j in range(4) if j != i]
        signal = bound(f) - bound([*others, sum(others) / 3])
        expected += signal * (torch.nn.functional.one_hot(z[i], 3) - logits.softmax(-1))
    torch.testing.assert_close(out.grad, expected)
    assert float(out.value) == pytest.approx(bound(f), rel=1e-12)


def test_vimco_of_large_log_weights_stays_finite() -> None:
    logits = normal(0, 20, 2, 3)
    out = arsm.estimate(arsm.VIMCO(3), logits, lambda z: 1e4 * z.sum(-1).double())
    assert out.grad is not None
    assert bool(out.grad.isfinite().all())
    largest = 1e4 * out.z.sum(-1).amax(-1).double()
    assert bool(((out.value <= largest) & (out.value >= largest - math.log(3))).all())


@pytest.mark.parametrize(
    "words", ["rloo", "rloo:ridge=1.0", "carms", "double-control", "vimco:samples=50"]
)
def test_a_constant_in_f_changes_nothing(words: str) -> None:
    estimator, logits = arsm.estimator(words), normal(0, 200, 2, 3).float()
    # where a half and a whole still can be told apart
    constant = -1e5 if words.startswith("vimco") else 1e7
    noise = estimator.noise(logits)

    def f(z: Tensor, c: Tensor) -> Tensor:
        z = z if z.ndim == 2 else z @ torch.arange(3.0)
        return z.sum(-1) * (0.5 if words.startswith("vimco") else 1.0) + c

    found, expected = (
        arsm.estimate(estimator, logits, f, torch.full((200,), c), noise=noise).grad
        for c in (constant, 0.0)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_large_ridge_is_plain_leave_one_out() -> None:
    logits = normal(0, 100, 2, 3).float()
    noise = arsm.RLOO(3).noise(logits)
    plain, ridge = (
        arsm.estimate(e, logits, lambda z: z.float().sum(-1), noise=noise).grad
        for e in (arsm.RLOO(3), arsm.RLOO(3, ridge=1e30))
    )
    torch.testing.assert_close(ridge, plain)


def test_an_average_of_bounds_is_no_bound_of_averages() -> None:
    logits, theta = normal(0, 6, 2, 3), normal(1, 6, 2, 3)
    estimator = arsm.Average(arsm.VIMCO(3), 2)
    out = arsm.estimate(
        estimator, logits, cosine, theta, generator=torch.Generator().manual_seed(0)
    )
    f = cosine(out.z.reshape(-1, 2), theta.repeat_interleave(6, 0)).view(6, 2, 3)
    torch.testing.assert_close(out.value, (f.logsumexp(-1) - math.log(3)).mean(-1))


# ---------------------------------------------------------------- RLOO with a surrogate


def surrogate_by_hand(logits: Tensor, z: Tensor, f: Tensor, h: Tensor) -> Tensor:
    """Row by row, n samples each: logits and h [B, K, C], z [B, n, K], f [B, n] -> [B, K, C]."""
    rows, n = f.shape
    p = logits.softmax(-1)
    x = torch.nn.functional.one_hot(z, logits.shape[-1]) - p.unsqueeze(1)
    hx = torch.einsum("bkc,bnkc->bn", h, x)
    out = torch.zeros_like(logits)
    for b in range(rows):
        others = [row for row in range(rows) if row != b]
        covariance = sum(
            float(((f[o] - f[o].mean()) * (hx[o] - hx[o].mean())).sum()) for o in others
        )
        beta = covariance / sum(float((hx[o] - hx[o].mean()).square().sum()) for o in others)
        rest = f[b] - beta * hx[b]
        for i in range(n):
            out[b] += (rest[i] - (rest.sum() - rest[i]) / (n - 1)) * x[b, i] / n
        for k in range(logits.shape[1]):
            covariance_of_z = p[b, k].diag() - p[b, k].outer(p[b, k])
            out[b, k] += beta * covariance_of_z @ h[b, k]
    return out


def test_one_surrogate_sample_by_hand() -> None:
    logits, theta, h = normal(0, 4, 2, 3), normal(1, 4, 2, 3), normal(2, 4, 2, 3)
    for estimator, known in (
        (arsm.RLOO(3, surrogate="logits"), logits),
        (arsm.RLOO(3, surrogate=h), h),
    ):
        out = arsm.estimate(estimator, logits, cosine, theta)
        f = cosine(out.z.reshape(-1, 2), theta.repeat_interleave(3, 0)).view(4, 3)
        torch.testing.assert_close(out.grad, surrogate_by_hand(logits, out.z, f, known))


@pytest.mark.parametrize("ridge", [None, 0.5])
def test_a_surrogate_is_exact_in_the_mean(ridge: float | None) -> None:
    """All samples of two rows, of which each lends the other its coefficient."""
    logits, theta, h = normal(0, 2, 1, 3), normal(1, 2, 1, 3), normal(2, 2, 1, 3)
    z = torch.tensor(list(product(range(3), repeat=4))).view(81, 2, 2, 1)
    estimator = arsm.RLOO(2, ridge=ridge, surrogate=h)
    mean = torch.zeros_like(logits)
    for draws in z:
        probability = (
            arsm.log_prob(logits.log_softmax(-1).unsqueeze(1).expand(2, 2, 1, 3), draws).sum().exp()
        )
        grad = arsm.estimate(estimator, logits, cosine, theta, noise=given(draws)).grad
        assert grad is not None
        mean += probability * grad
    assert_equal(mean, exact(logits, theta).grad)


def test_a_perfect_surrogate_leaves_no_variance() -> None:
    logits = normal(0, 5, 3, 4)

    def f(z: Tensor, scores: Tensor) -> Tensor:
        return 3 * arsm.log_prob(scores, z).sum(-1) + 7

    for estimator in (
        arsm.RLOO(3, surrogate="logits"),
        arsm.RLOO(3, ridge=1.0, surrogate="logits"),
    ):
        out = arsm.estimate(estimator, logits, f, logits)
        torch.testing.assert_close(out.grad, arsm.estimate(arsm.Exact(), logits, f, logits).grad)


def test_masked_logits_are_a_surrogate_too() -> None:
    logits, theta = normal(0, 5, 2, 4), normal(1, 5, 2, 4)
    logits[..., 1] = -torch.inf
    out = arsm.estimate(arsm.RLOO(4, surrogate="logits"), logits, cosine, theta)
    assert out.grad is not None
    assert bool(out.grad.isfinite().all())
    assert not out.grad[..., 1].any()


# ---------------------------------------------------------------- what they are for


@pytest.mark.parametrize(
    ("estimator", "evaluations", "limit"),
    [
        (arsm.UnorderedSet(2), 2, 0.7),
        (arsm.UnorderedSet(3), 3, 0.35),
        (arsm.ExactPlusSampled(1, 1), 2, 0.7),
        (arsm.ExactPlusSampled(3, 2), 5, 0.1),
    ],
)
def test_variance_against_leave_one_out_at_equal_evaluations(
    estimator: arsm.Estimator, evaluations: int, limit: float
) -> None:
    """The ratios are 0.59, 0.25, 0.55 and 0.03 with a standard error below 0.02."""
    problem = next(p for p in PROBLEMS if p.name == "one variable")
    logits, theta = (
        problem.logits.repeat(SAMPLES // 2, 1, 1, 1),
        problem.theta.repeat(SAMPLES // 2, 1, 1),
    )
    found = []
    for each in (estimator, arsm.RLOO(evaluations)):
        out = arsm.estimate(
            each, logits, problem.f, theta, generator=torch.Generator().manual_seed(0)
        )
        assert out.grad is not None
        found.append(float(out.grad.var(0).sum()))
    assert found[0] < limit * found[1]


@pytest.mark.parametrize("estimator", [arsm.UnorderedSet(2), arsm.ExactPlusSampled(1, 2)])
def test_one_variable_only(estimator: arsm.Estimator) -> None:
    with pytest.raises(
        ValueError,
        match=r"is for one variable, logits \[C\] or \[\*B, 1, C\], but they are \[4, 2, 3\]",
    ):
        arsm.estimate(estimator, torch.zeros(4, 2, 3), lambda z: z.sum(-1).float())


def test_more_samples_without_replacement_than_categories_are_all_categories() -> None:
    logits, theta = normal(0, 1, 3), normal(1, 1, 3)
    assert_equal(
        arsm.estimate(arsm.UnorderedSet(4), logits, cosine, theta).grad, exact(logits, theta).grad
    )


def test_refusals() -> None:
    def run(estimator: arsm.Estimator, *shape: int) -> None:
        arsm.estimate(estimator, torch.zeros(shape), lambda z: z.sum(-1).float())

    with pytest.raises(ValueError, match="takes 2 to 10 of them, but samples = 1"):
        arsm.UnorderedSet(1)
    with pytest.raises(ValueError, match="takes 2 to 10 of them, but samples = 11"):
        arsm.UnorderedSet(11)
    with pytest.raises(ValueError, match="exact = 0 and samples = 2"):
        arsm.ExactPlusSampled(0, 2)
    with pytest.raises(ValueError, match="exact = 1 and samples = 0"):
        arsm.ExactPlusSampled(1, 0)
    with pytest.raises(
        ValueError, match="exact = 3 leaves none of the 3 categories to sample; use Exact"
    ):
        run(arsm.ExactPlusSampled(3, 1), 3)
    with pytest.raises(
        ValueError, match="VIMCO compares samples with each other and needs at least 2"
    ):
        arsm.VIMCO(1)
    with pytest.raises(
        ValueError, match="DoubleControl compares samples with each other and needs at least 2"
    ):
        arsm.DoubleControl(1)
    with pytest.raises(ValueError, match="autograd finds no way from f's values to z"):
        arsm.estimate(
            arsm.DoubleControl(2), torch.zeros(3, 2, 3), lambda z: z.detach().sum((-2, -1))
        )
    with pytest.raises(ValueError, match='surrogate must be "logits" or a tensor'):
        arsm.RLOO(surrogate="slope")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="needs at least two rows, but the batch has the shape \\[1\\]"
    ):
        run(arsm.RLOO(surrogate="logits"), 1, 2, 3)
    with pytest.raises(ValueError, match=r"shaped like the logits \[4, 2, 3\], but is \[2, 3\]"):
        run(arsm.RLOO(surrogate=torch.zeros(2, 3)), 4, 2, 3)
