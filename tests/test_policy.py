"""Policy gradients by rollouts against a small decision process whose gradient is known;
tests/statistics.py states the false-alarm rate."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor

import arsm
from arsm import policy
from tests.statistics import deviations

STATES, HORIZON, GAMMA = 3, 4, 0.9


class Process:
    """K actions of C values per step, random transitions and rewards, HORIZON steps from state
    0.
    """

    def __init__(self, variables: int, categories: int) -> None:
        generator = torch.Generator().manual_seed(7)
        joint = categories**variables
        self.variables, self.categories = variables, categories
        self.logits = torch.randn(
            STATES, variables, categories, generator=generator, dtype=torch.float64
        )
        self.transition = (
            2 * torch.randn(STATES, joint, STATES, generator=generator, dtype=torch.float64)
        ).softmax(-1)
        self.reward = torch.randn(STATES, joint, generator=generator, dtype=torch.float64)

    def joint(self, actions: Tensor) -> Tensor:
        place = self.categories ** torch.arange(self.variables - 1, -1, -1)
        return (actions * place).sum(-1)

    def exact(self, discounted: bool = True) -> Tensor:
        """dJ/dlogits [S, K, C] by dynamic programming; without discounting, Algorithm 3's sum
        without gamma^t.
        """
        logits = self.logits.clone().requires_grad_()
        log_q = logits.log_softmax(-1)
        joint = log_q[:, 0]
        for k in range(1, self.variables):
            joint = (joint.unsqueeze(-1) + log_q[:, k].unsqueeze(-2)).flatten(-2)
        pi = joint.exp()
        value, q = torch.zeros(STATES, dtype=torch.float64), []
        for _ in range(HORIZON):
            q.insert(0, (self.reward + GAMMA * self.transition @ value).detach())
            value = (pi.detach() * q[0]).sum(-1)
        objective, visits = logits.new_zeros(()), torch.eye(STATES, dtype=torch.float64)[0]
        for t in range(HORIZON):
            objective = objective + (GAMMA**t if discounted else 1.0) * (
                visits @ (pi * q[t]).sum(-1)
            )
            visits = torch.einsum("s,sa,sax->x", visits, pi.detach(), self.transition)
        return torch.autograd.grad(objective, logits)[0]

    def step(
        self, state: Tensor, actions: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        joint = self.joint(actions)
        following = torch.multinomial(
            self.transition[state, joint], 1, generator=generator
        ).squeeze(-1)
        return following, self.reward[state, joint]

    def play(
        self, state: Tensor, time: Tensor, actions: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The returns [N] of taking these actions at these times and following the policy to the
        horizon.
        """
        total, factor = torch.zeros(len(state), dtype=torch.float64), 1.0
        for _ in range(HORIZON):
            following, reward = self.step(state, actions, generator)
            total += factor * torch.where(time < HORIZON, reward, 0.0)
            state, time, factor = following, time + 1, factor * GAMMA
            actions = arsm.sample(self.logits[state], generator)
        return total

    def estimates(
        self,
        estimator: arsm.Estimator,
        episodes: int,
        budget: int | None,
        *,
        weighted: bool = True,
        discounted: bool = True,
        keep: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """[episodes, S, K, C], one plan per episode where there is a budget."""
        generator = torch.Generator().manual_seed(3)
        state = torch.zeros(episodes, dtype=torch.int64)
        states, chosen, rewards = [], [], []
        for _ in range(HORIZON):
            actions = arsm.sample(self.logits[state], generator)
            states.append(state)
            chosen.append(actions)
            state, reward = self.step(state, actions, generator)
            rewards.append(reward)
        ahead = torch.zeros(HORIZON + 1, episodes, dtype=torch.float64)
        for t in reversed(range(HORIZON)):
            ahead[t] = rewards[t] + GAMMA * ahead[t + 1]
        visited, taken, returns = torch.stack(states, 1), torch.stack(chosen, 1), ahead[:-1].T
        discount = (
            GAMMA ** torch.arange(HORIZON).double().expand(episodes, HORIZON)
            if discounted
            else None
        )
        grads = []
        size = 1 if budget is not None else episodes
        for first in range(0, episodes, size):
            rows = slice(first, first + size)
            seen = visited[rows]
            logits = self.logits[seen]
            plan = policy.plan(
                estimator,
                logits,
                taken[rows],
                budget=budget,
                keep=None if keep is None else keep(seen, returns[rows]),
                generator=generator,
                weighted=weighted,
            )
            assert budget is None or len(plan.step) <= budget
            tried = self.play(seen[plan.episode, plan.step], plan.step, plan.action, generator)
            factor = None if discount is None else discount[rows]
            grad = policy.gradient(estimator, logits, plan, returns[rows], tried, factor)
            of_state = torch.zeros(size * STATES, *grad.shape[2:], dtype=torch.float64)
            row = torch.arange(size).repeat_interleave(HORIZON) * STATES + seen.flatten()
            grads.append(
                of_state.index_add(0, row, grad.double().flatten(0, 1)).unflatten(0, (size, STATES))
            )
        return torch.cat(grads)


ESTIMATORS = [
    arsm.ARSM(),
    arsm.ARS(),
    arsm.RLOO(3),
    arsm.LocalExpectation(),
    arsm.DisARM(),
    arsm.CARMS(3),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("variables", "categories"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("capped", [False, True])
def test_unbiased(estimator: arsm.Estimator, variables: int, categories: int, capped: bool) -> None:
    process = Process(variables, categories)
    estimates = process.estimates(estimator, 500 if capped else 20_000, 2 if capped else None)
    assert deviations(estimates, process.exact()).max() < 1


def test_without_gamma_t() -> None:
    process = Process(1, 3)
    estimates = process.estimates(arsm.ARSM(), 20_000, None, discounted=False)
    assert deviations(estimates, process.exact(discounted=False)).max() < 1
    assert deviations(estimates, process.exact()).max() > 1


@pytest.mark.parametrize(
    ("estimator", "one", "several"),
    [
        (arsm.ARSM(), 3, 6),
        (arsm.ARS(), 3, 4),
        (arsm.RLOO(3), 2, 2),
        (arsm.LocalExpectation(), 3, 9),
        (arsm.Average(arsm.LocalExpectation(), 2), 7, 19),
    ],
    ids=str,
)
def test_the_smallest_budget(estimator: arsm.Estimator, one: int, several: int) -> None:
    for variables, smallest in ((1, one), (3, several)):
        logits = torch.zeros(1, 500, variables, 4)
        actions = arsm.sample(logits, torch.Generator().manual_seed(9))
        assert policy.plan(estimator, logits, actions).step.bincount().max() == smallest
        policy.plan(estimator, logits, actions, budget=smallest)
        with pytest.raises(ValueError, match=f"allow at least {smallest}"):
            policy.plan(estimator, logits, actions, budget=smallest - 1)


def test_keep_probabilities_may_depend_on_all_that_is_known() -> None:
    process = Process(1, 3)

    def keep(states: Tensor, returns: Tensor) -> Tensor:
        return torch.where(returns > 0, 0.9, 0.2 + 0.2 * states)

    estimates = process.estimates(arsm.RLOO(3), 20_000, None, keep=keep)
    assert deviations(estimates, process.exact()).max() < 1


@pytest.mark.parametrize("estimator", ESTIMATORS[:3], ids=lambda e: type(e).__name__)
def test_an_unweighted_budget_is_biased(estimator: arsm.Estimator) -> None:
    process = Process(1, 3)
    estimates = process.estimates(estimator, 500, 2, weighted=False)
    exact = process.exact()
    assert deviations(estimates, exact).max() > 1
    assert (estimates.mean(0) * exact).sum() / exact.square().sum() < 0.8


@pytest.mark.parametrize("counts", [(1, 2, 0, 1, 2), (2, 2, 2, 1), (0, 0, 1, 1, 1, 2)])
@pytest.mark.parametrize("budget", [2, 3, 5])
def test_the_walk_weights_every_step_by_one_on_average(
    counts: tuple[int, ...], budget: int
) -> None:
    steps = [t for t, count in enumerate(counts) if count]
    weights = [
        policy.walk(torch.tensor(counts), torch.tensor(o), budget) for o in permutations(steps)
    ]
    torch.testing.assert_close(
        torch.stack(weights).mean(0), torch.ones(len(counts), dtype=torch.float64)
    )


def random_episodes(
    episodes: int, steps: int, variables: int, categories: int
) -> tuple[Tensor, Tensor]:
    """Logits [B, T, K, C] and actions [B, T, K]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(
        episodes, steps, variables, categories, generator=generator, dtype=torch.float64
    )
    return logits, arsm.sample(logits, generator)


def test_reinforce_needs_no_rollouts_and_keeps_every_step() -> None:
    estimator = arsm.Reinforce()
    logits, actions = random_episodes(2, 5, 1, 3)
    plan = policy.plan(estimator, logits, actions, budget=2)
    assert len(plan.step) == 0
    returns = torch.randn(2, 5, dtype=torch.float64)
    grad = policy.gradient(estimator, logits, plan, returns, returns[0, :0])
    torch.testing.assert_close(grad, returns[..., None, None] * arsm.extend.score(logits, actions))


def test_equal_draws_share_a_rollout_and_never_repeat_the_true_action() -> None:
    logits, actions = random_episodes(4, 10, 2, 3)
    plan = policy.plan(arsm.RLOO(5), logits, actions)
    tried = list(
        zip(
            plan.episode.tolist(), plan.step.tolist(), map(tuple, plan.action.tolist()), strict=True
        )
    )
    assert len(set(tried)) == len(tried)
    assert tried == sorted(tried, key=lambda each: each[:2])
    assert (plan.action != actions[plan.episode, plan.step]).any(-1).all()


def test_masked_actions_are_never_tried_and_get_no_gradient() -> None:
    logits = random_episodes(1, 30, 1, 3)[0]
    logits[..., 1] = -torch.inf
    estimator = arsm.ARSM()
    plan = policy.plan(estimator, logits, arsm.sample(logits), budget=1)
    assert (plan.action != 1).all()
    grad = policy.gradient(estimator, logits, plan, torch.zeros(1, 30), torch.ones(len(plan.step)))
    assert (grad[..., 1] == 0).all()
    assert grad.isfinite().all()


def test_steps_that_were_not_played_count_for_nothing() -> None:
    """Whatever stands there, NaN included."""
    logits, actions = random_episodes(3, 4, 1, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    beyond = torch.where(mask[..., None, None], logits, torch.nan)
    returns = torch.where(mask, 1.5, torch.nan)
    whole = [
        policy.plan(arsm.RLOO(4), x, actions, mask, generator=torch.Generator().manual_seed(1))
        for x in (logits, beyond)
    ]
    grads = [
        policy.gradient(arsm.RLOO(4), x, plan, returns, torch.arange(len(plan.step)).double())
        for x, plan in zip((logits, beyond), whole, strict=True)
    ]
    assert torch.equal(*grads)
    assert (grads[0][~mask] == 0).all()
    assert (grads[0][mask] != 0).any()
    assert mask[whole[0].episode, whole[0].step].all()
    assert (whole[0].weight[~mask] == 0).all()


def test_the_losss_gradient_is_the_gradient() -> None:
    logits, actions = random_episodes(2, 3, 1, 4)
    logits[0, 0, 0, 2] = -torch.inf
    actions[0, 0] = 1
    logits.requires_grad_()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    plan = policy.plan(arsm.ARSM(), logits, actions, mask)
    returns, tried = (
        torch.randn(2, 3, dtype=torch.float64),
        torch.randn(len(plan.step), dtype=torch.float64),
    )
    loss = policy.loss(arsm.ARSM(), logits, plan, returns, tried)
    torch.testing.assert_close(loss, -returns[:, 0].sum())
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, -policy.gradient(arsm.ARSM(), logits, plan, returns, tried))


def four_steps() -> tuple[Tensor, Tensor]:
    """Equal logits of three categories, and actions."""
    return torch.zeros(1, 4, 1, 3), torch.zeros(1, 4, 1, dtype=torch.int64)


def test_estimators_and_budgets_that_cannot_plan_are_refused() -> None:
    logits, actions = four_steps()
    with pytest.raises(ValueError, match="less than the 2 pseudo actions"):
        policy.plan(arsm.ARSM(), logits, actions, budget=1)
    with pytest.raises(ValueError, match="Exact cannot start from a given sample"):
        policy.plan(arsm.Exact(), logits, actions)
    for draws, least in ((2, 5), (4, 11)):  # draws that are averaged do not share a rollout
        average = arsm.Average(arsm.ARSM(), draws)
        with pytest.raises(ValueError, match=f"less than the {least} pseudo actions"):
            policy.plan(average, logits, actions, budget=least - 1)
        policy.plan(average, logits, actions, budget=least)
    surrogate = arsm.RLOO(3, surrogate="logits")
    for biased in (surrogate, arsm.Average(surrogate, 2)):
        with pytest.raises(ValueError, match="learns from one row what it subtracts at another"):
            policy.plan(biased, logits, actions)
    with pytest.raises(ValueError, match="estimates a multi-sample bound"):
        policy.plan(arsm.VIMCO(3), logits, actions)
    with pytest.raises(TypeError, match=r"arsm\.estimator"):
        policy.plan("arsm", logits, actions)  # pyright: ignore[reportArgumentType]


def test_logits_and_actions_that_do_not_fit_are_refused() -> None:
    logits, actions = four_steps()
    for short in (logits[0, 0, 0], logits[0, 0], logits.squeeze(2)):
        with pytest.raises(ValueError, match=r"must be \[B, T, K, C\].*unsqueeze\(-2\)"):
            policy.plan(arsm.ARSM(), short, actions)
    for odd in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"logits\[0, 0, 0\] is "):
            policy.plan(arsm.ARSM(), logits + odd, actions)
    with pytest.raises(ValueError, match="-inf in every category"):
        policy.plan(arsm.ARSM(), logits - torch.inf, actions)
    for misfit in (actions.float(), actions.squeeze(-1), actions[:, :3]):
        with pytest.raises(ValueError, match=r"actions must be int64 \[B, T, K\] = \[1, 4, 1\]"):
            policy.plan(arsm.ARSM(), logits, misfit)
    with pytest.raises(ValueError, match=r"z\[1, 0\] is 3, but the categories are 0 to 2"):
        policy.plan(arsm.RLOO(), logits, torch.tensor([0, 3, 0, 0]).view(1, 4, 1))
    impossible = logits.index_fill(-1, torch.tensor([0]), -torch.inf)
    for estimator in (arsm.ARSM(), arsm.RLOO(), arsm.CARMS(), arsm.DisARM()):
        with pytest.raises(ValueError, match=r"z\[0, 0\] is 0, which has probability 0"):
            policy.plan(estimator, impossible, actions)


def test_masks_and_keep_probabilities_that_do_not_fit_are_refused() -> None:
    logits, actions = four_steps()
    for wrong in (torch.ones(1, 4), torch.ones(4, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask must be bool \[B, T\] = \[1, 4\]"):
            policy.plan(arsm.ARSM(), logits, actions, wrong)
    with pytest.raises(ValueError, match="mask is False everywhere"):
        policy.plan(arsm.ARSM(), logits, actions, torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="not both"):
        policy.plan(arsm.ARSM(), logits, actions, budget=4, keep=torch.ones(1, 4))
    for wrong in (torch.zeros(1, 4), torch.full((1, 4), 1.1)):
        with pytest.raises(ValueError, match=r"keep must lie in \(0, 1\]"):
            policy.plan(arsm.ARSM(), logits, actions, keep=wrong)
    with pytest.raises(ValueError, match=r"keep must be floating \[B, T\] = \[1, 4\]"):
        policy.plan(arsm.ARSM(), logits, actions, keep=torch.ones(4))


def test_returns_that_do_not_fit_a_plan_are_refused() -> None:
    logits, actions = four_steps()
    plan = policy.plan(arsm.ARSM(), logits, actions)
    returns, tried = torch.ones(1, 4), torch.ones(len(plan.step))
    for wrong in (0.9, returns[0], returns[:, :1]):
        with pytest.raises(ValueError, match=r"discount must be a tensor \[1, 4\]"):
            policy.gradient(arsm.ARSM(), logits, plan, returns, tried, wrong)  # pyright: ignore[reportArgumentType]
    for one, other, name in (
        (returns.long(), tried, "returns"),
        (returns, tried.long(), "rollout_returns"),
    ):
        with pytest.raises(
            TypeError, match=f"^{name} must be a floating tensor, but are torch.int64"
        ):
            policy.gradient(arsm.ARSM(), logits, plan, one, other)
    with pytest.raises(ValueError, match="returns must be finite"):
        policy.gradient(arsm.ARSM(), logits, plan, returns * torch.nan, tried)
    with pytest.raises(ValueError, match="One return per step"):
        policy.gradient(arsm.ARSM(), logits, plan, torch.zeros(1, 3), torch.zeros(len(plan.step)))


def test_the_gradient_is_that_of_the_estimator_that_planned() -> None:
    logits, actions = four_steps()
    plan = policy.plan(arsm.RLOO(4), logits, actions)
    returns, tried = torch.ones(1, 4), torch.ones(len(plan.step))
    with pytest.raises(
        ValueError, match=r"planned with RLOO\(4\), but the gradient .* of RLOO\(8\)"
    ):
        policy.gradient(arsm.RLOO(8), logits, plan, returns, tried)
    drawn = policy.plan_draws(arsm.RLOO(2), torch.tensor([[[0, 1], [2, 1]]]))
    returns, tried = torch.ones(1, 2), torch.ones(len(drawn.step))
    with pytest.raises(
        ValueError, match=r"planned with RLOO\(2\), but the gradient .* of GRPO\(2\)"
    ):
        policy.weights(arsm.GRPO(2), drawn, returns, tried)


@pytest.mark.parametrize("draws", [torch.zeros(1, 3, 2), torch.zeros(1, 3, 1, 2).long()])
def test_draws_are_categories_of_every_step(draws: Tensor) -> None:
    with pytest.raises(ValueError, match=r"draws must be int64 \[B, T, 2\]"):
        policy.plan_draws(arsm.RLOO(2), draws)
