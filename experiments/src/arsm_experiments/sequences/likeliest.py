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
from typing import NamedTuple

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
    greedy, generated = _greedy_answers(model, prompts, reward, decoding, generator)
    answers = greedy
    unsolved = greedy.rewards == 0
    if method.tries and bool(unsolved.any()):
        again = greedy.row[unsolved]
        variants, tried = _variants(
            method, model, prompts, again, greedy.tokens[again], reward, decoding, generator
        )
        answers = greedy.joined(variants)
        generated += tried
    value = torch.zeros(count, device=device)
    earned = answers.rewards.nonzero().squeeze(-1)
    if earned.shape[0]:
        value = value.index_add(0, answers.row[earned], _known_part(model, prompts, answers, eos))
    share = torch.full_like(value, method.unsolved)
    share = share.index_fill(0, answers.row[earned], method.solved)
    kept = (torch.rand(count, generator=generator, device=device) < share).nonzero().squeeze(-1)
    if kept.shape[0]:
        known = _Known(prompts[answers.row], answers.tokens)

        def rest(prompts: Tensor, answers: Tensor) -> Tensor:
            return reward(prompts, answers) * ~known(prompts, answers)

        out = sequences.estimate(
            method.rest,
            model,
            prompts[kept],
            rest,
            max_tokens=max_tokens,
            eos=eos,
            rows=rows,
            micro_batch=micro_batch,
            generator=generator,
        )
        value = value.index_add(0, kept, (out.value / share[kept]).to(value.dtype))
        generated += int(out.info["generated"])
    if not value.requires_grad:  # nothing earned, nothing sampled
        value = value + 0 * model.logits(prompts[:1], greedy.tokens[:1]).sum()
    return sequences.SequenceEstimate(
        value,
        greedy.tokens,
        live_tokens(greedy.tokens, eos),
        greedy.rewards,
        info={"generated": torch.tensor(generated)},
    )


class _Answers(NamedTuple):
    """Answers in S."""

    row: Tensor
    """Their prompts."""
    tokens: Tensor
    rewards: Tensor

    def joined(self, others: _Answers) -> _Answers:
        """Both, these first."""
        return _Answers(*(torch.cat(pair) for pair in zip(self, others, strict=True)))


def _greedy_answers(
    model: Model,
    prompts: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    decoding: Decoding,
    generator: torch.Generator,
) -> tuple[_Answers, int]:
    """One greedy answer per prompt, and the number of generated tokens."""
    everyone = torch.arange(prompts.shape[0], device=prompts.device)
    bare = Prefixes.bare(everyone, decoding.max_tokens)
    tokens = complete(model, prompts, None, bare, decoding, generator).tokens
    generated = int(live_tokens(tokens, decoding.eos).sum())
    return _Answers(everyone, tokens, reward(prompts, tokens)), generated


def _variants(
    method: Likeliest,
    model: Model,
    prompts: Tensor,
    again: Tensor,
    greedy: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    decoding: Decoding,
    generator: torch.Generator,
) -> tuple[_Answers, int]:
    """Variants of the greedy answers to the prompts `again`, and the number of generated tokens.

    Each takes the second likeliest token at one of the `tries` states where it was nearly as likely
    as the first, and goes on greedily.
    """
    with torch.no_grad():
        top = model.logits(prompts[again], greedy).topk(2, -1)
    gap = top.values[..., 0] - top.values[..., 1]
    gap = gap.masked_fill(~live_tokens(greedy, decoding.eos), torch.inf)
    step = gap.topk(method.tries, -1, largest=False).indices.flatten()
    which = torch.arange(again.shape[0], device=again.device).repeat_interleave(method.tries)
    # a short answer has fewer states than tries
    possible = gap[which, step] < torch.inf
    step, which = step[possible], which[possible]
    prefixes = Prefixes(which, step, top.indices[which, step, 1], greedy)
    tokens = complete(model, prompts[again], None, prefixes, decoding, generator).tokens
    after = torch.arange(decoding.max_tokens, device=again.device) >= step.unsqueeze(-1)
    generated = int((after & live_tokens(tokens, decoding.eos)).sum())
    row = again[which]
    return _Answers(row, tokens, reward(prompts[row], tokens)), generated


def _known_part(model: Model, prompts: Tensor, answers: _Answers, eos: int) -> Tensor:
    """p(y) R(y) of the answers that earned something."""
    earned = answers.rewards.nonzero().squeeze(-1)
    tokens = answers.tokens[earned]
    log_p = model.logits(prompts[answers.row[earned]], tokens).log_softmax(-1)
    log_p = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    p = log_p.masked_fill(~live_tokens(tokens, eos), 0).sum(-1).exp()
    return (p * answers.rewards[earned]).float()


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
