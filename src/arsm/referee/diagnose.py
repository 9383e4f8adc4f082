"""The kind of error that explains the measured means: the simplest hypothesis that fits
all problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.referee.problems import Truth


class Finding(NamedTuple):
    """One thing that an audit has to say."""

    kind: str
    """A word to test for, such as "scale", "sign" or "temperature"."""
    sentence: str


class Interval(NamedTuple):
    """An estimate and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True, eq=False)
class Means:
    """Means measured on one problem, with what they must be."""

    name: str
    role: str
    truth: Truth
    batch: int
    mean: Tensor
    """[R, K, C]."""
    half_width: Tensor
    """[R, K, C], infinite where nothing can be decided."""
    standard_error: Tensor
    """[R, K, C]."""
    spread: float
    """The largest single draw, as a multiple of the spread of f."""
    rounding: float = 0.0
    """An error that floating point alone explains."""
    small: bool = False
    relaxed: bool = False

    @property
    def gradient(self) -> Tensor:
        """[R, K, C]: what the mean should be."""
        return self.truth.gradient

    @property
    def rejected(self) -> bool:
        """Whether the mean cannot be the gradient, at the audit's rate."""
        return not bool(((self.mean - self.gradient).abs() <= self.half_width).all())

    @property
    def allowed(self) -> Tensor:
        """[R, K, C]: what a true hypothesis may be off by; shorter than an interval,
        since no alarm hangs on it.
        """
        # an entry that cannot be decided agrees with everything
        near = 5 * self.standard_error + self.rounding
        return torch.where(
            self.half_width.isfinite(), torch.minimum(near, self.half_width), torch.inf
        )

    def agrees(self, prediction: Tensor, allowance: Tensor | float = 0.0) -> bool:
        """Whether the mean may be the prediction [R, K, C]."""
        return bool(((self.mean - prediction).abs() <= self.allowed + allowance).all())


def diagnose(means: Sequence[Means]) -> list[Finding]:
    """Explain a rejection; at least one finding."""
    # the order matters: what comes first has fewer free numbers, and would be fitted by later ones
    for hypothesis in (
        _nothing,
        _exploded,
        _scale,
        _rows,
        _shift,
        _deviation,
        _temperature,
        _lengths,
        _variables,
        _own_sample,
    ):
        if found := hypothesis(means):
            return [found]
    # observations rather than explanations: several of them may be said
    findings = [
        finding for hypothesis in (_relaxation, _constant) if (finding := hypothesis(means))
    ]
    return findings or [
        Finding("unexplained", "The error is none of the known ones."),
        *_where(means),
    ]


def _nothing(means: Sequence[Means]) -> Finding | None:
    if any(bool((m.mean.abs() > m.rounding).any()) for m in means):
        return None
    return Finding(
        "no gradient",
        "Every gradient is exactly zero: the loss does not depend on the logits. Is the "
        "log-probability detached or computed under no_grad, or is every advantage 0, such as "
        "that of one sample less its own mean?",
    )


def _exploded(means: Sequence[Means]) -> Finding | None:
    # before any fit: a mean of draws that explode fits nothing, or everything
    worst = max(means, key=lambda m: m.spread)
    if worst.spread < 1e3:
        return None
    return Finding(
        "standard deviation",
        f"Single draws reach {worst.spread:.1g} times the spread of f ({worst.name}): something is "
        "divided by a number near 0, such as the standard deviation of a group whose values are "
        "all equal. Leave the division out.",
    )


def fitted_scale(means: Sequence[Means]) -> Interval:
    """The factor s in mean = s gradient, by weighted least squares over all entries
    that can be decided.
    """
    top = bottom = 0.0
    for m in means:
        # by precision; entries that cannot be decided have none
        weight = torch.where(
            m.half_width.isfinite(), 1 / m.standard_error.clamp_min(1e-9).square(), 0.0
        )
        top += float((weight * m.mean * m.gradient).sum())
        bottom += float((weight * m.gradient.square()).sum())
    if not bottom:
        return Interval(math.nan, math.nan, math.nan)
    # five standard errors, since no alarm hangs on it, and since entries of one row are correlated:
    # categories of a variable sum to 0, and variables share f
    error = 5 / math.sqrt(bottom)
    return Interval(top / bottom, top / bottom - error, top / bottom + error)


