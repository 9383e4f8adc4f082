"""One question and one credit: the head and the tail of every estimate.

    question = pose(estimator, logits)              # noise -> queries
    asked = question.asked("packed")                # the points at which f must be evaluated
    values = question.spread(asked, [f(asked.z)])   # f at every query
    credit = question.credit(values.all)            # the gradient estimate [*B, K, C]
    value = attach(question.value(values.live), logits, credit.gradient)

A caller only supplies how to go on from a query: `arsm.estimate` calls f. There are
three ways to ask:

- `asked` and `spread`: all queries, for a caller that has not evaluated anything yet.
- `others` and `spread_others`: all but the true sample, for a caller that has already
  played it (an episode, a pass through a module).
- `asked_queries` and `spread_queries`: whole queries, for a caller that can only
  evaluate a query for all rows at once.

`Question.credit` is the only place that calls `Estimator.tell`, and `attach` the only
autograd function that gives logits a credit.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from arsm.checks import NotFiniteError, check_generator
from arsm.distinct import speakers
from arsm.kernels.two_ways import join, pick, take
from arsm.types import Estimator, Queries

Evaluation = Literal["packed", "dense"]


class Values(NamedTuple):
    """f at the queries."""

    live: Tensor
    """[L, *B], with f's graph where it is kept."""
    all: Tensor
    """[M, *B], detached unless the estimator needs f's gradient."""


class Distinct(NamedTuple):
    """The distinct queries, N of them; the number depends on the data."""

    z: Tensor
    """[N, ...]."""
    row: Tensor
    """[N]: their batch rows."""
    live: int
    """Number of live ones among them, which come first."""
    number: Tensor
    """[N]: which of all M B queries they are."""


class Every(NamedTuple):
    """All N = M B queries, in static shapes. A query that shares a value stands at the
    point of the one that has it.
    """

    z: Tensor
    """[N, ...]."""
    row: Tensor
    """[N]: their batch rows."""
    live: int
    """Number of live ones among them, which come first."""


Asked = Distinct | Every


class Others(NamedTuple):
    """R queries that are left to evaluate where f at the true sample is known, ordered by row."""

    row: Tensor
    """[R] int64: the (flat) batch row of each."""
    query: Tensor
    """[R] int64: which query of that row."""
    point: Tensor
    """[R, K] int64."""


class Credit(NamedTuple):
    """An estimate of dE[f]/dlogits."""

    gradient: Tensor | None
    """[*B, K, C]; None where autograd through the points is the estimate. It has a
    graph if the estimator learns.
    """
    learns: bool
    """Whether the estimator has learned parts."""

    def loss(self) -> Tensor | None:
        """[]: the gradient's squared norm, averaged over the batch, which learned parts
        minimise; None without any.
        """
        if self.gradient is None or not self.learns:
            return None
        return self.gradient.square().sum((-2, -1)).mean()


