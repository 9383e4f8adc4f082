"""Call f at the points that a question asks for: gather the context's rows, split into
chunks. The only caller of f.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from arsm.checks import describe
from arsm.noise import working_dtype
from arsm.question import Asked, Question, Values

Rowwise = Callable[[Tensor, Tensor, bool], Tensor]
"""f as `evaluate` calls it: z [N, ...], the batch row [N] of each, whether their graph
is kept -> [N].
"""


def with_context(
    f: Callable[..., Tensor], context: tuple[Tensor, ...], batch: torch.Size
) -> Rowwise:
    """f(z, *context) with each row's context, tensors [*B, ...]."""
    # one leading dimension, so that a query finds its context by its flat row
    rows = [x.flatten(0, len(batch) - 1) if batch else x.unsqueeze(0) for x in context]

    def call(z: Tensor, row: Tensor, attached: bool) -> Tensor:
        own = [x.index_select(0, row) for x in rows]
        try:
            return f(z, *own)
        except Exception as error:
            # f's own error stays as it is; the shapes that it was called with are often the cause
            error.add_note(_how_called(z, own, batch))
            raise

    return call


def _how_called(z: Tensor, context: list[Tensor], batch: torch.Size) -> str:
    """A note for an error inside f."""
    given = ", ".join([f"z {describe(z)}", *map(describe, context)])
    note = f"arsm called f({given}): {len(z)} points to evaluate, which is not the batch size."
    variables = z.shape[1]
    # a context of K rows was probably meant to have one row for each of the K variables
    if len(batch) == 0 and variables > 1 and any(x.shape[1:2] == (variables,) for x in context):
        note += (
            f" The logits are {variables} variables of one row; for {variables} separate choices "
            "use logits.unsqueeze(1)."
        )
    return note


def evaluate(
    f: Rowwise,
    question: Question,
    asked: Asked,
    *,
    max_rows: int | None = None,
    frozen: bool = False,
) -> Values:
    """f at every query of a question, in calls of at most max_rows rows.

    The live queries' values keep f's graph, and all of them where the estimator needs
    f's gradient; none if f is `frozen`.
    """
    attached, others = _graphs(question, asked, frozen)

    # no call mixes queries with and without a graph: those without one cost no memory afterwards
    most = max_rows or asked.z.shape[0]
    sizes = _chunks(attached, most)
    live_calls = len(sizes)
    sizes += _chunks(others, most)

    z = asked.z.split_with_sizes(sizes)
    row = asked.row.split_with_sizes(sizes)
    values = []
    for i in range(len(sizes)):
        keep = i < live_calls
        with nullcontext() if keep else torch.no_grad():
            values.append(_call(f, z[i], row[i], keep, last=i == len(sizes) - 1))

    # where all calls are of one kind, `spread` need not tell the live ones apart
    mixed = attached > 0 and others > 0
    return question.spread(asked, values, live_calls if mixed else None)


def _graphs(question: Question, asked: Asked, frozen: bool) -> tuple[int, int]:
    """The numbers of asked queries that are evaluated with f's graph, and without it."""
    total = asked.z.shape[0]
    if frozen:
        return 0, total
    # an estimator that differentiates f needs the graph of every query
    all_live = question.queries.weight.shape[0] == question.queries.same_as.shape[0]
    if question.estimator.needs_gradient or all_live:
        return total, 0
    return asked.live, total - asked.live


def _chunks(size: int, most: int) -> list[int]:
    """Sizes of at most `most` that add up to `size`; the last may be smaller."""
    return [min(size - start, most) for start in range(0, size, most)]


def _call(f: Rowwise, z: Tensor, row: Tensor, attached: bool, last: bool) -> Tensor:
    """f at z, promoted to at least float32."""
    value = f(z, row, attached)
    _check(value, z)
    # copy all but the last: a simulator may write its next values into the same buffer
    return value.to(working_dtype(value.dtype), copy=not (last or value.requires_grad))


def _check(value: Tensor, z: Tensor) -> None:
    """Require floating values [N] for z [N, ...], on its device."""
    if not isinstance(value, Tensor):
        raise TypeError(
            "f must return a tensor [N], one value per row of z, but returned "
            f"{type(value).__name__}."
        )
    if value.shape != z.shape[:1]:
        mend = ""
        # a value per variable: the variables were meant as rows
        if value.shape == z.shape[:2] and z.shape[1] > 1:
            mend = f"; for {z.shape[1]} separate choices use logits.unsqueeze(-2)"
        raise ValueError(
            f"f must return one value per row of z: shape [{z.shape[0]}] for z of shape "
            f"{list(z.shape)}, but returned shape {list(value.shape)}{mend}."
        )
    if not value.is_floating_point():
        raise TypeError(
            f"f must return a floating type, but returned {value.dtype}; convert it with .float()."
        )
    if value.device != z.device:
        raise ValueError(
            f"f must return its values on {z.device}, where z lies, but returned them on "
            f"{value.device}."
        )
