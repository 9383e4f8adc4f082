"""Cross-entropy on right answers, before the policy gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from arsm.sequences import live_tokens
from arsm.sequences.model import one_pass
from arsm_experiments.sequences.methods import Size, accuracy, cross_entropy, draw_rows
from arsm_experiments.sequences.pretrained import trained_parameters
from arsm_experiments.sequences.tasks import Data
from arsm_experiments.sequences.texts import Texts
from arsm_experiments.sequences.trainer import WARM, as_model, autocast
from arsm_experiments.sequences.transformer import Transformer


def imitate(
    policy: Transformer, task: str, data: Data, size: Size, rate: float = 1e-3
) -> Iterator[float]:
    """Cross-entropy on right answers, without an end; yields the accuracy on held-out questions
    every ten steps.
    """
    device = str(policy.head.weight.device)
    generator = torch.Generator(device).manual_seed(0)
    train, test = data.split(size.held_out)
    test = Data(test.prompts[: size.tested], test.answers[: size.tested])
    optimiser = torch.optim.AdamW(
        policy.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 50))
    while True:
        for _ in range(10):
            loss = cross_entropy(
                policy, *train.batch(draw_rows(train, size.batch, generator), device)
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            warm.step()
        yield accuracy(policy, task, test, torch.Generator(device).manual_seed(1))


def fine_tune(
    policy: nn.Module,
    questions: Texts,
    *,
    rate: float,
    batch: int = 64,
    micro_batch: int = 16,
    precision: torch.dtype | None = None,
    seed: int = 0,
) -> Iterator[float]:
    """AdamW on the cross-entropy of right answers, without an end; yields each step's mean loss per
    token.
    """
    model = as_model(policy)
    parameters = list(trained_parameters(policy).values())
    device = parameters[0].device
    generator = torch.Generator(device).manual_seed(seed)
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM))
    while True:
        rows = draw_rows(questions, batch, generator)
        prompts, mask, _ = questions.ask(rows, device)
        answers = questions.answers(rows, device)
        live = live_tokens(answers, questions.eos)
        optimiser.zero_grad()
        total = torch.zeros((), device=device)
        for some in torch.arange(batch, device=device).split(micro_batch):
            with autocast(device, precision):
                logits = one_pass(
                    model, prompts[some], answers[some], None if mask is None else mask[some]
                )
            wanted = live[some]
            summed = F.cross_entropy(logits[wanted].float(), answers[some][wanted], reduction="sum")
            loss = summed / live.sum()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        warm.step()
        yield float(total)
