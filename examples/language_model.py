"""A small language model learns to sort digits from right or wrong answers, with credit for every
token.

The model is any causal model of transformers; this one is tiny and random. It first imitates
answers until some of its own are right. Then its reward is 1 for a right answer and 0 for a wrong
one. `Group(8)` samples eight answers per prompt and gives every token of an answer the same credit,
as RLOO and GRPO do. `Branch(RLOO(4))` samples one answer, tries other tokens in its place at random
steps, and gives each token its own. Both spend the same number of tokens.

Expect 0.74 of the answers to be right with credit for whole answers and 0.79 with credit for every
token, from 0.58. These are numbers of one machine: on another, rounding differs, and so does the
start.

    pip install '.[transformers]'
    python examples/language_model.py
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import arsm
from arsm import sequences

DIGITS = 6
SORT, END = 10, 11
"""Tokens 0 to 9 are digits; SORT ends a question, END an answer."""


def questions(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts [N, DIGITS + 1] and answers [N, DIGITS + 1]."""
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    ask, end = torch.full((count, 1), SORT), torch.full((count, 1), END)
    return torch.cat([digits, ask], -1), torch.cat([digits.sort(-1).values, end], -1)


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    """1 for the sorted digits and the end, else 0."""
    right = torch.nn.functional.pad(prompts[:, :-1].sort(-1).values, (0, 1), value=END)
    return (tokens == right).all(-1).float()


def imitate(model: GPT2LMHeadModel, steps: int, generator: torch.Generator) -> None:
    """Cross-entropy on right answers."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    wrapped = sequences.Transformers(model)
    for _ in range(steps):
        prompts, answers = questions(64, generator)
        loss = torch.nn.functional.cross_entropy(
            wrapped.logits(prompts, answers).flatten(0, 1), answers.flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def accuracy(model: sequences.Model) -> float:
    """Fraction of right answers among 500 samples."""
    generator = torch.Generator().manual_seed(1)
    prompts, _ = questions(500, generator)
    with torch.no_grad():
        out = sequences.estimate(
            sequences.Branch(arsm.Reinforce()),
            model,
            prompts,
            reward,
            max_tokens=DIGITS + 1,
            eos=END,
            generator=generator,
        )
    return out.rewards.mean().item()


def train(
    model: GPT2LMHeadModel, strategy: sequences.Strategy, prompts_per_update: int, tokens: int
) -> float:
    """Train by policy gradients for this many generated tokens; returns the accuracy."""
    wrapped = sequences.Transformers(model)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-4)
    spent = 0
    while spent < tokens:
        prompts, _ = questions(prompts_per_update, generator)
        out = sequences.estimate(
            strategy, wrapped, prompts, reward, max_tokens=DIGITS + 1, eos=END, generator=generator
        )
        optimiser.zero_grad()
        (-out.value.mean()).backward()
        optimiser.step()
        spent += int(out.info["generated"])
        print(
            f"\r{spent:7} tokens, right {out.rewards.mean():.2f}",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)
    return accuracy(wrapped)


def main(imitation: int = 200, tokens: int = 120_000) -> dict[str, float]:
    """Returns the accuracy before training, and after training with each strategy."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=12,
        n_positions=2 * DIGITS + 2,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=END,
    )
    start = GPT2LMHeadModel(config).eval()
    imitate(start, imitation, torch.Generator().manual_seed(0))
    reached = {"start": accuracy(sequences.Transformers(start))}
    strategies = {
        "whole answers": (sequences.Group(8), 24),
        "every token": (sequences.Branch(arsm.RLOO(4), budget=240), 96),
    }
    for name, (strategy, prompts) in strategies.items():
        begun = time.time()
        reached[name] = train(copy.deepcopy(start), strategy, prompts, tokens)
        print(
            f"{name}: {reached['start']:.2f} -> {reached[name]:.2f} right, "
            f"{time.time() - begun:.0f} s"
        )
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--imitation", type=int, default=200, help="steps of imitation at first")
    parser.add_argument("--tokens", type=int, default=120_000, help="generated tokens of each")
    main(**vars(parser.parse_args()))
