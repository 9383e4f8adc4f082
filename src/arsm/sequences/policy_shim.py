"""Deleted on merge: policy.plan / gradient of the coming contract, on today's estimators."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import torch
from torch import Tensor
from arsm.noise import given_winner
from arsm.policy import _most_pseudo_actions


@dataclass(frozen=True, eq=False)
class Rollouts:
    episode: Tensor
    step: Tensor
    action: Tensor
    query: Tensor
    weight: Tensor
    queries: Any


def _noise(estimator, logits, z, generator):
    noise = estimator.noise(logits, generator)
    log_pi = noise if isinstance(noise, Tensor) else noise.log_pi
    first = log_pi[..., 0, :, :] if log_pi.ndim > logits.ndim else log_pi
    first = given_winner(logits, z, first)
    first = first - first.logsumexp(-1, keepdim=True)
    log_pi = torch.cat([first.unsqueeze(-3), log_pi[..., 1:, :, :]], -3) if log_pi.ndim > logits.ndim else first
    return log_pi if isinstance(noise, Tensor) else noise._replace(log_pi=log_pi)


def plan(estimator, logits, actions, mask=None, budget=None, keep=None, generator=None):
    logits = logits.detach()
    queries = estimator.ask(logits, _noise(estimator, logits, actions, generator))
    number = torch.arange(queries.same_as.shape[0], device=logits.device).view(-1, 1, 1)
    pseudo = (queries.same_as == number) & (number > 0)
    live = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if mask is None else mask
    pseudo = pseudo & live
    counts = pseudo.sum(0)
    weight = live.double()
    if keep is not None:
        kept = torch.rand(keep.shape, generator=generator, device=logits.device, dtype=torch.float64) < keep
        weight = torch.where(kept & live, 1 / keep.double(), 0.0)
    if budget is not None:
        largest = _most_pseudo_actions(estimator, queries, logits.flatten(0, 1))
        if budget < largest:
            raise ValueError(f"A budget of {budget} rollouts is less than the {largest} that one step can have; allow at least {largest}.")
        flat = counts.flatten()
        pending = flat.nonzero().squeeze(-1)
        order = pending[torch.randperm(pending.shape[0], generator=generator, device=logits.device)]
        kept = order[flat[order].cumsum(0) <= budget]
        w = (flat == 0).double().index_fill(0, kept, order.shape[0] / max(kept.shape[0], 1))
        weight = weight * w.view_as(weight)
    ep, st, q = (pseudo & (weight > 0)).permute(1, 2, 0).nonzero().unbind(-1)
    return Rollouts(ep, st, queries.points[q, ep, st], q, weight, queries)


def gradient(estimator, logits, rollouts, returns, rollout_returns, discount=None):
    logits = logits.detach()
    q = rollouts.queries
    values = returns.expand(q.same_as.shape).clone()
    values[rollouts.query, rollouts.episode, rollouts.step] = rollout_returns.to(values.dtype)
    g = estimator.tell(logits, q, values.gather(0, q.same_as))
    g = g * rollouts.weight[..., None, None].to(g.dtype)
    return g.masked_fill(logits == -torch.inf, 0).to(logits.dtype)
