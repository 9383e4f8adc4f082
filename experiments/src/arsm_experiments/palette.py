"""Small picture files: PNG with a palette."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 96
"""Pages show a figure 700 to 900 pixels wide, and most figures are twelve inches wide."""
COLOURS = 64
"""Enough for curves, bands and antialiasing, in a quarter of the bytes of full colour."""
ROUNDS = 2
"""Of k-means, without which faint bands take the colours of others."""


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write a matplotlib figure."""
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, dpi=dpi, format="png")
    picture = Image.open(whole).convert("RGB")
    few = picture.quantize(
        COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=ROUNDS, dither=Image.Dither.NONE
    )
    few.save(path, optimize=True)
