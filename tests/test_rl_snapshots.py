"""Branching by snapshots: the user's own, the environment's, an emulator's and a physics
engine's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import arsm
from arsm.rl import EnvironmentFailure, PolicyGradient, Value, make_environment, ways
from arsm.rl.environment import Trail
from arsm.rl.stepped import Stepped
from tests.statistics import deviations
from tests.test_rl_environments import Walk, WalkThatCannotBeCopied


def get(env: Any) -> Any:
    return env.at.copy(), env.hidden.total


def put(env: Any, state: Any) -> None:
    env.at, env.hidden.total = state[0].copy(), state[1]


class Saves(WalkThatCannotBeCopied):
    def save_state(self) -> Any:
        return get(self)

    def load_state(self, state: Any) -> None:
        put(self, state)


class SavesHalf(Saves):
    def load_state(self, state: Any) -> None:
        self.at = state[0].copy()


def stacked() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.FrameStackObservation(Saves(), 3)


@pytest.mark.parametrize(
    ("make", "pair", "way"),
    [
        (WalkThatCannotBeCopied, (get, put), "snapshot"),
        (Saves, None, "save_state"),
        (SavesHalf, None, "replay"),
        (WalkThatCannotBeCopied, None, "replay"),
    ],
)
def test_an_exact_snapshot_comes_first(make: Any, pair: Any, way: str) -> None:
    """The walk draws random numbers, which a snapshot keeps besides; one that leaves state out is
    found out.
    """
    found = make_environment(make, horizon=30, snapshot=pair)
    assert isinstance(found, Stepped)
    assert found.way == way
    actions = np.random.default_rng(0).integers(found.choices, size=(20, 1))
    lanes, _ = found.reset([5])
    given = [lanes.step(action[None]) for action in actions]
    branches = found.restore([Trail(5, actions)], np.zeros(2, int), np.array([4, 11]), [()] * 2, 1)
    for first in (4, 11):
        for step in range(first, 20):
            np.testing.assert_array_equal(branches.step(actions[step][None])[0], given[step][0])
        if first == 4:
            branches.restore(0)


def test_wrappers_go_with_a_snapshot() -> None:
    found = make_environment(stacked, horizon=30)
    assert isinstance(found, Stepped)
    assert (found.way, found.shape) == ("save_state", (3, 2))


def test_a_snapshot_that_forgets_is_refused() -> None:
    forgets = (get, lambda env, state: setattr(env, "at", state[0].copy()))
    with pytest.raises(
        EnvironmentFailure, match="did not go on as before from its snapshot; let get"
    ):
        make_environment(WalkThatCannotBeCopied, horizon=30, snapshot=forgets)
    for wrong in (get, (get,), (get, 3)):
        with pytest.raises(TypeError, match=r"snapshot must be a pair of functions \(get, set\)"):
            make_environment(Walk, horizon=30, snapshot=wrong)  # pyright: ignore[reportArgumentType]


class SavesAllButTheLastAction(Walk):
    """Sometimes repeats its last action, and leaves that action out when it is saved."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance, self.last = chance, 1

    def save_state(self) -> Any:
        return self.at.copy()

    def load_state(self, state: Any) -> None:
        self.at = state.copy()

    def reset(self, **options: Any) -> Any:
        self.last = 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        if self.np_random.random() >= self.chance:
            self.last = action
        return super().step(self.last)


