"""The bounds hold where normal approximations do not, and the declared false-alarm rate is kept."""

from __future__ import annotations

import math

import pytest
import torch

import arsm
from arsm.audit import PROBLEMS
from arsm.audit.bounds import bernstein, student
from tests.test_audit import CORRECT, group


@pytest.mark.parametrize("freedom", [63, 127, 2047])
@pytest.mark.parametrize("failure", [1e-2, 1e-6, 1e-9])
def test_student_is_the_quantile(freedom: int, failure: float) -> None:
    """Integrate the density beyond it."""
    t = student(failure, freedom)
    x = torch.linspace(t, t + 400 / math.sqrt(freedom) + 40, 400_001, dtype=torch.float64)
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi * freedom) / 2
    density = (constant - (freedom + 1) / 2 * torch.log1p(x.square() / freedom)).exp()
    assert 2 * float(torch.trapezoid(density, x)) == pytest.approx(failure, rel=0.02)


def test_rare_outcomes_break_a_z_test_but_not_the_bound() -> None:
    """100 expected occurrences: the z-test errs a hundred times as often as it declares, the bound never."""
    draws, expected, failure = 1 << 16, 100, 1e-4
    generator = torch.Generator().manual_seed(0)
    count = torch.binomial(
        torch.full((200_000,), float(draws)), torch.full((200_000,), expected / draws), generator=generator
    ).double()
    mean = count / draws
    variance = mean * (1 - mean)
    error = (mean - expected / draws).abs()
    z = error > student(failure, draws) * (variance / draws).sqrt()
    bound = error > bernstein(variance, torch.ones_like(mean), draws, failure)
    assert float(z.double().mean()) > 2 * failure
    assert float(bound.double().mean()) <= failure


REDUCED = [p for p in PROBLEMS if p.role == "f" or p.name in ("two categories", "a batch of 2")]


@pytest.mark.slow
def test_the_false_alarm_rate_is_kept() -> None:
    """2,000 reduced audits of correct losses at a rate that would show: at most as many alarms as are declared."""
    rate, audits = 0.05, 2000
    losses = [
        "score function",
        "leave-one-out, 2 samples",
        "leave-one-out, 4 samples",
        "leave-one-out, rows of the batch",
    ]
    alarms = sum(
        not arsm.audit(CORRECT[losses[seed % 4]], samples=1024, problems=REDUCED, false_alarm=rate, seed=seed).passed
        for seed in range(audits)
    )
    print(f"{alarms} alarms in {audits} audits at a declared rate of {rate}")
    assert alarms <= rate * audits + 4 * math.sqrt(rate * (1 - rate) * audits)


@pytest.mark.slow
def test_the_rate_of_a_biased_loss_shows() -> None:
    """The same audits catch an error of a tenth: the test above could fail."""
    biased = group(lambda f: 1.1 * (f - f.mean(0)) * 4 / 3)
    alarms = sum(
        not arsm.audit(biased, samples=1024, problems=REDUCED, false_alarm=0.05, seed=seed).passed
        for seed in range(100)
    )
    assert alarms > 50
