r"""`Search`: a black box over discrete variables, by ascending the expectation of f
under independent choices.

    phi_k <- phi_k + a_k g_k / (s p_k),  g ~ dE[f]/dphi,  z_k ~ Cat(p_k),  p_k = softmax(phi_k)

g is an estimator's; divided by p it is the natural gradient, which is the same however
the probabilities are parametrised; s is the standard deviation of the round's values,
so the step does not depend on f's units. The step size a_k falls with the square root
of the number of a variable's free parameters, whose estimates share one sample. A
regression h on the points known before the round lowers the variance of g: the
estimator sees f - h, and the exact gradient of E[h] is added. As the choices settle,
draws repeat points that are known, which cost nothing; the round is then filled up with
neighbours of the best point, which differ from it in one variable, those first for
which h is largest. When they do not fill it any more, the logits are divided by
`FORGET`: a new search begins around the best.

Reference for the natural gradient of black boxes: Ollivier, Arnold, Auger and Hansen,
Information-geometric optimization algorithms, JMLR 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.capabilities import require
from arsm.checks import check_count, check_seed, check_whole
from arsm.estimators.rloo import RLOO
from arsm.options import suggests
from arsm.question import Distinct, Question, pose
from arsm.rows import ragged
from arsm.search.calls import finite_or_failed
from arsm.search.candidates import Candidates, as_points
from arsm.search.known import Known
from arsm.search.result import Maximum
from arsm.search.space import Point, Space, read_space
from arsm.search.surrogate import Surrogate, exponent_of, in_units
from arsm.types import Estimator

SAMPLES = 16
"""Points per round, if nothing else is said."""
RATE = 2.0
"""Step size a of a variable with two values."""
FULL_RATE_ROUNDS = 64
"""Rounds of a search up to which the step size is this; with more it falls with their
square root.
"""
LEAST_PROBABILITY = 0.02
"""Lower bound of p in the division of g: the estimate of a rare category is mostly
zero, and else very large.
"""
FORGET = 2.0
"""Divisor of the logits where a new search begins around the best point."""
SMALL_SPACE = 4
"""In a space of at most this many times the evaluations, any new point is tried before
the logits are halved.
"""
REMEMBERED = 256
"""Number of latest points to which the surrogate is fitted: its cost grows with the cube."""
FEWEST = 128
"""Number of known points below which there is no surrogate."""
IDLE_ROUNDS = 1000
"""The search ends after this many rounds in a row without a new point to evaluate."""


@dataclass(frozen=True)
class Round:
    """One question of the estimator, and the points to evaluate in this round."""

    question: Question
    asked: Distinct
    drawn: list[Point]
    """The points that the estimator asks for."""
    new: list[Point]
    """Those that were unknown at the start of the round and may be evaluated, filled up
    with others.
    """
    evaluated: list[Point]
    """Those of them for which the evaluations suffice."""
    surrogate: Surrogate | None
    """Fitted to points known before the round."""


class Search:
    """A search for a loop of your own: ask for points, evaluate them, tell their values.

        search = arsm.Search({"layers": [2, 4, 8], "act": ["relu", "gelu"]})
        while points := search.ask():
            for point in points:
                search.tell(point, f(point))
        print(search.best)

    `arsm.maximize` is this loop. All options are those of `maximize`.
    """

    @suggests("arsm.Search")
    def __init__(
        self,
        space: Sequence[int] | Mapping[str, Any],
        *,
        evaluations: int = 1000,
        samples: int | None = None,
        estimator: Estimator | None = None,
        feasible: Callable[[Any], Any] | None = None,
        patience: int | None = None,
        seed: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.space: Space = read_space(space)
        check_count("evaluations", evaluations)
        if patience is not None:
            check_count("patience", patience)
        check_seed(seed)
        if feasible is not None and not callable(feasible):
            raise TypeError(
                f"feasible must be a function of a point, but is {type(feasible).__name__}."
            )
        self.logits: Tensor = ragged(self.space.sizes).double()
        self.evaluations = evaluations
        self.patience = patience
        self.stopped: str | None = None
        """Why the search has ended, None before."""
        self.known = Known()

        legal = self.logits > -torch.inf
        self._estimator = _chosen(estimator, samples, self.logits)
        self._count = self._estimator.most_queries(self.logits)
        self._rate = _step_sizes(legal, self._count, evaluations)
        self._fitted: tuple[int, Surrogate | None] = (0, None)
        self._idle = 0
        self._round: Round | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._candidates = Candidates(
            self.space, self.known, legal, self._count, feasible, self._generator
        )
        if state is not None:
            self.logits = _restore(state, self.space, self.known, self.logits, self._generator)
        # a state is of the start of a round: one that was interrupted is drawn again, and finds
        # its points in the table
        self._round_state = self._generator.get_state()

    # ---------------------------------------------------------------- for users

    def ask(self) -> list[Any]:
        """The points of this round that have not been told yet; empty at the end.

        Each is int64 [K], or a dict of values by name, as the space is.
        """
        return [self.space.settings(point) for point in self.ask_points()]

    def tell(self, point: Any, value: float | None) -> None:
        """Give f's value at a point; None, NaN and infinities say that f failed there.

        Points that were not asked for may be told too, such as those that you know from
        elsewhere: they count as evaluations.
        """
        found, error = finite_or_failed(math.nan if value is None else float(value))
        self.tell_point(self.space.point(point), found, error)

    def extend(self, evaluations: int) -> None:
        """Go on after the evaluations are used up, until there are so many in all."""
        check_count("evaluations", evaluations)
        self.evaluations = max(self.evaluations, evaluations)
        if self.stopped == "evaluations" and len(self.known.values) < self.evaluations:
            self.stopped = None

    @property
    def best(self) -> Maximum:
        """The result so far; at least one value must have been told."""
        if not self.known.any_value():
            raise ValueError("the search has no value yet; tell it one before asking for the best.")
        return self.result(self.stopped or "")

    # ---------------------------------------------------------------- one round

    def ask_points(self) -> list[Point]:
        """As `ask`, in category numbers."""
        while self.stopped is None:
            if self._round is None:
                self.stopped = self._reason_to_stop()
                if self.stopped is not None:
                    break
                self._round = self._begin()
            left = [p for p in self._round.evaluated if p not in self.known.index]
            if left:
                return left
            # a round without new points is learned from at once
            self._finish(self._round)
        return []

    def tell_point(self, point: Point, value: float, error: str | None) -> None:
        """As `tell`, in category numbers; ends the round with its last value."""
        # the first value counts: a point that is told again is no new evaluation
        if point in self.known.index:
            return
        self.known.add(point, value, error)
        asked = self._round
        if asked is not None and all(each in self.known.index for each in asked.evaluated):
            self._finish(asked)

    @property
    def between_rounds(self) -> bool:
        """Whether all points of the last round have been told."""
        return self._round is None

    def _reason_to_stop(self) -> str | None:
        """Why there is nothing left to do, if so."""
        known = self.known
        if self._candidates.all_known or len(known.values) >= math.prod(self.space.sizes):
            return "all points known"
        if len(known.values) >= self.evaluations:
            return "evaluations"
        if self.patience is not None and known.any_value() and known.since_best() > self.patience:
            return "patience"
        if self._idle >= IDLE_ROUNDS:
            return "no new points"
        return None

    def _begin(self) -> Round:
        """Draw the points of a round."""
        question = pose(self._estimator, self.logits, generator=self._generator)
        asked = question.asked("packed")
        drawn = [self.space.canonical(point) for point in as_points(asked.z)]
        surrogate = self._surrogate()
        new = self._candidates.new_points(drawn, self.logits, surrogate, small=self._small)
        # a round that was interrupted finds some of its points in the table
        wanted = [*new, *self._candidates.second_neighbours(new)]
        missing = [point for point in wanted if point not in self.known.index]
        left = self.evaluations - len(self.known.values)
        self._idle = 0 if missing else self._idle + 1
        return Round(question, asked, drawn, new, missing[:left], surrogate)

    def _surrogate(self) -> Surrogate | None:
        """A regression on the latest points known before this round, if there are enough."""
        count = self.known.round_start
        if count < FEWEST or not self.known.any_value(count):
            return None
        if self._fitted[0] != count:  # a round may have found nothing new
            points = list(self.known.index)[:count][-REMEMBERED:]
            self._fitted = (count, Surrogate.fitted(points, self.known.at(points, count)))
        return self._fitted[1]

    def _finish(self, asked: Round) -> None:
        """Learn from the round's values."""
        self._round = None
        # the evaluations did not suffice for all that the estimator asked for
        unknown = [p for p in asked.drawn if p not in self.known.index]
        if any(self._candidates.may_be_evaluated(point) for point in unknown):
            self.stopped = "evaluations"
            return
        if self.known.any_value():
            self._learn(asked)
        self.known.round_start = len(self.known.values)
        self._round_state = self._generator.get_state()

    def _learn(self, asked: Round) -> None:
        """Take a step along the round's gradient, or forget where it had too few new points."""
        # infeasible points cannot be new, so they are no sign that the search has settled
        possible = {point for point in asked.drawn if self._candidates.may_be_evaluated(point)}
        if len(asked.new) < max(1, len(possible)):
            self.logits = self.logits / FORGET
            return
        values, gradient = self._gradient(asked)
        if gradient is not None:
            gradient = self._of_existing(gradient, asked.drawn)
            self.logits = _ascend(self.logits, gradient, values, self._rate)

    def _gradient(self, asked: Round) -> tuple[Tensor, Tensor | None]:
        """The values [N] of the points drawn, and dE[f]/dphi [K, C], in one unit."""
        found = self.known.at(asked.drawn)
        surrogate = asked.surrogate
        if surrogate is None:
            values = in_units(found, exponent_of(found))
            return values, self._estimate(asked, values)
        # f and h in the unit of the larger, so that neither overflows
        exponent = max(exponent_of(found), surrogate.exponent)
        values = in_units(found, exponent)
        scale = 2.0 ** (surrogate.exponent - exponent)
        gradient = self._estimate(asked, values - scale * surrogate(asked.asked.z))
        if gradient is not None:
            gradient = gradient + scale * surrogate.gradient(self.logits.softmax(-1))
        return values, gradient

    def _estimate(self, asked: Round, values: Tensor) -> Tensor | None:
        """The estimator's gradient [K, C] from the values [N] of the points drawn."""
        every = asked.question.spread(asked.asked, [values]).all
        return asked.question.credit(every).gradient

    def _of_existing(self, gradient: Tensor, drawn: list[Point]) -> Tensor:
        """The gradient [K, C] without variables that exist at no point drawn: theirs is
        noise with mean 0.
        """
        if not self.space.conditional:
            return gradient
        seen = torch.tensor([self.space.active(point) for point in drawn]).any(0)
        return torch.where(seen.unsqueeze(-1), gradient, 0.0)

    @property
    def _small(self) -> bool:
        """Whether the space is small enough to list."""
        return math.prod(self.space.sizes) <= SMALL_SPACE * self.evaluations

    # ---------------------------------------------------------------- the result

    def result(self, stopped: str) -> Maximum:
        """The result so far; its state is that of the round's start, with all points
        that are known.
        """
        known = self.known
        best = known.best_point()
        settings = self.space.settings(best)
        failures = []
        for point, error in known.failures:
            seen = self.space.settings(point)
            failures.append((seen.tolist() if isinstance(seen, Tensor) else seen, error))
        return Maximum(
            point=torch.tensor(best, dtype=torch.int64),
            settings=settings if isinstance(settings, dict) else None,
            value=known.values[known.index[best]],
            history=torch.tensor(known.best, dtype=torch.float64),
            probabilities=self.logits.softmax(-1),
            stopped=stopped,
            failures=failures,
            # tensors, numbers and words alone, which torch.load takes with weights_only
            state={
                "logits": self.logits,
                "space": self.space.words,
                "generator": self._round_state,
                "points": torch.tensor(list(known.index), dtype=torch.int64),
                "values": torch.tensor(known.values, dtype=torch.float64),
                "failures": [(list(point), error) for point, error in known.failures],
                "round_start": known.round_start,
            },
            described=self.space.describe(best),
        )


