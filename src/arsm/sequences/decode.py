"""Completing prefixes: sampling from prompts, and rollouts that branch off known
sequences, as one batch.

All rows of a batch stand at the same step t, so a cache needs one position for all of
them. The known sequences are carried along with their own tokens. A branch at step t
starts as a copy of its sequence's row, and is a row of the same batch from then on.
When the batch is full, the carried rows are set aside, the batch is played to its end
as a wave, and the carried rows go on from where they stopped: nothing is computed
twice, and waves are as full as can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arsm.checks import NotFiniteError
from arsm.sequences.draws import Noise, Sampled, inverse, log_probabilities, token_uniforms
from arsm.sequences.ends import (
    Ends,
    Stop,
    forbid_ends,
    is_end,
    live_tokens,
    padding,
    stopped_at,
)
from arsm.sequences.model import Model, begin

LOOK_EVERY = 4
"""Steps between two looks at which rows have ended: every look waits for the device."""
WORTH = 0.75
"""Rows that have ended leave the batch when no more than this share is alive: leaving
copies the cache.
"""


@dataclass(frozen=True, eq=False)
class Decoding:
    """How tokens are drawn.

    Attributes:
        eos: The tokens that end a sequence; the first of several also pads.
        rows: Maximum rows per call of the model.
        min_tokens: Tokens before which no sequence ends: the policy is the distribution
            without ends there.
        stop: Ends a sequence after a token, beside eos.
    """

    max_tokens: int
    eos: Ends = None
    temperature: float = 1.0
    rows: int = 1024
    min_tokens: int = 0
    stop: Stop | None = None

    @property
    def ends(self) -> bool:
        """Whether a sequence may end before its last token."""
        return self.eos is not None or self.stop is not None

    def live(self, tokens: Tensor) -> Tensor:
        """[..., T] bool: true up to and including the end of every sequence."""
        return live_tokens(tokens, self.eos, self.stop, self.min_tokens)

    def limit(self, logits: Tensor, step: Tensor | int) -> Tensor:
        """Logits [S, V] that the tokens at `step` [S] are drawn from."""
        return forbid_ends(logits, step, self.eos, self.min_tokens)

    def stopped(self, tokens: Tensor, length: int) -> Tensor:
        """[R] bool: whether sequences of `length` tokens, [R, T], are over."""
        if self.stop is None:
            return torch.zeros_like(tokens[:, 0], dtype=torch.bool)
        known = tokens[:, :length].tolist()
        over = [
            stopped_at(row, length - 1, self.stop, self.min_tokens) is not None for row in known
        ]
        return torch.tensor(over, dtype=torch.bool, device=tokens.device)


@dataclass(frozen=True, eq=False)
class Prefixes:
    """R prefixes to complete: the first `step` tokens of a known sequence, then `action`.

    Attributes:
        row: [R] int64: the prompt of each.
        step: [R] int64: the number of known tokens to keep.
        action: [R] int64: the token to take next; -1 draws it.
        known: [N, T] int64: one known sequence per prompt.
    """

    row: Tensor
    step: Tensor
    action: Tensor
    known: Tensor

    @staticmethod
    def bare(row: Tensor, width: int) -> Prefixes:
        """The prompts themselves, without a known token."""
        rows = int(row.max()) + 1
        known = torch.zeros(rows, width, dtype=torch.int64, device=row.device)
        return Prefixes(row, torch.zeros_like(row), torch.full_like(row, -1), known)


@dataclass(frozen=True, eq=False)
class Completions:
    """R completions of T tokens.

    Attributes:
        tokens: [R, T] int64: the prefix and its completion, padded with eos after the
            end.
        log_probs: [R, T]: ln p, at the sampler's temperature, of the tokens after the
            prefix; 0 for the prefix and the padding.
    """

    tokens: Tensor
    log_probs: Tensor

    @staticmethod
    def empty(prefixes: Prefixes, decoding: Decoding) -> Completions:
        """The known tokens alone, then padding."""
        kept = torch.arange(
            decoding.max_tokens, device=prefixes.step.device
        ) < prefixes.step.unsqueeze(-1)
        tokens = prefixes.known[prefixes.row].where(kept, padding(decoding.eos))
        return Completions(tokens, torch.zeros_like(tokens, dtype=torch.float64))


@torch.no_grad()
def complete(
    model: Model,
    prompts: Tensor,
    mask: Tensor | None,
    prefixes: Prefixes,
    decoding: Decoding,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
    record: Sampled | None = None,
) -> Completions:
    """Complete every prefix to max_tokens tokens, or to its end of sequence.

    Args:
        model: the model.
        prompts: [N, P] int64.
        mask: [N, P] bool, true for tokens of the prompt; None where all are.
        prefixes: where to start.
        decoding: how tokens are drawn.
        generator: what draws them.
        noise: replaces the generator, so that a draw depends on its prefix and step
            alone.
        record: takes down the draws of every state, of which there are as many as it
            has room for.
    """
    done = Completions.empty(prefixes, decoding)
    drawing = Drawing(decoding, generator, noise, record)
    order = prefixes.step.argsort(stable=True)
    # carried rows are set aside while a wave plays: half a batch of them, or a whole one where
    # nothing branches later
    share = decoding.rows if bool((prefixes.step == 0).all()) else decoding.rows // 2
    for first in range(0, prompts.shape[0], share):
        some = slice(first, first + share)
        pending = order[(prefixes.row[order] // share) == first // share]
        if pending.shape[0] == 0:
            continue
        births = torch.bincount(prefixes.step[pending], minlength=decoding.max_tokens).tolist()
        queue = list(pending.split(births))
        state = begin(model, prompts[some], None if mask is None else mask[some])
        place = torch.arange(prompts[some].shape[0], device=order.device)
        held = _still_needed(prefixes, queue, Held(state, first + place, place, 0))
        while held is not None:
            held = _wave(model, held, prefixes, queue, drawing, done)
    check_log_probs(done.log_probs)
    return done


def check_log_probs(log_probs: Tensor) -> None:
    """Refuse ln p [R, T] of sampled tokens that no finite logits give."""
    if not bool((finite := log_probs > -torch.inf).all()):
        row, step = (~finite).nonzero()[0].tolist()
        raise NotFiniteError(
            f"The model's logits after {step} tokens of completion {row} are NaN, +inf, or -inf "
            "throughout; they must be finite, or -inf to mask a token."
        )


@dataclass(frozen=True, eq=False)
class Drawing:
    """Draws tokens, and records them if asked to."""

    decoding: Decoding
    generator: torch.Generator | None
    noise: Noise | None
    record: Sampled | None

    def __call__(
        self, logits: Tensor, which: Tensor, step: int, forced: Tensor, ended: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One token per prefix, drawn unless it is forced (not -1), and its ln p: [R,
        V], [R] x 3 -> [R], [R].
        """
        after = padding(self.decoding.eos)
        if logits.shape[0] == 0:
            return forced, forced.double()
        draws = 1 if self.record is None else self.record.tokens.shape[-1]
        if self.noise is None:
            u = token_uniforms(logits.shape[0], draws, logits.device, self.generator)
        else:
            u = self.noise(which, torch.full_like(which, step))
        logits = self.decoding.limit(logits, step)
        log_p = log_probabilities(logits, self.decoding.temperature)
        tokens = inverse(log_p.exp(), u)
        if self.record is not None:
            self.record.tokens[which, step] = torch.where(ended[:, None], after, tokens)
            self.record.log_probs[which, step] = torch.where(
                ended[:, None], 0, log_p.gather(-1, tokens).double()
            )
            self.record.largest[which, step] = torch.where(ended, 0, log_p.amax(-1).double())
        token = torch.where(forced < 0, tokens[:, 0], forced)
        log_prob = log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
        return torch.where(ended, after, token), torch.where(ended, 0, log_prob)