@dataclass(frozen=True, eq=False)
class Question:
    """An estimator's queries at some logits [*B, K, C]."""

    estimator: Estimator
    logits: Tensor
    queries: Queries
    given: Tensor | None = None
    """[*B, K]: the true sample, where the caller drew it."""

    @property
    def true(self) -> Tensor:
        """[*B, K]: the true sample, the first where there are several."""
        batch = self.logits.shape[:-2]
        return self.queries.z.reshape(*batch, -1, self.queries.z.shape[-1])[..., 0, :]

    # ---------------------------------------------------------------- what must be evaluated

    @overload
    def asked(self, evaluation: Literal["packed"]) -> Distinct: ...
    @overload
    def asked(self, evaluation: Literal["dense"]) -> Every: ...
    @overload
    def asked(self, evaluation: Evaluation) -> Asked: ...
    def asked(self, evaluation: Evaluation) -> Asked:
        """The points to evaluate f at, the live queries first: the distinct ones
        (packed), or all of them (dense).

        Packed, their number depends on the data; dense, all shapes are static. The
        result is not kept here, so that a caller can free its memory before `credit`.
        """
        return _every(self.queries) if evaluation == "dense" else _distinct(self.queries)

    def asked_queries(self) -> list[int]:
        """Numbers of the queries that at least one row needs; 0 is always among them,
        and comes first.
        """
        same_as = self.queries.same_as
        needed = speakers(same_as).reshape(same_as.shape[0], -1).any(1).tolist()
        # query 0 is the true sample, whose pass a caller makes in any case
        needed[0] = True
        return [number for number, is_needed in enumerate(needed) if is_needed]

    def others(self) -> Others:
        """The queries that are left to evaluate where f at the true sample is known.

        Their number depends on the data, so this cannot be called inside vmap.
        """
        same_as = self.queries.same_as
        points = self.queries.points
        wanted = speakers(same_as)
        if self.given is None:
            # the true sample need not be the first query: `Exact` enumerates
            wanted = wanted & (points != self.true).any(-1)
        else:
            if not torch.equal(points[0], self.given):
                raise ValueError(
                    f"{self.estimator} did not ask for the given action first; its noise(logits, "
                    "generator, z) must make z the first query."
                )
            wanted[0] = False
        # transposed, so that they are found ordered by row
        row, query = wanted.reshape(same_as.shape[0], -1).T.nonzero().unbind(-1)
        flat = points.reshape(points.shape[0], -1, points.shape[-1])
        return Others(row, query, flat[query, row])

    # ---------------------------------------------------------------- f at every query

    def spread(self, asked: Asked, parts: list[Tensor], live_parts: int | None = None) -> Values:
        """f at every query, from its values at those that were asked.

        Args:
            asked: what `asked` returned.
            parts: f's values there, in consecutive parts.
            live_parts: how many of the parts hold the live queries, if only these parts
                have a graph; None if all parts have one, or none has.
        """
        lives = self.queries.weight.shape[0]
        if live_parts is None:
            every = self._spread(asked, parts)
            live = every[:lives]
            return Values(live, every if self.estimator.needs_gradient else _detached(every))
        # twice, with and without the graph: joined with the others, it would reach all of them
        every = self._spread(asked, [_detached(part) for part in parts])
        live = self._spread_live(asked, parts[:live_parts])
        return Values(live, every)

    def _spread(self, asked: Asked, parts: list[Tensor]) -> Tensor:
        """f at every query [M, *B], from its values [N] at those that were asked, in parts."""
        if isinstance(asked, Every):
            return take(parts, self.queries.same_as)
        values = join(parts)
        # reading the values would synchronise, which dense evaluation must not
        _check_finite(values.detach(), asked)
        return _take(asked, values, self.queries.same_as)

    def _spread_live(self, asked: Asked, parts: list[Tensor]) -> Tensor:
        """f at the live queries [L, *B], from its values at those of them that were asked."""
        same_as = self.queries.same_as[: self.queries.weight.shape[0]]
        if len(same_as) == 1:  # a row's only live query is asked
            return join(parts).view(same_as.shape)
        if isinstance(asked, Every):
            return take(parts, same_as)
        return _take(asked, join(parts), same_as)

    def spread_queries(self, queries: list[int], values: Tensor) -> Values:
        """f at every query, from its values [n, *B] at those of `asked_queries`."""
        same_as = self.queries.same_as
        lives = self.queries.weight.shape[0]
        place = torch.zeros(same_as.shape[0], dtype=torch.int64, device=same_as.device)
        place[queries] = torch.arange(len(queries), device=same_as.device)
        every = values.gather(0, place[same_as])
        return Values(every[:lives], _detached(every))

    def spread_others(
        self, others: Others, values: Tensor, true: Tensor, rest: float | None = None
    ) -> Tensor:
        """f at every query [M, *B], from its values [R] at the others and [*B] at the true sample.

        A caller that did not evaluate all of the others gives only those that it did.
        The rest get the value of the true sample, and their rows must have the weight 0
        in `credit`; or, where the true sample is given, the value `rest`.
        """
        same_as = self.queries.same_as.reshape(self.queries.same_as.shape[0], -1)
        every = true.reshape(-1).expand(same_as.shape)
        if rest is not None:
            # a given true sample is the first query, and keeps its value
            first = torch.arange(same_as.shape[0], device=true.device).unsqueeze(-1) == 0
            every = torch.where(first, every, rest)
        every = every.index_put((others.query, others.row), values.to(true.dtype))
        return every.gather(0, same_as).view(self.queries.same_as.shape)

    # ---------------------------------------------------------------- the credit

    def value(self, live: Tensor) -> Tensor:
        """The value [*B] from f at the live queries [L, *B]."""
        return self.estimator.value(self.queries, live)

    def shares(self) -> Tensor:
        """The share of every query in the value, [M, *B] float64: those that share another's
        value add to its share.
        """
        same_as = self.queries.same_as
        lives = self.queries.weight.shape[0]
        weight = self.queries.weight.double()
        weight = weight.view(*weight.shape, *(1,) * (same_as.ndim - weight.ndim))
        none = torch.zeros(same_as.shape, dtype=torch.float64, device=same_as.device)
        return none.scatter_add(0, same_as[:lives], weight.expand(lives, *same_as.shape[1:]))

    def credit(
        self, values: Tensor, weight: Tensor | None = None, *, masked: bool = True
    ) -> Credit:
        """Turn f's values [M, *B] into the gradient.

        Args:
            values: f at every query.
            weight: [*B], factors by which the rows' gradients are multiplied.
            masked: False if no category is masked, which saves a kernel.
        """
        # autocast is meant for f: differences and linear solves need full precision
        with full_precision(self.logits.device.type):
            gradient = self.estimator.tell(self.logits, self.queries, values)
            if gradient is None:
                return Credit(None, False)
            if weight is not None:
                gradient = gradient * weight[..., None, None].to(gradient.dtype)
        if masked:
            # an estimate has mean 0 there, but single ones differ from 0 or are NaN
            gradient = gradient.masked_fill(self.logits == -torch.inf, 0)
        # inside vmap, requires_grad is always False
        return Credit(gradient, gradient.requires_grad or len(self.estimator.learned) > 0)


