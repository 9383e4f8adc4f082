"""Decoding in slots: S rows of static shape, each at its own position, refilled from a queue.

A slot holds one sequence. When it ends, the slot takes the next start of the queue,
earliest step first: its whole row of the cache is copied from the cache of the known
sequence that it continues. One step (forward, sampling, writing) is the same function
for every row and every moment, so that a GPU captures it once as a CUDA graph and
replays it. The host looks at the rows every few steps only. When the queue is empty,
the number of slots is halved as sequences end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from arsm.sequences.decode import Completions, Decoding, Prefixes, check_log_probs, complete
from arsm.sequences.draws import Noise, Sampled, draw_tokens
from arsm.sequences.ends import Ends, all_ends, forbid_ends, is_end, stopped_at
from arsm.sequences.model import Decode, Model, SlotModel, SlotsRefused

ALIGNED = 8
"""Columns of a cache are a multiple of this: fused attention needs its masks aligned."""
LEAST_CAPTURED = 32
"""A GPU's step takes as long with fewer rows: no graph is captured for them."""
WARM_UP = 3
"""Steps before a capture, in which libraries allocate and compile what they need."""
COPIED = 128
"""Most rows copied at once: a copy holds them a second time."""
PREFILLED = 1 << 16
"""Most tokens, padding included, per call of `fill`."""

Compiled = Literal["forward", "step"]
"""What `torch.compile` gets: the model alone, or with it sampling and writing."""


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
    width, draws = rows.tokens.shape[1] - 1, rows.tokens.shape[2]
    logits = decode(rows.token, rows.column, rows.first)
    logits = forbid_ends(logits, rows.index + 1, eos, min_tokens)
    drawn = draw_tokens(logits, rows.uniform, temperature)
    # a row that has ended writes behind its last token, where nobody reads
    place = (rows.index + 1).unsqueeze(-1)
    rows.tokens.scatter_(1, place.unsqueeze(-1).expand(-1, 1, draws), drawn.tokens.unsqueeze(1))
    log_probs = drawn.log_probs.to(rows.log_probs.dtype)
    rows.log_probs.scatter_(1, place.unsqueeze(-1).expand(-1, 1, draws), log_probs.unsqueeze(1))
    rows.largest.scatter_(1, place, drawn.largest.to(rows.largest.dtype).unsqueeze(1))

    rows.token.copy_(torch.where(rows.ended, rows.token, drawn.tokens[:, 0]))
    rows.index.add_((~rows.ended).long())
    ended = rows.ended | (rows.index == width - 1) | is_end(rows.token, eos)
    # the last token is never fed: its column may not exist
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


@dataclass
class Tally:
    """Work that was done, for benchmarks."""

    steps: int = 0
    row_steps: int = 0
    """Rows computed, idle ones included."""
    looks: int = 0
    starts: int = 0
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
        compiled: Compiled | None,
        captured: bool,
        pool: Any,
    ) -> None:
        wide = torch.promote_types(cache.dtype, torch.float32)
        self.rows = Rows.idle(cache.shape[2], decoding.max_tokens, draws, wide, cache.device)
        self._model = model
        self._cache = cache
        self._decoding = decoding
        self._compiled = compiled
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
        rows, eos, temperature = (
            self.rows.up_to(size),
            self._decoding.eos,
            self._decoding.temperature,
        )
        decode: Decode = self._model.decoder(self._cache[:, :, :size])
        run = step
        # fewer rows are for the last sequences of a call: compiling takes longer than they do
        if size == self._cache.shape[2] and self._compiled is not None:
            if self._compiled == "forward":
                decode = torch.compile(decode, fullgraph=True, dynamic=False)
            else:
                run = torch.compile(step, fullgraph=True, dynamic=False)

        def eager() -> None:
            run(decode, rows, eos, temperature, self._decoding.min_tokens)

        return self._graph(eager, rows) if self._captured else eager

    def _graph(self, eager: Callable[[], None], rows: Rows) -> Callable[[], None]:
        """A CUDA graph of the step; the step itself, with a warning, if it cannot be captured."""
        # Rows that have ended change nothing, and what live ones store in the cache here they store
        # again afterwards.
        ended = rows.ended.clone()
        rows.ended.fill_(True)
        try:
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


