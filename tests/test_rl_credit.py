"""Credit: advantages from a learned value, branches, both, and the updates that they make."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

import arsm
from arsm import policy
from arsm.rl import ActionConditioned, PolicyGradient, Value
from arsm.rl.credit import Relax, TrueEpisodes, Valued, generalized_advantages
from arsm.rl.play import EpisodeBranches
from arsm.rl.training import divergence
from tests.test_rl_agent import Pair, one_by_one, weights
from tests.test_rl_environments import Walk


def test_returns_and_advantages_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    gamma, trace, lengths, terminated = 0.9, 0.8, (7, 2), (True, False)
    rewards, value = (torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(2))
    last = torch.randn(2, generator=generator, dtype=torch.float64)
    logits, actions = (
        torch.zeros(9, 1, 2, dtype=torch.float64),
        torch.zeros(9, 1, dtype=torch.int64),
    )
    batch = TrueEpisodes(logits, logits, actions, rewards, rewards, None, lengths, last, terminated)
    targets = value + generalized_advantages(batch, value, last, gamma, 1.0, 3)
    advantages = generalized_advantages(batch, value, last, gamma, trace)
    whole = generalized_advantages(batch, value, last, gamma, 1.0)
    mixed = generalized_advantages(batch, value, last, gamma, trace, 2)
    begin = 0
    for length, over, final in zip(lengths, terminated, last.tolist(), strict=True):
        own, paid = value[begin : begin + length].tolist(), rewards[begin : begin + length].tolist()
        after = [*own, 0.0 if over else final]

        def steps(
            t: int, n: int, length: int = length, paid: Any = paid, after: Any = after
        ) -> float:
            n = min(n, length - t)
            return sum(gamma**i * paid[t + i] for i in range(n)) + gamma**n * after[t + n]

        for t in range(length):
            assert float(targets[begin + t]) == pytest.approx(steps(t, 3))
            weights = [(1 - trace) * trace**i for i in range(length - t - 1)]
            weights.append(1 - sum(weights))  # those that reach the end
            average = sum(weight * steps(t, i + 1) for i, weight in enumerate(weights))
            assert float(advantages[begin + t]) == pytest.approx(average - own[t])
            # the rewards alone: the value after the time limit is left out
            paid_on = sum(gamma**i * reward for i, reward in enumerate(paid[t:]))
            assert float(whole[begin + t]) == pytest.approx(paid_on - own[t])
            short = (1 - trace) * steps(t, 1) + trace * steps(t, 2)
            assert float(mixed[begin + t]) == pytest.approx(short - own[t])
        begin += length


def test_relax_reads_the_state_of_every_step_when_the_steps_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many steps of many actions are planned in parts."""
    monkeypatch.setattr(policy, "CELLS", 40)
    generator = torch.Generator().manual_seed(0)
    steps, variables, categories, inputs = 30, 2, 5, 3
    logits = torch.randn(steps, variables, categories, generator=generator, dtype=torch.float64)
    states = torch.randn(steps, inputs, generator=generator, dtype=torch.float64)
    returns = torch.randn(steps, generator=generator, dtype=torch.float64)
    actions = torch.distributions.Categorical(logits=logits).sample()
    batch = TrueEpisodes(
        states, logits, actions, returns, returns, None, (steps,), states[:1], (True,)
    )
    learner = Relax(ActionConditioned(), inputs + variables * categories, (8,), generator)
    assert learner.estimator is not None
    plan = policy.plan(
        learner.estimator, logits.unsqueeze(0), actions.unsqueeze(0), generator=generator
    )
    queries = [part.pose().queries for part in plan.parts]
    assert [len(part.z) for part in queries] == [4] * 7 + [2]
    none = np.zeros(0)
    nothing = EpisodeBranches((), none, none, none, 0, none, 1.0, plan=plan, returns=none)
    found, loss = learner.gradient(batch, nothing)
    begin = 0
    for part in queries:
        rows = slice(begin, begin + len(part.z))
        with learner.control.at(states[rows]):
            expected = learner.estimator.tell(logits[rows], part, returns[rows].unsqueeze(0))
        assert expected is not None
        torch.testing.assert_close(found[rows], expected.detach())
        begin = rows.stop
    assert loss is not None
    loss().backward()
    assert all(parameter.grad is not None for parameter in learner.parameters())
    assert torch.equal(learner.gradient(batch, nothing)[0], found)
    # a gradient never goes on with the states that another one left, nor leaves any
    gradient = partial(batch.gradient, learner.estimator, plan, returns, torch.from_numpy(none))
    with pytest.raises(RuntimeError, match="no state for these steps"):
        gradient()
    with (
        pytest.raises(RuntimeError, match="30 of 60 states were not read"),
        learner.control.at(states.repeat(2, 1)),
    ):
        gradient()
    with learner.control.at(states):
        gradient()
        with pytest.raises(RuntimeError, match="no state for these steps"):
            gradient()
    assert torch.equal(learner.gradient(batch, nothing)[0], found)


