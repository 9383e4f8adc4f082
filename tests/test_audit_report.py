"""What an audit reports, its problems, the helper for other test suites, and the command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import arsm
from arsm.referee import PROBLEMS, Problem
from arsm.referee.__main__ import main
from arsm.referee.measure import Loss
from arsm.referee.problems import enumerate_problem
from arsm.testing import assert_unbiased, assert_unbiased_advantages
from tests.surrogates import group, leave_one_out

SAMPLES = 1 << 11
"""Draws per row in these tests, a 32nd of the default."""
FEW = [p for p in PROBLEMS if p.role in ("f", "f+100") or p.learns or "masked" in p.name]

# ---------------------------------------------------------------- what is reported


def test_the_sign_of_a_loss_to_be_minimised() -> None:
    minimised = group(lambda f: -leave_one_out(f))
    assert arsm.audit(minimised, sign=-1, samples=1024, problems=FEW).passed


def live(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """The surrogate whose f keeps its graph."""
    distribution = Categorical(logits=logits)
    z = distribution.sample()
    values = f(z)
    return (values + values.detach() * distribution.log_prob(z).sum(-1)).sum()


def test_the_gradient_of_f_s_own_parameters() -> None:
    learns = [p for p in PROBLEMS if p.learns]

    def judged(loss: Loss, parameters: bool = True) -> arsm.Audit:
        return arsm.audit(loss, samples=1 << 13, parameters=parameters, problems=learns)

    assert "f's own parameters get no gradient" in str(judged(group(leave_one_out), False))
    assert judged(group(leave_one_out)).diagnosis == "parameters"
    right = judged(live)
    assert right.passed
    assert "f's own parameters get the right gradient" in str(right)

    def twice(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        z = Categorical(logits=logits).sample()
        return live(logits, f) + f(z).sum()

    assert judged(twice, False).passed
    assert judged(twice).diagnosis == "parameters"


def test_a_nearly_certain_row_is_not_decided() -> None:
    problems = [p for p in PROBLEMS if p.name == "one row nearly certain"]
    found = arsm.audit(group(leave_one_out), samples=1024, problems=problems)
    assert found.passed
    assert (found.rows[0].undecided, found.rows[0].rejected) == (4, 0)
    assert "Not decided: 4 entries" in str(found)


def test_too_few_draws_are_no_pass() -> None:
    found = arsm.audit(
        group(leave_one_out), samples=1024, problems=[p for p in PROBLEMS if p.small]
    )
    assert found.verdict == "not decided"
    assert found.diagnosis == "too few draws"


def test_the_page_says_what_it_could_have_missed_and_an_error_beyond_it_is_caught() -> None:
    found = arsm.audit(group(leave_one_out), samples=SAMPLES, problems=FEW)
    assert found.passed
    assert found.missed is not None
    assert found.scale is not None
    assert found.scale.low <= 1 <= found.scale.high
    assert "It could have missed" in str(found)
    assert "fails with probability at most 1e-06" in str(found)
    missed = arsm.audit(group(leave_one_out), samples=SAMPLES, problems=PROBLEMS[:2]).missed
    assert missed is not None
    factor = 1 + missed

    def longer(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return factor * group(leave_one_out)(logits, f)

    audits = [
        arsm.audit(longer, samples=SAMPLES, problems=PROBLEMS[:2], seed=seed) for seed in range(8)
    ]
    caught = [
        found.scale is not None and found.diagnosis == "scale" and found.scale.low > 1
        for found in audits
    ]
    assert sum(caught) >= 6  # with the probability 0.99 each


def test_variance_and_evaluations_stand_beside_leave_one_out() -> None:
    """The closed form of leave-one-out's variance is what is measured of it."""
    found = arsm.audit(group(leave_one_out, 3), samples=1 << 13, problems=PROBLEMS[5:8])
    for row in found.rows:
        assert row.evaluations == 3
        assert row.variance == pytest.approx(row.rloo, rel=0.1)
        assert row.bound is not None
        assert 0 <= row.bound < 1


def test_the_bias_comes_with_an_interval_that_holds_the_truth() -> None:
    found = arsm.audit(group(lambda f: f - f.mean(0)), samples=SAMPLES, problems=FEW)
    assert found.bias is not None
    assert found.bias.bias.low <= -found.bias.truth / 4 <= found.bias.bias.high
    assert not found.bias.bias.low <= 0 <= found.bias.bias.high


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = arsm.audit(group(leave_one_out), samples=1024, problems=PROBLEMS[:2]).figure()
    figure.savefig(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sign": 2}, "sign must be 1 or -1"),
        ({"samples": 10}, "samples must be at least 1024"),
        ({"false_alarm": 0.0}, "false_alarm must lie"),
        ({"problems": ()}, "at least one"),
    ],
)
def test_wrong_arguments_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arsm.audit(group(leave_one_out), **options)


