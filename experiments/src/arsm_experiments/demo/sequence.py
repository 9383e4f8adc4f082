"""The demo's sequence task: sort digits, told only right or wrong; one answer with its credit."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from markupsafe import Markup
from torch import Tensor

import arsm
from arsm import sequences
from arsm_experiments.demo.part import Part, Tick
from arsm_experiments.demo.pictures import Answer, answers
from arsm_experiments.report.figures import COLOURS, Figure, Panel, Series
from arsm_experiments.sequences.transformer import Transformer

DIGITS = 6
SORT, END = 10, 11
"""Tokens 0 to 9 are digits; SORT ends a question, END an answer."""


def questions(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts and their answers, both [N, DIGITS + 1]."""
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    return F.pad(digits, (0, 1), value=SORT), F.pad(digits.sort(-1).values, (0, 1), value=END)


def right(prompts: Tensor, tokens: Tensor) -> Tensor:
    """1 for the sorted digits and the end, else 0: [R]."""
    return (tokens == F.pad(prompts[:, :-1].sort(-1).values, (0, 1), value=END)).all(-1).float()


def accuracy(model: Transformer) -> float:
    """Fraction of right answers among 500 samples."""
    generator = torch.Generator().manual_seed(1)
    prompts, _ = questions(500, generator)
    with torch.no_grad():
        strategy = sequences.Branch(arsm.Reinforce())
        out = sequences.estimate(
            strategy, model, prompts, right, max_tokens=DIGITS + 1, eos=END, generator=generator
        )
    return float(out.rewards.mean())


def sequence_task(scale: float, tick: Tick) -> Part:
    """Sort digits: imitate until some answers are right, then learn only from right or wrong."""
    imitation, tokens = max(5, int(100 * scale)), max(2000, int(90_000 * scale))
    torch.manual_seed(0)
    start = Transformer(12, 2 * DIGITS + 2, width=48, layers=2, heads=4)
    optimiser, generator = (
        torch.optim.Adam(start.parameters(), 2e-3),
        torch.Generator().manual_seed(0),
    )
    for step in range(imitation):
        prompts, answers = questions(64, generator)
        loss = F.cross_entropy(start.logits(prompts, answers).flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        tick(0.2 * step / imitation)
    first = accuracy(start)
    picture, caption = one_answer(start)
    strategies = {
        "credit per token (branching)": (sequences.Branch(arsm.RLOO(8), budget=360), 72),
        "credit per answer (leave-one-out)": (sequences.Group(8), 24),
    }
    curves, ends = [], {}
    for place, (name, (strategy, batch)) in enumerate(strategies.items()):
        model = copy.deepcopy(start)
        spent, reached = _reward(
            model, strategy, batch, tokens, lambda x, p=place: tick(0.2 + 0.4 * (p + x))
        )
        curves.append(Series(name, COLOURS[place], [0, *spent], [first, *reached]))
        ends[name] = reached[-1]
    (branching, token), (group, answer) = ends.items()
    panel = Panel("share of right answers", {"generated token": curves})
    return Part(
        "One sequence task",
        f"A transformer sorts {DIGITS} digits and is only told right or wrong. From {first:.0%} "
        f"and with {tokens:,} generated tokens each, {branching} reaches {token:.0%}, {group} "
        f"{answer:.0%}.",
        "credit = sequences.Branch(arsm.RLOO(8), budget=360)\n"
        "out = sequences.estimate(credit, model, prompts, reward, max_tokens=7, eos=END)\n"
        "(-out.value.mean()).backward()",
        [Figure("Learning", "Both at the same learning rate; one seed.", [panel], {})],
        [(picture, caption)],
    )


def one_answer(model: sequences.Model) -> tuple[Markup, str]:
    """A wrong answer of this model, a branch that makes it right, and the credit of its tokens."""
    generator = torch.Generator().manual_seed(2)
    prompts, _ = questions(256, generator)
    out = sequences.estimate(
        sequences.Branch(arsm.RLOO(8)),
        model,
        prompts,
        right,
        max_tokens=DIGITS + 1,
        eos=END,
        generator=generator,
    )
    assert out.credit is not None
    assert out.branches is not None
    branches = out.branches
    # the credit of a token that was drawn several times is the sum of its draws'
    own = (out.credit.weights * (out.credit.tokens == out.tokens.unsqueeze(-1))).sum(-1)
    mends = (branches.rewards == 1) & (out.rewards[branches.row] == 0)
    # the plainest example: the most blame on the token that the branch replaces
    blame = torch.where(mends, own[branches.row, branches.step], torch.inf)
    chosen = int(blame.argmin())
    row, step = int(branches.row[chosen]), int(branches.step[chosen])
    drawn = out.credit.tokens[row, step] == branches.action[chosen]
    gained = float((out.credit.weights[row, step] * drawn).sum())
    rows = [
        Answer("the digits to sort", _words(prompts[row, :-1])),
        Answer(
            "the answer that was sampled, with the credit of each token:",
            _words(out.tokens[row]),
            _verdict(out.rewards[row]),
            own[row].tolist(),
        ),
        Answer(
            "one token replaced by one that was nearly chosen, then played on:",
            _words(branches.tokens[chosen]),
            _verdict(branches.rewards[chosen]),
            [gained if place == step else None for place in range(DIGITS + 1)],
            step,
        ),
    ]
    caption = (
        "Going back and trying what was nearly chosen: only the tokens at which the outcome "
        "changes get credit. Credit per answer would give all tokens of the wrong answer the same."
    )
    return answers(rows), caption


def _words(tokens: Tensor) -> list[str]:
    """Digits as they are; the end as a stop."""
    return [
        "■" if token == END else "=" if token == SORT else str(token) for token in tokens.tolist()
    ]


def _verdict(reward: Tensor) -> str:
    return "right" if reward else "wrong"


def _reward(
    model: Transformer, strategy: sequences.Strategy, batch: int, tokens: int, tick: Tick
) -> tuple[list[float], list[float]]:
    """Train by policy gradients for this many tokens. Returns tokens used and accuracy during
    training.
    """
    generator, optimiser = (
        torch.Generator().manual_seed(0),
        torch.optim.Adam(model.parameters(), 5e-4),
    )
    spent, shown = 0, []
    while spent < tokens:
        prompts, _ = questions(batch, generator)
        out = sequences.estimate(
            strategy, model, prompts, right, max_tokens=DIGITS + 1, eos=END, generator=generator
        )
        optimiser.zero_grad()
        (-out.value.mean()).backward()
        optimiser.step()
        spent += int(out.info["generated"])
        if not shown or spent >= min(tokens, shown[-1][0] + tokens / 9):
            shown.append((float(spent), accuracy(model)))
        tick(min(1.0, spent / tokens))
    return [x for x, _ in shown], [y for _, y in shown]
