"""A training run by policy gradients from a checkpoint, at equal tokens per update; `schedule` starts them."""

from __future__ import annotations

import math
import time
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
WHICH_CRITIC = {"value head": "state", "branch all, chance, critic": "action"}
"""Methods whose critic learns along."""
WARM = 10
"""Updates over which the rate rises."""
CRITIC_ROWS = 128
"""Sequences that a critic takes one step on."""
EVERY = 5
"""Updates between two evaluations."""
LOST = 20
"""Updates after which a run without a single right answer ends."""
ENOUGH = 0.95
"""The accuracy at which a run ends."""


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
    tokens: int,
    max_rows: int,
    deadline: float = math.inf,
) -> None:
    """One run: a record per evaluation goes to `path`; a run that meets the deadline has no record of its end.

    Seed 0 chooses the size and the rate. There a run ends after a third of its tokens if its accuracy has halved.
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
    begun, spent, update = time.time(), 0, 0
    count, per_prompt = max(2, per_update // (4 * width)), None
    while True:
        if update % EVERY == 0 or spent >= tokens:
            reached = accuracy(policy, task, held_out, torch.Generator(device).manual_seed(1))
            lost = (update >= LOST and reached == 0) or (seed == 0 and spent >= tokens / 3 and reached < start / 2)
            end = spent >= tokens or reached >= ENOUGH or lost
            record = {"task": task, "start": start, "method": name, "rate": rate, "seed": seed, "update": update}
            record |= {"tokens": spent, "per_update": per_update, "seconds": time.time() - begun, "accuracy": reached}
            add_line(path, record | {"end": end})
            if end:
                print(
                    f"{task} from {start}, {name}, updates of {per_update}, rate {rate:g}, seed {seed}: {reached:.3f}, "
                    f"{spent} tokens, {record['seconds']:.0f} s",
                    flush=True,
                )
            if end or time.time() > deadline:
                return
        prompts, answers = questions.batch(draw_rows(questions, count, generator), device)
        out = estimate(strategy, policy, prompts, ExactMatch(prompts, answers), width, max_rows, generator)
        optimiser.zero_grad()
        (-out.value.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        warm.step()
        update += 1
        generated = int(out.info["generated"])
        spent += generated
        per_prompt = generated / count if per_prompt is None else 0.8 * per_prompt + 0.2 * generated / count
        count = max(2, round(per_update / per_prompt))
        if critic is not None:
            for rows in torch.arange(prompts.shape[0]).split(CRITIC_ROWS):
                critic.fit(prompts[rows], out.tokens[rows], out.mask[rows], out.rewards[rows])
            if out.branches is not None and out.branches.row.shape[0]:
                branches = out.branches
                after = torch.arange(width, device=device) >= branches.step.unsqueeze(-1)
                after = after & sequences.live_tokens(branches.tokens, EOS)
                critic.fit(prompts[branches.row], branches.tokens, after, branches.rewards)


def best_choice(ends: list[Record]) -> Choice:
    """Of the last records of runs: that with the highest accuracy, or that reached ENOUGH with the fewest tokens."""
    best = max(ends, key=lambda end: (min(end["accuracy"], ENOUGH), -end["tokens"]))
    return best["per_update"], best["rate"]