@pytest.mark.parametrize(("glances", "fooled"), [(ways.GLANCES, False), (10_000, True)])
def test_state_that_seldom_matters_is_found_missing_by_many_short_branches(
    glances: int, fooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen branches to the end of their episodes are not enough: some of these pass."""
    monkeypatch.setattr(ways, "GLANCES", glances)
    chances = (0.08, 0.09, 0.1, 0.11, 0.12)
    makes = [partial(SavesAllButTheLastAction, chance) for chance in chances]
    found = [make_environment(make, horizon=200) for make in makes]
    chosen = [each.way for each in found if isinstance(each, Stepped)]
    assert len(chosen) == len(chances)
    assert ("save_state" in chosen) == fooled


def pong(**options: Any) -> Stepped:
    pytest.importorskip("ale_py")
    found = make_environment(
        "ale_py:ALE/Pong-v5", horizon=20, options={"obs_type": "ram"} | options
    )
    assert isinstance(found, Stepped)
    return found


def test_atari_branches_by_its_emulators_state() -> None:
    found = pong()
    assert (found.way, found.shape) == ("ale", (128,))
    # the way to later branches goes on from the earlier ones
    step = np.array([4, 4, 9, 13])
    trail = Trail(0, np.zeros((20, 1), int))
    assert found.restore([trail], np.zeros(4, int), step, [()] * 4, 4).replayed == 13
    found.close()


def test_every_state_of_a_game_with_sticky_actions_can_be_restored() -> None:
    """Bit for bit: the emulator leaves the action that it may repeat out of its state, which
    showed at one step of sixteen.
    """
    found = pong(frameskip=1)
    true, other = found.make(), found.make()
    get_state, set_state = found.pair
    actions = np.random.default_rng(0).integers(found.choices[0], size=140).tolist()
    true.reset(seed=1)
    other.reset(seed=2)
    states, given = [], []
    for action in actions:
        states.append(get_state(true))
        given.append(true.step(action)[:2])
    for begin in range(60, 136):  # the game moves after some sixty frames
        set_state(other, states[begin])
        for step in range(begin, begin + 4):
            seen, reward, *_ = other.step(actions[step])
            np.testing.assert_array_equal(seen, given[step][0])
            assert reward == given[step][1]
    true.close()
    other.close()
    found.close()


@pytest.mark.parametrize("chance", [0.0, 0.25])
def test_actions_stick_as_often_as_the_game_says(chance: float) -> None:
    found = pong(frameskip=1, repeat_action_probability=chance)
    env: Any = found.make()
    env.reset(seed=0)
    emulator = env.unwrapped.ale
    actions = [int(x) for x in np.arange(2000) % 2]  # so that a repeated one is another
    stuck = []
    for action in actions:
        env.step(action)
        stuck.append(emulator.last[0] != env.unwrapped._action_set[action])
    # two in a row repeat the one before both, which is the wanted one again
    expected = chance / (1 + chance)
    deviation = 2000**0.5 * abs(np.mean(stuck) - expected)
    assert deviation <= 5 * (chance * (1 - chance)) ** 0.5
    # the emulator itself repeats nothing
    assert emulator.getFloat("repeat_action_probability") == 0
    env.close()
    found.close()


def test_branches_of_a_sticky_game_may_have_random_numbers_of_their_own() -> None:
    pytest.importorskip("ale_py")
    found = make_environment(
        "ale_py:ALE/Pong-v5",
        horizon=120,
        options={"obs_type": "ram", "frameskip": 1},
        randomness="fresh",
    )
    actions = np.random.default_rng(0).integers(found.choices, size=(120, 1))
    streams = [(0, 1), (0, 1), (0, 2)]
    lanes = found.restore([Trail(0, actions)], np.zeros(3, int), np.full(3, 70), streams, 3)
    seen = [lanes.step(np.repeat(action[None], 3, 0))[0] for action in actions[70:]]
    first, same, other = np.stack(seen, 1)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    found.close()


class Discretised(gymnasium.ActionWrapper[Any, Any, Any]):
    """Three levels for each number of a continuous action."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.action_space = spaces.MultiDiscrete([3] * env.action_space.shape[0])

    def action(self, action: Any) -> Any:
        low, high = self.env.action_space.low, self.env.action_space.high  # pyright: ignore
        return (low + (high - low) * action / 2).astype(np.float32)


def hopper() -> gymnasium.Env[Any, Any]:
    return Discretised(gymnasium.make("Hopper-v5"))


def test_mujoco_branches_by_its_integration_state() -> None:
    pytest.importorskip("mujoco")
    found = make_environment(hopper)
    assert isinstance(found, Stepped)
    assert (found.way, found.choices, found.horizon) == ("mujoco", (3, 3, 3), 1000)
    found.close()


class Coin(gymnasium.Env[Any, Any]):
    """Two steps. An action pays a coin's toss, tossed again at every step, times 1 or 2."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        reward = (1.0 + action) * float(self.np_random.random() < 0.5) + action * (1 - self.time)
        self.time += 1
        return min(self.time, 1), reward, self.time == 2, False, {}


BOTH = Value(1.0, updates=1, branch=arsm.RLOO(2), every=2, cut=None)
"""Whole returns and rollouts to the end: the value chooses where to branch, and is a baseline."""


@pytest.mark.parametrize(
    ("credit", "randomness", "common"),
    [
        (arsm.RLOO(2), "same", True),
        (arsm.RLOO(2), "fresh", True),
        (arsm.RLOO(2), "same", False),
        (BOTH, "same", True),
        (replace(BOTH, where="random"), "fresh", False),
        (Value.actor_critic(None), "same", True),
    ],
    ids=repr,
)
def test_the_gradient_is_unbiased_with_the_same_and_with_fresh_randomness(
    credit: Any, randomness: Any, common: bool
) -> None:
    plain = {"gamma": 1.0, "hidden": (), "budget": None, "reward_scale": 1.0, "entropy": 0.0}
    plain["common_random_numbers"] = common
    agent = PolicyGradient(Coin, credit, randomness=randomness, episodes_an_iteration=50, **plain)
    weight, bias = agent.network.parameters()
    with torch.no_grad():
        weight.copy_(torch.tensor([[0.3, -0.2], [0.0, 0.5]]))
        bias.zero_()
    p = weight.detach().softmax(0)  # of each state's actions, in columns
    expected = torch.stack(
        [p[:, s] * (q - (p[:, s] * q).sum()) for s, q in enumerate(_values())], 1
    )
    kept = [weight.detach().clone(), bias.detach().clone()]
    grads = []
    for _ in range(100):
        agent._iterate()
        assert weight.grad is not None
        grads.append(-weight.grad.clone())
        with torch.no_grad():
            weight.copy_(kept[0])
            bias.copy_(kept[1])
    samples = torch.stack(grads)
    assert deviations(samples, expected).max() < 1
    assert deviations(samples, 1.5 * expected).max() > 1  # it can tell


def _values() -> list[torch.Tensor]:
    """Q(s, a) up to a constant per state: a coin's toss, and the action's own pay in the first
    step.
    """
    return [
        torch.tensor([0.5, 2.0], dtype=torch.float64),
        torch.tensor([0.5, 1.0], dtype=torch.float64),
    ]


def test_fresh_randomness_differs_by_rollout_and_the_same_does_not() -> None:
    actions = np.zeros((20, 1), int)
    seen = {}
    for randomness in ("same", "fresh"):
        found = make_environment(Walk, horizon=30, randomness=randomness)
        branches = found.restore(
            [Trail(5, actions)], np.zeros(3, int), np.full(3, 4), [(7, 0), (7, 1), (7, 0)], 3
        )
        seen[randomness] = branches.step(actions[:3])[0]
    assert (seen["same"] == seen["same"][0]).all()
    assert (seen["fresh"][0] == seen["fresh"][2]).all()
    assert (seen["fresh"][0] != seen["fresh"][1]).all()
    with pytest.raises(ValueError, match='randomness must be "same" or "fresh", but is \'none\''):
        make_environment(Walk, horizon=30, randomness="none")  # pyright: ignore[reportArgumentType]