def recognise(scale: Interval) -> str:
    """A factor in words, where exactly one simple one lies in its interval."""
    # 1/2 is (n - 1)/n with n = 2, and 2 is a sum over two samples: each number stands here once
    shares = {(n - 1) / n: f"(n - 1)/n with n = {n}" for n in range(2, 33)}
    counts = {
        float(n): f"{n}: a sum over {n} samples where their mean is due" for n in range(2, 129)
    }
    parts = {1 / n: f"1/{n}" for n in range(3, 129)}
    excess = {n / (n - 1): f"n/(n - 1) with n = {n}" for n in range(3, 33)}
    inside = [
        words
        for value, words in (shares | counts | parts | excess).items()
        if scale.low <= value <= scale.high
    ]
    # a wide interval holds several, and a guess among them would mislead
    return f": {inside[0]}" if len(inside) == 1 else ""


def _scale(means: Sequence[Means]) -> Finding | None:
    s = fitted_scale(means)
    # one factor for all problems, which must fit every entry of every one of them
    if not all(m.agrees(s.value * m.gradient) for m in means):
        return None
    # `_nothing` saw that single draws are not 0
    if s.low <= 0 <= s.high:
        return Finding(
            "no gradient",
            "In the mean the gradient is 0, although single draws are not: how the samples depend "
            "on the logits is left out. Is the score term missing?",
        )
    if s.low <= -1 <= s.high:
        return Finding(
            "sign",
            "The sign is wrong: the gradient points the opposite way; minimise instead of "
            "maximise?",
        )
    if s.value < 0:
        # the sign is told in words, the rest as any other factor
        positive = Interval(-s.value, -s.high, -s.low)
        return Finding(
            "sign",
            f"The sign is wrong, and the length is {positive} of what it should "
            f"be{recognise(positive)}.",
        )
    advice = ""
    if (words := recognise(s)).startswith(": (n - 1)/n"):
        advice = (
            " That is what a mean over n samples does as a baseline when a sample's own value "
            "is in it."
        )
    return Finding("scale", f"Right direction, {s.value:.4g} of its length{words}.{advice}")


def _rows(means: Sequence[Means]) -> Finding | None:
    if all(m.agrees(m.gradient / m.batch) for m in means):
        return Finding(
            "mean over rows",
            "The gradient is divided by the number of rows B: the loss is a mean over rows where "
            "their sum is due.",
        )
    if all(m.agrees((m.batch - 1) / m.batch * m.gradient) for m in means):
        return Finding(
            "batch baseline",
            "The gradient has (B - 1)/B of its length at a batch of B rows: a mean over the batch "
            "is the baseline, and a row's own value is in it.",
        )
    return None


def _family(means: Sequence[Means]) -> dict[str, Means]:
    return {m.role: m for m in means if m.role}


def _shift(means: Sequence[Means]) -> Finding | None:
    family = _family(means)
    if "0" not in family or not family["0"].rejected:
        return None
    # with f = 0 the gradient is 0: what is found there comes from something else than f
    zero = family["0"]
    if not all(m.agrees(m.gradient + zero.mean, zero.allowed) for m in family.values()):
        return None
    # an example of the shift: the row that shows it best
    row = int(zero.mean.abs().flatten(1).amax(1).argmax())
    shift = ", ".join(f"{x:.3g}" for x in zero.mean[row].flatten().tolist())
    return Finding(
        "shift",
        f"The gradient is shifted by a term that does not depend on f ({zero.name}, row {row}: "
        f"{shift}): an extra d ln q term, or one of an unnormalised ln q. Look for a ln q that "
        "stands in the loss by itself.",
    )


