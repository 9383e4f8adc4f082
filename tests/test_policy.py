"""Policy gradients by rollouts against a small decision process whose gradient is known; tests/statistics.py states the
false-alarm rate."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

import arsm
from arsm import policy
from tests.statistics import deviations

STATES, HORIZON, GAMMA = 3, 4, 0.9


class Process:
    """K actions of C values a step, random transitions and rewards, HORIZON steps from state 0."""

    def __init__(self, variables: int, categories: int) -> None:
        generator = torch.Generator().manual_seed(7)
        joint = categories**variables
        self.variables, self.categories = variables, categories
        self.logits = torch.randn(STATES, variables, categories, generator=generator, dtype=torch.float64)
        self.transition = (2 * torch.randn(STATES, joint, STATES, generator=generator, dtype=torch.float64)).softmax(-1)
        self.reward = torch.randn(STATES, joint, generator=generator, dtype=torch.float64)

    def joint(self, actions: Tensor) -> Tensor:
        place = self.categories ** torch.arange(self.variables - 1, -1, -1)
        return (actions * place).sum(-1)

    def exact(self, discounted: bool = True) -> Tensor:
        """dJ/dlogits [S, K, C] by dynamic programming; without discounting, Algorithm 3's sum without gamma^t."""
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
            objective = objective + (GAMMA**t if discounted else 1.0) * (visits @ (pi * q[t]).sum(-1))
            visits = torch.einsum("s,sa,sax->x", visits, pi.detach(), self.transition)
        return torch.autograd.grad(objective, logits)[0]

    def step(self, state: Tensor, actions: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        joint = self.joint(actions)
        following = torch.multinomial(self.transition[state, joint], 1, generator=generator).squeeze(-1)
        return following, self.reward[state, joint]

    def play(self, state: Tensor, time: Tensor, actions: Tensor, generator: torch.Generator) -> Tensor:
        """The returns [N] of taking these actions at these times and following the policy to the horizon."""
        total, factor = torch.zeros(len(state), dtype=torch.float64), 1.0
        for _ in range(HORIZON):
            following, reward = self.step(state, actions, generator)
            total += factor * torch.where(time < HORIZON, reward, 0.0)
            state, time, factor = following, time + 1, factor * GAMMA
            noise = arsm.AR().noise(self.logits[state], generator)
            actions = arsm.AR().ask(self.logits[state], noise).z
        return total

    def estimates(
        self,
        estimator: arsm.Estimator,
        episodes: int,
        budget: int | None,
        *,
        weighted: bool = True,
        discounted: bool = True,
    ) -> Tensor:
        """[episodes, S, K, C], one plan an episode where there is a budget."""
        generator = torch.Generator().manual_seed(3)
        state = torch.zeros(episodes, dtype=torch.int64)
        noises = [estimator.noise(self.logits[state], generator) for _ in range(HORIZON)]
        states, rewards = [], []
        for noise in noises:
            actions = estimator.ask(self.logits[state], noise).points[0]
            states.append(state)
            state, reward = self.step(state, actions, generator)
            rewards.append(reward)
        returns = torch.zeros(HORIZON + 1, episodes, dtype=torch.float64)
        for t in reversed(range(HORIZON)):
            returns[t] = rewards[t] + GAMMA * returns[t + 1]
        parts = (noises,) if isinstance(noises[0], Tensor) else tuple(zip(*noises, strict=True))
        visited = torch.stack(states, 1)
        returns = returns[:-1].T
        stacked = [torch.stack(part, 1) for part in parts]  # pyright: ignore[reportArgumentType]
        time = torch.arange(HORIZON)
        size = 1 if budget is not None else episodes
        grads = []
        for first in range(0, episodes, size):
            rows = slice(first, first + size)
            noise = [part[rows].flatten(0, 1) for part in stacked]
            noise = noise[0] if isinstance(noises[0], Tensor) else type(noises[0])(*noise)
            seen = visited[rows].flatten()
            logits = self.logits[seen]
            plan = policy.plan(estimator, logits, noise, budget, weighted=weighted, generator=generator)
            assert budget is None or len(plan.step) <= budget
            tried = self.play(seen[plan.step], plan.step % HORIZON, plan.action, generator)
            discount = GAMMA ** time.double().repeat(size) if discounted else None
            grad = policy.gradient(estimator, logits, plan, returns[rows].flatten(), tried, discount)
            of_state = torch.zeros(size * STATES, *grad.shape[1:], dtype=torch.float64)
            row = torch.arange(size).repeat_interleave(HORIZON) * STATES + seen
            grads.append(of_state.index_add(0, row, grad.double()).unflatten(0, (size, STATES)))
        return torch.cat(grads)


ESTIMATORS = [arsm.ARSM(), arsm.ARS(), arsm.RLOO(3), arsm.LocalExpectation()]


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
        logits = torch.zeros(500, variables, 4)
        noise = estimator.noise(logits, torch.Generator().manual_seed(0))
        assert policy.plan(estimator, logits, noise).step.bincount().max() == smallest
        policy.plan(estimator, logits, noise, smallest)
        with pytest.raises(ValueError, match=f"allow at least {smallest}"):
            policy.plan(estimator, logits, noise, smallest - 1)


@pytest.mark.parametrize("estimator", ESTIMATORS[:3], ids=lambda e: type(e).__name__)
def test_an_unweighted_budget_is_biased(estimator: arsm.Estimator) -> None:
    process = Process(1, 3)
    estimates = process.estimates(estimator, 500, 2, weighted=False)
    exact = process.exact()
    assert deviations(estimates, exact).max() > 1
    assert (estimates.mean(0) * exact).sum() / exact.square().sum() < 0.8


@pytest.mark.parametrize("counts", [(1, 2, 0, 1, 2), (2, 2, 2, 1), (0, 0, 1, 1, 1, 2)])
@pytest.mark.parametrize("budget", [2, 3, 5])
def test_the_walk_weights_every_step_by_one_on_average(counts: tuple[int, ...], budget: int) -> None:
    steps = [t for t, count in enumerate(counts) if count]
    weights = [policy.walk(torch.tensor(counts), torch.tensor(o), budget) for o in permutations(steps)]
    torch.testing.assert_close(torch.stack(weights).mean(0), torch.ones(len(counts), dtype=torch.float64))


def test_reinforce_needs_no_rollouts_and_keeps_every_step() -> None:
    estimator = arsm.Reinforce()
    logits = torch.randn(5, 3, dtype=torch.float64)
    noise = estimator.noise(logits.unsqueeze(1))
    plan = policy.plan(estimator, logits, noise, 2)
    assert len(plan.step) == 0
    returns = torch.randn(5, dtype=torch.float64)
    grad = policy.gradient(estimator, logits, plan, returns, returns[:0])
    score = arsm.one_hot(plan.actions, 3, torch.float64) - logits.softmax(-1)
    torch.testing.assert_close(grad, returns.unsqueeze(-1) * score)


@pytest.mark.parametrize("estimator", [arsm.ARSM(), arsm.ARS(), arsm.RLOO(4), arsm.Average(arsm.ARSM(), 2)])
def test_race_noise_gives_the_true_actions(estimator: arsm.Estimator) -> None:
    logits = torch.randn(50, 2, 4, dtype=torch.float64)
    noise = policy.select_steps(estimator.noise(torch.zeros(60, 2, 4, dtype=torch.float64)), slice(50))
    plan = policy.plan(estimator, logits, noise)
    assert torch.equal((policy.race_noise(noise) - logits).argmin(-1), plan.actions)


def test_equal_draws_share_a_rollout_and_never_repeat_the_true_action() -> None:
    estimator = arsm.RLOO(5)
    logits = torch.randn(40, 3, dtype=torch.float64)
    plan = policy.plan(estimator, logits, estimator.noise(logits.unsqueeze(1)))
    tried = list(zip(plan.step.tolist(), plan.action.tolist(), strict=True))
    assert len(set(tried)) == len(tried)
    assert (plan.action != plan.actions[plan.step]).all()


def test_masked_actions_are_never_tried_and_get_no_gradient() -> None:
    logits = torch.randn(30, 3, dtype=torch.float64)
    logits[:, 1] = -torch.inf
    estimator = arsm.ARSM()
    plan = policy.plan(estimator, logits, estimator.noise(logits.unsqueeze(1)), budget=1)
    assert (plan.action != 1).all()
    grad = policy.gradient(estimator, logits, plan, torch.zeros(30), torch.ones(len(plan.step)))
    assert (grad[:, 1] == 0).all()
    assert grad.isfinite().all()


def test_refusals() -> None:
    logits = torch.zeros(4, 3)
    noise = arsm.ARSM().noise(logits.unsqueeze(1))
    with pytest.raises(ValueError, match="less than the 2 pseudo actions"):
        policy.plan(arsm.ARSM(), logits, noise, budget=1)
    with pytest.raises(ValueError, match="LocalExpectation"):
        policy.plan(arsm.Exact(), logits, arsm.Exact().noise(logits.unsqueeze(1)))
    for draws, least in ((2, 5), (4, 11)):  # draws that are averaged do not share a rollout
        average = arsm.Average(arsm.ARSM(), draws)
        with pytest.raises(ValueError, match=f"less than the {least} pseudo actions"):
            policy.plan(average, logits, average.noise(logits.unsqueeze(1)), budget=least - 1)
        policy.plan(average, logits, average.noise(logits.unsqueeze(1)), budget=least)
    surrogate = arsm.RLOO(3, surrogate="logits")
    for biased in (surrogate, arsm.Average(surrogate, 2)):
        with pytest.raises(ValueError, match="leave surrogate out"):
            policy.plan(biased, logits, biased.noise(logits.unsqueeze(1)))
    with pytest.raises(ValueError, match="estimates a bound"):
        policy.plan(arsm.VIMCO(3), logits, arsm.VIMCO(3).noise(logits.unsqueeze(1)))
    with pytest.raises(TypeError, match=r"arsm\.estimator"):
        policy.plan("arsm", logits, noise)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"\[T, C\]"):
        policy.plan(arsm.ARSM(), logits[0], noise)
    for odd in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"logits\[0, 0\] is "):
            policy.plan(arsm.ARSM(), logits + odd, noise)
    with pytest.raises(ValueError, match="-inf in every category"):
        policy.plan(arsm.ARSM(), logits - torch.inf, noise)
    for misfit in ((1, 1, 3), (4, 3), (4, 1, 2)):
        with pytest.raises(ValueError, match=r"but the logits are \[4, 1, 3\]; draw it as estimator.noise"):
            policy.plan(arsm.ARSM(), logits, torch.zeros(misfit))
    plan = policy.plan(arsm.ARSM(), logits, noise)
    returns, tried = torch.ones(4), torch.ones(len(plan.step))
    for wrong in (0.9, returns[:1], returns.unsqueeze(1)):
        with pytest.raises(ValueError, match=r"discount must be a tensor \[4\]"):
            policy.gradient(arsm.ARSM(), logits, plan, returns, tried, wrong)  # pyright: ignore[reportArgumentType]
    for one, other, name in ((returns.long(), tried, "returns"), (returns, tried.long(), "rollout_returns")):
        with pytest.raises(TypeError, match=f"^{name} must be a floating tensor, but are torch.int64"):
            policy.gradient(arsm.ARSM(), logits, plan, one, other)
    with pytest.raises(ValueError, match="returns must be finite"):
        policy.gradient(arsm.ARSM(), logits, plan, returns * torch.nan, tried)
    with pytest.raises(ValueError, match="One return a step"):
        policy.gradient(arsm.ARSM(), logits, plan, torch.zeros(3), torch.zeros(len(plan.step)))
