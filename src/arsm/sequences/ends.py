"""Ends of a sequence: tokens, of which the first also pads, or a function of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Ends: TypeAlias = int | list[int] | tuple[int, ...] | None
"""A token, several tokens, or None where every completion has max_tokens tokens."""
Stop: TypeAlias = Callable[[list[int]], bool]
"""`stop(tokens) -> bool`: whether a completion is over after these tokens, as after a
string. It may depend on nothing else.
"""


def all_ends(eos: Ends) -> tuple[int, ...]:
    """The tokens that end a sequence."""
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def padding(eos: Ends) -> int:
    """The token that stands after the end."""
    return next(iter(all_ends(eos)), 0)


def is_end(tokens: Tensor, eos: Ends) -> Tensor:
    """Whether each token ends its sequence: [...] -> [...] bool."""
    ends = all_ends(eos)
    if not ends:
        return torch.zeros_like(tokens, dtype=torch.bool)
    # compared with numbers, not with a tensor of them: a captured step must not copy from the host
    found = tokens == ends[0]
    for end in ends[1:]:
        found = found | (tokens == end)
    return found


def live_tokens(tokens: Tensor, eos: Ends, stop: Stop | None = None, min_tokens: int = 0) -> Tensor:
    """[..., T] bool: true up to and including the first end of sequence, or the token
    after which `stop` is true.
    """
    ended = is_end(tokens, eos)
    # less the token itself: the end belongs to its sequence
    live = ended.cumsum(-1) - ended.long() == 0
    if stop is None:
        return live
    # a function of lists: sequence by sequence, on the host
    flat = tokens.flatten(0, -2).tolist()
    within = live.flatten(0, -2)
    for row, (sequence, length) in enumerate(zip(flat, within.sum(-1).tolist(), strict=True)):
        if (end := stopped_at(sequence[:length], 0, stop, min_tokens)) is not None:
            within[row, end + 1 :] = False
    return within.view_as(live)


def stopped_at(tokens: list[int], first: int, stop: Stop, min_tokens: int) -> int | None:
    """The first index from `first` on after which a sequence is over; None if it goes on."""
    # from `first` on only: what came before was asked about at an earlier look
    for end in range(max(first, min_tokens - 1, 0), len(tokens)):
        if stop(tokens[: end + 1]):
            return end
    return None


def forbid_ends(logits: Tensor, step: Tensor | int, eos: Ends, min_tokens: int) -> Tensor:
    """Logits [S, V] of the tokens at `step` [S], with -inf for ends before min_tokens
    tokens: the policy is what remains.
    """
    if min_tokens == 0 or eos is None:
        return logits
    # a mask and no index: a captured step must not copy indices from the host
    ends = is_end(torch.arange(logits.shape[-1], device=logits.device), eos)
    early = torch.as_tensor(step, device=logits.device).unsqueeze(-1) < min_tokens
    return logits.masked_fill(ends & early, -torch.inf)
