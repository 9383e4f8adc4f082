r"""`maximize`: a black box over discrete variables, by ascending the expectation of f under independent choices.

    phi <- phi + a_t g / (s p),    g ~ dE[f]/dphi,    z_k ~ Cat(p_k),    p_k = softmax(phi_k)

g is an estimator's; divided by p it is the natural gradient, which is the same however the probabilities are
parametrised; s is the standard deviation of the round's values, so the step does not depend on f's units. The
rate a_t falls linearly to zero as the evaluations run out. A round that brings no new point means that the choices
have settled: the logits are then halved, which begins a new search around the best.

Reference for the natural gradient of black boxes: Ollivier, Arnold, Auger and Hansen, Information-geometric
optimization algorithms, JMLR 2017.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arsm.checks import check_estimator, check_whole
from arsm.driver import estimate
from arsm.estimators.rloo import RLOO
from arsm.rows import Map, in_this_process, number, ragged, whole_sizes
from arsm.types import Estimator

SAMPLES = 16
FULL_RATE_ROUNDS = 64
"""Up to this many rounds the first step has rate 1; with more rounds it falls with their square root."""
LEAST_PROBABILITY = 0.02
"""By which g is divided at least: a rare category's estimate is rarely not zero, and then large."""
SMALL_SPACE = 4
"""Times the evaluations: in a space with no more points than that, unseen ones are drawn once the choices settle."""


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


class _Stop(Exception):
    """Ends the search, with the reason."""


@dataclass
class _Table:
    """Every point evaluated so far, with its value, in order; each is evaluated once."""

    evaluate: Callable[[Tensor], Any]
    """New points [N, K] -> one (value, error) for each, in order."""
    evaluations: int
    patience: int | None
    raise_errors: bool
    index: dict[tuple[int, ...], int] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    failures: list[tuple[list[int], str]] = field(default_factory=list)
    round_start: int = 0
    """Number of points known before this round; a round may be interrupted and repeated."""
    round_new: int = 0
    round_values: Tensor = field(default_factory=lambda: torch.zeros(0))
    on_value: Callable[[], None] = lambda: None

    def __call__(self, z: Tensor) -> Tensor:
        """f at z [N, K]; unknown points are evaluated, as far as the budget goes. A failure counts as the worst."""
        points = [tuple(row) for row in z.tolist()]
        new = list(dict.fromkeys(point for point in points if point not in self.index))
        affordable = new[: self.evaluations - len(self.values)]
        if affordable:
            with torch.enable_grad():  # f may train something, also in processes that start here
                for point, (value, error) in zip(affordable, self.evaluate(torch.tensor(affordable)), strict=True):
                    self.add(point, value, error)
        if len(affordable) < len(new):
            raise _Stop("evaluations")
        known = [value for value in self.values if math.isfinite(value)]
        if not known:
            point, error = self.failures[0]
            raise RuntimeError(
                f"f failed at every one of the first {len(self.values)} points; the first, {point}: {error}"
            )
        worst = min(known)
        self.round_new = len({self.index[point] for point in points if self.index[point] >= self.round_start})
        found = [self.values[self.index[point]] for point in points]
        self.round_values = torch.tensor([x if math.isfinite(x) else worst for x in found], dtype=torch.float64)
        return self.round_values

    def add(self, point: tuple[int, ...], value: float, error: str | None) -> None:
        if error is None and not math.isfinite(value):
            error = f"f returned {value}"
        if error is not None:
            if self.raise_errors:
                raise RuntimeError(f"f failed at {list(point)}: {error}")
            self.failures.append((list(point), error))
            value = math.nan
        self.index[point] = len(self.values)
        self.values.append(value)
        before = self.best[-1] if self.best else -math.inf
        self.best.append(before if math.isnan(value) else max(before, value))
        self.on_value()

    def check(self, space: int) -> None:
        """End the search where there is nothing left to do."""
        if len(self.values) >= space:
            raise _Stop("all points known")
        if len(self.values) >= self.evaluations:
            raise _Stop("evaluations")
        found = bool(self.best) and math.isfinite(self.best[-1])
        if self.patience is not None and found and len(self.best) - self.best.index(self.best[-1]) > self.patience:
            raise _Stop("patience")


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
    check_whole("evaluations", evaluations)
    if evaluations < 1:
        raise ValueError(f"evaluations must be at least 1, but is {evaluations}.")
    if batched and map is not None:
        raise ValueError("map calls f for one point at a time; leave it out where f is batched.")
    estimator = _chosen(estimator, samples, logits)
    count = estimator.most_queries(logits)
    evaluate = _in_batches(f) if batched else _one_by_one(f, map or in_this_process)
    table = _Table(evaluate, evaluations, patience, raise_errors)
    generator = torch.Generator().manual_seed(seed)
    if state is not None:
        logits = _restore(state, table, logits, generator)
    legal = logits > -torch.inf
    rate = min(1.0, math.sqrt(FULL_RATE_ROUNDS * count / evaluations))
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
            if table.round_new == 0 and space <= SMALL_SPACE * evaluations:
                table(_unseen(table, legal.sum(-1).tolist(), count, generator))
            elif table.round_new == 0:
                logits = torch.where(legal, logits / 2, logits)
            elif out.grad is not None and float(spread := table.round_values.std(correction=0)) > 0:
                p = logits.softmax(-1).clamp_min(LEAST_PROBABILITY)
                left = 1 - len(table.values) / evaluations
                logits = torch.where(legal, logits + rate * left * out.grad / (spread * p), logits)
            start, table.round_start = generator.get_state(), len(table.values)
            if callback is not None and callback(result("callback")):
                raise _Stop("callback")
    except _Stop as stop:
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
    check_estimator(estimator)
    if estimator.needs_gradient or estimator.target != "mean":
        raise ValueError(
            f"{type(estimator).__name__} does not ascend the expectation of a black box; take one that only evaluates "
            "f, such as arsm.RLOO(16, ridge=1.0)."
        )
    resized = estimator if samples is None else estimator.within(samples)
    if resized is None:
        raise ValueError(
            f"{type(estimator).__name__} cannot be resized to {samples} samples, it asks for "
            f"{estimator.most_queries(logits)}; leave samples out."
        )
    return resized


