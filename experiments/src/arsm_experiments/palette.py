"""Small picture files: PNG with a palette."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

DPI = 96
"""Pages show a figure 700 to 900 pixels wide, and most figures are twelve inches wide."""
COLOURS = 64
"""Enough for curves, bands and antialiasing, in a quarter of the bytes of full colour."""
ROUNDS = 2
"""Of k-means, without which faint bands take the colours of others."""


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write a matplotlib figure, unless the file has the same pixels already: another version of
    zlib would only write them in other bytes.
    """
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, dpi=dpi, format="png")
    picture = Image.open(whole).convert("RGB")
    few = picture.quantize(
        COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=ROUNDS, dither=Image.Dither.NONE
    )
    if not same_pixels(path, few):
        few.save(path, optimize=True)


def same_pixels(path: Path, picture: Image.Image) -> bool:
    """Whether there is a file that shows this picture."""
    from PIL import Image

    if not path.is_file():
        return False
    with Image.open(path) as there:
        return there.size == picture.size and (
            there.convert("RGB").tobytes() == picture.convert("RGB").tobytes()
        )
