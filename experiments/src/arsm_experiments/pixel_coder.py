"""Binary images in few bytes: each pixel is predicted from its neighbours, and the likelier its
value was, the less room it takes.

Several tables vote on each pixel: one by its place in the image, others by the values of some of
its neighbours, others by both. The sum of their votes is the log-odds of the pixel being on, in
whole numbers, so that every machine decodes the same images. Pixels whose votes are about as sure
are one class, and how often the votes of a class are wrong is known. With these chances asymmetric
numeral systems (Duda, 2013) code the bits "predicted wrongly", in many lanes side by side. Decoding
goes pixel by pixel through all images at once.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint8]
Tables = Sequence[NDArray[np.int8]]

SIDE = 28
MARGIN = 6
PLACES = SIDE**2
Neighbours = tuple[tuple[int, int], ...]
"""Rows and columns from a pixel."""
NEAREST: Neighbours = (
    (0, -1), (-1, 0), (-1, -1), (-1, 1), (0, -2), (-2, 0), (-1, -2), (-1, 2), (-2, -1), (-2, 1),
    (0, -3), (-2, 2), (-2, -2),
)  # fmt: skip
TO_THE_RIGHT: Neighbours = (
    (0, -1), (-1, 0), (-1, 1), (-1, 2), (-1, 3), (-2, 1), (-2, 2), (-2, 3), (-3, 1), (-3, 2),
    (-1, 4), (-2, 4),
)  # fmt: skip
TO_THE_LEFT: Neighbours = (
    (0, -1), (0, -2), (0, -3), (0, -4), (-1, -1), (-1, -2), (-1, -3), (-1, -4), (-2, -1), (-2, -2),
    (-2, -3), (-3, -2),
)  # fmt: skip
ABOVE: Neighbours = (
    (0, -1), (-1, 0), (-3, -1), (-3, 0), (-3, 1), (-4, -1), (-4, 0), (-4, 1), (-5, 0), (-5, -1),
    (-5, 1), (-6, 0),
)  # fmt: skip
FAR: Neighbours = (
    (0, -1), (-1, 0), (0, -5), (0, -6), (-1, -5), (-2, -4), (-3, -3), (-4, -3), (-3, 3), (-4, 3),
    (-5, 3), (-3, 4),
)  # fmt: skip
AROUND: Neighbours = (
    (0, 0), (0, -1), (-1, 0), (0, 1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1), (-2, 0), (2, 0),
    (0, -2), (0, 2),
)  # fmt: skip
BESIDE: Neighbours = ((0, 0), (0, -1), (-1, 0), (-1, -1), (-1, 1), (0, 1), (1, 0))
FAR_AND_WIDE: Neighbours = ((0, -4), (-4, 0), (-3, -3), (-3, 3), (0, -1))


class Context(NamedTuple):
    """The pixels whose values choose a table's vote. The image is cut into square cells of so many
    pixels, each of which has votes of its own.
    """

    own: Neighbours = ()
    """Among the pixels before this one."""
    known: Neighbours = ()
    """Among the known image's."""
    cell: int = SIDE

    @property
    def across(self) -> int:
        """Cells side by side."""
        return SIDE // self.cell

    @property
    def votes(self) -> int:
        """Entries of the table."""
        return self.across**2 << (len(self.own) + len(self.known))


BY_PLACE = Context(cell=1)
ALONE = (
    BY_PLACE,
    Context(NEAREST),
    Context(TO_THE_RIGHT),
    Context(TO_THE_LEFT),
    Context(ABOVE),
    Context(FAR),
    Context(NEAREST[:5], cell=2),
    Context(FAR_AND_WIDE, cell=2),
)
GIVEN_KNOWN = (
    BY_PLACE,
    Context(known=AROUND),
    Context(NEAREST[:6], BESIDE),
)

