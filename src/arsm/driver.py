"""`estimate`: from logits and f to a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import register_pytree_node

from arsm.batch_norm import watch_batch_norm
from arsm.brief import of_parts
from arsm.capabilities import check_estimator, require
from arsm.checks import (
    check_context,
    check_function,
    check_logits,
    is_whole,
    legal_rows,
    warn_of_single_category,
)
from arsm.distinct import speakers
from arsm.evaluate import Rowwise, evaluate, with_context
from arsm.given_noise import check_noise
from arsm.options import suggests
from arsm.question import Evaluation, attach, pose
from arsm.types import Estimate, Estimator

MOST_QUERIES = 1 << 20
"""Evaluations of f for one row, of several variables, above which an estimate is
refused before anything is drawn.
"""


@suggests("arsm.estimate")
def estimate(
    estimator: Estimator,
    logits: Tensor,
    f: Callable[..., Tensor],
    *context: Tensor,
    noise: Any = None,
    generator: torch.Generator | None = None,
    evaluation: Evaluation = "packed",
    max_rows: int | None = 1024,
    frozen: bool = False,
) -> Estimate:
    """Estimate E[f(z)] with z ~ Cat(softmax(logits)), and its gradient.

    Args:
        estimator: such as `arsm.ARSM()`.
        logits: [*B, K, C], K variables of C categories per batch row; a bare [C] is one
            variable. -inf masks a category.
        f: `f(z, *context) -> [N]`, row by row. z is int64 [N, K] with values 0..C-1, or
            floating [N, K, C] from an estimator that `needs_gradient`.
        context: tensors [*B, ...]; f receives the rows that belong to each z.
        noise: drawn by `estimator.noise(logits)` for logits [*B, K, C]; the estimate is
            then deterministic.
        generator: source of the noise.
        evaluation: "packed" evaluates each distinct query once; "dense" evaluates all
            of them with static shapes, for torch.compile, CUDA graphs and vmap, and
            leaves the checks to `info["finite"]`.
        max_rows: maximum rows per call of f, None for no limit.
        frozen: f has no trainable parameters: evaluate everything without grad. Not for
            an estimator that `needs_gradient`.

    Returns:
        An `Estimate`; `estimate(...).value.sum().backward()` puts the gradient estimate
        into the logits and the ordinary gradient into f's parameters.
    """
    check_estimator(estimator)
    check_evaluation(evaluation, max_rows)
    masked = check_logits(logits, read=evaluation == "packed")
    if frozen:
        require(estimator, "a frozen f", "values_only", instead="leave frozen out")
    batch = logits.shape[:-2]
    categories = logits.shape[-1]
    if categories == 1:
        warn_of_single_category(logits, "arsm.estimate")
    # counting an estimator's queries takes time, so only where all pairs would be too many
    pairs = categories * (categories - 1) // 2
    if evaluation == "packed" and logits.ndim > 1 and pairs > MOST_QUERIES:
        check_affordable(estimator, logits)
    check_context(context, batch, logits.device)
    watched = []
    check_function(f, len(context), "arsm.estimate(estimator, logits, f, *context)")
    # looks at f as a Python object, which a compiler does not trace
    if not torch.compiler.is_compiling():
        watched = watch_batch_norm(f, "arsm.estimate")
    try:
        return estimate_rows(
            estimator,
            logits,
            with_context(f, context, batch),
            noise=noise,
            generator=generator,
            evaluation=evaluation,
            max_rows=max_rows,
            frozen=frozen,
            masked=masked,
        )
    finally:
        for handle in watched:
            handle.remove()


def check_affordable(estimator: Estimator, logits: Tensor) -> None:
    """Refuse what would take hours: logits [*B, K, C] of several variables with very
    many pairs of categories.
    """
    if logits.shape[-2] > 1 and (most := estimator.most_queries(logits.detach())) > MOST_QUERIES:
        raise ValueError(
            f"{type(estimator).__name__} may need {most:,} evaluations of f for one row of logits "
            f"{list(logits.shape)}; use RLOO(n), which needs n, or ARSM(references=J), which needs "
            "J C + 1."
        )


def check_evaluation(evaluation: Evaluation, max_rows: int | None) -> None:
    """Require a known evaluation, and a positive max_rows."""
    if evaluation not in ("packed", "dense"):
        raise ValueError(f'evaluation must be "packed" or "dense", but is {evaluation!r}.')
    if max_rows is not None and (not is_whole(max_rows) or max_rows < 1):
        raise ValueError(
            "max_rows must be a whole number of at least 1, or None for no limit, but is "
            f"{max_rows!r}."
        )


def estimate_rows(
    estimator: Estimator,
    logits: Tensor,
    f: Rowwise,
    *,
    noise: Any = None,
    generator: torch.Generator | None = None,
    evaluation: Evaluation = "packed",
    max_rows: int | None = 1024,
    frozen: bool = False,
    shared: bool = True,
    masked: bool = True,
) -> Estimate:
    """`estimate` for an f that also gets the batch rows of its z and whether their graph is kept.

    Without `shared`, equal queries are evaluated separately. If `masked` is False, all
    logits are known to be finite.
    """
    given = logits
    bare = logits.ndim == 1
    if bare:
        logits = logits.unsqueeze(0)

    # ask
    if noise is not None:
        check_noise(estimator, logits, noise)
    question = pose(estimator, logits, noise=noise, generator=generator, shared=shared)
    asked = question.asked(evaluation)

    # evaluate
    values = evaluate(f, question, asked, max_rows=max_rows, frozen=frozen)
    del asked  # the credit may need its memory

    # tell
    credit = question.credit(values.all, masked=masked)
    value = question.value(values.live)
    gradient = credit.gradient
    if gradient is None:
        if evaluation == "packed":
            _require_slope(estimator, value, question.queries.points)
    else:
        # the graph of a learning estimator is for its own loss, and not for the model's
        gradient = gradient.detach() if credit.learns else gradient
        value = attach(value, logits, gradient)
        gradient = gradient.to(torch.promote_types(values.all.dtype, logits.dtype))
        gradient = gradient.squeeze(0) if bare else gradient
    info = Info(question.queries.same_as, values.all.detach(), logits.detach())
    return Estimate(value, question.queries.z, gradient, info, credit.loss(), given)


def _require_slope(estimator: Estimator, value: Tensor, points: Tensor) -> None:
    """Require that f is differentiable in z: else the logits would silently get no gradient."""
    if not _reaches(value, points):
        raise ValueError(
            f"{type(estimator).__name__} differentiates f in z, but autograd finds no way from f's "
            "values to z; make f differentiable in one-hot z, or choose an estimator that only "
            "evaluates f, such as RLOO."
        )


class Info(Mapping[str, Tensor]):
    """Diagnostics, computed on access; to PyTorch's transforms, a container of the
    tensors that they come from.
    """

    def __init__(self, same_as: Tensor, values: Tensor, logits: Tensor) -> None:
        self.same_as = same_as
        self.values_of_f = values
        self.logits = logits

    def __getitem__(self, name: str) -> Tensor:
        # on access only: most steps of a training never look, and each costs a kernel or two
        if name == "asked":
            return torch.full((), self.same_as.shape[0], device=self.logits.device)
        if name == "distinct":
            return speakers(self.same_as).sum(0)
        if name == "finite":
            return self.values_of_f.isfinite().all(0) & legal_rows(self.logits).all(-1)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("asked", "distinct", "finite"))

    def __len__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return of_parts(self, **self)


register_pytree_node(
    Info,
    lambda info: ([info.same_as, info.values_of_f, info.logits], None),
    lambda parts, _: Info(*parts),
)


def _reaches(value: Tensor, source: Tensor) -> bool:
    """Whether value's graph leads back to source; True if no graphs are recorded."""
    if not source.requires_grad or not torch.is_grad_enabled():
        return True
    for node in graph_nodes(value):
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
    return False


def graph_nodes(value: Tensor) -> Iterator[Node]:
    """All nodes of value's autograd graph; a leaf's node has the leaf as `variable`."""
    seen = set()
    pending = [value.grad_fn]
    # a loop: the graphs of recurrent models are deeper than Python's stack
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)
