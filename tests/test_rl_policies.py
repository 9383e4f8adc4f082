"""Policies of any module, and teams of agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import arsm
from arsm.rl import (
    ActionConditioned,
    PolicyGradient,
    Settings,
    Value,
    make_environment,
)
from arsm.rl.networks import TeamNetwork, mlp, perceptron
from arsm.rl.policies import ModulePolicy, Perceptron
from arsm.rl.stepped import Stepped


class Light(gymnasium.Env[Any, Any]):
    """An image whose left or right half is lit; acting on the lit side pays 1. Ten steps."""

    observation_space = spaces.Box(0, 255, (1, 4, 4), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self.picture(), {}

    def picture(self) -> Any:
        self.side = int(self.np_random.integers(2))
        image = np.zeros((1, 4, 4), np.uint8)
        image[:, :, 2 * self.side : 2 * self.side + 2] = 255
        return image

    def step(self, action: Any) -> Any:
        reward = float(action == self.side)
        self.time += 1
        return self.picture(), reward, False, self.time == 10, {}


def convolutions(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, outputs)
    )


@pytest.mark.parametrize("method", [arsm.RLOO(2), Value.actor_critic()], ids=repr)
def test_a_convolutional_policy_learns_from_images(method: Any) -> None:
    """In float32 and evaluation mode, although it has dropout."""
    settings = Settings(learning_rate=0.02, episodes_an_iteration=2, entropy=0.0, decay_over=None)
    agent = PolicyGradient(Light, method, policy=convolutions(), settings=settings)
    assert isinstance(agent.policy, ModulePolicy)
    history = agent.learn(episodes=100)
    assert (
        np.mean([x.returns for x in history[-5:]]) > 8.5 > np.mean([x.returns for x in history[:2]])
    )
    assert agent.evaluate(20).mean == 10


@pytest.mark.parametrize(
    "method", [Value(), arsm.RLOO(2), Value.actor_critic(), ActionConditioned()], ids=repr
)
def test_without_a_module_images_are_read_as_vectors(method: Any) -> None:
    agent = PolicyGradient(Light, method, episodes_an_iteration=1)
    before = agent.policy.logits(np.ones((1, 16)))
    agent.learn(episodes=1)
    assert (agent.policy.logits(np.ones((1, 16))) != before).all()


def test_a_module_plays_as_the_perceptron_of_the_same_weights(tmp_path: Path) -> None:
    runs = []
    for own in (False, True):
        module = mlp(4, (32, 32), 2, torch.Generator().manual_seed(0)) if own else None
        agent = PolicyGradient("CartPole-v1", policy=module, horizon=40)
        history = agent.learn(episodes=3)
        runs.append(([x.returns for x in history], history[-1].steps))
    assert runs[0] == runs[1]
    agent.save(tmp_path / "agent.pt")
    with pytest.raises(ValueError, match="cannot hold the agent's policy; give the same"):
        PolicyGradient.from_file(tmp_path / "agent.pt")
    again = PolicyGradient.from_file(
        tmp_path / "agent.pt", policy=mlp(4, (32, 32), 2, torch.Generator())
    )
    assert torch.equal(next(again.network.parameters()), next(agent.network.parameters()))


def test_module_policies_reach_worker_processes() -> None:
    results = []
    for engine in ("in-process", "pool"):
        module = mlp(4, (5,), 2, torch.Generator().manual_seed(0))
        agent = PolicyGradient("CartPole-v1", policy=module, horizon=30, engine=engine, workers=1)
        results.append([x.steps for x in agent.learn(episodes=2)])
        agent.close()
    assert results[0] == results[1]


def test_modules_that_cannot_be_policies() -> None:
    with pytest.raises(
        ValueError, match=r"must give 2 logits per observation for the actions \[2\], but for 50"
    ):
        PolicyGradient(Light, policy=convolutions(3))
    with pytest.raises(ValueError, match="but for 50 observations it gave tuple"):
        PolicyGradient("CartPole-v1", policy=nn.LSTM(4, 2))
    for wrong in (nn.ReLU(), nn.Linear, "mlp"):
        with pytest.raises(TypeError, match=r"policy must be a torch.nn.Module with parameters"):
            PolicyGradient(Light, policy=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="All parameters of the policy are frozen"):
        PolicyGradient(Light, policy=convolutions(2).requires_grad_(False))


class Meeting:
    """PettingZoo's parallel interface: three agents on a line, of which each sees itself and the
    mean; being near pays.

    The last agent leaves after four steps, and all after eight.
    """

    possible_agents = ("anna", "bert", "carl")

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-9.0, 9.0, (2 + (agent == "bert"),))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents: list[str] = list(self.possible_agents)
        self.at = dict(
            zip(self.agents, np.random.default_rng(seed).normal(size=3).tolist(), strict=True)
        )
        self.time = 0
        return self.seen(), {}

    def seen(self) -> dict[str, Any]:
        mean = sum(self.at.values()) / 3
        return {
            name: np.array([self.at[name], mean, 1.0][: 2 + (name == "bert")])
            for name in self.agents
        }

    def step(self, actions: dict[str, int]) -> Any:
        assert sorted(actions) == sorted(self.agents)
        for name, action in actions.items():
            self.at[name] += 0.3 * (action - 1)
        self.time += 1
        rewards = {name: -abs(self.at[name]) for name in self.agents}
        left = [name for name in self.agents if name != "carl" or self.time < 4]
        seen, truncated = self.seen(), dict.fromkeys(self.agents, self.time == 8)
        terminated = {name: name not in left for name in self.agents}
        self.agents = [] if self.time == 8 else left
        return seen, rewards, terminated, truncated, {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", [arsm.ARSM(), arsm.RLOO(2)], ids=repr)
def test_a_team_learns_with_shared_and_with_separate_policies(shared: bool, method: Any) -> None:
    agent = PolicyGradient(
        Meeting, method, shared_policy=shared, learning_rate=0.03, episodes_an_iteration=4
    )
    assert (agent.environment.choices, agent.environment.agents) == ((3, 3, 3), 3)
    assert isinstance(agent.network, TeamNetwork)
    assert len(agent.network.networks) == (1 if shared else 3)
    before = agent.evaluate(40, deterministic=False).mean
    agent.learn(episodes=160)
    assert agent.evaluate(40, deterministic=False).mean > 0.75 * before  # returns are negative


@pytest.mark.parametrize("count", [1, 3])
def test_the_numpy_policy_of_a_team_is_its_network(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    network = TeamNetwork([mlp(4, (6,), 5, generator) for _ in range(count)], 3)
    for parameter in network.parameters():
        nn.init.normal_(parameter, generator=generator)
    seen = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    policy = perceptron(network, (5, 5, 5))
    assert isinstance(policy, Perceptron)
    expected = network(seen).detach().view(7, 3, 5)
    np.testing.assert_allclose(policy.logits(seen.numpy()), expected.numpy(), rtol=1e-12)
    first = (network.networks[0])(seen[:, :4])
    torch.testing.assert_close(expected[:, 0], first.detach())


def test_a_team_is_one_environment() -> None:
    found = make_environment(Meeting)
    assert isinstance(found, Stepped)
    assert found.shape == (9,)
    lanes, seen = found.reset([0])
    assert seen[0, 2] == seen[0, 8] == 0 < seen[0, 5]  # padded to bert's length
    rewards, ends = [], []
    for _ in range(8):
        seen, reward, terminated, over = lanes.step(np.array([[1, 1, 1]]))
        rewards.append(reward[0])
        ends.append((bool(terminated[0]), bool(over[0])))
    assert rewards[0] < rewards[-1] < 0  # carl has left, and with him his cost
    assert ends == [(False, False)] * 7 + [(False, True)]
    assert (seen[0, 6:] == 0).all()


class OneWay(Meeting):
    """Nobody may go left."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed, options)[0], self.infos()

    def step(self, actions: dict[str, int]) -> Any:
        assert all(action > 0 for action in actions.values())
        return *super().step(actions)[:4], self.infos()

    def infos(self) -> dict[str, Any]:
        return {name: {"action_mask": np.array([0, 1, 1])} for name in self.agents}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


