"""Who samples: this process, by slots that serve every call, or an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from arsm.sequences.checks import checked_completions
from arsm.sequences.decode import Completions, Decoding, Prefixes
from arsm.sequences.draws import Sampled, draw_beside
from arsm.sequences.engines import Engine
from arsm.sequences.memory import limited_by
from arsm.sequences.model import Model
from arsm.sequences.slots import Slots, Waves, decoder

LEAST_SLOTS = 64
"""Slots are kept from call to call, for at least this many rows."""
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
    ) -> tuple[Sampled, Tensor]:
        """One sequence for each entry of `row`, the draws of its states, and the
        sampler's own ln p of it.
        """
        if self.engine is None:
            with self._limited("sampling"):
                slots = self.slots(row.shape[0])
                sampled = slots.sample(prompts, mask, row, self.decoding, draws, self.generator)
            return sampled, sampled.log_probs[..., 0]
        done = self._by_engine(prompts, mask, Prefixes.bare(row, self.decoding.max_tokens))
        # an engine draws one token per state: the others are drawn here
        return self.beside(whole, done.tokens, draws, micro_batch), done.log_probs

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

    def complete(self, prompts: Tensor, mask: Tensor | None, prefixes: Prefixes) -> Completions:
        """Complete every prefix."""
        if self.engine is not None:
            return self._by_engine(prompts, mask, prefixes)
        with self._limited("playing branches"):
            slots = self.slots(prefixes.row.shape[0])
            return slots.complete(prompts, mask, prefixes, self.decoding, self.generator)

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
        # no more slots than there are sequences, by powers of 2, so that few sizes are ever made
        power = 1 << (count - 1).bit_length() if count else 1
        rows = min(self.decoding.rows, max(LEAST_SLOTS, power))
        large = [size for dtype, size in made if dtype == self.dtype and size >= rows]
        key = (self.dtype, min(large, default=rows))
        if key not in made:
            made[key] = decoder(self.model, rows, dtype=self.dtype)
        return made[key]
