"""Policy gradients: what an iteration and an environment step cost, and how long a task takes to be solved."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

import arsm
from arsm.rl import ActionConditioned, ActorCritic, PolicyGradient, Settings, make_engine, make_environment
from arsm.rl.environments import Environment
from arsm.rl.play import Branches, Policy, play_episodes, race_units
from benchmarks.measure import interleaved, seconds, table

LINE, WINDOW = 195.0, 100


def uniform_policy(environment: Environment) -> Policy:
    """A network of the usual size whose every action is as likely."""
    generator = np.random.default_rng(0)
    sizes = (environment.observations, 10, 10, len(environment.choices) * max(environment.choices))
    scales = (0.3, 0.3, 0.0)
    layers = tuple(
        (scale * generator.normal(size=(a, b)), np.full(b, 0.1))
        for scale, a, b in zip(scales, sizes[:-1], sizes[1:], strict=True)
    )
    return Policy(layers, environment.choices)


def branches_of(environment: Environment, policy: Policy, count: int, *, at_start: bool) -> Branches:
    """Rollouts from the start, or spread over an episode."""
    shape = (1, environment.horizon, len(environment.choices), max(environment.choices))
    generator = np.random.default_rng(0)
    noise = race_units(np.log(generator.standard_exponential(shape)))
    (episode,) = play_episodes(environment, policy, [0], noise)
    step = np.zeros(count, int) if at_start else np.linspace(0, len(episode.rewards) - 1, count).astype(int)
    action = generator.integers(environment.choices, size=(count, len(environment.choices)))
    return Branches((episode.trail,), np.zeros(count, int), step, action, 0, np.arange(count), 0.99)


def iteration() -> None:
    """One whole iteration on CartPole with a policy that holds the pole for all 200 steps."""
    agent = PolicyGradient("CartPole-v0", arsm.ARSM(), budget=16, learning_rate=0.03)
    while agent.learn(1)[0].returns != (200.0,) or agent.iteration < 150:
        pass
    history = agent.learn(60)
    rows = []
    for name, times in (("wall", [x.seconds for x in history]), ("CPU", [x.cpu_seconds for x in history])):
        rows.append([name, seconds(float(np.median(times))), seconds(min(times)), seconds(max(times))])
    title = "One ARSM iteration on CartPole: 200 true steps, 16 rollouts, update"
    print(table(title, ["clock", "median", "least", "most"], rows))


def engines() -> None:
    """Environment steps a second of every engine, the way back to a branch counted where it is played again."""
    rows = []
    for name, count in (("CartPole-v0", 16), ("CartPole-v0", 1024), ("Acrobot-v1", 64), ("LunarLander-v3", 64)):
        environment = make_environment(name)
        policy = uniform_policy(environment)
        at_start = name != "LunarLander-v3"
        many = branches_of(environment, policy, count, at_start=at_start)
        names = ["in-process", "pool"] + ["ray"] * (importlib.util.find_spec("ray") is not None)
        made = {kind: make_engine(kind, environment, os.cpu_count()) for kind in names}
        steps = made["in-process"].play(policy, many).steps
        replayed = int(many.step.sum()) if getattr(environment, "way", None) == "replay" else 0
        calls: dict[str, Callable[[], object]] = {kind: partial(one.play, policy, many) for kind, one in made.items()}
        for kind, timing in interleaved(calls, 5).items():
            rate = f"{(steps + replayed) / timing.median:,.0f} (best {(steps + replayed) / timing.low:,.0f})"
            rows.append([name, str(count), kind, str(steps + replayed), str(timing), rate])
        for one in made.values():
            one.close()
    header = ["environment", "rollouts", "engine", "steps", "time", "steps/s"]
    print(table(f"Rollouts of a uniform policy, {os.cpu_count()} workers", header, rows))


def variance(iterations: int = 300) -> None:
    """The gradient's variance at one fixed policy, half-way to holding the pole; critics go on learning."""
    trained = PolicyGradient("CartPole-v0", arsm.ARSM(), learning_rate=0.03)
    trained.learn(40)
    fixed = {name: tensor.clone() for name, tensor in trained.network.state_dict().items()}
    methods: dict[str, tuple[arsm.Estimator | ActorCritic | ActionConditioned, bool]] = {
        "ARSM": (arsm.ARSM(), False),
        "ARSM, common random numbers": (arsm.ARSM(), True),
        "RLOO, 4 draws a state": (arsm.RLOO(4), False),
        "every action": (arsm.LocalExpectation(), False),
        "A2C": (ActorCritic(), False),
        "REINFORCE, value baseline": (ActorCritic(None), False),
        "RELAX": (ActionConditioned(), False),
    }
    measured = {}
    for name, (method, common) in methods.items():
        agent = PolicyGradient("CartPole-v0", method, learning_rate=0.01, common_random_numbers=common)
        history = []
        for _ in range(iterations):
            agent.network.load_state_dict(fixed)
            history += agent.learn(1)
        measured[name] = (np.exp(history[-1].log_variance), history[-1].steps / iterations)
    first = measured["ARSM"][0]
    rows = [[name, f"{x / first:.3g}", f"{steps:,.0f}"] for name, (x, steps) in measured.items()]
    title = f"Gradient variance at a fixed policy on CartPole, moving average over {iterations} iterations"
    print(table(title, ["method", "variance / ARSM's", "steps an iteration"], rows))


