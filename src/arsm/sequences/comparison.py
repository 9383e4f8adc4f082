r"""`compare`: which strategy has the least variance per generated token, on your own
model, prompts and reward?

To halve the variance of an estimate takes twice the tokens. So strategies are compared
by

    variance x tokens,    variance = tr Cov[g] = E|g - E g|^2

over all parameters, with g the gradient of the mean value of the prompts. It is the
number of tokens that an estimate of variance 1 would take.

The variance is accumulated gradient by gradient, with the mean m_k of the first k,

    d_k = (k - 1)/k |g_k - m_{k-1}|^2,    k = 2..R,    E[d_k] = tr Cov[g],
    sum_k d_k = sum_i |g_i - m_R|^2

so that one gradient and one mean are held, and the spread of the d_k, which are
independent for Gaussian g, gives a standard error.

Reference: Welford, Note on a method for calculating corrected sums of squares and
products, Technometrics 1962.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arsm.checks import check_count
from arsm.driver import graph_nodes
from arsm.options import suggests
from arsm.progress import Progress
from arsm.sequences.batch import SequenceEstimate, Strategy
from arsm.sequences.checks import Reward, check_prompts
from arsm.sequences.credit import parameters_of
from arsm.sequences.driver import estimate
from arsm.sequences.ends import Ends, Stop
from arsm.sequences.engines import Engine
from arsm.sequences.model import Model
from arsm.sequences.strategies import Branch, Group

WIDTH = 88
"""Most columns of a printed comparison."""
APART = 2.5
"""Two costs differ if they are further apart than this many standard errors. More than
the usual 2: the error of few repeats is itself uncertain, and a fifth too small where
gradients have heavy tails."""
FIELDS = (
    "strategy",
    "unbiased",
    "cost",
    "cost_error",
    "variance",
    "variance_error",
    "tokens",
    "seconds",
    "memory",
    "signal",
)


@dataclass(frozen=True)
class Measured:
    """One strategy, measured.

    Attributes:
        variance: Trace of the covariance of one estimate's gradient, over all
            parameters.
        variance_error: Its standard error.
        tokens: Generated tokens per estimate, those of rollouts included.
        tokens_error: Its standard error.
        seconds: Median time of one estimate, backward included.
        memory: Most bytes allocated on the GPU during an estimate, model included; None
            on a CPU.
        signal: |E g|^2, the squared norm of the mean gradient; unbiased, so that noise
            can make it negative.
    """

    label: str
    strategy: Strategy
    variance: float
    variance_error: float
    tokens: float
    tokens_error: float
    seconds: float
    memory: int | None
    signal: float

    @property
    def unbiased(self) -> bool:
        """Whether the strategy claims to be; the gradient of one that does not has a
        scale of its own.
        """
        return self.strategy.unbiased

    @property
    def cost(self) -> float:
        """Variance x tokens; lower is better."""
        return self.variance * self.tokens

    @property
    def cost_error(self) -> float:
        """Standard error of the cost."""
        return math.hypot(self.variance_error * self.tokens, self.variance * self.tokens_error)


@dataclass(frozen=True)
class Comparison:
    """Strategies by variance x tokens, the best first: `print` it.

    Attributes:
        repeats: Independent estimates per strategy.
    """

    rows: tuple[Measured, ...]
    repeats: int

    @property
    def recommendation(self) -> str:
        """One sentence: the strategy to take."""
        # the variance of a biased gradient has another scale: it competes only among its like
        fair = [row for row in self.rows if row.unbiased] or list(self.rows)
        best, others = fair[0], fair[1:]
        if not any(row.cost for row in fair):
            return (
                "No strategy shows any variance: check that the rewards of different "
                "completions differ."
            )
        if not others:
            return (
                f"Only {best.label} can be recommended: there is no other to compare it with at "
                "the same scale."
            )
        close = [row.label for row in others if not _apart(best, row)]
        if close:
            return (
                f"Use {best.label}, but {_listed(close)} cannot be told apart from it: the "
                f"differences are within the errors of {self.repeats} repeats."
            )
        second = others[0]
        if not best.cost:
            return f"Use {best.label}: its estimates do not vary here."
        # the runner-up tells how much the choice matters
        factor = second.cost / best.cost
        return (
            f"Use {best.label}: {second.label}, the next best, needs {factor:.3g} times its "
            "tokens for one variance."
        )

    def __str__(self) -> str:
        cells = self._cells(plus_minus=" +- ")
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        # numbers are printed in full, names as far as there is room
        widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(widths[1:]))
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append("")
        for text in (self.recommendation, *self._notes()):
            lines += textwrap.wrap(text, WIDTH)
        return "\n".join(lines)

    def markdown(self) -> str:
        """A table for a page, with the recommendation below."""
        header, *rows = self._cells(plus_minus=" ± ")
        lines = [_piped(header), _piped(["---"] + ["---:"] * (len(header) - 1)), *map(_piped, rows)]
        return "\n".join([*lines, "", self.recommendation, *self._notes(), ""])

    def csv(self) -> str:
        """All numbers, unrounded, one line per strategy."""
        whole = io.StringIO()
        writer = csv.writer(whole, lineterminator="\n")
        writer.writerow(FIELDS)
        for row in self.rows:
            writer.writerow([row.label, *(getattr(row, name) for name in FIELDS[1:])])
        return whole.getvalue()

    def figure(self) -> Any:
        """A matplotlib figure of every strategy's variance x tokens, relative to the best one's."""
        from arsm.sequences.figure import plot_comparison

        return plot_comparison(self)

    def _cells(self, plus_minus: str) -> list[list[str]]:
        on_gpu = any(row.memory is not None for row in self.rows)
        cells = [
            [
                "strategy",
                "variance x tokens",
                "variance",
                "tokens",
                "seconds",
                *["GB"] * on_gpu,
                "signal",
            ]
        ]
        for row in self.rows:
            label = row.label if row.unbiased else f"{row.label} *"
            line = [
                label,
                f"{_rounded(row.cost)}{plus_minus}{_rounded(row.cost_error)}",
                _rounded(row.variance),
            ]
            line += [f"{row.tokens:,.0f}", _rounded(row.seconds)]
            if on_gpu:
                line.append("" if row.memory is None else _rounded(row.memory / 1e9))
            line.append(_rounded(row.signal) if row.signal > 0 else "~0")
            cells.append(line)
        return cells

    def _notes(self) -> list[str]:
        notes = []
        if not all(row.unbiased for row in self.rows):
            notes.append(
                "*: biased. Its gradient has a scale of its own, and so have its variance and its "
                "signal."
            )
        return notes


def _rounded(x: float) -> str:
    """Three digits; large and small numbers with an exponent."""
    if x and not 1e-3 <= abs(x) < 1e5:
        return f"{x:.2e}"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _apart(one: Measured, other: Measured) -> bool:
    return abs(one.cost - other.cost) > APART * math.hypot(one.cost_error, other.cost_error)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _aligned(cells: list[str], widths: list[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    name = cells[0] if len(cells[0]) <= widths[0] else cells[0][: widths[0] - 3] + "..."
    return [
        name.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]


def _piped(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


@suggests("arsm.sequences.compare")
@torch.enable_grad()
def compare(  # noqa: PLR0913  one call, all of its options by name
    strategies: Mapping[str, Strategy] | Sequence[Strategy],
    model: Model,
    prompts: Tensor,
    reward: Reward,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    eos: Ends = None,
    stop: Stop | None = None,
    repeats: int = 8,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reference: Model | None = None,
    kl: float = 0.0,
    rows: int = 1024,
    micro_batch: int = 32,
    sampling_dtype: torch.dtype | None = None,
    engine: Engine | None = None,
    generator: torch.Generator | None = None,
) -> Comparison:
    """Measure strategies on a model: variance, tokens, seconds and memory of their
    gradients at fixed prompts.

    Neither the parameters nor their gradients are changed.

    Args:
        strategies: a list, or a dictionary of names and strategies.
        model: as for `estimate`, like all that is not listed here.
        prompts: [N, P] int64. The gradient is that of the mean over them, so that more
            prompts have less variance.
        reward: `reward(prompts [R, P], tokens [R, max_tokens]) -> [R]`.
        repeats: independent estimates per strategy, at least 3. The error falls with
            their square root.

    Returns:
        A `Comparison`, which prints as a table with a recommendation.
    """
    check_count("repeats", repeats, 3)  # a spread of the variance needs two measurements of it
    check_prompts(prompts, mask)
    named = _named(strategies)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "eos": eos,
        "stop": stop,
        "temperature": temperature,
        "mask": mask,
        "reference": reference,
        "kl": kl,
        "rows": rows,
        "micro_batch": micro_batch,
        "sampling_dtype": sampling_dtype,
        "engine": engine,
        "generator": generator,
    }
    measured = []
    with Progress() as progress:
        for position, (label, strategy) in enumerate(named.items()):
            before = position * repeats

            def watched(repeat: int, label: str = label, before: int = before) -> None:
                words = f"{label}, estimate {repeat + 1} of {repeats}"
                progress(words, (before + repeat) / (len(named) * repeats))

            once = partial(estimate, strategy, model, prompts, reward, **options)
            found = measure(label, strategy, model, once, repeats, prompts.device, watched)
            measured.append(found)
    return Comparison(tuple(sorted(measured, key=lambda row: row.cost)), repeats)


def _named(strategies: Mapping[str, Strategy] | Sequence[Strategy]) -> dict[str, Strategy]:
    if isinstance(strategies, Mapping):
        named = dict(strategies)
    elif isinstance(strategies, Sequence) and not isinstance(strategies, str):
        named = {}
        for strategy in strategies:
            label = label_of(strategy)
            # two of the same name are told apart by a number
            same = sum(name == label or name.startswith(f"{label} #") for name in named)
            named[f"{label} #{same + 1}" if same else label] = strategy
    else:
        raise TypeError(
            "strategies must be a list or a dictionary of strategies, but is a "
            f"{type(strategies).__name__}; write [Branch(arsm.RLOO(8)), Group(8)]."
        )
    if not named:
        raise ValueError(
            "There are no strategies to compare; write [Branch(arsm.RLOO(8)), Group(8)]."
        )
    return named


def label_of(strategy: Strategy) -> str:
    """A short name, such as "Branch(RLOO(32), chance)"."""
    if not isinstance(strategy, Branch | Group):
        return type(strategy).__name__
    estimator = strategy.estimator
    words = [f"{type(estimator).__name__}({estimator.paths or ''})"]
    if isinstance(strategy, Branch):
        words += [
            name
            for name in ("budget", "keep", "critic", "chance", "group", "coin")
            if getattr(strategy, name) is not None
        ]
    return f"{type(strategy).__name__}({', '.join(words)})"


def measure(
    label: str,
    strategy: Strategy,
    model: Model,
    once: Callable[[], SequenceEstimate],
    repeats: int,
    device: torch.device,
    watched: Callable[[int], None] = lambda repeat: None,
) -> Measured:
    """All repeats of one strategy; `once` makes an estimate, and `watched` hears which
    one is next.
    """
    moments = _Moments()
    tokens = []
    seconds = []
    memory = None
    for repeat in range(repeats):
        watched(repeat)
        one = _estimated(model, once, device)
        if repeat == 0:
            memory = one.memory  # later ones hold a mean gradient besides
        tokens.append(one.tokens)
        seconds.append(one.seconds)
        moments.add(one.gradients)
    variance = statistics.mean(moments.growth)
    return Measured(
        label,
        strategy,
        variance=variance,
        variance_error=_standard_error(moments.growth),
        tokens=statistics.mean(tokens),
        tokens_error=_standard_error(tokens),
        seconds=statistics.median(seconds),
        memory=memory,
        signal=moments.squared_mean() - variance / repeats,
    )


class _One(NamedTuple):
    """One estimate and its gradient."""

    gradients: list[Tensor]
    tokens: float
    """Generated tokens."""
    seconds: float
    memory: int | None
    """Most bytes on a GPU."""


def _estimated(model: Model, once: Callable[[], SequenceEstimate], device: torch.device) -> _One:
    # the peak of this estimate alone
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    out = once()
    parameters = _parameters(model, out.value)
    # not backward(), which would leave gradients in the parameters
    found = torch.autograd.grad(out.value.mean(), parameters, allow_unused=True)
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    memory = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return _One(gradients, float(out.info["generated"]), seconds, memory)


def _parameters(model: Model, value: Tensor) -> list[Tensor]:
    """The tensors whose gradients are measured."""
    known = parameters_of(model)
    if known is None:  # the model is no module: what its logits depend on
        known = [
            leaf
            for node in graph_nodes(value)
            if (leaf := getattr(node, "variable", None)) is not None
        ]
    if not known:
        raise ValueError(
            "The model has no parameter with requires_grad, so that there are no gradients to "
            "compare."
        )
    return known


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


class _Moments:
    """Mean gradient and its variance's growth d_k, gradient by gradient."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: list[Tensor] = []
        self.growth: list[float] = []
        """d_2 .. d_k; each has the trace variance as its mean."""

    def add(self, gradients: Sequence[Tensor]) -> None:
        self.count += 1
        if self.count == 1:
            # a mean of small steps: bfloat16 would lose them
            self.mean = [
                g.to(torch.promote_types(g.dtype, torch.float32), copy=True) for g in gradients
            ]
            return
        squares = []
        for mean, gradient in zip(self.mean, gradients, strict=True):
            step = gradient.to(mean.dtype) - mean
            squares.append(_squared_norm(step))
            mean.add_(step, alpha=1 / self.count)
        self.growth.append((self.count - 1) / self.count * math.fsum(squares))

    def squared_mean(self) -> float:
        """|m|^2."""
        return math.fsum(_squared_norm(mean) for mean in self.mean)


def _squared_norm(x: Tensor) -> float:
    """|x|^2, added up in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
