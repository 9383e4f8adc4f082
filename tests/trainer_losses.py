"""Losses of trainers of language models: correct ones, and defects planted in them.

All are to be maximised and are means over the rows of a batch. Every loss comes with the objective
whose gradient it claims; a defect also comes with the cause that a referee may name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from arsm.referee.worlds import Objective, TrainerBatch

Loss = Callable[[TrainerBatch], Tensor]
PLAIN = Objective()
DIVERGENCE = Objective(beta=0.3)
STALE = Objective(stale=True)
COOL = Objective(temperature=0.7)


class Correct(NamedTuple):
    loss: Loss
    objective: Objective = PLAIN


class Defect(NamedTuple):
    loss: Loss
    cause: str
    """The kind of finding that names it."""
    objective: Objective = PLAIN


# ---------------------------------------------------------------- parts


def others_mean(batch: TrainerBatch, values: Tensor | None = None) -> Tensor:
    """[N]: the mean over the other answers to the same prompt."""
    rewards = (batch.rewards if values is None else values).view(-1, batch.answers)
    return ((rewards.sum(1, keepdim=True) - rewards) / (batch.answers - 1)).flatten()


def leave_one_out(batch: TrainerBatch, values: Tensor | None = None) -> Tensor:
    values = batch.rewards if values is None else values
    return values - others_mean(batch, values)


def own_mean(batch: TrainerBatch) -> Tensor:
    rewards = batch.rewards.view(-1, batch.answers)
    return (rewards - rewards.mean(1, keepdim=True)).flatten()


def summed(values: Tensor, batch: TrainerBatch) -> Tensor:
    """[N, T] -> [N]: over the tokens of an answer."""
    return (values * batch.mask).sum(-1)


def score(weight: Callable[[TrainerBatch], Tensor]) -> Loss:
    """Weights [N] times the log-probability of the answers."""
    return lambda batch: (weight(batch).detach() * summed(batch.log_p(), batch)).mean()


def by_mask(mask: Callable[[TrainerBatch], Tensor], temperature: float | None = None) -> Loss:
    """Leave-one-out with weights [N, T] on the tokens."""
    return lambda batch: (
        (leave_one_out(batch).unsqueeze(-1) * batch.log_p(temperature) * mask(batch)).sum(-1).mean()
    )


def log_ratio(batch: TrainerBatch) -> Tensor:
    """[N, T]: ln p under the model less that under the reference."""
    return batch.log_p() - batch.reference_log_p


def k1(batch: TrainerBatch) -> Tensor:
    return summed(log_ratio(batch), batch)


def k2(batch: TrainerBatch) -> Tensor:
    return summed(log_ratio(batch).square() / 2, batch)


def k3(batch: TrainerBatch) -> Tensor:
    r = log_ratio(batch)
    return summed((-r).exp() - 1 + r, batch)


def one(log_p: Tensor) -> Tensor:
    """1, with the gradient of ln p."""
    return (log_p - log_p.detach()).exp()


def with_divergence(kl: Loss) -> Loss:
    """Leave-one-out of the rewards, and a divergence that autograd differentiates."""
    return lambda batch: score(leave_one_out)(batch) - batch.beta * kl(batch).mean()


def in_reward(kl: Loss, sign: float = 1.0) -> Loss:
    """The divergence subtracted from the reward, without a gradient of its own."""
    return score(
        lambda batch: leave_one_out(batch, batch.rewards - sign * batch.beta * kl(batch).detach())
    )


def ppo(
    low: float = 0.8, high: float = 1.2, advantage: Callable[[TrainerBatch], Tensor] = leave_one_out
) -> Loss:
    """Clipped ratios of tokens."""

    def loss(batch: TrainerBatch) -> Tensor:
        a = advantage(batch).unsqueeze(-1)
        ratio = (batch.log_p() - batch.sampler_log_p).exp()
        return summed(torch.minimum(ratio * a, ratio.clamp(low, high) * a), batch).mean()

    return loss


def sequence_ratio(batch: TrainerBatch) -> Tensor:
    """[N]: the probability of an answer under the model, relative to the sampler's."""
    return summed(batch.log_p() - batch.sampler_log_p, batch).exp()


def rows(batch: TrainerBatch, chosen: Tensor) -> Tensor:
    """[rows]: ln p of some rows' answers, padding trimmed, in a forward pass of their own."""
    width = int(batch.mask[chosen].sum(-1).max())
    completions, mask = batch.completions[chosen, :width], batch.mask[chosen, :width]
    tokens = torch.cat([batch.prompts[chosen], completions], 1)
    logits = batch.model(tokens, torch.cat([batch.prompt_mask[chosen], mask], 1))[
        :, batch.prompts.shape[1] - 1 : -1
    ]
    log_p = logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
    return (log_p * mask).sum(-1)


