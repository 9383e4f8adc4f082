"""Observations of every space, action masks, and what environments may give."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import arsm
from arsm.rl import EnvironmentFailure, PolicyGradient, Value, make_environment
from arsm.rl.environment import ENDLESS
from arsm.rl.spaces import categories_of_actions, encode, encoded_shape, full_mask
from arsm.rl.stepped import Stepped
from tests.test_rl_environments import Walk

NESTED = spaces.Dict(
    {
        "place": spaces.Discrete(3, start=1),
        "bag": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1.0, 1.0, (2,))]),
        "name": spaces.Text(5),
    }
)


@pytest.mark.parametrize(
    ("space", "seen", "shape", "vector"),
    [
        (spaces.Discrete(4), 2, (4,), [0, 0, 1, 0]),
        (spaces.Discrete(3, start=-1), np.int64(-1), (3,), [1, 0, 0]),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), (3,), [1, 0, 1]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), (5,), [0, 1, 1, 0, 0]),
        (
            spaces.MultiDiscrete(np.array([[2, 2]]), start=np.array([[1, 1]])),
            np.array([[2, 1]]),
            (4,),
            [0, 1, 1, 0],
        ),
        (spaces.Box(-1.0, 1.0, (2, 1)), np.array([[0.5], [-0.5]]), (2, 1), [0.5, -0.5]),
        (spaces.Box(0, 255, (1, 2), np.uint8), np.array([[255, 51]], np.uint8), (1, 2), [1.0, 0.2]),
        (spaces.Box(0.0, 1.0, ()), 0.25, (1,), [0.25]),
    ],
    ids=str,
)
def test_every_space_becomes_numbers(
    space: Any, seen: Any, shape: tuple[int, ...], vector: list[float]
) -> None:
    assert encoded_shape(space) == shape
    np.testing.assert_array_equal(encode(space, seen), vector)


def test_dictionaries_and_tuples_are_joined_without_their_text() -> None:
    seen = {"place": 3, "bag": (np.array([0, 1]), np.array([0.5, 0.25])), "name": "ten"}
    assert encoded_shape(NESTED) == (7,)
    joined = {"bag": [0, 1, 0.5, 0.25], "place": [0, 0, 1]}
    np.testing.assert_array_equal(
        encode(NESTED, seen),
        np.concatenate([joined[key] for key in NESTED.spaces if key in joined]),
    )


@pytest.mark.parametrize(
    "space",
    [spaces.Text(5), spaces.Dict({"name": spaces.Text(5)}), spaces.Graph(NESTED["place"], None)],
)
def test_spaces_without_an_encoding_have_no_shape(space: Any) -> None:
    assert encoded_shape(space) is None


def test_an_observation_outside_its_space_is_an_error() -> None:
    with pytest.raises(ValueError, match="the observation 4 lies outside its space of 4 values"):
        encode(spaces.Discrete(4), 4)
    with pytest.raises(
        ValueError, match=r"the observation \[0, 3\] lies outside its space of \[2, 3\] values"
    ):
        encode(spaces.MultiDiscrete([2, 3]), [0, 3])


def test_actions_of_every_discrete_space() -> None:
    found = [
        categories_of_actions(space, "x")
        for space in (
            spaces.Discrete(3, start=2),
            spaces.MultiDiscrete([2, 4]),
            spaces.MultiBinary(3),
        )
    ]
    assert [(first.tolist(), sizes) for first, sizes in found] == [
        (2, (3,)),
        ([0, 0], (2, 4)),
        ([0, 0, 0], (2, 2, 2)),
    ]
    with pytest.raises(ValueError, match="has actions Text"):
        categories_of_actions(spaces.Text(3), "x")


@pytest.mark.parametrize(
    "mask", [np.array([1, 0, 0, 1, 1], np.int8), (np.array([True, False]), [False, True, True])]
)
def test_masks_of_several_actions_are_filled_up(mask: Any) -> None:
    np.testing.assert_array_equal(full_mask(mask, (2, 3)), [1, 0, 0, 0, 1, 1])


class Room(gymnasium.Env[Any, Any]):
    """Four rooms in a row; a dictionary of what is seen. Walls stop, and the last room pays. Ends
    after 12 steps.
    """

    observation_space = spaces.Dict(
        {"room": spaces.Discrete(4), "time": spaces.Box(0, 12, (1,)), "note": spaces.Text(9)}
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.room, self.time = int(self.np_random.integers(2)), 0
        return self.seen(), self.info()

    def seen(self) -> dict[str, Any]:
        return {
            "room": self.room,
            "time": np.array([self.time], np.float32),
            "note": f"room {self.room}",
        }

    def info(self) -> dict[str, Any]:
        return {}

    def step(self, action: Any) -> Any:
        self.room = min(max(self.room + int(action) - 1, 0), 3)
        self.time += 1
        return self.seen(), float(self.room == 3), False, self.time == 12, self.info()


class MaskedRoom(Room):
    """Whoever walks against a wall breaks it."""

    def mask(self) -> Any:
        return np.array([self.room > 0, True, self.room < 3], np.int8)

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask()} if self.time < 12 else {}

    def step(self, action: Any) -> Any:
        if not self.mask()[action]:
            raise ZeroDivisionError("the wall is broken")
        return super().step(action)


class AskedRoom(MaskedRoom):
    def info(self) -> dict[str, Any]:
        return {}

    def action_masks(self) -> Any:
        return self.mask().astype(bool)


def test_dictionary_observations_need_no_encoder_and_no_horizon() -> None:
    environment = make_environment(Room)
    assert isinstance(environment, Stepped)
    assert (environment.shape, environment.horizon, environment.way, environment.masks) == (
        (5,),
        ENDLESS,
        "state",
        False,
    )
    agent = PolicyGradient(Room, arsm.ARSM(), learning_rate=0.05, episodes_an_iteration=1)
    history = agent.learn(episodes=40)
    assert np.mean([x.returns[0] for x in history[-10:]]) > 7 > history[0].returns[0]
    assert agent.predict({"room": 0, "time": np.zeros(1), "note": ""}) == 2


@pytest.mark.parametrize("kind", [MaskedRoom, AskedRoom])
@pytest.mark.parametrize("method", [arsm.ARSM(), arsm.RLOO(2), Value.actor_critic()], ids=repr)
def test_a_masked_action_is_never_taken(kind: type[Room], method: Any) -> None:
    """Neither by true episodes, nor as pseudo actions, nor by rollouts, nor by the test of the ways
    to branch.
    """
    agent = PolicyGradient(kind, method, episodes_an_iteration=2)
    assert agent.environment.masks
    agent.learn(episodes=8)
    assert agent.evaluate(5, deterministic=False).mean >= 0
    with torch.no_grad():
        list(agent.network.parameters())[-1].copy_(
            torch.tensor([9.0, 0.0, 5.0], dtype=torch.float64)
        )
    seen = {"room": 0, "time": np.zeros(1), "note": ""}
    assert agent.predict(seen) == 0
    assert agent.predict(seen, mask=np.array([0, 1, 1])) == 2
    assert agent.predict([seen, seen], mask=[[0, 1, 0], [0, 1, 1]], batch=True) == [1, 2]


class NoWay(MaskedRoom):
    def info(self) -> dict[str, Any]:
        return {"action_mask": np.zeros(3, np.int8)}


class LongMask(MaskedRoom):
    def info(self) -> dict[str, Any]:
        return {"action_mask": np.ones(4, np.int8)}


class Growing(Room):
    observation_space = spaces.Box(0, 1, (2,))

    def seen(self) -> Any:
        return np.zeros(2 + (self.time > 3))


class Endless(Room):
    def step(self, action: Any) -> Any:
        seen, reward, *_ = super().step(action)
        return seen, reward, False, False, {}


class Paid(Room):
    """Pays with something that is no number."""

    pay: Any = "much"

    def step(self, action: Any) -> Any:
        seen, _, *rest = super().step(action)
        return seen, self.pay, *rest


class PaidNothing(Paid):
    pay = None


class MaskSeen(Room):
    """The mask is a part of the observation, as in PettingZoo's classic games."""

    observation_space = spaces.Dict(
        {"room": spaces.Discrete(4), "action_mask": spaces.MultiBinary(3)}
    )

    def seen(self) -> Any:
        return {"room": self.room, "action_mask": np.array([1, 1, 0], np.int8)}


