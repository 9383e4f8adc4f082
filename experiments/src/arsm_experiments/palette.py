"""Small picture files: PNG with a palette."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
COLOURS = 256
"""Enough for curves, bands and antialiasing, in a third of the bytes of full colour."""


def save(figure: Figure, path: Path, colours: int = COLOURS, dpi: int = DPI) -> None:
    """Write a matplotlib figure."""
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, dpi=dpi, format="png")
    picture = Image.open(whole).convert("RGB")
    picture.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