UNIT = 16
"""Votes per unit of log-odds."""
MOST = 127
CLASSES = 64
CLASS_WIDTH = 3
"""Votes that differ by less are equally sure."""
LANES = 1024
"""Pixels that are coded at once: the images of one place, so many at a time."""
WORD = 16
"""Bits that a lane writes or reads at once; its state has twice as many."""
WHOLE = 1 << WORD
ROUNDS = 8
"""Of fitting the votes, each through all tables."""
DOUBT = 10
"""Holds the votes of rare patterns near 0, where the tables are smaller, as four times as many
doubtful pixels would.
"""


def pack_images(images: Bits, known: Bits | None = None) -> bytes:
    """Images [N, 784] of 0 and 1, compressed; `known` are similar images that the reader has."""
    tables = _fit(images, known)
    predictor = _Predictor(tables, len(images), known)
    predictor.images[...] = _by_place(images)
    predicted = [predictor.predict(place) for place in range(PLACES)]
    wrong = [images[:, place] ^ likelier for place, (likelier, _) in enumerate(predicted)]
    sureness = [class_ for _, class_ in predicted]
    chances = _chances(np.concatenate(wrong), np.concatenate(sureness))
    states = np.full(min(LANES, len(images)), WHOLE, np.uint64)
    # what is written last is read first
    words = [
        _write(states, wrong[place][some], chances[sureness[place][some]])
        for place in reversed(range(PLACES))
        for some in reversed(_lanes(len(images)))
    ]
    count = np.array([len(images)], "<u4")
    parts = (count, *tables, chances.astype("<u2"), states.astype("<u4"), *reversed(words))
    # the tables become smaller by this, the stream does not
    return lzma.compress(b"".join(part.tobytes() for part in parts), preset=9 | lzma.PRESET_EXTREME)


def unpack_images(packed: bytes, known: Bits | None = None) -> Bits:
    """The inverse of `pack_images`, with the same known images."""
    content = io.BytesIO(lzma.decompress(packed))

    def take(dtype: str, count: int) -> NDArray[Any]:
        dtype_ = np.dtype(dtype)
        return np.frombuffer(content.read(count * dtype_.itemsize), dtype_)

    count = int(take("<u4", 1)[0])
    tables = [take("i1", context.votes) for context in _contexts(known)]
    chances = take("<u2", CLASSES).astype(np.uint64)
    states = take("<u4", min(LANES, count)).astype(np.uint64)
    words = np.frombuffer(content.read(), "<u2")
    predictor = _Predictor(tables, count, known)
    at = 0
    for place in range(PLACES):
        likelier, class_ = predictor.predict(place)
        pixel = predictor.images[divmod(place, SIDE)]
        for some in _lanes(count):
            wrong, used = _read(states, chances[class_[some]], words[at:])
            pixel[some] = likelier[some] ^ wrong
            at += used
    return predictor.images.reshape(PLACES, count).T.copy()


def _lanes(count: int) -> list[slice]:
    """The images that are coded at once."""
    return [slice(at, min(at + LANES, count)) for at in range(0, count, LANES)]


def _chances(wrong: Bits, sureness: Bits) -> NDArray[np.uint64]:
    """How often the votes of each class are wrong, of 65,536 times; neither never nor always."""
    seen = np.bincount(sureness, minlength=CLASSES)
    share = np.bincount(sureness, wrong, CLASSES) / np.maximum(seen, 1)
    return np.clip(np.rint(WHOLE * share), 1, WHOLE - 1).astype(np.uint64)


