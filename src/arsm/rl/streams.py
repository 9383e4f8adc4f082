"""Noise of the races that choose actions, in units of the race's resolution: one stream
per episode and per rollout.

Who plays a rollout, and beside which others, changes nothing.
"""

from __future__ import annotations

import numpy as np

from arsm.noise import LOWEST, RESOLUTION
from arsm.rl.environment import Array

TINY = np.finfo(np.float64).tiny
BLOCK = 64
"""Steps of noise that are drawn at once."""


def race_units(log_pi: Array) -> Array:
    """a = ln pi in whole units of the race's resolution, exact in float64."""
    return np.rint(np.maximum(log_pi, LOWEST / 2) / RESOLUTION)


def stream(key: int, number: int) -> np.random.Generator:
    """Stream `number` of a 64-bit key."""
    # a counter-based generator: any stream can begin anywhere, without the others
    return np.random.Generator(np.random.Philox(key=key << 64 | number))


def draw_uniforms(streams: list[np.random.Generator], steps: int, shape: tuple[int, int]) -> Array:
    """The next steps' noise of each stream: [N, steps, K, C]."""
    drawn = np.empty((len(streams), steps, *shape))
    for each, own in zip(streams, drawn, strict=True):
        # one call per stream, so that a stream does not depend on its neighbours
        each.standard_exponential(out=own)
    # an exact 0 has no logarithm
    return race_units(np.log(np.maximum(drawn, TINY)))


class Tape:
    """The noise of true episodes by episode and time, drawn as far as somebody reads."""

    def __init__(self, key: int, episodes: int, shape: tuple[int, int]) -> None:
        self.key = key
        self._streams = [stream(key, number) for number in range(episodes)]
        self._noise = np.empty((episodes, 0, *shape))

    def at(self, episode: Array, time: Array | int) -> Array:
        """[N, K, C] at these times [N] (or at one) of these episodes [N]."""
        latest = int(np.max(time))
        while latest >= self._noise.shape[1]:
            # twice as much each time: long episodes copy the tape seldom
            more = max(BLOCK, self._noise.shape[1])
            self._noise = np.concatenate(
                [self._noise, draw_uniforms(self._streams, more, self._noise.shape[2:])], 1
            )
        return self._noise[episode, time]


class Still:
    """No noise: the likeliest actions win."""

    def at(self, episode: Array, time: Array | int) -> Array:
        """[]: 0, at any time."""
        return np.array(0.0)


class OwnNoise:
    """Noise of the rollouts in the lanes, each from its own stream, a block ahead, as
    few last until the horizon.
    """

    def __init__(self, key: int, number: Array, lanes: int, shape: tuple[int, int]) -> None:
        self._key = key
        self._number = number
        self._shape = shape
        self._streams = [stream(key, int(number[rollout])) for rollout in range(lanes)]
        self._draw_block()

    def _draw_block(self) -> None:
        self._block = draw_uniforms(self._streams, BLOCK, self._shape).swapaxes(0, 1).copy()
        self._at = 0

    def next(self) -> Array:
        """[N, K, C] in race units, of every lane's next step; a rollout's first needs none."""
        noise = self._block[self._at]
        self._at += 1
        if self._at == BLOCK:
            self._draw_block()
        return noise

    def drop(self, keep: Array) -> None:
        self._streams = [self._streams[lane] for lane in keep]
        self._block = self._block.take(keep, 1)

    def restart(self, lane: int, rollout: int) -> None:
        self._streams[lane] = stream(self._key, int(self._number[rollout]))
        # the noise at _at is that of the first action, which is given and needs none
        after_first = self._at + 1
        self._block[after_first:, lane] = draw_uniforms(
            [self._streams[lane]], BLOCK - after_first, self._shape
        )[0]


class SharedNoise:
    """The true episodes' noise, at the same times."""

    def __init__(self, tape: Tape, episode: Array, step: Array, lanes: int) -> None:
        self._tape = tape
        self._all = (episode, step)
        # copies: lanes move on, the plan does not
        self._episode = episode[:lanes].copy()
        self._time = step[:lanes].copy()

    def next(self) -> Array:
        self._time += 1
        return self._tape.at(self._episode, self._time)

    def drop(self, keep: Array) -> None:
        self._episode = self._episode[keep]
        self._time = self._time[keep]

    def restart(self, lane: int, rollout: int) -> None:
        episode, step = self._all
        # one less: the next call is for the first action, which is given and needs none
        self._episode[lane] = episode[rollout]
        self._time[lane] = step[rollout] - 1