def watched(agent: PolicyGradient) -> dict[str, Any]:
    """What the credit is computed from in the next iteration, and the gradient."""
    seen: dict[str, Any] = {}
    gradient = agent.credit.gradient

    def spy(batch: TrueEpisodes, branches: EpisodeBranches) -> Any:
        found = gradient(batch, branches)
        seen.update(batch=batch, branches=branches, plan=branches.plan, grad=found[0])
        if isinstance(agent.credit, Valued):
            with torch.no_grad():
                values = agent.credit.values(batch.observations)
                last = agent.credit.values(batch.last_observations).mean(0)
            seen.update(
                advantages=generalized_advantages(batch, values.mean(0), last, 0.99, 0.95),
                unsure=(values[0] - values[-1]).abs(),
            )
        return found

    agent.credit.gradient = spy  # pyright: ignore[reportAttributeAccessIssue]
    return seen


@pytest.mark.parametrize("where", [None, "random", "unsure"])
def test_every_step_has_an_advantage_or_branches(where: Any) -> None:
    both = {} if where is None else {"branch": arsm.RLOO(2), "every": 3, "where": where}
    agent = one_by_one("CartPole-v1", Value(updates=1, **both), horizon=40, seed=5)
    seen = watched(agent)
    (iteration,) = agent.learn(episodes=1)
    batch, plan = seen["batch"], seen["plan"]
    length = batch.lengths[0]
    score = arsm.one_hot(batch.actions, 2, torch.float64) - batch.logits.softmax(-1)
    expected = seen["advantages"][:, None, None] * score
    if where is None:
        assert (plan, iteration.rollouts, iteration.pseudo_actions) == (None, 0, 0.0)
        torch.testing.assert_close(seen["grad"], expected)
        return
    assert len(plan.played) == length // 3
    elsewhere = torch.ones(length, dtype=torch.bool).index_fill(0, plan.played, False)
    torch.testing.assert_close(seen["grad"][elsewhere], expected[elsewhere])
    agree = plan.pseudo_actions == 0
    assert 0 < iteration.rollouts < len(plan.played)
    assert not seen["grad"][plan.played[agree]].any()
    assert seen["grad"][plan.played[~agree]].any()
    if where == "unsure":
        assert 0 < seen["unsure"][elsewhere].max() <= seen["unsure"][plan.played].min()


def test_branches_stay_within_the_budget() -> None:
    credit = Value(branch=arsm.RLOO(3), every=1)
    agent = one_by_one("CartPole-v1", credit, horizon=40, budget=5, seed=5)
    seen = watched(agent)
    assert 0 < max(x.rollouts for x in agent.learn(episodes=4)) <= 5
    assert len(seen["plan"].played) == 5  # of two actions, each has one other at most


def test_updates_end_where_the_policy_has_moved_far() -> None:
    moved, values = [], []
    for bound in (0.0, 0.02, math.inf):
        method = Value(updates=20, divergence=bound)
        agent = one_by_one("CartPole-v1", method, horizon=40, seed=5, learning_rate=0.01)
        played: list[torch.Tensor] = []
        logits = agent._logits
        agent._logits = lambda batch, own=logits, kept=played: kept.append(own(batch)) or kept[-1]
        agent.learn(episodes=1)
        path = [divergence(played[0].detach(), later.detach()) for later in played]
        moved.append(len(path) - 1)  # updates before the last look
        values.append(torch.cat([p.flatten() for p in agent.credit.parameters()]))
        if bound == 0.02:
            assert path[-1] > bound >= max(path[:-1])
    assert moved[0] == 1 < moved[1] < moved[2] == 19
    torch.testing.assert_close(values[0], values[2])  # the value learns on


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Value(updates=2, value_updates=7, divergence=math.inf), [2, 7]),
        (Value.actor_critic(value_updates=7), [1, 7]),
    ],
)
def test_policy_and_value_have_their_numbers_of_updates(method: Any, expected: list[int]) -> None:
    agent = one_by_one("CartPole-v1", method, horizon=40)
    agent.learn(episodes=1)
    assert [
        next(iter(optimizer.state.values()))["step"] for optimizer in agent._optimizers
    ] == expected


