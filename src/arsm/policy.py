r"""Policy gradients by try-and-see: which actions of an episode to try again, and the gradient from what they return.

A true episode plays a_t, the estimator's first query at the logits phi_t of step t. Every other query that differs from
it is a pseudo action: taken in the same state s_t and followed by the policy to the episode's end, its return is an
unbiased estimate of Q(s_t, a). The queries that agree with a_t use the true return. With q_t the estimator's gradient
from those values,

    dJ/dtheta = E[ sum_t gamma^t w_t sum_c q_tc dphi_tc/dtheta ],    w_t = 1 for all t.

A budget limits the rollouts of one episode: walk the M steps that have pseudo actions in random order, keep a step
while the total of pseudo actions stays within the budget, and stop at the first that does not fit. For the kept steps
H w_t = M/|H|, else 0. This is unbiased: {|H| >= n} depends on the first n steps as a set, so that their mean is a
reverse martingale stopped at |H|; it needs |H| >= 1, i.e. a budget of at least the most pseudo actions a step can
have. Unweighted, w_t = 1 for the kept steps, is Algorithm 3 as printed, and biased.

Reference: Yin, Yue and Zhou, ARSM, ICML 2019, section 4.2 and Algorithm 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.driver import check_estimator, check_logits
from arsm.estimators.average import Average, bounds
from arsm.estimators.local_expectation import LocalExpectation
from arsm.evaluate import NotFiniteError
from arsm.types import Estimator, Queries


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What to play after a true episode of T steps: R rollouts, in the order of their steps."""

    step: Tensor
    """[R] int64: the step to go back to."""
    action: Tensor
    """[R] or [R, K] int64: the pseudo action to take there."""
    query: Tensor
    """[R] int64: which of the estimator's queries it answers."""
    weight: Tensor
    """[T] float64: w_t, each step's weight in the gradient."""
    queries: Queries
    """The estimator's queries at every step, [M, T, K]."""

    @property
    def actions(self) -> Tensor:
        """[T] or [T, K] int64: the true actions."""
        return self.queries.points[0].squeeze(-1) if self.action.ndim == 1 else self.queries.points[0]


def race_noise(noise: Any) -> Tensor:
    """ln varpi [T, K, C] with a_t = argmin_i (ln varpi_ti - phi_ti), from an estimator's noise for T steps.

    Noise depends on the logits' shape only: draw it as `estimator.noise(torch.zeros(T, K, C))` before the episode.
    """
    log_pi = noise if isinstance(noise, Tensor) else noise.log_pi
    return log_pi[(slice(None), *(0,) * (log_pi.ndim - 3))]


def select_steps(noise: Any, index: Tensor | slice) -> Any:
    """The noise of some steps: those that an episode reached before its end."""
    return noise[index] if isinstance(noise, Tensor) else type(noise)(*(x[index] for x in noise))


