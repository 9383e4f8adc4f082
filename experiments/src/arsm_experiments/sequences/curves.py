"""A training run by policy gradients from a checkpoint, at equal tokens per update; `schedule`
starts them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from arsm_experiments.runs import lines
from arsm_experiments.sequences.methods import METHODS, Critics, Size, load_policy
from arsm_experiments.sequences.named import Method
from arsm_experiments.sequences.rivals import Critic
from arsm_experiments.sequences.tasks import Data
from arsm_experiments.sequences.trainer import Trainer

Measurement = dict[str, Any]
"""A line of a run."""
Choice = tuple[int, float]
"""Generated tokens per update, and the rate."""
Run = list[Measurement]
GOALS = (0.19, 0.7, 0.8, 0.9)
"""Accuracies whose tokens are compared. For each, every method has its own choice."""
WHICH_CRITIC = {"value head": "state", "branch all, chance, critic": "action"}
"""Methods whose critic learns along."""
CRITIC_ROWS = 128
"""Sequences that a critic takes one step on."""
EVERY = 5
"""Updates between two evaluations."""
RUINED = 20
"""Updates after which a run without a single right answer ends."""


@dataclass(frozen=True)
class Trial:
    """What is trained."""

    task: str
    start: float
    """The level of the checkpoint to start from."""
    method: str
    per_update: int
    """Generated tokens per update."""
    rate: float
    seed: int

    @property
    def words(self) -> str:
        return (
            f"{self.task} from {self.start}, {self.method}, updates of {self.per_update}, rate "
            f"{self.rate:g}, seed {self.seed}"
        )


@dataclass(frozen=True, eq=False)
class Ending:
    """When a run ends."""

    goal: float
    """With this accuracy."""
    tokens: Callable[[], float]
    """After so many generated tokens, which may become fewer while it runs."""
    lost: float = math.inf
    """If its accuracy has halved after so many tokens."""
    deadline: float = math.inf
    """At this time, without a record of its end."""

    def reached(self, trial: Trial, trainer: Trainer, accuracy: float) -> bool:
        """Whether a run is over."""
        ruined = trainer.updates >= RUINED and accuracy == 0
        lost = trainer.tokens >= self.lost and accuracy < trial.start / 2
        return trainer.tokens >= self.tokens() or accuracy >= self.goal or ruined or lost


def train(
    trial: Trial,
    ending: Ending,
    data: Data,
    size: Size,
    weights: Path,
    path: Path,
    device: str,
    max_rows: int,
) -> None:
    """One run of the trainer: a line per measurement goes to `path`."""
    torch.manual_seed(trial.seed)
    questions, held_out = data.split(size.held_out)
    tested = held_out.first(size.tested)
    trainer = make_trainer(trial, questions, size, weights, device, max_rows)
    begun = time.time()
    limit = math.inf
    while True:
        if trainer.updates % EVERY == 0 or trainer.tokens >= limit:
            accuracy = trainer.score(tested)
            limit = ending.tokens()
            end = ending.reached(trial, trainer, accuracy)
            seconds = time.time() - begun
            found = {"step": trainer.updates, "tokens": trainer.tokens, "seconds": seconds}
            lines.add(path, {**asdict(trial), **found, "accuracy": accuracy, "end": end})
            if end:
                print(
                    f"{trial.words}: {accuracy:.3f}, {trainer.tokens} tokens, {seconds:.0f} s",
                    flush=True,
                )
            if end or time.time() > ending.deadline:
                return
        trainer.update()


def make_trainer(
    trial: Trial, questions: Data, size: Size, weights: Path, device: str, max_rows: int
) -> Trainer:
    """The one trainer, from a checkpoint, with a critic where the method has one."""
    policy = load_policy(trial.task, size, weights, device)
    critics = Critics(Critic(policy, actions=False), Critic(policy, actions=True))
    critic = None
    if trial.method in WHICH_CRITIC:
        critic = getattr(critics, WHICH_CRITIC[trial.method])
    trainer = Trainer(
        policy,
        questions,
        Method(METHODS[trial.method](critics), critic=critic, critic_rows=CRITIC_ROWS),
        rate=trial.rate,
        seed=trial.seed,
        tokens_per_update=trial.per_update,
        max_rows=max_rows,
    )
    # of all methods alike, before the first update tells what a prompt costs
    trainer.per_prompt = 4.0 * questions.max_tokens
    return trainer


def finished(records: list[Measurement]) -> dict[tuple[float, str, int], dict[Choice, Run]]:
    """Whole runs by (start, method, seed) and choice. Of several, the last; runs that were cut
    short are left out.
    """
    begun: dict[tuple[tuple[float, str, int], Choice], Run] = {}
    whole: dict[tuple[float, str, int], dict[Choice, Run]] = {}
    for record in records:
        key, choice = (
            (record["start"], record["method"], record["seed"]),
            (record["per_update"], record["rate"]),
        )
        if record["step"] == 0 or (key, choice) not in begun:
            begun[key, choice] = []
        begun[key, choice].append(record)
        if record["end"]:
            whole.setdefault(key, {})[choice] = begun[key, choice]
    return whole


def crossing(run: Run, level: float) -> tuple[float, float] | None:
    """Tokens and seconds at which the accuracy crosses a level, by a straight line between two
    evaluations.
    """
    for before, after in itertools.pairwise(run):
        if before["accuracy"] < level <= after["accuracy"]:
            share = (level - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            tokens, seconds = (
                before[key] + share * (after[key] - before[key]) for key in ("tokens", "seconds")
            )
            return tokens, seconds
    return None


def best_choice(trials: dict[Choice, Run], goal: float) -> Choice:
    """The choice that reaches the goal with the fewest tokens; if none does, that of the highest
    last accuracy.
    """

    def merit(choice: Choice) -> tuple[bool, float]:
        reached = crossing(trials[choice], goal)
        return (True, -reached[0]) if reached else (False, trials[choice][-1]["accuracy"])

    return max(trials, key=merit)
