"""Comparing estimators: bias, variance and cost of each at one budget of evaluations."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.capabilities import require
from arsm.categorical import one_hot
from arsm.checks import check_context, check_count, check_logits
from arsm.diagnostics import Moments, gradient_moments
from arsm.draws import sample
from arsm.driver import estimate, graph_nodes
from arsm.estimators import RLOO, Average, Exact, estimator
from arsm.options import suggests
from arsm.progress import Progress
from arsm.ranking import Compared, Ranking
from arsm.scores import probabilities
from arsm.types import Estimate, Estimator

ENUMERABLE = 1 << 14
"""Values of z per row up to which the reference gradient is exact."""
LONG_RUN = 8
"""Factor on the draws of a sampled reference: its noise must be small beside an estimator's."""
TIMED = 7
"""Estimates that are timed, of which the median counts."""
PARTS = 10
"""Independent parts of the draws, whose spread says how exact the variance is."""
DEFAULT = (
    "reinforce",
    "ars",
    "arsm",
    "arsm:pooled=True",
    "rloo",
    "rloo:ridge=1.0",
    "disarm",
    "carms",
    "relax",
)


def fit_budget(chosen: Estimator, budget: int, asked: int) -> Estimator:
    """The estimator resized to a budget of evaluations, or averaged over as many draws
    as fit, at least one.

    `asked` is the number of evaluations it asks for without resizing.
    """
    resized = chosen.within(budget)
    if resized is not None:
        return resized
    return Average(chosen, budget // asked) if budget >= 2 * asked else chosen


@suggests("arsm.compare")
@torch.enable_grad()
def compare(
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    budget: int | None = None,
    estimators: Sequence[str | Estimator] = DEFAULT,
    samples: int = 1000,
    training: int = 300,
    reference: Moments | None = None,
    generator: torch.Generator | None = None,
    max_rows: int | None = 1024,
    progress: Callable[[str], None] | None = None,
) -> Ranking:
    """Measure estimators at given logits and f, the best first.

    Args:
        logits: [*B, K, C] or [C], as for `arsm.estimate`; f and context likewise.
        budget: evaluations per estimate. Estimators that can be resized (`within`) are
            resized; the others are averaged over as many draws as fit, and one that
            needs more is left as it is. None leaves all as they are.
        estimators: words for `arsm.estimator`, such as "rloo:samples=8" or
            "my_module:MyEstimator", or estimators; learned parts are copied
            and the copy is trained.
        samples: draws per estimator, to measure its mean and variance.
        training: steps of Adam on `estimator_loss` for learned parts, and of `adapt` for
            running statistics, at these logits, before measuring.
        reference: the gradient to compare means with, as `reference_gradient` makes it
            if None.
        progress: called with each label before it is measured; by default a line on
            the terminal, after two seconds.

    Returns:
        A `Ranking`: prints as a table sorted by `cost`, "product" there, and has
        `.markdown() .latex() .csv() .figure()`. It is a sequence of `Compared` too.
    """
    # all of them are checked before the first is measured
    named = _named(estimators)
    if budget is not None:
        check_count("budget", budget)
    check_logits(logits, read=True)
    check_context(context, logits.shape[:-2], logits.device)
    problem = _Case(logits.detach(), f, context, generator, max_rows)
    reference = reference or problem.reference(samples)
    rows = []
    with Progress(enabled=progress is None) as line:
        for position, (label, chosen) in enumerate(named):
            if progress is not None:
                progress(label)

            def tell(share: float, label: str = label, position: int = position) -> None:
                line(label, (position + share) / len(named))

            tell(0.0)
            # running statistics are those of single draws: adapt before averaging over several
            problem.adapt(chosen, training)
            if budget is not None:
                asked = int(problem.estimate(chosen).info["asked"])
                chosen = fit_budget(chosen, budget, asked)
            # what is learned depends on the number of samples: train after resizing
            problem.train(chosen, training)
            rows.append(problem.measure(label, chosen, samples, reference, tell))
    return Ranking(tuple(sorted(rows, key=lambda row: row.cost)))


def _named(estimators: Sequence[str | Estimator]) -> list[tuple[str, Estimator]]:
    """Estimators that can be compared, each with its label."""
    if isinstance(estimators, str):
        raise TypeError(
            "estimators must be a list of words or estimators, but is a word; say "
            f'["{estimators}"].'
        )
    if not estimators:
        raise ValueError('estimators must be a list such as ["rloo", "arsm"], but is empty.')
    named = []
    for each in estimators:
        chosen = estimator(each) if isinstance(each, str) else _apart(each)
        require(chosen, "compare", "mean", instead="leave it out here")
        named.append((str(each), chosen))
    return named


def reference_gradient(
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    samples: int = 1000,
    generator: torch.Generator | None = None,
    max_rows: int | None = 1024,
) -> Moments:
    """dE[f]/dphi and its variance: exact where C^K <= 16,384, else from 8 x `samples`
    draws of RLOO.
    """
    return _Case(logits.detach(), f, context, generator, max_rows).reference(samples)


def best_additive(
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    budget: int,
    samples: int = 1 << 15,
    generator: torch.Generator | None = None,
    max_rows: int = 1024,
) -> Tensor:
    """The h [*B, K, C] for which leave-one-out REINFORCE of f - h.x, with `budget`
    samples, has the least variance.

        n Var[g] = E[e^2 |x|^2] + E[e^2] E|x|^2 / (n-1) - (n-2)/(n-1) |E[e x]|^2,
        e = f - E[f] - h.x

    x = onehot(z) - p. A quadratic function of h, fitted to f at `samples` draws per
    row. With the exact gradient of E[h.x] added back, no additive control variate does
    better: a floor for all that are learned or guessed.
    """
    logits = logits.detach().expand(samples, *logits.shape)
    z = sample(logits, generator)
    rows = [x.detach().expand(samples, *x.shape).flatten(0, logits.ndim - 3) for x in context]
    y = _values_at(f, z.flatten(0, -2), rows, max_rows).view(z.shape[:-1])
    y = (y - y.mean(0)).movedim(0, -1).unsqueeze(-1)  # [*B, N, 1]

    p = probabilities(logits[0].double())
    x = (one_hot(z, p.shape[-1], torch.float64) - p).movedim(0, -3).flatten(-2)  # [*B, N, K C]
    # the weight of e^2 in n Var[g]
    square = x.square().sum(-1)
    weight = square + square.mean(-1, keepdim=True) / (budget - 1)
    x = x - x.mean(-2, keepdim=True)  # as y: then an additive f is fitted exactly

    # n Var[g] is h'A h - 2 h'b + a constant, with curvature A and slope b
    share = (budget - 2) / (budget - 1)
    covariance = x.mT @ x / samples
    gradient = x.mT @ y / samples
    weighted = x.mT * weight.unsqueeze(-2) / samples
    curvature = weighted @ x - share * covariance @ covariance
    slope = weighted @ y - share * covariance @ gradient
    # the x of a variable sum to 0, so that the curvature is singular
    return (torch.linalg.pinv(curvature, rtol=1e-9, hermitian=True) @ slope).view(p.shape)


@torch.no_grad()
def _values_at(f: Callable[..., Tensor], z: Tensor, context: list[Tensor], max_rows: int) -> Tensor:
    """f at points [N, K], in calls of at most max_rows rows: [N] float64."""
    found = []
    for start in range(0, len(z), max_rows):
        some = slice(start, start + max_rows)
        found.append(f(z[some], *(x[some] for x in context)))
    return torch.cat(found).double()


def _apart(chosen: Estimator) -> Estimator:
    """A copy with its own learned parts."""
    return copy.deepcopy(chosen) if len(chosen.learned) else chosen


@dataclass(frozen=True)
class _Case:
    """The problem on which estimators are compared."""

    logits: Tensor
    f: Callable[..., Tensor]
    context: tuple[Tensor, ...]
    generator: torch.Generator | None
    max_rows: int | None

    def estimate(self, chosen: Estimator, *, frozen: bool = False) -> Estimate:
        logits = self.logits.clone().requires_grad_()
        rows = (x.detach() for x in self.context)
        return estimate(
            chosen,
            logits,
            self.f,
            *rows,
            generator=self.generator,
            max_rows=self.max_rows,
            frozen=frozen,
        )

    def moments(self, chosen: Estimator, samples: int) -> tuple[Moments, float]:
        """An estimate's moments, and its mean evaluations per estimate and row."""
        evaluations = 0

        def counted(z: Tensor, *context: Tensor) -> Tensor:
            nonlocal evaluations
            evaluations += z.shape[0]
            return self.f(z, *context)

        found = gradient_moments(
            chosen,
            self.logits,
            counted,
            *self.context,
            samples=samples,
            generator=self.generator,
            max_rows=self.max_rows,
        )
        return found, evaluations / (samples * self.rows)

    def moments_in_parts(
        self, chosen: Estimator, samples: int, tell: Callable[[float], None]
    ) -> tuple[Moments, float, float]:
        """As `moments`, with the standard error of the variance's trace, from the
        spread of independent parts.
        """
        parts = max(1, min(PARTS, samples // 2))  # a variance needs two draws
        sizes = [samples // parts + (i < samples % parts) for i in range(parts)]
        found = []
        evaluations = 0.0
        for part, size in enumerate(sizes):
            tell(part / parts)
            moments, each = self.moments(chosen, size)
            found.append(moments)
            evaluations += each * size
        evaluations /= samples

        # the moments of all draws, as if they had been made at once
        means = torch.stack([moments.mean for moments in found])
        count = torch.tensor(sizes, dtype=means.dtype, device=means.device)
        count = count.view(-1, *(1,) * (means.ndim - 1))
        mean = (count * means).sum(0) / samples
        within = sum((n - 1) * m.variance for m, n in zip(found, sizes, strict=True))
        between = (count * (means - mean).square()).sum(0)
        variance = (within + between) / (samples - 1)

        # the spread of the parts says how exact the variance of all is
        traces = [float(moments.variance.sum() / self.rows) for moments in found]
        error = statistics.stdev(traces) / math.sqrt(parts) if parts > 1 else math.nan
        return Moments(mean, variance), evaluations, error

    @property
    def rows(self) -> int:
        return max(1, self.logits.shape[:-2].numel())

    def reference(self, samples: int) -> Moments:
        variables, categories = (1, *self.logits.shape)[-2:]
        if categories**variables <= ENUMERABLE:
            exact = self.estimate(Exact(), frozen=True).grad
            assert exact is not None
            return Moments(exact.double(), torch.zeros_like(exact, dtype=torch.float64))
        (mean, variance), _ = self.moments(RLOO(64), LONG_RUN * samples)
        return Moments(mean, variance / (LONG_RUN * samples))

    def train(self, learner: Estimator, steps: int) -> None:
        """Train the estimator's learned parts, if any, on the problem."""
        parameters = [
            parameter for parameter in learner.learned.parameters() if parameter.requires_grad
        ]
        if not parameters:
            return
        optimiser = torch.optim.Adam(parameters, 3e-3)
        for _ in range(steps):
            loss = self.estimate(learner).estimator_loss
            assert loss is not None
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def adapt(self, learner: Estimator, steps: int) -> None:
        """Adapt the estimator's running statistics, if any, to the problem."""
        if learner.adapts:
            for _ in range(steps):
                learner.adapt(self.estimate(learner))

    def time_one(self, chosen: Estimator) -> float:
        """Seconds of one estimate and its backward."""
        start = time.perf_counter()
        out = self.estimate(chosen)
        # not backward(), which would leave gradients in f's parameters
        variables = (getattr(node, "variable", None) for node in graph_nodes(out.value))
        leaves = [variable for variable in variables if variable is not None]
        torch.autograd.grad(out.value.sum(), leaves, allow_unused=True)
        if self.logits.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def measure(
        self,
        label: str,
        chosen: Estimator,
        samples: int,
        reference: Moments,
        tell: Callable[[float], None],
    ) -> Compared:
        seconds = [self.time_one(chosen) for _ in range(TIMED)]
        (mean, variance), evaluations, variance_error = self.moments_in_parts(chosen, samples, tell)
        error = mean - reference.mean
        noise = variance / samples + reference.variance
        # noise alone adds its variance to the squared error
        squared_bias = ((error.square() - noise).sum() / self.rows).clamp_min(0)
        return Compared(
            label,
            chosen,
            evaluations=evaluations,
            milliseconds=1e3 * statistics.median(seconds),
            variance=float(variance.sum() / self.rows),
            bias=float(squared_bias.sqrt()),
            bias_error=float((noise.sum() / self.rows).sqrt()),
            variance_error=variance_error,
            # of a median of normal numbers
            milliseconds_error=1e3 * 1.25 * statistics.stdev(seconds) / math.sqrt(TIMED),
        )
