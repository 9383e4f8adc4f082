"""Small problems whose gradient is known by enumeration, chosen for the defects that
they make visible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from arsm.categorical import one_hot


@dataclass(eq=False)
class Function:
    """f(z) = scale (u + bend cos 3u) + constant with u = sum_k theta_k w_k[z_k].

    z is int64 [..., K] or relaxed [..., K, C]. A polynomial would not do:
    straight-through is exact for linear f, ReinMax for quadratic f. The function counts
    what a loss asks of it.
    """

    weights: Tensor
    """[K, C]."""
    theta: Tensor
    """[K], f's own parameters."""
    bend: float
    scale: float
    constant: float
    rows: int = 0
    """Rows evaluated so far."""
    relaxed: bool = False
    """Whether f was called at floating points."""

    def __call__(self, z: Tensor) -> Tensor:
        variables, categories = self.weights.shape
        if not isinstance(z, Tensor):
            raise TypeError(f"f takes a tensor, but was called with {type(z).__name__}.")
        expected = (variables, categories) if z.is_floating_point() else (variables,)
        if tuple(z.shape[-len(expected) :]) != expected:
            raise ValueError(
                f"f takes int64 [..., {variables}] (or relaxed points [..., {variables}, "
                f"{categories}]), but was called with {z.dtype} {list(z.shape)}."
            )
        # a mask would pass as categories 0 and 1
        if z.dtype == torch.bool:
            raise TypeError("f takes int64, but was called with torch.bool.")
        if not z.is_floating_point():
            z = z.long()
            if z.numel() and (int(z.min()) < 0 or int(z.max()) >= categories):
                raise ValueError(
                    f"f takes categories 0..{categories - 1}, but was called with {int(z.max())}."
                )
        else:
            self.relaxed = True
        points = one_hot(z, categories, self.weights.dtype)
        u = (points * (self.theta.unsqueeze(-1) * self.weights)).sum((-2, -1))
        # one row per point asked for, repeated or not: the price of an estimator
        self.rows += u.numel()
        return self.scale * (u + self.bend * (3 * u).cos()) + self.constant


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """Logits and one f for all rows; `copies` independent copies of the rows in one batch."""

    name: str
    logits: Tensor
    """[R, K, C] float64."""
    weights: Tensor
    """[K, C] float64."""
    bend: float = 0.0
    scale: float = 1.0
    constant: float = 0.0
    role: str = ""
    """The member of the family with equal logits: "f", "f/20", "20f", "f+100" or "0";
    empty outside of it.
    """
    small: bool = False
    """One copy per call: a genuinely small batch."""
    learns: bool = False
    """f has parameters of its own."""
    reach: Tensor | None = None
    """[R, K]: the probability that a variable is drawn at all; None where all are."""

    def __repr__(self) -> str:
        return f"<Problem {self.name!r}>"

    def function(self, dtype: torch.dtype) -> Function:
        theta = torch.ones(len(self.weights), dtype=dtype, requires_grad=self.learns)
        return Function(self.weights.to(dtype), theta, self.bend, self.scale, self.constant)


@dataclass(frozen=True, eq=False)
class Truth:
    """A problem's enumeration, all in float64."""

    p: Tensor
    """[R, K, C]."""
    q: Tensor
    """[R, Z], the probability of every value of z."""
    f: Tensor
    """[Z]."""
    x: Tensor
    """[R, Z, K, C], the score onehot(z) - p."""
    gradient: Tensor
    """[R, K, C] = dE[f]/dlogits."""
    theta: Tensor
    """[R, K] = dE[f]/dtheta."""
    points: Tensor = field(repr=False)
    """[Z, K, C], all values of z, one-hot."""

    def rloo_variance(self, samples: int) -> Tensor:
        """[R]: the trace of leave-one-out's variance, that of the sample covariance of
        f and x, exactly.
        """
        n = samples
        square = self.x.square().sum((-2, -1))
        # leave-one-out does not see a constant in f
        centred = self.f - (self.q * self.f).sum(-1, keepdim=True)
        fourth = (self.q * centred.square() * square).sum(-1)
        product_ = (self.q * centred.square()).sum(-1) * (self.q * square).sum(-1)
        return (
            fourth / n
            - (n - 2) / (n * (n - 1)) * self.gradient.square().sum((-2, -1))
            + product_ / (n * (n - 1))
        )

    def bound(self, samples: int) -> Tensor:
        """[R]: the lower bound on the variance as a share of leave-one-out's, both
        averaged over random additive f.

        ((tr G)^2 / (n - 1) - tr G^2) / (E|x|^4 / n - (n - 2) / (n (n - 1)) tr G^2 + (tr
        G)^2 / (n (n - 1)))
        """
        n = samples
        p = self.p
        # G = diag(p) - p p' for each variable: its trace, and that of its square
        trace = (p * (1 - p)).sum((-2, -1))
        squared = (p.square().sum(-1).square() - 2 * p.pow(3).sum(-1) + p.square().sum(-1)).sum(-1)
        fourth = (self.q * self.x.square().sum((-2, -1)).square()).sum(-1)
        average = fourth / n - (n - 2) / (n * (n - 1)) * squared + trace.square() / (n * (n - 1))
        return ((trace.square() / (n - 1) - squared) / average).clamp_min(0)

    def weighted(self, p: Tensor) -> Tensor:
        """E[f(z) onehot(z)] with z drawn from p: [R, K, C] -> [R, K, C]."""
        q = (p.unsqueeze(1) * self.points).sum(-1).prod(-1)
        return torch.einsum("rz,zkc->rkc", q * self.f, self.points)