# ---------------------------------------------------------------- correct losses


def micro_batches(batch: TrainerBatch) -> Tensor:
    weight = leave_one_out(batch)
    total = torch.zeros(())
    for chosen in torch.arange(len(weight)).split(2):
        total = total + (weight[chosen] * rows(batch, chosen)).sum() / len(weight)
    return total


def sorted_by_length(batch: TrainerBatch) -> Tensor:
    weight = leave_one_out(batch)
    order = batch.mask.sum(-1).argsort()
    found = [weight[chosen] * rows(batch, chosen) for chosen in order.split(1)]
    return torch.cat(found).mean()


def reward_to_go(batch: TrainerBatch) -> Tensor:
    """Each token is credited with what comes after it."""
    penalty = batch.beta * log_ratio(batch).detach() * batch.mask
    to_go = batch.rewards.unsqueeze(-1) - penalty.flip(-1).cumsum(-1).flip(-1)
    return summed(to_go * batch.log_p(), batch).mean()


def token_baseline(batch: TrainerBatch) -> Tensor:
    """The optimal token baseline of the other answers."""
    p = batch.logits().detach().log_softmax(-1)
    energy = (1 - 2 * batch.log_p().exp() + p.exp().square().sum(-1)).detach() * batch.mask
    w = energy.cumsum(-1).view(-1, batch.answers, batch.mask.shape[1]) + 1e-3
    weighted = w * batch.rewards.view(-1, batch.answers, 1)
    baseline = (weighted.sum(1, keepdim=True) - weighted) / (w.sum(1, keepdim=True) - w)
    return summed(
        (batch.rewards.unsqueeze(-1) - baseline.flatten(0, 1)) * batch.log_p(), batch
    ).mean()


def best_of_others(batch: TrainerBatch) -> Tensor:
    rewards = batch.rewards.view(-1, batch.answers)
    own = torch.eye(batch.answers, dtype=torch.bool)
    others = rewards.unsqueeze(1).masked_fill(own, -torch.inf).amax(-1)
    return (rewards - others).flatten()


def batch_leave_one_out(batch: TrainerBatch) -> Tensor:
    r = batch.rewards
    return r - (r.sum() - r) / (len(r) - 1)


def likely_others(batch: TrainerBatch) -> Tensor:
    """[N]: the other answers' mean, weighted by their probability, with its graph."""
    p = summed(batch.log_p(), batch).exp().view(-1, batch.answers)
    rewards = batch.rewards.view(-1, batch.answers)
    weighted = p * rewards
    return ((weighted.sum(1, keepdim=True) - weighted) / (p.sum(1, keepdim=True) - p)).flatten()


def own_mask(batch: TrainerBatch) -> Tensor:
    """Found from the end token alone, cut at the width of the batch's mask."""
    before = (batch.completions == batch.end).long().cumsum(-1) - (
        batch.completions == batch.end
    ).long()
    real = torch.arange(batch.mask.shape[1]) < batch.max_tokens
    return ((before == 0) & real).to(batch.rewards.dtype)


def luspo(batch: TrainerBatch) -> Tensor:
    """The ratio of sequences with its length's root, times the length."""
    length = batch.mask.sum(-1)
    ratio = (summed(batch.log_p() - batch.sampler_log_p, batch) / length).exp()
    return (ratio * leave_one_out(batch) * length).mean()


def cispo(batch: TrainerBatch) -> Tensor:
    log_p = batch.log_p()
    ratio = (log_p - batch.sampler_log_p).exp().clamp_max(5.0).detach()
    return summed(ratio * leave_one_out(batch).unsqueeze(-1) * log_p, batch).mean()


def dual_clip(batch: TrainerBatch) -> Tensor:
    a = leave_one_out(batch).unsqueeze(-1)
    ratio = (batch.log_p() - batch.sampler_log_p).exp()
    clipped = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return summed(torch.where(a < 0, torch.maximum(clipped, 3.0 * a), clipped), batch).mean()


def truncated_weights(batch: TrainerBatch) -> Tensor:
    log_p = batch.log_p()
    weight = (log_p.detach() - batch.sampler_log_p).exp().clamp_max(2.0)
    return summed(weight * one(log_p) * leave_one_out(batch).unsqueeze(-1), batch).mean()


