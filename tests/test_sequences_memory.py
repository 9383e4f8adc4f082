"""Planning and credit for large vocabularies: in parts, with the same result, in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import arsm
from arsm import policy
from arsm.sequences import Branch
from tests.statistics import deviations
from tests.tables import Setting

SETTING = Setting(eos=1, temperature=0.8)


@pytest.mark.parametrize("cells", [1, 7, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_change_nothing(cells: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LocalExpectation` draws nothing: whole and in parts it asks and tells the same."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 1, 6, generator=generator, dtype=torch.float64)
    logits[1, 2, 0, 3] = -torch.inf
    actions = logits.softmax(-1).flatten(0, 2).multinomial(1, generator=generator).view(4, 5, 1)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1], [4]]) if masked else None
    returns = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    results = []
    for size in (policy.CELLS, cells):
        monkeypatch.setattr(policy, "CELLS", size)
        plan = policy.plan(arsm.LocalExpectation(), logits, actions, mask)
        tried = torch.cos(plan.episode + 2.0 * plan.step + 3.0 * plan.action.squeeze(-1)).double()
        results.append(
            (plan, policy.gradient(arsm.LocalExpectation(), logits, plan, returns, tried))
        )
    (whole, at_once), (split, in_parts) = results
    for name in ("episode", "step", "action", "query", "weight", "played", "row", "pseudo_actions"):
        assert torch.equal(getattr(whole, name), getattr(split, name)), name
    assert len(split.parts) > len(whole.parts) == 1
    assert torch.equal(at_once, in_parts)
    assert (at_once != 0).any()


@pytest.mark.parametrize(
    "strategy", [Branch(arsm.RLOO(3)), Branch(arsm.ARSM(), keep=0.6)], ids=["RLOO", "ARSM"]
)
def test_unbiased_in_parts(strategy: Branch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CELLS", 3000)
    assert deviations(SETTING.estimates(strategy, 6000), SETTING.exact()).max() < 1


def test_a_budget_in_parts_is_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CELLS", 20)
    estimates = [
        SETTING.estimates(Branch(arsm.RLOO(3), budget=6), 8, seed).mean(0) for seed in range(100)
    ]
    assert deviations(torch.stack(estimates), SETTING.exact()).max() < 1


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is allocated at a time during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    inner: Any = profiler.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    now, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        most = max(most, now)
    return most


def test_memory_of_planning_and_credit() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 12, 1, 32_000, generator=generator)
    size = logits.numel() * logits.element_size()
    actions = logits.softmax(-1).flatten(0, 2).multinomial(1, generator=generator).view(8, 12, 1)
    plans = []
    assert (
        peak_bytes(
            lambda: plans.append(policy.plan(arsm.RLOO(4), logits, actions, generator=generator))
        )
        < size
    )
    returns = torch.rand(8, 12, dtype=torch.float64)
    tried = torch.rand(plans[0].step.shape, dtype=torch.float64)
    used = peak_bytes(lambda: policy.gradient(arsm.RLOO(4), logits, plans[0], returns, tried))
    assert size <= used < 2 * size


def test_large_queries_are_asked_again() -> None:
    """ARSM asks for every category: its plan keeps the noise, in float64, and little else."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 12, 1, 32_000, generator=generator)
    actions = logits.softmax(-1).flatten(0, 2).multinomial(1, generator=generator).view(8, 12, 1)
    estimator = arsm.ARSM(references=1)
    used = peak_bytes(lambda: policy.plan(estimator, logits, actions, generator=generator))
    assert used < 3 * logits.numel() * logits.element_size()
