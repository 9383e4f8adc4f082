"""Stable-Baselines3's PPO and A2C for a number of CPU seconds; PPO with action masks; independent
learners for teams.
"""

from __future__ import annotations

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

from benchmarks.agents_watch import Play, Watch

FOR_EVER = 10**9
OFTEN = 20


class UntilSpent(BaseCallback):
    """Ends learning when the process has spent its CPU seconds."""

    def __init__(self, watch: Watch, agents: int, play: Play) -> None:
        super().__init__()
        self.watch, self.agents, self.play = watch, agents, play

    def _on_step(self) -> bool:
        if self.n_calls % OFTEN == 0:
            recent = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            self.watch.look(self.num_timesteps // self.agents, recent, self.play)
        return self.watch.spent() < self.watch.job.seconds


def learn(
    method: str, make: Callable[[], Any], options: dict[str, Any], watch: Watch
) -> dict[str, Any]:
    """Learn for a job's CPU seconds; the mean returns of episodes with sampled and with the
    likeliest actions.
    """
    job = watch.job
    rest = {name: _schedule(value) for name, value in options.items()}
    count, normalize = rest.pop("environments", 8), rest.pop("normalize", False)
    kind = {"PPO": PPO, "A2C": A2C, "MaskablePPO": MaskablePPO}[method]
    if kind is MaskablePPO:
        make = partial(Masked, make)
    team = not isinstance(probe := make(), gymnasium.Env)
    # Stable-Baselines3 counts a step of the environment once per agent
    agents = len(probe.possible_agents) if team else 1
    probe.close()
    environment: Any = (
        TeamVector(make, count) if team else make_vec_env(make, n_envs=count, seed=job.seed)
    )
    if normalize:
        environment = VecNormalize(environment)
    model = kind("MlpPolicy", environment, seed=job.seed, device="cpu", **rest)
    _schedule_by_time(model, watch)
    normalise = environment.normalize_obs if normalize else lambda seen: seen
    episodes_of = play_teams if team else play_singles

    def play(likely: bool) -> float:
        return float(np.mean(episodes_of(model, make, normalise, job.episodes, likely)))

    model.learn(FOR_EVER, callback=UntilSpent(watch, agents, play))
    found = watch.found(model.num_timesteps // agents, play)
    environment.close()
    return found


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


def _schedule_by_time(model: Any, watch: Watch) -> None:
    """Let schedules see the share of CPU time that is left instead of the share of steps."""

    def update(steps: int, total: int) -> None:
        model._current_progress_remaining = max(0.0, 1 - watch.spent() / watch.job.seconds)

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
