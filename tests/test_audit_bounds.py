"""The bounds hold where normal approximations do not, and the declared false-alarm rate is kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import arsm
from arsm.referee import PROBLEMS
from arsm.referee.bounds import bernstein, student
from arsm.referee.measure import Loss
from tests.surrogates import CORRECT, REDUCED, REDUCED_SAMPLES, group, leave_one_out


@pytest.mark.parametrize("freedom", [63, 127, 2047])
@pytest.mark.parametrize("failure", [1e-2, 1e-6, 1e-9])
def test_student_is_the_quantile(freedom: int, failure: float) -> None:
    """Integrate the density beyond it."""
    t = student(failure, freedom)
    x = torch.linspace(t, t + 400 / math.sqrt(freedom) + 40, 400_001, dtype=torch.float64)
    constant = (
        math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi * freedom) / 2
    )
    density = (constant - (freedom + 1) / 2 * torch.log1p(x.square() / freedom)).exp()
    assert 2 * float(torch.trapezoid(density, x)) == pytest.approx(failure, rel=0.02)


def test_rare_outcomes_break_a_z_test_but_not_the_bound() -> None:
    """100 expected occurrences: the z-test errs a hundred times as often as it declares, the bound
    never.
    """
    draws, expected, failure = 1 << 16, 100, 1e-4
    generator = torch.Generator().manual_seed(0)
    count = torch.binomial(
        torch.full((200_000,), float(draws)),
        torch.full((200_000,), expected / draws),
        generator=generator,
    ).double()
    mean = count / draws
    variance = mean * (1 - mean)
    error = (mean - expected / draws).abs()
    z = error > student(failure, draws) * (variance / draws).sqrt()
    bound = error > bernstein(variance, torch.ones_like(mean), draws, failure)
    assert float(z.double().mean()) > 2 * failure
    assert float(bound.double().mean()) <= failure


LARGE = [p for p in PROBLEMS if not p.small]
RATE = 0.05
"""Declared for reduced audits: one that would show."""


def verdicts(losses: list[Loss], audits: int) -> Counter[str]:
    """Of audits with few draws."""
    return Counter(
        arsm.audit(
            losses[seed % len(losses)],
            samples=REDUCED_SAMPLES,
            problems=REDUCED,
            false_alarm=RATE,
            seed=seed,
        ).verdict
        for seed in range(audits)
    )


def most_alarms(audits: int) -> float:
    """At the declared rate, four standard deviations above the mean."""
    return RATE * audits + 4 * math.sqrt(RATE * (1 - RATE) * audits)


@pytest.mark.slow
def test_the_false_alarm_rate_is_kept() -> None:
    """`benchmarks/audit.py` runs 2,000 of these at three rates."""
    names = ("score function", "leave-one-out, 2 samples", "leave-one-out, 4 samples")
    found = verdicts([CORRECT[name] for name in (*names, "leave-one-out, rows of the batch")], 400)
    print(dict(found), f"at a declared rate of {RATE}")
    assert found["not decided"] == 0
    assert found["wrong"] <= most_alarms(400)


@pytest.mark.slow
def test_the_rate_of_a_biased_loss_shows() -> None:
    """The same audits catch an error of a tenth: the test above could fail."""
    found = verdicts([group(lambda f: 1.1 * leave_one_out(f))], 100)
    assert found["wrong"] > most_alarms(100)


POWER = 1.01
"""A length that is caught with probability 0.99 at the default number of draws."""


@pytest.mark.slow
def test_the_power_is_what_is_said() -> None:
    """Leave-one-out with 4 samples, 1 % too long, in audits of the default size with different
    seeds.
    """

    def longer(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return POWER * CORRECT["leave-one-out, 4 samples"](logits, f)

    found = [arsm.audit(longer, seed=seed, problems=LARGE) for seed in range(20)]
    assert sum(each.verdict == "wrong" for each in found) >= 19
    assert max(each.missed or 1 for each in found) < POWER - 1
