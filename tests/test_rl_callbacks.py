"""Learning as users of other libraries know it: limits by name, callbacks, curves and sentences."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from torch import nn

import arsm
from arsm.rl import (
    Checkpoint,
    EnvironmentFailure,
    Evaluate,
    PolicyGradient,
    Settings,
    Value,
    make_environment,
)
from tests.test_rl_environments import Walk


def small(**options: Any) -> PolicyGradient:
    return PolicyGradient(
        "CartPole-v1", arsm.RLOO(2), horizon=20, episodes_an_iteration=1, **options
    )


def test_a_bare_number_is_refused() -> None:
    agent = small()
    for call in (agent.learn, lambda n: next(agent.iterations(n))):
        with pytest.raises(
            TypeError, match=r"does not say what it counts; write \w+\(steps=50000\) .*=50000"
        ):
            call(50_000)
    assert agent.episodes == 0


def test_options_of_other_libraries_are_refused_with_ours() -> None:
    agent = small()
    for call, option, hint in (
        (agent.learn, "total_timesteps", "its options are episodes, steps, seconds, callback"),
        (agent.learn, "progress_bar", 'did you mean "progress"?'),
        (agent.evaluate, "n_eval_episodes", 'did you mean "episodes"?'),
    ):
        with pytest.raises(TypeError, match=f'has no option "{option}"; {re.escape(hint)}'):
            call(**{option: 1000})  # pyright: ignore[reportArgumentType]
    for wrong in ("evaluate", object(), [3]):
        with pytest.raises(TypeError, match="callback must be a function of an Iteration, such as"):
            agent.learn(steps=10, callback=wrong)  # pyright: ignore[reportArgumentType]


def test_a_file_that_cannot_be_written_is_refused_before_learning(tmp_path: Path) -> None:
    agent = small()
    for make in (
        lambda path: Checkpoint(agent, path, every=100),
        lambda path: Evaluate(agent, every=100, best=path),
    ):
        with pytest.raises(FileNotFoundError, match=r"There is no folder .* make it first"):
            make(tmp_path / "missing" / "agent.pt")
        with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
            make(tmp_path)


def test_evaluations_are_kept_and_the_best_agent_is_saved(tmp_path: Path) -> None:
    agent = small()
    watch = Evaluate(agent, every=200, episodes=2, best=tmp_path / "best.pt")
    history = agent.learn(steps=1000, callback=watch)
    assert len(watch.history) == 5
    for number, (steps, found) in enumerate(watch.history, 1):
        assert steps >= 200 * number
        assert len(found.returns) == 2
    best = max(found.mean for _, found in watch.history)
    assert PolicyGradient.from_file(tmp_path / "best.pt").evaluate(2).mean == best

    # an evaluation changes nothing
    alone = small()
    assert [x.returns for x in alone.learn(steps=1000)] == [x.returns for x in history]


def test_an_evaluation_ends_learning() -> None:
    agent = small()
    watch = Evaluate(agent, every=100, episodes=1, stop_at=-1.0)
    agent.learn(steps=10_000, callback=watch)
    assert len(watch.history) == 1
    assert agent.steps < 500


def test_checkpoints_continue_where_they_were_written(tmp_path: Path) -> None:
    agent = small(decay_over=None)
    seen: list[int] = []
    callbacks = [
        Checkpoint(agent, tmp_path / "at-{steps}.pt", every=300),
        lambda iteration: seen.append(iteration.steps),
    ]
    history = agent.learn(steps=1000, callback=callbacks)
    assert seen == [x.steps for x in history]
    files = sorted(tmp_path.glob("at-*.pt"), key=lambda path: int(path.stem[3:]))
    assert len(files) == 3
    first = int(files[0].stem[3:])
    left = [x for x in history if x.steps > first]
    again = PolicyGradient.from_file(files[0])
    assert [x.returns for x in again.learn(episodes=len(left))] == [x.returns for x in left]
    with pytest.raises(ValueError, match="every must be at least 1"):
        Checkpoint(agent, tmp_path / "x.pt", every=0)


def test_curves_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    agent = small()
    watch = Evaluate(agent, every=100, episodes=1)
    history = agent.learn(steps=400, callback=watch, tensorboard_log=tmp_path / "runs")
    curves = EventAccumulator(str(tmp_path / "runs"))
    curves.Reload()
    returns = [(x.step, x.value) for x in curves.Scalars("return/mean")]
    assert returns == [(x.steps, x.returns[0]) for x in history]
    evaluated = [(x.step, x.value) for x in curves.Scalars("evaluation/mean")]
    assert evaluated == [(steps, found.mean) for steps, found in watch.history]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ModuleNotFoundError, match="install it with `pip install tensorboard`"):
        agent.learn(steps=400, tensorboard_log=tmp_path)


def test_records_print_in_a_line() -> None:
    agent = PolicyGradient("CartPole-v1", horizon=20)
    (iteration,) = agent.learn(episodes=1)
    assert len(iteration.returns) > 3
    mean = np.mean(iteration.returns)
    assert repr(iteration) == (
        f"Iteration(1: {agent.episodes:,} episodes, {agent.steps:,} steps, mean return {mean:.4g})"
    )
    assert repr(agent) == f"PolicyGradient(CartPole-v1, Value(), {agent.episodes} episodes)"
    assert repr(Value(branch=arsm.RLOO(2), cut=4)) == "Value(branch=RLOO(2), cut=4)"
    found = agent.evaluate(50)
    error = f"{found.standard_error:.2g}"
    assert repr(found) == f"Evaluation(mean={found.mean:.4g}, standard_error={error}, 50 episodes)"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rat", 'did you mean "learning_rate"?'),
        ("horizn", 'did you mean "horizon"?'),
        ("lr", "use learning_rate=."),
        ("n_envs", "use episodes_an_iteration= for how many."),
        ("tensorboard_log", "use learn(tensorboard_log=...)."),
        ("xyzzy", "known are "),
    ],
)
def test_unknown_settings_are_refused_with_the_right_name(name: str, hint: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError) as caught:
        PolicyGradient("CartPole-v1", **unknown)
    assert str(caught.value).startswith(f'PolicyGradient has no setting "{name}": ')
    assert hint in str(caught.value)
    assert PolicyGradient("CartPole-v1", settings=Settings(seed=4), gamma=0.5).settings.seed == 4


def test_a_policy_that_does_not_read_the_observations_is_refused() -> None:
    for wrong in (nn.Linear(5, 2), nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())):
        with pytest.raises(
            ValueError, match=r"does not take observations \[N, 4\] of CartPole-v1 \(.+\); let its"
        ):
            PolicyGradient("CartPole-v1", policy=wrong)


class WithoutSpaces(gymnasium.Env[Any, Any]):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2), {}


class WithoutActions(WithoutSpaces):
    observation_space = Walk.observation_space


def test_an_environment_without_spaces_is_refused() -> None:
    for kind, missing in (
        (WithoutSpaces, "no action_space and no observation_space"),
        (WithoutActions, "no action_space"),
    ):
        with pytest.raises(
            EnvironmentFailure, match=rf"^{kind.__name__} has {missing}; set self\.action_space"
        ):
            make_environment(kind, horizon=5)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    agent = small()
    agent.save(tmp_path / "agent.pt")
    content = (tmp_path / "agent.pt").read_bytes()
    for share in (0.1, 0.5, 0.9, 0.999):
        (tmp_path / "cut.pt").write_bytes(content[: int(share * len(content))])
        for read in (agent.load, PolicyGradient.from_file):
            with pytest.raises(ValueError, match=r"cut\.pt was not written .* or is damaged\.$"):
                read(tmp_path / "cut.pt")
