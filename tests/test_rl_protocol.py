"""The `Environment` protocol: an environment of the user's own, and those that packages offer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arsm
from arsm.rl import Environment, EnvironmentFailure, Lanes, PolicyGradient, Trail, make_environment
from arsm.rl import environments as making
from arsm.rl.environment import Array, Randomness
from arsm.rl.stepped import Stepped
from tests.test_rl_environments import Walk


@dataclass(frozen=True)
class Ladder:
    """Climb from rung 0 by choosing "up" (1) of three moves; every step pays the rung's number.

    Rungs of any number of episodes are one array, as a batched simulator would have them.
    """

    name: str = "Ladder"
    horizon: int = 8
    jitter: bool = False
    """Whether a step depends on how many others are played beside it, which is forbidden."""

    shape = (2,)
    observations = 2
    choices = (3,)
    masks = True
    agents = 1
    lanes = None

    def reset(self, seeds: Sequence[int]) -> tuple[Lanes, Array]:
        lanes = Rungs(self, np.array([[seed % 2] for seed in seeds]))
        return lanes, self.see(lanes.rungs)

    def restore(
        self,
        trails: Sequence[Trail],
        episode: Array,
        step: Array,
        streams: Sequence[Sequence[int]],
        lanes: int,
    ) -> Lanes:
        places = zip(episode, step, strict=True)
        return Rungs(self, np.array([trails[e].states[t] for e, t in places]))

    def see(self, rungs: Array) -> Array:
        """The rung, a constant, and the mask: nobody steps below the ground."""
        mask = np.concatenate([rungs > 0, np.ones((len(rungs), 2))], 1)
        return np.concatenate([rungs / 8, np.ones_like(rungs), mask], 1)

    def encode(self, observation: Any) -> Array:
        return np.array([observation / 8, 1.0])

    def decode(self, actions: Array) -> list[str]:
        return [("down", "stay", "up")[action] for action in actions[:, 0]]

    def close(self) -> None:
        pass


class Rungs:
    """The lanes of a ladder."""

    replayed = 0

    def __init__(self, ladder: Ladder, rungs: Array) -> None:
        self.ladder, self.rungs = ladder, rungs

    def state(self) -> Array:
        return self.rungs

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        self.rungs = np.maximum(self.rungs + actions - 1, 0)
        rewards = self.rungs[:, 0] + (len(actions) > 1 if self.ladder.jitter else 0.0)
        over = np.zeros(len(actions), bool)
        return self.ladder.see(self.rungs), rewards.astype(float), over, over

    def keep(self, lanes: Array) -> None:
        self.rungs = self.rungs[lanes]

    def restore(self, lane: int) -> None:
        raise AssertionError("all lanes start at once")


@pytest.mark.parametrize("credit", [None, arsm.RLOO(2), arsm.ARSM()], ids=repr)
def test_an_agent_learns_in_an_environment_of_the_users_own(credit: Any) -> None:
    agent = PolicyGradient(Ladder, credit, hidden=(), learning_rate=0.1, episodes_an_iteration=8)
    assert isinstance(agent.environment, Ladder)
    history = agent.learn(episodes=200)
    best = sum(range(1, 9))
    assert np.mean(history[0].returns) < 0.75 * best
    assert agent.evaluate(2).returns in ((best, best + 8.0), (best + 8.0, best), (best, best))
    assert agent.predict(3) == "up"
    assert agent.predict(0, mask=[0, 1, 1]) == "up"
    assert sum(x.replayed for x in history) == 0


def test_one_whose_lanes_are_not_independent_is_refused_while_learning() -> None:
    agent = PolicyGradient(lambda: Ladder(jitter=True), hidden=(), episodes_an_iteration=4)
    with pytest.raises(EnvironmentFailure, match=r"^Ladder gave something else at step 1 "):
        agent.learn(episodes=4)


def test_what_the_adapter_would_do_is_the_environments_own() -> None:
    assert isinstance(Ladder(), Environment)
    assert isinstance(make_environment(Walk, horizon=5), Environment)
    assert not isinstance(Walk(), Environment)
    given: tuple[dict[str, Any], ...] = (
        {"horizon": 5},
        {"encoder": abs},
        {"snapshot": (abs, abs)},
        {"randomness": "fresh"},
    )
    for arguments in given:
        with pytest.raises(ValueError, match=r"Ladder is an arsm\.rl\.Environment, which has its"):
            make_environment(Ladder, **arguments)


def offer(folder: Path, package: str, *lines: str) -> None:
    """An installed package with these entry points."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[arsm.environments]", *lines]) + "\n")


def make_ladder(name: str, horizon: int, randomness: Randomness) -> Environment:
    return Ladder(f"{name} {randomness}", min(horizon, 8))


def test_packages_offer_environments_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = "tests.test_rl_protocol:make_ladder"
    offer(tmp_path, "climbing", f"Ladder-v7 = {here}", f"MountainCar-v0 = {here}")
    offer(tmp_path, "falling", "Stairs-v7 = falling.stairs:make")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    making._entries.cache_clear()
    try:
        # a name that Gymnasium does not know, and one whose time limit of 200 it does
        assert make_environment("Ladder-v7", 5) == Ladder("Ladder-v7 same", 5)
        found = make_environment("MountainCar-v0", randomness="fresh")
        assert found == Ladder("MountainCar-v0 fresh", 8)
        own = make_environment("MountainCar-v0", 5, encoder=lambda seen: seen)
        assert isinstance(own, Stepped)
        with pytest.raises(ModuleNotFoundError, match="falling"):
            make_environment("Stairs-v7")
        (tmp_path / "falling-1.0.dist-info" / "entry_points.txt").write_text(
            "[arsm.environments]\nLadder-v7 = falling.stairs:make\n"
        )
        making._entries.cache_clear()
        with pytest.raises(ValueError, match="make_ladder are both offered for Ladder-v7; uninst"):
            make_environment("Ladder-v7")
    finally:
        making._entries.cache_clear()
