"""Measure the noise of a trainer's gradient for its tokens: which trainer to take, before any
training.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from arsm.trl.trainer import BranchTrainer


class Noise(NamedTuple):
    """The noise of one gradient in all parameters, and its cost."""

    variance: float
    """Trace of the covariance."""
    tokens: float
    """Generated tokens, those of branches included."""

    @property
    def per_token(self) -> float:
        """Variance x tokens: the tokens that a variance of 1 costs. The smaller the better."""
        return self.variance * self.tokens


def gradient_noise(trainer: GRPOTrainer, repeats: int = 16) -> Noise:
    """Measure the gradient's variance on the first generation batch of the dataset,
    again and again.

    Nothing is trained. Compare trainers with the same model, data and `loss_type`, both
    with `scale_rewards="none"`, in one process. A GRPOTrainer subtracts a mean that
    holds the completion's own reward, which shrinks its gradient by (n - 1)/n; this is
    undone here.

    Args:
        trainer: a `GRPOTrainer` or a `BranchTrainer`.
        repeats: gradients, at least 2; the relative error of the variance is about (2 /
            repeats)^(1/2) or less.
    """
    if repeats < 2:
        raise ValueError(f"A variance needs at least 2 repeats, but repeats = {repeats}.")
    if trainer.accelerator.num_processes > 1:
        raise ValueError(
            "gradient_noise measures in one process; start it without torchrun or accelerate "
            "launch."
        )
    own: Any = trainer
    model = own.model
    group = own.num_generations
    # one generation batch, each prompt once per completion, as TRL's sampler repeats it
    count = own.args.per_device_train_batch_size * own.args.steps_per_generation
    rows = [own.train_dataset[i // group] for i in range(count)]
    scale = 1.0 if isinstance(trainer, BranchTrainer) else group / (group - 1)
    model.train()
    # TRL divides its loss by this, which its training loop sets
    own.current_gradient_accumulation_steps = own.args.steps_per_generation
    total: Tensor | None = None
    squares = 0.0
    tokens = 0.0
    for _ in range(repeats):
        batch = own._generate_and_score_completions(rows)
        tokens += float(batch["completion_mask"].sum())
        tokens += sum(own._metrics["train"].get("credit/tokens", []))
        own._metrics["train"].clear()  # else the next repeat would count these tokens again
        model.zero_grad()
        own.compute_loss(model, batch).backward()
        gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
        gradient = scale * torch.cat(gradients)
        squares += float(gradient.square().sum())
        total = gradient if total is None else total + gradient
    model.zero_grad()
    assert total is not None
    # two sums instead of all gradients: a model's gradient is large
    variance = (squares - float(total.square().sum()) / repeats) / (repeats - 1)
    return Noise(variance, tokens / repeats)
