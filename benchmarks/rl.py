"""Policy gradients: cost of an iteration and of an environment step, and time to solve a task."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

import arsm
from arsm.rl import (
    ActionConditioned,
    Learning,
    PolicyGradient,
    Settings,
    Value,
    make_engine,
    make_environment,
)
from arsm.rl.environment import Environment
from arsm.rl.play import EpisodeBranches, play_episodes
from arsm.rl.policies import Perceptron, Policy
from arsm.rl.stepped import Stepped
from arsm.rl.streams import Tape
from benchmarks import records
from benchmarks.measure import interleaved, seconds, table

WINDOW = 100
ATARI = "Pong"
REPEATS = 10
ALONE = 1000
"""Steps of an emulator on its own, too few to end a game."""
RIVAL = "Stable-Baselines3's A2C, tuned"


def paper(**changes: Any) -> Settings:
    """The paper's settings, with its budget on CartPole, except these."""
    return Settings(**{**asdict(Learning()), "budget": 16, "decay_over": None, **changes})


def uniform_policy(environment: Environment) -> Perceptron:
    """A network of the usual size with a uniform policy."""
    generator = np.random.default_rng(0)
    sizes = (environment.observations, 10, 10, len(environment.choices) * max(environment.choices))
    scales = (0.3, 0.3, 0.0)
    layers = tuple(
        (scale * generator.normal(size=(a, b)), np.full(b, 0.1))
        for scale, a, b in zip(scales, sizes[:-1], sizes[1:], strict=True)
    )
    return Perceptron(layers, environment.choices)


def branches_of(
    environment: Environment, policy: Policy, count: int, *, at_start: bool
) -> EpisodeBranches:
    """Rollouts from the start, or spread over an episode."""
    generator = np.random.default_rng(0)
    noise = Tape(0, 1, (len(environment.choices), max(environment.choices)))
    (episode,) = play_episodes(environment, policy, [0], noise)
    step = (
        np.zeros(count, int)
        if at_start
        else np.linspace(0, len(episode.rewards) - 1, count).astype(int)
    )
    action = generator.integers(environment.choices, size=(count, len(environment.choices)))
    return EpisodeBranches(
        (episode.trail,), np.zeros(count, int), step, action, 0, np.arange(count), 0.99
    )


def iteration() -> None:
    """One whole iteration on CartPole with a policy that holds the pole for all 200 steps."""
    agent = PolicyGradient("CartPole-v0", arsm.ARSM(), settings=paper(learning_rate=0.03))
    while agent.learn(episodes=1)[0].returns != (200.0,) or agent.iteration < 150:
        pass
    history = agent.learn(episodes=60)
    rows = []
    for name, times in (
        ("wall", [x.seconds for x in history]),
        ("CPU", [x.cpu_seconds for x in history]),
    ):
        rows.append(
            [name, seconds(float(np.median(times))), seconds(min(times)), seconds(max(times))]
        )
    title = "One ARSM iteration on CartPole: 200 true steps, 16 rollouts, update"
    print(table(title, ["clock", "median", "least", "most"], rows))


def engines() -> None:
    """Environment steps per second of every engine; replays up to a branch count."""
    rows = []
    for name, count in (
        ("CartPole-v0", 16),
        ("CartPole-v0", 1024),
        ("Acrobot-v1", 64),
        ("LunarLander-v3", 64),
    ):
        environment = make_environment(name)
        policy = uniform_policy(environment)
        at_start = name != "LunarLander-v3"
        many = branches_of(environment, policy, count, at_start=at_start)
        names = ["in-process", "pool"] + ["ray"] * (importlib.util.find_spec("ray") is not None)
        made = {kind: make_engine(kind, environment, os.cpu_count()) for kind in names}
        played = made["in-process"].play(policy, many)
        steps = played.steps + played.replayed
        calls: dict[str, Callable[[], object]] = {
            kind: partial(one.play, policy, many) for kind, one in made.items()
        }
        for kind, timing in interleaved(calls, 5).items():
            rate = f"{steps / timing.median:,.0f} (best {steps / timing.low:,.0f})"
            rows.append([name, str(count), kind, str(steps), str(timing), rate])
        for one in made.values():
            one.close()
    header = ["environment", "rollouts", "engine", "steps", "time", "steps/s"]
    print(table(f"Rollouts of a uniform policy, {os.cpu_count()} workers", header, rows))


