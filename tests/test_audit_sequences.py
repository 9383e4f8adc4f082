"""Losses on completions of an autoregressive model, judged on one that can be enumerated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.referee.problems import enumerate_problem
from arsm.referee.sequences import SEQUENCE_PROBLEMS, SequenceLoss, Table

SAMPLES = 1 << 13
"""Draws per prompt."""


def by_hand(
    advantage: Callable[[Tensor], Tensor], samples: int = 4, lengths: bool = False
) -> SequenceLoss:
    """Sequence-level credit as trainers write it: advantages [n, N] times the log-probability of
    the tokens.
    """

    def loss(model, prompts, reward, max_tokens, eos):
        rows = prompts.repeat(samples, 1)
        tokens = rows
        for _ in range(max_tokens):
            token = torch.distributions.Categorical(logits=model(tokens)[:, -1].detach()).sample()
            tokens = torch.cat([tokens, token.unsqueeze(-1)], -1)
        completion = tokens[:, 1:]
        mask = sequences.live_tokens(completion, eos)
        log_p = (
            model(tokens[:, :-1]).log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)
        )
        log_p = (log_p * mask).sum(-1) / (mask.sum(-1) if lengths else 1)
        weight = advantage(reward(rows, completion).view(samples, -1)).flatten()
        return (weight.detach() * log_p).sum() / samples

    return loss


def by_strategy(strategy: sequences.Strategy) -> SequenceLoss:
    def loss(model, prompts, reward, max_tokens, eos):
        out = sequences.estimate(
            strategy,
            sequences.Recompute(model),
            prompts,
            reward,
            max_tokens=max_tokens,
            eos=eos,
            rows=1 << 20,
            micro_batch=1 << 20,
        )
        return out.value.sum()

    return loss


def leave_one_out(rewards: Tensor) -> Tensor:
    n = len(rewards)
    return (rewards - rewards.mean(0)) * n / (n - 1)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(by_hand(leave_one_out), id="by hand"),
        pytest.param(by_strategy(sequences.Group(3)), id="Group", marks=pytest.mark.slow),
        pytest.param(
            by_strategy(sequences.Branch(arsm.RLOO(2))), id="Branch", marks=pytest.mark.slow
        ),
    ],
)
def test_correct_losses_pass(loss: SequenceLoss) -> None:
    found = arsm.audit_sequences(loss, samples=SAMPLES)
    assert found.passed, str(found)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (by_hand(lambda r: r - r.mean(0)), "scale"),
        (by_hand(lambda r: (r - r.mean(0)) / (r.std(0) + 1e-4)), "standard deviation"),
        (by_hand(lambda r: -leave_one_out(r)), "sign"),
        pytest.param(
            by_strategy(sequences.Group(arsm.GRPO(4))), "standard deviation", marks=pytest.mark.slow
        ),
    ],
)
def test_defects_are_named(loss: SequenceLoss, kind: str) -> None:
    found = arsm.audit_sequences(loss, samples=SAMPLES // 4)
    assert found.verdict == "wrong"
    assert found.diagnosis == kind, str(found)


def test_a_division_by_the_length_shows_where_lengths_differ() -> None:
    found = arsm.audit_sequences(by_hand(leave_one_out, lengths=True), samples=SAMPLES // 4)
    assert found.verdict == "wrong"


def test_the_gradient_of_the_table_is_that_of_its_sequences() -> None:
    """By enumeration of the sequences themselves, token by token."""
    for problem in SEQUENCE_PROBLEMS:
        choices = problem.logits.clone().requires_grad_()
        f = problem.function(torch.float64)
        tokens = torch.cartesian_prod(*[torch.arange(2)] * 3)
        for row in range(2):
            whole = torch.cat([torch.full((8, 1), row), tokens], -1)
            log_p = (
                Table(choices)(whole[:, :-1])
                .log_softmax(-1)
                .gather(-1, tokens.unsqueeze(-1))
                .sum((-2, -1))
            )
            (log_p.exp() * f.of_tokens(tokens)).sum().backward()
        torch.testing.assert_close(choices.grad, enumerate_problem(problem).gradient)