def _write(
    states: NDArray[np.uint64], wrong: Bits, chance: NDArray[np.uint64]
) -> NDArray[np.uint16]:
    """Put one bit into each lane. Returns the words of those lanes that were full.

    Of every 65,536 numbers that a state can be, `chance` stand for a wrong vote: a likelier bit
    makes it grow less.
    """
    x = states[: len(wrong)]
    share = np.where(wrong, chance, WHOLE - chance)
    full = x >= share << WORD
    words = (x[full] % WHOLE).astype("<u2")
    x[full] >>= WORD
    x[...] = (x // share << WORD) + x % share + np.where(wrong, 0, chance)
    return words


def _read(
    states: NDArray[np.uint64], chance: NDArray[np.uint64], words: NDArray[np.uint16]
) -> tuple[NDArray[np.bool_], int]:
    """The inverse of `_write`: one bit of each lane, and how many words it took."""
    x = states[: len(chance)]
    number = x % WHOLE
    wrong = number < chance
    share = np.where(wrong, chance, WHOLE - chance)
    x[...] = share * (x >> WORD) + number - np.where(wrong, 0, chance)
    empty = x < WHOLE
    used = int(np.count_nonzero(empty))
    x[empty] = (x[empty] << WORD) | words[:used]
    return wrong, used


class _Predictor:
    """Predicts all images' pixels at one place from those before it and from known images."""

    def __init__(self, tables: Tables, count: int, known: Bits | None) -> None:
        self.tables = [table.astype(np.int16) for table in tables]
        self.contexts = _contexts(known)
        self.own = _framed(count)
        self.images = _inside(self.own)
        """Pixels by place, [28, 28, N]; a prediction reads those before it."""
        self.known = _framed(count)
        if known is not None:
            _inside(self.known)[...] = _by_place(known)

    def predict(self, place: int) -> tuple[Bits, Bits]:
        """The likelier value at this place and the class of its sureness: [N] each."""
        votes = np.zeros(self.own.shape[-1], np.int16)
        for table, pattern in zip(self.tables, self.patterns(place), strict=True):
            votes += table[pattern]
        sureness = np.minimum(np.abs(votes) // CLASS_WIDTH, CLASSES - 1)
        return (votes > 0).astype(np.uint8), sureness.astype(np.uint8)

    def patterns(self, place: int) -> Iterator[NDArray[np.uint16]]:
        """For each table, the cell and the neighbours' values as one number: [N]."""
        row, column = divmod(place, SIDE)
        for context in self.contexts:
            cell = row // context.cell * context.across + column // context.cell
            pattern = np.full(self.own.shape[-1], cell, np.uint16)
            for plane, near in ((self.known, context.known), (self.own, context.own)):
                for down, right in near:
                    pattern <<= 1
                    pattern |= plane[MARGIN + row + down, MARGIN + column + right]
            yield pattern


def _contexts(known: object) -> tuple[Context, ...]:
    return ALONE if known is None else GIVEN_KNOWN


def _framed(count: int) -> Bits:
    """Room for images, pixel by pixel, inside a margin of zeros: [rows, columns, N]."""
    side = SIDE + 2 * MARGIN
    return np.zeros((side, side, count), np.uint8)


def _inside(framed: Bits) -> Bits:
    return framed[MARGIN:-MARGIN, MARGIN:-MARGIN]


def _by_place(images: Bits) -> Bits:
    return images.T.reshape(SIDE, SIDE, -1)


def _fit(images: Bits, known: Bits | None) -> Tables:
    """Votes that make the images likely: logistic regression by Newton's method, one table after
    the other.
    """
    sizes = [context.votes for context in _contexts(known)]
    predictor = _Predictor([np.zeros(size, np.int8) for size in sizes], len(images), known)
    predictor.images[...] = _by_place(images)
    by_pattern = zip(*(predictor.patterns(place) for place in range(PLACES)), strict=True)
    entries = [np.concatenate(places) for places in by_pattern]
    on = images.T.ravel()
    log_odds = np.zeros(on.shape, np.float32)
    tables = [np.zeros(size, np.float32) for size in sizes]
    for _ in range(ROUNDS):
        for table, entry in zip(tables, entries, strict=True):
            chance = 1 / (1 + np.exp(-log_odds))
            slope = np.bincount(entry, on - chance, len(table))
            step = slope / (np.bincount(entry, chance * (1 - chance), len(table)) + DOUBT)
            step = np.clip(step, -2, 2).astype(np.float32)
            table += step
            log_odds += step[entry]
    return [np.clip(np.rint(UNIT * table), -MOST, MOST).astype(np.int8) for table in tables]
