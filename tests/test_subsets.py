"""k-subsets: law, marginals, samples and both estimators against enumeration of all subsets."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
import torch
from torch import Tensor

import arsm
from arsm.subsets import draw_subsets, members
from arsm.types import Queries
from tests.statistics import SAMPLES, deviations

MASKED = torch.tensor([0.3, -torch.inf, 1.2, -0.7, 0.1, 2.0], dtype=torch.float64)
PLAIN = torch.tensor([0.3, -1.0, 1.2, -0.7, 0.1], dtype=torch.float64)
CASES = [(PLAIN, 1), (PLAIN, 2), (PLAIN, 4), (PLAIN, 5), (MASKED, 2), (MASKED, 5)]


def subsets(logits: Tensor, k: int) -> Tensor:
    return torch.tensor(list(combinations(range(len(logits)), k)))


def law(logits: Tensor, k: int) -> Tensor:
    """q(S) of all subsets, by definition and differentiable."""
    products = logits.exp()[subsets(logits, k)].prod(-1)
    return products / products.sum()


def interacting(z: Tensor) -> Tensor:
    """Of the members alone: not linear in them."""
    x = members(z, 6)
    weight = torch.tensor([1.0, -2.0, 0.7, 1.5, -0.4, 0.9], dtype=torch.float64)[: x.shape[-1]]
    total = (x * weight).sum(-1)
    return total.cos() + 0.3 * total.square() + 2


@pytest.mark.parametrize(("logits", "k"), CASES)
def test_law_and_marginals_are_those_of_the_definition(logits: Tensor, k: int) -> None:
    every = subsets(logits, k)
    q = law(logits, k)
    possible = q > 0
    log_q = arsm.subset_log_prob(logits.expand(len(every), -1), every)
    assert torch.allclose(log_q.exp()[possible], q[possible], atol=1e-14)
    assert bool((log_q[~possible] < -1e20).all())
    mu = arsm.subset_marginals(logits, k)
    assert torch.allclose(mu, (q.unsqueeze(-1) * members(every, len(logits))).sum(0), atol=1e-14)
    assert float(mu.sum()) == pytest.approx(k, abs=1e-12)


def test_marginals_are_exact_far_apart_and_for_many_categories() -> None:
    logits = torch.tensor([0.0, -300.0, -500.0, -800.0], dtype=torch.float64)
    assert torch.allclose(
        arsm.subset_marginals(logits, 2), torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    )
    mu = arsm.subset_marginals(torch.zeros(400), 150)
    assert torch.allclose(mu, torch.full_like(mu, 150 / 400), atol=1e-10)
    value = arsm.subset_log_prob(torch.zeros(60), torch.arange(30))
    assert float(value.exp()) == pytest.approx(1 / comb(60, 30), rel=1e-9)


def test_the_marginals_slope_is_the_covariance() -> None:
    slope = torch.autograd.functional.jacobian(lambda phi: arsm.subset_marginals(phi, 2), PLAIN)
    x = members(subsets(PLAIN, 2), 5) - arsm.subset_marginals(PLAIN, 2)
    covariance = torch.einsum("s,si,sj->ij", law(PLAIN, 2), x, x)
    assert torch.allclose(slope, covariance, atol=1e-13)


@pytest.mark.parametrize(("logits", "k"), CASES)
def test_samples_follow_the_law(logits: Tensor, k: int) -> None:
    u = torch.rand(
        SAMPLES, len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    z = draw_subsets(logits, u, k)
    assert bool((z[:, 1:] > z[:, :-1]).all())
    found = (z.unsqueeze(1) == subsets(logits, k)).all(-1).double()
    assert bool((found.sum(-1) == 1).all())
    assert float(deviations(found, law(logits, k)).max()) <= 1


def estimates(estimator: arsm.Estimator, logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.expand(SAMPLES, 1, -1).clone().requires_grad_()
    out = arsm.estimate(
        estimator, rows, interacting, max_rows=None, generator=torch.Generator().manual_seed(1)
    )
    (gradient,) = torch.autograd.grad(out.value.sum(), rows)
    return out.value.detach(), gradient.squeeze(1)


def truth(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """E[f] and its gradient, zero where a category is masked."""
    phi = logits.clone().requires_grad_()
    value = (law(phi, k) * interacting(subsets(logits, k))).sum()
    (gradient,) = torch.autograd.grad(value, phi)
    return value.detach(), gradient.nan_to_num(0)


@pytest.mark.parametrize(("logits", "k"), [*CASES[:3], CASES[4]])
def test_leave_one_out_is_unbiased(logits: Tensor, k: int) -> None:
    value, gradient = estimates(arsm.SubsetRLOO(k, 3), logits)
    expected = truth(logits, k)
    assert float(deviations(value, expected[0])) <= 1
    assert float(deviations(gradient, expected[1]).max()) <= 1


class GumbelTopK(arsm.SubsetRLOO):
    """Draws the k largest noisy logits: another law over subsets, with other marginals."""

    def ask(self, logits: Tensor, noise: Tensor) -> Queries:
        z = (logits - (-noise.log()).log()).topk(self.k, -1).indices.sort(-1).values
        points = z.movedim(-2, 0)
        return Queries(
            points, z, arsm.extend.share(points), torch.full((self.samples,), 1 / self.samples)
        )


def test_another_law_is_caught() -> None:
    _, gradient = estimates(GumbelTopK(2, 3), PLAIN)
    assert float(deviations(gradient, truth(PLAIN, 2)[1]).max()) > 1


def test_one_of_c_is_the_categorical_leave_one_out() -> None:
    assert torch.allclose(arsm.subset_marginals(PLAIN, 1), PLAIN.softmax(-1))
    subset, plain = arsm.SubsetRLOO(1, 5), arsm.RLOO(5)
    logits = PLAIN.view(1, 1, 5)
    queries = plain.ask(logits, plain.noise(logits))
    values = torch.rand(5, 1, dtype=torch.float64)
    assert torch.allclose(subset.tell(logits, queries, values), plain.tell(logits, queries, values))


def test_simple_is_the_covariance_times_the_slope() -> None:
    logits = PLAIN.view(1, 1, 5).clone().requires_grad_()
    estimator = arsm.SIMPLE(2)
    noise = estimator.noise(logits)
    out = arsm.estimate(estimator, logits, interacting, noise=noise)
    (gradient,) = torch.autograd.grad(out.value.sum(), logits)
    point = members(out.z, 5).requires_grad_()
    (slope,) = torch.autograd.grad(interacting(point.unsqueeze(-2)).sum(), point)
    x = members(subsets(PLAIN, 2), 5) - arsm.subset_marginals(PLAIN, 2)
    covariance = torch.einsum("s,si,sj->ij", law(PLAIN, 2), x, x)
    assert torch.allclose(gradient.flatten(), covariance @ slope.flatten(), atol=1e-12)
    assert out.z.shape == (1, 2)


def test_simple_is_exact_for_linear_f() -> None:
    logits = PLAIN.clone().requires_grad_()
    weight = torch.arange(5.0, dtype=torch.float64)
    arsm.estimate(
        arsm.SIMPLE(2), logits, lambda z: (z.squeeze(-2) * weight).sum(-1)
    ).value.sum().backward()
    phi = PLAIN.clone().requires_grad_()
    (arsm.subset_marginals(phi, 2) * weight).sum().backward()
    assert torch.allclose(logits.grad, phi.grad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("logits", "estimator", "words"),
    [
        (torch.zeros(3), arsm.SubsetRLOO(4), "fewer that are not masked"),
        (MASKED, arsm.SIMPLE(6), "fewer that are not masked"),
        (torch.zeros(2, 3), arsm.SubsetRLOO(2), "one variable"),
    ],
)
def test_refusals(logits: Tensor, estimator: arsm.Estimator, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arsm.estimate(estimator, logits, interacting)


@pytest.mark.parametrize("k", [0, 1.5])
def test_k_must_count(k: int) -> None:
    with pytest.raises(ValueError, match="k"):
        arsm.SIMPLE(k)
    with pytest.raises(ValueError, match="k"):
        arsm.subset_marginals(torch.zeros(3), k)


def test_marginals_of_too_few_categories_are_nan() -> None:
    few = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 1.0, -torch.inf]])
    assert arsm.subset_marginals(few, 2).isnan().tolist() == [[True] * 3, [False] * 3]
    assert arsm.subset_marginals(torch.zeros(3), 4).isnan().all()