def enumerate_problem(problem: Problem) -> Truth:
    """Every value of z of a problem, and the gradient."""
    variables, categories = problem.weights.shape
    z = torch.tensor(list(product(range(categories), repeat=variables)))
    points = one_hot(z, categories, torch.float64)
    p = problem.logits.softmax(-1)
    q = (p.unsqueeze(1) * points).sum(-1).prod(-1)
    # a function of its own, so that enumeration is not counted as evaluations of the loss
    function = problem.function(torch.float64)
    theta = function.theta.detach().requires_grad_()
    function.theta = theta
    with torch.enable_grad():
        f = function(z)
        expectation = q @ f
        # the rewards of sequences have no parameters, and leave theta without a graph
        by_theta = torch.zeros(len(q), len(theta), dtype=torch.float64)
        if expectation.requires_grad:
            by_theta = torch.stack(
                [torch.autograd.grad(x, theta, retain_graph=True)[0] for x in expectation]
            )
    f = f.detach()
    x = points - p.unsqueeze(1)
    # E[x] = 0, so that the mean may be taken off; with f + 100 that saves digits
    centred = f - (q * f).sum(-1, keepdim=True)
    gradient = torch.einsum("rz,rzkc->rkc", q * centred, x)
    return Truth(p, q, f, x, gradient, by_theta, points)


def _problem(
    name: str, logits: list[list[list[float]]], weights: list[list[float]], **options: Any
) -> Problem:
    problem = Problem(
        name, torch.tensor(logits, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    )
    return replace(problem, **options)


# categories 0 and 2 have the same value of f: a baseline that saw its own sample treats them alike,
# a wrong sampler not
_FAMILY = _problem(
    "f", [[[0.0, 0.0, 0.0, 0.0]], [[1.2, 0.3, -0.5, -0.9]]], [[0.3, 1.0, 0.3, -0.6]], role="f"
)
_MASK = -float("inf")

PROBLEMS: tuple[Problem, ...] = (
    # a family with equal logits: what f's scale and constant do to a gradient tells defects apart
    replace(_FAMILY, name="one variable"),
    replace(_FAMILY, name="the same f / 20", scale=0.05, role="f/20"),
    replace(_FAMILY, name="the same 20 f", scale=20.0, role="20f"),
    replace(_FAMILY, name="the same f + 100", constant=100.0, role="f+100"),
    replace(_FAMILY, name="the same with f = 0", scale=0.0, role="0"),
    # no additive and no quadratic f, for which relaxations are exact
    _problem(
        "three variables, nonlinear, with parameters",
        [
            [[0.5, 0.0, -0.5], [0.0, 1.0, 0.0], [-1.0, 0.3, 0.2]],
            [[0.0, 0.0, 0.0], [1.5, 0.0, -0.5], [0.2, -0.8, 0.6]],
        ],
        [[0.7, -0.2, -0.4], [-0.5, 0.6, 0.1], [0.2, -0.6, 0.5]],
        bend=0.6,
        learns=True,
    ),
    # where formulas of Bernoulli variables are used, and sometimes mixed up with others
    _problem("two categories", [[[0.4, -0.4], [-0.3, 0.2]]], [[0.8, -0.7], [-0.4, 0.6]], bend=0.5),
    # 0 times -inf
    _problem(
        "masked categories",
        [
            [[0.3, _MASK, -0.2, 0.5], [_MASK, _MASK, 0.4, -0.1]],
            [[0.0, 0.5, -0.5, 0.2], [0.1, 0.7, -0.6, _MASK]],
        ],
        [[0.6, 0.2, -0.7, 0.1], [-0.3, 0.5, 0.8, -0.6]],
        bend=0.4,
    ),
    # rare outcomes, where importance weights become large
    _problem(
        "confident",
        [[[4.0, 0.0, 0.5], [0.0, 3.0, -0.5]]],
        [[-0.2, 0.9, -0.8], [0.5, 0.1, -0.7]],
        bend=0.3,
    ),
    # a certain row next to an open one: what a mean over the batch does to both
    _problem(
        "one row nearly certain", [[[14.0, 0.0, 0.0]], [[0.2, 0.0, -0.2]]], [[0.4, -0.8, 0.5]]
    ),
    # small batches, where a mean over the batch contains the sample itself to a large part
    _problem(
        "a batch of 1",
        [[[0.3, 0.0, -0.3], [0.0, -0.2, 0.4]]],
        [[0.9, 0.0, -0.9], [-0.6, 0.0, 0.6]],
        small=True,
        bend=0.1,
    ),
    _problem(
        "a batch of 2", [[[0.0, 0.0, 0.0]], [[0.5, 0.0, -0.6]]], [[1.0, -0.2, -0.9]], small=True
    ),
    _problem(
        "a batch of 3, three variables",
        [
            [[0.3, -0.3], [0.0, 0.0], [-0.5, 0.4]],
            [[0.0, 0.0], [0.6, 0.0], [0.2, 0.0]],
            [[-0.2, 0.5], [0.4, 0.0], [0.0, 0.0]],
        ],
        [[0.8, -0.8], [-0.5, 0.5], [0.6, -0.6]],
        small=True,
        bend=0.1,
    ),
)
"""The problems that `audit` runs by default."""
