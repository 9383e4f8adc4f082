"""Tables of transitions against Gymnasium's own environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from arsm.rl import PolicyGradient, make_environment
from arsm.rl.environment import Trail
from arsm_experiments.environments.tabular import Tabular, _next_uniform

NAMES = (
    "FrozenLake-v1",
    "FrozenLake8x8-v1",
    "CliffWalking-v1",
    "CliffWalkingSlippery-v1",
    "Taxi-v4",
)


def table(name: str, **arguments: Any) -> Tabular:
    found = make_environment(name, horizon=100, **arguments)
    assert isinstance(found, Tabular)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_table_knows_every_transition_of_gymnasium(name: str) -> None:
    """Its first state; and every step's next state, reward, end and mask are among the table's
    outcomes.
    """
    ours, theirs = table(name), gymnasium.make(name, max_episode_steps=-1)
    generator = np.random.default_rng(0)
    for seed in range(20):
        place, info = theirs.reset(seed=seed)
        _, seen = ours.reset([seed])
        assert seen[0, : ours.observations].argmax() == place
        for _ in range(30):
            if ours.mask is not None:
                np.testing.assert_array_equal(ours.mask[place], info["action_mask"])
            action = int(generator.integers(ours.choices[0]))
            following, reward, terminated, _, info = theirs.step(action)
            cell = (int(place), action)
            outcomes = zip(ours.following[cell], ours.reward[cell], ours.ends[cell], strict=True)
            assert (following, reward, terminated) in [
                (int(a), float(b), bool(c)) for a, b, c in outcomes
            ]
            place = following
            if terminated:
                break


@pytest.mark.parametrize("name", ["FrozenLake8x8-v1", "CliffWalkingSlippery-v1"])
def test_random_transitions_have_the_tables_law(name: str) -> None:
    """Pearson's statistic of 30,000 transitions from one state, below its 1 - 1e-9 quantile if the
    law is right.
    """
    ours = table(name)
    base: Any = gymnasium.make(name).unwrapped
    start, count = 20, 30_000
    state = np.stack(
        [np.full(count, start), np.random.default_rng(0).integers(2**63, size=count)]
    ).astype(np.uint64)
    following, *_ = ours.advance(state, np.full((count, 1), 1))
    chances: dict[int, float] = {}
    for chance, to, *_ in base.P[start][1]:
        chances[to] = chances.get(to, 0.0) + chance
    found = {to: int((following[0] == to).sum()) for to in chances}
    assert sum(found.values()) == count
    statistic = sum(
        (found[to] - count * chance) ** 2 / (count * chance) for to, chance in chances.items()
    )
    assert statistic < 45
    # another law is seen
    assert sum((found[to] - count / 4) ** 2 / (count / 4) for to in chances) > 45


def test_uniforms_are_those_of_splitmix64() -> None:
    """The published first outputs for the seed 1234567."""
    counter, numbers = np.array([1234567], np.uint64), []
    for _ in range(3):
        counter, uniform = _next_uniform(counter)
        numbers.append(uniform[0])
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert numbers == [(x >> 11) * 2.0**-53 for x in published]


@pytest.mark.parametrize("randomness", ["same", "fresh"])
def test_branches_go_on_with_the_same_or_with_fresh_randomness(randomness: Any) -> None:
    ours = table("FrozenLake8x8-v1", randomness=randomness)
    lanes, _ = ours.reset([3])
    states, given = [], []
    for _ in range(12):
        states.append(lanes.state())
        given.append(lanes.step(np.zeros((1, 1), int))[0])
    trail = Trail(3, np.zeros((12, 1), int), np.concatenate(states))
    streams = [(1, number) for number in range(3)]
    branches = ours.restore([trail], np.zeros(3, int), np.full(3, 2), streams, 3)
    seen = np.stack([branches.step(np.zeros((3, 1), int))[0] for _ in range(10)], 1)
    assert (seen == np.concatenate(given[2:])).all() == (randomness == "same")
    assert (seen[0] == seen[1]).all() == (randomness == "same")


def test_taxis_masks_are_kept() -> None:
    agent = PolicyGradient("Taxi-v4", horizon=30)
    assert agent.environment.masks
    agent.learn(episodes=4)
    base: Any = gymnasium.make("Taxi-v4").unwrapped
    for place in range(0, 500, 50):
        mask = base.action_mask(place)
        assert mask[agent.predict(place, mask=mask)]
    with pytest.raises(ValueError, match="CliffWalking-v1 has no time limit; give one as horizon"):
        make_environment("CliffWalking-v1")
