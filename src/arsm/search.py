r"""`maximize`: a black box over discrete variables, by ascending the expectation of f under independent choices.

    phi <- phi + a g / (s p),    g ~ dE[f]/dphi,    z_k ~ Cat(p_k),    p_k = softmax(phi_k)

g is an estimator's; divided by p it is the natural gradient, which is the same however the probabilities are
parametrised; s is the standard deviation of the round's values, so the step does not depend on f's units. As the
choices settle, draws repeat points that are known, which cost nothing; the round is then filled up with neighbours of
the best point, which differ from it in one variable. When they do not fill it any more, the logits are divided by
`FORGET`: a new search begins around the best.

Reference for the natural gradient of black boxes: Ollivier, Arnold, Auger and Hansen, Information-geometric
optimization algorithms, JMLR 2017.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.capabilities import require
from arsm.checks import check_count, check_seed, check_whole
from arsm.driver import estimate
from arsm.estimators.rloo import RLOO
from arsm.known import Known, Stop, in_batches, one_by_one
from arsm.rows import Map, in_this_process, ragged, whole_sizes
from arsm.types import Estimator

SAMPLES = 16
RATE, FULL_RATE_ROUNDS = 2.0, 64
"""Step size a, for searches of up to this many rounds; with more rounds it falls with their square root."""
LEAST_PROBABILITY = 0.02
"""Lower bound of p in the division of g: the estimate of a rare category is mostly zero, and else very large."""
FORGET = 2.0
SMALL_SPACE = 4
"""In a space of at most this many times the evaluations, any new point is tried before the logits are halved."""


@dataclass(frozen=True, eq=False)
class Maximum:
    """The result of `arsm.maximize`."""

    point: Tensor
    """int64 [K], the best point."""
    value: float
    """f at the best point."""
    history: Tensor
    """float64 [n]: the best value after each evaluation; -inf before the first that did not fail."""
    probabilities: Tensor
    """[K, C]: the choices' distribution at the end."""
    stopped: str
    """Why: "evaluations", "all points known", "patience", "callback" or "interrupted"."""
    failures: list[tuple[list[int], str]]
    """The points at which f failed, and how."""
    state: dict[str, Any]
    """Tensors and numbers, for `maximize(..., state=...)` and torch.save; load it with `weights_only=True`."""


def maximize(
    f: Callable[..., Any],
    sizes: Sequence[int],
    *,
    evaluations: int = 1000,
    samples: int | None = None,
    estimator: Estimator | None = None,
    batched: bool = False,
    map: Map | None = None,
    callback: Callable[[Maximum], Any] | None = None,
    patience: int | None = None,
    seed: int = 0,
    raise_errors: bool = False,
    progress: bool = True,
    state: dict[str, Any] | None = None,
) -> Maximum:
    """Look for the point at which f is largest.

        best = arsm.maximize(f, [2, 9, 4], evaluations=500, map=executor.map)
        best.point, best.value

    Args:
        f: `f(z) -> number` with z int64 [K], z[k] in 0..sizes[k]-1; it may return a NumPy number or a tensor with one
            element. With `batched`, `f(z) -> [N]` with z int64 [N, K].
        sizes: number of values of each variable.
        evaluations: how many points to evaluate at most. No point is evaluated twice.
        samples: points per round, evaluated in parallel by `map`; 16 if neither this nor an estimator is given.
        estimator: any that only evaluates f; leave-one-out with ridge regression if None. `samples` resizes it.
        batched: whether f takes all points of a round at once.
        map: calls f for every point of a round: `concurrent.futures` executors' `map`,
            `ray.util.multiprocessing.Pool().map`, or anything like them that keeps the order. The points evaluated do
            not depend on it.
        callback: called after each round with the result so far; the search ends if it returns True.
        patience: stop after this many evaluations without a better value.
        seed: of all randomness.
        raise_errors: raise the first error of f. Otherwise failed points are listed in `failures` and avoided; a value
            that is NaN or infinite is a failure.
        progress: show a line with the best value and the time left on a terminal.
        state: a result's `state`, to go on from it with the same sizes, `evaluations` of both together, and options.

    Returns:
        A `Maximum`. Ctrl-C ends the search early and returns the best so far.
    """
    logits = ragged(sizes).double()
    space = math.prod(whole_sizes(sizes))
    check_count("evaluations", evaluations)
    if patience is not None:
        check_count("patience", patience)
    check_seed(seed)
    if batched and map is not None:
        raise ValueError("map calls f for one point at a time; leave it out where f is batched.")
    if map is not None and not callable(map):
        raise TypeError(f"map must be a function such as executor.map, but is {type(map).__name__}.")
    estimator = _chosen(estimator, samples, logits)
    count = estimator.most_queries(logits)
    evaluate = in_batches(f) if batched else one_by_one(f, map or in_this_process)
    generator = torch.Generator().manual_seed(seed)
    legal = logits > -torch.inf

    def more(drawn: int) -> Tensor:
        new = table.neighbours(legal)
        if drawn == len(new) == 0 and space <= SMALL_SPACE * evaluations:
            new = table.unseen(legal)
        return new[torch.randperm(len(new), generator=generator)]

    table = Known(evaluate, evaluations, patience, raise_errors, count, more)
    if state is not None:
        logits = _restore(state, table, logits, generator)
    rate = RATE * min(1.0, math.sqrt(FULL_RATE_ROUNDS * count / evaluations))
    show = _Progress(table) if progress and sys.stderr.isatty() else None
    table.on_value = show.update if show else table.on_value
    start = generator.get_state()

    def result(stopped: str) -> Maximum:
        points = torch.tensor(list(table.index), dtype=torch.int64).view(-1, len(logits))
        values = torch.tensor(table.values, dtype=torch.float64)
        history = torch.tensor(table.best, dtype=torch.float64)
        saved = {
            "logits": logits,
            "generator": start,
            "points": points,
            "values": values,
            "failures": list(table.failures),
            "round_start": table.round_start,
        }
        best = int(values.nan_to_num(nan=-math.inf).argmax())
        return Maximum(
            points[best], float(values[best]), history, logits.softmax(-1), stopped, list(table.failures), saved
        )

    try:
        while True:
            table.check(space)
            out = estimate(estimator, logits, table, frozen=True, generator=generator, max_rows=None)
            if not table.full:
                logits = torch.where(legal, logits / FORGET, logits)
            elif out.grad is not None and float(spread := table.round_values.std(correction=0)) > 0:
                p = logits.softmax(-1).clamp_min(LEAST_PROBABILITY)
                logits = torch.where(legal, logits + rate * out.grad / (spread * p), logits)
            start, table.round_start = generator.get_state(), len(table.values)
            if callback is not None and callback(result("callback")):
                raise Stop("callback")
    except Stop as stop:
        return result(str(stop))
    except KeyboardInterrupt:
        if not any(math.isfinite(value) for value in table.values):
            raise
        return result("interrupted")
    finally:
        if show:
            show.close()


