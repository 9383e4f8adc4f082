"""`estimate`: its value, its gradient, its determinism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import arsm
from tests.problems import PROBLEMS
from tests.roster import ROSTER, Entry


def total(z: Tensor) -> Tensor:
    return z.sum(-1).double()


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_noise_and_generator_make_the_estimate_reproducible(entry: Entry) -> None:
    problem = next(p for p in PROBLEMS if entry.fits(*p.size) and p.size[1] > 1)
    estimator = entry.make(*problem.size)
    logits = problem.logits.repeat(20, 1, 1, 1).requires_grad_()
    theta = problem.theta.repeat(20, 1, 1)

    def run(seed: int, given: bool = False) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        noise = estimator.noise(logits, generator) if given else None
        out = arsm.estimate(
            estimator, logits, problem.f, theta, noise=noise, generator=None if given else generator
        )
        return out.z, torch.autograd.grad(out.value.sum(), logits)[0]

    first = run(1)
    assert all(map(torch.equal, first, run(1)))
    assert all(map(torch.equal, first, run(1, given=True)))
    if not isinstance(estimator, arsm.Exact):
        assert not torch.equal(first[0], run(2)[0])


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_logits_keep_their_precision_where_f_has_less(entry: Entry) -> None:
    """An offset of 1e7 changes nothing, although f is float32: logits never take the dtype of its
    values.
    """
    problem = next(p for p in PROBLEMS if entry.fits(*p.size) and p.size[1] > 1)
    estimator = entry.make(*problem.size)
    logits = (problem.logits * 2**20).round() / 2**20  # the offset is then added without rounding
    logits, theta = logits.repeat(20, 1, 1), problem.theta.repeat(20, 1)
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))

    def gradient(offset: float) -> Tensor:
        moved = (logits + offset).requires_grad_()
        out = arsm.estimate(
            estimator, moved, lambda z, theta: problem.f(z, theta).float(), theta, noise=noise
        )
        return torch.autograd.grad(out.value.sum(), moved)[0]

    plain, moved = gradient(0.0), gradient(1e7)
    assert plain.abs().max() > 0
    assert (
        float((plain - moved).abs().max() / plain.abs().max())
        < 100 * torch.finfo(torch.float32).eps
    )


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_logits_beyond_float32_give_finite_gradients(entry: Entry) -> None:
    categories = next(c for c in (3, 2) if entry.fits(1, c))
    logits = torch.zeros(2, 1, categories, dtype=torch.float64)
    logits[..., 0] = 1e39
    weight = torch.arange(1.0, 1 + categories)

    def f(z: Tensor) -> Tensor:
        return (arsm.one_hot(z, categories).squeeze(-2) * weight).sum(-1)

    out = arsm.estimate(entry.make(1, categories), logits.requires_grad_(), f)
    assert bool(out.info["finite"].all())
    assert bool(torch.autograd.grad(out.value.sum(), logits)[0].isfinite().all())


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_a_bare_vector_is_one_variable(entry: Entry) -> None:
    categories = next((c for c in (4, 2) if entry.fits(1, c)), None)
    if categories is None:
        pytest.skip("made for several variables")
    estimator = entry.make(1, categories)
    logits = torch.randn(
        categories, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    noise = estimator.noise(logits.unsqueeze(0), torch.Generator().manual_seed(0))

    def f(z: Tensor) -> Tensor:
        return (
            (arsm.one_hot(z, categories, torch.float64).squeeze(-2) * torch.arange(categories))
            .sum(-1)
            .square()
        )

    bare = arsm.estimate(estimator, logits, f, noise=noise)
    full = arsm.estimate(estimator, logits.unsqueeze(0), f, noise=noise)
    assert bare.value.shape == full.value.shape == ()
    assert torch.equal(bare.value, full.value)
    assert torch.equal(bare.z, full.z)
    first, second = (torch.autograd.grad(out.value, logits)[0] for out in (bare, full))
    assert torch.equal(first, second)
    if bare.grad is not None:
        assert bare.grad.shape == logits.shape


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_one_category_has_no_gradient(entry: Entry) -> None:
    if not entry.fits(2, 1):
        pytest.skip("made for more categories")
    logits = torch.randn(3, 2, 1, dtype=torch.float64).requires_grad_()
    f = PROBLEMS[0].function
    theta = torch.ones(3, 2, dtype=torch.float64)
    out = arsm.estimate(
        entry.make(2, 1), logits, lambda z, t: f(arsm.one_hot(z, 1, torch.float64), t), theta
    )
    assert not torch.autograd.grad(out.value.sum(), logits)[0].any()


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_grad_is_what_backward_gives(entry: Entry) -> None:
    problem = next(p for p in PROBLEMS if entry.fits(*p.size) and p.size[1] > 1)
    logits, theta = problem.logits.clone().requires_grad_(), problem.theta
    out = arsm.estimate(
        entry.make(*problem.size),
        logits,
        problem.f,
        theta,
        generator=torch.Generator().manual_seed(0),
    )
    assert out.value.shape == problem.logits.shape[:1]
    if out.grad is None:
        assert entry.make(*problem.size).needs_gradient
    else:
        assert not out.grad.requires_grad
        torch.testing.assert_close(
            torch.autograd.grad(out.value.sum(), logits)[0], out.grad, rtol=1e-12, atol=1e-12
        )


def test_the_value_is_f_at_the_true_sample() -> None:
    logits = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0))
    for estimator in (
        arsm.Reinforce(),
        arsm.AR(),
        arsm.ARS(),
        arsm.ARSM(),
        arsm.LocalExpectation(),
    ):
        out = arsm.estimate(estimator, logits, total)
        assert out.z.shape == (6, 2)
        assert torch.equal(out.value, total(out.z))
    for estimator in (arsm.RLOO(samples=3), arsm.Average(arsm.ARSM(), 3)):
        out = arsm.estimate(estimator, logits, total)
        assert out.z.shape == (6, 3, 2)
        torch.testing.assert_close(out.value, out.z.sum(-1).double().mean(-1))


def test_live_samples_alone_make_the_value() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    logits = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0))
    out = arsm.estimate(arsm.RLOO(samples=5, live=2), logits, lambda z: weight * total(z))
    expected = out.z[:, :2].sum(-1).double().mean(-1)
    torch.testing.assert_close(out.value.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(out.value.sum(), weight)[0], expected.sum())


def test_the_value_has_the_type_of_f() -> None:
    for dtype in (torch.float32, torch.float64):
        for estimator in (arsm.ARSM(), arsm.RLOO(), arsm.Average(arsm.ARSM(), 3), arsm.Exact()):
            out = arsm.estimate(
                estimator, torch.zeros(3, 2, 4), lambda z, dtype=dtype: z.sum(-1).to(dtype)
            )
            assert out.value.dtype == dtype
    assert (
        arsm.estimate(arsm.ARSM(), torch.zeros(4), lambda z: z.sum(-1).half()).value.dtype
        == torch.float32
    )


@pytest.mark.parametrize(
    "words", ["reinforce", "ar", "ars", "arsm", "arsm:pooled=True", "rloo:ridge=1.0", "exact"]
)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 10), (torch.bfloat16, 7)])
def test_half_precision_logits(words: str, dtype: torch.dtype, bits: int) -> None:
    estimator = arsm.estimator(words)
    coarse = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    fine = coarse.float()
    noise = estimator.noise(fine, torch.Generator().manual_seed(1))
    found, expected = coarse.clone().requires_grad_(), fine.clone().requires_grad_()
    for logits in (found, expected):
        arsm.estimate(
            estimator, logits, lambda z: z.sum(-1).float(), noise=noise
        ).value.sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert found.grad.dtype == dtype
    # the gradient is computed in float32 and rounded once
    torch.testing.assert_close(found.grad.float(), expected.grad, rtol=2.0**-bits, atol=1e-5)


def test_no_grad() -> None:
    with torch.no_grad():
        out = arsm.estimate(arsm.ARSM(), torch.zeros(3, 2, 4, requires_grad=True), total)
    assert not out.value.requires_grad
    assert out.grad is not None


def test_logits_without_gradient() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = arsm.estimate(arsm.ARSM(), torch.zeros(3, 2, 4), lambda z: weight * total(z))
    torch.testing.assert_close(torch.autograd.grad(out.value.sum(), weight)[0], total(out.z).sum())
    assert not arsm.estimate(arsm.ARSM(), torch.zeros(3, 2, 4), total).value.requires_grad


def test_saturated_logits_give_finite_estimates() -> None:
    for entry in ROSTER:
        for size in ((1, 3), (2, 3), (1, 2), (2, 2)):
            if not entry.fits(*size):
                continue
            for dtype in (torch.float32, torch.float64):
                if dtype == torch.float32 and not isinstance(entry.how, str):
                    continue  # learned parts are in float64
                logits = torch.zeros(5, *size, dtype=dtype)
                logits[..., 0] = 200.0
                logits.requires_grad_()
                out = arsm.estimate(
                    entry.make(*size),
                    logits,
                    lambda z, C=size[1], t=dtype: arsm.one_hot(z, C, t)[..., 0].sum(-1),
                )
                found = torch.autograd.grad(out.value.sum(), logits)[0]
                assert bool(found.isfinite().all()), (entry.label, size, dtype)


def test_gradients_add_up_in_a_network() -> None:
    """The encoder's parameters get the estimate through the chain rule."""
    torch.manual_seed(0)
    encoder = nn.Linear(3, 8).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    logits = encoder(x).view(5, 2, 4)
    out = arsm.estimate(arsm.ARSM(), logits, total)
    found = torch.autograd.grad(out.value.sum(), list(encoder.parameters()), retain_graph=True)
    expected = torch.autograd.grad(logits, list(encoder.parameters()), grad_outputs=out.grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("words", ["arsm", "rloo:samples=8,ridge=0.001", "carms"])
def test_autocast_is_for_f_alone(words: str) -> None:
    chosen, logits = arsm.estimator(words), torch.randn(4, 3, 4)
    noise = chosen.noise(logits)

    def f(z: Tensor) -> Tensor:
        return 1e5 * z.float().sum(-1)

    alone = arsm.estimate(chosen, logits, f, noise=noise).grad
    with torch.autocast("cpu", dtype=torch.float16):
        cast = arsm.estimate(chosen, logits, f, noise=noise).grad
    torch.testing.assert_close(cast, alone, rtol=0, atol=0)
