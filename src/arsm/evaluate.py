"""Evaluating f at the queries: share, gather context, chunk. The only caller of f."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm import kernels
from arsm.checks import NotFiniteError
from arsm.kernels import SMALL
from arsm.noise import working_dtype
from arsm.types import Queries

Evaluation = Literal["packed", "dense"]
Graph = Literal["none", "live", "all"]
"""The queries whose graph is kept."""
Rowwise = Callable[[Tensor, Tensor, bool], Tensor]
"""f as `evaluate` calls it: z [N, ...], the batch row [N] of each, whether their graph is kept -> [N]."""
FEW = 64
"""Up to this many queries are compared in pairs when compiled: one GPU kernel; sorting takes seven."""
VERY_FEW = 8
"""Up to this many queries are compared in pairs otherwise."""


class Values(NamedTuple):
    """f at the queries."""

    live: Tensor
    """[L, *B], with f's graph where it is kept."""
    all: Tensor
    """[M, *B], detached unless all graphs are kept."""


def share(points: Tensor) -> Tensor:
    """same_as [M, *B]: for every query the first identical one of its row, points [M, *B, K] of any integers.

    Several variables are compared by a hash and then in full: a collision costs an evaluation and never a wrong value.
    """
    if len(points) <= VERY_FEW and points.dtype == torch.int64 and kernels.eager_on_gpu(points):
        return kernels.share(points)
    if points.dtype == torch.int8 and points.shape[-1] % 4 == 0 and not torch.compiler.is_compiling():
        points = points.view(torch.int32)  # four variables at once
    queries, variables = points.shape[0], points.shape[-1]
    code = points.squeeze(-1) if variables == 1 else _hash(points)
    number = torch.arange(queries, device=points.device).view(-1, *(1,) * (points.ndim - 2))
    by_pairs = queries <= (FEW if torch.compiler.is_compiling() else VERY_FEW)
    first = _first_by_pairs(code) if by_pairs else _first_by_sorting(code, number)
    if variables == 1:
        return first
    flat = points.flatten(0, -2)
    # on a CPU several times faster than (x == y).all(-1)
    same = ((flat.index_select(0, _flat_index(first)) - flat).abs().amax(-1) == 0).view(first.shape)
    return torch.where(same, first, number)


def _flat_index(same_as: Tensor) -> Tensor:
    """The flat index of query same_as[m, *B] among all queries and rows: [M, *B] -> [M B]."""
    batch = same_as.shape[1:]
    rows = batch.numel()
    if rows == 1:
        return same_as.flatten()
    row = torch.arange(rows, device=same_as.device)
    return torch.add(row if len(batch) == 1 else row.view(batch), same_as, alpha=rows).flatten()


def speakers(same_as: Tensor) -> Tensor:
    """[M, *B]: whether a query is evaluated, for itself and all identical ones."""
    number = torch.arange(same_as.shape[0], device=same_as.device)
    return same_as == number.view(-1, *(1,) * (same_as.ndim - 1))


def _first_by_pairs(code: Tensor) -> Tensor:
    """The first query of a row with each query's code, M^2 comparisons: [M, *B]."""
    return (code.unsqueeze(1) == code).byte().argmax(1)


def _first_by_sorting(code: Tensor, number: Tensor) -> Tensor:
    ordered, order = code.sort(dim=0, stable=True)
    starts = torch.where(ordered[1:] == ordered[:-1], 0, number[1:])
    first = order.gather(0, torch.cat([torch.zeros_like(order[:1]), starts]).cummax(0).values)
    return torch.empty_like(order).scatter(0, order, first)


def _hash(points: Tensor) -> Tensor:
    """A 32-bit code by wrapping multiplication with the high halves of an odd 64-bit constant's powers."""
    base = torch.full(points.shape[-1:], 6364136223846793005, dtype=torch.int64, device=points.device)
    return (points.int() * (base.cumprod(0) >> 32).int()).sum(-1, dtype=torch.int32)


def with_context(f: Callable[..., Tensor], context: tuple[Tensor, ...], batch: torch.Size) -> Rowwise:
    """f(z, *context) with each row's context, tensors [*B, ...]."""
    if not context:
        return lambda z, row, attached: f(z)
    rows = tuple(x.flatten(0, len(batch) - 1) if batch else x.unsqueeze(0) for x in context)
    return lambda z, row, attached: f(z, *(x.index_select(0, row) for x in rows))