@dataclass(frozen=True, eq=False)
class _Job:
    """Starts to play to the end."""

    known: Tensor
    """[N, prompt + ...]: the sequences that they branch off."""
    mask: Tensor | None
    """[N, prompt] bool."""
    prompt: int
    """Columns of the prompts."""
    starts: Starts
    names: Tensor
    """[R]: what the noise knows the starts by."""
    done: Sampled
    """Takes what is played."""
    decoding: Decoding
    draws: int
    """Draws per state."""
    generator: torch.Generator | None
    noise: Noise | None

    def draw_noise(self, rows: Rows) -> None:
        """The uniform numbers of one step."""
        if self.noise is None:
            rows.uniform.uniform_(generator=self.generator)
            return
        # rows without an owner draw too, and nobody reads it
        owner = rows.owner.clamp_min(0)
        rows.uniform.copy_(self.noise(self.names[owner], rows.index + 1))


class _Source(NamedTuple):
    """The caches of some known sequences."""

    begin: int
    """The number of known sequences before them."""
    store: Tensor
    first: Tensor
    """[n]: their first columns."""


class Slots:
    """Samples and completes sequences in slots; keep it, for its buffers and graphs
    serve every later call.
    """

    def __init__(
        self,
        model: SlotModel,
        rows: int = 1024,
        *,
        look_every: int = 4,
        known: int = 1024,
        compiled: Compiled | None = None,
        captured: bool | None = None,
    ) -> None:
        """Make slots.

        Args:
            model: the model, such as `Transformers(...).slots()`.
            rows: S, the most rows per step.
            look_every: steps between two looks at which rows have ended: every look
                waits for the device.
            known: most known sequences whose caches are held beside those of the slots.
            compiled: what `torch.compile` gets, for steps of all rows; it takes a
                minute and pays in long runs.
            captured: whether a step is a CUDA graph; by default on a GPU.
        """
        for name, value in {"rows": rows, "look_every": look_every, "known": known}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, but is {value!r}.")
        self.model = model
        self.rows = rows
        self.look_every = look_every
        self.known = known
        self.compiled: Compiled | None = compiled
        self.captured = captured
        self.tally = Tally()
        self.timed = False
        self._cache: Tensor | None = None
        self._boards: dict[Any, Board] = {}
        self._weights: list[int] = []
        self._pool: Any = None

    @torch.no_grad()
    def sample(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        row: Tensor,
        decoding: Decoding,
        draws: int = 1,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> Sampled:
        """Sample one sequence per entry of `row`, and n draws from each of its states.

        Args:
            prompts: [N, P] int64.
            mask: [N, P] bool, true for tokens of the prompt; padding comes first. None
                where all are tokens.
            row: [R] int64: the prompt of each sequence.
            decoding: how tokens are drawn.
            draws: n, the sequence's own token included.
            generator: what draws them.
            noise: replaces the generator, so that a draw depends on its sequence and
                step alone.
        """
        done = Sampled.empty(row.shape[0], decoding.max_tokens, draws, decoding.eos, prompts.device)
        starts = Starts(row, torch.full_like(row, -1), prompts[row, -1])
        self._play(
            _Job(
                known=prompts,
                mask=mask,
                prompt=prompts.shape[1],
                starts=starts,
                names=torch.arange(row.shape[0], device=row.device),
                done=done,
                decoding=decoding,
                draws=draws,
                generator=generator,
                noise=noise,
            )
        )
        return done

    @torch.no_grad()
    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> Completions:
        """Complete every prefix, like `arsm.sequences.complete`; ln p of a given action
        is left at 0.
        """
        completions = Completions.empty(prefixes, decoding)
        given = prefixes.action >= 0
        index = torch.where(given, prefixes.step, prefixes.step - 1)
        before = torch.cat([prompts[:, -1:], prefixes.known], -1)[prefixes.row, prefixes.step]
        token = torch.where(given, prefixes.action, before)
        which = torch.arange(given.shape[0], device=given.device)
        completions.tokens[which[given], prefixes.step[given]] = prefixes.action[given]

        # an action that ends its sequence needs no forward
        ends = (index == decoding.max_tokens - 1) | (given & is_end(prefixes.action, decoding.eos))
        for one in (given & ~ends).nonzero().squeeze(-1).tolist() if decoding.stop else ():
            length = int(prefixes.step[one]) + 1
            ends[one] = decoding.stopped(completions.tokens[one : one + 1], length)[0]
        going = (~ends).nonzero().squeeze(-1)
        starts = Starts(prefixes.row[going], index[going], token[going])
        done = Sampled(
            completions.tokens[going].unsqueeze(-1),
            completions.log_probs[going].unsqueeze(-1),
            torch.zeros_like(completions.log_probs[going]),
        )
        whole = torch.cat([prompts, prefixes.known.to(prompts)], -1)
        self._play(
            _Job(
                known=whole,
                mask=mask,
                prompt=prompts.shape[1],
                starts=starts,
                names=going,
                done=done,
                decoding=decoding,
                draws=1,
                generator=generator,
                noise=noise,
            )
        )
        completions.tokens[going] = done.tokens.squeeze(-1)
        completions.log_probs[going] = done.log_probs.squeeze(-1)
        return completions

    def _play(self, job: _Job) -> None:
        """Play all starts to the end."""
        starts = job.starts
        if starts.row.shape[0] == 0:
            return
        # the earliest branches first: they play longest
        order = starts.index.argsort(stable=True)
        # weights have the type that they are sampled in
        autocast = torch.autocast(job.known.device.type, enabled=False)
        with self.model.decoding(), autocast:
            width = job.prompt + job.decoding.max_tokens - 1
            board = self._board(width, job.decoding, job.draws)
            for begin in range(0, job.known.shape[0], self.known):
                queue = order[starts.row[order] // self.known == begin // self.known]
                if queue.shape[0]:
                    self._group(board, queue, job, self._read(job, begin))
        check_log_probs(job.done.log_probs[..., 0])

    def _read(self, job: _Job, begin: int) -> _Source:
        """Fill the cache of some known sequences, from `begin` on, as far as any start needs."""
        some = slice(begin, begin + self.known)
        filled = job.prompt + int(job.starts.index.max())
        padding = None if job.mask is None else job.mask[some]
        store, first = self._filled(job.known[some, :filled], padding, job.prompt)
        return _Source(begin, store, first)

    def _refill(
        self, board: Board, job: _Job, source: _Source, rows: Tensor, which: Tensor
    ) -> None:
        """Let the starts `which` [R] play in the rows [R]."""
        starts = job.starts
        place = starts.row[which] - source.begin
        # whole rows: what an earlier owner left behind must not be read
        _copy_rows(source.store, place, self._held(), rows)
        board.rows.token[rows] = starts.token[which]
        board.rows.column[rows] = starts.index[which] + job.prompt
        board.rows.first[rows] = source.first[place]
        board.rows.index[rows] = starts.index[which]
        board.rows.owner[rows] = which
        board.rows.ended[rows] = False
        self.tally.starts += which.shape[0]

    def _group(self, board: Board, queue: Tensor, job: _Job, source: _Source) -> None:
        """Play a queue of starts to the end."""
        size = self._fitting(queue.shape[0])
        playing = min(size, queue.shape[0])
        every = torch.arange(playing, device=queue.device)
        self._refill(board, job, source, every, queue[:playing])
        queue = queue[playing:]
        most = self.look_every
        while playing:
            rows = self._run_steps(board, job, size, most)
            ended = (rows.ended & (rows.owner >= 0)).nonzero().squeeze(-1)
            if ended.shape[0]:
                _write(rows, ended, job.starts, job.done)
                more = min(ended.shape[0], queue.shape[0])
                if more:
                    self._refill(board, job, source, ended[:more], queue[:more])
                queue = queue[more:]
                playing -= ended.shape[0] - more
            most = self.look_every
            if not queue.shape[0] and playing:
                size = self._shrunk(board, size, playing)
                most = max(1, min(most, _longest(rows)))

    def _run_steps(self, board: Board, job: _Job, size: int, steps: int) -> Rows:
        """Some steps of all slots, without a look at the rows."""
        run = board.step(size, self.tally)
        rows = board.rows.up_to(size)
        before = rows.index.clone()
        for _ in range(steps):
            job.draw_noise(rows)
            run()
        if job.decoding.stop is not None:
            _stop(rows, before, job.starts, job.done, job.decoding)
        self.tally.steps += steps
        self.tally.row_steps += steps * size
        self.tally.looks += 1
        return rows

    def _fitting(self, count: int) -> int:
        """The fewest slots, by halving, that hold so many rows."""
        least = LEAST_CAPTURED if self._captures() else 1
        size = self.rows
        while (half := (size + 1) // 2) >= max(count, least) and half < size:
            size = half
        return size

    def _shrunk(self, board: Board, size: int, playing: int) -> int:
        """Move the rows that still play to the front, where fewer slots hold them;
        return the number of slots.
        """
        fewer = self._fitting(playing)
        if fewer >= size:
            return size
        busy = board.rows.owner[:size] >= 0
        source = busy[fewer:].nonzero().squeeze(-1) + fewer
        target = (~busy[:fewer]).nonzero().squeeze(-1)[: source.shape[0]]
        _copy_rows(self._held(), source, self._held(), target)
        board.rows.move(source, target)
        board.rows.owner[fewer:] = -1
        board.rows.ended[fewer:] = True
        return fewer

    def _filled(self, tokens: Tensor, mask: Tensor | None, prompt: int) -> tuple[Tensor, Tensor]:
        """A cache of known tokens [N, L], and each row's first column [N]."""
        begun = time.perf_counter()
        count, length = tokens.shape
        store = self.model.cache(count, self._held().shape[4])
        first = torch.zeros(count, dtype=torch.int64, device=tokens.device)
        if mask is not None:
            first = prompt - mask.sum(-1)
            more = mask.new_ones(count, max(0, length - prompt))
            mask = torch.cat([mask[:, :length], more], -1)
        if length:
            for part in torch.arange(count).split(max(1, PREFILLED // length)):
                some = slice(int(part[0]), int(part[-1]) + 1)
                self.model.fill(
                    store[:, :, some], tokens[some], None if mask is None else mask[some]
                )
        if self.timed and tokens.is_cuda:
            torch.cuda.synchronize()
        self.tally.fill_seconds += time.perf_counter() - begun
        return store, first

    def _board(self, width: int, decoding: Decoding, draws: int) -> Board:
        """The rows for this kind of decoding; buffers and graphs of an earlier call if
        they still fit.
        """
        width = -(-width // ALIGNED) * ALIGNED
        places = [tensor.data_ptr() for tensor in self.model.weights()]
        # a cache that is too wide is kept: reading it costs less than capturing graphs again
        fits = self._cache is not None and width <= self._cache.shape[4] <= 2 * width
        if not fits or places != self._weights:
            self._boards.clear()
            self._cache = None
            self._cache = self.model.cache(self.rows, width)
            self._weights = places
        ends = all_ends(decoding.eos), decoding.min_tokens
        key = (decoding.max_tokens, *ends, decoding.temperature, draws)
        if key not in self._boards:
            captured = self._captures()
            if captured and self._pool is None:
                # graphs never run at the same time and leave nothing behind in their memory: they
                # share it
                self._pool = torch.cuda.graph_pool_handle()
            cache = self._held()
            self._boards[key] = Board(
                self.model, cache, decoding, draws, self.compiled, captured, self._pool
            )
        board = self._boards[key]
        # an exception in an earlier call may have left rows behind
        board.rows.owner.fill_(-1)
        board.rows.ended.fill_(True)
        return board

    def _held(self) -> Tensor:
        assert self._cache is not None
        return self._cache

    def _captures(self) -> bool:
        return self._held().is_cuda if self.captured is None else self.captured


def _copy_rows(source: Tensor, which: Tensor, target: Tensor, where: Tensor) -> None:
    """Copy whole rows of a cache, all columns: nothing of the target's earlier sequence stays."""
    for part, place in zip(which.split(COPIED), where.split(COPIED), strict=True):
        target.index_copy_(2, place, source.index_select(2, part))


def _stop(rows: Rows, before: Tensor, starts: Starts, done: Sampled, decoding: Decoding) -> None:
    """End the rows that are over by `decoding.stop` after a token that they drew since
    their indices `before` [S]; what they drew later is dropped.
    """
    assert decoding.stop is not None
    busy = (rows.owner >= 0).nonzero().squeeze(-1)
    which = rows.owner[busy]
    width = done.tokens.shape[1]
    # a branch's first tokens are known, and those after its start are drawn
    drawn = torch.arange(width, device=busy.device) > starts.index[which].unsqueeze(-1)
    tokens = torch.where(drawn, rows.tokens[busy, :width, 0], done.tokens[which, :, 0])
    spans = torch.stack([before[busy] + 1, rows.index[busy]], -1).tolist()
    for row, sequence, (first, last) in zip(busy.tolist(), tokens.tolist(), spans, strict=True):
        end = stopped_at(sequence[: last + 1], first, decoding.stop, decoding.min_tokens)
        if end is not None:
            rows.index[row] = end
            rows.ended[row] = True


def _longest(rows: Rows) -> int:
    """The steps after which even the earliest of the rows that play is over."""
    last = rows.largest.shape[1] - 2
    earliest = torch.where(rows.owner >= 0, rows.index, last).amin()
    return last - int(earliest)


def _write(rows: Rows, ended: Tensor, starts: Starts, done: Sampled) -> None:
    """Take down what the rows that have ended drew, and release them."""
    which = rows.owner[ended]
    width = done.tokens.shape[1]
    step = torch.arange(width, device=ended.device)
    own = (step > starts.index[which].unsqueeze(-1)) & (step <= rows.index[ended].unsqueeze(-1))
    for values, drawn in ((done.tokens, rows.tokens), (done.log_probs, rows.log_probs)):
        values[which] = torch.where(
            own.unsqueeze(-1), drawn[ended, :width].to(values.dtype), values[which]
        )
    largest = rows.largest[ended, :width].to(done.largest.dtype)
    done.largest[which] = torch.where(own, largest, done.largest[which])
    rows.owner[ended] = -1


class Waves:
    """The same as `Slots` for any `Model`, by `complete`: all rows of a batch stand at
    the same step.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def sample(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        row: Tensor,
        decoding: Decoding,
        draws: int = 1,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> Sampled:
        """Sample one sequence per entry of `row`, and n draws from each of its states."""
        done = Sampled.empty(row.shape[0], decoding.max_tokens, draws, decoding.eos, prompts.device)
        bare = Prefixes.bare(row, decoding.max_tokens)
        complete(self.model, prompts, mask, bare, decoding, generator, noise, done)
        return done

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> Completions:
        """Complete every prefix."""
        return complete(self.model, prompts, mask, prefixes, decoding, generator, noise)


def decoder(
    model: Any, rows: int = 1024, *, dtype: torch.dtype | None = None, **options: Any
) -> Slots | Waves:
    """`Slots` for a model that offers them, else `Waves`; a model that refuses is named
    in a warning.

    Args:
        model: a `Model`.
        rows: the most rows per step.
        dtype: the type of the weights' copies that are sampled with; None for the
            weights themselves.
        options: further options of `Slots`.
    """
    if not hasattr(model, "slots"):
        return Waves(model)
    try:
        return Slots(model.slots(dtype), rows, **options)
    except SlotsRefused as reason:
        warnings.warn(
            f"{type(model).__name__} is decoded in waves, which is slower than in slots: {reason}",
            stacklevel=2,
        )
        return Waves(model)
