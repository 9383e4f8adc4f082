"""Whole losses of trainers of language models, judged by enumeration of every batch of
a small model.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from arsm.progress import reporter
from arsm.referee.causes import explain
from arsm.referee.diagnose import Finding, Interval
from arsm.referee.divergences import explain_divergence
from arsm.referee.evidence import Evidence, Mean, where
from arsm.referee.measure import generators, one_thread, seed_generators
from arsm.referee.result import Audit, Entry, Row, Verdict, in_words
from arsm.referee.worlds import (
    SETTINGS,
    Objective,
    Setting,
    TrainerLoss,
    World,
    batch_gradient,
    mean_gradient,
)

ROUNDING = 1e-4
"""Relative to the largest reward: what float32 may be off by."""
VARIES = (
    "The loss returned another gradient for the same batch: it keeps state between calls or draws "
    "random numbers; audit it with these fixed."
)
EQUAL_REWARDS = "A usual cause is a division by the standard deviation of equal rewards."
Progress = Callable[[str, float], None]
Failure = tuple[Setting, BaseException]


def audit_batches(
    loss: TrainerLoss,
    target: Objective,
    documented: TrainerLoss | None,
    up_to_scale: bool,
    sign: int,
    seed: int,
    progress: Progress | None,
) -> Audit:
    """Enumerate every batch of every setting; `audit_sequences` says what the arguments are."""
    start = time.perf_counter()
    name = getattr(loss, "__qualname__", type(loss).__name__)
    with torch.inference_mode(False), generators(seed), one_thread():
        found = _Referee(loss, target, documented, up_to_scale, sign, reporter(progress))
        verdict, findings, rows, notes, exception = found.judge()
    return Audit(
        name,
        verdict,
        tuple(findings),
        tuple(rows),
        0.0,
        notes=tuple(notes),
        sizes="B, n",
        seconds=time.perf_counter() - start,
        exception=exception,
    )


class _Referee:
    def __init__(
        self,
        loss: TrainerLoss,
        target: Objective,
        documented: TrainerLoss | None,
        up_to_scale: bool,
        sign: int,
        progress: Progress,
    ) -> None:
        self.loss = loss
        self.target = target
        self.documented = documented
        self.up_to_scale = up_to_scale
        self.sign = sign
        self.progress = progress

    def judge(self) -> tuple[Verdict, list[Finding], list[Row], list[str], BaseException | None]:
        """Verdict, findings, rows, notes, and the first error that the loss raised."""
        if self._varies():
            return "not decided", [Finding("state", VARIES)], [], [], None
        means, failures = self._measure_all()
        factors = self._factors(means)
        rejected = [m for m in means if not m.agrees(factors[_size(m.setting)] * m.truth)]
        findings: list[Finding] = []
        notes = [self._stated()]
        if rejected:
            found, depends = self._explain(means)
            findings += found
            notes += depends
            if place := where(means):
                notes.append(f"Where the squared error is: {place}.")
        elif self.up_to_scale:
            notes += _allowed_factors(factors)
        infinite = [(s, e) for s, e in failures if isinstance(e, FloatingPointError)]
        crashed = [(s, e) for s, e in failures if not isinstance(e, FloatingPointError)]
        # a loss that is not finite comes first: it spoils a training at once
        findings = [*_not_finite(infinite), *findings, *_crashes(crashed)]
        verdict: Verdict = "unbiased"
        if crashed:
            verdict = "not decided"
        # what was seen to be wrong stays wrong, whatever else could not be decided
        if rejected or infinite:
            verdict = "wrong"
        self.progress("", 1.0)
        exception = failures[0][1] if failures else None
        return verdict, findings, _rows(means, factors, failures), notes, exception

    def _measure_all(self) -> tuple[list[Mean], list[Failure]]:
        """The means of all settings, and the errors of those in which the loss raised one."""
        means: list[Mean] = []
        failures: list[Failure] = []
        for position, setting in enumerate(SETTINGS):
            self.progress(setting.name, position / len(SETTINGS))
            try:
                means.append(self._measure(World(self.target), setting))
            # somebody else's code may raise anything, and the other settings are worth having
            except Exception as error:
                failures.append((setting, error))
        return means, failures

    def _varies(self) -> bool:
        """Whether a batch gets another gradient after other batches were seen."""
        world = World(self.target)
        setting = SETTINGS[1]
        try:
            seed_generators(0)
            first = batch_gradient(self.loss, world, setting, torch.tensor([[0, 1, 2]]))
            batch_gradient(self.loss, world, setting, torch.tensor([[3, 3, 1]]))
            again = batch_gradient(self.loss, world, setting, torch.tensor([[0, 1, 2]]))
        # the error is met again, where the setting is named
        except Exception:
            return False
        return not torch.allclose(first, again, rtol=1e-4, atol=1e-6)

    def _measure(self, world: World, setting: Setting) -> Mean:
        mean = mean_gradient(self.loss, world, setting, self.sign)
        truth = (
            world.truth(setting)
            if self.documented is None
            else mean_gradient(self.documented, world, setting)
        )
        rounding = ROUNDING * max(float(setting.rewards().abs().max()), 0.01)
        return Mean(setting, mean, truth, rounding)

    def _factors(self, means: Sequence[Mean]) -> dict[tuple[int, int], float]:
        """The factor that each size may have: 1, or a fitted one."""
        top: dict[tuple[int, int], float] = defaultdict(float)
        bottom: dict[tuple[int, int], float] = defaultdict(float)
        for m in means:
            # without a reward there is nothing that a factor could multiply
            if m.setting.scale:
                # a reward of 100 rounds more coarsely than one of 0.05
                weight = 1 / m.rounding**2
                top[_size(m.setting)] += weight * float((m.mean * m.truth).sum())
                bottom[_size(m.setting)] += weight * float(m.truth.square().sum())
        sizes = {_size(m.setting) for m in means}
        fitted = {size: top[size] / bottom[size] if bottom[size] else 1.0 for size in sorted(sizes)}
        # a negative factor is a wrong sign, which no learning rate mends
        if self.up_to_scale and all(f > 0 for f in fitted.values()):
            return fitted
        return dict.fromkeys(fitted, 1.0)

    def _stated(self) -> str:
        if self.documented is not None:
            return "Target: the gradient of the documented objective, averaged over all batches."
        words = "E[reward]" + (
            f" - {self.target.beta:g} KL(model || reference)" if self.target.beta else ""
        )
        drawn = (
            f" at temperature {self.target.temperature:g}" if self.target.temperature != 1 else ""
        )
        stale = ", answers drawn by an older model" if self.target.stale else ""
        return (
            f"Target: the gradient of {words}{drawn}{stale}, averaged over the prompts; all "
            "batches enumerated."
        )

    def _explain(self, means: Sequence[Mean]) -> tuple[list[Finding], list[str]]:
        """The cause, and what the weights depend on."""
        # causes are told apart by what the policy gradient should be, not by somebody's text
        if self.documented is not None:
            return [
                Finding("unexplained", "It is not the gradient of the documented objective.")
            ], []
        try:
            return self._causes(means)
        # the loss may fail at batches of no setting
        except Exception as error:
            return [Finding("unexplained", f"Wrong, cause not found: {in_words(error)}.")], []

    def _causes(self, means: Sequence[Mean]) -> tuple[list[Finding], list[str]]:
        # one part after the other is taken out of the objective; few settings suffice to see
        # whether the rest is right
        small = [s for s in SETTINGS if s.role in ("", "f") and len(s.prompts) * s.answers < 4]
        plain = replace(self.target, stale=False)
        if self.target.stale and self._right(World(plain), small):
            return [self._stale()], []
        # without a divergence in two ways: a loss may read its weight, or have one of its own
        neutral = [replace(s, own_reference=True) for s in small]
        free = replace(plain, beta=0.0)
        if self.target.beta and self._right(
            World(free), [*neutral, replace(SETTINGS[0], own_reference=True)]
        ):
            return [explain_divergence(self.loss, self.target, small, self.sign)], []
        # several things are wrong: the causes of the plainest objective are told
        if self.target.beta or self.target.stale:
            world = World(free)
            means = [self._measure(world, replace(s, own_reference=True)) for s in SETTINGS]
        evidence = Evidence(self.loss, free, means, self.sign)
        depends = list(evidence.depends())
        notes = [f"The tokens' weights depend on {'; '.join(depends)}."] if depends else []
        return explain(evidence), notes

    def _right(self, world: World, settings: Sequence[Setting]) -> bool:
        means = [self._measure(world, setting) for setting in settings]
        factors = self._factors(means)
        return all(m.agrees(factors[_size(m.setting)] * m.truth) for m in means)

    def _stale(self) -> Finding:
        evidence = Evidence(self.loss, replace(self.target, stale=False, beta=0.0), [], self.sign)
        # every token twice as likely as under the sampler: a ratio per token doubles the weights,
        # one of the whole answer multiplies them by 2 to the length
        double = evidence.at_ratio(2.0).tokens[:, 0] / evidence.base.tokens[:, 0]
        lengths = evidence.base.lengths
        if bool(((double - 1).abs() < 1e-2).all()):
            words = (
                "the weights do not depend on the sampler's ln p: importance weights are missing"
            )
        elif bool(((double - 2.0) < 1e-2).all()) and int(lengths.max()) > 1:
            words = (
                "a token is weighted by a ratio of its own probability, clipped or not; the "
                "answer's reward needs the product over the whole answer"
            )
        else:
            words = "the importance weights are not those of whole answers"
        return Finding(
            "stale sampler",
            f"Right where the sampler is the model itself, wrong where it is older: {words}.",
        )


def _size(setting: Setting) -> tuple[int, int]:
    return len(setting.prompts), setting.answers


def _allowed_factors(factors: dict[tuple[int, int], float]) -> list[str]:
    if all(abs(f - 1) <= 1e-3 for f in factors.values()):
        return []
    words = ", ".join(f"{f:.4g} ({b} x {n})" for (b, n), f in factors.items())
    return [
        f"Right up to a factor that depends on the numbers of prompts and answers alone: {words}."
    ]


def _not_finite(infinite: Sequence[Failure]) -> list[Finding]:
    if not infinite:
        return []
    setting, error = infinite[0]
    return [Finding("not finite", f"In '{setting.name}', {error}. {EQUAL_REWARDS}")]


def _crashes(crashed: Sequence[Failure]) -> list[Finding]:
    if not crashed:
        return []
    setting, error = crashed[0]
    many = f" and {len(crashed) - 1} more settings" if len(crashed) > 1 else ""
    return [Finding("crash", f"In '{setting.name}'{many}, the loss raised {in_words(error)}.")]


def _rows(
    means: Sequence[Mean], factors: dict[tuple[int, int], float], failures: Sequence[Failure]
) -> list[Row]:
    """The page's lines, in the order of the settings."""
    rows = [_row(mean, factors[_size(mean.setting)]) for mean in means]
    rows += [
        Row(setting.name, setting.sizes, None, 0, 0, None, error=in_words(error))
        for setting, error in failures
    ]
    order = {setting.name: i for i, setting in enumerate(SETTINGS)}
    return sorted(rows, key=lambda row: order[row.problem])


def _row(mean: Mean, factor: float) -> Row:
    error = mean.mean - factor * mean.truth
    place = int(error.abs().argmax())
    index = (place // error.shape[1], place % error.shape[1])
    value = float(error[index])
    # every batch was enumerated: rounding is all that the interval must hold
    bias = Interval(value, value - mean.rounding, value + mean.rounding)
    rejected = int((error.abs() > mean.rounding).sum())
    scale = None if math.isnan(mean.scale) else Interval(mean.scale, mean.scale, mean.scale)
    direction = None if math.isnan(mean.direction) else mean.direction
    entry = Entry(mean.setting.name, index, float(mean.truth[index]), bias)
    return Row(
        mean.setting.name, mean.setting.sizes, entry, rejected, 0, scale, direction=direction
    )
