"""A PettingZoo parallel environment as one Gymnasium environment: the agents' actions
are one joint vector.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from arsm.rl.spaces import categories_of_actions, encode, encoded_shape


def is_parallel(env: Any) -> bool:
    """Whether it has PettingZoo's parallel interface."""
    parts = ("possible_agents", "reset", "step", "action_space", "observation_space")
    # the interface in which agents take turns has all of these too
    turns = hasattr(env, "agent_iter")
    return not isinstance(env, gymnasium.Env) and not turns and all(hasattr(env, x) for x in parts)


class Team(gymnasium.Env[Any, Any]):
    """Several agents that earn one reward: the sum of theirs.

    The observation is [agents * D], the agents' encoded observations side by side,
    padded with zeros to the longest. The action is MultiDiscrete, the agents' actions
    side by side. An agent that has left observes zeros, and its actions are not used.
    The team terminates when all agents are gone and one of them terminated.
    """

    def __init__(self, parallel: Any) -> None:
        self.parallel = parallel
        self.names: list[str] = list(parallel.possible_agents)
        self.size = len(self.names)
        self.seen_spaces = [parallel.observation_space(name) for name in self.names]
        shapes = [encoded_shape(space) for space in self.seen_spaces]
        if any(shape is None for shape in shapes):
            raise ValueError(
                f"{parallel} has observations that have no encoding; encode them in a PettingZoo "
                "wrapper."
            )
        # one network reads all agents, so all need the same size
        self._longest = max(int(np.prod(shape)) for shape in shapes if shape is not None)
        firsts, sizes = zip(
            *(categories_of_actions(parallel.action_space(name), name) for name in self.names),
            strict=True,
        )
        self._single = [first.ndim == 0 for first in firsts]
        self._firsts = [np.atleast_1d(first) for first in firsts]
        self._sizes = sizes
        ends = np.cumsum([len(first) for first in self._firsts])
        self._cuts = ends[:-1]
        self.action_space = spaces.MultiDiscrete([n for own in sizes for n in own])
        self.observation_space = spaces.Box(
            -np.inf, np.inf, (self.size * self._longest,), np.float64
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        seen, infos = self.parallel.reset(seed=seed, options=options)
        return self.join(seen), self.info(infos)

    def step(self, action: Any) -> Any:
        # PettingZoo refuses actions of agents that have left
        present = self.parallel.agents
        chosen = {name: own for name, own in self.split(action).items() if name in present}
        seen, rewards, terminated, truncated, infos = self.parallel.step(chosen)
        # some environments empty the list of agents, others leave it and say who ended
        gone = not self.parallel.agents or all(
            terminated[name] or truncated[name] for name in terminated
        )
        ended = gone and any(terminated.values())
        return (
            self.join(seen),
            float(sum(rewards.values())),
            ended,
            gone and not ended,
            self.info(infos),
        )

    def split(self, action: Any) -> dict[str, Any]:
        """The joint action as {agent: action}."""
        parts = np.split(np.asarray(action), self._cuts)
        rows = zip(self.names, parts, self._firsts, self._single, strict=True)
        return {
            name: int(part[0] + first[0]) if single else part + first
            for name, part, first, single in rows
        }

    def join(self, seen: dict[str, Any]) -> Any:
        """The observations {agent: observation} as one vector."""
        # an agent that has left keeps its place, as zeros
        joined = np.zeros((self.size, self._longest))
        for row, name, space in zip(joined, self.names, self.seen_spaces, strict=True):
            if name in seen:
                vector = encode(space, seen[name])
                row[: len(vector)] = vector
        return joined.reshape(-1)

    def info(self, infos: dict[str, Any]) -> dict[str, Any]:
        """The agents' action masks as one, where they have any; an agent without one
        may do anything.
        """
        if not any("action_mask" in infos.get(name, {}) for name in self.names):
            return {}
        masks = []
        for name, own in zip(self.names, self._sizes, strict=True):
            # one agent may have a mask where another has none
            mask = infos.get(name, {}).get("action_mask")
            masks.append(np.ones(sum(own)) if mask is None else np.asarray(mask).reshape(-1))
        return {"action_mask": np.concatenate(masks)}

    def close(self) -> None:
        self.parallel.close()
