"""The points of a round: those drawn, filled up where too few of them are new."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from arsm.search.known import Known
from arsm.search.space import Point, Space
from arsm.search.surrogate import Surrogate

TRIES = 8
"""Second neighbours drawn per place of a round, of which some will be feasible."""


class Candidates:
    """Chooses points that were unknown at the start of a round and may be evaluated."""

    def __init__(
        self,
        space: Space,
        known: Known,
        legal: Tensor,
        count: int,
        feasible: Callable[[Any], Any] | None,
        generator: torch.Generator,
    ) -> None:
        self.all_known = False
        """Whether a small space has no other point left."""
        self._space = space
        self._known = known
        self._legal = legal
        self._count = count
        self._feasible = feasible
        self._generator = generator
        self._may: dict[Point, bool] = {}

    def new_points(
        self, drawn: list[Point], logits: Tensor, surrogate: Surrogate | None, *, small: bool
    ) -> list[Point]:
        """The points of this round that were unknown at its start: those drawn, filled
        up to the estimator's number.

        Neighbours of the best point fill it up, the most promising first; where there
        are none either, any unknown point of a small space.
        """
        new = self._only_new(drawn)
        if self._known.round_start == 0 or len(new) >= self._count:
            return new
        more = self._only_new(self._complete(self._known.neighbours(self._legal), logits))
        if small and len(new) == len(more) == 0:
            more = self._only_new(as_points(self._known.unseen(self._legal)))
            self.all_known = not more

        # in random order, so that no variable is preferred; then by promise, ties as they were
        order = torch.randperm(len(more), generator=self._generator)
        if surrogate is not None and more:
            promise = surrogate(torch.tensor(more)[order])
            order = order[promise.argsort(descending=True, stable=True)]
        ordered = [more[i] for i in order.tolist()]
        return list(dict.fromkeys([*new, *ordered]))[: self._count]

    def second_neighbours(self, new: list[Point]) -> list[Point]:
        """Points that fill up a round under a constraint: two variables differ from the best.

        Where a constraint binds, one change alone often breaks it, as in a sum that
        must not be exceeded.
        """
        if self._feasible is None or self._known.round_start == 0 or len(new) >= self._count:
            return []
        drawn = self._known.second_neighbours(self._legal, TRIES * self._count, self._generator)
        wanted = self._count - len(new)
        return [point for point in self._only_new(as_points(drawn)) if point not in new][:wanted]

    def _only_new(self, points: Iterable[Point]) -> list[Point]:
        """Those that were unknown at the start of the round and may be evaluated."""
        distinct = dict.fromkeys(self._space.canonical(point) for point in points)
        return [p for p in distinct if self._known.is_new(p) and self.may_be_evaluated(p)]

    def may_be_evaluated(self, point: Point) -> bool:
        """Ask the user's `feasible`, once per point."""
        if self._feasible is None:
            return True
        if point not in self._may:
            self._may[point] = bool(self._feasible(self._space.settings(point)))
        return self._may[point]

    def _complete(self, neighbours: Tensor, logits: Tensor) -> list[Point]:
        """Neighbours of the best point [N, K]; variables that only they have take their
        most probable values.
        """
        points = as_points(neighbours)
        if not self._space.conditional:
            return points
        before = self._space.active(self._known.best_point(self._known.round_start))
        likely = logits.argmax(-1).tolist()
        completed = []
        for point in points:
            # a variable that the best point does not have stands at 0, which nobody chose
            triples = zip(point, before, likely, strict=True)
            completed.append(tuple(z if had else usual for z, had, usual in triples))
        return completed


def as_points(z: Tensor) -> list[Point]:
    """Categories [N, K] as points."""
    return [tuple(point) for point in z.tolist()]