def test_a_video_of_a_team_obeys_its_masks_to_the_end(tmp_path: Path) -> None:
    agent = PolicyGradient(OneWay, hidden=())
    *_, bias = agent.network.parameters()
    bias.data[0] = 9.0
    assert agent.video(tmp_path / "team.gif", OneWay()) == 8


class InTurns(Meeting):
    """PettingZoo's other interface, in which agents take turns."""

    def agent_iter(self) -> Any:
        yield from self.possible_agents


def test_agents_that_take_turns_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a PettingZoo ParallelEnv .*, but .* makes a InTurns"):
        PolicyGradient(InTurns)


def test_a_team_predicts_for_each_agent() -> None:
    agent = PolicyGradient(Meeting)
    seen, _ = Meeting().reset(seed=0)
    actions = agent.predict(seen)
    assert sorted(actions) == ["anna", "bert", "carl"]
    assert all(action in (0, 1, 2) for action in actions.values())


def test_a_spread_task_of_mpe2_runs() -> None:
    mpe2 = pytest.importorskip("mpe2.simple_spread_v3")
    agent = PolicyGradient(lambda: mpe2.parallel_env(N=3, max_cycles=5), budget=3)
    assert (agent.environment.shape, agent.environment.choices) == ((54,), (5, 5, 5))
    (iteration,) = agent.learn(episodes=1)
    assert iteration.returns[0] < 0
