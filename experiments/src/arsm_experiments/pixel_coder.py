"""Binary images in few bytes: each pixel is predicted from its neighbours, and only what was
predicted wrongly takes room.

The neighbours above and to the left say which value is the likelier one, and how sure that is. The
bits "predicted wrongly" are sorted by that sureness, so that LZMA's own model finds long runs of
equally likely bits. Decoding goes pixel by pixel through all images at once.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint8]

SIDE = 28
MARGIN = 3
NEIGHBOURS = (
    (0, -1), (-1, 0), (-1, -1), (-1, 1), (0, -2), (-2, 0), (-1, -2), (-1, 2), (-2, -1), (-2, 1),
    (0, -3), (-2, 2), (-2, -2), (-3, 0),
)  # fmt: skip
"""Rows and columns from a pixel, the nearest first."""
PATTERNS = 1 << len(NEIGHBOURS)
CLASSES = 32
SUREST = 9.0
"""Log-odds of the surest class."""
# the literal coder of LZMA then models each of a byte's eight bits from those before it alone
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]


def pack_images(images: Bits) -> bytes:
    """Images [N, 784] of 0 and 1, compressed."""
    known = _framed(len(images))
    known[MARGIN:, MARGIN:-MARGIN] = images.T.reshape(SIDE, SIDE, -1)
    pattern = np.stack([_pattern(known, *place) for place in _places()])
    table = _predictions(pattern.ravel(), images.T.ravel())
    wrong = images.T ^ (table[pattern] & 1)
    sureness = (table[pattern] >> 1).ravel()
    lengths = np.bincount(sureness, minlength=CLASSES).astype("<u4")
    bits = np.packbits(wrong.ravel()[np.argsort(sureness, kind="stable")])
    content = b"".join(part.tobytes() for part in (table, lengths, bits))
    return lzma.compress(content, filters=FILTERS)


def unpack_images(packed: bytes) -> Bits:
    """The inverse of `pack_images`."""
    content = lzma.decompress(packed)
    table = np.frombuffer(content, np.uint8, PATTERNS)
    lengths = np.frombuffer(content, "<u4", CLASSES, PATTERNS).astype(np.int64)
    wrong = np.unpackbits(np.frombuffer(content, np.uint8, offset=PATTERNS + 4 * CLASSES))
    count = int(lengths.sum()) // SIDE**2
    begin = np.cumsum(lengths) - lengths  # of the bits of each class that are left
    known = _framed(count)
    for row, column in _places():
        predicted = table[_pattern(known, row, column)]
        order = np.argsort(predicted >> 1, kind="stable")
        taken = np.bincount(predicted >> 1, minlength=CLASSES)
        # the next bits of every class, one class after the other
        place = np.arange(count) + np.repeat(begin - (np.cumsum(taken) - taken), taken)
        begin += taken
        pixel = known[MARGIN + row, MARGIN + column]
        pixel[order] = wrong[place]
        pixel ^= predicted & 1
    return known[MARGIN:, MARGIN:-MARGIN].reshape(SIDE**2, count).T.copy()


def _places() -> Iterator[tuple[int, int]]:
    return ((row, column) for row in range(SIDE) for column in range(SIDE))


def _framed(count: int) -> Bits:
    """Room for images, pixel by pixel, inside a margin of zeros: [rows, columns, N]."""
    return np.zeros((MARGIN + SIDE, SIDE + 2 * MARGIN, count), np.uint8)


def _pattern(known: Bits, row: int, column: int) -> NDArray[np.uint16]:
    """The neighbours' values of one pixel in all images, as one number: [N]."""
    pattern = np.zeros(known.shape[-1], np.uint16)
    for down, right in NEIGHBOURS:
        pattern <<= 1
        pattern |= known[MARGIN + row + down, MARGIN + column + right]
    return pattern


def _predictions(pattern: NDArray[np.uint16], on: Bits) -> Bits:
    """For each pattern twice its class of sureness, plus the likelier value."""
    seen = np.bincount(pattern, minlength=PATTERNS)
    count = np.bincount(pattern, weights=on, minlength=PATTERNS)
    likelier = 2 * count > seen
    wrong = np.where(likelier, seen - count, count)
    # as if half a pixel more of either kind had been seen
    log_odds = np.log((seen - wrong + 0.5) / (wrong + 0.5))
    class_ = np.clip(log_odds / SUREST * CLASSES, 0, CLASSES - 1).astype(np.uint8)
    return (2 * class_ + likelier).astype(np.uint8)
