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

WHICH_CRITIC = {"value head": "state", "branch all, chance, critic": "action"}
"""Methods whose critic learns along."""
WARM = 10
"""Updates over which the rate rises."""
CRITIC_ROWS = 128
"""Sequences that a critic takes one step on."""
EVERY = 5
"""Updates between two evaluations."""
LOST = 20
"""Updates after which a rate that has halved the accuracy is given up, on seed 0."""
ENOUGH = 0.95
"""The accuracy at which a run ends."""


def train(
    name: str,
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
    per_update: int,
    max_rows: int,
    deadline: float = math.inf,
) -> None:
    """One run: a record per evaluation goes to `path`; a run that meets the deadline has no record of its end."""
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
            lost = seed == 0 and update >= LOST and reached < start / 2
            end = spent >= tokens or reached >= ENOUGH or lost
            record = {"task": task, "start": start, "method": name, "rate": rate, "seed": seed, "update": update}
            record |= {"tokens": spent, "per_update": per_update, "seconds": time.time() - begun, "accuracy": reached}
            add_line(path, record | {"end": end})
            if end:
                print(
                    f"{task} from {start}, {name}, rate {rate:g}, seed {seed}: {reached:.3f}, {spent} tokens, ", end=""
                )
                print(f"{record['seconds']:.0f} s", flush=True)
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


def best_rates(records: list[dict[str, Any]], name: str, start: float) -> list[float]:
    """The rate of seed 0 with the highest last accuracy, or the one that reached ENOUGH first; none without runs."""
    ends = [r for r in records if (r["method"], r["start"], r["seed"]) == (name, start, 0) and r["end"]]
    return [max(ends, key=lambda r: (min(r["accuracy"], ENOUGH), -r["tokens"]))["rate"]] if ends else []
