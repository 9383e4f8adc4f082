"""Advantages of groups of rewards, judged by enumeration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import arsm


def leave_one_out(rewards: Tensor) -> Tensor:
    n = rewards.shape[1]
    return rewards if n == 1 else (rewards - rewards.mean(1, keepdim=True)) * n / (n - 1)


def zero_for_one(rewards: Tensor) -> Tensor:
    n = rewards.shape[1]
    return (n * rewards - rewards.sum(1, keepdim=True)) / max(n - 1, 1) * (n > 1)


def own_mean(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(1, keepdim=True)


def normalised(rewards: Tensor) -> Tensor:
    return own_mean(rewards) / (rewards.std(1, keepdim=True, correction=0) + 1e-4)


def not_guarded(rewards: Tensor) -> Tensor:
    return own_mean(rewards) / rewards.std(1, keepdim=True, correction=0)


def left_out_deviation(rewards: Tensor) -> Tensor:
    n = rewards.shape[1]
    if n == 1:
        return rewards
    mean = (rewards.sum(1, keepdim=True) - rewards) / (n - 1)
    square = (rewards.square().sum(1, keepdim=True) - rewards.square()) / (n - 1)
    return (rewards - mean) / ((square - mean.square()).clamp_min(0).sqrt() + 1e-6)


def maximum(rewards: Tensor) -> Tensor:
    return rewards - rewards.amax(1, keepdim=True)


def refuses_one(rewards: Tensor) -> Tensor:
    if rewards.shape[1] == 1:
        raise ValueError("a group needs 2 samples")
    return leave_one_out(rewards)


@pytest.mark.parametrize(
    ("function", "kinds", "words"),
    [
        (
            own_mean,
            ["scale", "group of one"],
            "(n - 1)/n, the group's mean with the sample itself in it",
        ),
        (lambda r: r - r.mean(), ["scale", "group of one"], "(B n - 1)/(B n)"),
        (normalised, ["standard deviation", "group of one"], "does not grow with f"),
        (not_guarded, ["not finite"], "give nan"),
        (left_out_deviation, ["standard deviation"], "a number near 0"),
        (maximum, ["own sample", "group of one"], "saw its own sample"),
        (lambda r: -leave_one_out(r), ["sign", "group of one"], "opposite"),
        (zero_for_one, ["group of one"], "get the advantage 0"),
        (lambda r: torch.zeros_like(r), ["no gradient", "group of one"], "exactly zero"),
    ],
)
def test_defects_are_named(function, kinds: list[str], words: str) -> None:
    found = arsm.audit_advantages(function)
    assert found.verdict == "wrong"
    assert [finding.kind for finding in found.findings] == kinds, str(found)
    assert words in found.findings[0].sentence


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (leave_one_out, "keep their reward"),
        (lambda r: r - 0.3, "keep their reward"),
        (refuses_one, "are refused"),
    ],
)
def test_unbiased_advantages_pass(function, note: str) -> None:
    found = arsm.audit_advantages(function)
    assert found.passed, str(found)
    assert note in str(found)


def test_the_variance_of_leave_one_out_is_its_closed_form() -> None:
    for row in arsm.audit_advantages(leave_one_out).rows:
        if row.rloo is not None:
            assert row.variance == pytest.approx(row.rloo, rel=1e-3, abs=1e-6)


def test_lengths() -> None:
    def right(rewards: Tensor, mask: Tensor) -> Tensor:
        return leave_one_out(rewards).unsqueeze(-1) * mask

    def divided(rewards: Tensor, mask: Tensor) -> Tensor:
        return right(rewards, mask) / mask.sum(-1, keepdim=True)

    def padded(rewards: Tensor, mask: Tensor) -> Tensor:
        return leave_one_out(rewards).unsqueeze(-1).expand(mask.shape)

    assert arsm.audit_advantages(right, tokens=True).passed
    assert arsm.audit_advantages(padded, tokens=True).passed
    found = arsm.audit_advantages(divided, tokens=True)
    assert found.verdict == "wrong"
    assert found.diagnosis == "length"


class RunningMean:
    """A baseline that remembers earlier calls."""

    def __init__(self) -> None:
        self.baseline = 0.0

    def __call__(self, rewards: Tensor) -> Tensor:
        self.baseline = 0.9 * self.baseline + 0.1 * float(rewards.mean())
        return rewards - self.baseline


@pytest.mark.parametrize(
    "function", [RunningMean(), lambda r: r - torch.rand(len(r), 1)], ids=["state", "random"]
)
def test_functions_that_vary_are_not_judged(function) -> None:
    found = arsm.audit_advantages(function)
    assert found.verdict == "not decided"
    assert found.diagnosis == "state"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda r: r.mean(1), "must return a floating tensor [1, 2]"),
        (lambda r: r.long(), "returned torch.int64 [1, 2]"),
        (lambda r: r.tolist(), "returned list"),
        (lambda r: r.no_such_method(), "no_such_method"),
    ],
)
def test_functions_that_cannot_be_judged_are_told_why(function, words: str) -> None:
    found = arsm.audit_advantages(function)
    assert found.verdict == "not decided"
    assert found.diagnosis == "crash"
    assert words in found.findings[0].sentence
