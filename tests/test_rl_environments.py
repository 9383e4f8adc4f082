"""The adapter for Gymnasium's environments: ways to branch, time limits, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from arsm.rl import EnvironmentFailure, make_environment
from arsm.rl.environment import Trail
from arsm.rl.stepped import Stepped
from arsm.rl.ways import with_exact_way


class Walk(gymnasium.Env[Any, Any]):
    """A walk on a line; what is wrong with it is up to its subclasses."""

    observation_space = spaces.Box(-10.0, 10.0, (2,))
    action_space: spaces.Space[Any] = spaces.Discrete(2, start=1)

    def __init__(self) -> None:
        self.at = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2)
        return self.at.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.at = self.at + 0.1 * (action - 1.5) + 0.01 * self.np_random.normal(size=2)
        return self.at.astype(np.float32), float(self.at[0]), bool(abs(self.at[0]) > 3), False, {}


class Hidden:
    """State that is no plain data."""

    def __init__(self) -> None:
        self.total = 0.0


class WalkWithHiddenState(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def reset(self, **options: Any) -> Any:
        self.hidden.total = 0.0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.hidden.total += action
        seen, _, *rest = super().step(action)
        return seen, self.hidden.total, *rest


class WalkThatCannotBeCopied(WalkWithHiddenState):
    def __deepcopy__(self, memo: dict[int, Any]) -> Walk:
        return type(self)()  # an empty copy without an error, as Box2D's environments give


class RandomWalk(Walk):
    def step(self, action: Any) -> Any:
        seen, *rest = super().step(action)
        return seen + np.random.default_rng().normal(), *rest


class Key(Walk):
    """A door that pays for a key, which no random walk fetches: it lies where two dozen left turns
    lead.
    """

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def reset(self, **options: Any) -> Any:
        self.held.clear()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        seen, reward, *rest = super().step(action)
        if self.at[0] < -1.5:
            self.held.update({"key": 1})
        self.late = len(self.held)  # an attribute that reset does not know
        return seen, reward + 100 * len(self.held), *rest


class Bag:
    """Holds things, and is no plain data."""

    def __init__(self) -> None:
        self.things: dict[str, int] = {}
        self.clear, self.update = self.things.clear, self.things.update

    def __len__(self) -> int:
        return len(self.things)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bag:
        twin = Bag()
        twin.update(self.things)
        return twin


@pytest.mark.parametrize(("held", "way"), [(dict, "state"), (set, "state"), (Bag, "copy")])
def test_state_that_no_random_walk_reaches_is_branched_too(held: Any, way: str) -> None:
    found = make_environment(lambda: Key(held()), horizon=60)
    assert isinstance(found, Stepped)
    assert found.way == way
    actions = np.zeros((50, 1), int)
    lanes, _ = found.reset([0])
    given = [lanes.step(action[None])[1][0] for action in actions]
    assert max(given) > 90
    branches = found.restore([Trail(0, actions)], np.zeros(2, int), np.array([40, 0]), [()] * 2, 1)
    assert [branches.step(action[None])[1][0] for action in actions[40:]] == given[40:]
    branches.restore(0)
    assert branches.step(actions[:1])[1][0] == given[0]


def limited_cart_pole() -> gymnasium.Env[Any, Any]:
    scaled = gymnasium.wrappers.TransformReward(
        gymnasium.make("CartPole-v1"), lambda reward: float(reward) / 10
    )
    return gymnasium.wrappers.TimeLimit(scaled, 50)


@pytest.mark.parametrize(
    ("which", "way"),
    [
        ("MountainCar-v0", "state"),
        (limited_cart_pole, "state"),
        (lambda: gymnasium.make("Acrobot-v1"), "state"),
        ("LunarLander-v3", "replay"),
    ],
)
def test_the_first_exact_way_is_found(which: Any, way: str) -> None:
    found = make_environment(which)
    assert isinstance(found, Stepped)
    assert found.way == way


@pytest.mark.parametrize(
    ("kind", "way"),
    [(Walk, "state"), (WalkWithHiddenState, "copy"), (WalkThatCannotBeCopied, "replay")],
)
def test_every_way_to_branch(kind: type[Walk], way: str) -> None:
    found = make_environment(kind, horizon=50)
    assert isinstance(found, Stepped)
    assert found.way == way
    generator = np.random.default_rng(1)
    actions = generator.integers(found.choices, size=(20, 1))
    lanes, _ = found.reset([5])
    given = [lanes.step(action[None]) for action in actions]
    places = np.zeros(3, int), np.array([4, 4, 11])
    branches = found.restore([Trail(5, actions)], *places, [()] * 3, 2)
    for step in range(4, 20):
        seen, rewards, *_ = branches.step(np.repeat(actions[step][None], 2, 0))
        np.testing.assert_array_equal(seen, np.repeat(given[step][0], 2, 0))
        np.testing.assert_array_equal(rewards, np.repeat(given[step][1], 2))
    branches.restore(1)
    branches.keep(np.array([1]))
    assert branches.replayed == (19 if way == "replay" else 11)
    for step in range(11, 20):
        np.testing.assert_array_equal(branches.step(actions[step][None])[0], given[step][0])


def limited() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(Walk(), 15)


@pytest.mark.parametrize(("asked", "found"), [(None, 15), (100, 15), (10, 10)])
def test_a_wrappers_time_limit_is_the_horizon_where_an_episode_stops_but_does_not_end(
    asked: int | None, found: int
) -> None:
    environment = make_environment(limited, horizon=asked)
    assert isinstance(environment, Stepped)
    assert (environment.horizon, environment.way) == (found, "state")
    lanes, _ = environment.reset([0])
    for _ in range(found):
        assert not lanes.step(np.ones((1, 1), int))[2][0]


def limited_within() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.OrderEnforcing(limited())


def test_what_is_truncated_is_over_but_not_terminated() -> None:
    environment = make_environment(limited_within)
    assert isinstance(environment, Stepped)
    assert (environment.horizon, environment.way) == (15, "state")
    lanes, _ = environment.reset([0])
    ends = np.array([lanes.step(np.ones((1, 1), int))[2:] for _ in range(15)])[..., 0]
    assert ends.T.tolist() == [[False] * 15, [False] * 14 + [True]]


@pytest.mark.parametrize("which", ["CartPole-v1", "MountainCar-v0", limited, limited_within])
def test_the_earlier_of_the_horizon_and_the_environments_own_limit_holds(which: Any) -> None:
    own = make_environment(which).horizon
    assert [make_environment(which, horizon).horizon for horizon in (own - 1, own + 1)] == [
        own - 1,
        own,
    ]
    with pytest.raises(ValueError, match="horizon must be at least 1, but is 0"):
        make_environment(which, 0)


def test_a_name_may_say_which_module_registers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text(
        'from gymnasium import register\nregister("Late-v0", "tests.test_rl_environments:Walk", '
        "max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment("late_module:Late-v0")
    assert (environment.name, environment.horizon) == ("late_module:Late-v0", 5)
    with pytest.raises(ValueError, match="later_module, to register Late-v0, cannot be imported"):
        make_environment("later_module:Late-v0")


def test_what_is_not_deterministic_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="RandomWalk is not deterministic"):
        make_environment(RandomWalk, horizon=50)


class Images(Walk):
    observation_space = spaces.Box(0, 255, (4, 4, 3), np.uint8)

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        return self.picture(), {}

    def step(self, action: Any) -> Any:
        return self.picture(), *super().step(action)[1:]

    def picture(self) -> Any:
        return np.full((4, 4, 3), int(50 * abs(self.at[0])) % 256, np.uint8)


class Continuous(Walk):
    action_space = spaces.Box(-1.0, 1.0, (1,))


class Square(Walk):
    action_space = spaces.MultiBinary((2, 2))


class Broken(Walk):
    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("no ground")


class Seedless(Walk):
    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset()


class Bare(Walk):
    """Resets as gym's environments did."""

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0]


