"""GRPO, Dr. GRPO, OTB, RODEO and decoupled straight-through, by hand and by their definitions."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import arsm
from arsm.scores import score
from tests.by_hand import assert_equal, cosine, given, normal
from tests.roster import ROSTER

LOGITS = normal(0, 2, 3, 4)
THETA = normal(1, 2, 3, 4)


def drawn(samples: int) -> Tensor:
    """[2, n, 3], some of them equal."""
    z = torch.randint(4, (2, samples, 3), generator=torch.Generator().manual_seed(2))
    z[0, 1] = z[0, 0]
    return z


def told(
    estimator: arsm.Estimator, z: Tensor, logits: Tensor = LOGITS, theta: Tensor = THETA
) -> Tensor:
    out = arsm.estimate(estimator, logits.clone().requires_grad_(), cosine, theta, noise=given(z))
    assert out.grad is not None
    return out.grad.detach()


def values_and_scores(z: Tensor) -> tuple[Tensor, Tensor]:
    """f [2, n] and x [2, n, 3, 4] of every sample."""
    n = z.shape[1]
    f = cosine(z.flatten(0, 1), THETA.repeat_interleave(n, 0)).view(2, n)
    return f, score(LOGITS.unsqueeze(1).expand(2, n, 3, 4), z)


def test_two_samples_by_hand() -> None:
    """One fair coin, f = 3 and 1: scores (1/2, -1/2) and (-1/2, 1/2), mean 2, standard deviation
    sqrt 2.
    """
    logits = torch.zeros(1, 1, 2, dtype=torch.float64)
    noise = given(torch.tensor([[[0], [1]]]))

    def f(z: Tensor) -> Tensor:
        return torch.tensor([3.0, 1.0], dtype=torch.float64)[z[:, 0]]

    def first(estimator: arsm.Estimator) -> float:
        grad = arsm.estimate(estimator, logits, f, noise=noise).grad
        assert grad is not None
        return float(grad[0, 0, 0])

    assert first(arsm.RLOO(2)) == pytest.approx(1)
    assert first(arsm.DrGRPO(2)) == pytest.approx(0.5)
    assert first(arsm.GRPO(2, epsilon=1e-9)) == pytest.approx(0.5 / math.sqrt(2))
    assert first(arsm.OTB(2)) == pytest.approx(1)


def test_dr_grpo_is_a_share_of_leave_one_out() -> None:
    assert_equal(told(arsm.DrGRPO(5), drawn(5)), 0.8 * told(arsm.RLOO(5), drawn(5)))


def test_grpo_does_not_grow_with_f_and_is_zero_where_values_are_equal() -> None:
    logits, z = LOGITS[:1], drawn(3)[:1]
    grow = [
        arsm.estimate(
            arsm.GRPO(3, epsilon=1e-12),
            logits,
            lambda z, s=s: s * z.sum(-1).double(),
            noise=given(z),
        ).grad
        for s in (1, 7)
    ]
    torch.testing.assert_close(grow[0], grow[1])
    flat = arsm.estimate(
        arsm.GRPO(3), logits, lambda z: torch.full((len(z),), 2.0), noise=given(z)
    ).grad
    assert flat is not None
    assert not flat.any()


def test_otb_is_its_definition() -> None:
    z = drawn(4)
    f, x = values_and_scores(z)
    energy = x.square().sum(-1).cumsum(-1)  # [2, n, K]
    expected = torch.zeros_like(LOGITS)
    for i in range(4):
        others = [j for j in range(4) if j != i]
        baseline = (energy[:, others] * f[:, others, None]).sum(1) / energy[:, others].sum(1)
        expected += (f[:, i, None] - baseline).unsqueeze(-1) * x[:, i] / 4
    assert_equal(told(arsm.OTB(4), z), expected)


def test_otb_of_certain_variables_is_finite() -> None:
    logits = torch.tensor([[[60.0, 0.0], [-60.0, 0.0]]], dtype=torch.float64)
    out = arsm.estimate(arsm.OTB(3), logits, lambda z: z.sum(-1).double())
    assert out.grad is not None
    assert out.grad.isfinite().all()


def rodeo(**options: float) -> arsm.RODEO:
    estimator = arsm.RODEO(3, **options)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    torch.nn.init.normal_(estimator.control.double().out.weight)
    return estimator


def test_rodeo_without_its_terms_is_leave_one_out() -> None:
    assert_equal(told(rodeo(alpha=0, beta=0), drawn(3)), told(arsm.RLOO(3), drawn(3)))


def test_rodeo_is_its_definition() -> None:
    """The Stein operator by setting one variable after the other to every category."""
    estimator, z = rodeo(alpha=0.75, beta=0.5), drawn(3)
    p = LOGITS.softmax(-1)
    f, _ = values_and_scores(z)
    points = arsm.one_hot(z, 4, torch.float64)
    at = points.clone().requires_grad_()
    theta = THETA.repeat_interleave(3, 0)
    (slope,) = torch.autograd.grad(cosine(at.flatten(0, 1), theta).sum(), at)
    control = estimator.control

    def h(row: int, i: int, point: Tensor) -> Tensor:
        others = [j for j in range(3) if j != i]
        mean = f[row, others].mean()
        terms = [
            control((slope[row, j] * (point - points[row, j])).sum(), f[row, j] - mean)
            for j in others
        ]
        return torch.stack(terms).mean()

    expected = torch.zeros_like(LOGITS)
    with torch.no_grad():
        for row in range(2):
            stein, stein_x = (
                torch.zeros(3, dtype=torch.float64),
                torch.zeros(3, 3, 4, dtype=torch.float64),
            )
            for i in range(3):
                here = h(row, i, points[row, i])
                stein[i], stein_x[i] = -here, -here * (points[row, i] - p[row])
                for k, c in product(range(3), range(4)):
                    moved = points[row, i].clone()
                    moved[k] = 0
                    moved[k, c] = 1
                    there = h(row, i, moved) * p[row, k, c] / 3
                    stein[i] += there
                    stein_x[i] += there * (moved - p[row])
            for i in range(3):
                others = [j for j in range(3) if j != i]
                baseline = (f[row, others] + 0.75 * stein[others]).mean()
                expected[row] += (
                    (f[row, i] - baseline) * (points[row, i] - p[row]) + 0.5 * stein_x[i]
                ) / 3
    assert_equal(told(estimator, z), expected)


def test_rodeo_of_a_linear_f_of_one_variable_leaves_nothing_of_its_noise() -> None:
    """h_i is f less the baseline; resampling the only variable turns f x into its mean."""
    logits = normal(3, 64, 1, 4)
    w = normal(4, 4)
    estimator = arsm.RODEO(2, alpha=0, beta=1)
    out = arsm.estimate(
        estimator, logits, lambda z: (arsm.one_hot(z, 4, torch.float64) * w).sum((-2, -1))
    )
    p = logits.softmax(-1)
    assert_equal(out.grad, p * (w - (p * w).sum(-1, keepdim=True)))


def test_rodeo_learns() -> None:
    logits = normal(3, 512, 3, 4).requires_grad_()
    estimator = arsm.RODEO(3, alpha=-1, beta=-1)
    optimiser = torch.optim.Adam(estimator.learned.parameters(), 0.05)
    theta = normal(5, 1, 3, 4).expand(512, 3, 4)
    losses = []
    for seed in range(60):
        out = arsm.estimate(
            estimator, logits, cosine, theta, generator=torch.Generator().manual_seed(seed)
        )
        assert out.estimator_loss is not None
        optimiser.zero_grad()
        out.estimator_loss.backward()
        optimiser.step()
        losses.append(float(out.estimator_loss.detach()))
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])


def test_decoupled_straight_through_is_its_definition() -> None:
    z = drawn(2)[:, :1]
    logits = LOGITS.clone().requires_grad_()
    estimator = arsm.DecoupledStraightThrough(forward=2.0, backward=0.5)
    out = arsm.estimate(estimator, logits, cosine, THETA, noise=given(z))
    (found,) = torch.autograd.grad(out.value.sum(), logits)
    soft = (logits / 0.5).softmax(-1)
    point = arsm.one_hot(z.squeeze(1), 4, torch.float64) + soft - soft.detach()
    (expected,) = torch.autograd.grad(cosine(point, THETA).sum(), logits)
    assert_equal(found, expected)


def test_decoupled_straight_through_samples_at_its_temperature() -> None:
    logits = (
        torch.tensor([[[2.0, 0.0]]], dtype=torch.float64)
        .expand(1 << 14, 1, 2)
        .clone()
        .requires_grad_()
    )
    estimator = arsm.DecoupledStraightThrough(forward=4.0)
    z = arsm.estimate(
        estimator, logits, lambda z: z[:, 0, 0], generator=torch.Generator().manual_seed(0)
    ).z
    expected = torch.sigmoid(torch.tensor(-0.5))
    assert float((z == 1).double().mean() - expected) == pytest.approx(0, abs=6 * 0.5 / 128)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: arsm.GRPO(1), "GRPO compares samples"),
        (lambda: arsm.GRPO(4, epsilon=0), "epsilon must be positive"),
        (lambda: arsm.GRPO(4, epsilon=float("inf")), "epsilon must be positive and finite"),
        (lambda: arsm.OTB(2, live=3), "live must lie"),
        (lambda: arsm.RODEO(1), "RODEO compares samples"),
        (lambda: arsm.DecoupledStraightThrough(forward=0), "temperature"),
    ],
)
def test_wrong_options_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# ---------------------------------------------------------------- weights


WEIGHING = [e for entry in ROSTER if entry.fits(2, 3) and (e := entry.make(2, 3)).paths]


def test_who_declares_weights() -> None:
    """These at least; others may join without a word here."""
    declared = {type(e).__name__ for e in WEIGHING}
    assert declared >= {"RLOO", "GRPO", "DrGRPO", "OTB", "VIMCO", "Reinforce"}


@pytest.mark.parametrize("estimator", WEIGHING, ids=repr)
def test_the_estimate_is_the_weighted_sum_of_scores(estimator: arsm.Estimator) -> None:
    """sum_i w_ik (onehot(z_ik) - p_k), by autograd of sum w ln q."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    queries = estimator.ask(logits.detach(), estimator.noise(logits.detach(), generator))
    values = torch.randn(len(queries.points), 5, generator=generator, dtype=torch.float64)
    # [n, B, K]
    log_q = arsm.log_prob(logits.log_softmax(-1).expand(len(values), -1, -1, -1), queries.points)
    weight = estimator.weights(values).unsqueeze(-1) if not estimator.weighs_energy else None
    if weight is None:
        scores = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in log_q]
        energy = torch.stack(scores).square().sum(-1).cumsum(-1)
        weight = estimator.weights(values.unsqueeze(-1).expand_as(energy), energy)
    (expected,) = torch.autograd.grad((weight * log_q).sum(), logits)
    found = estimator.tell(logits.detach(), queries, values)
    torch.testing.assert_close(found, expected)
    if estimator.centred:
        assert float(weight.sum(0).abs().max()) < 1e-12


