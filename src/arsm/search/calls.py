"""Calls of f at the points of a round, wherever f runs: each with a value or an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from arsm.rows import Map, number
from arsm.search.space import Settings

Result = tuple[float, str | None]
"""f's value, and the error if it failed."""
Evaluate = Callable[[Sequence[Settings]], Iterable[Result]]
"""New points -> one result for each, in order."""


class Guarded:
    """f with its error as a result; a class, because other processes must unpickle it."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, point: list[int] | dict[str, Any]) -> Result:
        try:
            z = point if isinstance(point, dict) else torch.tensor(point)
            value = number(self.f(z))
        except Exception as error:
            # in words: not every exception can be sent back by another process
            return math.nan, f"{type(error).__name__}: {error}"
        return finite_or_failed(value)


def finite_or_failed(value: float) -> Result:
    """A value of f, which has failed if the value is not finite."""
    return value, None if math.isfinite(value) else f"f returned {value}"


def one_by_one(f: Callable[..., Any], map: Map) -> Evaluate:
    """f of one point, called by `map`."""
    guarded = Guarded(f)

    def evaluate(points: Sequence[Settings]) -> Iterator[Result]:
        # numbers reach other processes several times faster than tensors, which use shared memory
        sent = [z.tolist() if isinstance(z, Tensor) else z for z in points]
        # each result is yielded as soon as it is there: a search that is interrupted keeps it
        returned = 0
        for found in map(guarded, sent):
            returned += 1
            yield found
        if returned < len(sent):
            raise ValueError(
                f"map must return one result per item, but returned {returned} for {len(sent)}."
            )

    return evaluate


def in_batches(f: Callable[..., Any]) -> Evaluate:
    """f of all points at once: int64 [N, K], or a list of N dicts."""

    def evaluate(points: Sequence[Settings]) -> list[Result]:
        tensors = [point for point in points if isinstance(point, Tensor)]
        z = torch.stack(tensors) if tensors else list(points)
        try:
            values = torch.as_tensor(f(z)).detach()
            # .double() would drop the imaginary part with a warning
            if values.is_complex():
                raise TypeError(f"f must return real numbers, but returned {values.dtype}")
            values = values.double().cpu()
        except Exception as error:
            # nobody knows which of the points it was
            return [(math.nan, f"{type(error).__name__}: {error}")] * len(points)
        if values.shape != (len(points),):
            given = f"z of shape {list(z.shape)}" if isinstance(z, Tensor) else f"{len(z)} points"
            raise ValueError(
                f"f must return one value per row of z: shape [{len(points)}] for {given}, but "
                f"returned shape {list(values.shape)}; leave batched out if it takes one point."
            )
        return [finite_or_failed(value) for value in values.tolist()]

    return evaluate
