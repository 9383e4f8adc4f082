r"""Policy gradients by try-and-see: which actions of an episode to try again, and the
gradient from their returns.

B episodes of at most T steps played the actions a_t, which were drawn from
softmax(phi_t), here or elsewhere. The estimator draws its noise given a_t, which makes
a_t its first query. Every query that differs from a_t is a pseudo action: taken in the
same state s_t and followed by the policy to the episode's end, its return is an
unbiased estimate of Q(s_t, a). The queries that agree with a_t use the true return.
With q_t the estimator's gradient from those values,

    dJ/dtheta = E[ sum_t gamma^t w_t sum_c q_tc dphi_tc/dtheta ],    w_t = 1 for all t.

A budget limits the rollouts: walk the M steps that have pseudo actions in random order,
keep a step while the total of pseudo actions stays within the budget, and stop at the
first that does not fit. The kept steps H have w_t = M/|H|, the others none. This is
unbiased: {|H| >= n} depends on the first n steps as a set, so their mean is a reverse
martingale stopped at |H|. It needs |H| >= 1, i.e. a budget of at least the most pseudo
actions that one step can have. Unweighted, w_t = 1 for the kept steps, is Algorithm 3
as printed, and biased.

Keep-probabilities rho_t limit them too: a step that has pseudo actions is kept with
probability rho_t, independently, and w_t = 1/rho_t. They may depend on everything that
is known before the coins are tossed, the true returns included.

Reference: Yin, Yue and Zhou, ARSM, ICML 2019, section 4.2 and Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.capabilities import require
from arsm.checks import check_logits, describe
from arsm.draws import SampleNoise
from arsm.kept_steps import check_room, step_weights, walk
from arsm.options import suggests
from arsm.policy_checks import check_episodes, check_returns
from arsm.question import Others, Question, attach, pose
from arsm.types import Estimator

__all__ = [
    "PlayedSteps",
    "Rollouts",
    "gradient",
    "loss",
    "plan",
    "plan_draws",
    "step_weights",
    "walk",
    "weights",
]

PARTS = 16
"""The logits are planned in about this many parts, which limits the estimator's memory."""
CELLS = 1 << 17
"""Minimum number of logits per part."""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The rollouts to play after the true episodes: R of them, ordered by episode and step.

    Attributes:
        episode: [R] int64: the episode to go back to.
        step: [R] int64: the step to go back to.
        action: [R, K] int64: the pseudo action to take there.
        query: [R] int64: which of the estimator's queries it answers.
        weight: [B, T] float64: w_t, each step's weight in the gradient; 0 where no step
            was played.
        played: [S] int64: indices of the S played steps in [B T].
        row: [R] int64: index of each rollout's step among those S.
        pseudo_actions: [S] int64: the number of pseudo actions of each played step,
            before the budget.
        parts: The S played steps with the estimator's questions there.
        log_prob: [R]: ln p of the pseudo actions, where the planner kept it.
    """

    episode: Tensor
    step: Tensor
    action: Tensor
    query: Tensor
    weight: Tensor
    played: Tensor
    row: Tensor
    pseudo_actions: Tensor
    parts: tuple[PlayedSteps, ...]
    log_prob: Tensor | None = None

    def answered(self) -> list[tuple[PlayedSteps, slice, Others]]:
        """Every part, the rollouts [R] that belong to it, and the queries of the part
        that they answer.
        """
        # the rollouts are ordered by step, so that those of a part lie side by side
        stops = [0, *accumulate(part.step.shape[0] for part in self.parts)]
        edges = torch.tensor(stops, device=self.row.device)
        edges = torch.searchsorted(self.row, edges).tolist()
        found = []
        for i, part in enumerate(self.parts):
            some = slice(edges[i], edges[i + 1])
            row = self.row[some] - stops[i]
            found.append((part, some, Others(row, self.query[some], self.action[some])))
        return found


class PlayedSteps(NamedTuple):
    """Some of the played steps."""

    step: Tensor
    """[s] int64: their indices in [B T]."""
    pose: Callable[[], Question]
    """Poses the question there again from the same noise. A plan holds no copy of the
    logits, and no queries that are larger than them."""


@suggests("arsm.policy.plan")
def plan(
    estimator: Estimator,
    logits: Tensor,
    actions: Tensor,
    mask: Tensor | None = None,
    budget: int | None = None,
    keep: Tensor | None = None,
    generator: torch.Generator | None = None,
    *,
    weighted: bool = True,
) -> Rollouts:
    """Choose the rollouts of B true episodes.

    Args:
        estimator: any that takes a given sample and needs only f's values, such as
            RLOO, ARSM or LocalExpectation.
        logits: [B, T, K, C], K actions per step of at most T steps; -inf masks an
            action. One episode has B = 1, one action K = 1.
        actions: int64 [B, T, K], the true actions, drawn from softmax(logits), here or
            elsewhere.
        mask: bool [B, T], True where a step was played; None if all were.
        budget: S_max, the most rollouts of the whole call; None for no limit.
        keep: [B, T], the probability in (0, 1] with which each step is kept, instead of
            a budget.
        generator: the noise, the order of the walk and the coins are drawn from it.
        weighted: False leaves out M/|H|, as Algorithm 3 is printed, which is biased.
    """
    check_episodes(estimator, logits, actions, mask)
    played = _played(logits, mask)
    every = logits.detach().flatten(0, 1)
    actions = actions.flatten(0, 1)
    # part by part: an estimator may need many times the memory of its logits
    posed = [
        _pose(estimator, every, actions, steps, budget, generator)
        for steps in _split(estimator, played, logits)
    ]
    return _choose(posed, played, logits.shape[:2], budget, keep, generator, weighted=weighted)


@suggests("arsm.policy.plan_draws")
def plan_draws(
    estimator: Estimator,
    draws: Tensor,
    mask: Tensor | None = None,
    budget: int | None = None,
    keep: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """Choose the rollouts of B true episodes whose n actions per step are already drawn.

    An estimator with `paths` needs nothing of the logits but n independent draws: no
    tensor [B, T, C] exists.

    Args:
        estimator: one with `paths`, such as RLOO(n).
        draws: int64 [B, T, n]: n draws from every step's policy, the true action first.
        mask: bool [B, T], True where a step was played; None if all were.
        budget: as for `plan`.
        keep: as for `plan`.
        generator: the order of the walk and the coins are drawn from it.
    """
    require(
        estimator, "an episode of drawn actions", "mean", "paths", "independent_rows", subset=None
    )
    if (
        draws.dtype != torch.int64
        or draws.ndim != 3
        or estimator.weighs_energy
        or draws.shape[-1] != estimator.paths
    ):
        raise ValueError(
            f"draws must be int64 [B, T, {estimator.paths}] for {estimator}, but are "
            f"{describe(draws)}."
        )
    if budget is not None:
        check_room(budget, estimator.paths - 1)
    played = _played(draws, mask)
    given = draws.flatten(0, 1)[played].unsqueeze(-1)  # [S, n, 1]
    # the draws are the noise, and the queries are the draws: the logits are never read
    none_left = torch.empty(given.shape[0], 0, 1, dtype=torch.float64, device=draws.device)
    noise = SampleNoise(none_left, given)
    nothing = torch.zeros(given.shape[0], 1, 1, device=draws.device)
    question = pose(estimator, nothing, z=given[:, 0], noise=noise)
    posed = [(PlayedSteps(played, lambda: question), question.others())]
    return _choose(posed, played, draws.shape[:2], budget, keep, generator)


def _choose(
    posed: list[tuple[PlayedSteps, Others]],
    played: Tensor,
    shape: torch.Size,
    budget: int | None,
    keep: Tensor | None,
    generator: torch.Generator | None,
    *,
    weighted: bool = True,
) -> Rollouts:
    """The rollouts that a budget or keep-probabilities leave, of all pseudo actions of
    [B, T] steps.
    """
    # a part counts its rows from 0, all parts together count the played steps
    rows = []
    start = 0
    for part, others in posed:
        rows.append(others.row + start)
        start += part.step.shape[0]
    row = torch.cat(rows)

    counts = torch.bincount(row, minlength=played.shape[0])
    weight = step_weights(counts, played, shape, budget, keep, generator, weighted=weighted)

    # a step is kept with all of its pseudo actions or with none: some alone would be biased
    kept = (weight > 0)[row]
    query = torch.cat([others.query for _, others in posed])[kept]
    action = torch.cat([others.point for _, others in posed])[kept]
    row = row[kept]
    place = played[row]

    episodes, length = shape
    whole = torch.zeros(episodes * length, dtype=torch.float64, device=played.device)
    whole = whole.index_put((played,), weight)
    return Rollouts(
        episode=place // length,
        step=place % length,
        action=action,
        query=query,
        weight=whole.view(episodes, length),
        played=played,
        row=row,
        pseudo_actions=counts,
        parts=tuple(part for part, _ in posed),
    )


def _played(steps: Tensor, mask: Tensor | None) -> Tensor:
    """Indices in [B T] of the steps [B, T, ...] that were played: [S]."""
    if mask is None:
        return torch.arange(steps.shape[0] * steps.shape[1], device=steps.device)
    played = mask.flatten().nonzero().squeeze(-1)
    if not played.shape[0]:
        raise ValueError("mask is False everywhere, but at least one step must have been played.")
    return played


def _split(estimator: Estimator, played: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """The played steps [S] in parts, twice as many where a step can have as many
    queries as categories.
    """
    parts = PARTS
    if estimator.most_queries(logits[:1, 0]) >= logits.shape[-1]:
        parts = 2 * PARTS
    cells = max(CELLS, logits.numel() // parts)
    return played.split(max(1, cells // logits.shape[2:].numel()))


def _pose(
    estimator: Estimator,
    every: Tensor,
    actions: Tensor,
    step: Tensor,
    budget: int | None,
    generator: torch.Generator | None,
) -> tuple[PlayedSteps, Others]:
    """The question at some steps of logits [B T, K, C] and actions [B T, K], and its
    pseudo actions.
    """
    logits = every[step]
    true = actions[step]
    # the values are read here, where the steps that were not played are left out
    check_logits(logits, read=True)
    noise = estimator.noise(logits, generator, true)
    question = pose(estimator, logits, z=true, noise=noise)
    others = question.others()
    if budget is not None:
        check_room(budget, estimator.most_queries(logits) - 1)
    queries = question.queries
    # queries that are larger than the logits are asked for again instead of kept
    if queries.points.numel() > logits.numel():
        return PlayedSteps(step, lambda: pose(estimator, every[step], noise=noise)), others
    return PlayedSteps(step, lambda: Question(estimator, every[step], queries)), others


@suggests("arsm.policy.gradient")
def gradient(
    estimator: Estimator,
    logits: Tensor,
    rollouts: Rollouts,
    returns: Tensor,
    rollout_returns: Tensor,
    discount: Tensor | None = None,
) -> Tensor:
    """The estimate of dJ/dlogits, summed over the episodes: [B, T, K, C], 0 where no
    step was played.

    It is detached, unless the estimator has learned parts: then minimising its squared
    norm teaches them.

    Args:
        estimator: the one that the rollouts were planned with.
        logits: those given to `plan`.
        rollouts: the plan.
        returns: [B, T], the true episodes' discounted return from each step on.
        rollout_returns: [R], each rollout's discounted return from its step on.
        discount: [B, T], gamma^t; None leaves it out, as Algorithm 3 does.
    """
    check_returns(rollouts, returns, rollout_returns, discount)
    weight = _step_factors(rollouts, discount)
    every = logits.detach().flatten(0, 1)
    true = returns.detach().flatten()
    rollout_returns = rollout_returns.detach().to(returns.dtype)
    whole = torch.zeros_like(every)

    def of_part(part: PlayedSteps, some: slice, answered: Others) -> Tensor:
        """The gradient at some steps; a function, so that nothing of one part is alive
        at the next.
        """
        question = _question(part, estimator)
        values = question.spread_others(answered, rollout_returns[some], true[part.step])
        gradient = question.credit(values, weight[part.step]).gradient
        assert gradient is not None  # only estimators that need f's gradient return None
        return gradient.to(whole.dtype)

    for part, some, answered in rollouts.answered():
        whole[part.step] = of_part(part, some, answered)
    return whole.view_as(logits)


@suggests("arsm.policy.weights")
def weights(
    estimator: Estimator,
    rollouts: Rollouts,
    returns: Tensor,
    rollout_returns: Tensor,
    discount: Tensor | None = None,
) -> Tensor:
    """The weights of the draws' scores, [B, T, n]: the gradient is sum_i w_ti
    (onehot(a_ti) - softmax(phi_t)).

    Args:
        estimator: the one that the rollouts were planned with, by `plan_draws`.
        rollouts: the plan.
        returns: [B, T], the true episodes' discounted return from each step on.
        rollout_returns: [R], each rollout's discounted return from its step on.
        discount: [B, T], gamma^t; None leaves it out.
    """
    check_returns(rollouts, returns, rollout_returns, discount)
    factor = _step_factors(rollouts, discount)
    true = returns.detach().flatten()
    whole = true.new_zeros(true.shape[0], estimator.paths)
    for part, some, answered in rollouts.answered():
        played = rollout_returns[some].detach()
        question = _question(part, estimator)
        values = question.spread_others(answered, played, true[part.step])
        weight = estimator.weights(values) * factor[part.step].to(values.dtype)
        whole[part.step] = weight.T
    return whole.view(*returns.shape, estimator.paths)


@suggests("arsm.policy.loss")
def loss(
    estimator: Estimator,
    logits: Tensor,
    rollouts: Rollouts,
    returns: Tensor,
    rollout_returns: Tensor,
    discount: Tensor | None = None,
) -> Tensor:
    """[]: the loss whose backward ascends J. Its value is minus the episodes' returns, summed.

    The arguments are those of `gradient`, with the logits' graph.
    """
    estimate = gradient(estimator, logits, rollouts, returns, rollout_returns, discount).detach()
    # an episode whose first step was not played has no return
    counted = torch.zeros_like(rollouts.weight, dtype=torch.bool).flatten()
    counted = counted.index_fill(0, rollouts.played, True).view_as(rollouts.weight)
    total = torch.where(counted[:, 0], returns[:, 0].detach(), 0).sum()
    moved = attach(torch.zeros_like(returns), logits, estimate)  # 0 in value
    # optimisers descend, and J is to ascend
    return -(total + moved.sum())


def _question(part: PlayedSteps, estimator: Estimator) -> Question:
    """The question of a part, which must be this estimator's."""
    question = part.pose()
    if question.estimator != estimator:
        raise ValueError(
            f"The rollouts were planned with {question.estimator}, but the gradient is asked of "
            f"{estimator}; give both calls the same estimator."
        )
    return question


def _step_factors(rollouts: Rollouts, discount: Tensor | None) -> Tensor:
    """gamma^t w_t of every step, [B T]; without a discount w_t."""
    if discount is None:
        return rollouts.weight.flatten()
    return (rollouts.weight * discount).flatten()