def test_tell_and_weights_cannot_disagree() -> None:
    with pytest.raises(TypeError, match="Longer overrides tell but inherits weights"):

        class Longer(arsm.RLOO):
            def tell(self, logits: Tensor, queries: arsm.extend.Queries, values: Tensor) -> Tensor:
                return 2 * super().tell(logits, queries, values)

    with pytest.raises(TypeError, match="Heavier overrides weights but inherits tell"):

        class Heavier(arsm.RLOO):
            def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
                return 2 * super().weights(values)

    class Twice(arsm.DrGRPO):  # its tell is made from its weights
        def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
            return 2 * super().weights(values)

    logits, f = torch.zeros(4, 1, 3, dtype=torch.float64), lambda z: z[:, 0].double()
    noise = arsm.DrGRPO(4).noise(logits)
    once, twice = (
        arsm.estimate(e, logits, f, noise=noise).grad for e in (arsm.DrGRPO(4), Twice(4))
    )
    assert once is not None
    torch.testing.assert_close(twice, 2 * once)


def test_an_estimator_without_weights_says_so() -> None:
    with pytest.raises(NotImplementedError, match="ARSM has no weights"):
        arsm.ARSM().weights(torch.zeros(2, 3))


def test_a_surrogate_counts_for_nothing_where_a_category_is_masked() -> None:
    """Logits with masks, as those of another network, are surrogates too."""
    logits = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 1] = -torch.inf
    noise = arsm.RLOO(4).noise(logits)
    masked, finite = (
        arsm.estimate(
            arsm.RLOO(4, surrogate=h), logits, lambda z: z.sum(-1).float().sin(), noise=noise
        ).grad
        for h in (logits, logits.clamp_min(-5.0))
    )
    assert masked is not None
    assert finite is not None
    assert bool(masked.isfinite().all())
    torch.testing.assert_close(masked, finite, rtol=0, atol=0)
