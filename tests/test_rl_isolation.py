"""Environments whose instances share state: played as each gives alone, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arsm
from arsm.rl import EnvironmentFailure, PolicyGradient, make_environment
from arsm.rl.play import Episode, EpisodeBranches, play_episodes, play_rollouts
from arsm.rl.policies import Perceptron
from arsm.rl.stepped import Stepped
from arsm.rl.streams import Tape
from tests import shared_state
from tests.shared_state import CachedFunction, Line, OwnHandle, RareSwitch

ONE_AT_A_TIME = (
    shared_state.ClassAttribute,
    shared_state.ModuleVariable,
    shared_state.ModuleGenerator,
    shared_state.GlobalNumPy,
    shared_state.GlobalRandom,
    shared_state.SharedSimulator,
    shared_state.OpenHandle,
    shared_state.DefaultArgument,
    shared_state.Singleton,
    shared_state.ServedByThread,
    shared_state.EnvironmentVariable,
    shared_state.SharedWrapper,
    shared_state.Closure,
    shared_state.ArrayView,
    shared_state.SharedObservation,
)
REFUSED = (
    shared_state.UnseededGenerator,
    shared_state.Clock,
    shared_state.Identity,
    shared_state.Curriculum,
    shared_state.Registry,
    shared_state.IgnoredSeed,
    shared_state.UnseededNumPy,
)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="compares with forked processes")


def given_alone(name: str, episodes: list[Episode]) -> list[Any]:
    """What fresh processes give for the same seeds and actions."""
    asked = [[name, one.trail.seed, one.actions[:, 0].tolist()] for one in episodes]
    answer = subprocess.run(
        [sys.executable, str(Path(shared_state.__file__))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(answer.stdout)


def played(found: Stepped, lefts: float = 0.0) -> tuple[Perceptron, Tape, list[Episode]]:
    """Four episodes of a policy that prefers the left by `lefts`."""
    policy = Perceptron(((np.zeros((2, 2)), np.array([lefts, 0.0])),), found.choices)
    tape = Tape(3, 4, (1, 2))
    return policy, tape, play_episodes(found, policy, [11, 12, 13, 25], tape)


@needs_fork
@pytest.mark.parametrize("kind", [*ONE_AT_A_TIME, Line, CachedFunction, OwnHandle])
def test_shared_state_is_played_as_each_instance_gives_alone(kind: Any) -> None:
    found = make_environment(kind)
    assert isinstance(found, Stepped)
    assert found.alone == (kind in ONE_AT_A_TIME)
    assert found.lanes == (1 if found.alone else 32)
    policy, tape, episodes = played(found)
    for episode, rows in zip(episodes, given_alone(kind.__name__, episodes), strict=True):
        expected = np.array(rows)
        np.testing.assert_array_equal(episode.observations, expected[:-1, :2])
        np.testing.assert_array_equal(episode.rewards, expected[1:, 2])

    # rollouts with the true episodes' actions and noise have the true returns
    episode, step = (x.reshape(-1) for x in np.mgrid[0:4, 0 : shared_state.STEPS : 4])
    branches = EpisodeBranches(
        trails=tuple(one.trail for one in episodes),
        episode=episode,
        step=step,
        action=np.stack([episodes[e].actions[t] for e, t in zip(episode, step, strict=True)]),
        key=9,
        number=np.arange(len(step)),
        gamma=1.0,
        shared=tape.key,
    )
    returns = play_rollouts(found, policy, branches).returns
    expected = [episodes[e].rewards[t:].sum() for e, t in zip(episode, step, strict=True)]
    np.testing.assert_allclose(returns, expected, rtol=1e-12)
    found.close()


@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_a_reset_does_not_set_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=rf"^{kind.__name__} is not deterministic: .*\.$"):
        make_environment(kind)


@pytest.mark.parametrize("method", [None, arsm.RLOO(2)])
def test_shared_state_that_random_play_does_not_meet_is_refused_while_learning(method: Any) -> None:
    """The test before the training passes; the first iteration plays an episode again, alone."""
    agent = PolicyGradient(RareSwitch, method, hidden=(), episodes_an_iteration=4)
    assert isinstance(agent.environment, Stepped)
    assert not agent.environment.alone
    *_, bias = agent.network.parameters()
    bias.data[0] = 8.0
    before = bias.detach().clone()
    with pytest.raises(
        EnvironmentFailure, match=r"^RareSwitch gave something else at step \d+ .* share state"
    ):
        agent.learn(episodes=4)
    assert (bias == before).all()  # nothing was learned from it


def test_an_agent_learns_in_an_environment_with_shared_state() -> None:
    """Every step to the right is worth more: twenty of them are worth the most."""
    agent = PolicyGradient(
        shared_state.SharedSimulator, arsm.RLOO(2), learning_rate=0.05, episodes_an_iteration=4
    )
    agent.learn(episodes=80)
    assert agent.evaluate(3).returns[0] > 0.9 * sum(0.6 * t for t in range(1, 21))