def _restore(state: dict[str, Any], table: _Table, logits: Tensor, generator: torch.Generator) -> Tensor:
    """Fill the table and the generator; returns the logits."""
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


def _unseen(table: _Table, sizes: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` points of a small space that are not in the table, uniformly: [N, K]."""
    place = torch.tensor([math.prod(sizes[k + 1 :]) for k in range(len(sizes))])
    seen = (torch.tensor(list(table.index)[: table.round_start]) * place).sum(-1)
    free = torch.ones(math.prod(sizes), dtype=torch.bool).index_fill(0, seen, False).nonzero().squeeze(-1)
    chosen = free[torch.randperm(len(free), generator=generator)[:count]]
    return chosen.unsqueeze(-1) // place % torch.tensor(sizes)


class _Guarded:
    """f with its error as a result; a class, because other processes must unpickle it."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, z: Tensor) -> tuple[float, str | None]:
        try:
            return number(self.f(z)), None
        except Exception as error:
            return math.nan, f"{type(error).__name__}: {error}"


def _one_by_one(f: Callable[[Tensor], Any], map: Map) -> Callable[[Tensor], Any]:
    guarded = _Guarded(f)
    # clone: a view's whole storage would travel to another process
    return lambda z: map(guarded, [row.clone() for row in z])


def _in_batches(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def evaluate(z: Tensor) -> list[tuple[float, str | None]]:
        try:
            values = torch.as_tensor(f(z)).detach().double().cpu()
        except Exception as error:
            return [(math.nan, f"{type(error).__name__}: {error}")] * len(z)
        if values.shape != z.shape[:1]:
            raise ValueError(
                f"f must return one value per row of z: shape [{len(z)}] for z of shape {list(z.shape)}, but returned "
                f"shape {list(values.shape)}; leave batched out if it takes one point."
            )
        return [(value, None) for value in values.tolist()]

    return evaluate


class _Progress:
    """One line on a terminal: how far, the best, the time left."""

    def __init__(self, table: _Table) -> None:
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
