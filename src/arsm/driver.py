"""`estimate`: the one way from logits and f to a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from arsm.evaluate import Evaluation, NotFiniteError, evaluate, value_of
from arsm.types import Estimate, Estimator


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
        estimator: how, e.g. `arsm.ARSM()`.
        logits: [*B, K, C], K variables of C categories a row of the batch; a bare [C] is one variable. -inf masks a
            category.
        f: `f(z, *context) -> [N]`, row by row. z is int64 [N, K] with values 0..C-1, or floating [N, K, C] from an
            estimator that `needs_gradient`.
        context: tensors [*B, ...]; f receives the rows that belong to each z.
        noise: as `estimator.noise(logits)` draws it for logits [*B, K, C]; given, the estimate is deterministic.
        generator: where the noise comes from.
        evaluation: "packed" evaluates each distinct query once; "dense" evaluates all of them with static
            shapes, for torch.compile, CUDA graphs and vmap, and leaves the checks to `info["finite"]`.
        max_rows: rows a call of f, None for no limit.
        frozen: f has nothing to learn, so that all queries are evaluated together and without a graph; not for an
            estimator that `needs_gradient`.

    Returns:
        An `Estimate`; `estimate(...).value.sum().backward()` puts the gradient estimate into the logits and the
        ordinary gradient into f's parameters.
    """
    check_estimator(estimator)
    check_logits(logits, evaluation)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, or None for no limit, but is {max_rows}.")
    if frozen and estimator.needs_gradient:
        raise ValueError(f"{type(estimator).__name__} needs f's gradient; leave frozen out.")
    bare = logits.ndim == 1
    if bare:
        logits = logits.unsqueeze(0)
    batch = logits.shape[:-2]
    for position, x in enumerate(context):
        if not isinstance(x, Tensor) or x.shape[: len(batch)] != batch:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"Context {position} must be a tensor that leads with the batch's shape {list(batch)}, but is {found}."
            )
    if noise is None:
        noise = estimator.noise(logits, generator)
    for x in noise if isinstance(noise, tuple) else (noise,):
        if x.shape[: len(batch)] != batch:
            raise ValueError(
                f"noise must lead with the batch's shape {list(batch)}, but is {list(x.shape)}; draw it by "
                "estimator.noise(logits) for these logits."
            )
    queries = estimator.ask(logits, noise)
    graph = "all" if estimator.needs_gradient else "none" if frozen else "live"
    values = evaluate(f, queries, context, evaluation=evaluation, max_rows=max_rows, graph=graph)
    with _full_precision(logits.device.type):
        gradient = estimator.tell(logits, queries, values.all)
    value = value_of(estimator, queries, values.live)
    loss = None
    if gradient is None and evaluation == "packed" and not _reaches(value, queries.points):
        raise ValueError(
            f"{type(estimator).__name__} differentiates f in z, but autograd finds no way from f's values to z; make f "
            "differentiable in one-hot z, or choose an estimator that only evaluates f, such as RLOO."
        )
    if gradient is not None:
        masked = logits == -torch.inf
        gradient = gradient.masked_fill(masked, 0)
        # inside vmap nothing seems to require a gradient
        if gradient.requires_grad or getattr(estimator, "learns", False):
            loss = gradient.square().sum((-2, -1)).mean()
            gradient = gradient.detach()
        value = attach(value, logits.masked_fill(masked, 0), gradient)
        gradient = gradient.squeeze(0) if bare else gradient
    number = torch.arange(queries.same_as.shape[0], device=logits.device).view(-1, *(1,) * len(batch))
    info = {
        "asked": torch.full((), queries.same_as.shape[0], device=logits.device),
        "distinct": (queries.same_as == number).sum(0),
        "finite": values.all.detach().isfinite().all(0) & legal_rows(logits.detach()).all(-1),
    }
    return Estimate(value, queries.z, gradient, info, loss)


def _reaches(value: Tensor, source: Tensor) -> bool:
    """Whether value's graph leads to where source was made, if graphs are made."""
    made_at = (node is source.grad_fn or getattr(node, "variable", None) is source for node in graph_nodes(value))
    return not (source.requires_grad and torch.is_grad_enabled()) or any(made_at)


def graph_nodes(value: Tensor) -> Iterator[Node]:
    """Everything that value was computed by, as autograd has it; a leaf's node has it as `variable`."""
    seen, pending = set(), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)


def _full_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """autocast is for f; an estimator takes differences of its values and solves equations with them."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def attach(value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
    """value [*B], whose derivative in the logits is gradient [*B, K, C]."""
    zero = logits - logits.detach()
    return value + (zero * gradient).sum((-2, -1)).to(value.dtype)


def check_estimator(estimator: object) -> None:
    """Refuse what is not an estimator, such as its name or its class."""
    if isinstance(estimator, (str, type)) or not hasattr(estimator, "ask"):
        words = repr(estimator) if isinstance(estimator, str) else '"arsm"'
        raise TypeError(
            f"estimator must be an estimator such as arsm.ARSM(), but is {estimator!r}; arsm.estimator({words}) makes "
            "one from words."
        )


def check_whole(name: str, count: int) -> None:
    """Refuse what cannot count."""
    if not isinstance(count, Integral):
        raise ValueError(f"{name} must be a whole number, but is {count!r}.")


def check_logits(logits: Tensor, evaluation: Evaluation) -> None:
    """Refuse logits that cannot mean anything; their values are only read where that costs no synchronisation."""
    if evaluation not in ("packed", "dense"):
        raise ValueError(f'evaluation must be "packed" or "dense", but is {evaluation!r}.')
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        found, mend = (
            (logits.dtype, ".float()") if isinstance(logits, Tensor) else (type(logits).__name__, "torch.tensor")
        )
        raise TypeError(f"logits must be a floating tensor [*B, K, C], but are {found}; convert them with {mend}.")
    if logits.ndim == 0 or 0 in logits.shape:
        raise ValueError(f"logits must be [C] or [*B, K, C] with no dimension empty, but are {list(logits.shape)}.")
    if evaluation == "packed" and not bool((legal := legal_rows(logits.detach())).all()):
        where = (~legal).nonzero()[0].tolist()
        row = logits.detach()[tuple(where)]
        if bool((row == -torch.inf).all()):
            raise ValueError(f"logits{where or ''} are -inf in every category; leave at least one finite.")
        category = int((~(row < torch.inf)).nonzero()[0])
        raise NotFiniteError(
            f"logits{[*where, category]} is {float(row[category])}; logits must be finite, or -inf to mask a category."
        )


def legal_rows(logits: Tensor) -> Tensor:
    """[*B, K]: whether no logit is NaN or +inf and at least one is finite."""
    return (logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1)
