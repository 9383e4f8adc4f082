"""Functions of one point as functions of many rows, and variables of different sizes as
masked logits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Map(Protocol):
    """`map(function, items)`, results in the order of the items: the built-in, an
    executor's, a pool's.
    """

    def __call__(
        self, function: Callable[[Any], Any], items: Iterable[Any], /
    ) -> Iterable[Any]: ...


def ragged(sizes: Sequence[int]) -> Tensor:
    """Logits [K, C] of K uniform variables with `sizes[k]` categories: zero, and -inf
    from there to C = max(sizes).

    `arsm.ragged([2, 9, 4])` gives [3, 9]; estimators never choose a masked category.
    Add it to other logits to mask them.
    """
    counts = torch.tensor(whole_sizes(sizes))
    return torch.where(torch.arange(int(counts.max())) < counts.unsqueeze(-1), 0.0, -torch.inf)


def whole_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes as integers of at least 1."""
    try:
        # index takes NumPy's integers too, but no 2.0
        whole = [operator.index(size) for size in sizes]
    except TypeError:
        whole = []
    if not whole or min(whole) < 1:
        raise ValueError(
            "sizes must be one whole number of at least 1 per variable, as in [2, 9, 4], but is "
            f"{sizes!r}."
        )
    return whole


def rowwise(f: Callable[..., Any], map: Map | None = None) -> Callable[..., Tensor]:
    """f of one point as a function of rows, for `arsm.estimate`.

        arsm.estimate(estimator, logits, arsm.rowwise(f, map=executor.map))

    Args:
        f: `f(z, *context) -> number`, with z int64 [K] and each context tensor's row.
            It may return a Python number, a NumPy number or a tensor with one element,
            without gradient.
        map: calls f for every row: `concurrent.futures` executors' `map`,
            `ray.util.multiprocessing.Pool().map`, or anything like them that keeps the
            order; the built-in if None. Other processes must be able to import f.

    Returns:
        A function of z [N, K] and context [N, ...] that returns float64 [N] on z's
        device.
    """
    one = _OneRow(f)

    def rows(z: Tensor, *context: Tensor) -> Tensor:
        # clone: a view's whole storage would travel to another process
        columns = [[row.clone() for row in x.detach().cpu()] for x in (z, *context)]
        points = zip(*columns, strict=True)
        with torch.enable_grad():  # f may train a model, also in worker processes
            values = list((map or in_this_process)(one, points))
        return torch.tensor(values, dtype=torch.float64, device=z.device)

    return rows


class _OneRow:
    """f(*row) as a number; a class, because other processes must unpickle it."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, row: tuple[Tensor, ...]) -> float:
        return number(self.f(*row))


def in_this_process(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
    """The built-in map."""
    # a generator, which yields each result as soon as it is there
    return (function(item) for item in items)


def number(value: Any) -> float:
    """A value of f as a float: a number, a NumPy number, or a tensor or array with one element."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise TypeError(
            f"f must return one number per point, but returned {type(value).__name__}{shape}."
        ) from None
