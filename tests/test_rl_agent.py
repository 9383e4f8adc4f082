"""The agent: its methods, limits and failures."""

from __future__ import annotations

import dataclasses
import io
import math
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.utils import parameters_to_vector

import arsm
from arsm.rl import (
    ActionConditioned,
    EnvironmentFailure,
    Learning,
    PolicyGradient,
    Settings,
    Value,
    training,
)
from arsm.rl.play import EpisodeBranches
from arsm.rl.streams import Tape
from tests.test_rl_environments import Walk
from tests.test_rl_rollouts import Failing


def one_by_one(environment: Any, estimator: Any = None, **changes: Any) -> PolicyGradient:
    """One episode per iteration, the paper's other settings, and RLOO(2), whose rollouts play to
    the end.
    """
    settings = Settings(**dataclasses.asdict(Learning()), decay_over=None)
    return PolicyGradient(environment, estimator or arsm.RLOO(2), settings=settings, **changes)


def weights(agent: PolicyGradient) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in agent.network.parameters()]


METHODS = [
    arsm.ARSM(),
    arsm.ARS(),
    arsm.RLOO(3),
    arsm.LocalExpectation(),
    Value.actor_critic(),
    Value.actor_critic(None),
    ActionConditioned(),
    Value(),
    Value(branch=arsm.RLOO(2), every=4, cut=3),
    Value(branch=arsm.ARSM(), every=4, cut=None, where="random"),
]


