"""The methods that are compared, by name, and the checkpoints that they start from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import (
    Branch,
    Decoding,
    Group,
    Model,
    Prefixes,
    Strategy,
    by_likelihood,
    complete,
)
from arsm.sequences.ends import live_tokens
from arsm_experiments.sequences import likeliest
from arsm_experiments.sequences.likeliest import Likeliest
from arsm_experiments.sequences.rivals import Critic, ValueHead, VinePPO
from arsm_experiments.sequences.tasks import EOS, TASKS, VOCABULARY, Data, ExactMatch
from arsm_experiments.sequences.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Critics:
    """The learned parts that a method may use."""

    state: Critic
    action: Critic


UNLIMITED = 1 << 40
"""A budget that every rollout fits into; with a budget, `Branch` uses the true sequences' returns
alone.
"""


def no_baseline(prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """v = 0 [N, T]."""
    return torch.zeros_like(tokens, dtype=torch.float32)


METHODS: dict[str, Callable[[Critics], Strategy | Likeliest]] = {
    "group 2": lambda _: Group(2),
    "group 4": lambda _: Group(4),
    "group 8": lambda _: Group(8),
    "group 16": lambda _: Group(16),
    "grpo 8": lambda _: Group(arsm.GRPO(8)),
    "dr. grpo 8": lambda _: Group(arsm.DrGRPO(8)),
    "token baseline 8": lambda _: Group(arsm.OTB(8)),
    "value head": lambda critics: ValueHead(critics.state),
    "value head, lambda 0.95": lambda critics: ValueHead(critics.state, 0.95),
    "vineppo 2": lambda _: VinePPO(2),
    "vineppo 8": lambda _: VinePPO(8),
    "branch rloo 2": lambda _: Branch(arsm.RLOO(2)),
    "branch rloo 4": lambda _: Branch(arsm.RLOO(4)),
    "branch rloo 8": lambda _: Branch(arsm.RLOO(8)),
    "branch rloo 16": lambda _: Branch(arsm.RLOO(16)),
    "branch rloo 8, true returns": lambda _: Branch(arsm.RLOO(8), budget=UNLIMITED),
    "branch rloo 16, true returns": lambda _: Branch(arsm.RLOO(16), budget=UNLIMITED),
    "branch rloo 16, chance": lambda _: Branch(arsm.RLOO(16), chance=by_likelihood(0.01)),
    "branch rloo 64, chance": lambda _: Branch(arsm.RLOO(64), chance=by_likelihood(0.01)),
    "branch rloo 256, chance": lambda _: Branch(arsm.RLOO(256), chance=by_likelihood(0.01)),
    "branch all, chance": lambda _: Branch(arsm.LocalExpectation(), chance=by_likelihood()),
    "branch all, chance 0.01": lambda _: Branch(
        arsm.LocalExpectation(), chance=by_likelihood(0.01)
    ),
    "branch all, chance 0.0005": lambda _: Branch(
        arsm.LocalExpectation(), chance=by_likelihood(0.0005)
    ),
    "branch all, chance, critic": lambda critics: Branch(
        arsm.LocalExpectation(), chance=by_likelihood(), critic=critics.action
    ),
    "branch rloo 16, critic": lambda critics: Branch(arsm.RLOO(16), critic=critics.action),
    "branch rloo 8, keep 0.3": lambda _: Branch(arsm.RLOO(8), keep=0.3),
    "branch arsm": lambda _: Branch(arsm.ARSM()),
    "branch arsm, 4 references": lambda _: Branch(arsm.ARSM(references=4)),
    "branch 4 exact, 2 sampled": lambda _: Branch(arsm.ExactPlusSampled(4, 2)),
    "likeliest": lambda _: Likeliest(ValueHead(no_baseline)),
    "likeliest, greedy": lambda _: Likeliest(ValueHead(no_baseline), tries=0),
    "critic alone": lambda critics: Branch(arsm.Reinforce(), critic=critics.action),
}


def estimate(
    strategy: Strategy | Likeliest,
    policy: Transformer,
    prompts: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    width: int,
    max_rows: int,
    generator: torch.Generator,
) -> sequences.SequenceEstimate:
    """The gradient of the expected reward of answers of at most `width` tokens."""
    return estimate_by(
        strategy,
        policy,
        prompts,
        reward,
        max_tokens=width,
        eos=EOS,
        rows=max_rows,
        micro_batch=max_rows,
        generator=generator,
    )


def estimate_by(
    strategy: Strategy | Likeliest,
    model: Model,
    prompts: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    **options: Any,
) -> sequences.SequenceEstimate:
    """`sequences.estimate`, also for `Likeliest`, which is no strategy of the library."""
    if not isinstance(strategy, Likeliest):
        return sequences.estimate(strategy, model, prompts, reward, **options)
    taken = ("max_tokens", "eos", "rows", "micro_batch", "generator")
    others = [name for name, value in options.items() if name not in taken and value]
    if others:
        raise ValueError(f"Likeliest answers take no {', '.join(others)}; leave it out.")
    return likeliest.estimate(
        strategy, model, prompts, reward, **{name: options[name] for name in taken}
    )


@dataclass(frozen=True)
class Size:
    """The transformer and how much of everything."""

    width: int = 160
    layers: int = 4
    heads: int = 5
    batch: int = 512
    """Rows per step of cross-entropy."""
    held_out: int = 4096
    tested: int = 2048
    """Held-out questions that accuracies are measured on."""
    prompts: int = 128
    """Prompts of a gradient whose variance is measured."""
    repeats: int = 24
    """Estimates that a variance is measured with; a quarter of them where they take longer than
    `patience`.
    """
    patience: float = 5.0
    """Seconds."""
    critic_steps: int = 150


SMALL = Size(
    width=32,
    layers=1,
    heads=2,
    batch=32,
    held_out=64,
    tested=32,
    prompts=8,
    repeats=2,
    critic_steps=2,
)
"""Runs on a CPU in seconds."""
CPU = Size(batch=128, tested=512, prompts=32, patience=12.0, critic_steps=60)
"""Trains and measures on one core of a CPU in half an hour."""


def new_policy(task: str, size: Size, device: str) -> Transformer:
    """A transformer with fresh weights."""
    longest = TASKS[task].prompt_tokens + TASKS[task].answer_tokens
    return Transformer(VOCABULARY, longest, size.width, size.layers, size.heads).to(device)


def save_policy(policy: Transformer, path: Path) -> None:
    """Write the weights in half precision, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save({name: x.half().cpu() for name, x in policy.state_dict().items()}, part)
    os.replace(part, path)