def by_prompt(batch: TrainerBatch) -> Tensor:
    """A baseline for each prompt, as a critic that has learned nothing else would give."""
    return batch.rewards - torch.where(batch.prompt_mask.sum(-1) > 1, 0.4, -0.1)


CORRECT: dict[str, Correct] = {
    "rewards as they are": Correct(score(lambda b: b.rewards)),
    "leave-one-out": Correct(score(leave_one_out)),
    "own mean times n/(n - 1)": Correct(score(lambda b: own_mean(b) * b.answers / (b.answers - 1))),
    "a fixed baseline": Correct(score(lambda b: b.rewards - 0.2)),
    "a baseline for each prompt": Correct(score(by_prompt)),
    "the best of the others": Correct(score(best_of_others)),
    "all other rows of the batch": Correct(score(batch_leave_one_out)),
    "likely others, detached": Correct(score(lambda b: b.rewards - likely_others(b))),
    "optimal token baseline of the others": Correct(token_baseline),
    "ratio to itself": Correct(
        lambda b: summed(one(b.log_p()) * leave_one_out(b).unsqueeze(-1), b).mean()  #
    ),
    "clipped ratios at the first step": Correct(ppo()),
    "clipped ratios, rewards as they are": Correct(ppo(advantage=lambda b: b.rewards)),
    "clipped one-sidedly": Correct(ppo(0.0, 1.28)),
    "ratio of sequences at the first step": Correct(
        lambda b: (sequence_ratio(b) * leave_one_out(b)).mean()
    ),
    "ratio of sequences by length, times length": Correct(luspo),
    "weights clipped and detached": Correct(cispo),
    "dual clipping": Correct(dual_clip),
    "truncated importance weights at the first step": Correct(truncated_weights),
    "micro-batches": Correct(micro_batches),
    "rows sorted by length": Correct(sorted_by_length),
    "a mask from the end token": Correct(by_mask(own_mask)),
    "masked_fill": Correct(
        lambda b: (leave_one_out(b) * b.log_p().masked_fill(b.mask == 0, 0.0).sum(-1)).mean(),
    ),
    "float64": Correct(
        lambda b: (leave_one_out(b).double() * (b.log_p().double() * b.mask).sum(-1)).mean(),
    ),
    "a sum over rows and a division": Correct(
        lambda b: (leave_one_out(b) * summed(b.log_p(), b)).sum() / len(b.rewards),
    ),
    "k1 in the reward": Correct(in_reward(k1), DIVERGENCE),
    "k1 in the reward, without a baseline": Correct(
        score(lambda b: b.rewards - b.beta * k1(b)),
        DIVERGENCE,
    ),
    "k1 in the reward, reward to go": Correct(reward_to_go, DIVERGENCE),
    "k2 of whole answers in the loss": Correct(
        with_divergence(lambda b: k1(b).square() / 2), DIVERGENCE
    ),
    "k3 in the reward and in the loss": Correct(
        with_divergence(lambda b: one(summed(b.log_p(), b)) * k3(b)),
        DIVERGENCE,
    ),
    "k2 in the reward and in the loss, stale": Correct(
        lambda b: (sequence_ratio(b) * (leave_one_out(b) - b.beta * k1(b))).mean(),
        Objective(beta=0.3, stale=True),
    ),
    "importance weights of whole answers": Correct(
        lambda b: (sequence_ratio(b) * b.rewards).mean(),
        STALE,
    ),
    "importance weights and leave-one-out": Correct(
        lambda b: (sequence_ratio(b) * leave_one_out(b)).mean(),
        STALE,
    ),
    "importance weights, detached": Correct(
        score(lambda b: sequence_ratio(b) * leave_one_out(b)),
        STALE,
    ),
    "temperature 0.7": Correct(score(leave_one_out), COOL),
    "temperature 1.5 and k1 in the reward": Correct(
        in_reward(k1), Objective(beta=0.2, temperature=1.5)
    ),
}


# ---------------------------------------------------------------- defects


def off_by_one(batch: TrainerBatch) -> Tensor:
    """The mask of the inputs in place of that of the labels."""
    return torch.nn.functional.pad(batch.mask, (1, 0))[:, :-1]


def last_group_for_all(batch: TrainerBatch) -> Tensor:
    """A loop over micro-batches that keeps the last one's advantages."""
    total = torch.zeros(())
    advantage = leave_one_out(batch)
    for chosen in torch.arange(len(batch.rewards)).split(batch.answers):
        last = advantage[-batch.answers :]
        total = total + (last * summed(batch.log_p(), batch)[chosen]).sum() / len(batch.rewards)
    return total


