"""Strategies and methods in words, as the command line and the records have them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

import arsm
from arsm.sequences import Branch, Group, Strategy, by_likelihood
from arsm_experiments.sequences.likeliest import Likeliest
from arsm_experiments.sequences.methods import no_baseline
from arsm_experiments.sequences.rivals import BestOf, Critic, Unsure, ValueHead, ValueModel
from arsm_experiments.sequences.transformer import Transformer

GROUPS = {"group": "rloo", "token-baseline": "otb", "dr-grpo": "dr-grpo", "grpo": "grpo"}
"""The estimator of each kind of group."""
TRACE = 0.95
"""PPO's lambda."""


@dataclass(frozen=True, eq=False)
class Method:
    """How a batch becomes steps."""

    strategy: Strategy | Likeliest
    epochs: int = 1
    """Steps per batch; after the first, with PPO's clipped ratios."""
    critic: ValueModel | Critic | None = None
    """Learns along."""
    critic_rows: int | None = None
    """Most sequences that the critic takes one step on; None for all of an update."""


def named_method(
    words: str,
    policy: nn.Module | None = None,
    *,
    micro_batch: int = 16,
    precision: torch.dtype | None = None,
) -> Method:
    """A strategy in words, such as "group:8" or "4*grpo:8", which takes 4 steps per batch; "ppo"
    has a value head that starts from the policy.
    """
    matched = re.fullmatch(r"(?:([1-9]\d?)\*)?(.*)", words)
    assert matched is not None
    epochs, rest = int(matched[1] or 1), matched[2]
    if rest != "ppo":
        return Method(named_strategy(rest), epochs)
    if policy is None:
        return Method(ValueHead(no_baseline, TRACE), epochs)
    if isinstance(policy, Transformer):
        critic = Critic(policy, actions=False)
    else:
        critic = ValueModel(policy, micro_batch=micro_batch, precision=precision)
    return Method(ValueHead(critic, TRACE), epochs, critic)


def named_strategy(words: str) -> Strategy:
    """ "branch:ESTIMATOR", "chance:ESTIMATOR", "coin:SHARE:N:ESTIMATOR" or "unsure:FEW:MANY"; or
    "group:N", "grpo:N", "dr-grpo:N", "token-baseline:N", "raft:N".
    """
    kind, _, rest = words.partition(":")
    if kind == "branch":
        return Branch(arsm.estimator(rest)) if rest else Branch()
    if kind == "chance":
        return Branch(arsm.estimator(rest or "local-expectation"), chance=by_likelihood())
    if kind == "coin":
        matched = re.fullmatch(r"(0?\.\d+|1):(\d+):(.+)", rest)
        if matched is None:
            raise ValueError(f'"{words}" must be like coin:0.25:4:rloo:samples=8.')
        share, group, estimator = matched.groups()
        return Branch(arsm.estimator(estimator), group=int(group), coin=float(share))
    if kind == "unsure":
        matched = re.fullmatch(r"(\d+):(\d+)", rest or "4:32")
        if matched is None or not 2 <= int(matched[1]) <= int(matched[2]):
            raise ValueError(f'"{words}" must be like unsure:4:32.')
        return Unsure(int(matched[1]), int(matched[2]))
    if kind not in (*GROUPS, "raft"):
        raise ValueError(
            f'There is no strategy "{words}"; there are branch:ESTIMATOR, chance:ESTIMATOR, '
            f"{':N, '.join([*GROUPS, 'raft'])}:N, coin:SHARE:N:ESTIMATOR, unsure:FEW:MANY and ppo."
        )
    if not (rest or "8").isdigit() or int(rest or 8) < 2:
        raise ValueError(
            f'"{words}" must name a number of answers per prompt, at least 2, as {kind}:8 does.'
        )
    if kind == "raft":
        return BestOf(int(rest or 8))
    return Group(arsm.estimator(f"{GROUPS[kind]}:samples={rest or 8}"))


def most_tokens(strategy: Strategy | Likeliest, width: int, vocabulary: int) -> float:
    """About the most tokens that a prompt can cost, with answers of `width` tokens."""
    if isinstance(strategy, Likeliest):
        looked_at = width * (1 + strategy.tries)
        return looked_at + most_tokens(strategy.rest, width, vocabulary)
    if isinstance(strategy, Branch):
        rollouts = strategy.estimator.most_queries(torch.zeros(1, 1, vocabulary)) - 1
    else:
        rollouts = strategy.draws - 1
    return width * (strategy.samples or 1) * (1 + rollouts * width / 2)
