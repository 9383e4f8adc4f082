"""The points that `maximize` knows: evaluated once each, in order, wherever f runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arsm.rows import Map, number

Evaluate = Callable[[Tensor], Any]
"""New points [N, K] -> one (value, error) for each, in order."""


class Stop(Exception):
    """Ends the search, with the reason."""


@dataclass
class Known:
    """Every point evaluated so far, with its value."""

    evaluate: Evaluate
    evaluations: int
    patience: int | None
    raise_errors: bool
    count: int
    """New points per round."""
    more: Callable[[int], Tensor]
    """Points [N, K] to fill up a round, given the number of new points already drawn."""
    index: dict[tuple[int, ...], int] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    failures: list[tuple[list[int], str]] = field(default_factory=list)
    round_start: int = 0
    """Number of points known before this round; a round may be interrupted and repeated."""
    full: bool = True
    """Whether the round has all its new points."""
    round_values: Tensor = field(default_factory=lambda: torch.zeros(0))
    on_value: Callable[[], None] = lambda: None

    def __call__(self, z: Tensor) -> Tensor:
        """f at z [N, K] in units of a power of 2; new points are evaluated within the budget.

        A failure counts as the worst value.
        """
        points = [tuple(row) for row in z.tolist()]
        asked = list(dict.fromkeys(points))
        new = drawn = [point for point in asked if self.is_new(point)]
        if self.round_start > 0 and len(drawn) < self.count:
            new = list(dict.fromkeys([*drawn, *map(tuple, self.more(len(drawn)).tolist())]))[: self.count]
        self.full = len(new) >= len(asked)
        missing = [point for point in new if point not in self.index][: self.evaluations - len(self.values)]
        if missing:
            with torch.enable_grad():  # f may train a model, also in worker processes
                for point, (value, error) in zip(missing, self.evaluate(torch.tensor(missing)), strict=True):
                    self.add(point, value, error)
        if any(point not in self.index for point in points):
            raise Stop("evaluations")
        known = [value for value in self.values if math.isfinite(value)]
        if not known:
            point, error = self.failures[0]
            raise RuntimeError(
                f"f failed at every one of the first {len(self.values)} points; the first, {point}: {error}"
            )
        worst = min(known)
        found = [self.values[self.index[point]] for point in points]
        found = [x if math.isfinite(x) else worst for x in found]
        exponent = math.frexp(max(map(abs, found)))[1]  # else the squares of very large or small values are inf or 0
        self.round_values = torch.tensor([math.ldexp(x, -exponent) for x in found], dtype=torch.float64)
        return self.round_values

    def is_new(self, point: tuple[int, ...]) -> bool:
        """Whether the point was unknown at the start of the round."""
        return self.index.get(point, self.round_start) >= self.round_start

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
        """End the search if there is nothing left to do."""
        if len(self.values) >= space:
            raise Stop("all points known")
        if len(self.values) >= self.evaluations:
            raise Stop("evaluations")
        found = bool(self.best) and math.isfinite(self.best[-1])
        if self.patience is not None and found and len(self.best) - self.best.index(self.best[-1]) > self.patience:
            raise Stop("patience")

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
            return number(self.f(torch.tensor(point))), None
        except Exception as error:
            return math.nan, f"{type(error).__name__}: {error}"


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
        return [(value, None) for value in values.tolist()]

    return evaluate
