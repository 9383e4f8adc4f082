"""The points that `maximize` knows, and how new ones are evaluated, wherever f runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arsm.rows import Map, number

Point = tuple[int, ...]
"""One value of each variable."""
Evaluate = Callable[[Tensor], Iterable[tuple[float, str | None]]]
"""New points [N, K] -> one (value, error) for each, in order."""


@dataclass
class Known:
    """A table of the points evaluated so far and their values, in order."""

    index: dict[Point, int] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    """NaN at a point where f failed."""
    best: list[float] = field(default_factory=list)
    """The best value after each evaluation, -inf before the first that did not fail."""
    failures: list[tuple[list[int], str]] = field(default_factory=list)
    round_start: int = 0
    """Number of points known before this round; a round may be interrupted and repeated."""

    def add(self, point: Point, value: float, error: str | None) -> None:
        """Enter a point, as a failure if there is an error."""
        if error is not None:
            self.failures.append((list(point), error))
            value = math.nan
        self.index[point] = len(self.values)
        self.values.append(value)
        before = self.best[-1] if self.best else -math.inf
        self.best.append(before if math.isnan(value) else max(before, value))

    def at(self, points: Sequence[Point]) -> list[float]:
        """The values at known points; a failure counts as the worst value so far, of which there must be one."""
        worst = min(value for value in self.values if math.isfinite(value))
        found = [self.values[self.index[point]] for point in points]
        return [worst if math.isnan(value) else value for value in found]

    def any_value(self) -> bool:
        """Whether f did not fail at every point."""
        return bool(self.best) and self.best[-1] > -math.inf

    def since_best(self) -> int:
        """Number of evaluations since the best value was found, that one included."""
        return len(self.best) - self.best.index(self.best[-1])

    def is_new(self, point: Point) -> bool:
        """Whether the point was unknown at the start of the round."""
        return self.index.get(point, self.round_start) >= self.round_start

    def neighbours(self, legal: Tensor) -> Tensor:
        """New points that differ in one variable from the best point at the start of the round: [N, K]."""
        variable, category = legal.nonzero(as_tuple=True)
        values = torch.tensor(self.values[: self.round_start], dtype=torch.float64).nan_to_num(nan=-math.inf)
        best = torch.tensor(list(self.index)[int(values.argmax())])
        points = best.repeat(len(variable), 1)
        points[torch.arange(len(variable)), variable] = category
        return points[[self.is_new(tuple(point)) for point in points.tolist()]]

    def unseen(self, legal: Tensor) -> Tensor:
        """All new points of a space that is small enough to list: [N, K]."""
        sizes = legal.sum(-1)
        place = sizes.flip(0).cumprod(0).flip(0) // sizes
        seen = (torch.tensor(list(self.index)[: self.round_start]) * place).sum(-1)
        free = torch.ones(int(sizes.prod()), dtype=torch.bool).index_fill(0, seen, False).nonzero()
        return free // place % sizes


class Guarded:
    """f with its error as a result; a class, because other processes must unpickle it."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, point: list[int]) -> tuple[float, str | None]:
        try:
            value = number(self.f(torch.tensor(point)))
        except Exception as error:
            return math.nan, f"{type(error).__name__}: {error}"
        return _finite_or_failed(value)


def _finite_or_failed(value: float) -> tuple[float, str | None]:
    return value, None if math.isfinite(value) else f"f returned {value}"


def one_by_one(f: Callable[[Tensor], Any], map: Map) -> Evaluate:
    """f of one point, called by `map`."""
    guarded = Guarded(f)
    # numbers reach other processes several times faster than tensors, which use shared memory

    def evaluate(z: Tensor) -> Iterator[tuple[float, str | None]]:
        left = len(z)
        for found in map(guarded, z.tolist()):
            left -= 1
            yield found
        if left > 0:
            raise ValueError(f"map must return one result per item, but returned {len(z) - left} for {len(z)}.")

    return evaluate


def in_batches(f: Callable[[Tensor], Any]) -> Evaluate:
    """f of all points at once."""

    def evaluate(z: Tensor) -> list[tuple[float, str | None]]:
        try:
            values = torch.as_tensor(f(z)).detach()
            if values.is_complex():
                raise TypeError(f"f must return real numbers, but returned {values.dtype}")
            values = values.double().cpu()
        except Exception as error:
            return [(math.nan, f"{type(error).__name__}: {error}")] * len(z)
        if values.shape != z.shape[:1]:
            raise ValueError(
                f"f must return one value per row of z: shape [{len(z)}] for z of shape {list(z.shape)}, but returned "
                f"shape {list(values.shape)}; leave batched out if it takes one point."
            )
        return [_finite_or_failed(value) for value in values.tolist()]

    return evaluate