class Asked(NamedTuple):
    """The queries that f is asked, N of them."""

    z: Tensor
    """[N, ...], or longer: only its first N rows count."""
    row: Tensor
    """[N], or longer: their batch rows."""
    place: Tensor | None
    """[M B]: the place of each query's value among them; None if a query that is not evaluated takes the value of its
    row's first query."""
    total: int
    """N."""
    live: int
    """How many of them are live; they come first."""
    finite: bool = False
    """Whether all logits are known to be finite."""
    number: Tensor | None = None
    """[N]: which of all queries they are, if there is no `place`."""
    packed: kernels.Packed | None = None
    """All this, if a kernel found it."""


def ask(queries: Queries, logits: Tensor, evaluation: Evaluation) -> Asked:
    """What f is asked: the distinct queries (packed), or all of them with static shapes (dense)."""
    return _all(queries) if evaluation == "dense" else distinct(queries, logits)


def evaluate(
    f: Rowwise,
    queries: Queries,
    asked: Asked,
    *,
    evaluation: Evaluation,
    max_rows: int | None,
    graph: Graph,
) -> Values:
    """f at every query [M, *B], from its values at those that are asked."""
    same_as, lives, total = queries.same_as, queries.weight.shape[0], asked.total
    whole = graph == "all" or (graph == "live" and lives == same_as.shape[0])
    parts = [(total, graph != "none")]
    if graph == "live" and not whole:
        parts = [(asked.live, True), (total - asked.live, False)]
    most = max_rows or total
    calls = [(min(size - start, most), attached) for size, attached in parts for start in range(0, size, most)]
    sizes = [size for size, _ in calls]
    z, row = (x.split_with_sizes([*sizes, x.shape[0] - total]) for x in (asked.z, asked.row))
    values = []
    for i, (_, attached) in enumerate(calls):
        with nullcontext() if attached else torch.no_grad():
            values.append(_call(f, z[i], row[i], attached, last=i == len(calls) - 1))
    everything = values if whole else [_detached(value) for value in values]
    if evaluation == "dense":
        place = asked.place
        of_queries = _first_for_rest(everything, same_as) if place is None else _look_up(everything, place, same_as)
    else:
        of_queries = _of_queries(everything, asked, same_as)
    if whole or graph == "none":
        live = of_queries if lives == same_as.shape[0] else of_queries[:lives]
        return Values(live, of_queries if graph == "all" else _detached(of_queries))
    batch = same_as.shape[1:]
    live = _join([value for value, (_, attached) in zip(values, calls, strict=True) if attached])
    if lives > 1 and asked.place is not None:
        live = live.index_select(0, asked.place[: lives * batch.numel()])
    return Values(live.view(lives, *batch), of_queries)