def variance(iterations: int = 300) -> None:
    """The gradient's variance at one fixed, half-trained policy; critics keep learning."""
    trained = PolicyGradient("CartPole-v0", arsm.ARSM(), settings=paper(learning_rate=0.03))
    trained.learn(episodes=40)
    fixed = {name: tensor.clone() for name, tensor in trained.network.state_dict().items()}
    methods: dict[str, tuple[arsm.Estimator | Value | ActionConditioned, bool]] = {
        "ARSM": (arsm.ARSM(), False),
        "ARSM, common random numbers": (arsm.ARSM(), True),
        "RLOO, 4 draws per state": (arsm.RLOO(4), False),
        "every action": (arsm.LocalExpectation(), False),
        "A2C": (Value.actor_critic(), False),
        "REINFORCE, value baseline": (Value.actor_critic(None), False),
        "RELAX": (ActionConditioned(), False),
    }
    measured = {}
    for name, (method, common) in methods.items():
        agent = PolicyGradient("CartPole-v0", method, settings=paper(common_random_numbers=common))
        history = []
        for _ in range(iterations):
            agent.network.load_state_dict(fixed)
            history += agent.learn(episodes=1)
        measured[name] = (np.exp(history[-1].log_variance), history[-1].steps / iterations)
    first = measured["ARSM"][0]
    rows = [[name, f"{x / first:.3g}", f"{steps:,.0f}"] for name, (x, steps) in measured.items()]
    title = (
        f"Gradient variance at a fixed policy on CartPole, moving average over {iterations} "
        "iterations"
    )
    print(table(title, ["method", "variance / ARSM's", "steps per iteration"], rows))


def atari(skips: Sequence[int] = (1, 4), out: Path | None = None) -> None:
    """Steps per second of Pong from RAM: the emulator alone, its environment, and rollouts that
    branch by its state.

    A reset with a seed loads the game again, which takes as long as hundreds of frames: making the
    32 environments is timed apart from rollouts in environments that are there.
    """
    if importlib.util.find_spec("ale_py") is None:
        return
    rows = []

    def note(what: str, frames: int, steps: int, replayed: int, begin: float) -> None:
        spent = time.process_time() - begin
        rates = (
            f"{(steps + replayed) / spent:,.0f}",
            f"{frames * (steps + replayed) / spent:,.0f}",
        )
        rows.append([str(frames), what, str(steps), str(replayed), seconds(spent), *rates])
        given = {"environment": "ALE/Pong-v5", "frames": frames, "method": what}
        append(out, {**given, "steps": steps + replayed, "cpu": spent})

    for frames in skips:
        options = {"obs_type": "ram", "frameskip": frames}
        world = make_environment("ale_py:ALE/Pong-v5", 300, options=options)
        assert isinstance(world, Stepped)
        policy = uniform_policy(world)
        many = branches_of(world, policy, 64, at_start=False)
        engine = make_engine("in-process", world)
        begin = time.process_time()
        played = engine.play(policy, many)
        note("rollouts, the first time", frames, played.steps, played.replayed, begin)
        env: Any = gymnasium.make("ALE/Pong-v5", **options)
        # in turns: a machine that does other work is slower in one second than in the next
        for _ in range(REPEATS):
            env.reset(seed=0)
            begin = time.process_time()
            for _ in range(ALONE * frames):
                env.unwrapped.ale.act(3)
            note("the emulator alone", frames, ALONE, 0, begin)
            env.reset(seed=0)
            begin = time.process_time()
            for _ in range(ALONE):
                env.step(3)
            note("its environment", frames, ALONE, 0, begin)
            begin = time.process_time()
            played = engine.play(policy, many)
            note(f"rollouts, branched by {world.way}", frames, played.steps, played.replayed, begin)
        env.close()
        world.close()
        if frames == 1:
            slow = replace(world, way="replay")
            begin = time.process_time()
            played = make_engine("in-process", slow).play(policy, many)
            note("rollouts, branched by replay", frames, played.steps, played.replayed, begin)
            slow.close()
    header = ["frames per step", "what", "steps", "played again", "CPU", "steps/s", "frames/s"]
    print(table("Pong from RAM: 64 rollouts spread over 300 steps", header, rows))


class Task(NamedTuple):
    """A task, its completion line, and the settings of those who try it."""

    environment: str
    line: float
    limit: float
    """Maximum CPU seconds."""
    agents: dict[str, tuple[arsm.Estimator | Value, Settings]]
    """Of this library, by name; none where results/control says what it takes."""
    steps: int
    """Stable-Baselines3's, as its settings have them: DLR-RM/rl-baselines3-zoo,
    hyperparams/a2c.yml.
    """
    environments: int
    normalize: bool
    options: dict[str, Any]


class Solved(NamedTuple):
    """Time until the line was reached, or until time or steps ran out."""

    wall: float
    cpu: float
    average: float


TASKS = (
    Task(
        "CartPole-v0",
        195.0,
        60.0,
        {
            "ARSM": (arsm.ARSM(), paper(optimizer="rmsprop", learning_rate=0.03)),
            "A2C of this loop": (Value.actor_critic(), paper(optimizer="adam", learning_rate=0.01)),
        },
        steps=500_000,
        environments=8,
        normalize=False,
        options={"ent_coef": 0.0},
    ),
    Task(
        "Acrobot-v1",
        -100.0,
        120.0,
        {
            "ARSM, a linear policy and 2 x 256 rollouts": (
                arsm.ARSM(),
                paper(
                    episodes_an_iteration=2,
                    entropy=0.1,
                    hidden=(),
                    budget=256,
                    optimizer="rmsprop",
                    learning_rate=0.05,
                ),
            ),
            "ARSM, the paper's 10 and 10 units and 64 rollouts": (
                arsm.ARSM(),
                paper(entropy=0.01, budget=64, learning_rate=0.01),
            ),
            "A2C of this loop, a linear policy": (
                Value.actor_critic(),
                paper(entropy=0.01, hidden=(), optimizer="rmsprop", learning_rate=0.03),
            ),
            "A2C of this loop, 10 and 10 units": (
                Value.actor_critic(),
                paper(entropy=0.01, optimizer="rmsprop", learning_rate=0.01),
            ),
        },
        steps=500_000,
        environments=16,
        normalize=True,
        options={"ent_coef": 0.0},
    ),
    Task(
        "LunarLander-v3",
        200.0,
        300.0,
        {},
        steps=200_000,
        environments=8,
        normalize=False,
        options={
            "ent_coef": 1e-5,
            "gamma": 0.995,
            "n_steps": 5,
            "learning_rate": lambda left: 0.00083 * left,
        },
    ),
)


