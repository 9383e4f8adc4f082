"""The caller of docs/adding_a_caller.md: unbiased for every estimator that it admits, short, and
shown as it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import arsm
from tests.roster import ROSTER, Entry
from tests.statistics import deviations
from tests.test_examples import load

ROOT = Path(__file__).parent.parent
EXAMPLE = load("new_caller")
RUNS = 1024
JOBS = (((0.0, 0.5), (0.4, 0.5)), ((0.0, 1.0),), ((0.2, 3.0),))
"""Four jobs of three kinds; two arrive while another is made, so the numbers of decisions and of
options differ.
"""


class Numbered(NamedTuple):
    """A machine in run number i, so that every run can have parameters, and a gradient, of its
    own.
    """

    number: int
    machine: Any

    @property
    def score(self) -> float:
        return self.machine.score

    @property
    def over(self) -> bool:
        return self.machine.over

    def after(self, action: int) -> Numbered:
        return Numbered(self.number, self.machine.after(action))


def policy_of(tables: Tensor) -> Callable[[Sequence[Numbered]], Tensor]:
    """The policy whose logits depend on the machine's kind: tables [B, 3, 3]."""

    def policy(states: Sequence[Numbered]) -> Tensor:
        none = torch.tensor([[not waits for waits in state.machine.waits()] for state in states])
        number = torch.tensor([state.number for state in states])
        kind = torch.tensor([state.machine.kind for state in states])
        return tables[number, kind].masked_fill(none, -torch.inf).unsqueeze(1)

    return policy


def table() -> Tensor:
    return torch.tensor([[0.5, -0.3, 0.0], [0.2, 0.6, -0.4], [0.0, -0.5, 0.3]], dtype=torch.float64)


def expected_score(state: Numbered, policy: Callable[[Sequence[Numbered]], Tensor]) -> Tensor:
    """E[score] by enumeration of all decisions."""
    if state.over:
        return torch.tensor(state.score, dtype=torch.float64)
    p = policy([state]).flatten().softmax(-1)
    allowed = [action for action, waits in enumerate(state.machine.waits()) if waits]
    return torch.stack(
        [p[action] * expected_score(state.after(action), policy) for action in allowed]
    ).sum()


def start(number: int = 0) -> Numbered:
    return Numbered(number, EXAMPLE.Machine(JOBS))


def exact() -> Tensor:
    """dE[score]/dtable: [3, 3]."""
    tables = table().unsqueeze(0).requires_grad_()
    return torch.autograd.grad(expected_score(start(), policy_of(tables)), tables)[0].squeeze(0)


def worst(caller: Callable[..., tuple[Tensor, int]], estimator: arsm.Estimator) -> float:
    """The mean gradient of a caller against enumeration; above 1 is a rejection."""
    tables = table().repeat(RUNS, 1, 1).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    scores, _ = caller(
        estimator, [start(number) for number in range(RUNS)], policy_of(tables), generator
    )
    (gradients,) = torch.autograd.grad(scores.sum(), tables)
    return float(deviations(gradients, exact()).max())


def admitted() -> list[Entry]:
    """The estimators of one three-way choice that claim to be unbiased and that `branch` takes."""
    found = []
    for entry in ROSTER:
        if not entry.fits(1, 3) or not entry.make(1, 3).unbiased:
            continue
        try:
            EXAMPLE.branch(entry.make(1, 3), [start()], policy_of(table().unsqueeze(0)))
        except ValueError as error:
            if "but branch needs one that" not in str(error):
                raise
        else:
            found.append(entry)
    return found


@pytest.mark.parametrize("entry", admitted(), ids=lambda entry: entry.label)
def test_branching_is_unbiased(entry: Entry) -> None:
    assert worst(EXAMPLE.branch, entry.make(1, 3)) <= 1


@pytest.mark.parametrize("estimator", [arsm.RLOO(3), arsm.Reinforce()], ids=repr)
def test_whole_runs_are_unbiased(estimator: arsm.Estimator) -> None:
    assert worst(EXAMPLE.whole, estimator) <= 1


@pytest.mark.parametrize("estimator", [arsm.OTB(3), arsm.ARSM(), arsm.VIMCO(3)], ids=repr)
def test_whole_runs_refuse_estimators_without_one_weight_per_run(estimator: arsm.Estimator) -> None:
    with pytest.raises(ValueError, match="but whole needs one that"):
        EXAMPLE.whole(estimator, [start()], policy_of(table().unsqueeze(0)))


def test_many_estimators_are_admitted() -> None:
    assert {"arsm", "rloo", "reinforce", "local expectation", "otb"} <= {
        entry.label for entry in admitted()
    }


@pytest.mark.parametrize(
    "estimator", [arsm.ARSM(), arsm.RLOO(3), arsm.LocalExpectation()], ids=repr
)
def test_a_caller_that_forgets_the_action_is_caught(
    estimator: arsm.Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimator then draws a true sample of its own, which was not played."""
    pose = EXAMPLE.pose
    # the generator stays: a second one of the same seed would draw the same actions again
    monkeypatch.setattr(
        EXAMPLE, "pose", lambda *question, z, generator: pose(*question, generator=generator)
    )
    assert worst(EXAMPLE.branch, estimator) > 1


def test_a_caller_that_miscounts_the_score_before_a_branch_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The score before a decision is then subtracted twice from its branches, and once from its
    run.
    """
    play = EXAMPLE.play

    def forgetful(starts: Sequence[Numbered], *options: Any) -> tuple[Tensor, list[Any]]:
        scores, decisions = play(starts, *options)
        return scores - torch.tensor([state.score for state in starts]), decisions

    monkeypatch.setattr(EXAMPLE, "play", forgetful)
    assert worst(EXAMPLE.branch, arsm.RLOO(3)) > 1


# ---------------------------------------------------------------- the page


def test_the_page_shows_the_caller_as_it_runs_and_it_is_short() -> None:
    page = (ROOT / "docs" / "adding_a_caller.md").read_text()
    source = (ROOT / "examples" / "new_caller.py").read_text()
    parts = [part.strip() for part in re.split(r"\n\n\n", source)]
    (state,) = (part for part in parts if part.startswith("class State"))
    caller = source[source.index(state) : source.index("def whole(")].strip()
    assert caller in page
    assert len(caller.splitlines()) <= 60
    for name in ("def whole", "class Machine", "def morning", "class Dispatcher"):
        (shown,) = (part for part in parts if part.startswith(name))
        assert shown in page, name