@pytest.mark.parametrize("environment", ["CartPole-v1", Pair])
def test_the_update_is_the_planned_gradient(environment: Any) -> None:
    """The network's gradient is that of sum_t phi_t g_t, averaged over episodes, plus the
    entropy's, which falls.
    """
    changes = {"entropy": 0.1, "discounting": "gamma^t", "decay_over": 8}
    agent = one_by_one(environment, horizon=30, episodes_an_iteration=2, **changes)
    agent.episodes = 6
    seen = watched(agent)
    before = [parameter.detach().clone() for parameter in agent.network.parameters()]
    agent.learn(episodes=2)
    with torch.no_grad():
        for parameter, old in zip(agent.network.parameters(), before, strict=True):
            parameter.copy_(old)
    got = [p.grad.clone() for p in agent.network.parameters() if p.grad is not None]
    logits = agent._logits(seen["batch"])
    torch.testing.assert_close(logits, seen["batch"].logits)
    bonus = arsm.entropy(logits).sum() / logits.shape[1]
    objective = (logits.nan_to_num(neginf=0.0) * seen["grad"]).sum() + 0.25 * 0.1 * bonus
    expected = torch.autograd.grad(-objective / 2, list(agent.network.parameters()))
    torch.testing.assert_close(got, list(expected))
    discount = seen["batch"].discount
    lengths = seen["batch"].lengths
    torch.testing.assert_close(
        discount, torch.cat([0.99 ** torch.arange(n).double() for n in lengths])
    )


@pytest.mark.parametrize("cut", [40, None])
def test_a_value_that_says_nothing_leaves_the_estimators_gradient(cut: int | None) -> None:
    """Where all steps branch and V is 0, both is the same as branches alone."""
    found = []
    for method in (arsm.RLOO(2), Value(branch=arsm.RLOO(2), every=1, updates=1, cut=cut)):
        agent = one_by_one("CartPole-v1", method, horizon=40, seed=5, budget=None)
        for parameter in agent.credit.parameters():
            torch.nn.init.zeros_(parameter)
        seen = watched(agent)
        agent.learn(episodes=1)
        found.append(seen["grad"])
    assert found[0].abs().max() > 0
    torch.testing.assert_close(*found)


def test_rollouts_are_cut_and_valued(tmp_path: Path) -> None:
    """A value of 50 everywhere but after the end: the longest rollouts have 3 rewards of 1 and
    gamma^3 50.
    """
    credit = Value(branch=arsm.RLOO(2), every=1, cut=3, where="random")
    agent = one_by_one("CartPole-v1", credit, horizon=40, seed=5, budget=None)
    seen: dict[str, torch.Tensor] = {}
    gradient = TrueEpisodes.gradient

    def spy(
        batch: TrueEpisodes, estimator: Any, plan: Any, returns: torch.Tensor, tried: torch.Tensor
    ) -> torch.Tensor:
        seen.update(true=returns, tried=tried)
        return gradient(batch, estimator, plan, returns, tried)

    with torch.no_grad():
        for parameter in agent.credit.parameters():
            parameter.zero_()
        list(agent.credit.parameters())[-1].fill_(50.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrueEpisodes, "gradient", spy)
        (iteration,) = agent.learn(episodes=1)
    most = 1 + 0.99 + 0.99**2 + 0.99**3 * 50 - 50
    for advantages in seen.values():
        assert float(advantages.max()) == pytest.approx(most, abs=1e-5)
    assert iteration.steps <= 4 * iteration.returns[0] + 3 * iteration.rollouts
    agent.save(tmp_path / "agent.pt")
    assert PolicyGradient.from_file(tmp_path / "agent.pt").credit.estimator == arsm.RLOO(2)


def test_a_critic_learns_the_same_from_steps_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cells in (policy.CELLS, 8):
        monkeypatch.setattr(policy, "CELLS", cells)
        monkeypatch.setattr(policy, "PARTS", 1000)
        agent = one_by_one("CartPole-v1", Value(branch=arsm.RLOO(2)), horizon=40, seed=5)
        agent.learn(episodes=3)
        found.append(weights(agent))
    assert found[0] == [pytest.approx(parameter) for parameter in found[1]]


def test_a_video_shows_one_episode(tmp_path: Path) -> None:
    agent = one_by_one("CartPole-v1", horizon=9)
    path = tmp_path / "policy.gif"
    assert agent.video(path, every=4) == 9
    with Image.open(path) as film:
        assert film.n_frames == 3  # pyright: ignore[reportAttributeAccessIssue]
        first = np.asarray(film.convert("L"))
        film.seek(2)
        assert not np.array_equal(np.asarray(film.convert("L")), first)
    with pytest.raises(ValueError, match='draws nothing; make it with render_mode="rgb_array"'):
        agent.video(path, gymnasium.make("CartPole-v1"))
    with pytest.raises(
        ValueError, match=r"A video is a \.gif, \.webp or \.png, but policy\.mp4 ends in \.mp4"
    ):
        agent.video(tmp_path / "policy.mp4")
    with pytest.raises(ValueError, match="Give video an environment"):
        one_by_one(Walk, horizon=9).video(path)
    assert [file.name for file in tmp_path.iterdir()] == ["policy.gif"]
