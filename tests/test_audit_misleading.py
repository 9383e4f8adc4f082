"""Losses that once misled the referee: correct ones that looked odd, and wrong ones with the cause
of another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import arsm
from arsm.progress import Progress, reporter
from arsm.referee import PROBLEMS
from arsm.testing import assert_unbiased

Function = Callable[[Tensor], Tensor]
FAMILY = [p for p in PROBLEMS if p.role]
SEVERAL = [p for p in PROBLEMS if p.learns or p.name in ("masked categories", "two categories")]


def score(logits: Tensor, f: Function, weight: Tensor | float = 1.0) -> Tensor:
    """Leave-one-out with four samples; `weight` [K] on the variables' log-probabilities."""
    q = Categorical(logits=logits)
    z = q.sample((4,))
    values = f(z).detach()
    return ((values - values.mean(0)) * (weight * q.log_prob(z)).sum(-1)).sum() / 3


def seldom(logits: Tensor, f: Function) -> Tensor:
    """Correct: 0 in 95% of all calls, 20 times the estimate in the others."""
    return 20 * score(logits, f) if float(torch.rand(())) < 0.05 else 0 * score(logits, f)


def a_tenth_missing(logits: Tensor, f: Function) -> Tensor:
    weight = torch.ones(logits.shape[1])
    weight[1:2] = 0.9
    return score(logits, f, weight)


def a_variable_masked(logits: Tensor, f: Function) -> Tensor:
    weight = torch.ones(logits.shape[1])
    weight[2:3] = 0.0
    return score(logits, f, weight)


def some_calls(logits: Tensor, f: Function) -> Tensor:
    """Three times too long in every 50th call, by chance."""
    return score(logits, f) * (3 if float(torch.rand(())) < 0.02 else 1)


class EveryFiftieth:
    """Three times too long in every 50th call, by a counter."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, f: Function) -> Tensor:
        self.calls += 1
        return score(logits, f) * (3 if self.calls % 50 == 0 else 1)


def test_a_loss_that_is_mostly_zero_sets_no_seed() -> None:
    found = arsm.audit(seldom, samples=1 << 14, problems=FAMILY[:2])
    assert found.diagnosis != "fixed seed"
    assert found.verdict != "wrong", str(found)


@pytest.mark.parametrize(
    ("loss", "words"), [(a_tenth_missing, "(variable 1)"), (a_variable_masked, "(variable 2)")]
)
def test_a_part_of_a_variable_is_not_its_own_sample(
    loss: Callable[..., Tensor], words: str
) -> None:
    found = arsm.audit(loss, samples=1 << 15, problems=FAMILY + SEVERAL)
    assert found.verdict == "wrong"
    assert found.diagnosis == "variables", str(found)
    assert words in found.findings[0].sentence


def test_the_own_sample_is_still_named() -> None:
    def best(logits: Tensor, f: Function) -> Tensor:
        q = Categorical(logits=logits)
        z = q.sample((4,))
        values = f(z).detach()
        return ((values - values.amax(0)) * q.log_prob(z).sum(-1)).sum() / 4

    assert arsm.audit(best, samples=1 << 13, problems=FAMILY + SEVERAL).diagnosis == "own sample"


def test_a_counter_is_state() -> None:
    found = arsm.audit(EveryFiftieth(), samples=1 << 13, problems=FAMILY[:1])
    assert (found.verdict, found.diagnosis) == ("not decided", "state")


def test_calls_that_differ_are_drawn_more_often() -> None:
    """The error of 4% is found, or the page says that it could have missed one of its size."""
    found = arsm.audit(some_calls, problems=FAMILY[:1])
    assert found.verdict == "wrong" or (found.missed or 0) > 0.04, str(found)
    assert found.missed is not None
    assert found.missed < 0.08


def test_the_page_says_what_error_of_the_parameters_could_be_missed() -> None:
    def live(logits: Tensor, f: Function) -> Tensor:
        q = Categorical(logits=logits)
        z = q.sample()
        values = f(z)
        return (values + values.detach() * q.log_prob(z).sum(-1)).sum()

    found = arsm.audit(
        live, samples=1 << 13, parameters=True, problems=[p for p in PROBLEMS if p.learns]
    )
    assert found.passed
    assert any("could have been missed" in note and "%" in note for note in found.notes)


def test_problems_must_be_problems() -> None:
    with pytest.raises(ValueError, match=r"must be a sequence of arsm\.referee\.Problem"):
        arsm.audit(score, problems="x")  # type: ignore[arg-type]


def test_help_prints_no_tensors() -> None:
    assert "tensor(" not in str(inspect.signature(arsm.audit))
    assert repr(PROBLEMS[0]) == "<Problem 'one variable'>"


def test_an_estimator_stands_for_its_loss() -> None:
    assert assert_unbiased(arsm.RLOO(3), samples=1024, problems=FAMILY[:2]).passed
    with pytest.raises(TypeError, match="or an estimator"):
        arsm.audit(3)  # type: ignore[arg-type]


def test_progress_is_shown_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = reporter(None)
    assert isinstance(progress, Progress)
    progress("early", 0.1)
    assert capsys.readouterr().err == ""
    progress.start -= 3
    progress("late", 0.5)
    assert "50% late" in capsys.readouterr().err
    progress("", 1.0)
    assert capsys.readouterr().err == "\r\x1b[K"
