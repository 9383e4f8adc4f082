"""Environments whose instances share state, or hide it: in classes, modules, generators,
simulators, caches, handles and threads.

`python tests/shared_state.py` plays episodes from standard input, each in a process that has
played nothing before: what an environment gives alone.
"""

from __future__ import annotations

import functools
import io
import json
import os
import queue
import random
import sys
import threading
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS = 20


class Line(gymnasium.Env[Any, Any]):
    """Walk on a line for some steps; where the position lives is up to subclasses."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        self.put(float(seed or 0) % 7)
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.put(self.get() + float(action) - 0.4)
        return self.seen(), self.get() + self.bonus(), self.time == STEPS, False, {}

    def seen(self) -> Any:
        return np.array([self.get(), self.time])

    def bonus(self) -> float:
        return 0.0

    def get(self) -> float:
        return self.position

    def put(self, position: float) -> None:
        self.position = position


class ClassAttribute(Line):
    """The position is an attribute of the class."""

    at: ClassVar[float] = 0.0

    def get(self) -> float:
        return ClassAttribute.at

    def put(self, position: float) -> None:
        ClassAttribute.at = position


STORE = {"position": 0.0}


class ModuleVariable(Line):
    """The position is in a dictionary of the module."""

    def get(self) -> float:
        return STORE["position"]

    def put(self, position: float) -> None:
        STORE["position"] = position


GENERATOR = np.random.default_rng()


class ModuleGenerator(Line):
    """A generator of the module, which reset seeds."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        global GENERATOR
        GENERATOR = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def bonus(self) -> float:
        return float(GENERATOR.random())


class UnseededGenerator(Line):
    """A generator of the module, which nobody seeds."""

    generator = np.random.default_rng(5)

    def bonus(self) -> float:
        return float(self.generator.random())


class GlobalNumPy(Line):
    """NumPy's global random numbers."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)

    def bonus(self) -> float:
        return float(np.random.random())  # noqa: NPY002


class GlobalRandom(Line):
    """Python's global random numbers."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        random.seed(seed)
        return super().reset(seed=seed)

    def bonus(self) -> float:
        return random.random()


class Simulator:
    """A simulator for all."""

    def __init__(self) -> None:
        self.position = 0.0


class SharedSimulator(Line):
    """One simulator serves all instances."""

    simulator = Simulator()

    def get(self) -> float:
        return self.simulator.position

    def put(self, position: float) -> None:
        self.simulator.position = position


@functools.cache
def pay(time: int, place: int) -> float:
    """A pure function."""
    return float((time * 7 + place * 3) % 5)


class CachedFunction(Line):
    """A cache of the module, which changes nothing."""

    def bonus(self) -> float:
        return pay(self.time, round(self.get()))


TAPE = io.StringIO("".join(f"{(7 * line) % 11:4d}\n" for line in range(1000)))


class OpenHandle(Line):
    """One open file for all, read on and on."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        TAPE.seek(5 * ((seed or 0) % 50))
        return super().reset(seed=seed)

    def bonus(self) -> float:
        return float(TAPE.readline())


class DefaultArgument(Line):
    """A list as a default argument, which all instances get."""

    def __init__(self, places: list[float] = [0.0]) -> None:  # noqa: B006
        self.places = places

    def get(self) -> float:
        return self.places[0]

    def put(self, position: float) -> None:
        self.places[0] = position

    def __deepcopy__(self, memo: dict[int, Any]) -> DefaultArgument:
        twin = DefaultArgument()
        twin.time = self.time
        return twin


def with_a_cell() -> type[Line]:
    """A class whose instances share a variable of the function that made it."""
    cell = [0.0]

    class Enclosed(Line):
        def get(self) -> float:
            return cell[0]

        def put(self, position: float) -> None:
            cell[0] = position

    return Enclosed


Closure = with_a_cell()
Closure.__name__ = "Closure"


BUFFER = np.zeros(1)


class ArrayView(Line):
    """Every instance has an array of its own, which is a view of one."""

    def __init__(self) -> None:
        self.place = BUFFER[:]

    def get(self) -> float:
        return float(self.place[0])

    def put(self, position: float) -> None:
        self.place[0] = position


class SharedObservation(Line):
    """Every observation of every instance is written into one array."""

    seen_by_all = np.zeros(2)

    def seen(self) -> Any:
        self.seen_by_all[:] = self.get(), self.time
        return self.seen_by_all


class Handle:
    """As a C library's handle: its copy is itself."""

    position = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self


