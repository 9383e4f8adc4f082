"""Stable-Baselines3's PPO and A2C for a number of CPU seconds; PPO with action masks; independent
PPO for teams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from sb3_contrib import MaskablePPO  # pyright: ignore[reportMissingImports]
from stable_baselines3 import A2C, PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.vec_env import VecEnv, VecNormalize  # pyright: ignore[reportMissingImports]

from benchmarks.agents_report import WINDOW

FOR_EVER = 10**9
OFTEN = 20


class UntilSpent(BaseCallback):
    """Ends learning when the process has spent its CPU seconds; notes when the task was solved."""

    def __init__(self, begin: float, seconds: float, line: float) -> None:
        super().__init__()
        self.begin, self.seconds, self.line = begin, seconds, line
        self.solved: list[float] = []

    def _on_step(self) -> bool:
        spent = time.process_time() - self.begin
        if self.n_calls % OFTEN == 0 and not self.solved:
            recent = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            if len(recent) == WINDOW and np.mean(recent) >= self.line:
                self.solved.append(spent)
        return spent < self.seconds


def learn(
    method: str,
    make: Callable[[], Any],
    options: dict[str, Any],
    seed: int,
    seconds: float,
    episodes: int,
    line: float,
) -> dict[str, Any]:
    """Learn for these CPU seconds; the mean returns of episodes with sampled and with the likeliest
    actions.
    """
    begin = time.process_time()
    rest = {name: _schedule(value) for name, value in options.items()}
    count, normalize = rest.pop("environments", 8), rest.pop("normalize", False)
    kind = {"PPO": PPO, "A2C": A2C, "MaskablePPO": MaskablePPO}[method]
    if kind is MaskablePPO:
        make = partial(Masked, make)
    team = not isinstance(probe := make(), gymnasium.Env)
    probe.close()
    environment: Any = (
        TeamVector(make, count) if team else make_vec_env(make, n_envs=count, seed=seed)
    )
    if normalize:
        environment = VecNormalize(environment)
    model = kind("MlpPolicy", environment, seed=seed, device="cpu", **rest)
    _schedule_by_time(model, begin, seconds)
    callback = UntilSpent(begin, seconds, line)
    model.learn(FOR_EVER, callback=callback)
    spent = time.process_time() - begin
    normalise = environment.normalize_obs if normalize else lambda seen: seen
    play = play_teams if team else play_singles
    returns = {
        name: float(np.mean(play(model, make, normalise, episodes, likely)))
        for name, likely in (("sampled", False), ("likeliest", True))
    }
    environment.close()
    return {**returns, "cpu": spent, "steps": model.num_timesteps, "solved": callback.solved}


class Masked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Action masks from `info` where MaskablePPO looks for them."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make())
        self.mask = np.ones(self.action_space.n, bool)  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, **arguments: Any) -> Any:
        seen, info = self.env.reset(**arguments)
        self.mask = info["action_mask"] > 0
        return seen, info

    def step(self, action: Any) -> Any:
        *rest, info = self.env.step(action)
        self.mask = info["action_mask"] > 0
        return *rest, info

    def action_masks(self) -> Any:
        """[C]: whether an action is allowed."""
        return self.mask


def _schedule(value: Any) -> Any:
    """ "lin_0.001", as the zoo writes it, falls from 0.001 to 0."""
    if not (isinstance(value, str) and value.startswith("lin_")):
        return value
    first = float(value.removeprefix("lin_"))
    return lambda left: first * left


def _schedule_by_time(model: Any, begin: float, seconds: float) -> None:
    """Let schedules see the share of CPU time that is left instead of the share of steps."""

    def update(steps: int, total: int) -> None:
        model._current_progress_remaining = max(0.0, 1 - (time.process_time() - begin) / seconds)

    model._update_current_progress_remaining = update


def play_singles(
    model: Any, make: Callable[[], Any], normalise: Any, episodes: int, likely: bool
) -> list[float]:
    """The returns of episodes, played in lock step."""
    envs = [make() for _ in range(episodes)]
    seen = [env.reset(seed=1_000_000 + number)[0] for number, env in enumerate(envs)]
    totals, playing = [0.0] * episodes, list(range(episodes))
    masked = isinstance(envs[0], Masked)
    while playing:
        masks = (
            {"action_masks": np.stack([envs[number].mask for number in playing])} if masked else {}
        )
        shown = normalise(np.stack([seen[number] for number in playing]))
        actions, _ = model.predict(shown, deterministic=likely, **masks)
        over = set()
        for number, action in zip(playing, actions, strict=True):
            seen[number], reward, terminated, truncated, _ = envs[number].step(action)
            totals[number] += float(reward)
            if terminated or truncated:
                over.add(number)
                envs[number].close()
        playing = [number for number in playing if number not in over]
    return totals


def play_teams(
    model: Any, make: Callable[[], Any], normalise: Any, episodes: int, likely: bool
) -> list[float]:
    """The returns of episodes, summed over the agents."""
    env, totals = make(), []
    for number in range(episodes):
        seen, _ = env.reset(seed=1_000_000 + number)
        total = 0.0
        while env.agents:
            names = list(env.agents)
            actions, _ = model.predict(
                np.stack([seen[name] for name in names]), deterministic=likely
            )
            seen, rewards, *_ = env.step(dict(zip(names, map(int, actions), strict=True)))
            total += float(sum(rewards.values()))
        totals.append(total)
    env.close()
    return totals


class TeamVector(VecEnv):
    """Every agent of every copy is an environment of its own: independent learners that share one
    network.
    """

    def __init__(self, make: Callable[[], Any], copies: int) -> None:
        self.copies = [make() for _ in range(copies)]
        self.names = list(self.copies[0].possible_agents)
        first = self.names[0]
        spaces = self.copies[0].observation_space(first), self.copies[0].action_space(first)
        super().__init__(copies * len(self.names), *spaces)
        self._actions = np.zeros(self.num_envs, int)
        self._reset_count = 0

    def _fresh(self, env: Any) -> list[Any]:
        self._reset_count += 1
        seen, _ = env.reset(seed=self._reset_count)
        return [seen[name] for name in self.names]

    def reset(self) -> Any:
        return np.array([row for env in self.copies for row in self._fresh(env)], np.float32)

    def step_async(self, actions: Any) -> None:
        self._actions = np.asarray(actions)

    def step_wait(self) -> Any:
        seen, rewards, dones, infos = [], [], [], []
        for env, own in zip(self.copies, np.split(self._actions, len(self.copies)), strict=True):
            given, paid, *_ = env.step(dict(zip(self.names, map(int, own), strict=True)))
            rows, over = [given[name] for name in self.names], not env.agents
            for row, name in zip(rows, self.names, strict=True):
                infos.append(
                    {"terminal_observation": row, "TimeLimit.truncated": True} if over else {}
                )
                rewards.append(paid[name])
            seen += self._fresh(env) if over else rows
            dones += [over] * len(rows)
        return np.array(seen, np.float32), np.array(rewards, np.float32), np.array(dones), infos

    def close(self) -> None:
        for env in self.copies:
            env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs
