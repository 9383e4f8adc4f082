"""Gymnasium's LunarLander with a step that does less Python and gives the same numbers, bit for bit."""

from __future__ import annotations

from math import cos, sin, sqrt
from typing import Any, Literal

import numpy as np
from gymnasium.envs.box2d.lunar_lander import LunarLander
from numpy.typing import NDArray

# Gymnasium's constants in metres and seconds: viewport 600 x 400 at 30 pixels a metre, 50 frames a second.
SCALE, FPS = 30.0, 50
HALF_WIDTH, HALF_HEIGHT = 600 / SCALE / 2, 400 / SCALE / 2
MAIN_POWER, SIDE_POWER = 13.0, 0.6


class TrimmedLunarLander(LunarLander):
    """LunarLander-v3 without wind, discrete actions, nothing rendered."""

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, Literal[False], dict[str, Any]]:
        lander: Any = self.lander
        random = self.np_random.random
        # uniform(-1, 1) is -1 + 2 * random(), of the same stream
        along, across = (-1.0 + 2.0 * random()) / SCALE, (-1.0 + 2.0 * random()) / SCALE
        fuel = 0.0
        if action:
            angle = lander.angle
            tip_x, tip_y = sin(angle), cos(angle)
            x, y = lander.position
            if action == 2:
                arm = 4 / SCALE + 2 * along
                ox = tip_x * arm + -tip_y * across
                oy = -tip_y * arm - tip_x * across
                where = (x + ox, y + oy)
                impulse = (-ox * MAIN_POWER, -oy * MAIN_POWER)
                fuel = 0.30
            else:
                arm = 3 * across + (action - 2) * 12 / SCALE
                ox = tip_x * along + -tip_y * arm
                oy = -tip_y * along - tip_x * arm
                where = (x + ox - tip_x * 17 / SCALE, y + oy + tip_y * 14 / SCALE)
                impulse = (-ox * SIDE_POWER, -oy * SIDE_POWER)
                fuel = 0.03
            lander.ApplyLinearImpulse(impulse, where, True)
        self.world.Step(1.0 / FPS, 180, 60)

        x, y = lander.position
        vx, vy = lander.linearVelocity
        left, right = self.legs
        x = (x - HALF_WIDTH) / HALF_WIDTH
        y = (y - (self.helipad_y + 18 / SCALE)) / HALF_HEIGHT
        vx = vx * HALF_WIDTH / FPS
        vy = vy * HALF_HEIGHT / FPS
        angle = lander.angle
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
        reward -= fuel
        terminated = False
        if self.game_over or abs(x) >= 1.0:
            terminated, reward = True, -100.0
        if not lander.awake:
            terminated, reward = True, 100.0
        return seen, reward, terminated, False, {}