def ours(task: Task, method: arsm.Estimator | Value, settings: Settings, seed: int) -> Solved:
    """An agent of this library."""
    agent = PolicyGradient(task.environment, method, settings=replace(settings, seed=seed))
    begin, begin_cpu, returns = time.perf_counter(), time.process_time(), []
    while time.process_time() - begin_cpu < task.limit and not held(returns, task):
        returns = [*returns, *agent.learn(episodes=1)[0].returns][-WINDOW:]
    return Solved(
        time.perf_counter() - begin, time.process_time() - begin_cpu, float(np.mean(returns))
    )


def stable_baselines(task: Task, seed: int) -> Solved:
    """Stable-Baselines3's A2C, tuned."""
    from stable_baselines3 import A2C  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.vec_env import VecNormalize  # pyright: ignore[reportMissingImports]

    class UntilHeld(BaseCallback):
        def _on_step(self) -> bool:
            self.returns = [episode["r"] for episode in self.model.ep_info_buffer or []]
            return not held(self.returns, task) and time.process_time() - begin_cpu < task.limit

    environment = make_vec_env(task.environment, n_envs=task.environments, seed=seed)
    if task.normalize:
        environment = VecNormalize(environment)
    model = A2C("MlpPolicy", environment, seed=seed, device="cpu", **task.options)
    callback = UntilHeld()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    model.learn(task.steps, callback=callback)
    return Solved(
        time.perf_counter() - begin,
        time.process_time() - begin_cpu,
        float(np.mean(callback.returns)),
    )


def held(returns: list[float], task: Task) -> bool:
    """Whether the last 100 episodes average the line."""
    return len(returns) == WINDOW and float(np.mean(returns)) >= task.line


def solvers(task: Task) -> dict[str, Callable[[int], Solved]]:
    """Those who try a task, as functions of the seed."""
    methods: dict[str, Callable[[int], Solved]] = {
        name: partial(ours, task, *agent) for name, agent in task.agents.items()
    }
    if importlib.util.find_spec("stable_baselines3"):
        methods[RIVAL] = partial(stable_baselines, task)
    return methods


def solve(task: Task, name: str, seed: int, out: Path | None) -> Solved:
    """One method with one seed; its line is appended to `out`."""
    found = solvers(task)[name](seed)
    given = {"environment": task.environment, "line": task.line, "method": name, "seed": seed}
    append(out, {**given, **found._asdict()})
    return found


def append(out: Path | None, line: dict[str, Any]) -> None:
    """Append a line to a file, if there is one, with commit and hardware."""
    if out is not None:
        records.add(out, {**line, **records.place()})


def solving(tasks: Sequence[Task] = TASKS, seeds: int = 3, out: Path | None = None) -> None:
    """Seconds until a task's completion line is held; the methods in turn, seed by seed."""
    for task in tasks:
        runs: dict[str, list[Solved]] = {name: [] for name in solvers(task)}
        for seed in range(seeds):
            for name, found in runs.items():
                found.append(solve(task, name, seed, out))
        rows = []
        for name, found in runs.items():
            solved = sum(each.average >= task.line for each in found)
            cells = [", ".join(map(seconds, times)) for times in list(zip(*found, strict=True))[:2]]
            rows.append(
                [
                    name,
                    f"{solved} of {seeds}",
                    *cells,
                    ", ".join(f"{each.average:.0f}" for each in found),
                ]
            )
        title = (
            f"{task.environment}: until 100 episodes average {task.line:g}, at most "
            f"{task.limit:g} CPU seconds"
        )
        print(table(title, ["method", "seeds solved", "wall", "CPU", "average then"], rows))


def main() -> None:
    torch.set_num_threads(1)
    iteration()
    engines()
    atari()
    variance()
    solving()


if __name__ == "__main__":
    by_name = {task.environment: task for task in TASKS}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rl",
        description="How long one task takes, or the steps per second of Pong's rollouts.",
    )
    parser.add_argument("environment", choices=[*by_name, ATARI])
    parser.add_argument("seeds", type=int, nargs="?", default=3)
    parser.add_argument("--out", type=Path, help="append a line per method and seed to this file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.environment == ATARI:
        atari((1,), chosen.out)
    else:
        solving([by_name[chosen.environment]], chosen.seeds, chosen.out)