def _deviation(means: Sequence[Means]) -> Finding | None:
    family = _family(means)
    if not {"f", "f/20", "20f"} <= family.keys():
        return None
    # all members have the same logits, and so the same decided entries
    decided = family["f"].half_width.isfinite()
    small, middle, large = (
        float(family[role].mean[decided].norm()) for role in ("f/20", "f", "20f")
    )
    noise = float(family["f"].allowed[decided].norm())
    # 20 times f should give 20 times the gradient; a fifth of that is no growth
    if middle <= noise or not (large < 4 * middle and middle < 4 * small):
        return None
    return Finding(
        "standard deviation",
        f"The gradient does not grow with f (lengths {small:.3g}, {middle:.3g} and {large:.3g} for "
        "f/20, f and 20 f): f is divided by its own standard deviation, which makes another "
        "objective's gradient. Leave the division out.",
    )


def _temperature(means: Sequence[Means]) -> Finding | None:
    words = (
        "the log-probability is taken at temperature {:.3g}, but samples are drawn at 1",
        "samples are drawn at temperature {:.3g}, but the log-probability is taken at 1",
    )
    # Of p (0) and p tempered (1): which one samples are drawn from, and which one their scores are
    # centred with. With a leave-one-out baseline that is the sampler's, whatever the score's is.
    for drawn, centre in ((1, 0), (1, 1), (0, 1)):
        predicted = partial(_at_two_temperatures, drawn=drawn, centre=centre)
        # in logarithms: half and double the temperature are equally far from 1
        misfit = partial(_misfit, means, predicted)
        log_temperature = _minimise(misfit, math.log(0.1), math.log(10))
        temperature = math.exp(log_temperature)
        # at the temperature 1 there is nothing to tell, and another hypothesis may fit
        if abs(log_temperature) > 0.01 and all(m.agrees(predicted(m, temperature)) for m in means):
            return Finding(
                "temperature",
                f"Temperatures differ: {words[drawn].format(temperature)}. Use one temperature for "
                "both.",
            )
    return None


def _at_two_temperatures(m: Means, temperature: float, drawn: int, centre: int) -> Tensor:
    """E[f(z) (onehot(z) - centre)], the score of the one and the samples of the other."""
    p = (m.truth.p, (m.truth.p.log() / temperature).softmax(-1))
    found = m.truth.weighted(p[drawn])
    return (found - found.sum(-1, keepdim=True) * p[centre]) / (1.0 if drawn else temperature)


def _misfit(
    means: Sequence[Means], predicted: Callable[[Means, float], Tensor], log_temperature: float
) -> float:
    """The squared distance of all decided means from a prediction, in standard errors."""
    total = 0.0
    for m in means:
        error = m.mean - predicted(m, math.exp(log_temperature))
        z = error / m.standard_error.clamp_min(1e-9)
        total += float(z[m.half_width.isfinite()].square().sum())
    return total


def _minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """The best point of a grid, refined three times."""
    best = low
    for _ in range(4):
        grid = torch.linspace(low, high, 17).tolist()
        best = min(grid, key=function)
        step = grid[1] - grid[0]
        low, high = best - step, best + step
    return best


def _lengths(means: Sequence[Means]) -> Finding | None:
    scales = [fitted_scale([m]).value for m in means]
    # a problem whose gradient is 0 has no length, and any factor fits it
    scales = [0.0 if math.isnan(s) else s for s in scales]
    if not all(m.agrees(s * m.gradient) for m, s in zip(means, scales, strict=True)):
        return None
    wrong = [
        # + 0 makes 0 of -0
        f"{round(s, 4) + 0:.3g} ('{m.name}')"
        for m, s in zip(means, scales, strict=True)
        if m.rejected
    ]
    others = f" and others in {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return Finding(
        "scale",
        "Right direction, but a length that depends on the problem: "
        f"{', '.join(wrong[:4])}{others}. Does the loss leave out some rows or variables, or "
        "divide by their number?",
    )