def load_policy(task: str, size: Size, path: Path, device: str) -> Transformer:
    """Read what `save_policy` wrote."""
    policy = new_policy(task, size, device)
    policy.load_state_dict(torch.load(path, weights_only=True))
    return policy.float()


def decoding(task: str, max_rows: int) -> Decoding:
    """Sampling at temperature 1."""
    return Decoding(TASKS[task].answer_tokens, EOS, 1.0, max_rows)


def sample(
    policy: Transformer,
    task: str,
    data: Data,
    rows: Tensor,
    generator: torch.Generator,
    max_rows: int = 8192,
) -> tuple[Tensor, Tensor, Tensor]:
    """One completion per question: prompts [N, P], tokens [N, T], rewards [N]."""
    prompts, answers = data.batch(rows, str(generator.device))
    row = torch.arange(prompts.shape[0], device=prompts.device)
    width = TASKS[task].answer_tokens
    done = complete(
        policy, prompts, None, Prefixes.bare(row, width), decoding(task, max_rows), generator
    )
    return prompts, done.tokens, ExactMatch(prompts, answers)(prompts, done.tokens)


def accuracy(policy: Transformer, task: str, data: Data, generator: torch.Generator) -> float:
    """The share of questions that one sampled answer gets right."""
    rows = torch.arange(data.prompts.shape[0])
    return float(sample(policy, task, data, rows, generator)[2].mean())


def cross_entropy(policy: Transformer, prompts: Tensor, answers: Tensor) -> Tensor:
    """[]: the mean over the answers' tokens, their end included."""
    logits, live = policy.logits(prompts, answers), live_tokens(answers, EOS)
    return F.cross_entropy(logits[live], answers[live])


def draw_rows(data: Sized, count: int, generator: torch.Generator) -> Tensor:
    """Random questions [count]."""
    return torch.randint(len(data), (count,), generator=generator, device=generator.device)


def train_critics(
    policy: Transformer, task: str, data: Data, steps: int, rows: int, generator: torch.Generator
) -> Critics:
    """Regress success on samples of the policy as it is."""
    critics = Critics(Critic(policy, actions=False), Critic(policy, actions=True))
    for _ in range(steps):
        prompts, tokens, rewards = sample(
            policy, task, data, draw_rows(data, rows, generator), generator
        )
        live = live_tokens(tokens, EOS)
        critics.state.fit(prompts, tokens, live, rewards)
        critics.action.fit(prompts, tokens, live, rewards)
    return critics
