"""The faster environments of this package: bit for bit Gymnasium's, and found by the library."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.box2d.lunar_lander import heuristic

import arsm
from arsm.rl import Environment, PolicyGradient, make_environment
from arsm.rl.play import play_episodes
from arsm.rl.policies import Perceptron
from arsm.rl.stepped import Stepped
from arsm.rl.streams import Tape
from arsm_experiments.environments.arrays import (
    FEW_LINKS,
    FEW_POLES,
    Acrobot,
    CartPole,
    ColumnLanes,
)
from arsm_experiments.environments.lunar_lander import TrimmedLunarLander
from arsm_experiments.environments.tabular import Tabular

FASTER: dict[str, type[Any]] = {
    "CartPole-v0": CartPole,
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
    "LunarLander-v3": Stepped,
    "FrozenLake-v1": Tabular,
    "FrozenLake8x8-v1": Tabular,
    "CliffWalking-v1": Tabular,
    "CliffWalkingSlippery-v1": Tabular,
    "Taxi-v4": Tabular,
}


@pytest.mark.parametrize("name", FASTER)
def test_the_library_finds_them_by_name(name: str) -> None:
    """By the entry points of the installed package, which `pip install ./experiments` writes."""
    found = make_environment(name, horizon=30)
    assert isinstance(found, FASTER[name])
    assert isinstance(found, Environment)
    assert (found.name, found.horizon) == (name, 30)
    if isinstance(found, Stepped):
        assert isinstance(found.make(), TrimmedLunarLander)


def test_with_options_an_encoder_or_a_function_it_is_gymnasiums_own() -> None:
    own = [
        make_environment("CartPole-v1", encoder=lambda seen: seen[:2]),
        make_environment("FrozenLake-v1", options={"is_slippery": False}),
        make_environment(lambda: gymnasium.make("CartPole-v1")),
    ]
    assert all(isinstance(each, Stepped) for each in own)


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "LunarLander-v3"])
def test_an_agent_learns_the_same_from_gymnasiums_own(name: str) -> None:
    """Rollouts and updates are those of the adapter for any environment."""
    found = []
    for environment in (name, lambda: gymnasium.make(name)):
        agent = PolicyGradient(
            environment, arsm.RLOO(2), horizon=40, episodes_an_iteration=2, seed=1
        )
        history = agent.learn(episodes=6)
        weights = [parameter.detach().numpy() for parameter in agent.network.parameters()]
        found.append((weights, [x.returns for x in history], [x.rollouts for x in history]))
        agent.close()
    assert found[0][1:] == found[1][1:]
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FASTER)
def test_a_branch_with_the_true_actions_is_the_true_episode(name: str) -> None:
    """What the protocol promises, asked through the protocol alone."""
    environment = make_environment(name, horizon=30)
    width = environment.observations
    layers = ((np.zeros((width, environment.choices[0])), np.zeros(environment.choices[0])),)
    policy = Perceptron(layers, environment.choices)
    episodes = play_episodes(environment, policy, [4, 5], Tape(0, 2, (1, environment.choices[0])))
    trails = [one.trail for one in episodes]
    for number, one in enumerate(episodes):
        middle = len(one.rewards) // 2
        # two branches at one step, so that lanes that share anything show it
        branches = environment.restore(
            trails, np.full(2, number), np.full(2, middle), [()] * 2, lanes=2
        )
        for time in range(middle, len(one.rewards)):
            seen, rewards, _, _ = branches.step(np.stack([one.actions[time]] * 2))
            assert rewards.tolist() == [one.rewards[time]] * 2
            following = [*one.observations, one.last_observation][time + 1]
            np.testing.assert_array_equal(seen, np.stack([following] * 2))
    environment.close()


@pytest.mark.parametrize(
    ("name", "steps", "lanes"),
    [
        ("CartPole-v1", 2500, 2),
        ("CartPole-v1", 2500, FEW_POLES + 1),
        ("Acrobot-v1", 3000, 2),
        ("Acrobot-v1", 3000, FEW_LINKS + 1),
    ],
)
def test_array_environments_are_gymnasiums_bit_for_bit(name: str, steps: int, lanes: int) -> None:
    generator = np.random.default_rng(0)
    ours, theirs = make_environment(name), gymnasium.make(name, max_episode_steps=-1)
    seed = 0
    while steps > 0:
        first, _ = theirs.reset(seed=seed)
        played, seen = ours.reset(range(seed, seed + lanes))
        assert isinstance(played, ColumnLanes)
        np.testing.assert_array_equal(seen[0], first)
        for _ in range(600):
            actions = generator.integers(ours.choices, size=(lanes, 1))
            observation, reward, terminated, _, _ = theirs.step(actions[0, 0])
            seen, rewards, over, _ = played.step(actions)
            np.testing.assert_array_equal(seen[0], observation)
            np.testing.assert_array_equal(played.columns[:, 0], theirs.unwrapped.state)  # pyright: ignore
            assert (rewards[0], over[0]) == (reward, terminated)
            steps -= 1
            if terminated:
                break
        seed += 2


@pytest.mark.parametrize("together", [1, 100])
def test_acrobot_squares_as_gymnasium_does(together: int) -> None:
    """Where x**2 and x * x differ in the last bit, as they do for one double in a thousand with
    glibc's pow.
    """
    generator = np.random.default_rng(0)

    def first_that_differ(candidates: Any, squared: Any) -> Any:
        order = np.argsort(squared * squared == np.float_power(squared, 2.0), stable=True)
        return candidates[order[:100]]  # where pow is exact, any will do

    speeds, angles = (
        generator.uniform(-12.0, 12.0, size=200_000),
        generator.uniform(-3.0, 3.0, size=200_000),
    )
    speeds = first_that_differ(speeds, speeds)
    angles = first_that_differ(angles, 0.25 + 0.5 * np.cos(angles) + 1.0)
    states = np.stack([generator.uniform(-3.0, 3.0, size=100), angles, speeds, speeds[::-1]])
    actions = generator.integers(3, size=(100, 1))
    ours = make_environment("Acrobot-v1")
    assert isinstance(ours, Acrobot)
    parts = zip(
        np.split(states, 100 // together, 1), np.split(actions, 100 // together), strict=True
    )
    following = np.concatenate([ours.advance(*part)[0] for part in parts], 1)
    theirs: Any = gymnasium.make(
        "Acrobot-v1", max_episode_steps=-1, disable_env_checker=True
    ).unwrapped
    theirs.reset(seed=0)
    for column, action in enumerate(actions[:, 0]):
        theirs.state = states[:, column].copy()
        theirs.step(action)
        np.testing.assert_array_equal(following[:, column], theirs.state)


def test_trimmed_lunar_lander_is_gymnasiums_bit_for_bit() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = TrimmedLunarLander(), gymnasium.make("LunarLander-v3", max_episode_steps=-1)
    touched = 0
    for seed in range(6):
        first, _ = theirs.reset(seed=seed)
        np.testing.assert_array_equal(ours.reset(seed=seed)[0], first)
        observation = first
        for _ in range(300):
            action = (
                heuristic(theirs.unwrapped, observation)
                if generator.random() < 0.9
                else int(generator.integers(4))
            )
            mine, (observation, reward, terminated, *_) = ours.step(action), theirs.step(action)
            np.testing.assert_array_equal(mine[0], observation)
            assert mine[1:3] == (float(reward), terminated)
            touched += int(observation[6] or observation[7])
            if terminated:
                break
    assert touched > 50


def test_lunar_landers_replay_leads_where_its_steps_do() -> None:
    actions = np.random.default_rng(0).integers(4, size=90).tolist()
    stepped, replayed = TrimmedLunarLander(), TrimmedLunarLander()
    for end in (0, 1, 2, 60, 61):
        stepped.reset(seed=3)
        replayed.reset(seed=3)
        for action in actions[:end]:
            stepped.step(action)
        replayed.replay(actions[:end])
        for action in actions[end:]:
            mine, other = replayed.step(action), stepped.step(action)
            np.testing.assert_array_equal(mine[0], other[0])
            assert mine[1:3] == other[1:3]
            if mine[2]:
                break
