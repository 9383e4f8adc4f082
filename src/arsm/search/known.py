"""The points that a search knows, and where new ones may lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arsm.search.space import Point


@dataclass
class Known:
    """A table of the points evaluated so far and their values, in order."""

    index: dict[Point, int] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    """NaN at a point where f failed."""
    best: list[float] = field(default_factory=list)
    """The best value after each evaluation, -inf before the first that did not fail."""
    worst: list[float] = field(default_factory=list)
    """The worst value after each evaluation, inf before the first that did not fail."""
    failures: list[tuple[Point, str]] = field(default_factory=list)
    round_start: int = 0
    """Number of points known before this round; a round may be interrupted and repeated."""

    def add(self, point: Point, value: float, error: str | None) -> None:
        """Enter a point, as a failure if there is an error."""
        if error is not None:
            self.failures.append((point, error))
            value = math.nan
        self.index[point] = len(self.values)
        self.values.append(value)
        best = self.best[-1] if self.best else -math.inf
        worst = self.worst[-1] if self.worst else math.inf
        # a failure changes neither; max and min of a NaN would depend on the order
        if not math.isnan(value):
            best = max(best, value)
            worst = min(worst, value)
        self.best.append(best)
        self.worst.append(worst)

    def at(self, points: Sequence[Point], count: int | None = None) -> list[float]:
        """The values at points; one that failed, or is not known because it may not be
        evaluated, counts as the worst of all values, or of the first `count`, of which
        there must be one.
        """
        worst = self.worst[-1 if count is None else count - 1]
        found = []
        for point in points:
            place = self.index.get(point)
            value = math.nan if place is None else self.values[place]
            found.append(worst if math.isnan(value) else value)
        return found

    def any_value(self, count: int | None = None) -> bool:
        """Whether f did not fail at every point, or at the first `count`."""
        place = (len(self.best) if count is None else count) - 1
        return place >= 0 and self.best[place] > -math.inf

    def since_best(self) -> int:
        """Number of evaluations since the best value was found, that one included."""
        return len(self.best) - self.best.index(self.best[-1])

    def best_point(self, count: int | None = None) -> Point:
        """The best of the points, or of the first `count`; the first if all of them failed."""
        values = torch.tensor(self.values[:count], dtype=torch.float64)
        # the points are entered in the order of their values
        return list(self.index)[int(values.nan_to_num(nan=-math.inf).argmax())]

    def is_new(self, point: Point) -> bool:
        """Whether the point was unknown at the start of the round."""
        # a repeated round must find its own points new again
        return self.index.get(point, self.round_start) >= self.round_start

    def neighbours(self, legal: Tensor) -> Tensor:
        """Points that differ in one variable from the best point at the start of the
        round: [N, K], itself among them.
        """
        # one copy of the best point for each legal category of each variable
        variable, category = legal.nonzero(as_tuple=True)
        points = torch.tensor(self.best_point(self.round_start)).repeat(len(variable), 1)
        points[torch.arange(len(variable)), variable] = category
        return points

    def second_neighbours(self, legal: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Points that differ in up to two random variables from the best point at the
        start of the round: [count, K].
        """
        best = torch.tensor(self.best_point(self.round_start))
        points = best.repeat(count, 1)
        sizes = legal.sum(-1)
        # the same variable twice, or the category that it has, leaves fewer differences
        for _ in range(2):
            variable = torch.randint(len(best), (count,), generator=generator)
            chance = torch.rand(count, generator=generator, dtype=torch.float64)
            points[torch.arange(count), variable] = (chance * sizes[variable]).long()
        return points

    def unseen(self, legal: Tensor) -> Tensor:
        """All new points of a space that is small enough to list: [N, K]."""
        # points as numbers with one digit per variable, whose base is its size
        sizes = legal.sum(-1)
        place = sizes.flip(0).cumprod(0).flip(0) // sizes
        seen = (torch.tensor(list(self.index)[: self.round_start]) * place).sum(-1)
        free = torch.ones(int(sizes.prod()), dtype=torch.bool).index_fill(0, seen, False)
        return free.nonzero() // place % sizes
