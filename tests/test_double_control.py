"""DoubleControl by hand, in the mean over all its samples, and what it learns."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import arsm
from tests.by_hand import assert_equal, cosine, exact, given, normal


def double_control_by_hand(logits: Tensor, z: Tensor, theta: Tensor, alpha: float) -> Tensor:
    """All pairs: logits [K, C], z [n, K] -> [K, C]."""
    n, p = len(z), logits.softmax(-1)
    points = arsm.one_hot(z, logits.shape[-1], torch.float64).requires_grad_()
    f = cosine(points, theta.expand(n, *theta.shape))
    h = torch.autograd.grad(f.sum(), points)[0]
    f, points = f.detach(), points.detach()
    out = torch.zeros_like(logits)
    linear = [
        sum((h[j] * (points[i] - p)).sum() for j in range(n) if j != i) / (n - 1) for i in range(n)
    ]
    rest = [f[i] - alpha * linear[i] for i in range(n)]
    for i in range(n):
        out += (rest[i] - sum(rest[j] for j in range(n) if j != i) / (n - 1)) * (points[i] - p) / n
    for k in range(len(p)):
        out[k] += alpha * (p[k].diag() - p[k].outer(p[k])) @ h[:, k].mean(0)
    return out


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [2, 3])
def test_double_control_by_hand_and_in_the_mean(n: int, alpha: float) -> None:
    logits, theta = normal(0, 2, 3), normal(1, 2, 3)
    z = torch.tensor(list(product(range(3), repeat=2 * n))).view(-1, n, 2)
    rows = [x.expand(len(z), 2, 3) for x in (logits, theta)]
    out = arsm.estimate(arsm.DoubleControl(n, alpha), rows[0], cosine, rows[1], noise=given(z))
    by_hand = torch.stack([double_control_by_hand(logits, draws, theta, alpha) for draws in z])
    torch.testing.assert_close(out.grad, by_hand)
    probability = arsm.log_prob(logits.log_softmax(-1).expand(*z.shape, 3), z).sum((-2, -1)).exp()
    assert_equal((probability[:, None, None] * by_hand).sum(0), exact(logits, theta).grad)


def test_double_control_without_slopes_is_rloo_and_with_them_exact_on_linear_functions() -> None:
    logits, theta = normal(0, 9, 2, 3), normal(1, 9, 2, 3)
    noise = arsm.RLOO(4).noise(logits, torch.Generator().manual_seed(0))
    rloo = arsm.estimate(arsm.RLOO(4), logits, cosine, theta, noise=noise)
    torch.testing.assert_close(
        arsm.estimate(arsm.DoubleControl(4, 0.0), logits, cosine, theta, noise=noise).grad,
        rloo.grad,
    )

    def linear(z: Tensor, theta: Tensor) -> Tensor:
        return (arsm.one_hot(z, 3, torch.float64) * theta).sum((-2, -1))

    expected = arsm.estimate(arsm.Exact(), logits, linear, theta).grad
    torch.testing.assert_close(
        arsm.estimate(arsm.DoubleControl(4, 1.0), logits, linear, theta).grad, expected
    )


def test_double_control_evaluates_equal_samples_once() -> None:
    logits, theta = 3 * normal(0, 5, 2, 3), normal(1, 5, 2, 3)
    noise = arsm.RLOO(6).noise(logits, torch.Generator().manual_seed(0))
    rows = []

    def counted(z: Tensor, theta: Tensor) -> Tensor:
        rows.append(len(z))
        return cosine(z, theta)

    rloo, packed = (
        arsm.estimate(estimator, logits, counted, theta, noise=noise)
        for estimator in (arsm.RLOO(6), arsm.DoubleControl(6))
    )
    dense = arsm.estimate(
        arsm.DoubleControl(6), logits, counted, theta, noise=noise, evaluation="dense"
    )
    assert torch.equal(packed.info["distinct"], rloo.info["distinct"])
    assert sum(rows) == 2 * int(rloo.info["distinct"].sum()) + 30
    assert int(rloo.info["distinct"].sum()) < 25
    torch.testing.assert_close(packed.grad, dense.grad)
    torch.testing.assert_close(packed.value, dense.value)


def test_double_control_learns_alpha() -> None:
    """On a linear function the best alpha is 1."""
    logits, theta = normal(0, 50, 2, 3), normal(1, 50, 2, 3)
    estimator = arsm.DoubleControl(3, 0.2)
    optimiser = torch.optim.SGD(estimator.learned.parameters(), 0.2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        out = arsm.estimate(
            estimator,
            logits,
            lambda z, t: (arsm.one_hot(z, 3, torch.float64) * t).sum((-2, -1)),
            theta,
            generator=generator,
        )
        assert out.estimator_loss is not None
        optimiser.zero_grad()
        out.estimator_loss.backward()
        optimiser.step()
    assert float(estimator.control.alpha.detach()) == pytest.approx(1, abs=0.05)
