"""Many action variables at once: K knobs that pull on each other, turned by one joint action.

A knob has five moves. ARSM's number of pseudo actions does not grow with K, and one rollout serves
all K variables. Look at the return before and after, of 32 at most: expect about 9 before and, at
K = 4 within 200,000 steps, 18 with ARSM and 21 with leave-one-out.

    python examples/many_actions.py                # K = 4
    python examples/many_actions.py 16 1000000     # K = 16, a million steps
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import arsm
from arsm.rl import PolicyGradient

STEPS, MOVES = 32, 5


class Knobs(gymnasium.Env[Any, Any]):
    """Turn K knobs to their targets; every knob drags its neighbours on the ring along by half of
    its own move.

    The reward of a step is 1 minus the mean distance to the targets, so an episode earns at most
    32.
    """

    def __init__(self, knobs: int = 4) -> None:
        self.knobs = knobs
        self.observation_space = spaces.Box(-4.0, 4.0, (knobs,), np.float64)
        self.action_space = spaces.MultiDiscrete([MOVES] * knobs)
        self.off = np.zeros(knobs)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Targets at random."""
        super().reset(seed=seed)
        self.off, self.time = self.np_random.uniform(-1, 1, self.knobs), 0
        return self.off.copy(), {}

    def step(self, action: Any) -> Any:
        """Move all knobs."""
        move = 0.1 * (np.asarray(action) - MOVES // 2)
        drag = np.roll(move, 1) + np.roll(move, -1) if self.knobs > 2 else move[::-1]
        self.off = np.clip(self.off + move + 0.5 * drag, -4, 4)
        self.time += 1
        return self.off.copy(), float(1 - np.abs(self.off).mean()), False, self.time == STEPS, {}

    def save_state(self) -> Any:
        """How to go back to a state."""
        return self.off, self.time

    def load_state(self, state: Any) -> None:
        """Go back to it; `step` replaces the array and never changes it."""
        self.off, self.time = state


def main(knobs: int = 4, steps: int = 200_000) -> dict[str, tuple[float, float]]:
    """Learn for some steps of the simulator with ARSM and with leave-one-out; the returns before
    and after.
    """
    torch.set_num_threads(1)
    reached = {}
    for estimator in (arsm.ARSM(), arsm.RLOO(2)):
        agent = PolicyGradient(partial(Knobs, knobs), estimator, seed=1)
        before = agent.evaluate(30, deterministic=False).mean
        agent.learn(steps=steps)
        after = agent.evaluate(30, deterministic=False)
        reached[type(estimator).__name__] = before, after.mean
        print(
            f"K = {knobs}, {estimator}: {before:.1f} before, {after.mean:.1f} +- "
            f"{after.standard_error:.1f} after"
        )
        print(f"  {agent.episodes} episodes and {agent.steps:,} steps")
        agent.close()
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("knobs", type=int, nargs="?", default=4, help="K, at least 2")
    parser.add_argument("steps", type=int, nargs="?", default=200_000, help="of the simulator")
    main(**vars(parser.parse_args()))
