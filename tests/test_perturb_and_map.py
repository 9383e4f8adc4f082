"""I-MLE and AIMLE: their formulas under fixed noise, their limits, and how AIMLE's step adapts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import arsm
from arsm.noise import dirichlet
from tests.by_hand import assert_equal, normal
from tests.problems import extreme_logits
from tests.statistics import deviations

B, K, C = 40, 2, 4


def f(z: Tensor, theta: Tensor) -> Tensor:
    """Smooth, and no sum of one term per variable."""
    x = (arsm.one_hot(z, theta.shape[-1] // K, theta.dtype).flatten(1) * theta).sum(-1)
    return x.sin() + 0.5 * x.square()


def setting() -> tuple[Tensor, Tensor, Tensor]:
    """logits [B, K, C], theta [B, K C], ln pi [B, K, C]."""
    logits = normal(0, B, K, C)
    return logits, normal(1, B, K * C), dirichlet(logits, torch.Generator().manual_seed(2))


def chosen(theta: Tensor, log_pi: Tensor) -> Tensor:
    """One-hot argmax of theta plus Gumbel noise: [C] -> [C]."""
    gumbels = -torch.log(log_pi.exp() * 3.7)
    return torch.eye(C, dtype=theta.dtype)[int((theta + gumbels).argmax())]


def slopes(logits: Tensor, theta: Tensor, log_pi: Tensor) -> Tensor:
    """df/dz at the true samples: [B, K, C]."""
    z = torch.stack(
        [torch.stack([chosen(logits[b, k], log_pi[b, k]) for k in range(K)]) for b in range(B)]
    ).requires_grad_()
    return torch.autograd.grad(f(z, theta).sum(), z)[0]


def grad_of(made: arsm.Estimator, logits: Tensor, theta: Tensor, log_pi: Tensor) -> Tensor:
    grad = arsm.estimate(made, logits, f, theta, noise=log_pi).grad
    assert grad is not None
    return grad


@pytest.mark.parametrize("step", [0.2, 1.0, 5.0])
def test_imle_is_the_move_of_the_sample_over_the_step(step: float) -> None:
    logits, theta, log_pi = setting()
    h = slopes(logits, theta, log_pi)
    expected = torch.zeros_like(logits)
    for b in range(B):
        for k in range(K):
            there = chosen(logits[b, k] + step * h[b, k], log_pi[b, k])
            expected[b, k] = (there - chosen(logits[b, k], log_pi[b, k])) / step
    found = grad_of(arsm.IMLE(step), logits, theta, log_pi)
    assert_equal(found, expected)
    moved = (found != 0).any(-1).double().mean()
    assert 0 < moved < 1  # some choices change and some do not


@pytest.mark.parametrize("central", [True, False])
def test_aimle_steps_in_proportion_to_the_logits(central: bool) -> None:
    logits, theta, log_pi = setting()
    h = slopes(logits, theta, log_pi)
    expected = torch.zeros_like(logits)
    for b in range(B):
        centred = logits[b] - logits[b].mean(-1, keepdim=True)
        step = 0.7 * max(1.0, float(centred.norm())) / h[b].norm()
        for k in range(K):
            there = chosen(logits[b, k] + step * h[b, k], log_pi[b, k])
            back = chosen(logits[b, k] - (step * h[b, k] if central else 0), log_pi[b, k])
            expected[b, k] = (there - back) / (2 * step if central else step)
    assert_equal(grad_of(arsm.AIMLE(0.7, central=central), logits, theta, log_pi), expected)


def test_a_slope_that_does_not_depend_on_the_sample_is_followed_exactly_in_the_limit() -> None:
    """For linear f the mean of I-MLE is [p(phi + lambda h) - p(phi)] / lambda, and the gradient is
    its limit.
    """
    n, step = 1 << 16, 0.5
    phi, h = normal(0, C), normal(1, C)
    logits = phi.expand(n, 1, C)
    samples = grad_of_linear(arsm.IMLE(step), logits, h)
    p = phi.softmax(-1)
    expected = ((phi + step * h).softmax(-1) - p) / step
    assert float(deviations(samples[:, 0], expected).max()) <= 1
    exact = p * (h - (p * h).sum())
    errors = [float((((phi + s * h).softmax(-1) - p) / s - exact).norm()) for s in (1.0, 0.1, 0.01)]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


def grad_of_linear(made: arsm.Estimator, logits: Tensor, h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    grad = arsm.estimate(made, logits, lambda z: (z * h).sum((-2, -1)), generator=generator).grad
    assert grad is not None
    return grad


def test_a_smaller_step_makes_sparser_and_larger_estimates() -> None:
    logits, theta, log_pi = setting()
    density, largest = [], []
    for step in (0.2, 1.0, 10.0):
        grad = grad_of(arsm.IMLE(step), logits, theta, log_pi)
        density.append(int((grad != 0).sum()))
        largest.append(float(grad.abs().max()))
    assert 0 < density[0] < density[1] < density[2]
    assert largest == sorted(largest, reverse=True)


@pytest.mark.parametrize("words", ["imle", "aimle"])
def test_an_f_without_slope_has_no_gradient(words: str) -> None:
    logits, _, log_pi = setting()
    out = arsm.estimate(arsm.estimator(words), logits, lambda z: 0 * z.sum((-2, -1)), noise=log_pi)
    assert out.grad is not None
    assert not out.grad.any()


def test_equal_logits_have_a_gradient_too() -> None:
    logits, h = torch.zeros(100, 1, C, dtype=torch.float64), normal(1, C)
    assert grad_of_linear(arsm.AIMLE(), logits, h).any()


# ---------------------------------------------------------------- the adaptive step


def test_alpha_rises_while_estimates_are_too_sparse_and_falls_while_too_dense() -> None:
    made = arsm.AIMLE(alpha=1.0, rate=0.01, decay=0.5)
    sparse = arsm.Estimate(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, 1, 3))
    dense = arsm.Estimate(torch.zeros(2), torch.zeros(2, 1), torch.ones(2, 1, 3))
    made.adapt(sparse)  # density 0.5, below 1
    assert_equal(made.state.alpha, torch.tensor(1.01, dtype=torch.float64))
    assert_equal(made.state.density, torch.tensor(0.5, dtype=torch.float64))
    made.adapt(dense)  # 0.5 of 0.5 and 0.5 of 3: 1.75
    made.adapt(dense)
    assert_equal(made.state.alpha, torch.tensor(0.99, dtype=torch.float64))
    for _ in range(200):
        made.adapt(dense)
    assert float(made.state.alpha) == 0.0


@pytest.mark.parametrize("alpha", [0.02, 5.0])
def test_adapting_reaches_the_density_that_was_asked_for(alpha: float) -> None:
    logits, theta, _ = setting()
    generator = torch.Generator().manual_seed(4)
    made = arsm.AIMLE(alpha, rate=0.05, density=1.0)
    found = []
    for step in range(200):
        out = arsm.estimate(made, logits, f, theta, generator=generator)
        made.adapt(out)
        assert out.grad is not None
        if step >= 150:
            found.append((out.grad != 0).sum().double() / B)
    assert 0.8 < float(torch.stack(found).mean()) < 1.2


def test_an_estimate_changes_nothing_and_the_state_is_saved() -> None:
    logits, theta, log_pi = setting()
    made, fresh = arsm.AIMLE(), arsm.AIMLE(alpha=0.5)
    first = grad_of(made, logits, theta, log_pi)
    assert_equal(first, grad_of(made, logits, theta, log_pi))
    assert not torch.equal(first, grad_of(fresh, logits, theta, log_pi))
    fresh.learned.load_state_dict(made.learned.state_dict())
    assert_equal(first, grad_of(fresh, logits, theta, log_pi))
    assert not list(made.learned.parameters())


def test_an_average_shares_the_step_and_leaves_it_alone() -> None:
    """The density is that of single draws: an average of many is denser."""
    made = arsm.AIMLE()
    logits, theta, _ = setting()
    average = arsm.Average(made, 3)
    average.adapt(arsm.estimate(average, logits, f, theta))
    assert not average.adapts
    assert float(made.state.alpha) == 1.0
    made.adapt(arsm.estimate(made, logits, f, theta))
    assert float(average.learned.state_dict()["0.alpha"]) != 1.0


def test_compare_adapts_a_copy() -> None:
    logits, theta, _ = setting()
    given = arsm.AIMLE(alpha=0.02, rate=0.1)
    before = grad_of(given, logits, theta, dirichlet(logits, torch.Generator().manual_seed(5)))
    rows = [
        arsm.compare(logits, f, theta, estimators=[given], samples=20, training=training, budget=2)[
            0
        ]
        for training in (0, 30)
    ]
    assert rows[1].variance < 0.5 * rows[0].variance  # larger steps, smaller estimates
    after = grad_of(given, logits, theta, dirichlet(logits, torch.Generator().manual_seed(5)))
    assert torch.equal(before, after)


# ---------------------------------------------------------------- care and refusals


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("words", ["imle", "aimle"])
def test_extreme_logits_masks_and_types(words: str, dtype: torch.dtype) -> None:
    logits = extreme_logits(dtype)
    theta = normal(0, 3, 6).to(dtype)
    out = arsm.estimate(
        arsm.estimator(words), logits, f, theta, generator=torch.Generator().manual_seed(0)
    )
    assert out.grad is not None
    assert out.grad.isfinite().all()
    assert (out.grad[logits.detach() == -torch.inf] == 0).all()


@pytest.mark.parametrize("words", ["imle", "aimle"])
def test_masking_a_category_is_leaving_it_out(words: str) -> None:
    logits, theta, log_pi = setting()
    theta = theta.view(B, K, C)
    masked = logits.clone()
    masked[..., 1] = -torch.inf
    kept = [0, 2, 3]
    made = arsm.estimator(words)
    whole = grad_of(made, masked, theta.flatten(1), log_pi)
    part = grad_of(made, logits[..., kept], theta[..., kept].flatten(1), log_pi[..., kept])
    assert_equal(whole[..., kept], part)
    assert not whole[..., 1].any()


@pytest.mark.parametrize("words", ["imle", "aimle"])
def test_f_without_a_derivative_in_z_is_refused(words: str) -> None:
    logits, theta, _ = setting()
    with pytest.raises(ValueError, match="differentiable"):
        arsm.estimate(
            arsm.estimator(words),
            logits,
            lambda z, theta: f(arsm.one_hot(z.argmax(-1), C, torch.float64), theta),
            theta.requires_grad_(),
        )


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("imle:step=0.0", "step"),
        ("aimle:alpha=-1.0", "alpha"),
        ("aimle:density=0", "density"),
        ("aimle:rate=0", "rate"),
        ("aimle:decay=1", "decay"),
    ],
)
def test_impossible_options_are_refused(words: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        arsm.estimator(words)