class SeenAndObeyed(MaskSeen):
    def info(self) -> dict[str, Any]:
        return {"action_mask": self.seen()["action_mask"]}


class LateMask(MaskedRoom):
    """The mask comes with the first step."""

    def info(self) -> dict[str, Any]:
        return super().info() if self.time else {}

    def step(self, action: Any) -> Any:
        return Room.step(self, action)


def test_a_mask_that_nothing_would_enforce_is_refused() -> None:
    with pytest.raises(ValueError, match="MaskSeen has its action mask in its observations, which"):
        make_environment(MaskSeen)
    assert make_environment(SeenAndObeyed).masks
    assert not make_environment(MaskSeen, encoder=lambda seen: [seen["room"]]).masks
    with pytest.raises(
        EnvironmentFailure, match=r'LateMask gives info\["action_mask"\] in its step'
    ):
        make_environment(LateMask)


def test_what_an_environment_may_not_do() -> None:
    wrong = [
        (NoWay, "raised ValueError in its action mask: an action mask allows no action"),
        (LongMask, "an action mask must be 3 values of 0 or 1"),
        (Growing, "Growing gave an observation of 3 numbers instead of 2"),
        (Paid, "Paid gave a reward of 'much'; it must be a number"),
        (PaidNothing, "PaidNothing gave a reward of None; it must be a number"),
    ]
    for kind, message in wrong:
        with pytest.raises(EnvironmentFailure, match=message):
            make_environment(kind)
    with pytest.raises(
        ValueError,
        match="Endless has no time limit and did not end within 1,000 random steps; give",
    ):
        make_environment(Endless)
    assert make_environment(Endless, horizon=20).horizon == 20
    with pytest.raises(
        EnvironmentFailure,
        match="The encoder raised KeyError on the first observation of Room: 'hall'",
    ):
        make_environment(Room, encoder=lambda seen: seen["hall"])
    with pytest.raises(
        ValueError, match=r"Gone has observations Text.*, which have no encoding; give an encoder"
    ):
        make_environment(type("Gone", (Room,), {"observation_space": spaces.Text(3)}))
    with pytest.raises(TypeError, match=r"must be a gymnasium\.Env, a PettingZoo Par"):
        make_environment(dict)


