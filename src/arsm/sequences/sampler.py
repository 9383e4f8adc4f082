"""The sampler: this process, by slots that serve every call, or an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from arsm.sequences.ahead import PlayedAhead
from arsm.sequences.checks import checked_completions
from arsm.sequences.decode import Completions, Decoding, Prefixes
from arsm.sequences.draws import Sampled, draw_beside
from arsm.sequences.engines import Engine
from arsm.sequences.memory import limited_by
from arsm.sequences.model import Model
from arsm.sequences.slots import Slots
from arsm.sequences.waves import Waves, decoder

LEAST_SLOTS = 64
"""Slots are kept from call to call, for at least this many rows."""
AHEAD = 3
"""Slots for branches that are played ahead, per sequence. Branches that find none are played
afterwards, with a cache that is filled once more, and as many steps again.
"""
DECODERS: WeakKeyDictionary[object, dict[tuple[torch.dtype | None, int], Slots | Waves]] = (
    WeakKeyDictionary()
)
"""Slots by model, then by type and rows: their buffers and captured steps serve every
later call.
"""


@dataclass(frozen=True, eq=False)
class TokenSampler:
    """This process, or an engine."""

    model: Model
    decoding: Decoding
    engine: Engine | None
    vocabulary: int
    dtype: torch.dtype | None
    generator: torch.Generator | None

    def sample(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        row: Tensor,
        whole: tuple[Tensor, Tensor | None],
        draws: int,
        micro_batch: int,
        *,
        ahead: bool = False,
    ) -> tuple[Sampled, Tensor, PlayedAhead | None]:
        """One sequence for each entry of `row`, the draws of its states, the sampler's
        own ln p of it, and the branches that were played meanwhile.

        Args:
            prompts: [N, P] int64.
            mask: [N, P] bool, or None.
            row: [M] int64: the prompt of every sequence.
            whole: prompts and mask of every sequence, [M, P].
            draws: n, the sequence's own token included.
            micro_batch: maximum sequences per pass over a whole vocabulary.
            ahead: whether branches with all other draws will be wanted.
        """
        # out of memory is answered with the batch size to lower
        if self.engine is None:
            with self._limited("sampling"):
                return self._by_decoder(prompts, mask, row, draws, ahead)
        done = self._by_engine(prompts, mask, Prefixes.bare(row, self.decoding.max_tokens))
        # an engine draws one token per state: the others are drawn here
        return self.beside(whole, done.tokens, draws, micro_batch), done.log_probs, None

    def _by_decoder(
        self, prompts: Tensor, mask: Tensor | None, row: Tensor, draws: int, ahead: bool
    ) -> tuple[Sampled, Tensor, PlayedAhead | None]:
        # branches play beside their sequences: in slots of their own, if possible
        decoder, decoding = self._chosen((1 + AHEAD if ahead else 1) * row.shape[0])
        options = prompts, mask, row, decoding, draws, self.generator
        if ahead and isinstance(decoder, Slots):
            sampled, played = decoder.sample_ahead(*options)
            return sampled, sampled.log_probs[..., 0], played
        sampled = decoder.sample(*options)
        return sampled, sampled.log_probs[..., 0], None

    def beside(
        self, whole: tuple[Tensor, Tensor | None], tokens: Tensor, draws: int, micro_batch: int
    ) -> Sampled:
        """Draws in the states of sequences that somebody else drew."""
        with limited_by("micro_batch", micro_batch, "drawing beside given completions"):
            return draw_beside(
                self.model,
                *whole,
                tokens,
                self.decoding.live(tokens),
                draws,
                self.decoding.limit,
                self.decoding.temperature,
                micro_batch,
                self.generator,
            )

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        ahead: PlayedAhead | None = None,
    ) -> Completions:
        """Complete every prefix that was not played ahead."""
        if ahead is not None:
            # found by row, step and token, as a strategy asks in an order of its own
            place = ahead.places(prefixes)
            missing = (place < 0).nonzero().squeeze(-1)
            rest = self.complete(prompts, mask, prefixes.some(missing))
            return ahead.completions.joined(place, missing, rest)
        if self.engine is not None:
            return self._by_engine(prompts, mask, prefixes)
        with self._limited("playing branches"):
            decoder, decoding = self._chosen(prefixes.row.shape[0])
            return decoder.complete(prompts, mask, prefixes, decoding, self.generator)

    @contextmanager
    def _limited(self, doing: str) -> Iterator[None]:
        try:
            with limited_by("rows", self.decoding.rows, doing):
                yield
        except torch.OutOfMemoryError:
            # a later call with fewer rows would use slots that were made for more
            DECODERS.pop(self.model, None)
            raise

    def _by_engine(self, prompts: Tensor, mask: Tensor | None, prefixes: Prefixes) -> Completions:
        assert self.engine is not None
        done = self.engine.complete(prompts, mask, prefixes, self.decoding, self.generator)
        return checked_completions(done, self.vocabulary)

    def slots(self, count: int) -> Slots | Waves:
        """The fewest slots that are there and hold so many sequences, or new ones."""
        made = DECODERS.setdefault(self.model, {})
        rows = self._rows(count)
        # larger slots serve as well: a call uses no more of them than it needs
        large = [size for dtype, size in made if dtype == self.dtype and size >= rows]
        key = (self.dtype, min(large, default=rows))
        if key not in made:
            made[key] = decoder(self.model, rows, dtype=self.dtype)
        return made[key]

    def _chosen(self, count: int) -> tuple[Slots | Waves, Decoding]:
        """Slots for so many sequences, and how they decode."""
        found = self.slots(count)
        if isinstance(found, Waves):
            return found, self.decoding
        # A step draws noise for all of its rows: a seed would give other tokens in the larger slots
        # of an earlier call.
        return found, replace(self.decoding, rows=self._rows(count))

    def _rows(self, count: int) -> int:
        """No more slots than sequences, by powers of 2, so that few sizes are ever made."""
        power = 1 << (count - 1).bit_length() if count else 1
        return min(self.decoding.rows, max(LEAST_SLOTS, power))
