"""Control by policy gradients: CartPole, Acrobot, LunarLander, or any Gymnasium environment that
can branch.

Each method runs with several seeds, one after the other; one run folder per method and learning
rate. Reference: Yin, Yue and Zhou, ARSM, ICML 2019, section 5.4.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import tyro
from rich.console import Console

import arsm
from arsm.rl.settings import Learning, Settings
from arsm_experiments.checks import check_least, check_name, check_some
from arsm_experiments.progress import progress_bars
from arsm_experiments.runs.files import RunError, plain_name
from arsm_experiments.runs.reader import load_checkpoint
from arsm_experiments.runs.writer import Run, open_run

if TYPE_CHECKING:  # gymnasium is optional: the other commands do not need it
    from arsm.rl import ActionConditioned, Iteration, PolicyGradient, Value

WINDOW = 100
"""Number of true episodes in an average return."""
PAPER_BUDGETS = {"CartPole-v0": 16, "CartPole-v1": 16, "Acrobot-v1": 64, "LunarLander-v3": 1024}
SMALLEST = {
    "episodes": 1,
    "seeds": 1,
    "log_every": 1,
    "checkpoint_every": 1,
    "horizon": 1,
    "workers": 1,
}


def method(words: str) -> arsm.Estimator | Value | ActionConditioned:
    """An estimator in words, or "a2c", "reinforce" (with a value baseline), "relax"
    (action-conditioned) or "value" (generalized advantages).
    """
    from arsm.rl import ActionConditioned, Value

    if words == "ppo":
        raise ValueError(
            'There is no method "ppo": "value" is the nearest, and `benchmarks/agents.py` '
            "compares it with Stable-Baselines3's PPO."
        )
    baselines = {
        "value": Value(),
        "a2c": Value.actor_critic(),
        "reinforce": Value.actor_critic(steps=None),
        "relax": ActionConditioned(),
    }
    return baselines[words] if words in baselines else arsm.estimator(words)


@dataclass(frozen=True)
class Control:
    """Learn to control an environment by policy gradients, and compare methods on it.

    Writes one run folder per method, optimizer and learning rate, with all seeds in it.
    """

    environment: str = "CartPole-v0"
    """A Gymnasium environment with discrete actions; the paper has CartPole-v0, Acrobot-v1 and
    LunarLander.
    """
    methods: tuple[str, ...] = ("arsm",)
    """Estimators in words ("arsm", "ars", "rloo:samples=4"), "a2c", "reinforce" (with a value
    baseline), "value" (generalized advantages) or "relax".
    """
    learning_rates: tuple[float, ...] = (0.01,)
    """Learning rates; the paper tries 0.001, 0.003, 0.01 and 0.03."""
    optimizers: tuple[Literal["adam", "rmsprop"], ...] = ("adam",)
    """Optimizers; the paper tries both."""
    episodes: int = 500
    """Number of true episodes."""
    cpu_seconds: float | None = None
    """End a seed after the iteration in which it has spent these CPU seconds; None plays all
    episodes.
    """
    seeds: int = 10
    """Independent runs of each setting, one after the other."""
    seed: int = 0
    """The first seed."""
    budget: int | None = None
    """S_max, the maximum rollouts per true episode; None for the paper's 16, 64 or 1024 on its
    tasks, else 64.
    """
    schedule: Literal["constant", "linear"] = "constant"
    """Constant learning rate, or linear decay to 0."""
    learning: tyro.conf.OmitArgPrefixes[Learning] = field(default_factory=Learning)
    horizon: int | None = None
    """Maximum steps per episode; None for the environment's own limit."""
    encoder: str = ""
    """MODULE:FUNCTION that turns an observation into a vector; the working directory is searched
    too.
    """
    options: tuple[str, ...] = ()
    """Arguments of the environment, such as obs_type=ram."""
    engine: Literal["in-process", "pool", "ray"] = "in-process"
    """Where rollouts are played: in this process, in worker processes (pool), or on a Ray
    cluster.
    """
    workers: int | None = None
    """Number of workers; None for one per CPU."""
    address: str | None = None
    """Address of the Ray cluster, HOST:PORT; None starts a local one."""
    gif: bool = False
    """Also write each method's trained policy as policy.gif into its run folder."""
    log_every: int = 10
    """Episodes between records of metrics."""
    checkpoint_every: int = 100
    """Episodes between checkpoints."""
    root: Path = Path("runs")
    """Folder for the run folders, ROOT/control/NAME."""
    name: str = ""
    """Prefix of the run folders' names."""
    resume: bool = False
    """Continue existing run folders from their last checkpoints."""

    experiment: ClassVar[str] = "control"

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        try:
            importlib.import_module("arsm.rl.agent")
        except ModuleNotFoundError as missing:
            raise ValueError(
                f"Control needs {missing.name}; install it with `pip install 'arsm[rl]'`."
            ) from None
        from arsm.cluster import import_ray
        from arsm.rl import EnvironmentFailure
        from arsm.rl.rollouts import check_engine_options

        # an environment or an encoder may be defined in the working directory
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        check_least(self, **SMALLEST)
        if self.cpu_seconds is not None and not 0 < self.cpu_seconds < math.inf:
            raise ValueError(f"cpu_seconds must be positive and finite, but is {self.cpu_seconds}.")
        check_name(self.name)
        check_some(
            methods=self.methods, optimizers=self.optimizers, learning_rates=self.learning_rates
        )
        for words in self.methods:
            method(words)
        check_engine_options(self.engine, self.workers, self.address)
        if self.engine == "ray":
            import_ray()
        try:
            for config in self.configs():
                make_agent(config, self.seed).close()
        except EnvironmentFailure as error:
            raise ValueError(str(error)) from None
        if self.gif:
            check_drawing(self.environment)

    def run(self, console: Console) -> None:
        """Run all combinations, one after the other."""
        torch.set_num_threads(1)  # these tensors are too small to share among threads
        runs = self.runs()
        with progress_bars(console) as progress:
            tasks = {
                folder: progress.add_task(folder.name, total=self.seeds * self.episodes)
                for folder in runs
            }
            for folder, config in runs.items():
                progress.reset(tasks[folder])  # its clock starts now
                for done in train(self, config, folder.name):
                    progress.update(tasks[folder], completed=done)
                if self.gif:
                    write_gif(config, folder)

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders of this command, each with the settings that determine its results."""
        return {
            self.root / "control" / folder_name(self.name, config): config
            for config in self.configs()
        }

    def configs(self) -> Iterator[dict[str, Any]]:
        """The settings that determine each run's results."""
        common = ("environment", "episodes", "seeds", "seed", "schedule", "horizon", "log_every")
        optional = ("cpu_seconds", "encoder", "options")
        given = {key: getattr(self, key) for key in optional if getattr(self, key)}
        for words in self.methods:
            for optimizer in self.optimizers:
                for rate in self.learning_rates:
                    yield {
                        "method": words,
                        "optimizer": optimizer,
                        "learning_rate": rate,
                        "budget": paper_budget(self.environment)
                        if self.budget is None
                        else self.budget,
                        **{key: getattr(self, key) for key in common},
                        **dataclasses.asdict(self.learning),
                        **given,
                    }