class Held(NamedTuple):
    """Known sequences that still have branches to come."""

    state: Any
    row: Tensor
    """[S], ascending: their prompts."""
    place: Tensor
    """[S]: their rows of the state."""
    step: int


def _still_needed(prefixes: Prefixes, queue: list[Tensor], held: Held) -> Held:
    """Without the sequences that do not branch at its step or later."""
    row = prefixes.row[torch.cat(queue[held.step :])].unique()
    return Held(held.state, row, held.place[torch.searchsorted(held.row, row)], held.step)


def _wave(
    model: Model,
    held: Held,
    prefixes: Prefixes,
    queue: list[Tensor],
    drawing: Drawing,
    done: Completions,
) -> Held | None:
    """Play as many of the queue's prefixes as fit, to the end, writing into `done`;
    return what the others need.

    `queue[t]` holds the prefixes of t known tokens; those that are played leave it.
    """
    decoding = drawing.decoding
    width, eos = decoding.max_tokens, decoding.eos
    state, carried, where, start = held
    playing, later = carried[:0], None
    ended = torch.zeros(0, dtype=torch.bool, device=carried.device)
    for t in range(start, width):
        source = torch.arange(playing.shape[0], device=carried.device) + where.shape[0]
        forced, moved = torch.full_like(playing, -1), False
        if carried.shape[0]:
            room = decoding.rows - playing.shape[0]
            born, queue[t] = queue[t][:room], queue[t][room:]
            source = torch.cat([source, where[torch.searchsorted(carried, prefixes.row[born])]])
            forced = torch.cat([forced, prefixes.action[born]])
            playing, ended = (
                torch.cat([playing, born]),
                torch.cat([ended, torch.zeros_like(born, dtype=torch.bool)]),
            )
            moved = born.shape[0] > 0 or t == start
        token, log_prob = drawing(state.logits[source], playing, t, forced, ended)
        done.tokens[playing, t], done.log_probs[playing, t] = token, log_prob
        ended = ended | is_end(token, eos)
        if decoding.stop is not None:
            ended = ended | decoding.stopped(done.tokens[playing], t + 1)
        if carried.shape[0]:
            more = any(some.shape[0] for some in queue[t:])
            full = queue[t].shape[0] > 0 or playing.shape[0] + carried.shape[0] > decoding.rows
            # at the start the state holds nothing else, and the batch goes on with a copy
            if more and full:
                rest = Held(state, carried, where, t)
                if t > start:
                    rest = Held(
                        model.select(state, where), carried, torch.arange(len(where)).to(where), t
                    )
                later = _still_needed(prefixes, queue, rest)
            if full or not more:
                carried, where, moved = carried[:0], where[:0], True
        if t == width - 1:
            break
        if decoding.ends and (t + 1) % LOOK_EVERY == 0:
            alive = (~ended).nonzero().squeeze(-1)
            if alive.shape[0] <= WORTH * ended.shape[0]:
                playing, ended, token, source, moved = (
                    playing[alive],
                    ended[alive],
                    token[alive],
                    source[alive],
                    True,
                )
        if carried.shape[0]:
            source, token = (
                torch.cat([where, source]),
                torch.cat([prefixes.known[carried, t], token]),
            )
            where = torch.arange(carried.shape[0], device=carried.device)
        if source.shape[0] == 0:
            break
        state = model.step(model.select(state, source) if moved else state, token)
    return later
