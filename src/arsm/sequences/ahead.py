"""Branches that begin while the true sequences are still being sampled.

A step of the slots takes as long for few rows as for many, so that T steps for the true
sequences and T more for a few branches waste half of the time. But a branch off state t
of a sequence needs nothing that comes after t: it can go on beside the sequence from the
next look on, in a slot that is free, with a copy of the sequence's row of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.distinct import share, speakers
from arsm.sequences.board import Playing, Rows, Starts
from arsm.sequences.decode import Completions, Decoding, Prefixes
from arsm.sequences.draws import Sampled
from arsm.sequences.ends import is_end, stopped_at


@dataclass(frozen=True, eq=False)
class PlayedAhead:
    """B branches that were played to the end beside their true sequences.

    Attributes:
        row: [B] int64: the true sequence of each.
        step: [B] int64: where it left.
        action: [B] int64: with which token. No two branches agree in all three.
        completions: [B, T]: the whole sequences.
    """

    row: Tensor
    step: Tensor
    action: Tensor
    completions: Completions

    def places(self, prefixes: Prefixes) -> Tensor:
        """[R] int64: which of the branches each prefix is; -1 for none of them."""
        if self.row.shape[0] == 0:
            return torch.full_like(prefixes.row, -1)
        width = prefixes.known.shape[1]
        # a base larger than any action keeps the numbers apart
        tokens = 1 + torch.cat([self.action, prefixes.action]).amax()
        # one number for row, step and action: a sorted list is searched for it
        own = (self.row * width + self.step) * tokens + self.action
        asked = (prefixes.row * width + prefixes.step) * tokens + prefixes.action
        own, order = own.sort()
        place = torch.searchsorted(own, asked).clamp_max(own.shape[0] - 1)
        # prefixes without an action are drawn anew
        found = (own[place] == asked) & (prefixes.action >= 0)
        return torch.where(found, order[place], -1)


class Ahead(Playing):
    """The branches that have begun, numbered after the true sequences."""

    @staticmethod
    def of(true: Playing, decoding: Decoding) -> Ahead:
        """None yet."""
        nothing = true.starts.row[:0]
        done = Sampled.empty(0, decoding.max_tokens, 1, decoding.eos, nothing.device)
        starts = Starts(nothing, nothing, nothing, nothing)
        return Ahead(starts, done, true.first + true.starts.row.shape[0])

    def add(self, starts: Starts, known: Tensor, decoding: Decoding) -> Tensor:
        """Number [K] new starts, whose sequences begin like the known [K, T]."""
        count = self.starts.row.shape[0]
        prefixes = Prefixes(
            torch.arange(known.shape[0], device=known.device), starts.index, starts.token, known
        )
        begun = Completions.empty(prefixes, decoding).tokens
        begun.scatter_(1, starts.index.unsqueeze(-1), starts.token.unsqueeze(-1))
        log_probs = torch.zeros_like(begun, dtype=torch.float64)
        # grows by what a look finds: how many there will be is known at the end only
        self.done = Sampled(
            torch.cat([self.done.tokens, begun.unsqueeze(-1)]),
            torch.cat([self.done.log_probs, log_probs.unsqueeze(-1)]),
            torch.cat([self.done.largest, log_probs]),
        )
        own = self.starts
        self.starts = Starts(
            torch.cat([own.row, starts.row]),
            torch.cat([own.index, starts.index]),
            torch.cat([own.token, starts.token]),
            torch.cat([own.name, starts.name]),
        )
        return self.first + count + prefixes.row

    def played(self) -> PlayedAhead:
        """All of them, when they have ended."""
        starts = self.starts
        completions = Completions(self.done.tokens.squeeze(-1), self.done.log_probs.squeeze(-1))
        return PlayedAhead(starts.row, starts.index, starts.token, completions)


def other_draws(
    rows: Rows, before: Tensor, true: Playing, decoding: Decoding
) -> tuple[Tensor, Starts]:
    """The distinct other draws of the states that true sequences reached since their
    indices `before` [S], those left out that end at once: the slots [K] of their
    sequences, and the starts [K], the earliest first.
    """
    width, draws = true.done.tokens.shape[1:]
    step = torch.arange(width, device=before.device)
    reached = (step > before.unsqueeze(-1)) & (step <= rows.index.unsqueeze(-1))
    # a token at the last step ends its sequence
    reached &= true.owns(rows).unsqueeze(-1) & (step < width - 1)
    slot, at = reached.nonzero(as_tuple=True)
    drawn = rows.tokens[slot, at]  # [states, n]
    first = speakers(share(drawn.T.unsqueeze(-1))).T
    # the first draw is the sequence's own
    other = first & ~is_end(drawn, decoding.eos) & (torch.arange(draws, device=at.device) > 0)
    state, draw = other.nonzero(as_tuple=True)
    state, draw = _earliest_first(at, state, draw)
    slot = slot[state]
    at = at[state]
    token = drawn[state, draw]
    row = rows.owner[slot] - true.first
    # the noise knows a branch by its place among all draws of all states, after the sequences
    name = true.starts.row.shape[0] + (row * width + at) * draws + draw
    starts = Starts(row, at, token, name)
    going = _not_stopped(rows, slot, starts, decoding)
    return slot[going], starts.some(going)


def _earliest_first(at: Tensor, state: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """The earliest branches play longest."""
    order = at[state].argsort(stable=True)
    return state[order], draw[order]


def _not_stopped(rows: Rows, slot: Tensor, starts: Starts, decoding: Decoding) -> Tensor:
    """[K'] the starts that are not over by `decoding.stop` with their first token."""
    if decoding.stop is None:
        return torch.arange(slot.shape[0], device=slot.device)
    going = []
    known = rows.tokens[slot, :, 0].tolist()
    steps = starts.index.tolist()
    for i, token in enumerate(starts.token.tolist()):
        whole = [*known[i][: steps[i]], token]
        if stopped_at(whole, steps[i], decoding.stop, decoding.min_tokens) is None:
            going.append(i)
    return torch.tensor(going, dtype=torch.int64, device=slot.device)
