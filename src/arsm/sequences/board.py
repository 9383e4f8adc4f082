"""The board of slots: the rows, their step, and a CUDA graph of it per number of rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from arsm.sequences.decode import Decoding
from arsm.sequences.draws import Sampled, draw_tokens
from arsm.sequences.ends import Ends, forbid_ends, is_end, stopped_at
from arsm.sequences.model import Decode, SlotModel

WARM_UP = 3
"""Steps before a capture, in which libraries allocate and compile what they need."""


@dataclass(eq=False)
class Rows:
    """The slots, each tensor of static shape; a graph for fewer slots uses the first
    rows of the same tensors.
    """

    token: Tensor
    """[S] int64: the token to feed next."""
    column: Tensor
    """[S] int64: where its keys and values go."""
    first: Tensor
    """[S] int64: the first column of its prompt; padding comes before."""
    index: Tensor
    """[S] int64: its place in the completion; -1 for the last token of the prompt."""
    ended: Tensor
    """[S] bool: the row has no more tokens to draw. It is computed all the same, and
    changes nothing.
    """
    owner: Tensor
    """[S] int64: which start the row plays; -1 for none."""
    uniform: Tensor
    """[S, n] float64: the noise of the next step."""
    tokens: Tensor
    """[S, T + 1, n] int64: the draws; those behind `index` are not the sequence's."""
    log_probs: Tensor
    """[S, T + 1, n]."""
    largest: Tensor
    """[S, T + 1]."""

    @staticmethod
    def idle(rows: int, width: int, draws: int, dtype: torch.dtype, device: torch.device) -> Rows:
        """Slots without an owner, for completions of `width` tokens."""
        numbers = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)]
        return Rows(
            *numbers,
            ended=torch.ones(rows, dtype=torch.bool, device=device),
            owner=torch.full((rows,), -1, device=device),
            uniform=torch.zeros(rows, draws, dtype=torch.float64, device=device),
            # one column more: a row that has ended writes behind its last token
            tokens=torch.zeros(rows, width + 1, draws, dtype=torch.int64, device=device),
            log_probs=torch.zeros(rows, width + 1, draws, dtype=dtype, device=device),
            largest=torch.zeros(rows, width + 1, dtype=dtype, device=device),
        )

    def up_to(self, size: int) -> Rows:
        """The first rows, as views."""
        return Rows(**{field.name: getattr(self, field.name)[:size] for field in fields(self)})

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy some rows over others."""
        for field in fields(self):
            values = getattr(self, field.name)
            values[target] = values[source]


def step(decode: Decode, rows: Rows, eos: Ends, temperature: float, min_tokens: int = 0) -> None:
    """Feed every row's token, draw the next ones from `rows.uniform` and write them down."""
    width = rows.tokens.shape[1] - 1
    draws = rows.tokens.shape[2]
    # every line works on all rows alike: the host knows nothing of them, and a graph replays it
    logits = decode(rows.token, rows.column, rows.first)
    logits = forbid_ends(logits, rows.index + 1, eos, min_tokens)
    drawn = draw_tokens(logits, rows.uniform, temperature)
    # a row that has ended writes behind its last token, where nobody reads
    place = (rows.index + 1).unsqueeze(-1)
    rows.tokens.scatter_(1, place.unsqueeze(-1).expand(-1, 1, draws), drawn.tokens.unsqueeze(1))
    log_probs = drawn.log_probs.to(rows.log_probs.dtype)
    rows.log_probs.scatter_(1, place.unsqueeze(-1).expand(-1, 1, draws), log_probs.unsqueeze(1))
    rows.largest.scatter_(1, place, drawn.largest.to(rows.largest.dtype).unsqueeze(1))

    token = drawn.tokens[:, 0]
    # in place: a captured step reads and writes the same memory at every replay
    rows.index.add_((~rows.ended).long())
    ended = rows.ended | (rows.index == width - 1) | is_end(token, eos)
    # The last token is never fed, as its column may not exist: a row that has ended feeds again
    # what it fed before, and its cache stays that of its sequence.
    rows.token.copy_(torch.where(ended, rows.token, token))
    rows.column.add_((~ended).long())
    rows.ended.copy_(ended)


@dataclass(frozen=True, eq=False)
class Starts:
    """R sequences to be drawn: each feeds its token at index, whatever came before is
    in the known sequence's cache.
    """

    row: Tensor
    """[R]: the known sequence."""
    index: Tensor
    """[R]: place of the token in the completion; -1 for the last token of the prompt."""
    token: Tensor
    """[R]."""
    name: Tensor
    """[R]: what the noise knows them by."""

    def some(self, which: Tensor) -> Starts:
        """The starts `which` [r]."""
        return Starts(self.row[which], self.index[which], self.token[which], self.name[which])