# ---------------------------------------------------------------- the step


def _step_sizes(legal: Tensor, count: int, evaluations: int) -> Tensor:
    """a_k [K, 1], for legal categories [K, C] and rounds of `count` evaluations."""
    # more rounds make smaller steps, which average over more of the noise
    shrink = math.sqrt(FULL_RATE_ROUNDS * count / evaluations)
    free = (legal.sum(-1, keepdim=True) - 1).clamp_min(1)
    return RATE * min(1.0, shrink) / free.sqrt()


def _ascend(logits: Tensor, gradient: Tensor, values: Tensor, rate: Tensor) -> Tensor:
    """One step along the natural gradient, in units of the values' standard deviation;
    rate is [K, 1].
    """
    deviation = values.std(correction=0)
    if deviation == 0:  # equal values say nothing about the direction
        return logits
    p = logits.softmax(-1).clamp_min(LEAST_PROBABILITY)
    return logits + rate * gradient / (deviation * p)


# ---------------------------------------------------------------- before the first round


def _chosen(estimator: Estimator | None, samples: int | None, logits: Tensor) -> Estimator:
    if samples is not None:
        check_whole("samples", samples)
    if estimator is None:
        return RLOO(SAMPLES if samples is None else samples, ridge=1.0)
    needs = ("values_only", "mean", "nothing_learned")
    instead = "use one such as arsm.RLOO(16, ridge=1.0)"
    require(estimator, "arsm.maximize", *needs, subset=None, instead=instead)
    resized = estimator if samples is None else estimator.within(samples)
    if resized is None:
        raise ValueError(
            f"{type(estimator).__name__} cannot be resized to {samples} samples, it asks for "
            f"{estimator.most_queries(logits)}; leave samples out."
        )
    return resized


def _restore(
    state: dict[str, Any], space: Space, known: Known, logits: Tensor, generator: torch.Generator
) -> Tensor:
    """Fill the table and the generator; returns the logits."""
    if not isinstance(state, dict) or "round_start" not in state:
        raise ValueError(
            "state must be the `state` of a result of arsm.maximize, but is "
            f"{type(state).__name__}."
        )
    # the masks say how many categories each variable has
    saved = state["logits"]
    same_shape = saved.shape == logits.shape
    if not same_shape or not torch.equal(saved > -torch.inf, logits > -torch.inf):
        raise ValueError(
            f"state is of a search over logits {list(saved.shape)}, but sizes give "
            f"{list(logits.shape)} or other masks."
        )
    # earlier versions did not save it
    if state.get("space", space.words) != space.words:
        raise ValueError(
            "state is of a search over other variables or values; give the space that it began "
            "with."
        )
    errors = {tuple(point): error for point, error in state["failures"]}
    for point, value in zip(as_points(state["points"]), state["values"].tolist(), strict=True):
        known.add(point, value, errors.get(point))
    known.round_start = state["round_start"]
    generator.set_state(state["generator"])
    return saved.clone()