def pose(
    estimator: Estimator,
    logits: Tensor,
    *,
    z: Tensor | None = None,
    noise: Any = None,
    generator: torch.Generator | None = None,
    shared: bool = True,
) -> Question:
    """Draw the noise and find the queries of an estimator at logits [*B, K, C].

    Args:
        estimator: any.
        logits: [*B, K, C].
        z: [*B, K], the true sample where it was drawn elsewhere: the noise is drawn
            given it.
        noise: what `estimator.noise` drew for these logits (and z); drawn here if None.
        generator: source of the noise.
        shared: whether equal queries of a row share one evaluation.
    """
    if generator is not None:
        check_generator(generator, logits)
    if noise is None and z is None:
        noise = estimator.noise(logits, generator)
    elif noise is None:
        noise = estimator.noise(logits, generator, z)
    queries = estimator.ask(logits, noise)
    if not shared:
        queries = _unshared(queries)
    return Question(estimator, logits, queries, z)


def _unshared(queries: Queries) -> Queries:
    """Evaluate all queries separately, except those that must not be evaluated at their
    own point.
    """
    points = queries.points
    same_as = queries.same_as
    index = same_as.view(*same_as.shape, *(1,) * (points.ndim - same_as.ndim)).expand_as(points)
    # where a query points to another point, f must not be evaluated at its own
    equal = (points.gather(0, index) == points).flatten(same_as.ndim).all(-1)
    number = torch.arange(same_as.shape[0], device=same_as.device)
    number = number.view(-1, *(1,) * (same_as.ndim - 1))
    return replace(queries, same_as=torch.where(equal, number, same_as))