@pytest.mark.parametrize("common", [False, True])
def test_rollouts_share_the_true_episodes_noise_only_on_request(
    common: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise that already chose the actions before a branch would bias its rollout."""
    agent = one_by_one("CartPole-v1", horizon=40, budget=4, common_random_numbers=common)
    keys, branched = [], []

    def tape(key: int, *rest: Any) -> Tape:
        keys.append(key)
        return Tape(key, *rest)

    def play(policy: Any, branches: EpisodeBranches) -> EpisodeBranches:
        branched.append(branches)
        return own(policy, branches)

    own = agent._play
    monkeypatch.setattr(training, "Tape", tape)
    monkeypatch.setattr(agent, "_play", play)
    agent.learn(episodes=3)
    assert len(keys) == len(branched) == 3
    for key, branches in zip(keys, branched, strict=True):
        assert branches.key != key
        assert branches.shared == (key if common else None)
    assert len({*keys, *(branches.key for branches in branched)}) == 6


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_learns_and_repeats_itself(method: Any) -> None:
    runs = []
    for _ in range(2):
        agent = one_by_one(
            "CartPole-v1",
            method,
            horizon=40,
            budget=4,
            episodes_an_iteration=2,
            entropy=0.01,
            seed=5,
        )
        begin = weights(agent)
        history = agent.learn(episodes=8)
        assert [x.episodes for x in history] == [2, 4, 6, 8]
        assert max(x.rollouts for x in history) <= 2 * 4
        assert weights(agent) != begin
        runs.append((weights(agent), [x.returns for x in history], history[-1].steps))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("common", [False, True])
def test_engines_give_the_same_weights(common: bool) -> None:
    results = []
    for engine, workers in (("in-process", None), ("pool", 2)):
        agent = one_by_one(
            "CartPole-v1",
            horizon=40,
            engine=engine,
            workers=workers,
            common_random_numbers=common,
            seed=2,
        )
        agent.learn(episodes=3)
        agent.close()
        results.append(weights(agent))
    assert results[0] == results[1]


class Pair(Walk):
    """Two actions per step, of 2 and 3 choices; pays for the first choice of both."""

    action_space = spaces.MultiDiscrete([2, 3])

    def step(self, action: Any) -> Any:
        _, _, *rest = super().step(float(action[0]))
        return self.at.astype(np.float32), float(action[0] == 0) + float(action[1] == 0), *rest


def test_several_actions_a_step() -> None:
    agent = one_by_one(Pair, arsm.ARSM(), horizon=10, budget=20, learning_rate=0.1)
    history = agent.learn(episodes=30)
    assert history[0].returns[0] < 15
    assert np.mean([x.returns[0] for x in history[-10:]]) > 18
    action = agent.predict(np.zeros(2))
    assert action.tolist() == [0, 0]


@pytest.mark.parametrize("method", [arsm.ARSM(), Value.actor_critic()], ids=repr)
def test_scaled_rewards_scale_the_gradient_and_are_reported_as_they_are(method: Any) -> None:
    found = []
    for scale in (1.0, 0.25):
        agent = one_by_one("CartPole-v1", method, horizon=40, reward_scale=scale)
        for parameter in agent.credit.parameters():  # a critic that says nothing yet
            torch.nn.init.zeros_(parameter)
        (iteration,) = agent.learn(episodes=1)
        found.append(
            (
                torch.cat(
                    [p.grad.flatten() for p in agent.network.parameters() if p.grad is not None]
                ),
                iteration,
            )
        )
    (plain, first), (scaled, second) = found
    assert plain.abs().max() > 0
    torch.testing.assert_close(scaled, 0.25 * plain)
    assert first.returns == second.returns


def test_the_number_of_episodes_follows_their_length(tmp_path: Path) -> None:
    """The last iteration's decides; the first has no last one and plays the fewest."""
    for method, horizon, chosen in (
        (Value(), 2, 128),
        (Value(), 20, 100),
        (Value(), 100, 20),
        (Value.actor_critic(), 2, 64),
        (arsm.RLOO(2), 20, 50),
        (Value.actor_critic(), 600, 4),
    ):
        agent = PolicyGradient(Lasting, method, horizon=horizon)
        assert [len(x.returns) for x in agent.iterations(episodes=4 + chosen)] == [4, chosen]
    agent.save(tmp_path / "agent.pt")
    assert PolicyGradient.from_file(tmp_path / "agent.pt", environment=Lasting)._length == 600


class Lasting(Walk):
    """Ends at the horizon only."""

    def step(self, action: Any) -> Any:
        seen, reward, *_ = super().step(action)
        return seen, reward, False, False, {}


class WalkForMore(Walk):
    def step(self, action: Any) -> Any:
        seen, reward, *rest = super().step(action)
        return seen, 100 * reward, *rest


@pytest.mark.parametrize(("scale", "alike"), [(None, True), (1.0, False)])
def test_measured_scales_make_the_unit_of_rewards_immaterial(
    scale: float | None, alike: bool
) -> None:
    found = []
    for kind in (Walk, WalkForMore):
        agent = PolicyGradient(kind, horizon=20, reward_scale=scale, entropy=0.1)
        agent.learn(episodes=12)
        found.append(parameters_to_vector(agent.network.parameters()).detach())
    assert torch.allclose(*found, rtol=1e-6) == alike


class Lottery(gymnasium.Env[Any, Any]):
    """One step, whose reward is 0 or the prize: the first returns are often equal."""

    observation_space, action_space, prize = spaces.Box(0, 1, (1,)), spaces.Discrete(20), 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), self.prize * (action == 7), True, False, {}


class LotteryForMore(Lottery):
    prize = 1e6


@pytest.mark.parametrize("method", [arsm.ARSM(), Value()], ids=repr)
def test_the_unit_of_rewards_is_immaterial_before_returns_differ(method: Any) -> None:
    found = []
    for kind in (Lottery, LotteryForMore):
        agent = PolicyGradient(kind, method, horizon=1, episodes_an_iteration=4, seed=1)
        agent.learn(episodes=40)
        found.append(parameters_to_vector(agent.network.parameters()).detach())
    assert torch.allclose(*found, rtol=1e-6)


def test_the_learning_rate_falls_to_nothing() -> None:
    agent = one_by_one("CartPole-v1", horizon=40, learning_rate=0.1, decay_over=4)
    sizes = []
    for _ in range(5):
        before = parameters_to_vector(agent.network.parameters()).detach().clone()
        agent.learn(episodes=1)
        sizes.append(
            float((parameters_to_vector(agent.network.parameters()) - before).detach().abs().max())
        )
    assert sizes[0] == pytest.approx(0.1, rel=1e-3)  # Adam's first step is as long as its rate
    assert 0 < sizes[3] < 0.1 * 0.25 * 1.5
    assert sizes[4] == 0