def accumulated_twice(batch: TrainerBatch) -> Tensor:
    """Means of micro-batches, divided by their number by the loss and by the loop around it."""
    weight = leave_one_out(batch)
    parts = torch.arange(len(weight)).split(1)
    found = [(weight[chosen] * rows(batch, chosen)).mean() / 2 for chosen in parts]
    return torch.stack(found).mean()


def prompt_in_sum(batch: TrainerBatch) -> Tensor:
    """ln p of the prompt's tokens, too."""
    tokens = torch.cat([batch.prompts, batch.completions], 1)
    mask = torch.cat([batch.prompt_mask, batch.mask], 1)
    log_p = (
        batch.model(tokens, mask)[:, :-1]
        .log_softmax(-1)
        .gather(-1, tokens[:, 1:].unsqueeze(-1))
        .squeeze(-1)
    )
    # the first token of a prompt has no context, so it has no probability
    live = mask[:, 1:] * mask[:, :-1]
    return (batch.rewards * (log_p * live).sum(-1)).mean()


def batch_deviation(batch: TrainerBatch) -> Tensor:
    return (batch.rewards - batch.rewards.mean()) / (batch.rewards.std() + 1e-4)


def group_deviation(batch: TrainerBatch) -> Tensor:
    deviation = (
        batch.rewards.view(-1, batch.answers)
        .std(1, keepdim=True)
        .expand(-1, batch.answers)
        .flatten()
    )
    return own_mean(batch) / (deviation + 1e-4)


def tokens_of_group(batch: TrainerBatch) -> Tensor:
    """[N, 1]: the number of tokens in all answers to a row's prompt."""
    tokens = batch.mask.sum(-1).view(-1, batch.answers).sum(1)
    return tokens.repeat_interleave(batch.answers).unsqueeze(-1)


def over_group_mean(batch: TrainerBatch) -> Tensor:
    """The advantage divided by the group's mean reward instead of its standard deviation."""
    mean = batch.rewards.view(-1, batch.answers).mean(1).repeat_interleave(batch.answers)
    return own_mean(batch) / (mean + 1e-6)


def cut_off(batch: TrainerBatch) -> Tensor:
    """The mask without answers that have no end token."""
    ended = ((batch.completions == batch.end) * batch.mask).any(-1, keepdim=True)
    return batch.mask * ended


def best_of_all(batch: TrainerBatch) -> Tensor:
    rewards = batch.rewards.view(-1, batch.answers)
    return (rewards - rewards.amax(1, keepdim=True)).flatten()


def own_median(batch: TrainerBatch) -> Tensor:
    rewards = batch.rewards.view(-1, batch.answers)
    return (rewards - rewards.median(1, keepdim=True).values).flatten()


def ranks(batch: TrainerBatch) -> Tensor:
    """Each answer's rank among the answers to its prompt, less the mean rank."""
    rewards = batch.rewards.view(-1, batch.answers)
    return (rewards.argsort(1).argsort(1) - (batch.answers - 1) / 2).flatten()


def entropies(batch: TrainerBatch) -> Tensor:
    """[N, T]: the entropy of every token's distribution."""
    log_p = batch.logits().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def old_at(temperature: float, low: float = 0.0, high: float = 1e9) -> Loss:
    """Clipped ratios of tokens whose ln p before the update has another temperature."""

    def loss(batch: TrainerBatch) -> Tensor:
        a = leave_one_out(batch).unsqueeze(-1)
        ratio = (batch.log_p() - batch.log_p(temperature).detach()).exp()
        return summed(torch.minimum(ratio * a, ratio.clamp(low, high) * a), batch).mean()

    return loss


def new_at_one(batch: TrainerBatch) -> Tensor:
    """Ratios of tokens whose ln p after the update leaves the temperature out."""
    ratio = (batch.log_p(1.0) - batch.sampler_log_p).exp()
    return summed(ratio * leave_one_out(batch).unsqueeze(-1), batch).mean()


