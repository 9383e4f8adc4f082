"""Batches as trainers that pad their answers to a fixed length see them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from arsm.referee import TrainerBatch

WIDTH = 5


class PaddedAnswers(NamedTuple):
    """Numbers of the answers' tokens, all float [N, WIDTH]."""

    mask: Tensor
    log_p: Tensor
    """Under the model, with its graph."""
    sampler: Tensor
    """ln p under the sampler."""
    reference: Tensor
    """ln p under the reference."""
    rewards: Tensor
    """At each answer's last token; 0 elsewhere."""


def widened(x: Tensor) -> Tensor:
    """[N, T] padded on the right by 0."""
    return pad(x, (0, WIDTH - x.shape[1]))


def padded_answers(batch: TrainerBatch) -> PaddedAnswers:
    """The batch's answers."""
    mask = widened(batch.mask).float()
    rewards = torch.zeros_like(mask)
    last = batch.mask.sum(-1, keepdim=True) - 1
    rewards.scatter_(1, last, batch.rewards.unsqueeze(-1))
    sampler = widened(batch.sampler_log_p)
    reference = widened(batch.reference_log_p)
    return PaddedAnswers(mask, widened(batch.log_p()), sampler, reference, rewards)