class OwnHandle(Line):
    """Every instance has a handle of its own, which copies would share."""

    def __init__(self) -> None:
        self.handle = Handle()

    def get(self) -> float:
        return self.handle.position

    def put(self, position: float) -> None:
        self.handle.position = position


class IgnoredSeed(Line):
    """A reset that draws the start without its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.put(random.random())
        return self.seen(), {}


class UnseededNumPy(Line):
    """NumPy's global random numbers, which nobody seeds."""

    def bonus(self) -> float:
        return float(np.random.random())  # noqa: NPY002


class Clock(Line):
    """The time of day."""

    def bonus(self) -> float:
        return time.perf_counter()


class Identity(Line):
    """The number by which Python knows the instance."""

    def bonus(self) -> float:
        return float(id(self) // 16 % 1009)


class Singleton(Line):
    """Every call makes the same instance."""

    only: ClassVar[Any] = None

    def __new__(cls) -> Singleton:
        if cls.only is None:
            cls.only = super().__new__(cls)
        return cls.only


class Server(threading.Thread):
    """Holds a position, and answers one request after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.requests: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[float] = queue.Queue()
        self.position = 0.0
        self.start()

    def run(self) -> None:
        while True:
            request = self.requests.get()
            self.position = self.position if request is None else request
            self.answers.put(self.position)

    def ask(self, request: float | None) -> float:
        self.requests.put(request)
        return self.answers.get()


class ServedByThread(Line):
    """One thread of the process runs the simulation."""

    server: ClassVar[Server | None] = None

    @classmethod
    def ask(cls, request: float | None) -> float:
        if cls.server is None or not cls.server.is_alive():
            cls.server = Server()
        return cls.server.ask(request)

    def get(self) -> float:
        return self.ask(None)

    def put(self, position: float) -> None:
        self.ask(position)


class Curriculum(Line):
    """Every episode of the process is harder than the one before."""

    episodes: ClassVar[int] = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Curriculum.episodes += 1
        return super().reset(seed=seed)

    def bonus(self) -> float:
        return -0.1 * Curriculum.episodes


class Registry(Line):
    """Instances know how many there are."""

    instances: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.instances.append(self)

    def bonus(self) -> float:
        return float(len(self.instances))


class EnvironmentVariable(Line):
    """The position is a variable of the operating system's process."""

    def get(self) -> float:
        return float(os.environ["ARSM_TEST_POSITION"])

    def put(self, position: float) -> None:
        os.environ["ARSM_TEST_POSITION"] = repr(position)


class Averaging(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper whose class remembers the last rewards."""

    last: ClassVar[list[float]] = []

    def reset(self, **options: Any) -> Any:
        self.last.clear()
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        seen, reward, *rest = self.env.step(action)
        self.last.append(float(reward))
        return seen, sum(self.last[-3:]), *rest


class SharedWrapper(Averaging):
    """A plain walk in such a wrapper."""

    def __init__(self) -> None:
        super().__init__(Line())


class RareSwitch(Line):
    """All instances share a switch, which only twelve steps to the left in a row turn."""

    switch: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.row = 0
        self.switch.clear()
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.row = 0 if action else self.row + 1
        if self.row == 12:
            self.switch.append(1)
        return super().step(action)

    def bonus(self) -> float:
        return 100.0 * len(self.switch)


def alone(name: str, seed: int, actions: list[int]) -> list[list[float]]:
    """The observations and the reward of every step."""
    env = globals()[name]()
    rows = [[*map(float, env.reset(seed=seed)[0]), 0.0]]
    for action in actions:
        seen, reward, *_ = env.step(action)
        rows.append([*map(float, seen), float(reward)])
    return rows


def main() -> None:
    """Answer [[name, seed, actions], ...], each from a process of its own."""
    answers = []
    for name, seed, actions in json.load(sys.stdin):
        read, write = os.pipe()
        if not os.fork():
            os.write(write, json.dumps(alone(name, seed, actions)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answers.append(json.loads(pipe.read()))
        os.wait()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
