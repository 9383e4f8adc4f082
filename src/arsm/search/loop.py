"""`maximize`: the plain loop around a `Search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from arsm.options import suggests
from arsm.progress import Progress
from arsm.rows import Map, in_this_process
from arsm.search.calls import Evaluate, in_batches, one_by_one
from arsm.search.known import Known
from arsm.search.result import Maximum
from arsm.search.rounds import IDLE_ROUNDS, Search
from arsm.search.space import Point
from arsm.types import Estimator


@suggests("arsm.maximize")
def maximize(  # noqa: PLR0913  one call, all of its options by name
    f: Callable[..., Any],
    space: Sequence[int] | Mapping[str, Any],
    *,
    evaluations: int = 1000,
    samples: int | None = None,
    estimator: Estimator | None = None,
    feasible: Callable[[Any], Any] | None = None,
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

        best = arsm.maximize(f, {"layers": [2, 4, 8], "act": ["relu", "gelu"]})
        best.settings, best.value

        best = arsm.maximize(f, [2, 9, 4], evaluations=500, map=executor.map)
        best.point, best.value

    Args:
        f: `f(settings) -> number` with a dict of values by name, or `f(z)` with z int64
            [K], z[k] in 0..space[k]-1; it may return a NumPy number or a tensor with
            one element. With `batched`, a list of N dicts, or z int64 [N, K], -> [N].
        space: the values of each variable by its name, or the number of values of each
            variable. `arsm.When` makes a variable that exists for some values of others
            only; where it does not exist, f does not get it.
        evaluations: how many points to evaluate at most. No point is evaluated twice.
        samples: points per round, evaluated in parallel by `map`; 16 if neither this
            nor an estimator is given.
        estimator: any that only evaluates f; leave-one-out with ridge regression if
            None. `samples` resizes it.
        feasible: `feasible(point) -> bool` is asked first, in this process: f is not
            evaluated at other points, which cost nothing.
        batched: whether f takes all points of a round at once.
        map: calls f for every point of a round: `concurrent.futures` executors' `map`,
            `ray.util.multiprocessing.Pool().map`, or anything like them that keeps the
            order. The points evaluated do not depend on it.
        callback: called after each round with the result so far; the search ends if it
            returns True.
        patience: stop after this many evaluations without a better value.
        seed: of all randomness.
        raise_errors: raise the first error of f. Otherwise failed points are listed in
            `failures` and avoided; a value that is NaN or infinite is a failure. If all
            points of the first round fail, that is raised in any case.
        progress: show a line with the best value and the time left on a terminal, after
            two seconds.
        state: a result's `state`, to go on from it with the same space, `evaluations`
            of both together, and options.

    Returns:
        A `Maximum`. Ctrl-C ends the search early and returns the best so far.
    """
    evaluate = _caller(f, batched, map)
    search = Search(
        space,
        evaluations=evaluations,
        samples=samples,
        estimator=estimator,
        feasible=feasible,
        patience=patience,
        seed=seed,
        state=state,
    )
    show = _SearchProgress(search.known, evaluations, enabled=progress)
    try:
        while points := search.ask_points():
            _evaluate_at(points, evaluate, search, raise_errors, show)
            _require_a_value(search)
            if search.between_rounds and _ends(callback, search):
                search.stopped = "callback"
    except KeyboardInterrupt:
        # without a value there is no result to return
        if not search.known.any_value():
            raise
        search.stopped = "interrupted"
    finally:
        show.close()
    _require_a_point(search)
    return search.best


def _caller(f: Callable[..., Any], batched: bool, map: Map | None) -> Evaluate:
    """f, called in the way that the user asked for."""
    if not callable(f):
        raise TypeError(
            f"f must be a function, but is {type(f).__name__}; f comes first, then the space."
        )
    if batched and map is not None:
        raise ValueError("map calls f for one point at a time; leave it out where f is batched.")
    if map is not None and not callable(map):
        raise TypeError(
            f"map must be a function such as executor.map, but is {type(map).__name__}."
        )
    return in_batches(f) if batched else one_by_one(f, map or in_this_process)


def _ends(callback: Callable[[Maximum], Any] | None, search: Search) -> bool:
    """Show the result so far to the user's callback; whether it ends the search."""
    return callback is not None and bool(callback(search.result("callback")))


def _evaluate_at(
    points: list[Point],
    evaluate: Evaluate,
    search: Search,
    raise_errors: bool,
    show: _SearchProgress,
) -> None:
    """Tell the search f at these points, each as soon as it is there: the search may be
    interrupted.
    """
    settings = [search.space.settings(point) for point in points]
    with torch.enable_grad():  # f may train a model, also in worker processes
        for point, (value, error) in zip(points, evaluate(settings), strict=True):
            if error is not None and raise_errors:
                where = search.space.describe(point)
                raise RuntimeError(f"f failed at {where}: {error}")
            search.tell_point(point, value, error)
            show.update()


def _require_a_value(search: Search) -> None:
    """Require that f did not fail everywhere."""
    known = search.known
    if not known.any_value():
        point, error = known.failures[0]
        raise RuntimeError(
            f"f failed at every one of the first {len(known.values)} points; the first, "
            f"{search.space.describe(point)}: {error}"
        )


def _require_a_point(search: Search) -> None:
    """Require that some point was feasible."""
    if not search.known.values:
        raise ValueError(
            f"no point drawn in {IDLE_ROUNDS:,} rounds was feasible; make the space smaller, so "
            "that more of its points are, or let f return a low value for the others."
        )


class _SearchProgress(Progress):
    """A line with the evaluations so far and the best value."""

    def __init__(self, known: Known, evaluations: int, *, enabled: bool) -> None:
        super().__init__(enabled=enabled)
        self.known = known
        self.evaluations = evaluations
        self.before = len(known.values)  # of the search that this one goes on from

    def update(self) -> None:
        """Show the evaluations so far."""
        if not self.enabled or not self.known.best:
            return
        done = len(self.known.values)
        words = f"{done:,} of {self.evaluations:,} evaluations, best {self.known.best[-1]:.6g}"
        if self.known.failures:
            words += f", {len(self.known.failures)} failed"
        # the time left is guessed from the evaluations of this call alone
        self(words, (done - self.before) / max(1, self.evaluations - self.before))
