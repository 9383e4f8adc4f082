"""Other ways to give credit, as strategies of `arsm.sequences`, and the networks that some of them
learn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arsm import policy
from arsm.estimators.rloo import RLOO
from arsm.sequences import Batch, Branches, Prefixes, TokenCredit
from arsm.sequences.model import padded_behind
from arsm.sequences.strategies import back_up, value_parts
from arsm_experiments.sequences.transformer import Transformer


@dataclass(frozen=True, eq=False)
class ValueHead:
    r"""One sequence per prompt and a learned value v(s_t): generalised advantage estimation, at
    gamma = 1.

        A_t = sum_{l >= 0} lambda^l (v(s_{t+l+1}) - v(s_{t+l})),    v(the end) = R

    lambda = 1 is G_t - v(s_t) and unbiased. The first step of PPO on a batch, where no ratio is
    clipped yet.
    """

    value: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """prompts [N, P], tokens [N, T], mask [N, P] of prompts -> v(s_t) [N, T], before token t."""
    trace: float = 1.0
    """lambda."""

    samples = None
    draws = 1

    @property
    def unbiased(self) -> bool:
        return self.trace == 1

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        with torch.no_grad():
            v = self.value(batch.prompts, batch.tokens, batch.prompt_mask).to(batch.returns.dtype)
        advantage = torch.zeros_like(v)
        running = torch.zeros_like(v[:, 0])
        for t in reversed(range(v.shape[1])):
            live_next = (
                batch.mask[:, t + 1] if t + 1 < v.shape[1] else torch.zeros_like(batch.mask[:, 0])
            )
            following = torch.where(
                live_next, v[:, min(t + 1, v.shape[1] - 1)], batch.returns[:, t]
            )
            running = following - v[:, t] + self.trace * torch.where(live_next, running, 0)
            advantage[:, t] = running
        return credit_tokens(batch, advantage)


@dataclass(frozen=True)
class VinePPO:
    """K rollouts from every state for its value: A_t = v(s_{t+1}) - v(s_t), v the rollouts' mean
    return.

    Reference: Kazemnejad and others, VinePPO, 2024.
    """

    rollouts: int = 4
    unbiased = True
    samples = None
    draws = 1

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        row, step = (x.repeat_interleave(self.rollouts) for x in batch.mask.nonzero().unbind(-1))
        branches = batch.play(Prefixes(row, step, torch.full_like(row, -1), batch.tokens))
        place = row * batch.mask.shape[1] + step
        total = torch.zeros(batch.mask.numel(), dtype=branches.returns.dtype, device=row.device)
        v = total.index_add(0, place, branches.returns).view(batch.mask.shape) / self.rollouts
        after = torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)
        following = torch.where(after, torch.cat([v[:, 1:], v[:, :1]], 1), batch.returns)
        return credit_tokens(batch, following - v, branches)


@dataclass(frozen=True)
class BestOf:
    """Imitate the best of n answers per prompt, unless it earned nothing (RAFT, expert iteration).

    Of several best answers, the first. Reference: Dong and others, RAFT: reward ranked fine-tuning
    for generative foundation model alignment, 2023.
    """

    samples: int
    unbiased = False
    draws = 1

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        returns = batch.returns[:, 0].view(-1, self.samples)
        best = returns.max(-1)
        chosen = torch.zeros_like(returns).scatter(-1, best.indices.unsqueeze(-1), 1)
        chosen = chosen * (best.values > 0).unsqueeze(-1)
        return credit_tokens(batch, chosen.view(-1, 1).expand_as(batch.tokens))


@dataclass(frozen=True)
class Unsure:
    """`Branch` with `many` draws in states whose likeliest token has at most the probability
    `sure`, and `few` in all others.
    """

    few: int = 4
    many: int = 32
    sure: float = 0.9
    unbiased = True
    samples = None

    @property
    def draws(self) -> int:
        return self.many

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        sure = batch.largest.exp() > self.sure
        parts = [
            (RLOO(self.few), batch.mask & sure, batch.draws[..., : self.few]),
            (RLOO(self.many), batch.mask & ~sure, batch.draws),
        ]
        parts = [part for part in parts if bool(part[1].any())]
        weights = torch.zeros_like(batch.log_probs)
        plans = [
            policy.plan_draws(estimator, draws, where, None, None, batch.generator)
            for estimator, where, draws in parts
        ]
        sizes = [plan.step.shape[0] for plan in plans]
        branches = batch.play(
            Prefixes(
                torch.cat([plan.episode for plan in plans]),
                torch.cat([plan.step for plan in plans]),
                torch.cat([plan.action.squeeze(-1) for plan in plans]),
                batch.tokens,
            )
        )
        tried = branches.returns.split(sizes)
        own, others = torch.ones_like(batch.returns), torch.zeros_like(batch.returns)
        for (estimator, _, _), plan, some in zip(parts, plans, tried, strict=True):
            here, rest = value_parts(estimator, plan, batch.returns, some)
            own, others = own * here, others + rest
        returns = back_up(own, others, batch)
        for (estimator, _, draws), plan, some in zip(parts, plans, tried, strict=True):
            found = policy.weights(estimator, plan, returns, some)
            weights[..., : draws.shape[-1]] += found.to(weights.dtype)
        return TokenCredit(batch.draws, weights, True, branches=branches)


def by_success(
    value: Callable[[Tensor, Tensor, Tensor | None], Tensor], least: float = 0.05
) -> Callable[[Batch, policy.Rollouts], Tensor]:
    """A `chance` for rewards that are 0 after a mistake, from a learned probability of success:

        rho = max(least, v(s_t))

    A rollout that is not played counts as 0, so that few are worth playing where success is rare.
    """

    def chance(batch: Batch, plan: policy.Rollouts) -> Tensor:
        with torch.no_grad():
            v = value(batch.prompts, batch.tokens, batch.prompt_mask)
        return v[plan.episode, plan.step].clamp(least, 1)

    return chance


def credit_tokens(batch: Batch, advantage: Tensor, branches: Branches | None = None) -> TokenCredit:
    """The gradient sum_t A_t dln p(y_t)."""
    weights = advantage.masked_fill(~batch.mask, 0).unsqueeze(-1)
    return TokenCredit(batch.tokens.unsqueeze(-1), weights, branches=branches)


class Critic:
    """A network that predicts success: of a state (`actions=False`), or of every token in it.

    It starts from the policy's weights, but for its last layer.
    """

    def __init__(self, policy: Transformer, rate: float = 3e-4, *, actions: bool) -> None:
        vocabulary, width = policy.tokens.weight.shape
        self.actions = actions
        self.network = Transformer(
            vocabulary,
            policy.longest,
            width,
            len(policy.blocks),
            policy.blocks[0].heads,  # pyright: ignore[reportArgumentType]
            outputs=vocabulary if actions else 1,
        ).to(policy.head.weight.device)
        weights = {
            name: x for name, x in policy.state_dict().items() if not name.startswith("head")
        }
        self.network.load_state_dict(weights, strict=False)
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=rate)

    def __call__(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """[N, T, V] with actions, else [N, T]; the small tasks' prompts are not padded."""
        h = self.network.logits(prompts, tokens).sigmoid()
        return h if self.actions else h.squeeze(-1)

    def fit(
        self,
        prompts: Tensor,
        tokens: Tensor,
        counts: Tensor,
        returns: Tensor,
        mask: Tensor | None = None,
    ) -> float:
        """One step on sequences [M, T] with returns [M] in 0 to 1; `counts` [M, T] says which
        tokens to learn from.
        """
        with torch.enable_grad():
            h = self.network.logits(prompts, tokens)
            h = h.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) if self.actions else h.squeeze(-1)
            wanted = returns.to(h.dtype).unsqueeze(-1).expand_as(h)
            loss = F.binary_cross_entropy_with_logits(h[counts], wanted[counts])
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """All that learning goes on from."""
        return {"network": self.network.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])


