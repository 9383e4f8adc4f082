"""Decoding in slots: S rows of static shape, each at its own position, refilled from a queue.

A slot holds one sequence. When it ends, the slot takes the next start of the queue,
earliest step first: its whole row of the cache is copied from the cache of the known
sequence that it continues. One step (forward, sampling, writing) is the same function
for every row and every moment, so that a GPU captures it once as a CUDA graph and
replays it. The host looks at the rows every few steps only. When the queue is empty,
the number of slots is halved as sequences end; or branches of the sequences that are
being sampled take the free slots (ahead.py).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arsm.checks import check_count
from arsm.sequences.ahead import Ahead, PlayedAhead, other_draws
from arsm.sequences.board import Board, Rows, Starts, Tally
from arsm.sequences.decode import Completions, Decoding, Prefixes, check_log_probs
from arsm.sequences.draws import Noise, Sampled
from arsm.sequences.ends import all_ends
from arsm.sequences.jobs import DecodingJob, completing, sampling
from arsm.sequences.model import SlotModel

ALIGNED = 8
"""Columns of a cache are a multiple of this: fused attention needs its masks aligned."""
LEAST_CAPTURED = 64
"""A GPU's step takes as long with fewer rows: no graph is captured for them."""
LARGE = 256
"""A GPU's step takes longer with more rows: then three quarters of them are worth a graph."""
COPIED = 128
"""Most rows copied at once: a copy holds them a second time."""
PREFILLED = 1 << 16
"""Most tokens, padding included, per call of `fill`."""


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
        captured: bool | None = None,
    ) -> None:
        """Make slots.

        Args:
            model: the model, such as `Transformers(...).slots()`.
            rows: S, the most rows per step; a call whose decoding has fewer uses no
                more.
            look_every: steps between two looks at which rows have ended: every look
                waits for the device.
            known: most known sequences whose caches are held beside those of the slots.
            captured: whether a step is a CUDA graph; by default on a GPU.
        """
        for name, value in {"rows": rows, "look_every": look_every, "known": known}.items():
            check_count(name, value)
        self.model = model
        self.rows = rows
        self.look_every = look_every
        self.known = known
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
        job = sampling(prompts, mask, row, decoding, draws, generator, noise)
        self._play(job)
        return job.true.done

    @torch.no_grad()
    def sample_ahead(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        row: Tensor,
        decoding: Decoding,
        draws: int,
        generator: torch.Generator | None = None,
        noise: Noise | None = None,
    ) -> tuple[Sampled, PlayedAhead]:
        """`sample`, and branches with the distinct other draws of the sequences' states,
        as many as find a free slot meanwhile.

        To the noise a branch is the sequence R + (i T + t) n + d, for draw d of state t
        of sequence i.
        """
        job = sampling(prompts, mask, row, decoding, draws, generator, noise)
        ahead = Ahead.of(job.true, decoding)
        self._play(replace(job, ahead=ahead))
        check_log_probs(ahead.done.log_probs[..., 0])
        return job.true.done, ahead.played()

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
        job, completions = completing(prompts, mask, prefixes, decoding, generator, noise)
        self._play(job)
        # a start is named by its prefix
        going = job.true.starts.name
        completions.tokens[going] = job.true.done.tokens.squeeze(-1)
        completions.log_probs[going] = job.true.done.log_probs.squeeze(-1)
        return completions

    def _play(self, job: DecodingJob) -> None:
        """Play all starts to the end."""
        starts = job.true.starts
        if starts.row.shape[0] == 0:
            return
        # the earliest branches first: they play longest
        order = starts.index.argsort(stable=True)
        # weights have the type that they are sampled in
        autocast = torch.autocast(job.known.device.type, enabled=False)
        with self.model.decoding(), autocast:
            # the last token is never fed, and needs no column
            width = job.prompt + job.decoding.max_tokens - 1
            board = self._board(width, job.decoding, job.draws)
            # by groups: the caches of all known sequences may be more than memory holds
            for begin in range(0, job.known.shape[0], self.known):
                queue = order[starts.row[order] // self.known == begin // self.known]
                if queue.shape[0]:
                    self._group(board, queue, job, self._read(job, begin))
        check_log_probs(job.true.done.log_probs[..., 0])

    def _read(self, job: DecodingJob, begin: int) -> _Source:
        """Fill the cache of some known sequences, from `begin` on, as far as any start needs."""
        some = slice(begin, begin + self.known)
        # a start feeds its own token: only what comes before is read here
        filled = job.prompt + int(job.true.starts.index.max())
        # few lengths, so that memory held from an earlier call fits; nobody reads the columns
        # behind a start before they are written
        filled = min(-(-filled // ALIGNED) * ALIGNED, job.known.shape[1])
        padding = None if job.mask is None else job.mask[some]
        store, first = self._filled(job.known[some, :filled], padding, job.prompt)
        return _Source(begin, store, first)

    def _refill(
        self, board: Board, job: DecodingJob, source: _Source, rows: Tensor, which: Tensor
    ) -> None:
        """Let the starts `which` [R] play in the rows [R]."""
        starts = job.true.starts.some(which)
        place = starts.row - source.begin
        # whole rows: what an earlier owner left behind must not be read
        _copy_rows(source.store, place, self._held(), rows)
        board.rows.first[rows] = source.first[place]
        self._begin(board, job, rows, starts, which)

    def _begin(
        self, board: Board, job: DecodingJob, rows: Tensor, starts: Starts, owner: Tensor
    ) -> None:
        """Set the starts [R] into the rows [R], whose cache is there."""
        board.rows.token[rows] = starts.token
        board.rows.column[rows] = starts.index + job.prompt
        board.rows.index[rows] = starts.index
        board.rows.owner[rows] = owner
        board.rows.ended[rows] = False
        self.tally.starts += rows.shape[0]

    def _group(self, board: Board, queue: Tensor, job: DecodingJob, source: _Source) -> None:
        """Play a queue of starts to the end, and the branches that begin meanwhile."""
        # no more rows than there are sequences: idle rows are computed too
        limit = self._limit(job)
        size = self._fitting(queue.shape[0], limit)
        playing = min(size, queue.shape[0])
        every = torch.arange(playing, device=queue.device)
        self._refill(board, job, source, every, queue[:playing])
        queue = queue[playing:]
        most = self.look_every
        while playing:
            # some steps in a row, queued without waiting; then one look, which waits
            rows, before = self._run_steps(board, job, size, most)
            # the true sequences go first: branches take slots that nobody waits for
            branches = None
            if job.ahead is not None and not queue.shape[0] and playing < limit:
                branches = other_draws(rows, before, job.true, job.decoding)
            ended = (rows.ended & (rows.owner >= 0)).nonzero().squeeze(-1)
            if ended.shape[0]:
                for each in job.playing:
                    each.write(rows)
                # written down first: a refilled row forgets what it drew
                more = min(ended.shape[0], queue.shape[0])
                if more:
                    self._refill(board, job, source, ended[:more], queue[:more])
                queue = queue[more:]
                playing -= ended.shape[0] - more
            if branches is not None and branches[0].shape[0]:
                placed, size = self._branch(board, job, size, *branches)
                playing += placed
            most = self.look_every
            if not queue.shape[0] and playing:
                # nobody waits any more: fewer rows hold those that still play
                size = self._shrunk(board, size, self._fitting(playing, limit))
                most = max(1, min(most, _longest(board.rows.up_to(size))))

    def _branch(
        self, board: Board, job: DecodingJob, size: int, slot: Tensor, starts: Starts
    ) -> tuple[int, int]:
        """Let starts [K] that branch off the sequences of the slots [K] begin in free
        slots, the first ones if there are not enough; return how many began, and the
        number of slots that they need.
        """
        assert job.ahead is not None
        rows = board.rows
        limit = self._limit(job)
        free = rows.owner[:limit] < 0
        # a slot that is copied from must not be overwritten by the same copy
        free[slot] = False
        target = free.nonzero().squeeze(-1)[: slot.shape[0]]
        count = target.shape[0]
        if count == 0:
            return 0, size
        slot = slot[:count]
        starts = starts.some(torch.arange(count, device=slot.device))
        # what the sequence has drawn later is overwritten before it is read
        _copy_rows(self._held(), slot, self._held(), target)
        rows.first[target] = rows.first[slot]
        width = job.decoding.max_tokens
        owner = job.ahead.add(starts, rows.tokens[slot, :width, 0], job.decoding)
        self._begin(board, job, target, starts, owner)
        self.tally.ahead += count
        return count, max(size, self._fitting(int(target[-1]) + 1, limit))

    def _run_steps(
        self, board: Board, job: DecodingJob, size: int, steps: int
    ) -> tuple[Rows, Tensor]:
        """Some steps of all slots, without a look at the rows; the rows, and their
        indices [S] before.
        """
        # captured on first use, perhaps in the middle of a call
        run = board.step(size, self.tally)
        rows = board.rows.up_to(size)
        # how far each row was: what it draws from here on is new to the look that follows
        before = rows.index.clone()
        for _ in range(steps):
            job.draw_noise(rows)
            run()
        if job.decoding.stop is not None:
            for each in job.playing:
                each.stop(rows, before, job.decoding)
        self.tally.steps += steps
        self.tally.row_steps += steps * size
        self.tally.looks += 1
        return rows, before

    def _limit(self, job: DecodingJob) -> int:
        """The most slots that a job may use."""
        return min(self.rows, job.decoding.rows)

    def _fitting(self, count: int, limit: int) -> int:
        """The fewest slots, by halving the limit, that hold so many rows; or three quarters of
        them.
        """
        # by halving, so that a handful of graphs serves every number of rows
        least = max(count, LEAST_CAPTURED if self._captures() else 1)
        size = limit
        while (half := (size + 1) // 2) >= least and half < size:
            size = half
        quarters = -(-3 * size // 4)
        return quarters if size > LARGE and quarters >= least else size

    def _shrunk(self, board: Board, size: int, fewer: int) -> int:
        """Move the rows that still play to the front, if fewer slots hold them; return the
        number of slots.
        """
        if fewer >= size:
            return size
        # only rows behind the new end move: as many as there is room for in front of it
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
        # as wide as the slots' own, so that whole rows can be copied
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
        # a captured step reads memory, not tensors: weights that moved need new graphs
        places = [tensor.data_ptr() for tensor in self.model.weights()]
        # a cache that is too wide is kept: reading it costs less than capturing graphs again
        fits = self._cache is not None and width <= self._cache.shape[4] <= 2 * width
        if not fits or places != self._weights:
            self._boards.clear()
            # without a graph that uses it, a pool is being given back and takes no new ones
            self._pool = None
            self._cache = None
            self._cache = self.model.cache(self.rows, width)
            self._weights = places
        ends = all_ends(decoding.eos), decoding.min_tokens
        # what is written into the program of a step, besides shapes
        key = (decoding.max_tokens, *ends, decoding.temperature, draws)
        if key not in self._boards:
            captured = self._captures()
            if captured and self._pool is None:
                # graphs never run at the same time and leave nothing behind in their memory: they
                # share it
                self._pool = torch.cuda.graph_pool_handle()
            cache = self._held()
            self._boards[key] = Board(self.model, cache, decoding, draws, captured, self._pool)
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


def _longest(rows: Rows) -> int:
    """The steps after which even the earliest of the rows that play is over."""
    last = rows.largest.shape[1] - 2
    earliest = torch.where(rows.owner >= 0, rows.index, last).amin()
    return last - int(earliest)