def plan(
    estimator: Estimator,
    logits: Tensor,
    noise: Any,
    budget: int | None = None,
    *,
    weighted: bool = True,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """Choose the rollouts of a true episode.

    Args:
        estimator: ARSM, ARS, RLOO without a surrogate, LocalExpectation, Reinforce, or an average of one.
        logits: [T, C], one action a step, or [T, K, C], K of them; -inf masks an action. The steps of several episodes
            may be given as one.
        noise: as `estimator.noise(torch.zeros(T, K, C))` drew it; with these logits it gives the true actions.
        budget: S_max, the most rollouts; None for no limit.
        weighted: False leaves out M/|H|, as Algorithm 3 is printed.
        generator: where the random order of the walk comes from.
    """
    check_estimator(estimator)
    episode = _with_variables(logits).detach()
    if estimator.needs_gradient:
        raise ValueError(f"{estimator} needs f's derivative, which a rollout does not have; use one such as ARSM().")
    if getattr(estimator, "couples_rows", False):
        raise ValueError(
            f"{estimator} learns from a step what it subtracts at another, which biases an episode's gradient, since "
            "its steps depend on each other; leave surrogate out."
        )
    if bounds(estimator):
        raise ValueError(f"{estimator} estimates a bound, not the expected return; use one such as RLOO() or ARSM().")
    race = race_noise(noise).shape
    if race != episode.shape:
        raise ValueError(
            f"The noise is for a race of {list(race)}, but the logits are {list(episode.shape)}; draw it as "
            f"estimator.noise(torch.zeros{tuple(episode.shape)}) of an estimator that races, such as ARSM()."
        )
    queries = estimator.ask(episode, noise)
    if queries.weight.ndim > 1:
        raise ValueError(f"{estimator} draws no true action; use LocalExpectation() to try every action.")
    number = torch.arange(queries.same_as.shape[0], device=logits.device).unsqueeze(-1)
    pseudo = (queries.same_as == number) & (number > 0)
    counts = pseudo.sum(0)
    pending = counts.nonzero().squeeze(-1)
    order = pending[torch.randperm(pending.shape[0], generator=generator, device=logits.device)]
    if budget is not None:
        largest = _most_pseudo_actions(estimator, queries, episode)
        if budget < largest:
            raise ValueError(
                f"A budget of {budget} rollouts is less than the {largest} pseudo actions that one step can have, and "
                f"would bias the gradient; allow at least {largest}."
            )
    weight = walk(counts, order, budget, weighted=weighted)
    step, query = (pseudo & (weight > 0)).T.nonzero().unbind(-1)
    action = queries.points[query, step]
    return Rollouts(step, action.squeeze(-1) if logits.ndim == 2 else action, query, weight, queries)


def walk(counts: Tensor, order: Tensor, budget: int | None, *, weighted: bool = True) -> Tensor:
    """w_t [T] from the steps' numbers of pseudo actions |S_t| [T] and the order [M] of those that have any.

    A step without pseudo actions needs no rollout and keeps its weight of 1.
    """
    kept = order if budget is None else order[counts[order].cumsum(0) <= budget]
    scale = order.shape[0] / max(kept.shape[0], 1) if weighted else 1.0
    weight = (counts == 0).double()
    return weight.index_fill(0, kept, scale)


def gradient(
    estimator: Estimator,
    logits: Tensor,
    rollouts: Rollouts,
    returns: Tensor,
    rollout_returns: Tensor,
    discount: Tensor | None = None,
) -> Tensor:
    """The estimate of dJ/dlogits, shaped like the logits [T, (K,) C].

    It is detached, unless the estimator has learned parts: then minimising its squared norm teaches them.

    Args:
        estimator: the one that the rollouts were planned with.
        logits: those given to `plan`.
        rollouts: the plan.
        returns: [T], the true episode's discounted return from each step on.
        rollout_returns: [R], each rollout's discounted return from its step on.
        discount: [T], gamma^t; None leaves it out, as Algorithm 3 does.
    """
    episode = _with_variables(logits).detach()
    queries = rollouts.queries
    for what, values in (("returns", returns), ("rollout_returns", rollout_returns)):
        if not isinstance(values, Tensor) or not values.is_floating_point():
            found = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"{what} must be a floating tensor, but are {found}; convert them with .float().")
        if not bool(values.isfinite().all()):
            raise NotFiniteError(f"{what} must be finite; look for the reward that is not.")
    if returns.shape != rollouts.weight.shape or rollout_returns.shape != rollouts.step.shape:
        raise ValueError(
            f"One return a step, {list(rollouts.weight.shape)}, and one a rollout, {list(rollouts.step.shape)}, are "
            f"wanted, but there are {list(returns.shape)} and {list(rollout_returns.shape)}."
        )
    if discount is not None and (not isinstance(discount, Tensor) or discount.shape != rollouts.weight.shape):
        raise ValueError(
            f"discount must be a tensor {list(rollouts.weight.shape)}, such as gamma ** torch.arange(T), but is "
            f"{list(discount.shape) if isinstance(discount, Tensor) else discount}."
        )
    values = returns.detach().expand(queries.same_as.shape)
    values = values.index_put((rollouts.query, rollouts.step), rollout_returns.detach().to(values.dtype))
    estimate = estimator.tell(episode, queries, values.gather(0, queries.same_as))
    assert estimate is not None  # only estimators that need f's gradient tell nothing
    weight = rollouts.weight if discount is None else rollouts.weight * discount
    estimate = estimate * weight.to(estimate.dtype)[:, None, None]
    return estimate.masked_fill(episode == -torch.inf, 0).to(logits.dtype).view_as(logits)


def _with_variables(logits: Tensor) -> Tensor:
    check_logits(logits, "packed")
    if logits.ndim not in (2, 3):
        raise ValueError(f"An episode's logits must be [T, C] or [T, K, C], but are {list(logits.shape)}.")
    return logits.unsqueeze(-2) if logits.ndim == 2 else logits


def _most_pseudo_actions(estimator: Estimator, queries: Queries, logits: Tensor) -> int:
    """The largest |S_t| that any noise could give: all queries but the first, or all joint actions but the true one.

    Draws that are averaged do not share their evaluations.
    """
    draws = 1
    while isinstance(estimator, Average):
        draws, estimator = draws * estimator.n, estimator.estimator
    choices = (logits > -torch.inf).sum(-1).double()  # [T, K]
    # local expectation changes one action at a time
    distinct = 1 + (choices - 1).sum(-1) if isinstance(estimator, LocalExpectation) else choices.prod(-1)
    return int(min(queries.same_as.shape[0], draws * float(distinct.max()))) - 1
