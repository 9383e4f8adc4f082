r"""Several draws from one state's distribution, and what is recorded of them.

All n draws of a row share one cumulative sum: a = min{c : S_c > u S_V} with S_c =
sum_{i <= c} p_i and u uniform. A large vocabulary is cut into blocks: u chooses a
block, what remains of u is again uniform and chooses a token of that block. So only the
blocks' sums, and one block per draw, are held in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.sampling import BLOCK, IN_ONE_PIECE, cumulative, search
from arsm.sequences.ends import Ends, padding
from arsm.sequences.heads import Limit, logits_in_parts
from arsm.sequences.model import Model

Noise = Callable[[Tensor, Tensor], Tensor]
"""`noise(sequence [R], step [R]) -> u [R, n]`, float64 in [0, 1): the uniform numbers
behind the draws of a state.
"""


class Drawn(NamedTuple):
    """n draws per row."""

    tokens: Tensor
    """[R, n] int64."""
    log_probs: Tensor
    """[R, n]: ln p of each, at the sampler's temperature."""
    largest: Tensor
    """[R]: the largest ln p of the state."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """N sampled sequences of T tokens, with n draws from every state.

    Attributes:
        tokens: [N, T, n] int64: the draws; [..., 0] are the sequences themselves. All
            eos after the end.
        log_probs: [N, T, n] float64: ln p of the draws, at the sampler's temperature; 0
            after the end.
        largest: [N, T] float64: the largest ln p of every state; 0 after the end.
    """

    tokens: Tensor
    log_probs: Tensor
    largest: Tensor

    @staticmethod
    def empty(rows: int, width: int, draws: int, eos: Ends, device: torch.device) -> Sampled:
        """Sequences that have ended before their first token."""
        tokens = torch.full((rows, width, draws), padding(eos), dtype=torch.int64, device=device)
        log_probs = torch.zeros(rows, width, draws, dtype=torch.float64, device=device)
        return Sampled(
            tokens, log_probs, torch.zeros(rows, width, dtype=torch.float64, device=device)
        )


def token_uniforms(
    rows: int, draws: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw u [R, n], float64 in [0, 1)."""
    return torch.empty(rows, draws, dtype=torch.float64, device=device).uniform_(
        generator=generator
    )


def draw_tokens(logits: Tensor, u: Tensor, temperature: float = 1.0) -> Drawn:
    """n tokens per row from softmax(logits / temperature): logits [R, V], u [R, n] in [0, 1)."""
    # p once for everything: ln p of the draws and of the likeliest token are read off it
    p = token_probabilities(logits, temperature)
    tokens = inverse(p, u)
    return Drawn(tokens, p.gather(-1, tokens).log(), p.amax(-1).log())


def token_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), in float32 or wider: [..., V] -> [..., V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if temperature == 1:
        # one fused pass that reads the narrow logits and writes the wide probabilities
        return logits.softmax(-1, dtype=wide)
    return (logits.to(wide) / temperature).softmax(-1)


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """ln softmax(logits / temperature), in float32 or wider; exact also where p is too
    small for its type.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) / temperature).log_softmax(-1)


def inverse(p: Tensor, u: Tensor) -> Tensor:
    """The tokens [R, n] at u [R, n] of the cumulative sums of p [R, V]."""
    vocabulary = p.shape[-1]
    if vocabulary <= IN_ONE_PIECE:
        return search(*cumulative(p, u))
    # the last block may be shorter: its sum is made apart
    whole = vocabulary // BLOCK * BLOCK
    of_blocks = p[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < vocabulary:
        of_blocks = torch.cat([of_blocks, p[:, whole:].sum(-1, keepdim=True)], -1)
    sums, x = cumulative(of_blocks, u)
    block = search(sums, x)
    # given the block, the rest of u is uniform again
    below = F.pad(sums, (1, 0)).gather(-1, block)
    rest = (x - below) / (sums.gather(-1, block) - below)

    members = block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=p.device)  # [R, n, BLOCK]
    chosen = p.gather(-1, members.clamp_max(vocabulary - 1).flatten(1)).view(members.shape)
    chosen = torch.where(members < vocabulary, chosen, 0)
    # a block of tiny probabilities would be rounded to zero: relative to its own sum it is not
    chosen = chosen / chosen.sum(-1, keepdim=True)
    place = search(*cumulative(chosen, rest.unsqueeze(-1))).squeeze(-1)
    return (block * BLOCK + place).clamp_max(vocabulary - 1)


@torch.no_grad()
def draw_beside(
    model: Model,
    prompts: Tensor,
    mask: Tensor | None,
    tokens: Tensor,
    live: Tensor,
    draws: int,
    limit: Limit,
    temperature: float = 1.0,
    rows: int = 16,
    generator: torch.Generator | None = None,
) -> Sampled:
    """Draw n - 1 other tokens in every state of given sequences, by one pass without a graph.

    Args:
        model: the model.
        prompts: [N, P] int64.
        mask: [N, P] bool, true for tokens of the prompt; None where all are.
        tokens: [N, T] int64: the given sequences.
        live: [N, T] bool: true up to and including their ends.
        draws: n, the given token included.
        limit: which tokens may be drawn.
        temperature: the tokens are drawn from softmax(logits / temperature).
        rows: maximum sequences per call of the model.
        generator: what draws them.
    """
    count, width = tokens.shape
    done = Sampled.empty(count, width, draws, None, tokens.device)
    # padding has only its own token, n times: no other draw, no branch
    done.tokens.copy_(tokens.unsqueeze(-1))
    for part in torch.arange(count, device=tokens.device).split(rows):
        padding = None if mask is None else mask[part]
        states = logits_in_parts(model, prompts[part], tokens[part], padding, live[part], limit)
        for some, logits in states:
            row, step = part[some // width], some % width
            log_p = log_probabilities(logits, temperature)
            # the given token is the first of the n draws: it was drawn from the same distribution
            u = token_uniforms(log_p.shape[0], draws - 1, log_p.device, generator)
            drawn = torch.cat([tokens[row, step].unsqueeze(-1), inverse(log_p.exp(), u)], -1)
            done.tokens[row, step] = drawn
            done.log_probs[row, step] = log_p.gather(-1, drawn).double()
            done.largest[row, step] = log_p.amax(-1).double()
    return done
