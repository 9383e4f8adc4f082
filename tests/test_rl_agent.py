"""The agent: its gradient, its learners, saving and failing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.utils import parameters_to_vector

import arsm
from arsm import policy
from arsm.rl import ActionConditioned, ActorCritic, EnvironmentFailure, PolicyGradient, Settings
from arsm.rl.learners import Batch, Critic
from tests.test_rl_environments import Walk
from tests.test_rl_rollouts import Failing


def weights(agent: PolicyGradient) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in agent.network.parameters()]


METHODS = [
    arsm.ARSM(),
    arsm.ARS(),
    arsm.RLOO(3),
    arsm.LocalExpectation(),
    ActorCritic(),
    ActorCritic(None),
    ActionConditioned(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_learns_and_repeats_itself(method: Any) -> None:
    runs = []
    for _ in range(2):
        agent = PolicyGradient(
            "CartPole-v1", method, horizon=40, budget=4, episodes_an_iteration=2, entropy=0.01, seed=5
        )
        begin = weights(agent)
        history = agent.learn(8)
        assert [x.episodes for x in history] == [2, 4, 6, 8]
        assert max(x.rollouts for x in history) <= 2 * 4
        assert weights(agent) != begin
        runs.append((weights(agent), [x.returns for x in history], history[-1].steps))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("common", [False, True])
def test_engines_give_the_same_weights(common: bool) -> None:
    results = []
    for engine in ("in-process", "pool"):
        agent = PolicyGradient(
            "CartPole-v1", horizon=40, engine=engine, workers=2, common_random_numbers=common, seed=2
        )
        agent.learn(3)
        agent.close()
        results.append(weights(agent))
    assert results[0] == results[1]


class Pair(Walk):
    """Two actions a step, of 2 and 3 choices; pays for the first choice of both."""

    action_space = spaces.MultiDiscrete([2, 3])

    def step(self, action: Any) -> Any:
        _, _, *rest = super().step(float(action[0]))
        return self.at.astype(np.float32), float(action[0] == 0) + float(action[1] == 0), *rest


def test_several_actions_a_step() -> None:
    agent = PolicyGradient(Pair, arsm.ARSM(), horizon=10, budget=20, learning_rate=0.1)
    history = agent.learn(30)
    assert history[0].returns[0] < 15
    assert np.mean([x.returns[0] for x in history[-10:]]) > 18
    action = agent.predict(np.zeros(2))
    assert action.tolist() == [0, 0]


@pytest.mark.parametrize("method", [arsm.ARSM(), ActorCritic()], ids=repr)
def test_scaled_rewards_scale_the_gradient_and_are_reported_as_they_are(method: Any) -> None:
    found = []
    for scale in (1.0, 0.25):
        agent = PolicyGradient("CartPole-v1", method, horizon=40, reward_scale=scale)
        for parameter in agent.learner.parameters():  # a critic that says nothing yet
            torch.nn.init.zeros_(parameter)
        (iteration,) = agent.learn(1)
        found.append(
            (torch.cat([p.grad.flatten() for p in agent.network.parameters() if p.grad is not None]), iteration)
        )
    (plain, first), (scaled, second) = found
    assert plain.abs().max() > 0
    torch.testing.assert_close(scaled, 0.25 * plain)
    assert first.returns == second.returns


def test_the_learning_rate_falls_to_nothing() -> None:
    agent = PolicyGradient("CartPole-v1", horizon=40, learning_rate=0.1, decay_over=4)
    sizes = []
    for _ in range(5):
        before = parameters_to_vector(agent.network.parameters()).detach().clone()
        agent.learn(1)
        sizes.append(float((parameters_to_vector(agent.network.parameters()) - before).detach().abs().max()))
    assert sizes[0] == pytest.approx(0.1, rel=1e-3)  # Adam's first step is as long as its rate
    assert 0 < sizes[3] < 0.1 * 0.25 * 1.5
    assert sizes[4] == 0


def test_common_random_numbers_change_nothing_but_the_noise() -> None:
    """A policy that is all but certain takes the same rollouts either way."""
    returns = []
    for common in (False, True):
        agent = PolicyGradient("CartPole-v1", horizon=40, common_random_numbers=common)
        with torch.no_grad():
            list(agent.network.parameters())[-1].copy_(torch.tensor([40.0, 0.0], dtype=torch.float64))
        returns.append([x.returns for x in agent.learn(2)])
    assert returns[0] == returns[1]


def test_predict_takes_the_likeliest_action_or_samples() -> None:
    agent = PolicyGradient("CartPole-v1")
    with torch.no_grad():
        weight, bias = list(agent.network.parameters())[-2:]
        weight.zero_()
        bias.copy_(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert agent.predict(np.zeros(4)) == 1
    assert {agent.predict(np.zeros(4), deterministic=False) for _ in range(100)} == {0, 1}
    with pytest.raises(ValueError, match="must have 4 numbers"):
        agent.predict(np.zeros(5))


def test_saved_and_loaded_it_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    whole = PolicyGradient("CartPole-v1", ActorCritic(), horizon=40, seed=1)
    whole.learn(6)
    first = PolicyGradient("CartPole-v1", ActorCritic(), horizon=40, seed=1)
    first.learn(3)
    first.save(tmp_path / "agent.pt")
    second = PolicyGradient("CartPole-v1", ActorCritic(), horizon=40, seed=1)
    second.load(tmp_path / "agent.pt")
    history = second.learn(3)
    assert weights(second) == weights(whole)
    assert history[-1].episodes == 6
    other = PolicyGradient("CartPole-v1", ActorCritic(), hidden=(5,))
    with pytest.raises(ValueError, match=r"another hidden \(\[10, 10\]\)"):
        other.load(tmp_path / "agent.pt")


def test_what_was_learned_before_a_failure_is_kept() -> None:
    agent = PolicyGradient(Failing, horizon=200)
    agent.learn(2)
    kept = weights(agent)
    object.__setattr__(agent.environment, "horizon", 300)
    with pytest.raises(EnvironmentFailure, match="Failing raised ZeroDivisionError"):
        agent.learn(5)
    assert weights(agent) == kept
    assert agent.episodes == 2


class WalkWithoutRewards(Walk):
    def step(self, action: Any) -> Any:
        seen, _, *rest = super().step(action)
        return seen, float("nan"), *rest


def test_refusals() -> None:
    with pytest.raises(ValueError, match="less than the 3 pseudo actions"):
        PolicyGradient("LunarLander-v3", arsm.ARSM(), budget=2)
    wrong: list[tuple[str, Any, str]] = [
        ("optimizer", "sgd", '"adam" or "rmsprop", but is "sgd"'),
        ("discounting", "half", '"none" or "gamma'),
        ("gamma", 1.5, r"gamma must lie in \(0, 1\]"),
        ("learning_rate", 0.0, "learning_rate must be positive"),
        ("learning_rate", float("inf"), "learning_rate must be positive and finite"),
        ("entropy", float("nan"), "entropy must be finite"),
        ("reward_scale", -1.0, "reward_scale must be positive"),
        ("decay_over", 0, "decay_over must be at least 1"),
        ("episodes_an_iteration", 0, "episodes_an_iteration must be at least 1"),
        ("hidden", 10, r"hidden must be the sizes of layers, such as \(10, 10\), but is 10"),
        ("hidden", (10, 0), r"hidden must be the sizes of layers, .*, but is \(10, 0\)"),
    ]
    for name, value, message in wrong:
        with pytest.raises(ValueError, match=message):
            PolicyGradient("CartPole-v1", settings=Settings(**{name: value}))
    for words in ("arsm", arsm.ARSM, ActorCritic):
        with pytest.raises(TypeError, match="estimator must be an estimator such as"):
            PolicyGradient("CartPole-v1", words)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="steps must be at least 1, or None for the whole return, but is 0"):
        ActorCritic(steps=0)
    with pytest.raises(ValueError, match="needs f's derivative"):
        PolicyGradient("CartPole-v1", arsm.estimator("gumbel-softmax"))
    for words in ("carms", "carms:samples=2", "disarm"):
        with pytest.raises(ValueError, match="takes no given action"):
            PolicyGradient("CartPole-v1", arsm.estimator(words))
    for learner in (arsm.RELAX(), arsm.Average(arsm.RELAX(), 2)):
        with pytest.raises(ValueError, match=r"use ActionConditioned\(\)"):
            PolicyGradient("CartPole-v1", learner)
    with pytest.raises(TypeError, match="give its name, its class or a function"):
        PolicyGradient(Walk())  # pyright: ignore[reportArgumentType]
    with pytest.raises(EnvironmentFailure, match="gave a reward of nan; it must be a finite number"):
        PolicyGradient(WalkWithoutRewards, horizon=20)


@pytest.mark.parametrize("method", [arsm.ARSM(), ActorCritic()])
def test_a_policy_that_is_not_finite_is_an_error(method: Any) -> None:
    agent = PolicyGradient("CartPole-v1", method, horizon=20, learning_rate=1e200)
    with pytest.raises(FloatingPointError, match=r"not finite after episode 1; try a smaller .* than 1e\+200"):
        agent.learn(5)


def test_n_step_targets_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    critic = Critic(ActorCritic(3), 2, (5,), 0.9, generator)
    lengths, terminated = (7, 2), (True, False)
    seen = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    last = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    rewards = torch.randn(9, generator=generator, dtype=torch.float64)
    logits = torch.zeros(9, 1, 2, dtype=torch.float64)
    batch = Batch(seen, logits, rewards, rewards, None, lengths, last, terminated)
    with torch.no_grad():
        value = critic.value(seen).squeeze(-1)
        final = critic.value(last).squeeze(-1)
        targets = critic._targets(batch, value)
    begin = 0
    for length, over, ahead in zip(lengths, terminated, final, strict=True):
        for t in range(length):
            expected = 0.0
            for i in range(3):
                if t + i == length:
                    expected += 0.0 if over else 0.9**i * float(ahead)
                    break
                expected += 0.9**i * float(rewards[begin + t + i])
            else:
                beyond = t + 3
                if beyond < length:
                    expected += 0.9**3 * float(value[begin + beyond])
                elif not over:
                    expected += 0.9**3 * float(ahead)
            assert float(targets[begin + t]) == pytest.approx(expected)
        begin += length


def test_the_update_is_the_planned_gradient() -> None:
    """The network's gradient is that of sum_t phi_t g_t, averaged over episodes, plus the entropy's."""
    agent = PolicyGradient("CartPole-v1", horizon=30, episodes_an_iteration=2, entropy=0.1, discounting="gamma^t")
    seen: dict[str, Any] = {}
    plain = agent.learner.gradient

    def spy(batch: Batch, rollouts: policy.Rollouts, returns: torch.Tensor) -> Any:
        seen["batch"], (seen["grad"], loss) = batch, plain(batch, rollouts, returns)
        return seen["grad"], loss

    agent.learner.gradient = spy  # pyright: ignore[reportAttributeAccessIssue]
    before = [parameter.detach().clone() for parameter in agent.network.parameters()]
    agent.learn(2)
    with torch.no_grad():
        for parameter, old in zip(agent.network.parameters(), before, strict=True):
            parameter.copy_(old)
    got = [p.grad.clone() for p in agent.network.parameters() if p.grad is not None]
    logits = agent.network(seen["batch"].observations).unsqueeze(1)
    torch.testing.assert_close(logits, seen["batch"].logits)
    objective = (logits * seen["grad"]).sum() + 0.1 * arsm.entropy(logits).sum()
    expected = torch.autograd.grad(-objective / 2, list(agent.network.parameters()))
    torch.testing.assert_close(got, list(expected))
    discount = seen["batch"].discount
    lengths = seen["batch"].lengths
    torch.testing.assert_close(discount, torch.cat([0.99 ** torch.arange(n).double() for n in lengths]))
