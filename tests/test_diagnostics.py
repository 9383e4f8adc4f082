"""Diagnostics against what enumeration and long-hand sums say."""

import pytest
import torch
from torch import Tensor

import arsm
from arsm import diagnostics
from arsm.diagnostics import (
    MovingVariance,
    bias,
    gradient_moments,
    gradient_variance,
    pseudo_action_share,
)
from arsm.noise import dirichlet
from tests.by_definition import pseudo_actions
from tests.statistics import CRITICAL


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reward(z: Tensor) -> Tensor:
    return (z.double() + 1).square().sum(-1) / 10


def relaxed_reward(z: Tensor) -> Tensor:
    return (z * torch.arange(1, z.shape[-1] + 1)).sum((-2, -1)).square() / 10


def test_variance_of_reinforce_is_the_enumerated_one() -> None:
    """Var[f(z) (1[z = c] - p_c)], by summing over z; the sample variance's own error from its
    fourth moment.
    """
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    p = logits.softmax(0)
    estimates = reward(torch.arange(3).unsqueeze(-1)).unsqueeze(-1) * (torch.eye(3) - p)
    centred = estimates - p @ estimates
    variance, fourth = p @ centred.square(), p @ centred**4
    samples = 20_000
    found = gradient_variance(
        arsm.Reinforce(), logits, reward, samples=samples, generator=generator()
    )
    assert found.shape == logits.shape
    assert bool(
        (
            (found - variance).abs() <= CRITICAL * ((fourth - variance.square()) / samples).sqrt()
        ).all()
    )


def test_moments_do_not_depend_on_how_many_draws_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(2, 1, 4, generator=generator())
    scale = torch.tensor([1.0, 5.0])
    blocks = []

    def f(z: Tensor, scale: Tensor) -> Tensor:
        blocks.append(z.shape[0])
        return reward(z) * scale

    monkeypatch.setattr(diagnostics, "ELEMENTS_AT_ONCE", 7 * logits.numel())
    found = gradient_moments(arsm.AR(), logits, f, scale, samples=100, generator=generator(1))
    assert max(blocks) == 7 * 2
    assert len(blocks) == 15

    stream = generator(1)
    draws = torch.cat(
        [
            gradient
            for n in [7] * 14 + [2]
            if (
                gradient := arsm.estimate(
                    arsm.AR(), logits.expand(n, 2, 1, 4), f, scale.expand(n, 2), generator=stream
                ).grad
            )
            is not None
        ]
    ).double()
    torch.testing.assert_close(found.mean, draws.mean(0))
    torch.testing.assert_close(found.variance, draws.var(0))


def test_variance_of_a_relaxation_comes_from_autograd() -> None:
    logits = torch.zeros(1, 3, dtype=torch.float64)
    assert arsm.estimate(arsm.GumbelSoftmax(), logits, relaxed_reward).grad is None
    found = gradient_variance(arsm.GumbelSoftmax(), logits, relaxed_reward, generator=generator())
    assert bool((found > 0).all())
    assert torch.is_grad_enabled()


def test_the_exact_gradient_has_no_variance() -> None:
    assert torch.equal(
        gradient_variance(arsm.Exact(), torch.randn(2, 3), reward), torch.zeros(2, 3).double()
    )


def test_a_variance_needs_two_samples() -> None:
    with pytest.raises(ValueError, match="at least 2 samples"):
        gradient_variance(arsm.ARSM(), torch.zeros(3), reward, samples=1)


def test_meaningless_logits_have_no_variance() -> None:
    with pytest.raises(ValueError, match="is nan; logits must be finite"):
        gradient_variance(arsm.Exact(), torch.tensor([0.0, torch.nan]), reward)
    with pytest.raises(TypeError, match="estimator must be an estimator"):
        gradient_variance("exact", torch.zeros(3), reward)  # pyright: ignore[reportArgumentType]


def test_numbers_are_no_context() -> None:
    with pytest.raises(ValueError, match="Context 0 must be a tensor"):
        gradient_variance(arsm.RLOO(2), torch.zeros(1, 3), lambda z: z.sum(-1), 1000)  # pyright: ignore


def test_bias_clears_arsm_and_catches_a_relaxation() -> None:
    logits = torch.randn(2, 3, generator=generator(), dtype=torch.float64)
    error, standard_error = bias(arsm.ARSM(), logits, reward, samples=4000, generator=generator(1))
    assert bool((error.abs() <= CRITICAL * standard_error + 1e-12).all())

    def f(z: Tensor) -> Tensor:
        return relaxed_reward(arsm.one_hot(z, 3, torch.float64))

    relaxed = gradient_moments(
        arsm.GumbelSoftmax(), logits, f, samples=4000, generator=generator(1)
    )
    error, standard_error = bias(
        arsm.GumbelSoftmax(), logits, f, samples=4000, generator=generator(1)
    )
    assert bool((error.abs() > CRITICAL * standard_error).any())
    torch.testing.assert_close(standard_error, (relaxed.variance / 4000).sqrt())


