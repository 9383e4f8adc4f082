"""Whole losses of trainers under the referee: planted defects get their cause, correct losses raise
no alarm.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import arsm
from arsm.referee import Objective, TrainerBatch
from tests.trainer_losses import CORRECT, DEFECTS, leave_one_out, ppo, score, summed

QUICK_DEFECTS = [
    "k3 in the loss without importance weights",
    "division by the padded length",
    "masks one token off",
    "temperature missing in ln p",
    "temperature missing in a clipped ratio's denominator",
    "stale sampler uncorrected",
    "baseline not detached",
]
QUICK_CORRECT = [
    "leave-one-out",
    "clipped ratios at the first step",
    "k1 in the reward",
    "micro-batches",
]


def rest(corpus: dict, quick: list[str]) -> list:
    """The corpus, all of it but the quick ones marked as slow: together they take minutes."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in corpus]


@pytest.mark.parametrize("name", rest(DEFECTS, QUICK_DEFECTS))
def test_planted_defects_get_their_cause(name: str) -> None:
    loss, cause, objective = DEFECTS[name]
    found = arsm.audit_sequences(loss, target=objective)
    assert found.verdict == "wrong"
    assert found.diagnosis == cause, str(found)


@pytest.mark.parametrize("name", rest(CORRECT, QUICK_CORRECT))
def test_correct_losses_raise_no_alarm(name: str) -> None:
    loss, objective = CORRECT[name]
    found = arsm.audit_sequences(loss, target=objective)
    assert found.passed, str(found)
    assert found.false_alarm == 0


def test_the_page_says_direction_scale_dependence_and_place() -> None:
    page = str(arsm.audit_sequences(DEFECTS["division by the own length"].loss, target=Objective()))
    words = " ".join(page.split())
    assert "[length]" in page
    assert "direction" in page
    assert "The tokens' weights depend on the answer's own length." in words
    assert "Where the squared error is: first token" in words
    assert (
        "Target: the gradient of E[reward], averaged over the prompts; all batches enumerated."
        in words
    )


def test_a_constant_factor_may_be_allowed() -> None:
    def by_limit(batch: TrainerBatch) -> Tensor:
        return -score(leave_one_out)(batch) / batch.max_tokens

    found = arsm.audit_sequences(by_limit, target=Objective(), sign=-1, up_to_scale=True)
    assert found.passed, str(found)
    assert "0.3333" in str(found)
    # the factor must not depend on the padding, and must be positive
    padded = DEFECTS["division by the padded length"].loss
    assert arsm.audit_sequences(padded, target=Objective(), up_to_scale=True).diagnosis == "padding"


def test_a_documented_objective_is_compared_with() -> None:
    """Clipping at a later step is another objective's gradient, and may be that one exactly."""

    def documented(batch: TrainerBatch) -> Tensor:
        a = leave_one_out(batch).unsqueeze(-1)
        ratio = (batch.log_p() - batch.sampler_log_p).exp()
        low, high = ratio * a, torch.where(a > 0, 1.2, 0.8) * a
        return summed(torch.where(low < high, low, high), batch).mean()

    stale = Objective(stale=True)
    assert arsm.audit_sequences(ppo(), target=stale, documented=documented).passed
    found = arsm.audit_sequences(ppo(0.5, 2.0), target=stale, documented=documented)
    assert (found.verdict, found.diagnosis) == ("wrong", "unexplained")


def test_losses_that_cannot_be_judged() -> None:
    def random(batch: TrainerBatch) -> Tensor:
        return score(leave_one_out)(batch) * torch.rand(())

    def crashing(batch: TrainerBatch) -> Tensor:
        raise RuntimeError("no batches, please")

    def infinite(batch: TrainerBatch) -> Tensor:
        rewards = batch.rewards.view(-1, batch.answers)
        a = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        return score(lambda _: a.flatten())(batch)

    assert arsm.audit_sequences(random, target=Objective()).diagnosis == "state"
    found = arsm.audit_sequences(crashing, target=Objective())
    assert (found.verdict, found.diagnosis) == ("not decided", "crash")
    assert "no batches, please" in str(found)
    assert arsm.audit_sequences(infinite, target=Objective()).diagnosis == "not finite"
    assert arsm.audit_sequences(lambda b: b.rewards, target=Objective()).diagnosis == "crash"  # type: ignore[return-value]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="give a target"):
        arsm.audit_sequences(CORRECT["leave-one-out"].loss, up_to_scale=True)
    with pytest.raises(ValueError, match="temperature must be positive"):
        Objective(temperature=0.0)


def test_an_unknown_defect_is_called_wrong_without_a_cause() -> None:
    """Tokens at odd places count double: no explanation is made up for it."""

    def uneven(batch: TrainerBatch) -> Tensor:
        weight = 1 + torch.arange(batch.mask.shape[1]) % 2
        return (leave_one_out(batch) * summed(batch.log_p() * weight, batch)).mean()

    found = arsm.audit_sequences(uneven, target=Objective())
    assert found.verdict == "wrong"
    assert found.diagnosis == "unexplained", str(found)
    assert "cause not found" in found.findings[0].sentence


def test_a_batch_may_be_changed_by_dataclasses_replace() -> None:
    found = arsm.audit_sequences(
        lambda batch: score(leave_one_out)(replace(batch, rewards=batch.rewards - 1)),
        target=Objective(),
    )
    assert found.passed