def _chosen(estimator: Estimator | None, samples: int | None, logits: Tensor) -> Estimator:
    if samples is not None:
        check_whole("samples", samples)
    if estimator is None:
        return RLOO(SAMPLES if samples is None else samples, ridge=1.0)
    instead = "use one such as arsm.RLOO(16, ridge=1.0)"
    require(estimator, "arsm.maximize", "values_only", "mean", "nothing_learned", subset=None, instead=instead)
    resized = estimator if samples is None else estimator.within(samples)
    if resized is None:
        raise ValueError(
            f"{type(estimator).__name__} cannot be resized to {samples} samples, it asks for "
            f"{estimator.most_queries(logits)}; leave samples out."
        )
    return resized


def _restore(state: dict[str, Any], table: Known, logits: Tensor, generator: torch.Generator) -> Tensor:
    """Fill the table and the generator; returns the logits."""
    if not isinstance(state, dict) or "round_start" not in state:
        raise ValueError(f"state must be the `state` of a result of arsm.maximize, but is {type(state).__name__}.")
    saved = state["logits"]
    if saved.shape != logits.shape or not bool(((saved > -torch.inf) == (logits > -torch.inf)).all()):
        raise ValueError(
            f"state is of a search over logits {list(saved.shape)}, but sizes give {list(logits.shape)} or other masks."
        )
    errors = {tuple(point): error for point, error in state["failures"]}
    raise_errors, table.raise_errors = table.raise_errors, False
    for point, value in zip(map(tuple, state["points"].tolist()), state["values"].tolist(), strict=True):
        table.add(point, value, errors.get(point))
    table.raise_errors, table.round_start = raise_errors, state["round_start"]
    generator.set_state(state["generator"])
    return saved.clone()


class _Progress:
    """One line on a terminal: how far, the best, the time left."""

    def __init__(self, table: Known) -> None:
        self.table, self.start, self.shown, self.done = table, time.monotonic(), 0.0, len(table.values)

    def update(self) -> None:
        now, done = time.monotonic(), len(self.table.values)
        if now - self.shown < 0.2:
            return
        self.shown = now
        left = (now - self.start) / max(1, done - self.done) * (self.table.evaluations - done)
        failed = f", {len(self.table.failures)} failed" if self.table.failures else ""
        line = f"{done:,} of {self.table.evaluations:,} evaluations, best {self.table.best[-1]:.6g}{failed}"
        sys.stderr.write(f"\r{line}, about {left:,.0f} s left\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\n")
