"""Training curves by policy gradients from the first checkpoint, at equal tokens per update.

`python -m arsm_experiments.sequences.curves TASK` trains every method with every rate and seed given. Records are lines
of JSON, one per evaluation; runs that reached their end are not run again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import arsm
from arsm import sequences
from arsm.sequences import Branch, Estimate, Group, Strategy
from arsm_experiments.sequences.measure import LEVELS, checkpoint_path
from arsm_experiments.sequences.methods import (
    SMALL,
    Size,
    accuracy,
    add_line,
    draw_rows,
    load_policy,
    new_policy,
    read_lines,
    save_policy,
)
from arsm_experiments.sequences.rivals import Critic, ValueHead, VinePPO
from arsm_experiments.sequences.tasks import EOS, TASKS, Data, ExactMatch, load


@dataclass(frozen=True)
class Method:
    """A strategy and how the tokens of an update are spent."""

    strategy: Strategy | None
    """None: a `ValueHead` or a `Branch` with a critic, made with the networks of the run."""
    critic: str | None = None
    """"state" or "action": which network learns along."""
    true_share: float | None = None
    """The share of the tokens that true sequences get; the rest is a budget of rollouts. None: no budget, and as many
    prompts as the tokens allow."""


METHODS = {
    "group 8": Method(Group(8)),
    "token baseline 8": Method(Group(8, baseline="token")),
    "grpo 8": Method(Group(8, normalise="std")),
    "value head": Method(None, "state"),
    "vineppo 4": Method(VinePPO(4)),
    "branch rloo 8": Method(Branch(arsm.RLOO(8))),
    "branch rloo 8, a third of the tokens on prompts": Method(Branch(arsm.RLOO(8)), None, 0.3),
    "branch rloo 8, critic": Method(None, "action"),
}


class Spending:
    """Prompts and budget of the next update, from what the last ones cost."""

    def __init__(self, method: Method, tokens: int, width: int, smallest: int) -> None:
        self.method, self.tokens, self.smallest = method, tokens, smallest
        self.per_prompt, self.per_rollout = float(width), width / 2
        if isinstance(method.strategy, Group):
            self.per_prompt = float(width * method.strategy.n)
        elif method.true_share is None and method.critic != "state":
            self.per_prompt = width * (1 + 4 * width / 2)  # until it is known

    def prompts(self) -> int:
        """N."""
        share = 1.0 if self.method.true_share is None else self.method.true_share
        return max(2, round(share * self.tokens / self.per_prompt))

    def budget(self, prompts: int, length: float) -> int:
        """The most rollouts."""
        return max(self.smallest, round((self.tokens - prompts * length) / self.per_rollout))

    def learn(self, out: Estimate, prompts: int) -> None:
        """Running means, which the next update is planned with."""
        true, generated, rollouts = int(out.mask.sum()), int(out.info["generated"]), int(out.info["rollouts"])
        limited = self.method.true_share is not None
        self.per_prompt += 0.2 * ((true if limited else generated) / prompts - self.per_prompt)
        if rollouts:
            self.per_rollout += 0.2 * ((generated - true) / rollouts - self.per_rollout)


def train(
    name: str,
    rate: float,
    seed: int,
    task: str,
    data: Data,
    size: Size,
    weights: Path,
    path: Path,
    device: str,
    tokens: int,
    per_update: int,
    max_rows: int,
) -> None:
    """One run: a record per evaluation goes to `path`."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    questions, held_out = data.split(size.held_out)
    held_out = Data(held_out.prompts[: size.tested], held_out.answers[: size.tested])
    policy = load_policy(task, size, weights, device)
    optimiser = torch.optim.Adam(policy.parameters(), lr=rate, betas=(0.9, 0.95))
    method, width = METHODS[name], TASKS[task].answer_tokens
    critic, strategy = None, method.strategy
    begun = time.time()
    spent = 0
    if method.critic is not None:
        critic = Critic(policy, actions=method.critic == "action")
        strategy = ValueHead(critic) if method.critic == "state" else Branch(arsm.RLOO(8), critic=critic)
    assert strategy is not None
    spending = Spending(method, per_update, width, 16)
    update = 0
    while True:
        if update % 10 == 0 or spent >= tokens:
            reached = accuracy(policy, task, held_out, torch.Generator(device).manual_seed(1))
            record = {"task": task, "method": name, "rate": rate, "seed": seed, "update": update, "tokens": spent}
            record |= {"seconds": time.time() - begun, "accuracy": reached, "end": spent >= tokens}
            add_line(path, record)
            if spent >= tokens:
                print(
                    f"{task}, {name}, rate {rate:g}, seed {seed}: {reached:.3f}, {record['seconds']:.0f} s", flush=True
                )
                return
        count = spending.prompts()
        prompts, answers = questions.batch(draw_rows(questions, count, generator), device)
        if isinstance(strategy, Branch) and method.true_share is not None:
            strategy = replace(strategy, budget=spending.budget(count, spending.per_prompt))
        out = sequences.estimate(
            strategy,
            policy,
            prompts,
            ExactMatch(prompts, answers),
            max_tokens=width,
            eos=EOS,
            max_rows=max_rows,
            generator=generator,
        )
        optimiser.zero_grad()
        (-out.value.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        spending.learn(out, count)
        spent += int(out.info["generated"])
        update += 1
        if critic is not None:
            critic.fit(prompts, out.tokens, out.mask, out.rewards)
            if out.branches is not None and out.branches.row.shape[0]:
                branches = out.branches
                after = torch.arange(width, device=device) >= branches.step.unsqueeze(-1)
                after = after & sequences.live_tokens(branches.tokens, EOS)
                critic.fit(prompts[branches.row], branches.tokens, after, branches.rewards)


def best_rates(records: list[dict[str, Any]], name: str) -> list[float]:
    """The rate with the highest last accuracy of seed 0; none where there is no such run."""
    ends = [r for r in records if r["method"] == name and r["seed"] == 0 and r["end"]]
    return [max(ends, key=lambda r: r["accuracy"])["rate"]] if ends else []


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, default=Path("runs/sequences/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=480, help="Start no new run after so long")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, help="None: each method's best rate of seed 0")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=4_000_000, help="Generated tokens of a run")
    parser.add_argument("--per-update", type=int, default=20_000, help="Generated tokens of an update, on average")
    parser.add_argument("--max-rows", type=int, default=16384)
    parser.add_argument("--small", action="store_true", help="A tiny model, to try the command on a CPU")
    options = parser.parse_args()
    deadline, size = time.time() + options.seconds, SMALL if options.small else Size()
    data = load(options.data / f"{options.task}.pt", options.device)
    weights = checkpoint_path(options.out, options.task, LEVELS[0])
    if options.small:
        save_policy(new_policy(options.task, size, options.device), weights)
    path = options.out / f"curves-{options.task}.jsonl"
    records = read_lines(path)
    done = {(r["method"], r["rate"], r["seed"]) for r in records if r["end"]}
    for seed in options.seeds:
        for name in options.methods:
            for rate in options.rates or best_rates(records, name):
                if (name, rate, seed) in done:
                    continue
                if time.time() > deadline:
                    print(f"{options.task}: out of time before {name}; run the command again.", flush=True)
                    return
                train(
                    name,
                    rate,
                    seed,
                    options.task,
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
