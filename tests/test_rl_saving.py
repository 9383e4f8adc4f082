"""An agent is saved and loaded, and a load that fails leaves it as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import arsm
from arsm.rl import (
    PolicyGradient,
    Value,
)
from tests.test_rl_agent import one_by_one, weights
from tests.test_rl_environments import Walk


def test_saved_and_loaded_it_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    whole = one_by_one("CartPole-v1", Value.actor_critic(), horizon=40, seed=1)
    whole.learn(episodes=6)
    first = one_by_one("CartPole-v1", Value.actor_critic(), horizon=40, seed=1)
    first.learn(episodes=3)
    first.save(tmp_path / "agent.pt")
    second = one_by_one("CartPole-v1", Value.actor_critic(), horizon=40, seed=1)
    second.load(tmp_path / "agent.pt")
    history = second.learn(episodes=3)
    assert weights(second) == weights(whole)
    assert history[-1].episodes == 6
    other = one_by_one("CartPole-v1", Value.actor_critic(), hidden=(5,))
    with pytest.raises(ValueError, match=r"another hidden \(\[10, 10\]\)"):
        other.load(tmp_path / "agent.pt")


def test_a_file_makes_the_agent_again(tmp_path: Path) -> None:
    first = one_by_one(
        "CartPole-v1", arsm.RLOO(3, ridge=1.0), horizon=40, seed=1, hidden=(5,), gamma=0.9
    )
    first.learn(episodes=3)
    first.save(tmp_path / "agent.pt")
    second = PolicyGradient.from_file(tmp_path / "agent.pt")
    assert (second.settings, second.credit.estimator) == (first.settings, first.credit.estimator)
    assert second.environment.horizon == 40
    first.learn(episodes=2)
    second.learn(episodes=2)
    assert weights(first) == weights(second)
    own = one_by_one(Walk, arsm.Average(arsm.RLOO(2), 2), horizon=9)
    own.save(tmp_path / "own.pt")
    with pytest.raises(
        ValueError, match="cannot hold the agent's environment and credit; give the same"
    ):
        PolicyGradient.from_file(tmp_path / "own.pt")
    assert (
        PolicyGradient.from_file(
            tmp_path / "own.pt", environment=Walk, credit=arsm.RLOO(2)
        ).episodes
        == 0
    )


def test_a_load_by_the_class_names_the_call_that_makes_an_agent() -> None:
    with pytest.raises(TypeError, match=r"PolicyGradient.from_file\(path\) makes one\.$"):
        PolicyGradient.load("agent.pt")  # pyright: ignore[reportArgumentType]


def test_a_load_that_fails_leaves_the_agent_as_it_was(tmp_path: Path) -> None:
    agent = one_by_one("CartPole-v1", Value.actor_critic(), horizon=40)
    agent.learn(episodes=2)
    agent.save(tmp_path / "agent.pt")
    other = one_by_one("CartPole-v1", Value.actor_critic(), horizon=40, seed=3)
    other.learn(episodes=1)
    before = copy.deepcopy(other.state_dict())
    saved = torch.load(tmp_path / "agent.pt", weights_only=True)

    def damage(**changes: Any) -> Path:
        torch.save({**saved, "state": {**saved["state"], **changes}}, tmp_path / "damaged.pt")
        return tmp_path / "damaged.pt"

    for changes in (
        {"counters": [1]},
        {"optimizers": []},
        {"credit": [torch.zeros(3)]},
        {"network": {}},
    ):
        with pytest.raises(
            ValueError, match=r"damaged.pt is damaged \(.*; the agent is as it was before"
        ):
            other.load(damage(**changes))
        torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    for content in (b"", b"junk", (tmp_path / "agent.pt").read_bytes()[:500]):
        (tmp_path / "junk.pt").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"junk.pt was not written by PolicyGradient.save, or is damaged"
        ):
            other.load(tmp_path / "junk.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list.pt was not written by PolicyGradient.save"):
        PolicyGradient.from_file(tmp_path / "list.pt")
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "nowhere.pt")
    torch.save({**saved, "arguments": {"estimator": None}}, tmp_path / "old.pt")
    with pytest.raises(ValueError, match=r"old.pt was written by an earlier version of arsm; t"):
        PolicyGradient.from_file(tmp_path / "old.pt")
    other.learn(episodes=1)
    assert not list(tmp_path.glob(".*")), "no file is left half written"