def _variables(means: Sequence[Means]) -> Finding | None:
    """One factor for each variable, the same in all problems."""
    count = max(m.mean.shape[1] for m in means)
    factors = []
    for k in range(count):
        # problems restricted to their variable k
        single = [
            replace(
                m,
                truth=replace(m.truth, gradient=m.gradient[:, k : k + 1]),
                mean=m.mean[:, k : k + 1],
                half_width=m.half_width[:, k : k + 1],
                standard_error=m.standard_error[:, k : k + 1],
            )
            for m in means
            if m.mean.shape[1] > k
        ]
        scale = fitted_scale(single)
        factors.append(scale)
        if math.isnan(scale.value) or not all(m.agrees(scale.value * m.gradient) for m in single):
            return None
    wrong = [
        f"{s.value:.3g} (variable {k})" for k, s in enumerate(factors) if not s.low <= 1 <= s.high
    ]
    # wrong in all variables is no statement about variables
    if not wrong or len(wrong) == count:
        return None
    return Finding(
        "variables",
        f"Right direction, but some variables have another length: {', '.join(wrong)}. Is a part "
        "of their log-probability left out, by a mask or by an index?",
    )


def _own_sample(means: Sequence[Means]) -> Finding | None:
    family = _family(means)
    if not {"f", "20f", "f+100"} <= family.keys() or any(m.relaxed for m in means):
        return None
    base = family["f"]
    # where the gradient is right, it is also unchanged by a constant
    if not base.rejected:
        return None
    unchanged = family["f+100"].agrees(base.mean, base.allowed)
    proportional = family["20f"].agrees(20 * base.mean, 20 * base.allowed)
    if not unchanged or not proportional:
        return None
    # categories 0 and 2 have equal f: what a sample is weighted by may depend on its own value
    # alone
    weight = base.mean / base.truth.p
    allowed = base.allowed / base.truth.p
    if weight.shape[-1] > 2 and bool(
        ((weight[..., 0] - weight[..., 2]).abs() > allowed[..., 0] + allowed[..., 2]).any()
    ):
        return None
    return Finding(
        "own sample",
        "The baseline saw its own sample: the gradient is unchanged by a constant in f, grows "
        "with f and treats equal values alike, but it is not linear in f. Leave the sample itself "
        "out of its baseline (a maximum, a rank, a fit).",
    )


def _relaxation(means: Sequence[Means]) -> Finding | None:
    # known from how f was called, not from the numbers
    if not any(m.relaxed for m in means):
        return None
    return Finding(
        "relaxation",
        "f was differentiated at relaxed points: this is the gradient of another function, biased "
        "by design. Use an estimator such as leave-one-out if it must be unbiased.",
    )


def _constant(means: Sequence[Means]) -> Finding | None:
    family = _family(means)
    if not {"f", "f+100"} <= family.keys() or family["f+100"].agrees(
        family["f"].mean, family["f"].allowed
    ):
        return None
    change = float((family["f+100"].mean - family["f"].mean).abs().max()) / 100
    return Finding(
        "constant",
        f"The gradient changes by up to {change:.3g} per unit when a constant is added to f, which "
        "must not matter in the mean: the score that f is multiplied by does not have the mean 0 "
        "under the samples drawn. Are samples and log-probability of the same distribution?",
    )


def _where(means: Sequence[Means]) -> Iterator[Finding]:
    wrong = [m for m in means if m.rejected]
    names = ", ".join(m.name for m in wrong)
    if wrong and len(wrong) < len(means):
        # what shows in small batches alone comes from a mean over the batch
        kind = "small batch" if all(m.small for m in wrong) else "where"
        yield Finding(kind, f"Only these problems show it: {names}.")
