"""Several agents with one joint action: mpe2's spread task with 3 or 6 agents, a shared policy and
a team reward.

Look at the team's return, which is negative: expect it to rise from -79 to -61 in 100,000 steps.

    pip install '.[games]'
    python examples/spread.py              # 3 agents
    python examples/spread.py 6 200_000    # 6 agents, twice as many steps
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from arsm.rl import PolicyGradient

STEPS = 25


def spread(agents: int = 3) -> Any:
    """The environment, as its authors make it."""
    from mpe2 import simple_spread_v3  # pyright: ignore[reportMissingImports]

    return simple_spread_v3.parallel_env(N=agents, max_cycles=STEPS)


def get_state(env: Any) -> Any:
    """All positions and velocities, and the time."""
    raw = env.unwrapped
    bodies = [*raw.world.agents, *raw.world.landmarks]
    return [(body.state.p_pos.copy(), body.state.p_vel.copy()) for body in bodies], raw.steps


def set_state(env: Any, state: Any) -> None:
    """Restore them."""
    if not env.agents:
        env.reset(seed=0)
    raw = env.unwrapped
    places, raw.steps = state
    for body, (place, speed) in zip([*raw.world.agents, *raw.world.landmarks], places, strict=True):
        body.state.p_pos, body.state.p_vel = place.copy(), speed.copy()


def main(agents: int = 3, steps: int = 100_000) -> dict[str, Any]:
    """Learn for some steps; returns the agents' first joint action afterwards."""
    torch.set_num_threads(1)
    agent = PolicyGradient(partial(spread, agents), snapshot=(get_state, set_state), seed=1)
    before = agent.evaluate(100, deterministic=False)
    agent.learn(steps=steps)
    after = agent.evaluate(100, deterministic=False)
    for name, found in (("before", before), ("after", after)):
        print(
            f"{agents} agents, team return {name}: {found.mean:.1f} +- {found.standard_error:.1f}"
        )
    seen, _ = spread(agents).reset(seed=0)
    actions = agent.predict(seen)
    print("joint action:", actions)
    agent.close()
    return actions


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agents", type=int, nargs="?", default=3, help="number of agents")
    parser.add_argument("steps", type=int, nargs="?", default=100_000, help="steps of learning")
    main(**vars(parser.parse_args()))