class ValueModel:
    """v(s_t) of a causal model of transformers: a copy of its layers with one output, all of it
    trained.
    """

    head: nn.Module

    def __init__(
        self,
        policy: nn.Module,
        rate: float = 2e-5,
        micro_batch: int = 16,
        precision: torch.dtype | None = None,
    ) -> None:
        inner: Any = policy.get_base_model() if hasattr(policy, "get_base_model") else policy  # pyright: ignore
        self.layers = copy.deepcopy(inner.base_model)
        self.micro_batch, self.precision = micro_batch, precision
        embedding = inner.get_input_embeddings().weight
        self.head = self._new_head(embedding).to(embedding.device)
        # zeros: every state begins with an even chance
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        learned = [p for p in self.layers.parameters() if p.requires_grad]
        groups = [{"params": learned}, {"params": list(self.head.parameters()), "lr": 50 * rate}]
        self.optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def __call__(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """v [N, T], in 0 to 1."""
        found = []
        with torch.no_grad():
            for some in torch.arange(prompts.shape[0], device=prompts.device).split(
                self.micro_batch
            ):
                part = None if mask is None else mask[some]
                found.append(self._logits(prompts[some], tokens[some], part).sigmoid())
        return torch.cat(found)

    def fit(
        self,
        prompts: Tensor,
        tokens: Tensor,
        counts: Tensor,
        returns: Tensor,
        mask: Tensor | None = None,
    ) -> float:
        """One step on sequences [M, T] with returns [M] in 0 to 1; `counts` [M, T] says which
        states to learn from.
        """
        self.optimiser.zero_grad()
        total = torch.zeros((), device=prompts.device)
        steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        length = (counts * steps).amax(-1)
        # similar lengths together, so that little padding is read
        order = length.argsort(descending=True, stable=True)
        for some in order.split(self.micro_batch):
            part = None if mask is None else mask[some]
            width = max(1, int(length[some].max()))
            here = counts[some, :width]
            v = self._logits(prompts[some], tokens[some, :width], part)
            wanted = returns[some].to(v.dtype).unsqueeze(-1).expand_as(v)
            summed = F.binary_cross_entropy_with_logits(v[here], wanted[here], reduction="sum")
            loss = summed / counts.sum()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_([*self.layers.parameters(), *self.head.parameters()], 1.0)
        self.optimiser.step()
        return float(total)

    def _new_head(self, embedding: Tensor) -> nn.Module:
        """From hidden states to logits of success, given the embeddings [V, D]."""
        return nn.Linear(embedding.shape[1], 1)

    def _logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """[N, T], in float32."""
        return self.head(self._hidden(prompts, tokens, mask)).squeeze(-1)

    def _hidden(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """[N, T, D], in float32."""
        # behind the tokens, padding needs no mask, under which a gradient may be NaN
        read, state = padded_behind(prompts, tokens, mask)
        device = read.device.type
        with nullcontext() if self.precision is None else torch.autocast(device, self.precision):
            hidden = self.layers(input_ids=read, use_cache=False).last_hidden_state
        return hidden.gather(1, state.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])).float()

    def state_dict(self) -> dict[str, Any]:
        """All that learning goes on from."""
        return {
            "layers": self.layers.state_dict(),
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layers.load_state_dict(state["layers"])
        self.head.load_state_dict(state["head"])
        self.optimiser.load_state_dict(state["optimiser"])
