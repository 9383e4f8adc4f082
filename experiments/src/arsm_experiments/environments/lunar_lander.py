"""Gymnasium's LunarLander with a reset and a step that do less Python and give the same
numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import cos, sin, sqrt
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.box2d.lunar_lander import (
    LANDER_POLY,
    Box2D,  # pyright: ignore[reportPrivateImportUsage]
    ContactDetector,
    LunarLander,
)
from numpy.typing import NDArray

from arsm.rl import make_environment
from arsm.rl.environment import Environment, Randomness, Replays
from arsm.rl.stepped import Stepped

# Gymnasium's constants in metres and seconds: viewport 600 x 400 at 30 pixels per metre, 50 frames
# per second.
SCALE, FPS = 30.0, 50
HALF_WIDTH, HALF_HEIGHT = 600 / SCALE / 2, 400 / SCALE / 2
MAIN_POWER, SIDE_POWER = 13.0, 0.6
FUEL = (0.0, 0.03, 0.30, 0.03)
DRAWN_AT_ONCE = 128

# What every world is built of; Box2D copies it.
MOON = Box2D.b2BodyDef(
    type=Box2D.b2_staticBody,
    fixtures=Box2D.b2FixtureDef(shape=Box2D.b2EdgeShape(vertices=[(0, 0), (2 * HALF_WIDTH, 0)])),
)
GROUND = Box2D.b2FixtureDef(shape=Box2D.b2EdgeShape(), density=0, friction=0.1)
LANDER = Box2D.b2BodyDef(
    type=Box2D.b2_dynamicBody,
    position=(HALF_WIDTH, 2 * HALF_HEIGHT),
    fixtures=Box2D.b2FixtureDef(
        shape=Box2D.b2PolygonShape(vertices=[(x / SCALE, y / SCALE) for x, y in LANDER_POLY]),
        density=5.0,
        friction=0.1,
        categoryBits=0x0010,
        maskBits=0x001,
    ),
)
LEGS = tuple(
    Box2D.b2BodyDef(
        type=Box2D.b2_dynamicBody,
        position=(HALF_WIDTH - side * 20 / SCALE, 2 * HALF_HEIGHT),
        angle=side * 0.05,
        fixtures=Box2D.b2FixtureDef(
            shape=Box2D.b2PolygonShape(box=(2 / SCALE, 8 / SCALE)),
            density=1.0,
            categoryBits=0x0020,
            maskBits=0x001,
        ),
    )
    for side in (-1, 1)
)
JOINTS = tuple(
    Box2D.b2RevoluteJointDef(
        referenceAngle=side * 0.05,
        localAnchorB=(side * 20 / SCALE, 18 / SCALE),
        enableMotor=True,
        enableLimit=True,
        maxMotorTorque=40,
        motorSpeed=0.3 * side,
        lowerAngle=lowest,
        upperAngle=lowest + 0.5,
    )
    for side, lowest in ((-1, 0.4), (1, -0.9))
)


def make_lunar_lander(name: str, horizon: int, randomness: Randomness) -> Environment:
    """LunarLander through the library's adapter, which branches by `TrimmedLunarLander.replay`."""
    made = make_environment(TrimmedLunarLander, horizon, randomness=randomness)
    assert isinstance(made, Stepped)
    return replace(made, name=name)


class TrimmedLunarLander(LunarLander, Replays):
    """LunarLander-v3 without wind, discrete actions, nothing rendered, reset with a seed."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        gymnasium.Env.reset(self, seed=seed)
        self._destroy()
        self._drawn = []
        self.game_over, self.prev_shaping = False, None
        self.world = Box2D.b2World(gravity=(0, self.gravity))
        # the world alone does not keep it
        self._contacts = self.world.contactListener = ContactDetector(self)
        self._add_ground()
        self._add_lander()
        return self.step(0)[0], {}

    def _add_ground(self) -> None:
        """Eleven points, level in the middle."""
        heights = self.np_random.uniform(0, HALF_HEIGHT, size=12).tolist()
        self.helipad_y = HALF_HEIGHT / 2
        heights[3:8] = [self.helipad_y] * 5
        points = [
            (HALF_WIDTH / 5 * i, 0.33 * (heights[i - 1] + heights[i] + heights[i + 1]))
            for i in range(11)
        ]
        self.moon = self.world.CreateBody(MOON)
        for ends in pairwise(points):
            GROUND.shape.vertices = ends
            self.moon.CreateFixture(GROUND)

    def _add_lander(self) -> None:
        """The lander at the top with a random push, and its legs."""
        lander = self.lander = self.world.CreateBody(LANDER)
        lander.ApplyForceToCenter(self.np_random.uniform(-1000.0, 1000.0, size=2).tolist(), True)
        self.legs = [self._add_leg(body, joint) for body, joint in zip(LEGS, JOINTS, strict=True)]

    def _add_leg(self, body: Any, joint: Any) -> Any:
        leg = self.world.CreateBody(body)
        leg.ground_contact = False
        joint.bodyA, joint.bodyB = self.lander, leg
        self.world.CreateJoint(joint)
        return leg

    def replay(self, actions: Sequence[int]) -> None:
        push, advance = self._push, self.world.Step
        for action in actions[:-1]:
            push(action)
            advance(1.0 / FPS, 180, 60)
        for action in actions[-1:]:  # for the shaping that the next reward is a difference to
            self.step(action)

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.float32], float, bool, Literal[False], dict[str, Any]]:
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
            (x, y, vx, vy, angle, 20.0 * lander.angularVelocity / FPS, touches_left, touches_right),
            dtype=np.float32,
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
            # uniform(-1, 1) is -1 + 2 * random(), of the same stream, and many at once are the same
            # as one by one
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
            lander.ApplyLinearImpulse(
                (-ox * MAIN_POWER, -oy * MAIN_POWER), (position.x + ox, position.y + oy), True
            )
        else:
            arm = 3 * across + (action - 2) * 12 / SCALE
            ox = tip_x * along + -tip_y * arm
            oy = -tip_y * along - tip_x * arm
            lander.ApplyLinearImpulse(
                (-ox * SIDE_POWER, -oy * SIDE_POWER),
                (position.x + ox - tip_x * 17 / SCALE, position.y + oy + tip_y * 14 / SCALE),
                True,
            )