def _detached(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _of_queries(values: list[Tensor], asked: Asked, same_as: Tensor) -> Tensor:
    """f at all queries [M, *B] from its values at the distinct ones, which must be finite."""
    alike = len(values) <= 2 and values[0].dtype == values[-1].dtype and not values[0].requires_grad
    if asked.packed is not None and alike and kernels.eager_on_gpu(values[0]):
        of_queries, finite = kernels.spread(values, asked.packed, same_as.shape)
        if not finite:
            _check_finite(_join(values), asked)
        return of_queries
    every, count, rows = _join(values), same_as.shape[0], same_as.shape[1:].numel()
    _check_finite(every.detach(), asked)
    if asked.place is not None:
        return _look_up([every], asked.place, same_as)
    assert asked.number is not None
    first = every[:rows].expand(count, rows).contiguous()  # faster than repeat
    return first.view(-1).scatter_(0, asked.number, every).view(same_as.shape)


def _look_up(values: list[Tensor], place: Tensor, same_as: Tensor) -> Tensor:
    return _join(values).index_select(0, place).view(same_as.shape)


def _all(queries: Queries) -> Asked:
    """All queries, at points that their values may be taken from."""
    batch, live = queries.same_as.ndim - 1, queries.weight.shape[0] * queries.same_as.shape[1:].numel()
    if not queries.first_for_rest:
        place, z = _flat_index(queries.same_as), queries.points.flatten(0, batch)
        z = z if queries.equal else z.index_select(0, place)
        return Asked(z, _rows_of(place, queries), place, z.shape[0], live)
    own = (queries.same_as > 0).view(*queries.same_as.shape, *(1,) * (queries.points.ndim - batch - 1))
    z = torch.where(own, queries.points, queries.points[:1]).flatten(0, batch)
    number = torch.arange(z.shape[0], device=z.device)
    return Asked(z, _rows_of(number, queries), None, z.shape[0], live)


def reads_logits_later(logits: object) -> bool:
    """Whether `distinct` is likely to find out if these logits are finite: one synchronisation less."""
    return isinstance(logits, Tensor) and logits.numel() <= SMALL and kernels.eager_on_gpu(logits)


def distinct(queries: Queries, logits: Tensor) -> Asked:
    """The distinct queries alone; the number of them depends on the data."""
    packed = queries.packed or _packed(queries, logits)
    if packed is not None:
        return Asked(packed.z, packed.row, packed.place, *packed.read(), packed=packed)
    same_as, lives = queries.same_as, queries.weight.shape[0]
    points, live = queries.points.flatten(0, same_as.ndim - 1), lives * same_as.shape[1:].numel()
    if queries.first_for_rest:
        number, place = speakers(same_as).flatten().nonzero().squeeze(-1), None
    else:
        place = _flat_index(same_as)
        speaks = place == torch.arange(points.shape[0], device=points.device)
        number = speaks.nonzero().squeeze(-1)
        place = speaks.cumsum(0, dtype=torch.int32).sub_(1).index_select(0, place)
    if 1 < lives < same_as.shape[0]:  # a row's only live query is distinct
        live = int((number < live).sum())
    z = points.squeeze(-1).index_select(0, number)  # a CPU selects numbers faster than rows of one
    z, row = z.view(-1, *points.shape[1:]), _rows_of(number, queries)
    return Asked(z, row, place, z.shape[0], live, number=number if place is None else None)


def _packed(queries: Queries, logits: Tensor) -> kernels.Packed | None:
    """The distinct among few queries in eager mode on a GPU."""
    points, same_as = queries.points, queries.same_as
    small = points.numel() <= SMALL and logits.numel() <= SMALL
    if points.dtype != torch.int64 or not small or not kernels.eager_on_gpu(points):
        return None
    live = queries.weight.shape[0] * same_as.shape[1:].numel()
    return kernels.pack(points.flatten(0, same_as.ndim - 1), same_as, live, logits)


def _rows_of(number: Tensor, queries: Queries) -> Tensor:
    """The batch rows of flat queries."""
    rows = queries.same_as.shape[1:].numel()
    return number % rows if rows > 1 else number.new_zeros(1).expand(number.shape)


def _first_for_rest(values: list[Tensor], same_as: Tensor) -> Tensor:
    """f at all queries [M, *B] from values at all of them, where those that do not speak take the first one's."""
    rows = same_as.shape[1:].numel()
    first, rest = (values[0], values[1:]) if values[0].shape[0] == rows else (None, values)
    rest = _join(rest) if rest else None
    if first is None or rest is None:
        every = (first if rest is None else rest).view(same_as.shape)  # pyright: ignore[reportOptionalMemberAccess]
        return torch.where(same_as > 0, every, every[:1])
    # pad and where, unlike cat, are compiled without memory of their own
    every = F.pad(rest.view(-1, *same_as.shape[1:]), (*(0, 0) * (same_as.ndim - 1), 1, 0))
    return torch.where(same_as > 0, every, first.view(1, *same_as.shape[1:]))


def _join(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


def _call(f: Rowwise, z: Tensor, row: Tensor, attached: bool, last: bool) -> Tensor:
    """f at z, promoted to at least float32."""
    value = f(z, row, attached)
    _check(value, z)
    # copy: a simulator may reuse its output buffer
    return value.to(working_dtype(value.dtype), copy=not (last or value.requires_grad))


def _check(value: Tensor, z: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"f must return a tensor [N], one value per row of z, but returned {type(value).__name__}.")
    if value.shape != z.shape[:1]:
        raise ValueError(
            f"f must return one value per row of z: shape [{z.shape[0]}] for z of shape {list(z.shape)}, "
            f"but returned shape {list(value.shape)}."
        )
    if not value.is_floating_point():
        raise TypeError(f"f must return a floating type, but returned {value.dtype}; convert it with .float().")
    if value.device != z.device:
        raise ValueError(f"f must return its values on {z.device}, where z lies, but returned them on {value.device}.")


def _check_finite(values: Tensor, asked: Asked) -> None:
    if math.isfinite(values.sum()):  # one kernel; if the sum overflows, check again
        return
    bad = ~values.isfinite()
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        at = f"z = {asked.z[first].tolist()}" if not asked.z.is_floating_point() else "a relaxed z"
        raise NotFiniteError(
            f"f returned {float(values[first])} for {at} in row {int(asked.row[first])} of the batch; f must be finite "
            "wherever a category is not masked."
        )
