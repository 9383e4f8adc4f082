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
    """The rules by which tokens are drawn.

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
        # without either, nobody needs to look at the rows before their last token
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
        # the function is the user's and reads lists
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

    def some(self, which: Tensor) -> Prefixes:
        """The prefixes `which` [r]."""
        return Prefixes(self.row[which], self.step[which], self.action[which], self.known)

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
        # rows that nobody plays are complete as they are: ended at once, with padding behind
        tokens = prefixes.known[prefixes.row].where(kept, padding(decoding.eos))
        return Completions(tokens, torch.zeros_like(tokens, dtype=torch.float64))

    def joined(self, place: Tensor, missing: Tensor, rest: Completions) -> Completions:
        """The completions at place [R], with the rest [m] where they are missing [m]."""
        # an index into no rows would be out of range
        if self.tokens.shape[0] == 0:
            return rest
        chosen = place.clamp_min(0)
        return Completions(
            self.tokens[chosen].index_copy(0, missing, rest.tokens),
            self.log_probs[chosen].index_copy(0, missing, rest.log_probs),
        )


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
    # the earliest first: a carried sequence is fed forward only, never back
    order = prefixes.step.argsort(stable=True)
    # carried rows are set aside while a wave plays: half a batch of them, or a whole one where
    # nothing branches later
    share = decoding.rows if bool((prefixes.step == 0).all()) else decoding.rows // 2
    for first in range(0, prompts.shape[0], share):
        some = slice(first, first + share)
        pending = order[(prefixes.row[order] // share) == first // share]
        if pending.shape[0] == 0:
            continue
        # lists by step on the host: the loop over steps then asks the device nothing
        births = torch.bincount(prefixes.step[pending], minlength=decoding.max_tokens).tolist()
        queue = list(pending.split(births))
        # one prefill per prompt, however many prefixes continue it
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
        # rows that have ended stay in the batch until enough of them can leave together
        after = padding(self.decoding.eos)
        if logits.shape[0] == 0:
            return forced, forced.double()
        draws = 1 if self.record is None else self.record.tokens.shape[-1]
        if self.noise is None:
            u = token_uniforms(logits.shape[0], draws, logits.device, self.generator)
        else:
            u = self.noise(which, torch.full_like(which, step))
        logits = self.decoding.limit(logits, step)
        # ln p first and then p: a token of tiny probability keeps its exact ln p
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
    wave = _Wave(model, held, prefixes, queue, drawing, done)
    for t in range(held.step, drawing.decoding.max_tokens):
        wave.begin_step()
        wave.take_branches(t)
        wave.draw(t)
        wave.hold_back(t)
        if t == drawing.decoding.max_tokens - 1 or not wave.advance(t):
            break
    return wave.later


class _Wave:
    """A batch of rows at one step: first the known sequences that are carried along, then
    the prefixes that are being played.
    """

    def __init__(
        self,
        model: Model,
        held: Held,
        prefixes: Prefixes,
        queue: list[Tensor],
        drawing: Drawing,
        done: Completions,
    ) -> None:
        self.model = model
        self.prefixes = prefixes
        self.queue = queue
        self.drawing = drawing
        self.done = done
        self.start = held.step
        self.state = held.state
        self.later: Held | None = None
        """The state that the prefixes without room will need."""
        self.carried = held.row
        """[S]: the known sequences, whose rows of the state are `where` [S]."""
        self.where = held.place
        self.playing = held.row[:0]
        """[R]: the prefixes that are played."""
        self.ended = torch.zeros(0, dtype=torch.bool, device=held.row.device)
        """[R]: which of them have ended."""

    def begin_step(self) -> None:
        """Every row stays where it is, and nothing is known of its next token."""
        rows = torch.arange(self.playing.shape[0], device=self.playing.device)
        self.source = rows + self.where.shape[0]
        """[R]: the row of the state that each played prefix goes on from."""
        self.forced = torch.full_like(self.playing, -1)
        """[R]: the token that a prefix must take; -1 draws it."""
        self.moved = False
        """Whether rows must be selected before the next step."""

    def take_branches(self, t: int) -> None:
        """Add the prefixes of t known tokens that fit; each goes on from its sequence's row."""
        if not self.carried.shape[0]:
            return
        # carried rows do not count: `hold_back` sets them aside when the batch is full
        room = self.drawing.decoding.rows - self.playing.shape[0]
        born = self.queue[t][:room]
        self.queue[t] = self.queue[t][room:]
        # `carried` ascends, so that a search finds each prefix's sequence
        place = self.where[torch.searchsorted(self.carried, self.prefixes.row[born])]
        self.source = torch.cat([self.source, place])
        self.forced = torch.cat([self.forced, self.prefixes.action[born]])
        self.playing = torch.cat([self.playing, born])
        self.ended = torch.cat([self.ended, torch.zeros_like(born, dtype=torch.bool)])
        self.moved = born.shape[0] > 0 or t == self.start

    def draw(self, t: int) -> None:
        """Draw and write one token per prefix."""
        decoding = self.drawing.decoding
        logits = self.state.logits[self.source]
        self.token, log_prob = self.drawing(logits, self.playing, t, self.forced, self.ended)
        # written at once: a row that leaves the batch has nothing more to hand over
        self.done.tokens[self.playing, t] = self.token
        self.done.log_probs[self.playing, t] = log_prob
        self.ended = self.ended | is_end(self.token, decoding.eos)
        if decoding.stop is not None:
            tokens = self.done.tokens[self.playing]
            self.ended = self.ended | decoding.stopped(tokens, t + 1)

    def hold_back(self, t: int) -> None:
        """Set the known sequences aside when the batch is full, or drop them when nothing
        branches off them any more.
        """
        if not self.carried.shape[0]:
            return
        more = any(some.shape[0] for some in self.queue[t:])
        rows = self.playing.shape[0] + self.carried.shape[0]
        full = self.queue[t].shape[0] > 0 or rows > self.drawing.decoding.rows
        if more and full:
            self.later = _still_needed(self.prefixes, self.queue, self._set_aside(t))
        # carrying on a sequence that has no more branches would be wasted steps
        if full or not more:
            self.carried = self.carried[:0]
            self.where = self.where[:0]
            self.moved = True

    def _set_aside(self, t: int) -> Held:
        """The known sequences at step t."""
        # at the start the state holds nothing else, and the batch goes on with a copy
        if t == self.start:
            return Held(self.state, self.carried, self.where, t)
        kept = self.model.select(self.state, self.where)
        return Held(kept, self.carried, torch.arange(len(self.where)).to(self.where), t)

    def advance(self, t: int) -> bool:
        """Feed the tokens to the model; False if no row is left."""
        if self.drawing.decoding.ends and (t + 1) % LOOK_EVERY == 0:
            self._leave_out_ended()
        # carried sequences come first, and are fed the tokens that are known
        source = self.source
        token = self.token
        if self.carried.shape[0]:
            source = torch.cat([self.where, source])
            token = torch.cat([self.prefixes.known[self.carried, t], token])
            self.where = torch.arange(self.carried.shape[0], device=self.carried.device)
        if source.shape[0] == 0:
            return False
        # selecting copies the whole cache: not where every row stays in its place
        state = self.model.select(self.state, source) if self.moved else self.state
        self.state = self.model.step(state, token)
        return True

    def _leave_out_ended(self) -> None:
        """Make the batch smaller if enough of its rows have ended."""
        alive = (~self.ended).nonzero().squeeze(-1)
        if alive.shape[0] > WORTH * self.ended.shape[0]:
            return
        self.playing = self.playing[alive]
        self.ended = self.ended[alive]
        self.token = self.token[alive]
        self.source = self.source[alive]
        self.moved = True
