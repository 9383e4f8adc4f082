"""Gymnasium's LunarLander with a step that does less Python and gives the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, sin, sqrt
from typing import Any, Literal

import numpy as np
from gymnasium.envs.box2d.lunar_lander import LunarLander
from numpy.typing import NDArray

from arsm.rl.branching import Replays

# Gymnasium's constants in metres and seconds: viewport 600 x 400 at 30 pixels a metre, 50 frames a second.
SCALE, FPS = 30.0, 50
HALF_WIDTH, HALF_HEIGHT = 600 / SCALE / 2, 400 / SCALE / 2
MAIN_POWER, SIDE_POWER = 13.0, 0.6
FUEL = (0.0, 0.03, 0.30, 0.03)
DRAWN_AT_ONCE = 128


class TrimmedLunarLander(LunarLander, Replays):
    """LunarLander-v3 without wind, discrete actions, nothing rendered, reset with a seed."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._drawn = []
        return super().reset(seed=seed, options=options)

    def replay(self, actions: Sequence[int]) -> None:
        push, advance = self._push, self.world.Step
        for action in actions[:-1]:
            push(action)
            advance(1.0 / FPS, 180, 60)
        for action in actions[-1:]:  # for the shaping that the next reward is a difference to
            self.step(action)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, Literal[False], dict[str, Any]]:
        self._push(action)
        self.world.Step(1.0 / FPS, 180, 60)

        lander: Any = self.lander
        position, velocity, angle = lander.position, lander.linearVelocity, lander.angle
        left, right = self.legs
        x = (position.x - HALF_WIDTH) / HALF_WIDTH
        y = (position.y - (self.helipad_y + 18 / SCALE)) / HALF_HEIGHT
        vx = velocity.x * HALF_WIDTH / FPS
        vy = velocity.y * HALF_HEIGHT / FPS
        touches_left, touches_right = float(left.ground_contact), float(right.ground_contact)
        seen = np.array(
            (x, y, vx, vy, angle, 20.0 * lander.angularVelocity / FPS, touches_left, touches_right), dtype=np.float32
        )
        shaping = (
            -100 * sqrt(x * x + y * y)
            - 100 * sqrt(vx * vx + vy * vy)
            - 100 * abs(angle)
            + 10 * touches_left
            + 10 * touches_right
        )
        reward = 0.0 if self.prev_shaping is None else shaping - self.prev_shaping
        self.prev_shaping = shaping
        reward -= FUEL[action]
        terminated = False
        if self.game_over or abs(x) >= 1.0:
            terminated, reward = True, -100.0
        if not lander.awake:
            terminated, reward = True, 100.0
        return seen, reward, terminated, False, {}

    def _push(self, action: int) -> None:
        """Fire the engine, if any."""
        drawn = self._drawn
        if not drawn:
            # uniform(-1, 1) is -1 + 2 * random(), of the same stream, and many at once are the same as one by one
            drawn += ((-1.0 + 2.0 * self.np_random.random(DRAWN_AT_ONCE)) / SCALE)[::-1].tolist()
        along, across = drawn.pop(), drawn.pop()
        if not action:
            return
        lander: Any = self.lander
        angle, position = lander.angle, lander.position
        tip_x, tip_y = sin(angle), cos(angle)
        if action == 2:
            arm = 4 / SCALE + 2 * along
            ox = tip_x * arm + -tip_y * across
            oy = -tip_y * arm - tip_x * across
            lander.ApplyLinearImpulse((-ox * MAIN_POWER, -oy * MAIN_POWER), (position.x + ox, position.y + oy), True)
        else:
            arm = 3 * across + (action - 2) * 12 / SCALE
            ox = tip_x * along + -tip_y * arm
            oy = -tip_y * along - tip_x * arm
            lander.ApplyLinearImpulse(
                (-ox * SIDE_POWER, -oy * SIDE_POWER),
                (position.x + ox - tip_x * 17 / SCALE, position.y + oy + tip_y * 14 / SCALE),
                True,
            )
