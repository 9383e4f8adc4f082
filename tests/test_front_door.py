"""The package at a prompt: help, names, one-line results, and progress."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import progress, sequences
from arsm.diagnostics import Moments


def first(z: Tensor) -> Tensor:
    return z[:, 0].float()


# ---------------------------------------------------------------- help and names


def test_the_example_of_the_help_runs_and_says_the_truth() -> None:
    assert arsm.__doc__ is not None
    found = re.search(r"\n\n(    import.*?)\n\n\S", arsm.__doc__, re.DOTALL)
    assert found is not None
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed):
        exec(textwrap.dedent(found[1]), {})
    (number,) = re.findall(r"tensor\((0\.\d+)", printed.getvalue())
    assert float(number) > 0.95


def test_the_map_of_the_help_names_every_door() -> None:
    assert arsm.__doc__ is not None
    named = set(re.findall(r"`arsm\.(\w+)", arsm.__doc__))
    assert named <= set(dir(arsm))
    doors = {"sequences", "trl", "policy", "rl", "optuna", "pyro", "testing", "extend"}
    assert doors <= named


def test_dir_has_names_for_users_only() -> None:
    shown = set(dir(arsm))
    assert set(arsm.__all__) <= shown
    modules = {name for name in shown - set(arsm.__all__) if not name.startswith("_")}
    assert modules == {
        *("extend", "policy", "referee", "sequences"),
        *("optuna", "pyro", "rl", "testing", "trl"),
    }
    assert arsm.checks is not None  # hidden, not gone  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- estimators in one line


@dataclass(frozen=True, eq=False)
class Mine(arsm.RLOO):
    """An estimator of a user's."""

    scale: float = 1.0


class WithWords(arsm.RLOO):
    """One with a repr of its own, which its subclasses keep."""

    def __repr__(self) -> str:
        return "words"


class Below(WithWords):
    """Inherits the words."""


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (arsm.RLOO(4), "RLOO(4)"),
        (arsm.RLOO(), "RLOO(4)"),
        (arsm.RLOO(8, ridge=1.0), "RLOO(8, ridge=1.0)"),
        (arsm.RLOO(3, live=2), "RLOO(3, live=2)"),
        (arsm.RLOO(surrogate=torch.zeros(2, 1, 5)), "RLOO(4, surrogate=float32 [2, 1, 5])"),
        (arsm.ARSM(), "ARSM()"),
        (arsm.ARSM(pooled=True), "ARSM(pooled=True)"),
        (arsm.Average(arsm.ARSM(), 3), "Average(ARSM(), 3)"),
        (arsm.ExactPlusSampled(exact=2), "ExactPlusSampled(exact=2, samples=2)"),
        (arsm.GumbelSoftmax(0.5), "GumbelSoftmax(temperature=0.5)"),
        (Mine(4, scale=2.0), "Mine(4, scale=2.0)"),
        (Below(4), "words"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_estimator_shows_what_differs_from_its_defaults(
    estimator: arsm.Estimator, words: str
) -> None:
    assert repr(estimator) == words


@pytest.mark.parametrize("name", arsm.estimator_names())
def test_an_estimator_is_what_it_says(name: str) -> None:
    made = arsm.estimator(name)
    words = repr(made)
    for learned in ("control=MLPControl(...)", "baseline=MLPBaseline(...)"):
        words = words.replace(learned, "")  # a repr does not tell a network's weights
    again = eval(words, dict(vars(arsm)))
    assert repr(again) == repr(made)
    if not len(made.learned):  # learned parts are the same only as the same object
        assert again == made


def test_options_are_still_checked_copied_and_pickled() -> None:
    made = arsm.RLOO(samples=5, ridge=1.0)
    assert copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert list(inspect.signature(arsm.RLOO).parameters) == [
        "samples",
        "ridge",
        "surrogate",
        "live",
    ]
    assert list(inspect.signature(arsm.estimate).parameters)[:3] == ["estimator", "logits", "f"]


# ---------------------------------------------------------------- results in one line


def results() -> list[Any]:
    logits = torch.zeros(8, 3, 5, requires_grad=True)
    out = arsm.estimate(arsm.RLOO(2), logits, first)
    layers = arsm.estimate_layers(
        arsm.RLOO(2), [lambda zs: torch.zeros(9, 1, 2)], lambda zs, logits: first(zs[0])
    )
    model = sequences.Recompute(nn.Embedding(4, 4))
    prompts = torch.zeros(5, 1, dtype=torch.int64)
    answers = sequences.estimate(
        sequences.Group(2),
        model,
        prompts,
        lambda prompts, tokens: tokens.float().mean(-1),
        max_tokens=3,
    )
    return [out, out.info, layers, answers, arsm.audit(arsm.RLOO(2), samples=1024)]


def test_results_are_short() -> None:
    shown = [repr(result) for result in results()]
    assert shown == [
        "Estimate(value=float32 [8], z=int64 [8, 2, 3], grad=float32 [8, 3, 5])",
        "Info(asked=tensor(2), distinct=int64 [8], finite=bool [8])",
        "LayersEstimate(value=float32 [9], layers=(Estimate(value=float32 [9], "
        "z=int64 [9, 2, 1], grad=float32 [9, 1, 2]),))",
        shown[3],
        shown[4],
    ]
    assert shown[3].startswith(
        "SequenceEstimate(value=float32 [5], tokens=int64 [5, 2, 3], rewards=float64 [5, 2], "
        "info={mismatch: tensor("
    )
    audit = r"Audit\('RLOO', 'not decided', problems=\d+, diagnosis='too few draws'\)"
    assert re.fullmatch(audit, shown[4])


# ---------------------------------------------------------------- progress


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error says that it is a terminal, and progress is shown at once."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)


def slow_calls() -> dict[str, Any]:
    logits = torch.zeros(1, 3)
    return {
        "compare": lambda: arsm.compare(logits, first, estimators=["arsm", "rloo"], samples=20),
        "maximize": lambda: arsm.maximize(lambda z: float(z[0]), [4, 4], evaluations=10),
        "audit": lambda: arsm.audit(arsm.RLOO(2), samples=1024),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [("compare", " rloo, about"), ("maximize", "of 10 evaluations, best"), ("audit", "s left")],
)
def test_progress_is_one_line_that_disappears(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    slow_calls()[name]()
    shown = capsys.readouterr().err
    assert words in shown
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K")


def test_the_line_disappears_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)

    def fails(z: Tensor) -> Tensor:
        raise RuntimeError("no")

    known = Moments(torch.zeros(1, 3), torch.zeros(1, 3))
    with pytest.raises(RuntimeError, match="no"):
        arsm.compare(torch.zeros(1, 3), fails, estimators=["rloo"], reference=known)
    assert capsys.readouterr().err.endswith("\r\x1b[K")


@pytest.mark.parametrize("name", list(slow_calls()))
def test_progress_is_silent_at_first_and_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr.isatty", lambda: True)
        patched.setattr(progress, "PATIENCE", 60.0)
        slow_calls()[name]()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    slow_calls()[name]()
    assert capsys.readouterr().err == ""