def paper_budget(environment: str) -> int:
    """S_max of the paper's tasks; 64 for others."""
    return PAPER_BUDGETS.get(environment, 64)


def variant(config: dict[str, Any]) -> list[str]:
    """The settings of a run that differ from the defaults, in words: "budget 256", "common random
    numbers".
    """
    defaults = {"budget": paper_budget(config["environment"]), "schedule": "constant"}
    defaults |= dataclasses.asdict(Learning())
    words = []
    for key, default in defaults.items():
        value = config.get(key, default)
        value = tuple(value) if isinstance(value, list) else value
        if value != default:
            words.append(_setting(key.replace("_", " "), value))
    return words


def _setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(
        [name, *(f"{x:g}" if isinstance(x, float) else str(x) for x in values or ("none",))]
    )


def folder_name(prefix: str, config: dict[str, Any]) -> str:
    """E.g. Acrobot-v1-arsm-adam-0.01, then the settings that differ from the defaults."""
    seed = [f"seed {config['seed']}"] if config["seed"] else []
    words = (
        config["method"],
        config["optimizer"],
        f"{config['learning_rate']:g}",
        *variant(config),
        *seed,
    )
    plain = plain_name("-".join(words).replace(" ", "-"))
    return "-".join(filter(None, (prefix, plain_name(config["environment"]), plain)))


def make_agent(config: dict[str, Any], seed: int, **engine: Any) -> PolicyGradient:
    """The agent of one seed."""
    from arsm.rl import PolicyGradient

    learning = {part.name: config[part.name] for part in dataclasses.fields(Learning)}
    settings = Settings(
        **{**learning, "hidden": tuple(config["hidden"])},
        budget=config["budget"],
        learning_rate=config["learning_rate"],
        optimizer=config["optimizer"],
        decay_over=config["episodes"] if config["schedule"] == "linear" else None,
        seed=seed,
    )
    return PolicyGradient(
        config["environment"],
        method(config["method"]),
        settings=settings,
        horizon=config["horizon"],
        encoder=named_function(config["encoder"]) if config.get("encoder") else None,
        options=dict(map(named_option, config.get("options", ()))) or None,
        **engine,
    )


