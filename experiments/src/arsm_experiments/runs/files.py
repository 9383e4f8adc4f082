"""Atomic file writes, and valid folder names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class RunError(Exception):
    """A problem with a run folder that the user can fix."""


def make_folder(folder: Path) -> None:
    """Make a folder, if there is none, and try that a file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # the rights alone do not tell: a system may be mounted for reading only
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"Files cannot be written to {folder}: {error.strerror}; choose another folder."
        ) from error


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically: a temporary file next to it, flushed to disk, then renamed."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}; make room, or choose another "
            "folder."
        ) from error
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a rename to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_name(words: str) -> str:
    """An estimator's words as part of a folder's name: rloo-samples=4 for rloo:samples=4, 4xarsm
    for 4*arsm.
    """
    return words.translate(
        str.maketrans({":": "-", ",": "-", "/": "-", "*": "x", " ": "", "^": ""})
    )
