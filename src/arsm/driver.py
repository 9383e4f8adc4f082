"""`estimate`: from logits and f to a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import register_pytree_node

from arsm.checks import check_context, check_estimator, check_logits, check_noise, is_whole, legal_rows
from arsm.evaluate import Evaluation, Rowwise, ask, evaluate, reads_logits_later, speakers, with_context
from arsm.types import Estimate, Estimator, Queries


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
        logits: [*B, K, C], K variables of C categories per batch row; a bare [C] is one variable. -inf masks a
            category.
        f: `f(z, *context) -> [N]`, row by row. z is int64 [N, K] with values 0..C-1, or floating [N, K, C] from an
            estimator that `needs_gradient`.
        context: tensors [*B, ...]; f receives the rows that belong to each z.
        noise: drawn by `estimator.noise(logits)` for logits [*B, K, C]; the estimate is then deterministic.
        generator: source of the noise.
        evaluation: "packed" evaluates each distinct query once; "dense" evaluates all of them with static
            shapes, for torch.compile, CUDA graphs and vmap, and leaves the checks to `info["finite"]`.
        max_rows: maximum rows per call of f, None for no limit.
        frozen: f has no trainable parameters: evaluate everything without grad. Not for an estimator that
            `needs_gradient`.

    Returns:
        An `Estimate`; `estimate(...).value.sum().backward()` puts the gradient estimate into the logits and the
        ordinary gradient into f's parameters.
    """
    check_estimator(estimator)
    check_evaluation(evaluation, max_rows)
    later = evaluation == "packed" and reads_logits_later(logits)
    masked = check_logits(logits, read=evaluation == "packed" and not later)
    if frozen and estimator.needs_gradient:
        raise ValueError(f"{type(estimator).__name__} needs f's gradient; leave frozen out.")
    batch = logits.shape[:-2]
    check_context(context, batch)
    return estimate_rows(
        estimator,
        logits,
        with_context(f, context, batch),
        noise=noise,
        generator=generator,
        evaluation=evaluation,
        max_rows=max_rows,
        frozen=frozen,
        masked=None if later else masked,
    )


def check_evaluation(evaluation: Evaluation, max_rows: int | None) -> None:
    """Require a known evaluation, and a positive max_rows."""
    if evaluation not in ("packed", "dense"):
        raise ValueError(f'evaluation must be "packed" or "dense", but is {evaluation!r}.')
    if max_rows is not None and (not is_whole(max_rows) or max_rows < 1):
        raise ValueError(f"max_rows must be a whole number of at least 1, or None for no limit, but is {max_rows!r}.")


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
    masked: bool | None = True,
) -> Estimate:
    """`estimate` for an f that also gets the batch rows of its z and whether their graph is kept.

    Without `shared`, equal queries are evaluated separately. If `masked` is False, all logits are known to be finite.
    If it is None, they must still be checked before f is called.
    """
    bare, given = logits.ndim == 1, logits
    if bare:
        logits = logits.unsqueeze(0)
    if noise is None:
        noise = estimator.noise(logits, generator)
    else:
        check_noise(estimator, logits, noise)
    queries = estimator.ask(logits, noise)
    if not shared:
        queries = _unshare(queries)
    graph = "all" if estimator.needs_gradient else "none" if frozen else "live"
    asked = ask(queries, logits, evaluation)
    if masked is None:
        masked = not asked.finite and check_logits(logits, read=True)
    values = evaluate(f, queries, asked, evaluation=evaluation, max_rows=max_rows, graph=graph)
    del asked  # `tell` may need its memory
    with full_precision(logits.device.type):
        gradient = estimator.tell(logits, queries, values.all)
    value = estimator.value(queries, values.live)
    loss = None
    if gradient is None and evaluation == "packed" and not _reaches(value, queries.points):
        raise ValueError(
            f"{type(estimator).__name__} differentiates f in z, but autograd finds no way from f's values to z; make f "
            "differentiable in one-hot z, or choose an estimator that only evaluates f, such as RLOO."
        )
    if gradient is not None:
        if masked:
            gradient = gradient.masked_fill(logits == -torch.inf, 0)
        # inside vmap, requires_grad is always False
        if gradient.requires_grad or len(estimator.learned) > 0:
            loss = gradient.square().sum((-2, -1)).mean()
            gradient = gradient.detach()
        value = attach(value, logits, gradient)
        gradient = gradient.to(torch.promote_types(values.all.dtype, logits.dtype))
        gradient = gradient.squeeze(0) if bare else gradient
    info = Info(queries.same_as, values.all.detach() if values.all.requires_grad else values.all, logits.detach())
    return Estimate(value, queries.z, gradient, info, loss, given)


class Info(Mapping[str, Tensor]):
    """Diagnostics, computed on access; to PyTorch's transforms, a container of the tensors that they come from."""

    def __init__(self, same_as: Tensor, values: Tensor, logits: Tensor) -> None:
        self.same_as, self.values_of_f, self.logits = same_as, values, logits

    def __getitem__(self, name: str) -> Tensor:
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


register_pytree_node(
    Info, lambda info: ([info.same_as, info.values_of_f, info.logits], None), lambda parts, _: Info(*parts)
)


def _unshare(queries: Queries) -> Queries:
    """Evaluate all queries separately, except those that must not be evaluated at their own point."""
    points, same_as = queries.points, queries.same_as
    index = same_as.view(*same_as.shape, *(1,) * (points.ndim - same_as.ndim)).expand_as(points)
    equal = (points.gather(0, index) == points).flatten(same_as.ndim).all(-1)
    number = torch.arange(same_as.shape[0], device=same_as.device).view(-1, *(1,) * (same_as.ndim - 1))
    return replace(queries, same_as=torch.where(equal, number, same_as), packed=None)


def _reaches(value: Tensor, source: Tensor) -> bool:
    """Whether value's graph leads back to source; True if no graphs are recorded."""
    made_at = (node is source.grad_fn or getattr(node, "variable", None) is source for node in graph_nodes(value))
    return not (source.requires_grad and torch.is_grad_enabled()) or any(made_at)


def graph_nodes(value: Tensor) -> Iterator[Node]:
    """All nodes of value's autograd graph; a leaf's node has the leaf as `variable`."""
    seen, pending = set(), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)


def full_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off: it is meant for f, and estimators need full precision for differences and linear solves."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def attach(value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
    """value [*B], whose derivative in the logits is gradient [*B, K, C]; where a logit is -inf, gradient must be 0."""
    if not torch._C._are_functorch_transforms_active():
        return _Attach.apply(value, logits, gradient)  # pyright: ignore[reportReturnType]
    # torch.compile traces no autograd function inside vmap
    finite = logits.masked_fill(logits == -torch.inf, 0)
    return value + ((finite - finite.detach()) * gradient).sum((-2, -1)).to(value.dtype)


class _Attach(torch.autograd.Function):
    """value, with a gradient for the logits."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient  # no graph leads to it
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad = grads[0]
        return grad, grad.view(*grad.shape, 1, 1) * ctx.gradient, None  # autograd converts it to the logits' dtype
