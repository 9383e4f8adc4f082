"""Run somebody's loss on a problem, again and again, and keep what the statistics need."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from arsm.referee.bounds import bernstein, student
from arsm.referee.problems import Function, Problem, Truth, enumerate_problem

Sign = Literal[1, -1]
CALLS = 64
"""Calls per problem with many copies."""
FEWEST = 100
"""An entry is decided where each outcome that it depends on is expected this often."""
SMALL_SHARE = 32
MOST_SMALL = 1024
"""Problems with small batches get one draw per call, which is slow: the 32nd part of the
draws, and no more than so many.
"""
PROBES = 8
"""Calls that are compared before anything is measured."""
REPLAYS = 64
"""Calls with the same random numbers that must agree: state that shows in every so many
calls is seen.
"""
MANY_CALLS = 2048
"""Calls per problem where whole calls differ more than their rows explain."""
REPEATED = (
    "Different calls returned the same gradient, although equal rows of one call got different "
    "samples: the loss sets a seed of its own; draw fresh random numbers in every call."
)
SHARED = (
    "Equal rows of a call got the same samples: the rows share their random numbers, and a whole "
    "call counts as one draw; draw fresh ones for every row."
)
REMEMBERED = (
    "The loss keeps state between calls: with all random generators set back it returned another "
    "gradient; audit it with that state frozen (a fixed baseline, no running averages)."
)
IGNORED = (
    "With -f in place of f, and the same random numbers, the loss returned the same gradient: the "
    "values of f are not in it (is the score term missing?), or they come from earlier calls."
)


class Loss(Protocol):
    """The loss that is audited: it draws once and returns what it would call backward
    on, summed over the rows.
    """

    def __call__(self, logits: Tensor, f: Callable[[Tensor], Tensor], /) -> Tensor: ...


class RefusedError(Exception):
    """The loss cannot be audited: a kind of finding, and a sentence that says why."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True, eq=False)
class Draws:
    """A loss's draws on one problem. Entries are [R, K C + 1]: each row's gradient, then its scale.

    The scale of a draw is g.truth / |truth|^2, of mean 1.
    """

    problem: Problem
    truth: Truth
    batch: int
    """Rows per call."""
    count: int
    """Draws per row."""
    error: Tensor
    """[R, K C + 1]: mean less truth."""
    variance: Tensor
    """[R, K C + 1], of one draw."""
    spread: Tensor
    """[R, K C + 1]: the largest less the smallest draw."""
    by_call: Tensor
    """[calls, R, K C + 1]: each call's mean, less the truth."""
    by_theta: Tensor | None
    """[calls, K]: each call's gradient in f's parameters, per row, less the truth; None
    if the loss gives none.
    """
    evaluations: float
    """Evaluations of f per row and call."""
    relaxed: bool
    """Whether f was called at floating points."""
    rounding: float
    """An error that floating point alone explains."""

    @property
    def decided(self) -> Tensor:
        """[R, K C + 1]: whether all outcomes are expected often enough; categories of
        probability 0 and 1 are none.
        """
        p = self.truth.p
        # a category that almost always occurs is as uninformative as one that almost never does
        rare = torch.minimum(p, 1 - p)
        if self.problem.reach is not None:
            rare = rare * self.problem.reach.unsqueeze(-1)
        # masked and certain categories have no outcome to wait for
        frequent = (rare * self.count >= FEWEST) | (rare < 1e-12)
        # a row's scale is decided where all of its entries are
        return torch.cat([frequent.flatten(1), frequent.flatten(1).all(1, keepdim=True)], 1)

    @property
    def standard_error(self) -> Tensor:
        """[R, K C + 1], from rows or from calls, whichever is larger."""
        calls = len(self.by_call)
        # rows of one call may share noise, and are then no independent draws
        return torch.maximum((self.variance / self.count).sqrt(), self.by_call.std(0) / calls**0.5)

    def half_width(self, failure: float) -> Tensor:
        """[R, K C + 1]: of intervals that each fail with probability at most `failure`."""
        calls = len(self.by_call)
        by_row = bernstein(self.variance, self.spread, self.count, failure)
        by_call = student(failure, calls - 1) * self.by_call.std(0) / calls**0.5
        return torch.maximum(by_row, by_call) + self.rounding