# ---------------------------------------------------------------- problems


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_the_truth_is_that_of_exact(problem: Problem) -> None:
    truth = enumerate_problem(problem)
    out = arsm.estimate(arsm.Exact(), problem.logits, problem.function(torch.float64))
    torch.testing.assert_close(out.grad, truth.gradient)


def test_problems_are_what_the_audit_promises() -> None:
    sizes = {len(p.logits) for p in PROBLEMS if p.small}
    spreads = [float(t.f.max() - t.f.min()) for t in map(enumerate_problem, PROBLEMS)]
    assert {1, 2, 3} <= sizes
    assert max(spreads) > 10
    assert 0 < sorted(spreads)[1] < 1
    assert any(bool((p.logits == -torch.inf).any()) for p in PROBLEMS)
    assert any(p.learns for p in PROBLEMS)
    assert any(p.constant >= 100 for p in PROBLEMS)
    assert any(float(enumerate_problem(p).p.max()) > 0.9999 for p in PROBLEMS)


# ---------------------------------------------------------------- the names, the test helper and
# the command


def test_the_referee_is_a_package_and_an_audit_is_a_function() -> None:
    assert arsm.referee.PROBLEMS is PROBLEMS
    assert arsm.referee.audit is arsm.audit
    assert arsm.referee.Audit is arsm.Audit


def test_the_helper_for_other_test_suites() -> None:
    assert assert_unbiased(group(leave_one_out), samples=1024, problems=FEW).passed
    with pytest.raises(AssertionError, match=r"\[sign\]"):
        assert_unbiased(group(lambda f: -leave_one_out(f)), samples=1024, problems=FEW)
    with pytest.raises(AssertionError, match=r"\[scale\]"):
        assert_unbiased_advantages(lambda r: r - r.mean(1, keepdim=True))


LOSSES = """
import torch
from torch.distributions import Categorical

def right(logits, f):
    q = Categorical(logits=logits)
    z = q.sample()
    return (f(z).detach() * q.log_prob(z).sum(-1)).sum()

def wrong(logits, f):
    return -right(logits, f)

def advantages(rewards):
    return rewards - rewards.mean(1, keepdim=True)

def rewards_themselves(rewards):
    return rewards

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with losses.py, from which the command is run."""
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    # another test's losses.py may have been imported
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    return tmp_path


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "arsm.referee", "losses:rewards_themselves", "--advantages"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rewards_themselves: UNBIASED")
    assert main(["losses.py:wrong", "--samples", "1024", "--figure", "audit.png"]) == 1
    assert "[sign]" in capsys.readouterr().out
    assert (here / "audit.png").exists()
    assert main(["losses.py:wrong", "--samples", "1024", "--minimise"]) == 2  # too few draws
    assert main(["losses.py:advantages", "--advantages"]) == 1


def test_the_command_ends_quietly_when_nobody_reads_on(here: Path) -> None:
    command = [sys.executable, "-m", "arsm.referee", "losses:advantages", "--advantages"]
    with subprocess.Popen(
        command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (1, b"")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--samples", "10"], "samples must be at least 1024, but is 10"),
        (["--false-alarm", "2"], "false_alarm must lie between 0 and 1"),
        (["--tokens"], "--tokens belongs to --advantages"),
    ],
)
@pytest.mark.usefixtures("here")
def test_options_are_refused_in_a_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["losses.py:wrong", *options])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--figure", "--summary", "--badge"])
@pytest.mark.usefixtures("here")
def test_a_result_that_cannot_be_written(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["losses.py:wrong", "--samples", "1024", option, "nowhere/audit.png"])
    assert "The result could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("losses", "module:function"),
        ("losses:nothing", "has no nothing"),
        ("losses:number", "not a function"),
        ("nowhere:right", "no module nowhere"),
        ("nowhere.py:right", "no file nowhere.py"),
        ("broken.py:right", "broken.py cannot be imported: NameError: name 'tensor' is not"),
        ("broken:right", "broken cannot be imported: NameError"),
    ],
)
def test_the_command_refuses_kindly(
    name: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "broken.py").write_text("right = tensor")
    # 1 would say that the gradient is wrong
    with pytest.raises(SystemExit, match="2"):
        main([name])
    assert words in capsys.readouterr().err