def ours(method: arsm.Estimator | ActorCritic, settings: Settings, limit: float) -> tuple[float, float] | None:
    """Wall and CPU seconds until 100 episodes of CartPole-v0 average 195."""
    agent = PolicyGradient("CartPole-v0", method, settings=settings)
    begin, begin_cpu, returns = time.perf_counter(), time.process_time(), []
    while time.process_time() - begin_cpu < limit:
        returns = [*returns, *agent.learn(1)[0].returns][-WINDOW:]
        if len(returns) == WINDOW and np.mean(returns) >= LINE:
            return time.perf_counter() - begin, time.process_time() - begin_cpu
    return None


def stable_baselines(seed: int, limit: float) -> tuple[float, float] | None:
    """The same for Stable-Baselines3's A2C, tuned: DLR-RM/rl-baselines3-zoo, hyperparams/a2c.yml, has 8 environments,
    no entropy bonus and A2C's defaults for CartPole."""
    from stable_baselines3 import A2C  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    class UntilSolved(BaseCallback):
        def _on_step(self) -> bool:
            buffer = self.model.ep_info_buffer or []
            self.solved = len(buffer) == WINDOW and np.mean([x["r"] for x in buffer]) >= LINE
            return not self.solved and time.process_time() - begin_cpu < limit

    environment = make_vec_env("CartPole-v0", n_envs=8, seed=seed)
    model = A2C("MlpPolicy", environment, ent_coef=0.0, seed=seed, device="cpu")
    callback = UntilSolved()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    model.learn(5_000_000, callback=callback)
    return (time.perf_counter() - begin, time.process_time() - begin_cpu) if callback.solved else None


def solving(seeds: int = 3, limit: float = 60.0) -> None:
    """Seconds until CartPole's completion line is held."""
    methods: dict[str, Callable[[int], tuple[float, float] | None]] = {
        "ARSM, RMSProp 0.03": lambda seed: ours(
            arsm.ARSM(), Settings(optimizer="rmsprop", learning_rate=0.03, seed=seed), limit
        ),
        "A2C of this loop, Adam 0.01": lambda seed: ours(
            ActorCritic(), Settings(optimizer="adam", learning_rate=0.01, seed=seed), limit
        ),
    }
    if importlib.util.find_spec("stable_baselines3"):
        methods["Stable-Baselines3's A2C, tuned"] = lambda seed: stable_baselines(seed, limit)
    found = {name: [method(seed) for seed in range(seeds)] for name, method in methods.items()}
    rows = []
    for name, results in found.items():
        solved = [x for x in results if x is not None]
        cells = [", ".join(seconds(x[clock]) for x in solved) or "none" for clock in (0, 1)]
        rows.append([name, f"{len(solved)} of {seeds}", *cells])
    title = f"CartPole-v0: until 100 episodes average {LINE:g}, at most {limit:g} CPU seconds"
    print(table(title, ["method", "seeds solved", "wall", "CPU"], rows))


def main() -> None:
    torch.set_num_threads(1)
    iteration()
    engines()
    variance()
    solving()


if __name__ == "__main__":
    main()
