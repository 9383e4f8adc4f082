"""Writing a file whole or not at all, and names that a folder can have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class RunError(Exception):
    """Something about a run folder that its user can put right."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write path whole or not at all: a file beside it, flushed to the disk, then renamed."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}; make room, or choose another --root."
        ) from error
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a rename on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_name(words: str) -> str:
    """Words as a part of a folder's name: rloo:samples=4 as rloo-samples=4, 4*arsm as 4xarsm."""
    return words.translate(str.maketrans({":": "-", ",": "-", "/": "-", "*": "x", " ": "", "^": ""}))
