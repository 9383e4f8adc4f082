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
from arsm.estimators.rloo import RLOO
from arsm.known import Evaluate, Known, Point, in_batches, one_by_one
from arsm.question import pose
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
    evaluate = in_batches(f) if batched else one_by_one(f, map or in_this_process)
    count = estimator.most_queries(logits)
    rate = RATE * min(1.0, math.sqrt(FULL_RATE_ROUNDS * count / evaluations))
    legal = logits > -torch.inf
    small = space <= SMALL_SPACE * evaluations

    table = Known()
    generator = torch.Generator().manual_seed(seed)
    if state is not None:
        logits = _restore(state, table, logits, generator)
    # a state is of the start of a round: one that was interrupted is drawn again, and finds its points in the table
    round_state = generator.get_state()
    show = _Progress(table, evaluations) if progress and sys.stderr.isatty() else None
    try:
        while (stopped := _reason_to_stop(table, space, evaluations, patience)) is None:
            question = pose(estimator, logits, generator=generator)
            asked = question.asked("packed")
            drawn = _points(asked.z[: asked.total])
            new = _new_points(table, drawn, count, legal, small, generator)
            missing = [point for point in new if point not in table.index]
            _evaluate_at(missing[: evaluations - len(table.values)], evaluate, table, raise_errors, show)
            if any(point not in table.index for point in drawn):
                stopped = "evaluations"
                break
            _require_a_value(table)

            found = _in_common_units(table.at(drawn))
            gradient = question.credit(question.spread(asked, [found]).all).gradient
            if len(new) < len(set(drawn)):
                logits = logits / FORGET
            elif gradient is not None:
                logits = _ascend(logits, gradient, found, rate)
            round_state, table.round_start = generator.get_state(), len(table.values)
            if callback is not None and callback(_result(table, logits, round_state, "callback")):
                stopped = "callback"
                break
    except KeyboardInterrupt:
        if not table.any_value():
            raise
        stopped = "interrupted"
    finally:
        if show:
            show.close()
    return _result(table, logits, round_state, stopped)


# ---------------------------------------------------------------- the steps of a round


def _reason_to_stop(table: Known, space: int, evaluations: int, patience: int | None) -> str | None:
    """Why there is nothing left to do, if so."""
    if len(table.values) >= space:
        return "all points known"
    if len(table.values) >= evaluations:
        return "evaluations"
    if patience is not None and table.any_value() and table.since_best() > patience:
        return "patience"
    return None


def _new_points(
    table: Known, drawn: list[Point], count: int, legal: Tensor, small: bool, generator: torch.Generator
) -> list[Point]:
    """The points of this round that were unknown at its start: those drawn, filled up to `count`.

    Neighbours of the best point fill it up; where there are none either, any unknown point of a small space.
    """
    new = [point for point in dict.fromkeys(drawn) if table.is_new(point)]
    if table.round_start == 0 or len(new) >= count:
        return new
    more = table.neighbours(legal)
    if small and len(new) == len(more) == 0:
        more = table.unseen(legal)
    shuffled = more[torch.randperm(len(more), generator=generator)]
    return list(dict.fromkeys([*new, *_points(shuffled)]))[:count]


def _evaluate_at(
    points: list[Point], evaluate: Evaluate, table: Known, raise_errors: bool, show: _Progress | None
) -> None:
    """Enter f at these points into the table, each as soon as it is there: the search may be interrupted."""
    if not points:
        return
    with torch.enable_grad():  # f may train a model, also in worker processes
        for point, (value, error) in zip(points, evaluate(torch.tensor(points)), strict=True):
            if error is not None and raise_errors:
                raise RuntimeError(f"f failed at {list(point)}: {error}")
            table.add(point, value, error)
            if show:
                show.update()


def _require_a_value(table: Known) -> None:
    """Require that f did not fail everywhere."""
    if not table.any_value():
        point, error = table.failures[0]
        raise RuntimeError(
            f"f failed at every one of the first {len(table.values)} points; the first, {point}: {error}"
        )


def _in_common_units(values: list[float]) -> Tensor:
    """The values [N] in units of a power of 2, so that the squares of very large or small ones are not inf or 0."""
    exponent = math.frexp(max(map(abs, values)))[1]
    return torch.tensor([math.ldexp(value, -exponent) for value in values], dtype=torch.float64)


def _ascend(logits: Tensor, gradient: Tensor, values: Tensor, rate: float) -> Tensor:
    """One step along the natural gradient, in units of the values' standard deviation."""
    deviation = values.std(correction=0)
    if deviation == 0:
        return logits
    p = logits.softmax(-1).clamp_min(LEAST_PROBABILITY)
    return logits + rate * gradient / (deviation * p)


def _points(z: Tensor) -> list[Point]:
    return [tuple(point) for point in z.tolist()]


# ---------------------------------------------------------------- before and after


def _result(table: Known, logits: Tensor, round_state: Tensor, stopped: str) -> Maximum:
    """The result so far; its state is that of the round's start, with all points that are known."""
    points = torch.tensor(list(table.index), dtype=torch.int64).view(-1, len(logits))
    values = torch.tensor(table.values, dtype=torch.float64)
    best = int(values.nan_to_num(nan=-math.inf).argmax())
    return Maximum(
        point=points[best],
        value=float(values[best]),
        history=torch.tensor(table.best, dtype=torch.float64),
        probabilities=logits.softmax(-1),
        stopped=stopped,
        failures=list(table.failures),
        state={
            "logits": logits,
            "generator": round_state,
            "points": points,
            "values": values,
            "failures": list(table.failures),
            "round_start": table.round_start,
        },
    )


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
    for point, value in zip(_points(state["points"]), state["values"].tolist(), strict=True):
        table.add(point, value, errors.get(point))
    table.round_start = state["round_start"]
    generator.set_state(state["generator"])
    return saved.clone()


class _Progress:
    """One line on a terminal: how far, the best, the time left."""

    def __init__(self, table: Known, evaluations: int) -> None:
        self.table, self.evaluations = table, evaluations
        self.start, self.done = time.monotonic(), len(table.values)
        self.shown = 0.0

    def update(self) -> None:
        now, done = time.monotonic(), len(self.table.values)
        if now - self.shown < 0.2:
            return
        self.shown = now
        left = (now - self.start) / max(1, done - self.done) * (self.evaluations - done)
        failed = f", {len(self.table.failures)} failed" if self.table.failures else ""
        line = f"{done:,} of {self.evaluations:,} evaluations, best {self.table.best[-1]:.6g}{failed}"
        sys.stderr.write(f"\r{line}, about {left:,.0f} s left\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\n")