def test_the_learning_rate_falls_over_each_call_of_learn() -> None:
    agent = one_by_one("CartPole-v1", horizon=40, learning_rate=0.1, decay_over="learn")
    for _ in range(2):
        rates = [agent._optimizers[0].param_groups[0]["lr"] for _ in agent.iterations(episodes=5)]
        assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])
    assert agent.learn(episodes=1)
    assert agent._optimizers[0].param_groups[0]["lr"] == 0.1


def test_common_random_numbers_change_nothing_but_the_noise() -> None:
    """A policy that is all but certain takes the same rollouts either way."""
    returns = []
    for common in (False, True):
        agent = one_by_one("CartPole-v1", horizon=40, common_random_numbers=common)
        with torch.no_grad():
            list(agent.network.parameters())[-1].copy_(
                torch.tensor([40.0, 0.0], dtype=torch.float64)
            )
        returns.append([x.returns for x in agent.learn(episodes=2)])
    assert returns[0] == returns[1]


def test_predict_takes_the_likeliest_action_or_samples() -> None:
    agent = one_by_one("CartPole-v1")
    with torch.no_grad():
        weight, bias = list(agent.network.parameters())[-2:]
        weight.zero_()
        bias.copy_(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert agent.predict(np.zeros(4)) == 1
    assert {agent.predict(np.zeros(4), deterministic=False) for _ in range(100)} == {0, 1}
    with pytest.raises(ValueError, match="must have 4 numbers"):
        agent.predict(np.zeros(5))


def test_completion_offers_every_name() -> None:
    assert set(arsm.rl.__all__) <= set(dir(arsm.rl))


def test_learning_ends_at_the_first_limit() -> None:
    agent = one_by_one("CartPole-v1", horizon=40)
    assert [x.episodes for x in agent.learn(episodes=3, steps=10**9)] == [1, 2, 3]
    before = agent.steps + agent.replayed
    history = agent.learn(steps=1000)
    assert agent.steps + agent.replayed - before >= 1000
    assert history[-2].steps - before < 1000
    began = time.perf_counter()
    agent.learn(seconds=0.3)
    assert 0.3 <= time.perf_counter() - began < 5
    assert agent.learn(episodes=0) == agent.learn(episodes=5, seconds=0) == []
    seen: list[int] = []

    def stop(iteration: Any) -> bool:
        seen.append(iteration.iteration)
        return len(seen) < 3

    assert [x.iteration for x in agent.learn(episodes=50, callback=stop)] == seen
    assert len(seen) == 3


def test_steps_that_are_played_again_count_as_steps() -> None:
    agent = one_by_one("LunarLander-v3", horizon=40)
    agent.learn(steps=1500)
    assert agent.replayed > 0
    assert agent.steps < 1500 <= agent.steps + agent.replayed


def test_progress_is_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    agent = one_by_one("CartPole-v1", horizon=20)
    for terminal, wanted, shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr("arsm.progress.PATIENCE", 0.0)
        agent.learn(episodes=2, progress=wanted)
        assert ("episode 1, return" in terminal.getvalue()) == shown
        assert terminal.getvalue().endswith("\r\x1b[K") == shown  # the line is gone in the end


def test_an_evaluation_is_a_mean_with_its_error_and_changes_nothing() -> None:
    agent = one_by_one("CartPole-v1", horizon=40)
    agent.learn(episodes=3)
    before = weights(agent), agent.steps, agent.episodes
    found = agent.evaluate(episodes=70)
    assert len(found.returns) == 70
    assert found.mean == pytest.approx(np.mean(found.returns))
    assert found.standard_error == pytest.approx(np.std(found.returns, ddof=1) / 70**0.5)
    assert agent.evaluate(70) == found
    assert agent.evaluate(70, seed=1) != found
    sampled = agent.evaluate(70, deterministic=False)
    assert sampled == agent.evaluate(70, deterministic=False) != found
    assert (weights(agent), agent.steps, agent.episodes) == before
    assert math.isnan(agent.evaluate(1).standard_error)


def test_evaluation_plays_what_predict_says() -> None:
    agent = one_by_one("CartPole-v1", horizon=100, learning_rate=0.03)
    agent.learn(episodes=20)
    env = gymnasium.make("CartPole-v1", max_episode_steps=100)
    seeds = [
        int(x >> np.uint64(33))
        for x in np.random.SeedSequence([0, 0, 0]).generate_state(4, np.uint64)[1:]
    ]
    totals = []
    for seed in seeds:
        seen, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            seen, reward, terminated, truncated, _ = env.step(agent.predict(seen))
            total, over = total + float(reward), terminated or truncated
        totals.append(total)
    assert agent.evaluate(3).returns == tuple(totals)


def test_what_was_learned_before_a_failure_is_kept() -> None:
    agent = one_by_one(Failing, horizon=200)
    agent.learn(episodes=2)
    kept = weights(agent)
    object.__setattr__(agent.environment, "horizon", 300)
    with pytest.raises(EnvironmentFailure, match="Failing raised ZeroDivisionError"):
        agent.learn(episodes=5)
    assert weights(agent) == kept
    assert agent.episodes == 2


def test_a_failure_in_a_rollout_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = (
        PolicyGradient(Walk, arsm.ARSM(), horizon=20, episodes_an_iteration=4) for _ in range(2)
    )
    for agent in (whole, broken):
        agent.learn(episodes=4)

    def fail(*_: Any) -> Any:
        raise EnvironmentFailure("no ground")

    with monkeypatch.context() as patched:
        patched.setattr(broken, "_play", fail)
        with pytest.raises(EnvironmentFailure):
            broken.learn(episodes=4)
    for agent in (whole, broken):
        agent.learn(episodes=8)
    assert weights(broken) == weights(whole)


class WalkWithoutRewards(Walk):
    def step(self, action: Any) -> Any:
        seen, _, *rest = super().step(action)
        return seen, float("nan"), *rest


def test_refusals() -> None:
    with pytest.raises(ValueError, match="less than the 3 pseudo actions"):
        one_by_one("LunarLander-v3", arsm.ARSM(), budget=2)
    wrong: list[tuple[str, Any, str]] = [
        ("optimizer", "sgd", '"adam" or "rmsprop", but is "sgd"'),
        ("discounting", "half", '"none" or "gamma'),
        ("gamma", 1.5, r"gamma must lie in \(0, 1\]"),
        ("learning_rate", 0.0, "learning_rate must be positive"),
        ("learning_rate", float("inf"), "learning_rate must be positive and finite"),
        ("entropy", float("nan"), "entropy must be a finite number"),
        ("reward_scale", -1.0, "reward_scale must be positive"),
        ("decay_over", 0, "decay_over must be at least 1"),
        ("episodes_an_iteration", -1, "episodes_an_iteration must be at least 0"),
        ("hidden", 10, r"hidden must be the sizes of layers, such as \(10, 10\), but is 10"),
        ("hidden", (10, 0), r"hidden must be the sizes of layers, .*, but is \(10, 0\)"),
        ("hidden", (True,), r"hidden must be the sizes of layers, .*, but is \(True,\)"),
        ("budget", 2.5, "budget must be a whole number, but is 2.5"),
        (
            "episodes_an_iteration",
            True,
            "episodes_an_iteration must be a whole number, but is True",
        ),
        ("gamma", "0.9", "gamma must be a finite number, but is '0.9'"),
        ("weighted", "no", "weighted must be True or False, but is 'no'"),
        ("common_random_numbers", 0, "common_random_numbers must be True or False, but is 0"),
        ("seed", -1, r"seed must be a whole number from 0 to 2\^63 - 1, but is -1"),
        ("seed", 2**64, r"seed must be a whole number from 0 to 2\^63 - 1"),
        ("seed", 1.5, r"seed must be a whole number from 0 to 2\^63 - 1, but is 1.5"),
    ]
    for name, value, message in wrong:
        with pytest.raises(ValueError, match=message):
            PolicyGradient("CartPole-v1", settings=Settings(**{name: value}))
    for kind in (arsm.ARSM, Value):
        with pytest.raises(TypeError, match="estimator must be an estimator such as"):
            one_by_one("CartPole-v1", kind)  # pyright: ignore[reportArgumentType]
    for name, value, message in (
        ("steps", 0, "steps must be at least 1, but is 0"),
        ("steps", 2.5, "steps must be a whole number, but is 2.5"),
        ("cut", 0, "cut must be at least 1, but is 0"),
        ("trace", 1.5, r"trace must lie in \[0, 1\], but is 1.5"),
        ("divergence", -1.0, "divergence must not be negative, but is -1.0"),
        ("divergence", float("nan"), "divergence must not be negative, but is nan"),
        ("updates", 0, "updates must be at least 1, but is 0"),
        ("updates", 2.0, "updates must be a whole number, but is 2.0"),
        ("value_updates", 0, "value_updates must be at least 1, but is 0"),
        ("every", 0, "every must be at least 1, but is 0"),
        ("where", "late", 'where must be "unsure" or "random", but is'),
    ):
        with pytest.raises(ValueError, match=message):
            Value(**{name: value})  # pyright: ignore[reportArgumentType]
    for wrong_credit in (arsm.estimator("gumbel-softmax"), Value(branch=arsm.GumbelSoftmax())):
        with pytest.raises(ValueError, match="needs f's derivative"):
            one_by_one("CartPole-v1", wrong_credit)
    with pytest.raises(TypeError, match=r"credit must be an object such as .*, but is 'ppo'"):
        PolicyGradient("CartPole-v1", "ppo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match='has no setting "estimator": use credit='):
        PolicyGradient("CartPole-v1", estimator=arsm.ARSM())
    for gone, instead in (("Proximal", "Value"), ("ActorCritic", "Value.actor_critic")):
        with pytest.raises(ImportError, match=rf"{gone}\(\) is arsm.rl.{instead}\(\) since 0.3"):
            getattr(arsm.rl, gone)
    with pytest.raises(ValueError, match=r"cannot start from a given sample.* arsm\.RLOO"):
        one_by_one("CartPole-v1", arsm.Exact())
    for learner in (arsm.RELAX(), arsm.Average(arsm.RELAX(), 2)):
        with pytest.raises(ValueError, match=r"use ActionConditioned\(\)"):
            one_by_one("CartPole-v1", learner)
    with pytest.raises(TypeError, match="give its name, its class or a function"):
        one_by_one(Walk())  # pyright: ignore[reportArgumentType]
    for horizon, message in (
        (1.5, "a whole number, but is 1.5"),
        (True, "a whole number"),
        (0, "at least 1, but is 0"),
    ):
        with pytest.raises(ValueError, match=f"horizon must be {message}"):
            one_by_one("CartPole-v1", horizon=horizon)  # pyright: ignore[reportArgumentType]
    for settings in (Learning(), {"gamma": 0.9}):
        with pytest.raises(TypeError, match=r"settings must be an arsm\.rl\.Settings, but are a "):
            PolicyGradient("CartPole-v1", settings=settings)  # pyright: ignore[reportArgumentType]
    agent = one_by_one("CartPole-v1")
    with pytest.raises(EnvironmentFailure, match="CartPole-v1 gave an observation of nan"):
        agent.predict(np.full(4, np.nan))
    with pytest.raises(ValueError, match="Say how long to learn: episodes, steps or seconds"):
        agent.learn()
    with pytest.raises(ValueError, match="episodes must be a whole number"):
        agent.learn(episodes=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seconds must be finite and not negative, but is -1"):
        agent.learn(seconds=-1)
    with pytest.raises(ValueError, match="episodes must be at least 1, but is 0"):
        agent.evaluate(0)
    with pytest.raises(
        EnvironmentFailure, match="gave a reward of nan; it must be a finite number"
    ):
        one_by_one(WalkWithoutRewards, horizon=20)


@pytest.mark.parametrize("method", [arsm.ARSM(), Value.actor_critic()])
def test_a_policy_that_is_not_finite_is_an_error(method: Any) -> None:
    agent = one_by_one("CartPole-v1", method, horizon=20, learning_rate=1e200)
    with pytest.raises(
        FloatingPointError, match=r"not finite after episode 1; try a smaller .* than 1e\+200"
    ):
        agent.learn(episodes=5)
