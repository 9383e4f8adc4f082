"""Other ways to give credit, as strategies of `arsm.sequences`, and the networks that some of them learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.sequences import Batch, Branches, Prefixes, TokenCredit
from arsm_experiments.sequences.transformer import Transformer


@dataclass(frozen=True, eq=False)
class ValueHead:
    r"""One sequence per prompt and a learned value v(s_t): generalised advantage estimation, at gamma = 1.

        A_t = sum_{l >= 0} lambda^l (v(s_{t+l+1}) - v(s_{t+l})),    v(the end) = R

    lambda = 1 is G_t - v(s_t) and unbiased. The first step of PPO on a batch, where no ratio is clipped yet.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    """prompts [N, P], tokens [N, T] -> v(s_t) [N, T], before token t."""
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
            v = self.value(batch.prompts, batch.tokens).to(batch.returns.dtype)
        advantage = torch.zeros_like(v)
        running = torch.zeros_like(v[:, 0])
        for t in reversed(range(v.shape[1])):
            live_next = batch.mask[:, t + 1] if t + 1 < v.shape[1] else torch.zeros_like(batch.mask[:, 0])
            following = torch.where(live_next, v[:, min(t + 1, v.shape[1] - 1)], batch.returns[:, t])
            running = following - v[:, t] + self.trace * torch.where(live_next, running, 0)
            advantage[:, t] = running
        return credit_tokens(batch, advantage)


@dataclass(frozen=True)
class VinePPO:
    """K rollouts from every state for its value: A_t = v(s_{t+1}) - v(s_t), v the rollouts' mean return.

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
        weights = {name: x for name, x in policy.state_dict().items() if not name.startswith("head")}
        self.network.load_state_dict(weights, strict=False)
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=rate)

    def __call__(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """[N, T, V] with actions, else [N, T]."""
        h = self.network.logits(prompts, tokens).sigmoid()
        return h if self.actions else h.squeeze(-1)

    def fit(self, prompts: Tensor, tokens: Tensor, counts: Tensor, returns: Tensor) -> float:
        """One step on sequences [M, T] with returns [M] in 0 to 1; `counts` [M, T] says which tokens to learn from."""
        with torch.enable_grad():
            h = self.network.logits(prompts, tokens)
            h = h.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) if self.actions else h.squeeze(-1)
            wanted = returns.to(h.dtype).unsqueeze(-1).expand_as(h)
            loss = F.binary_cross_entropy_with_logits(h[counts], wanted[counts])
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        return float(loss.detach())