@dataclass(eq=False)
class Playing:
    """Starts, and what they have drawn."""

    starts: Starts
    done: Sampled
    """[R, T, n]."""
    first: int
    """The rows' owners have the numbers `first`, `first` + 1, ..."""

    def owns(self, rows: Rows) -> Tensor:
        """[S] bool: the rows that play one of the starts."""
        return (rows.owner >= self.first) & (rows.owner < self.first + self.starts.row.shape[0])

    def write(self, rows: Rows) -> None:
        """Take down what those of the rows that have ended drew, and release them."""
        ended = (rows.ended & self.owns(rows)).nonzero().squeeze(-1)
        if ended.shape[0] == 0:
            return
        # a branch's row has n draws per state, of which it needs the first
        which = rows.owner[ended] - self.first
        width, draws = self.done.tokens.shape[1:]
        step = torch.arange(width, device=ended.device)
        own = (step > self.starts.index[which].unsqueeze(-1)) & (
            step <= rows.index[ended].unsqueeze(-1)
        )
        for values, drawn in (
            (self.done.tokens, rows.tokens),
            (self.done.log_probs, rows.log_probs),
        ):
            found = drawn[ended, :width, :draws].to(values.dtype)
            # what came before the start was there already, and stays
            values[which] = torch.where(own.unsqueeze(-1), found, values[which])
        largest = rows.largest[ended, :width].to(self.done.largest.dtype)
        self.done.largest[which] = torch.where(own, largest, self.done.largest[which])
        rows.owner[ended] = -1

    def stop(self, rows: Rows, before: Tensor, decoding: Decoding) -> None:
        """End the rows that are over by `decoding.stop` after a token that they drew since
        their indices `before` [S]; what they drew later is dropped.
        """
        assert decoding.stop is not None
        busy = self.owns(rows).nonzero().squeeze(-1)
        which = rows.owner[busy] - self.first
        width = self.done.tokens.shape[1]
        # a branch's first tokens are known, and those after its start are drawn
        drawn = torch.arange(width, device=busy.device) > self.starts.index[which].unsqueeze(-1)
        tokens = torch.where(drawn, rows.tokens[busy, :width, 0], self.done.tokens[which, :, 0])
        spans = torch.stack([before[busy] + 1, rows.index[busy]], -1).tolist()
        for row, sequence, (first, last) in zip(busy.tolist(), tokens.tolist(), spans, strict=True):
            end = stopped_at(sequence[: last + 1], first, decoding.stop, decoding.min_tokens)
            if end is not None:
                rows.index[row] = end
                rows.ended[row] = True


@dataclass
class Tally:
    """Work that was done, for benchmarks."""

    steps: int = 0
    row_steps: int = 0
    """Rows computed, idle ones included."""
    looks: int = 0
    starts: int = 0
    ahead: int = 0
    """Starts that branched off sequences while these were sampled."""
    captures: int = 0
    capture_seconds: float = 0.0
    fill_seconds: float = 0.0
    """Waits for the device only if `Slots.timed` is set."""


class Board:
    """The rows of one kind of decoding, and a function for their step per number of rows."""

    def __init__(
        self,
        model: SlotModel,
        cache: Tensor,
        decoding: Decoding,
        draws: int,
        captured: bool,
        pool: Any,
    ) -> None:
        # ln p in float32 also where the model samples in bfloat16
        wide = torch.promote_types(cache.dtype, torch.float32)
        self.rows = Rows.idle(cache.shape[2], decoding.max_tokens, draws, wide, cache.device)
        self._model = model
        self._cache = cache
        self._decoding = decoding
        self._captured = captured
        self._pool = pool
        self._steps: dict[int, Callable[[], None]] = {}

    def step(self, size: int, tally: Tally) -> Callable[[], None]:
        """One step of the first `size` rows, made on first use."""
        if size not in self._steps:
            begun = time.perf_counter()
            self._steps[size] = self._made(size)
            tally.captures += 1
            tally.capture_seconds += time.perf_counter() - begun
        return self._steps[size]

    def _made(self, size: int) -> Callable[[], None]:
        rows = self.rows.up_to(size)
        decoding = self._decoding
        decode: Decode = self._model.decoder(self._cache[:, :, :size])

        def eager() -> None:
            step(decode, rows, decoding.eos, decoding.temperature, decoding.min_tokens)

        return self._graph(eager, rows) if self._captured else eager

    def _graph(self, eager: Callable[[], None], rows: Rows) -> Callable[[], None]:
        """A CUDA graph of the step; the step itself, with a warning, if it cannot be captured."""
        # Rows that have ended change nothing, and what live ones store in the cache here they store
        # again afterwards.
        ended = rows.ended.clone()
        rows.ended.fill_(True)
        try:
            # on a stream of its own, as PyTorch asks of the steps before a capture
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    eager()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                eager()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._captured = False
            warnings.warn(
                f"Steps run without a CUDA graph, which is slower: capturing one failed ({error}).",
                stacklevel=2,
            )
            return eager
        finally:
            rows.ended.copy_(ended)

        def replay() -> None:
            graph.replay()

        # the graph reads tensors that only the captured step holds: masks' columns, rows of the
        # cache
        replay.step = eager  # pyright: ignore[reportFunctionMemberAccess]
        return replay
