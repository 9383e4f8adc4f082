"""The regression that lowers the variance of a search's steps: its fit, its expectation's gradient,
and that the step stays unbiased.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm.search import rounds
from arsm.search.surrogate import DECAY, NOISE, Surrogate, exponent_of, in_units
from tests.statistics import deviations

SIZES = [3, 2, 4]
EVERY = torch.tensor(list(itertools.product(*map(range, SIZES))))


def bumpy(z: Tensor) -> Tensor:
    """[..., 3] -> [...], with terms of single variables, of pairs and of all three."""
    a, b, c = z.double().unbind(-1)
    return a - 0.7 * b + 0.4 * a * c + torch.sin(2 * a * b + c)


def fitted(count: int = 12) -> Surrogate:
    points = EVERY[torch.randperm(len(EVERY), generator=torch.Generator().manual_seed(0))[:count]]
    found = Surrogate.fitted([tuple(z) for z in points.tolist()], bumpy(points).tolist())
    assert found is not None
    return found


def test_the_fit_is_a_kernel_ridge_regression() -> None:
    """h(z) - m = s (1 + k(z, Z)) (1 + k(Z, Z) + NOISE I)^-1 (f - m) / s, written out."""
    h = fitted()
    f = bumpy(h.points)

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        differences = (x.unsqueeze(1) != y.unsqueeze(0)).sum(-1)
        return 1 + torch.exp(-DECAY * differences.double() / len(SIZES))

    gram = kernel(h.points, h.points) + NOISE * torch.eye(len(f))
    expected = f.mean() + kernel(EVERY, h.points) @ torch.linalg.solve(gram, f - f.mean())
    torch.testing.assert_close(h(EVERY) * 2.0**h.exponent, expected)


def test_the_gradient_of_its_expectation_is_that_of_enumeration() -> None:
    h = fitted()
    logits = torch.full((3, 4), -torch.inf, dtype=torch.float64)
    for row, size in zip(logits, SIZES, strict=True):
        row[:size] = torch.randn(size, generator=torch.Generator().manual_seed(size))
    logits.requires_grad_()
    log_p = logits.log_softmax(-1)[torch.arange(3), EVERY].sum(-1)
    (expected,) = torch.autograd.grad((log_p.exp() * h(EVERY)).sum(), logits)
    legal = logits.isfinite()
    found = h.gradient(logits.detach().softmax(-1))
    torch.testing.assert_close(found[legal], expected[legal])
    assert bool((found[~legal] == 0).all())


def test_a_penalty_does_not_hide_the_other_values() -> None:
    points = [tuple(z) for z in EVERY.tolist()]
    values = bumpy(EVERY)
    wrong = EVERY[:, 0] == 1
    h = Surrogate.fitted(points, values.masked_fill(wrong, -1e300).tolist())
    assert h is not None
    error = h(EVERY)[~wrong] * 2.0**h.exponent - values[~wrong]
    assert error.std() < 0.3 * values[~wrong].std()


def test_values_that_are_all_equal_have_no_regression() -> None:
    assert Surrogate.fitted([(0, 0, 0), (1, 0, 0)], [3.0, 3.0]) is None


@pytest.mark.parametrize("values", [[1e-310, -3e-312], [1.5, -0.2], [1e308, 0.0]])
def test_units(values: list[float]) -> None:
    scaled = in_units(values, exponent_of(values))
    assert 0.5 <= float(scaled.abs().max()) < 1


def one_step(estimator: Any, seed: int) -> Tensor:
    """The gradient of a round with a regression on half of all points."""
    search = arsm.Search(SIZES, evaluations=4000, estimator=estimator, seed=seed)
    for point in EVERY[::2].tolist():
        search.known.add(tuple(point), float(bumpy(torch.tensor(point))), None)
    search.known.round_start = len(search.known.values)
    asked = search._begin()
    assert asked.surrogate is not None
    for point in asked.evaluated:
        search.known.add(point, float(bumpy(torch.tensor(point))), None)
    _, gradient = search._gradient(asked)
    assert gradient is not None
    return gradient * 2.0**asked.surrogate.exponent


@pytest.mark.parametrize("estimator", [arsm.RLOO(64), arsm.RLOO(64, ridge=1.0)])
def test_a_step_with_a_regression_is_unbiased(
    estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "FEWEST", 8)
    logits = torch.zeros(3, 4, dtype=torch.float64)
    for row, size in zip(logits, SIZES, strict=True):
        row[size:] = -torch.inf
    logits.requires_grad_()
    log_p = logits.log_softmax(-1)[torch.arange(3), EVERY].sum(-1)
    (expected,) = torch.autograd.grad((log_p.exp() * bumpy(EVERY)).sum(), logits)
    found = torch.stack([one_step(estimator, seed) for seed in range(400)])
    legal = logits.isfinite()
    assert bool((deviations(found[:, legal], expected[legal]) < 1).all())
