"""Small problems whose gradient is known by enumeration.

A problem has R rows, each with logits [K, C] and parameters theta [P] of its own; theta travels as
context, so that every sample has its own gradient in theta too. f is smooth in one-hot z, so that
relaxing estimators fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import arsm


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows of logits and theta, and one f for all of them."""

    name: str
    logits: Tensor
    """[R, K, C] float64."""
    theta: Tensor
    """[R, P] float64."""
    function: Callable[[Tensor, Tensor], Tensor]
    """(z [N, K, C] one-hot or relaxed, theta [N, P]) -> [N]."""

    @property
    def size(self) -> tuple[int, int]:
        """(K, C)."""
        return self.logits.shape[-2], self.logits.shape[-1]

    def f(self, z: Tensor, theta: Tensor) -> Tensor:
        """The function in the form that `arsm.estimate` calls."""
        return self.function(arsm.one_hot(z, self.logits.shape[-1], torch.float64), theta)


@dataclass(frozen=True, eq=False)
class Truth:
    """What an estimate must agree with in the mean."""

    value: Tensor
    """[R]."""
    logits: Tensor
    """[R, K, C], the gradient in the logits."""
    theta: Tensor
    """[R, P], the gradient in theta."""


def all_values(variables: int, categories: int) -> Tensor:
    """Every z: [C^K, K]."""
    return torch.tensor(list(product(range(categories), repeat=variables)))


def enumerate_target(problem: Problem, target: Callable[[Tensor, Tensor], Tensor]) -> Truth:
    """target(q, f) and its gradient, row by row, by enumeration and autograd."""
    z = all_values(*problem.size)
    logits, theta = problem.logits.clone().requires_grad_(), problem.theta.clone().requires_grad_()
    values = []
    for row_logits, row_theta in zip(logits, theta, strict=True):
        p = row_logits.softmax(-1)
        q = torch.stack([p[k, z[:, k]] for k in range(z.shape[1])]).prod(0)
        values.append(target(q, problem.f(z, row_theta.expand(len(z), -1))))
    value = torch.stack(values)
    by_logits, by_theta = torch.autograd.grad(value.sum(), (logits, theta))
    return Truth(value.detach(), by_logits, by_theta)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(z: Tensor, theta: Tensor) -> Tensor:
    """theta . z."""
    return (z.flatten(1) * theta).sum(-1)


def interacting(z: Tensor, theta: Tensor) -> Tensor:
    """A cosine of all variables together: no sum of one term per variable."""
    return torch.cos(linear(z, theta)) + 0.3 * linear(z, theta).square()


def shifted(z: Tensor, theta: Tensor) -> Tensor:
    """With a constant that only a baseline removes."""
    return interacting(z, theta) + 1000


def _problem(
    name: str,
    seed: int,
    rows: int,
    variables: int,
    categories: int,
    function: Callable[[Tensor, Tensor], Tensor],
) -> Problem:
    return Problem(
        name,
        _normal(seed, rows, variables, categories),
        _normal(seed + 1, rows, variables * categories),
        function,
    )


def _masked() -> Problem:
    problem = _problem("masked categories", 40, 2, 2, 4, interacting)
    logits = problem.logits.clone()
    logits[0, 0, 1] = logits[0, 1, :2] = logits[1, 1, 3] = -torch.inf
    return Problem(problem.name, logits, problem.theta, problem.function)


def _near_deterministic() -> Problem:
    # Rare values stay frequent enough among the samples for the normal approximation to hold.
    logits = torch.tensor([[[0.0, 4.0, 0.0], [3.5, 0.0, 0.0]]], dtype=torch.float64)
    return Problem("near-deterministic logits", logits, _normal(50, 1, 6), interacting)


PROBLEMS: list[Problem] = [
    _problem("one variable", 0, 1, 1, 5, linear),
    _problem("three variables", 10, 1, 3, 3, interacting),
    _problem("a large constant", 20, 1, 2, 3, shifted),
    _problem("a batch with context", 30, 3, 2, 3, interacting),
    _masked(),
    _near_deterministic(),
    _problem("two categories", 60, 1, 3, 2, interacting),
    _problem("one variable, two categories", 70, 1, 1, 2, linear),
    _problem("one category", 80, 1, 2, 1, interacting),
]


def extreme_logits(dtype: torch.dtype) -> Tensor:
    """[3, 2, 3]: far apart, far from zero, nearly equal, and masked; they require a gradient."""
    rows = [
        [[1e4, -1e4, 0.0], [0.0, -torch.inf, 0.0]],
        [[-1e4, -1e4, -1e4], [1e4, 1e4, 1e4 - 10]],
        [[-torch.inf, -torch.inf, 2.0], [0.0, 1e-3, -1e-3]],
    ]
    return torch.tensor(rows, dtype=dtype, requires_grad=True)
