"""Sheets of images as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from PIL import Image
from torch import Tensor


def save_sheet(sheet: Tensor, path: Path | BinaryIO) -> None:
    """Write images [rows, columns, 784] in 0..1 as one grey picture, side by side."""
    grid = sheet.unflatten(-1, (28, 28)).movedim(1, 2).flatten(2).flatten(0, 1)
    Image.fromarray((grid * 255).round().byte().cpu().numpy()).save(path, "PNG", optimize=True)
