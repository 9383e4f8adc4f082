"""Tokens that end a sequence: none, one, or several, of which the first also pads."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Ends: TypeAlias = int | list[int] | tuple[int, ...] | None
"""A token, several tokens, or None where every completion has max_tokens tokens."""


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


def live_tokens(tokens: Tensor, eos: Ends) -> Tensor:
    """[..., T] bool: true up to and including the first end of sequence."""
    ended = is_end(tokens, eos)
    return ended.cumsum(-1) - ended.long() == 0