def full_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off."""
    # entering torch.autocast takes longer than asking whether it is needed
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def attach(value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
    """value [*B], whose derivative in the logits is gradient [*B, K, C].

    The value may come from anywhere, and one value may carry several credits. Where a
    logit is not finite, the gradient must be 0: inside vmap a logit is subtracted from
    itself, which would make it NaN.
    """
    if not torch._C._are_functorch_transforms_active():
        return _Attach.apply(value, logits, gradient)  # pyright: ignore[reportReturnType]
    # Torch.compile traces no autograd function inside vmap. Where the gradient is 0, the logit may
    # be anything: -inf if it is masked, NaN if nobody chose there.
    finite = logits.masked_fill(gradient == 0, 0)
    return value + ((finite - finite.detach()) * gradient).sum((-2, -1)).to(value.dtype)


def attach_paths(value: Tensor, estimator: Estimator, values: Tensor, log_q: Tensor) -> Tensor:
    """value [*B], whose derivative is sum_i w_i d ln q(path i), the credit of an
    estimator with `paths`.

    Args:
        value: [*B].
        estimator: gives the weights w_i; one without `weighs_energy`.
        values: f at the n paths, [n, *B].
        log_q: their ln q, [n, *B], with the graph.
    """
    with full_precision(value.device.type):
        scored = (estimator.weights(values.detach()) * log_q).sum(0)
    # 0 in value, with the gradient of the scores
    return value + (scored - scored.detach()).to(value.dtype)


class _Attach(torch.autograd.Function):
    """value, with a gradient for the logits."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient  # no graph leads to it

        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        of_value = grads[0]
        # autograd converts it to the logits' dtype
        of_logits = of_value.view(*of_value.shape, 1, 1) * ctx.gradient
        return of_value, of_logits, None


# ---------------------------------------------------------------- what is asked


def _every(queries: Queries) -> Every:
    """All queries; one that shares a value is evaluated too, but at the point of the
    one that has it.
    """
    same_as = queries.same_as
    points = queries.points
    # its own point may be one where f must not be evaluated, such as a masked category
    of_first = same_as.view(*same_as.shape, *(1,) * (points.ndim - same_as.ndim))
    z = pick(points, of_first.expand_as(points)).flatten(0, same_as.ndim - 1)
    number = torch.arange(z.shape[0], device=z.device)
    live = queries.weight.shape[0] * same_as.shape[1:].numel()
    return Every(z, _rows_of(number, queries), live)


def _distinct(queries: Queries) -> Distinct:
    """The distinct queries."""
    same_as = queries.same_as
    number = speakers(same_as).flatten().nonzero().squeeze(-1)
    points = queries.points.flatten(0, same_as.ndim - 1)
    z = points.squeeze(-1).index_select(0, number)  # a CPU selects numbers faster than rows of one
    z = z.view(-1, *points.shape[1:])
    return Distinct(z, _rows_of(number, queries), _live_among(number, queries), number)


def _live_among(number: Tensor, queries: Queries) -> int:
    """The number of live ones among the distinct queries."""
    # the first two cases spare a synchronisation with the device
    lives = queries.weight.shape[0]
    if lives == queries.same_as.shape[0]:
        return number.shape[0]
    live = lives * queries.same_as.shape[1:].numel()
    if lives == 1:  # a row's only live query is distinct
        return live
    return int((number < live).sum())


def _rows_of(number: Tensor, queries: Queries) -> Tensor:
    """The batch rows of flat queries."""
    rows = queries.same_as.shape[1:].numel()
    # queries are numbered [M, *B], so that the row is the remainder
    return number % rows if rows > 1 else number.new_zeros(1).expand(number.shape)


# ---------------------------------------------------------------- values of what was asked


def _take(asked: Distinct, values: Tensor, same_as: Tensor) -> Tensor:
    """Each query takes the value of the one that it shares with: values of all that
    were asked, or of the live ones, and their same_as [M, *B] -> [M, *B].
    """
    # nobody takes the value of a query that was not asked
    every = values.new_zeros(same_as.numel())
    every.scatter_(0, asked.number[: values.shape[0]], values)
    return every.view(same_as.shape).gather(0, same_as)


def _check_finite(values: Tensor, asked: Distinct) -> None:
    """Refuse values [N] that are not finite, naming the first."""
    if math.isfinite(values.sum()):  # one kernel; if the sum overflows, check again
        return
    bad = ~values.isfinite()
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        # a relaxed point would fill the page
        at = "a relaxed z" if asked.z.is_floating_point() else f"z = {asked.z[first].tolist()}"
        raise NotFiniteError(
            f"f returned {float(values[first])} for {at} in row {int(asked.row[first])} of the "
            "batch; f must be finite wherever a category is not masked."
        )


def _detached(x: Tensor) -> Tensor:
    # always: inside vmap, requires_grad is False for tensors with a graph too
    return x.detach()