@pytest.mark.parametrize("categories", [2, 3, 7])
def test_pseudo_action_share_counts_the_definition(categories: int) -> None:
    logits = 2 * torch.randn(5, 2, categories, generator=generator(categories), dtype=torch.float64)
    log_pi = dirichlet(logits, generator(1))
    table = pseudo_actions(logits, log_pi).flatten(-2)
    expected = [(len(set(row.tolist())) - 1) / (categories - 1) for row in table.flatten(0, 1)]
    found = pseudo_action_share(logits, log_pi)
    assert found.shape == (5, 2)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected))


def test_pseudo_action_share_of_one_category_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 categories"):
        pseudo_action_share(torch.zeros(1), torch.zeros(1))


def test_moving_variance_is_the_weighted_sum() -> None:
    beta = 0.8
    gradients = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
    moving = MovingVariance(beta)
    for g in gradients:
        moving.update([g])
    weight = beta ** torch.arange(5, -1, -1.0, dtype=torch.float64)
    weight = (weight / weight.sum()).unsqueeze(-1)
    mean = (weight * gradients).sum(0)
    expected = (weight * (gradients - mean).square()).sum(0) / (1 - weight.square().sum())
    torch.testing.assert_close(moving.variance()[0], expected)
    torch.testing.assert_close(moving.mean(), expected.mean())


def test_moving_variance_is_unbiased_from_the_second_gradient_on() -> None:
    """200,000 elements of variance 4, each a mean over two or five normal gradients."""
    stream, moving = generator(), MovingVariance(0.9)
    for count in range(1, 6):
        moving.update([2 * torch.randn(200_000, generator=stream, dtype=torch.float64)])
        variance = moving.variance()[0]
        if count == 1:
            assert float(moving.mean()) == 0
        if count in (2, 5):
            error = (variance.mean() - 4).abs()
            assert float(error) <= CRITICAL * float(variance.std()) / 200_000**0.5


def test_moving_variance_averages_variances_over_all_elements() -> None:
    """Not over tensors, and not their logarithms."""
    moving = MovingVariance(0.5)
    for sign in (1.0, -1.0):
        moving.update([torch.full((3,), sign), torch.zeros(1)])
    ones, zeros = moving.variance()
    assert bool((ones > 0).all())
    assert float(zeros) == 0
    torch.testing.assert_close(moving.mean(), ones[0] * 3 / 4)


def test_moving_variance_continues_from_its_state() -> None:
    gradients = torch.randn(8, 4, generator=generator())
    whole, first, second = MovingVariance(0.9), MovingVariance(0.9), MovingVariance(0.9)
    for g in gradients:
        whole.update([g])
    for g in gradients[:5]:
        first.update([g])
    second.load_state_dict(first.state_dict())
    first.update([gradients[0]])  # must not reach into the copy
    for g in gradients[5:]:
        second.update([g])
    assert torch.equal(second.variance()[0], whole.variance()[0])


def test_a_bound_is_no_expectation() -> None:
    with pytest.raises(ValueError, match="VIMCO estimates a multi-sample bound"):
        bias(arsm.VIMCO(4), torch.zeros(2, 1, 3), lambda z: z[:, 0].float(), samples=2)


def test_the_exact_gradient_is_found_without_graphs_of_f() -> None:
    weight = torch.ones((), requires_grad=True)

    def f(z: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return z[:, 0] * weight

    bias(arsm.ARSM(), torch.zeros(2, 1, 3), f, samples=2)


def test_moving_variance_refuses_what_does_not_belong_to_it() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        MovingVariance(1.0)
    moving = MovingVariance(0.9)
    with pytest.raises(ValueError, match="before the first update"):
        moving.variance()
    moving.update([torch.zeros(3)])
    with pytest.raises(ValueError, match="same ones at every update"):
        moving.update([torch.zeros(2)])
    with pytest.raises(TypeError, match="One of the gradients is None"):
        moving.update([torch.zeros(3), None])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"decay 0.9, but this one has 0.5"):
        MovingVariance(0.5).load_state_dict(moving.state_dict())


@pytest.mark.parametrize("surrogate", ["logits", "tensor"])
def test_rows_that_lend_each_other_a_coefficient_are_those_of_one_draw(surrogate: str) -> None:
    logits = 1.5 * torch.randn(2, 5, 4, dtype=torch.float64)

    def f(z: Tensor, logits: Tensor) -> Tensor:
        return -arsm.log_prob(logits.log_softmax(-1), z).sum(-1) + z.double().sin().sum(-1)

    chosen = arsm.RLOO(4, surrogate=logits if surrogate == "tensor" else "logits")
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    found = gradient_variance(chosen, logits, f, logits, samples=20, generator=generators[0])
    alone = [
        arsm.estimate(chosen, logits, f, logits, generator=generators[1]).grad for _ in range(20)
    ]
    torch.testing.assert_close(found, torch.stack([g for g in alone if g is not None]).var(0))
    with pytest.raises(ValueError, match="at least two rows"):
        gradient_variance(
            arsm.RLOO(4, surrogate="logits"), logits[0], lambda z: z.double().sum(-1), samples=2
        )


@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4])
def test_moving_variance_of_a_small_spread_about_a_large_mean(spread: float) -> None:
    moving = MovingVariance(0.9)
    for _ in range(200):
        moving.update([1 + spread * torch.randn(20_000)])
    torch.testing.assert_close(
        moving.mean(), torch.tensor(spread**2), rtol=0.03, atol=0, check_dtype=False
    )
