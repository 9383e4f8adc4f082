"""Out of memory: which batch size to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited_by(option: str, value: int, doing: str) -> Iterator[None]:
    """Name the option that limits the memory of what is done inside, should it run out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise  # an inner stage has named its own
        first = str(error).partition(". ")[0].rstrip(".").replace("\n", " ")
        raise torch.OutOfMemoryError(
            f"Out of memory while {doing} ({first}); lower {option}, which is {value}."
        ) from error
