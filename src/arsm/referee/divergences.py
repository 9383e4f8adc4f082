"""Why the divergence in a trainer's loss has another gradient than its own: that of a usual
estimator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from arsm.referee.diagnose import Finding
from arsm.referee.worlds import Objective, Setting, TrainerLoss, World, mean_gradient


def explain_divergence(
    loss: TrainerLoss, objective: Objective, settings: Sequence[Setting], sign: int
) -> Finding:
    """Which gradient the divergence has instead of its own, given that everything else is right."""
    world = World(objective)
    setting = settings[0]
    with_ = mean_gradient(loss, world, setting, sign)
    # without a divergence in two ways: a loss may read its weight, or have one of its own
    free = World(replace(objective, beta=0.0))
    without = mean_gradient(loss, free, replace(setting, own_reference=True), sign)
    # everything else is right, so that the difference is what the divergence alone contributes
    found = (without - with_) / objective.beta
    truth = (
        world.truth(replace(setting, own_reference=True)) - world.truth(setting)
    ) / objective.beta
    # of means in float32, divided by beta as the means were
    rounding = 1e-4 / abs(objective.beta)
    if float(found.abs().max()) < rounding:
        return Finding(
            "divergence",
            "The divergence from the reference has no gradient in the mean: that of k1 in the "
            "loss is 0, and a detached one is a constant. Subtract it from the reward.",
        )
    for words, prediction in _divergences(world, setting, truth):
        # any multiple is recognised: usual losses also differ by factors such as 1/2
        square = float(prediction.square().sum())
        factor = float((found * prediction).sum()) / square if square > 1e-12 else 0.0
        misfit = float((found - factor * prediction).abs().max())
        if factor and misfit < rounding * max(1.0, abs(factor)):
            times = "" if abs(factor - 1) < 1e-3 else f", times {factor:.4g}"
            return Finding(
                "divergence", f"Instead of the divergence's gradient it has {words}{times}."
            )
    return Finding(
        "divergence",
        "The rewards' part is right, and the divergence's is not: its gradient is none of the "
        "known ones.",
    )


def _divergences(world: World, setting: Setting, truth: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gradients that usual estimators have in the mean."""
    table = world.table.clone().requires_grad_()
    prompts = list(setting.prompts)
    with torch.enable_grad():
        log_p = world.answer_log_p(table)[prompts]  # [B, answers, T]
        reference = world.answer_log_p(world.reference)[prompts]
        q = world.answer_log_p(world.sampler)[prompts].sum(-1).exp()
        gradients = [
            (words, torch.autograd.grad((q * value).sum(-1).mean(), table, retain_graph=True)[0])
            for words, value in _terms(log_p, reference)
        ]
    # the simplest explanation: the right gradient with another sign or factor
    yield "its opposite or a multiple of it", truth
    yield from gradients


def _terms(log_p: Tensor, reference: Tensor) -> list[tuple[str, Tensor]]:
    """Usual estimators' terms of every answer [B, answers], from ln p [B, answers, T] under the
    model and under the reference: their gradients, in words, and their surrogates.
    """
    r = log_p - reference
    # padding has the ln p 0, which no token of the setting's prompt has (none is certain)
    live = (log_p != 0).to(log_p.dtype)
    length = live.sum(-1).clamp_min(1)
    # a term in the reward: its value, detached, times the score of the whole answer
    whole = log_p.sum(-1)
    k3 = ((-r).exp() - 1 + r) * live
    return [
        (
            "that of k3 or of another term that autograd alone differentiates, which is the "
            "gradient of the divergence the other way round, KL(reference || model), token by "
            "token. Multiply by the ratio of probabilities, or subtract k1 from the reward",
            k3.sum(-1),
        ),
        (
            "the gradient token by token: what a token does to the divergence of later ones, "
            "through the sampler, is left out. Subtract k1 from the reward, or square the sum "
            "over the answer",
            (r.square() / 2 * live).sum(-1),
        ),
        (
            "that of k3 in the reward without k3's own gradient. Use k1 there",
            k3.sum(-1).detach() * whole,
        ),
        (
            "that of k2 in the reward without its own gradient. Use k1 there",
            (r.square() / 2).sum(-1).detach() * whole,
        ),
        ("that of |k1| in the loss. Subtract k1 from the reward", r.abs().sum(-1)),
        ("that of |k1| in the reward. Use k1 there", r.abs().sum(-1).detach() * whole),
        (
            "that of the divergence divided by the answer's length",
            (r.sum(-1) / length).detach() * whole,
        ),
        (
            "the gradient token by token, divided by the answer's length",
            (r.square() / 2 * live).sum(-1) / length,
        ),
        ("k3's, divided by the answer's length", k3.sum(-1) / length),
        ("k1's in the loss, divided by the answer's length", r.sum(-1) / length),
        ("that of |k1| in the loss, divided by the answer's length", r.abs().sum(-1) / length),
    ]
