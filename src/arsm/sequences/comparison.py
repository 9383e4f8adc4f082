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

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arsm.checks import check_count
from arsm.driver import graph_nodes
from arsm.options import suggests
from arsm.progress import Progress
from arsm.sequences.batch import SequenceEstimate, Strategy
from arsm.sequences.checks import check_prompts
from arsm.sequences.credit import parameters_of
from arsm.sequences.driver import estimate
from arsm.sequences.ends import Ends, Stop
from arsm.sequences.engines import Engine
from arsm.sequences.measured import Comparison, Measured
from arsm.sequences.model import Model
from arsm.sequences.rewards import Reward
from arsm.sequences.strategies import Branch, Group


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
    spread = _Spread()
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
        spread.add(one.gradients)
    variance = statistics.mean(spread.growth)
    return Measured(
        label,
        strategy,
        variance=variance,
        variance_error=_standard_error(spread.growth),
        tokens=statistics.mean(tokens),
        tokens_error=_standard_error(tokens),
        seconds=statistics.median(seconds),
        memory=memory,
        signal=spread.squared_mean() - variance / repeats,
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


class _Spread:
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
