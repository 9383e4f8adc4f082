"""An episode of an agent as an animated picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
from PIL import Image

from arsm.rl.files import written_whole
from arsm.rl.teams import Team

if TYPE_CHECKING:
    from arsm.rl.agent import PolicyGradient

LARGEST = 300
"""Pixels of the longer side."""
COLOURS = 64


def film(
    agent: PolicyGradient, path: str | os.PathLike[str], env: Any, seed: int, every: int
) -> int:
    """Play one episode with the likeliest actions and write one frame per `every` steps.

    Returns the number of steps.
    """
    path = Path(path)
    if path.suffix not in ("", ".gif", ".webp", ".png"):
        raise ValueError(
            f"A video is a .gif, .webp or .png, but {path.name} ends in {path.suffix}."
        )
    # a team's environment is shown as it is, not as one agent
    team = None if isinstance(env, gymnasium.Env) else Team(env)
    seen, info = env.reset(seed=seed)
    frames = [_frame(env)]
    step = 0
    over = False
    while not over and step < agent.environment.horizon:
        if team is None:
            mask = _mask(env, info) if agent.environment.masks else None
            seen, _, terminated, truncated, info = env.step(agent.predict(seen, mask=mask))
            over = bool(terminated or truncated)
        else:
            chosen = agent.predict(seen, mask=team.info(info).get("action_mask"))
            # PettingZoo refuses actions of agents that have left
            present = {name: chosen[name] for name in team.parallel.agents}
            seen, *_, info = team.parallel.step(present)
            over = not team.parallel.agents
        step += 1
        # the last frame shows how it ended
        if step % every == 0 or over:
            frames.append(_frame(env))
    with written_whole(path) as beside:
        frames[0].save(
            beside,
            path.suffix[1:] or "gif",
            save_all=True,
            append_images=frames[1:],
            duration=60,
            loop=0,
        )
    return step


def _mask(env: gymnasium.Env[Any, Any], info: dict[str, Any]) -> Any:
    return info["action_mask"] if "action_mask" in info else env.get_wrapper_attr("action_masks")()


def _frame(env: Any) -> Image.Image:
    drawn = env.render()
    if drawn is None or getattr(drawn, "ndim", 0) != 3:
        raise ValueError('The environment draws nothing; make it with render_mode="rgb_array".')
    frame = Image.fromarray(drawn)
    # a few hundred kilobytes fit into a page; the simulator's own pixels do not
    frame.thumbnail((LARGEST, LARGEST))
    return frame.quantize(COLOURS)
