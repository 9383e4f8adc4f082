"""From all draws of an audit to its verdict: every mean beside the exact gradient, at one
declared false-alarm rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arsm.referee.bounds import student
from arsm.referee.diagnose import Finding, Interval, Means, diagnose
from arsm.referee.measure import CALLS, IGNORED, Draws
from arsm.referee.problems import Problem
from arsm.referee.result import Audit, Row, Verdict, in_words, worst_entry

POWER = 2.33
"""Standard errors beyond the interval at which an error is caught with probability 0.99."""


@dataclass(frozen=True)
class AllDraws:
    """All draws of an audit."""

    draws: Sequence[Draws]
    """Results on the problems on which the loss could be run."""
    failures: Mapping[str, BaseException] = field(default_factory=dict)
    """Errors that the loss raised, by problem."""
    notes: Sequence[str] = ()
    ignored: bool = False
    """Whether the loss does not use f."""

    @property
    def infinite(self) -> dict[str, BaseException]:
        """Failures by values that are not finite."""
        return {x: e for x, e in self.failures.items() if isinstance(e, FloatingPointError)}

    @property
    def crashed(self) -> dict[str, BaseException]:
        """All other failures."""
        return {x: e for x, e in self.failures.items() if not isinstance(e, FloatingPointError)}


def judge(
    name: str,
    measured: AllDraws,
    problems: Sequence[Problem],
    false_alarm: float,
    *,
    parameters: bool = False,
    seconds: float = 0.0,
) -> Audit:
    """Compare all means at once: each comparison gets an equal share of the false-alarm rate."""
    failure = false_alarm / _comparisons(measured.draws)
    compared = _compare(measured.draws, failure)
    of_parameters = [_parameters(d, failure) for d in measured.draws if d.problem.learns]
    # a note for everybody, a verdict only for those who asked for it
    wrong_parameters = [note for note, wrong in of_parameters if wrong and parameters]
    rejected = measured.ignored or compared.deviates or bool(wrong_parameters)
    undecided = [] if rejected else _too_few_draws(measured.draws)
    # the most important first: `diagnosis` is the first one's kind
    findings = [
        *_not_finite(measured.infinite, problems),
        *_causes(compared.means, measured.ignored, compared.deviates),
        *(Finding("parameters", note) for note in wrong_parameters),
        *_crashes(measured.crashed, problems),
        *undecided,
    ]
    rows = compared.rows | _failed_rows(measured.failures, problems)
    return Audit(
        name,
        _verdict(measured, rejected, bool(undecided)),
        tuple(findings),
        tuple(rows[p.name] for p in problems),
        false_alarm,
        compared.scale,
        compared.missed,
        (*measured.notes, *(note for note, _ in of_parameters)),
        seconds=seconds,
        exception=next(iter(measured.failures.values()), None),
    )


@dataclass(frozen=True, eq=False)
class JudgedMeans:
    """All means beside the exact gradients."""

    means: list[Means]
    rows: dict[str, Row]
    """By problem."""
    scale: Interval | None
    """The common length in the right direction."""
    missed: float | None
    """The error of that length that could have been missed."""

    @property
    def deviates(self) -> bool:
        """Whether some entry, or the common length, is outside of its interval."""
        # the common length finds errors that are too small for any single entry
        wrong_length = self.scale is not None and not self.scale.low <= 1 <= self.scale.high
        return wrong_length or any(row.rejected for row in self.rows.values())


def _compare(draws: Sequence[Draws], failure: float) -> JudgedMeans:
    means = [_means(d, failure) for d in draws]
    rows = {d.problem.name: _row(d, m, failure) for d, m in zip(draws, means, strict=True)}
    return JudgedMeans(means, rows, *_length(draws, failure))


def _verdict(measured: AllDraws, rejected: bool, undecided: bool) -> Verdict:
    # what was seen to be wrong stays wrong, whatever else could not be decided
    if rejected or measured.infinite:
        return "wrong"
    return "not decided" if measured.crashed or undecided else "unbiased"


def _comparisons(draws: Sequence[Draws]) -> int:
    """All entries of all means, the parameters' gradients, and the common length."""
    entries = sum(d.error.numel() for d in draws)
    learned = sum(len(d.problem.weights) for d in draws if d.problem.learns)
    return 1 + entries + learned


def _failed_rows(
    failures: Mapping[str, BaseException], problems: Sequence[Problem]
) -> dict[str, Row]:
    return {
        p.name: Row(p.name, _size(p, 0), None, 0, 0, None, error=in_words(failures[p.name]))
        for p in problems
        if p.name in failures
    }


def _causes(means: list[Means], ignored: bool, deviates: bool) -> list[Finding]:
    if ignored:
        return [Finding("f unused", IGNORED)]
    return diagnose(means) if deviates else []


def _not_finite(
    infinite: Mapping[str, BaseException], problems: Sequence[Problem]
) -> list[Finding]:
    if not infinite:
        return []
    causes = "usual causes are a standard deviation of 0 and 0 times -inf at a masked category"
    first = next(iter(infinite.values()))
    return [Finding("not finite", f"In {_list(infinite, problems)}, {first}; {causes}.")]


def _crashes(crashed: Mapping[str, BaseException], problems: Sequence[Problem]) -> list[Finding]:
    if not crashed:
        return []
    first = next(iter(crashed.values()))
    raised = f"the loss raised {in_words(first)}{_line(first)}"
    return [Finding("crash", f"In {_list(crashed, problems)}, {raised}.")]