def named_function(words: str) -> Callable[[Any], Any]:
    """The function MODULE:FUNCTION."""
    module, colon, name = words.partition(":")
    try:
        found = (
            getattr(importlib.import_module(module), name) if colon and module and name else None
        )
    except (ImportError, AttributeError) as error:
        raise ValueError(f'The encoder "{words}" cannot be imported ({error}).') from None
    if not callable(found):
        raise ValueError(f'An encoder is named as MODULE:FUNCTION, but this is "{words}".')
    return found


def named_option(words: str) -> tuple[str, Any]:
    """An option KEY=VALUE; the value is a Python literal, or else text."""
    key, equals, value = words.partition("=")
    if not key or not equals:
        raise ValueError(f'An option of the environment is KEY=VALUE, but this is "{words}".')
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


@dataclass
class Progress:
    """Progress of one seed's run, without its agent."""

    returns: list[float]
    """Of the last episodes."""
    replayed: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, iteration: Iteration) -> None:
        self.returns = [*self.returns, *iteration.returns][-WINDOW:]
        self.replayed += iteration.replayed
        self.seconds += iteration.seconds
        self.cpu_seconds += iteration.cpu_seconds

    def metrics(self, iteration: Iteration) -> dict[str, float]:
        return {
            "average_return": sum(self.returns) / len(self.returns),
            "steps": iteration.steps,
            "replayed": self.replayed,
            "log_variance": iteration.log_variance,
            "entropy": iteration.entropy,
            "pseudo_actions": iteration.pseudo_actions,
            "rollouts": iteration.rollouts,
            "learning_seconds": round(self.seconds, 4),
            "cpu_seconds": round(self.cpu_seconds, 4),
        }


def train(control: Control, config: dict[str, Any], name: str) -> Iterator[int]:
    """Train all seeds one after the other, in one run folder; yields the episodes done."""
    words = {"group": control.name, "label": ", ".join((config["method"], *variant(config)))}
    with open_run(control.root, "control", name, config, **words, resume=control.resume) as run:
        done = run.step
        yield done
        for number in range(done // config["episodes"], config["seeds"]):
            seed = config["seed"] + number
            engine = {
                "engine": control.engine,
                "workers": control.workers,
                "address": control.address,
            }
            agent = make_agent(config, seed, **engine)
            try:
                for episodes in train_seed(control, config, run, agent, number):
                    yield number * config["episodes"] + episodes
            finally:
                agent.close()


def train_seed(
    control: Control, config: dict[str, Any], run: Run, agent: PolicyGradient, number: int
) -> Iterator[int]:
    """Train one seed from its last checkpoint, or from the start; yields its episodes done."""
    from arsm.rl import EnvironmentFailure, WorkerFailure

    total, limit = config["episodes"], config.get("cpu_seconds", math.inf)
    progress = Progress([])
    saved = run.state
    if saved is not None and saved["number"] == number:
        agent.load_state_dict(saved["agent"])
        progress = Progress(**saved["progress"])

    def ended() -> bool:
        return agent.episodes >= total or progress.cpu_seconds >= limit

    def save() -> None:
        state = {
            "number": number,
            "agent": agent.state_dict(),
            "progress": dataclasses.asdict(progress),
        }
        # the last iteration may play more episodes than were left, or come before them
        run.save(number * total + (total if ended() else agent.episodes), state)

    def due(every: int, played: int) -> bool:
        return ended() or agent.episodes // every > (agent.episodes - played) // every

    try:
        for iteration in agent.iterations(episodes=total - agent.episodes):
            progress.add(iteration)
            if due(config["log_every"], len(iteration.returns)):
                run.log(agent.episodes, progress.metrics(iteration), config["seed"] + number)
            if due(control.checkpoint_every, len(iteration.returns)):
                save()
            yield agent.episodes
            if ended():
                break
    except (EnvironmentFailure, WorkerFailure) as error:
        save()
        raise RunError(
            f"{error} What was learned in {agent.episodes} episodes is kept in {run.folder}."
        ) from error


def check_drawing(environment: str) -> None:
    """Refuse an environment that cannot be drawn, before training."""
    import gymnasium

    try:
        from PIL import Image

        with contextlib.closing(
            gymnasium.make(environment, render_mode="rgb_array", max_episode_steps=-1)
        ) as env:
            env.reset(seed=0)
            Image.fromarray(env.render())  # pyright: ignore[reportArgumentType]
    except Exception as error:
        raise ValueError(
            f"--gif cannot draw {environment} ({error}); fix that, or leave --gif out."
        ) from error


def write_gif(config: dict[str, Any], folder: Path) -> None:
    """One episode of the last seed's policy, with the most likely action at each step."""
    saved = load_checkpoint(folder / "checkpoint.pt")["state"]
    agent = make_agent(config, config["seed"] + saved["number"])
    agent.load_state_dict(saved["agent"])
    agent.video(folder / "policy.gif", every=3)
    agent.close()