DEFECTS: dict[str, Defect] = {
    "k3 in the loss without importance weights": Defect(
        with_divergence(k3), "divergence", DIVERGENCE
    ),
    "the divergence's gradient through the sampler left out": Defect(
        with_divergence(k2), "divergence", DIVERGENCE
    ),
    "k1 in the loss": Defect(with_divergence(k1), "divergence", DIVERGENCE),
    "k3 in the reward without its own gradient": Defect(in_reward(k3), "divergence", DIVERGENCE),
    "a bonus for divergence": Defect(in_reward(k1, -1.0), "divergence", DIVERGENCE),
    "the divergence divided by the length": Defect(
        in_reward(lambda b: k1(b) / b.mask.sum(-1)),
        "divergence",
        DIVERGENCE,
    ),
    "division by the padded length": Defect(by_mask(lambda b: b.mask / b.mask.shape[1]), "padding"),
    "division by the own length": Defect(
        by_mask(lambda b: b.mask / b.mask.sum(-1, keepdim=True)), "length"
    ),
    "division by the tokens of the batch": Defect(
        by_mask(lambda b: b.mask * len(b.mask) / b.mask.sum()), "length"
    ),
    "division by the tokens of the group": Defect(
        by_mask(lambda b: b.mask * b.answers / tokens_of_group(b)), "length"
    ),
    "k1 in the loss, divided by the length": Defect(
        with_divergence(lambda b: k1(b) / b.mask.sum(-1)), "divergence", DIVERGENCE
    ),
    "group mean over prompts": Defect(
        score(lambda b: (b.rewards - b.rewards.mean()) * b.answers / (b.answers - 1)),
        "prompts mixed",
    ),
    "normalisation over the batch": Defect(score(batch_deviation), "standard deviation"),
    "normalisation over the group": Defect(score(group_deviation), "standard deviation"),
    "division by the group's mean": Defect(score(over_group_mean), "mean"),
    "ranks in place of rewards": Defect(score(ranks), "ranks"),
    "rewards cut off at a limit": Defect(
        score(lambda b: leave_one_out(b, b.rewards.clamp(-0.3, 0.3))), "limits"
    ),
    "advantages cut off at a limit": Defect(
        score(lambda b: leave_one_out(b).clamp(-0.5, 0.5)), "limits"
    ),
    "a bonus for entropy": Defect(
        lambda b: score(leave_one_out)(b) + 0.05 * summed(entropies(b), b).mean(), "other term"
    ),
    "end token masked out": Defect(
        by_mask(lambda b: b.mask * (b.completions != b.end)), "end token"
    ),
    "masks one token off": Defect(by_mask(off_by_one), "mask"),
    "first token left out": Defect(
        by_mask(lambda b: b.mask * (torch.arange(b.mask.shape[1]) > 0)), "mask"
    ),
    "no mask": Defect(by_mask(lambda b: torch.ones_like(b.mask)), "mask"),
    "answers that were cut off masked out": Defect(by_mask(cut_off), "mask"),
    "temperature missing in ln p": Defect(
        by_mask(lambda b: b.mask, temperature=1.0), "temperature", COOL
    ),
    "temperature missing in the ratio's denominator": Defect(old_at(1.0), "temperature", COOL),
    "temperature missing in a clipped ratio's denominator": Defect(
        old_at(1.0, 0.8, 1.2), "temperature", COOL
    ),
    "another temperature in the ratio's denominator": Defect(old_at(0.7), "temperature"),
    "temperature missing in the ratio's numerator": Defect(new_at_one, "temperature", COOL),
    "prompt tokens in the mean": Defect(
        by_mask(lambda b: b.mask * 5 / (b.mask.sum(-1) + b.prompt_mask.sum(-1)).unsqueeze(-1)),
        "length",
    ),
    "prompt tokens in the sum": Defect(prompt_in_sum, "prompt"),
    "stale sampler uncorrected": Defect(score(leave_one_out), "stale sampler", STALE),
    "ratios of tokens for a stale sampler": Defect(ppo(0.0, 1e9), "stale sampler", STALE),
    "clipped ratios at a later step": Defect(ppo(), "stale sampler", STALE),
    "clipping at ratio 1": Defect(ppo(0.8, 0.8), "clip"),
    "accumulation counted twice": Defect(accumulated_twice, "scale"),
    "a sum over the answers": Defect(lambda b: b.answers * score(leave_one_out)(b), "scale"),
    "baseline not detached": Defect(
        lambda b: ((b.rewards - likely_others(b)) * summed(b.log_p(), b)).mean(),
        "graph",
    ),
    "last micro-batch's reward for all": Defect(last_group_for_all, "rewards"),
    "a neighbour's reward": Defect(score(lambda b: b.rewards.roll(1) - 0.1), "rewards"),
    "own sample in the mean": Defect(score(own_mean), "own sample"),
    "own sample in the maximum": Defect(score(best_of_all), "own sample"),
    "own sample in the median": Defect(score(own_median), "own sample"),
    "the wrong sign": Defect(lambda b: -score(leave_one_out)(b), "sign"),
    "everything detached": Defect(
        lambda b: score(leave_one_out)(b).detach().requires_grad_(), "no gradient"
    ),
}
