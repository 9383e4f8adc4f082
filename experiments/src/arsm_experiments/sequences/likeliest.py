r"""The likeliest answers exactly, the rest by sampling.

With S a set of answers that was chosen without regard to the samples,

    J = E[R(y)] = sum_{y in S} p(y) R(y)  +  E[R(y) 1{y not in S}]

The first part is known with its gradient once every answer in S was rewarded; the second is left to
any strategy, with rewards of 0 for the answers in S. S holds the greedy answer and, where that
earns nothing, variants of it: go back to the states where another token was nearly as likely, take
it, and go on greedily. The second part is computed for a share of the prompts and divided by that
share. Where S holds the only right answer, it is 0 whatever is sampled.

References: Liu and others, Rao-Blackwellized stochastic gradients for discrete distributions, 2019;
Kool, van Hoof and Welling, Estimating gradients for discrete random variables by sampling without
replacement, 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arsm import sequences
from arsm.sequences import Decoding, Model, Prefixes, Strategy, complete, live_tokens

GREEDY = 1e-4
"""A temperature at which the likeliest token is drawn."""


@dataclass(frozen=True)
class Likeliest:
    """Which answers to look at, and how to estimate the rest."""

    rest: Strategy
    tries: int = 3
    """Variants of a greedy answer that earned nothing."""
    solved: float = 0.05
    """The share of prompts whose rest is estimated where an answer in S earned something."""
    unsolved: float = 1.0
    """The share where none did."""


def estimate(
    method: Likeliest,
    model: Model,
    prompts: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    *,
    max_tokens: int,
    eos: int,
    rows: int,
    micro_batch: int = 1024,
    generator: torch.Generator,
) -> sequences.SequenceEstimate:
    """Like `sequences.estimate`; the tokens and rewards are those of the greedy answers."""
    count, device = prompts.shape[0], prompts.device
    decoding = Decoding(max_tokens, eos, GREEDY, rows)
    everyone = torch.arange(count, device=device)
    greedy = complete(
        model, prompts, None, Prefixes.bare(everyone, max_tokens), decoding, generator
    ).tokens
    live = live_tokens(greedy, eos)
    generated = int(live.sum())
    tokens, row, rewards = greedy, everyone, reward(prompts, greedy)
    if method.tries and bool((unsolved := rewards == 0).any()):
        again = everyone[unsolved]
        with torch.no_grad():
            top = model.logits(prompts[again], greedy[again]).topk(2, -1)
        gap = (top.values[..., 0] - top.values[..., 1]).masked_fill(~live[again], torch.inf)
        step = gap.topk(method.tries, -1, largest=False).indices.flatten()
        which = torch.arange(again.shape[0], device=device).repeat_interleave(method.tries)
        possible = gap[which, step] < torch.inf
        step, which = step[possible], which[possible]
        prefixes = Prefixes(which, step, top.indices[which, step, 1], greedy[again])
        variants = complete(model, prompts[again], None, prefixes, decoding, generator).tokens
        after = torch.arange(max_tokens, device=device) >= step.unsqueeze(-1)
        generated += int((after & live_tokens(variants, eos)).sum())
        row, tokens = torch.cat([row, again[which]]), torch.cat([tokens, variants])
        rewards = torch.cat([rewards, reward(prompts[again[which]], variants)])
    value = torch.zeros(count, device=device)
    earned = rewards.nonzero().squeeze(-1)
    if earned.shape[0]:
        chosen = tokens[earned]
        log_p = (
            model.logits(prompts[row[earned]], chosen)
            .log_softmax(-1)
            .gather(-1, chosen.unsqueeze(-1))
            .squeeze(-1)
        )
        p = log_p.masked_fill(~live_tokens(chosen, eos), 0).sum(-1).exp()
        value = value.index_add(0, row[earned], (p * rewards[earned]).to(value.dtype))
    share = (
        torch.full_like(value, method.unsolved).index_fill(0, row[earned], method.solved).detach()
    )
    kept = (torch.rand(count, generator=generator, device=device) < share).nonzero().squeeze(-1)
    if kept.shape[0]:
        known = _Known(prompts[row], tokens)

        def rest(prompts: Tensor, answers: Tensor) -> Tensor:
            return reward(prompts, answers) * ~known(prompts, answers)

        options = {"max_tokens": max_tokens, "eos": eos, "rows": rows, "generator": generator}
        options["micro_batch"] = micro_batch
        out = sequences.estimate(method.rest, model, prompts[kept], rest, **options)
        value = value.index_add(0, kept, (out.value / share[kept]).to(value.dtype))
        generated += int(out.info["generated"])
    if not value.requires_grad:  # nothing earned, nothing sampled
        value = value + 0 * model.logits(prompts[:1], greedy[:1]).sum()
    info = {"generated": torch.tensor(generated)}
    return sequences.SequenceEstimate(value, greedy, live, rewards[:count], info=info)


class _Known:
    """Is an answer to a prompt in S?"""

    def __init__(self, prompts: Tensor, tokens: Tensor) -> None:
        self.codes = self._hash(prompts, tokens)

    def __call__(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        return torch.isin(self._hash(prompts, tokens), self.codes)

    @staticmethod
    def _hash(prompts: Tensor, tokens: Tensor) -> Tensor:
        both = torch.cat([prompts, tokens], -1)
        base = torch.full(
            (both.shape[1],), 6364136223846793005, dtype=torch.int64, device=both.device
        )
        return ((both + 1) * base.cumprod(0)).sum(-1)