def gradient_of_call(
    loss: Loss, logits: Tensor, f: Function, sign: Sign
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient in the logits and in f's parameters that one call gives, or None
    where it gives none.
    """
    # a fresh leaf in every call: a loss may keep the tensors it was given, or change them
    leaf = logits.clone().requires_grad_()
    with torch.enable_grad():
        # the caller may be under no_grad, which is no concern of the loss
        value = loss(leaf, f)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise RefusedError(
            "not scalar", f"The loss must return a floating scalar tensor, but returned {found}."
        )
    if value.numel() != 1:
        raise RefusedError(
            "not scalar",
            f"The loss must return a scalar, but returned the shape {list(value.shape)}; return "
            "the sum over rows.",
        )
    if not torch.equal(leaf, logits):
        raise RefusedError(
            "in place",
            "The loss changes the logits in place, which are the caller's; work on a copy.",
        )
    # a gradient that a loss accumulates by itself would be missed, or counted twice
    if leaf.grad is not None or f.theta.grad is not None:
        raise RefusedError(
            "backward", "The loss called backward itself; return the tensor to call backward on."
        )
    if not value.requires_grad:
        return None, None
    wanted = [leaf, f.theta] if f.theta.requires_grad else [leaf]
    by_logits, *others = torch.autograd.grad(value, wanted, allow_unused=True)
    by_theta = others[0] if others else None
    if not bool(value.isfinite().all()):
        raise FloatingPointError(f"the loss returned {float(value.detach())}")
    return (
        None if by_logits is None else sign * by_logits,
        None if by_theta is None else sign * by_theta,
    )


def draw_gradients(
    loss: Loss,
    problem: Problem,
    samples: int,
    sign: Sign,
    dtype: torch.dtype,
    tick: Callable[[float], None],
) -> Draws:
    """`samples` draws of every row of the problem; `tick` hears the share done."""
    truth = enumerate_problem(problem)
    calls = max(CALLS, min(samples // SMALL_SHARE, MOST_SMALL)) if problem.small else CALLS
    # copies of the rows in one batch are draws at the price of one call
    copies = 1 if problem.small else max(1, samples // calls)
    f = problem.function(dtype)
    drawn = _draws(loss, problem, truth, f, calls, copies, sign, tick)
    if copies > 1 and _calls_differ(drawn):
        # whole calls are the draws then, and there must be many of them
        # the function counts evaluations, which start again
        f.rows = 0
        drawn = _draws(
            loss, problem, truth, f, MANY_CALLS, max(1, samples // MANY_CALLS), sign, tick
        )
    return drawn


def _calls_differ(drawn: Draws) -> bool:
    """Whether call means vary far more than independent rows would make them."""
    calls = len(drawn.by_call)
    # the variance of a call's mean, if its rows are independent
    expected = drawn.variance * calls / drawn.count
    size = drawn.truth.gradient.square().amax()
    # of the scale, which sees all entries; by chance 64 calls' variance is not four times too large
    return bool((drawn.by_call.var(0) > 4 * expected + 1e-6 * size)[:, -1].any())


def _draws(
    loss: Loss,
    problem: Problem,
    truth: Truth,
    f: Function,
    calls: int,
    copies: int,
    sign: Sign,
    tick: Callable[[float], None],
) -> Draws:
    dtype = f.weights.dtype
    logits = problem.logits.to(dtype).repeat(copies, 1, 1)
    by_call = []
    by_theta = []
    for call in range(calls):
        found, of_theta = gradient_of_call(loss, logits, f, sign)
        # a call that gives no gradient gives the gradient 0, as an optimiser sees it
        by_call.append(torch.zeros_like(logits) if found is None else found)
        # theta is shared by all rows of a call, so that only whole calls are draws of its gradient
        if of_theta is not None:
            by_theta.append(of_theta.double() / copies - truth.theta.sum(0))
        tick((call + 1) / calls)
    estimates = torch.stack(by_call).double()
    if not bool(estimates.isfinite().all()):
        raise FloatingPointError("the gradient in the logits is not finite")

    target = truth.gradient.flatten(1)
    square = target.square().sum(1, keepdim=True)
    error = estimates.view(calls, copies, len(target), -1) - target
    # where the truth is 0 there is no direction to measure a length along
    along = (error * torch.where(square > 0, target / square, 0.0)).sum(-1, keepdim=True)
    error = torch.cat([error, along], -1)  # [calls, copies, R, K C + 1]
    return Draws(
        problem,
        truth,
        len(logits),
        calls * copies,
        error.mean((0, 1)),
        error.var((0, 1)),
        error.amax((0, 1)) - error.amin((0, 1)),
        error.mean(1),
        torch.stack(by_theta) if by_theta else None,
        f.rows / (calls * len(logits)),
        f.relaxed,
        64 * torch.finfo(dtype).eps * max(float(truth.f.abs().max()), 1e-3),
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: batches are small, and threads that wait for a busy core
    take ten times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def generators(seed: int) -> Iterator[None]:
    """Seed torch's, Python's and (where it is loaded) NumPy's global generators, and
    set them back afterwards.
    """
    # NumPy is not a dependency: a loss that uses it has loaded it already
    numpy = sys.modules.get("numpy")
    python = random.getstate()
    array = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            seed_generators(seed)
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(array)


def seed_generators(seed: int) -> None:
    """Seed the global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _states() -> bytes:
    """The global generators' states."""
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy else None
    return pickle.dumps((torch.get_rng_state().tolist(), random.getstate(), array))


def probe(
    loss: Loss, problem: Problem, sign: Sign, dtype: torch.dtype, seed: int
) -> tuple[str | None, bool]:
    """Refuse repeated or shared random numbers and state between calls; a note where
    they are not seen.

    Returns the note, and whether the gradient stays the same when f is replaced by -f.

    Raises:
        RefusedError: why the draws would not be independent.
    """
    copies = 64
    logits = problem.logits.to(dtype).repeat(copies, 1, 1)
    f = problem.function(dtype)

    def once(f: Function) -> Tensor:
        found = gradient_of_call(loss, logits, f, sign)[0]
        return torch.zeros_like(logits) if found is None else found

    seed_generators(seed)
    before = _states()
    first = once(f)
    uses_global_generators = _states() != before
    calls = torch.stack([first, *(once(f) for _ in range(PROBES - 1))]).view(PROBES, copies, -1)
    seed_generators(seed)
    again = once(f)
    # no gradient, or none that is finite: the draws will show that as well
    if bool((first == 0).all()) or not bool(calls.isfinite().all()):
        return None, False
    calls_differ = _check_noise(calls)
    if not torch.allclose(first, again, rtol=1e-4, atol=1e-6):
        if uses_global_generators:
            raise RefusedError("state", REMEMBERED)
        return (
            "The loss draws from its own generator; state between calls could not be checked.",
            False,
        )
    # a running average or a counter may show only after many calls
    for _ in range(REPLAYS):
        seed_generators(seed)
        if not torch.allclose(once(f), again, rtol=1e-4, atol=1e-6):
            raise RefusedError("state", REMEMBERED)
    note = None
    if not calls_differ:
        note = (
            f"In {problem.name!r} the gradient is the same in every call: its random numbers could "
            "not be checked."
        )
    seed_generators(seed)
    # somebody else's code may raise anything, here at an f of no problem
    try:
        negative = once(replace(problem, scale=-problem.scale).function(dtype))
    except Exception:
        return note, False
    # to the bit: with the same random numbers a loss without f does the same arithmetic
    return note, problem.scale != 0 and torch.equal(negative, again)


def _check_noise(found: Tensor) -> bool:
    """Refuse gradients [calls, copies, ...] that repeat each other; whether calls differ at all."""
    rounding = 1e-4 * found.abs().amax()
    calls_differ = bool((found - found[:1]).abs().amax() > rounding)
    rows_differ = bool((found - found[:, :1]).abs().amax() > rounding)
    # calls without any gradient say nothing about the seed
    calls = found.flatten(1)
    calls = calls[calls.abs().amax(1) > 0]
    # a loss without noise repeats itself rightly; one whose equal rows differ has noise
    if rows_differ and len(calls.unique(dim=0)) < len(calls):
        raise RefusedError("fixed seed", REPEATED)
    if calls_differ and not rows_differ:
        raise RefusedError("shared noise", SHARED)
    return calls_differ