class Flagged(Walk):
    """Ends after 7 steps, and says so with a number."""

    flag: Any = int
    time = 0

    def reset(self, **options: Any) -> Any:
        self.time = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        assert self.time < 7, "it was over"
        self.time += 1
        seen, reward, *_ = super().step(action)
        return seen, reward, self.flag(self.time == 7), self.flag(0), {}


@pytest.mark.parametrize("flag", [int, np.int64, np.bool_, np.array])
@pytest.mark.parametrize("method", [Value.actor_critic(None), arsm.ARSM()], ids=repr)
def test_flags_may_be_numbers(flag: Any, method: Any) -> None:
    kind = type("Kind", (Flagged,), {"flag": staticmethod(flag)})
    agent = PolicyGradient(kind, method, horizon=30, episodes_an_iteration=1)
    (iteration,) = agent.learn(episodes=1)
    assert 7 <= iteration.steps <= 7 + 7 * iteration.rollouts
    assert len(agent.environment.reset([0])[0].step(np.zeros((1, 1), int))[3]) == 1


def test_observations_are_compared_after_encoding() -> None:
    """A dictionary with an encoder of its own is as deterministic as its numbers are."""
    found = make_environment(Room, encoder=lambda seen: [seen["room"], seen["time"][0]])
    assert isinstance(found, Stepped)
    assert (found.way, found.shape) == ("state", (2,))


@pytest.mark.parametrize(
    ("name", "shape", "actions", "options"),
    [
        ("FrozenLake-v1", (16,), (4,), {}),
        ("Taxi-v4", (500,), (6,), {}),
        ("Blackjack-v1", (45,), (2,), {}),
        ("CliffWalking-v1", (48,), (4,), {"horizon": 60}),
        ("minigrid:MiniGrid-Empty-5x5-v0", (151,), (7,), {}),
        ("minigrid:MiniGrid-DoorKey-5x5-v0", (151,), (7,), {}),
    ],
)
def test_these_run_without_an_encoder(name: str, shape: Any, actions: Any, options: Any) -> None:
    if ":" in name:
        pytest.importorskip(name.partition(":")[0])
    agent = PolicyGradient(name, budget=4, **options)
    assert (agent.environment.shape, agent.environment.choices) == (shape, actions)
    assert not isinstance(agent.environment, Stepped) or agent.environment.way in ("state", "copy")
    agent.learn(episodes=1)
    agent.close()
