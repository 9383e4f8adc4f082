"""The contract between estimators and the driver: ask, evaluate, tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Noise = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Queries:
    """Where an estimator wants f evaluated.

    M queries a row of the batch, of which the first L carry f's own graph.
    """

    points: Tensor
    """[M, *B, K] int64; or [M, *B, K, C] floating and attached to the logits (`needs_gradient`)."""
    z: Tensor
    """[*B, K], the true sample, drawn from softmax(logits); [*B, n, K] where there are several."""
    same_as: Tensor
    """[M, *B]: query m is evaluated iff same_as[m] == m, else it takes the value of query same_as[m].
    A live query may only point to a live one."""
    weight: Tensor
    """[L] or [L, *B]: the value is sum_l weight_l f(points_l)."""
    aux: Any = None
    """What `tell` needs besides."""


@runtime_checkable
class Estimator(Protocol):
    """A gradient estimator: pure functions of logits [*B, K, C] and noise, which never call f."""

    @property
    def unbiased(self) -> bool:
        """The claim E[estimate] = dE[f]/dlogits, which the test suite checks against enumeration."""
        ...

    @property
    def needs_gradient(self) -> bool:
        """Whether f must be differentiable in z, and is then handed floating points [N, K, C]."""
        ...

    def noise(self, logits: Tensor, generator: torch.Generator | None = None) -> Noise:
        """Draw all the randomness; every tensor leads with *B."""
        ...

    def ask(self, logits: Tensor, noise: Any) -> Queries:
        """Say where f is wanted."""
        ...

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor | None:
        """Turn f's values [M, *B] into the gradient [*B, K, C], or None where autograd through the
        points is the estimate."""
        ...


@dataclass(frozen=True, eq=False)
class Estimate:
    """What `arsm.estimate` returns."""

    value: Tensor
    """[*B]: f at the true sample (the mean over several, weighted where the estimator weights them; the expectation for
    `Exact`, f at the relaxed sample for a relaxation, the bound for `VIMCO`). Its backward gives the estimate to the
    logits and the ordinary gradient to f's parameters and context. To autograd the estimate is a constant: a second
    derivative misses what it would contribute."""
    z: Tensor
    """[*B, K] or [*B, n, K], the true sample(s)."""
    grad: Tensor | None
    """Shaped like the logits: the estimate of dE[f]/dlogits, detached; None for pure relaxations."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """`asked`: queries a row; `distinct` [*B]: evaluations that they need; `finite` [*B]: whether
    logits and values were all finite."""
    estimator_loss: Tensor | None = None
    """[]: the squared norm of the gradient, averaged over the batch, of an estimator that learns; minimise it together
    with the model's loss."""