class Stuck(Walk):
    def close(self) -> None:
        raise ZeroDivisionError("no way out")


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match='There is no environment "CartPoole-v1": did you mean "CartPole-v1"'
    ):
        make_environment("CartPoole-v1")
    with pytest.raises(ValueError, match="give every number a few levels"):
        make_environment("Pendulum-v1")
    with pytest.raises(ValueError, match="has continuous actions"):
        make_environment(Continuous, horizon=5)
    with pytest.raises(ValueError, match="MultiBinary ones of one dimension; flatten"):
        make_environment(Square, horizon=5)
    with pytest.raises(ValueError, match="no time limit"):
        make_environment(Walk)
    with pytest.raises(
        EnvironmentFailure, match="Broken raised ZeroDivisionError in its step: no ground"
    ):
        make_environment(Broken, horizon=5)
    with pytest.raises(
        EnvironmentFailure, match=r"Seedless raised TypeError in its reset\(seed=0\)"
    ):
        make_environment(Seedless, horizon=5)
    with pytest.raises(
        EnvironmentFailure, match=r"Bare must return \(observation, info\) from its reset"
    ):
        make_environment(Bare, horizon=5)
    with pytest.raises(
        EnvironmentFailure, match="Stuck raised ZeroDivisionError in its close: no way out"
    ):
        with_exact_way(Stepped("Stuck", Stuck, (2,), (2,), np.array(1), 5))


def test_an_encoder_makes_vectors_of_images() -> None:
    found = make_environment(Images, horizon=5, encoder=lambda picture: picture[0, 0] / 255)
    assert found.observations == 3
    lanes, seen = found.reset([0, 1])
    assert seen.shape == (2, 3)
    assert lanes.step(np.zeros((2, 1), int))[0].shape == (2, 3)
