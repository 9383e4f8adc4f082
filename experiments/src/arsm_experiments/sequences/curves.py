"""Training curves by policy gradients from a checkpoint, at equal tokens per update.

`python -m arsm_experiments.sequences.curves TASK` trains every method with every rate and seed given. Records are lines
of JSON, one per evaluation; runs that reached their end are not run again.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch

from arsm import sequences
from arsm_experiments.sequences.measure import LEVELS, checkpoint_path
from arsm_experiments.sequences.methods import (
    METHODS,
    SMALL,
    Critics,
    Size,
    accuracy,
    add_line,
    draw_rows,
    estimate,
    load_policy,
    new_policy,
    read_lines,
    save_policy,
)
from arsm_experiments.sequences.rivals import Critic
from arsm_experiments.sequences.tasks import EOS, TASKS, Data, ExactMatch, load

TRAINED = (
    "branch all, chance",
    "token baseline 8",
    "branch rloo 64, chance",
    "group 8",
    "value head",
    "grpo 8",
    "branch rloo 16, true returns",
    "vineppo 2",
)
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=480, help="Start no new run after so long")
    parser.add_argument("--start", type=float, default=LEVELS[0], choices=LEVELS, help="The checkpoint's accuracy")
    parser.add_argument("--methods", nargs="+", default=list(TRAINED), choices=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, help="None: each method's best rate of seed 0")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=400_000, help="Generated tokens of a run")
    parser.add_argument("--per-update", type=int, default=1_000, help="Generated tokens of an update, on average")
    parser.add_argument("--max-rows", type=int, default=4096)
    parser.add_argument("--small", action="store_true", help="A tiny model, to try the command on a CPU")
    options = parser.parse_args()
    deadline, size = time.time() + options.seconds, SMALL if options.small else Size()
    data = load(options.data / f"{options.task}.pt", options.device)
    weights = checkpoint_path(options.out, options.task, options.start)
    if options.small:
        save_policy(new_policy(options.task, size, options.device), weights)
    path = options.out / f"curves-{options.task}.jsonl"
    records = read_lines(path)
    done = {(r["start"], r["method"], r["rate"], r["seed"]) for r in records if r["end"]}
    for seed in options.seeds:
        for name in options.methods:
            for rate in options.rates or best_rates(records, name, options.start):
                if (options.start, name, rate, seed) in done:
                    continue
                if time.time() > deadline:
                    print(f"{options.task}: out of time before {name}; run the command again.", flush=True)
                    return
                train(
                    name,
                    rate,
                    seed,
                    options.task,
                    options.start,
                    data,
                    size,
                    weights,
                    path,
                    options.device,
                    options.tokens,
                    options.per_update,
                    options.max_rows,
                )


if __name__ == "__main__":
    main()
