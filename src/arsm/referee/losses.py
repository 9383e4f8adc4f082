"""`audit`: is the gradient that this loss gives the gradient of E[f]?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from arsm.capabilities import is_estimator, is_estimator_class
from arsm.options import suggests
from arsm.progress import reporter
from arsm.referee.diagnose import Finding
from arsm.referee.judge import AllDraws, judge
from arsm.referee.measure import (
    REPEATED,
    Draws,
    Loss,
    RefusedError,
    Sign,
    draw_gradients,
    generators,
    one_thread,
    probe,
)
from arsm.referee.problems import PROBLEMS, Problem
from arsm.referee.result import Audit
from arsm.types import Estimator


@suggests("arsm.audit")
def audit(
    loss: Loss | Estimator,
    *,
    sign: Sign = 1,
    parameters: bool = False,
    problems: Sequence[Problem] | None = None,
    samples: int = 1 << 16,
    false_alarm: float = 1e-6,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Audit:
    """Compare the gradient that a loss gives in the mean with the exact one, on
    problems that can be enumerated.

    Args:
        loss: `loss(logits, f) -> scalar` draws once and returns what it would call
            backward on, summed over the rows, claimed to estimate dE[f]/dlogits. logits
            are [B, K, C]; f maps int64 [..., K] (or relaxed [..., K, C]) to [...]. An
            estimator of this library stands for the loss that `arsm.estimate` makes of
            it.
        sign: -1 if the loss is to be minimised: its gradient is then minus the
            estimate.
        parameters: whether the gradient of f's own parameters is judged too; it is
            always reported.
        problems: those to run, `arsm.referee.PROBLEMS` by default; leave out what the
            loss is not made for.
        samples: draws per row; problems of small batches get a 32nd, and at most 1,024.
        false_alarm: the probability with which a correct loss may be called wrong.
        seed: of torch's, Python's and NumPy's global generators, which are set back
            afterwards; torch runs on one thread meanwhile.
        progress: hears each problem's name and the share of the audit that is done; by
            default a line on the terminal after two seconds.

    Returns:
        An `Audit`; `audit(loss).passed` is for a test, `print(audit(loss))` for a
        person.
    """
    problems = PROBLEMS if problems is None else problems
    _check_options(sign, false_alarm, samples, problems)
    start = time.perf_counter()
    # before an estimator is replaced by its loss, whose name says nothing
    name = getattr(loss, "__qualname__", type(loss).__name__)
    if is_estimator(loss):
        loss = _loss_of(loss)
    if not callable(loss) or is_estimator_class(loss):
        raise TypeError(
            f"The loss must be a function loss(logits, f), or an estimator, but is {loss!r}."
        )
    try:
        # a caller's inference mode would make every tensor here one without a gradient
        with torch.inference_mode(False), generators(seed), one_thread():
            measured = _measure(loss, problems, samples, sign, seed, reporter(progress))
    except RefusedError as error:
        finding = Finding(error.kind, str(error))
        return Audit(name, "not decided", (finding,), (), false_alarm, exception=error)
    seconds = time.perf_counter() - start
    return judge(name, measured, problems, false_alarm, parameters=parameters, seconds=seconds)


def _check_options(
    sign: Sign, false_alarm: float, samples: int, problems: Sequence[Problem]
) -> None:
    if sign not in (1, -1):
        raise ValueError(f"sign must be 1 or -1, but is {sign!r}.")
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm must lie between 0 and 1, but is {false_alarm}.")
    if samples < 1024:
        raise ValueError(f"samples must be at least 1024, but is {samples}; fewer decide nothing.")
    if not problems:
        raise ValueError("There is no problem to run; give at least one.")
    if not all(isinstance(problem, Problem) for problem in problems):
        raise ValueError(
            f"problems must be a sequence of arsm.referee.Problem, but is {problems!r}; see "
            "PROBLEMS."
        )


def _loss_of(estimator: Estimator) -> Loss:
    """The loss that `arsm.estimate` makes of an estimator."""
    from arsm.driver import estimate

    return lambda logits, f: estimate(estimator, logits, f).value.sum()


def _measure(
    loss: Loss,
    problems: Sequence[Problem],
    samples: int,
    sign: Sign,
    seed: int,
    tell: Callable[[str, float], None],
) -> AllDraws:
    """Draw gradients on every problem; a loss that cannot be audited is a RefusedError."""
    # the type in which the loss's own tensors are made
    dtype = torch.get_default_dtype()
    draws: list[Draws] = []
    failures: dict[str, BaseException] = {}
    notes, ignored = _probed(loss, problems[0], sign, dtype, seed)
    for position, problem in enumerate(problems):

        def tick(share: float, position: int = position, problem: Problem = problem) -> None:
            tell(problem.name, (position + share) / len(problems))

        try:
            drawn = draw_gradients(loss, problem, samples, sign, dtype, tick)
            # the probe has seen only the first problem, and eight calls
            if _repeats(drawn):
                raise RefusedError("fixed seed", REPEATED)
        except RefusedError as error:
            words = f"{error} (Seen in '{problem.name}'.)"
            raise RefusedError(error.kind, words) from error
        # somebody else's code may raise anything, and the other problems are worth having
        except Exception as error:
            failures[problem.name] = error
            continue
        draws.append(drawn)
    return AllDraws(draws, failures, notes, ignored)


def _probed(
    loss: Loss, problem: Problem, sign: Sign, dtype: torch.dtype, seed: int
) -> tuple[list[str], bool]:
    """Notes from a first look at the loss, and whether it ignores f."""
    try:
        note, ignored = probe(loss, problem, sign, dtype, seed)
    except RefusedError:
        raise
    # the error is met again, where its problem is named
    except Exception:
        return [], False
    return ([] if note is None else [note]), ignored


def _repeats(drawn: Draws) -> bool:
    """Whether calls on a large batch repeat each other's draws, although equal rows of
    a call differ.
    """
    # the variance inside calls: what is left when that between calls is taken off
    within = drawn.variance - drawn.by_call.var(0)
    random = bool((within > 1e-6 * drawn.truth.gradient.square().amax()).any())
    calls = drawn.by_call.flatten(1)
    # calls without any gradient say nothing about the seed, whatever their number
    target = drawn.truth.gradient.flatten(1)
    empty = (drawn.by_call[..., :-1] + target).abs().flatten(1).amax(1) == 0
    calls = calls[~empty]
    # a small batch of few categories repeats itself by chance; half of the calls do not
    return drawn.batch >= 128 and random and len(calls.unique(dim=0)) < (len(calls) + 1) // 2
