"""A training run by policy gradients from a checkpoint, at equal tokens per update; `schedule`
starts them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from arsm import sequences
from arsm_experiments.sequences.methods import (
    METHODS,
    Critics,
    Size,
    accuracy,
    add_line,
    draw_rows,
    estimate,
    load_policy,
)
from arsm_experiments.sequences.rivals import Critic
from arsm_experiments.sequences.tasks import EOS, TASKS, Data, ExactMatch

Record = dict[str, Any]
Choice = tuple[int, float]
"""Generated tokens per update, and the rate."""
Run = list[Record]
GOALS = (0.19, 0.7, 0.8, 0.9)
"""Accuracies whose tokens are compared. For each, every method has its own choice."""
WHICH_CRITIC = {"value head": "state", "branch all, chance, critic": "action"}
"""Methods whose critic learns along."""
WARM = 10
"""Updates over which the rate rises."""
CRITIC_ROWS = 128
"""Sequences that a critic takes one step on."""
EVERY = 5
"""Updates between two evaluations."""
RUINED = 20
"""Updates after which a run without a single right answer ends."""


def train(
    name: str,
    per_update: int,
    rate: float,
    seed: int,
    task: str,
    start: float,
    data: Data,
    size: Size,
    weights: Path,
    path: Path,
    device: str,
    goal: float,
    tokens: Callable[[], float],
    lost: float,
    max_rows: int,
    deadline: float = math.inf,
) -> None:
    """One run: a record per evaluation goes to `path`; a run that meets the deadline has no record
    of its end.

    It ends when it reaches the goal, after `tokens()` generated tokens, or if its accuracy has
    halved after `lost` tokens.
    """
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    questions, held_out = data.split(size.held_out)
    held_out = Data(held_out.prompts[: size.tested], held_out.answers[: size.tested])
    policy = load_policy(task, size, weights, device)
    optimiser = torch.optim.Adam(policy.parameters(), lr=rate, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM))
    critics = Critics(Critic(policy, actions=False), Critic(policy, actions=True))
    critic = getattr(critics, WHICH_CRITIC[name]) if name in WHICH_CRITIC else None
    strategy, width = METHODS[name](critics), TASKS[task].answer_tokens
    begun, spent, update, limit = time.time(), 0, 0, math.inf
    count, per_prompt = max(2, per_update // (4 * width)), None
    while True:
        if update % EVERY == 0 or spent >= limit:
            reached = accuracy(policy, task, held_out, torch.Generator(device).manual_seed(1))
            ruined = (update >= RUINED and reached == 0) or (spent >= lost and reached < start / 2)
            limit = tokens()
            end = spent >= limit or reached >= goal or ruined
            record = {
                "task": task,
                "start": start,
                "method": name,
                "rate": rate,
                "seed": seed,
                "update": update,
            }
            record |= {
                "tokens": spent,
                "per_update": per_update,
                "seconds": time.time() - begun,
                "accuracy": reached,
            }
            add_line(path, record | {"end": end})
            if end:
                print(
                    f"{task} from {start}, {name}, updates of {per_update}, rate {rate:g}, seed "
                    f"{seed}: {reached:.3f}, {spent} tokens, {record['seconds']:.0f} s",
                    flush=True,
                )
            if end or time.time() > deadline:
                return
        prompts, answers = questions.batch(draw_rows(questions, count, generator), device)
        out = estimate(
            strategy, policy, prompts, ExactMatch(prompts, answers), width, max_rows, generator
        )
        optimiser.zero_grad()
        (-out.value.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        warm.step()
        update += 1
        generated = int(out.info["generated"])
        spent += generated
        per_prompt = (
            generated / count if per_prompt is None else 0.8 * per_prompt + 0.2 * generated / count
        )
        count = max(2, round(per_update / per_prompt))
        if critic is not None:
            for rows in torch.arange(prompts.shape[0]).split(CRITIC_ROWS):
                critic.fit(prompts[rows], out.tokens[rows], out.mask[rows], out.rewards[rows])
            if out.branches is not None and out.branches.row.shape[0]:
                branches = out.branches
                after = torch.arange(width, device=device) >= branches.step.unsqueeze(-1)
                after = after & sequences.live_tokens(branches.tokens, EOS)
                critic.fit(prompts[branches.row], branches.tokens, after, branches.rewards)


def finished(records: list[Record]) -> dict[tuple[float, str, int], dict[Choice, Run]]:
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
        if record["update"] == 0 or (key, choice) not in begun:
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