def _too_few_draws(draws: Sequence[Draws]) -> list[Finding]:
    blind = [repr(d.problem.name) for d in draws if not bool(d.decided[:, :-1].any())]
    if not blind:
        return []
    sentence = f"Too few draws to decide anything in {', '.join(blind)}; raise samples."
    return [Finding("too few draws", sentence)]


def _row(d: Draws, means: Means, failure: float) -> Row:
    half = d.half_width(failure)
    decided = d.decided
    wrong = decided & (d.error.abs() > half)
    # leave-one-out, the yardstick, needs two samples
    samples = max(2, round(d.evaluations))
    # a row whose gradient is 0 has no length
    use = decided[:, -1] & d.truth.gradient.flatten(1).any(1)
    scale = None
    if bool(use.any()):
        value = 1 + float(d.error[use, -1].mean())
        # the widest of the rows, without a claim that their errors are independent
        width = float(half[use, -1].amax())
        scale = Interval(value, value - width, value + width)
    return Row(
        d.problem.name,
        _size(d.problem, d.batch),
        worst_entry(means),
        int(wrong.sum()),
        int((~decided).sum()),
        scale,
        float(d.variance[:, :-1].sum(1).mean()),
        d.evaluations,
        float(d.truth.rloo_variance(samples).mean()),
        float(d.truth.bound(samples).mean()),
    )


def _size(problem: Problem, batch: int) -> str:
    rows, variables, categories = problem.logits.shape
    return f"{batch or rows}, {variables}, {categories}"


def _means(d: Draws, failure: float) -> Means:
    shape = d.truth.gradient.shape
    half = torch.where(d.decided, d.half_width(failure), torch.inf)
    # a constant in f is no reason for large draws
    spread = float(d.truth.f.amax() - d.truth.f.amin())
    return Means(
        d.problem.name,
        d.problem.role,
        d.truth,
        d.batch,
        d.truth.gradient + d.error[:, :-1].view(shape),
        half[:, :-1].view(shape),
        d.standard_error[:, :-1].view(shape),
        float(d.spread[:, :-1].max()) / spread if spread > 0 else 0.0,
        d.rounding,
        d.problem.small,
        d.relaxed,
    )


def _length(measured: Sequence[Draws], failure: float) -> tuple[Interval | None, float | None]:
    """The length in the right direction over all large problems, and the error of it
    that could have been missed.

    Rows are weighted by REINFORCE's precision there, which is known before anything is
    drawn.
    """
    weights: list[Tensor] = []
    errors: list[Tensor] = []
    by_row: list[Tensor] = []
    by_call: list[Tensor] = []
    ranges: list[Tensor] = []
    for d in measured:
        square = d.truth.gradient.square().sum((-2, -1))
        use = d.decided[:, -1] & (square > 0)
        if d.problem.small or not bool(use.any()):
            continue
        projected = (d.truth.x * d.truth.gradient.unsqueeze(1)).sum((-2, -1))
        variance = (d.truth.q * (d.truth.f * projected).square()).sum(-1) / square.square() - 1
        calls = len(d.by_call)
        # a nearly noiseless row must not get all of the weight
        weights.append((1 / variance.clamp_min(0.1))[use])
        errors.append(d.error[use, -1])
        by_row.append(d.variance[use, -1] / d.count)
        by_call.append(d.by_call[:, use, -1].var(0) / calls)
        ranges.append(d.spread[use, -1] / d.count)
    if not weights:
        return None, None
    weight = torch.cat(weights) / torch.cat(weights).sum()
    error = float((weight * torch.cat(errors)).sum())
    # two sides, each at half of the rate: as in `bounds.bernstein`, for a weighted mean
    log = math.log(4 / failure)
    rows, calls = (float((weight.square() * torch.cat(x)).sum()) for x in (by_row, by_call))
    width = math.sqrt(2 * log * rows) + 7 / 3 * log * float((weight * torch.cat(ranges)).max())
    # rounding comes on top
    width = max(width, student(failure, CALLS - 1) * math.sqrt(calls)) + 1e-5
    missed = width + POWER * math.sqrt(max(rows, calls))
    return Interval(1 + error, 1 + error - width, 1 + error + width), missed


def _parameters(d: Draws, failure: float) -> tuple[str, bool]:
    """A sentence on the gradient of f's own parameters, and whether it is wrong."""
    if d.by_theta is None:
        return "f's own parameters get no gradient (f is detached).", True
    calls = len(d.by_theta)
    standard_error = d.by_theta.std(0) / calls**0.5
    width = student(failure, calls - 1) * standard_error + d.rounding * len(d.truth.theta)
    error = d.by_theta.mean(0)
    if bool((error.abs() <= width).all()):
        missed = float(((width + POWER * standard_error) / d.truth.theta.sum(0).abs()).max())
        return (
            f"f's own parameters get the right gradient; an error of less than {100 * missed:.2g} "
            "% in one of them could have been missed.",
            False,
        )
    worst = int((error.abs() / width).argmax())
    return (
        f"f's own parameters get a wrong gradient: off by {float(error[worst]):.3g} +- "
        f"{float(width[worst]):.2g} where it is {float(d.truth.theta.sum(0)[worst]):.3g}.",
        True,
    )


def _line(error: BaseException) -> str:
    """The file and line where the loss raised it."""
    trace = error.__traceback__
    place = ""
    # the innermost frame that is the user's: below it are torch's and ours
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] not in ("arsm", "torch"):
            place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _list(failures: Mapping[str, BaseException], problems: Sequence[Problem]) -> str:
    if len(failures) == len(problems):
        return "every problem"
    first, *others = failures
    return f"'{first}'" + (f" and {len(others)} other problems" if others else "")
