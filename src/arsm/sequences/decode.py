"""Completing prefixes: sampling from prompts, and rollouts that branch off known sequences, as one batch.

All rows of a batch stand at the same step t, so a cache needs one position for all of them. The known sequences are
stepped along with their own tokens. A branch at step t starts as a copy of its sequence's row, and is a row of the same
batch from then on. Rows that have ended make room for later branches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arsm.checks import NotFiniteError
from arsm.sequences.model import Model, begin

LOOK_EVERY = 4
"""Steps between two looks at which rows have ended: every look waits for the device."""


@dataclass(frozen=True, eq=False)
class Decoding:
    """How tokens are drawn."""

    max_tokens: int
    eos: int | None = None
    temperature: float = 1.0
    max_rows: int = 1024
    """Maximum rows per call of the model."""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """R prefixes to complete: the first `step` tokens of a known sequence, then `action`."""

    row: Tensor
    """[R] int64: the prompt of each."""
    step: Tensor
    """[R] int64: the number of known tokens to keep."""
    action: Tensor
    """[R] int64: the token to take next; -1 draws it."""
    known: Tensor
    """[N, T] int64: one known sequence per prompt."""

    @staticmethod
    def bare(row: Tensor, width: int) -> Prefixes:
        """The prompts themselves, without a known token."""
        rows = int(row.max()) + 1
        known = torch.zeros(rows, width, dtype=torch.int64, device=row.device)
        return Prefixes(row, torch.zeros_like(row), torch.full_like(row, -1), known)


@dataclass(frozen=True, eq=False)
class Completions:
    """R completions of T tokens."""

    tokens: Tensor
    """[R, T] int64: the prefix and its completion, padded with eos after the end."""
    log_probs: Tensor
    """[R, T]: ln p, at the sampler's temperature, of the tokens after the prefix; 0 for the prefix and the padding."""


def live_tokens(tokens: Tensor, eos: int | None) -> Tensor:
    """[..., T] bool: true up to and including the first eos."""
    if eos is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ended = tokens == eos
    return ended.cumsum(-1) - ended.long() == 0


@torch.no_grad()
def complete(
    model: Model,
    prompts: Tensor,
    mask: Tensor | None,
    prefixes: Prefixes,
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> Completions:
    """Complete every prefix to max_tokens tokens, or to its end of sequence.

    Args:
        model: the model.
        prompts: [N, P] int64.
        mask: [N, P] bool, true for tokens of the prompt; None where all are.
        prefixes: where to start.
        decoding: how tokens are drawn.
        generator: what draws them.
    """
    kept = torch.arange(decoding.max_tokens, device=prefixes.step.device) < prefixes.step.unsqueeze(-1)
    tokens = prefixes.known[prefixes.row].where(kept, 0 if decoding.eos is None else decoding.eos)
    done = Completions(tokens, torch.zeros_like(tokens, dtype=torch.float64))
    order = prefixes.step.argsort(stable=True)
    share = decoding.max_rows // 2  # the other half is for their branches
    for first in range(0, prompts.shape[0], share):
        some = slice(first, first + share)
        pending = order[(prefixes.row[order] // share) == first // share]
        if pending.shape[0] == 0:
            continue
        started = begin(model, prompts[some], None if mask is None else mask[some])
        while pending.shape[0]:
            pending = _wave(model, started, first, prefixes, pending, decoding, generator, done)
    if not bool((finite := done.log_probs > -torch.inf).all()):
        row, step = (~finite).nonzero()[0].tolist()
        raise NotFiniteError(
            f"The model's logits after {step} tokens of completion {row} are NaN, +inf, or -inf throughout; they must "
            "be finite, or -inf to mask a token."
        )
    return done


def _wave(
    model: Model,
    started: Any,
    first: int,
    prefixes: Prefixes,
    pending: Tensor,
    decoding: Decoding,
    generator: torch.Generator | None,
    done: Completions,
) -> Tensor:
    """Play the pending prefixes that find room, writing into `done`; return the others. They are sorted by step."""
    width, eos = decoding.max_tokens, decoding.eos
    births = torch.bincount(prefixes.step[pending], minlength=width).tolist()
    last_birth = max(t for t, count in enumerate(births) if count)
    carried = prefixes.row[pending].unique()  # sequences that are stepped along until the last branch has left
    where = carried - first  # their rows in the state, which the playing rows follow
    playing, waiting = pending[:0], []
    ended = torch.zeros(0, dtype=torch.bool, device=pending.device)
    state = started
    for t, count in enumerate(births):
        room = decoding.max_rows - playing.shape[0] - (carried.shape[0] if t < last_birth else 0)
        born, later, pending = pending[: min(count, room)], pending[min(count, room) : count], pending[count:]
        waiting.append(later)
        stays = torch.arange(playing.shape[0], device=born.device) + where.shape[0]
        source = torch.cat([stays, where[torch.searchsorted(carried, prefixes.row[born])]])
        forced = torch.cat([torch.full_like(playing, -1), prefixes.action[born]])
        playing, ended = torch.cat([playing, born]), torch.cat([ended, torch.zeros_like(born, dtype=torch.bool)])
        token, log_prob = _draw(state.logits[source], forced, decoding, generator)
        if eos is not None:
            token, log_prob = torch.where(ended, eos, token), torch.where(ended, 0, log_prob)
            ended = ended | (token == eos)
        done.tokens[playing, t], done.log_probs[playing, t] = token, log_prob
        if t == width - 1:
            break
        moved = t == 0 or t == last_birth or count > 0
        if eos is not None and (t + 1) % LOOK_EVERY == 0 and bool(ended.any()):
            alive = (~ended).nonzero().squeeze(-1)
            playing, ended, token, source, moved = playing[alive], ended[alive], token[alive], source[alive], True
        if t < last_birth:
            source, token = torch.cat([where, source]), torch.cat([prefixes.known[carried, t], token])
            where = torch.arange(carried.shape[0], device=carried.device)
        else:
            where = where[:0]
        if source.shape[0] == 0:
            break
        state = model.step(model.select(state, source) if moved else state, token)
    return torch.cat(waiting)


def _draw(
    logits: Tensor, forced: Tensor, decoding: Decoding, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """One token per row, drawn unless it is forced, and its ln p: [R, V], [R] -> [R], [R]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = (logits.to(wide) / decoding.temperature).log_softmax(-1)
    if log_p.shape[0] == 0:
        return forced, log_p.sum(-1).double()
    # argmax_c p_c / E_c, with E exponential: what multinomial does too, but without waiting for the device
    race = log_p.exp() / torch.empty_like(log_p).exponential_(generator=generator).clamp_min(torch.finfo(wide).tiny)
    token = torch.where(forced < 0, race.argmax(-1), forced)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
