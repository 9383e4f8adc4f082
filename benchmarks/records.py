"""Records of the benchmarks' runs: the lines of JSON that the experiments write and read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from arsm_experiments.runs.lines import Line as Record
from arsm_experiments.runs.lines import add, read, write
from arsm_experiments.runs.provenance import provenance

__all__ = ["Record", "add", "make_missing", "read", "source", "write"]

Key = TypeVar("Key", bound=tuple[Any, ...])


@functools.cache
def source() -> dict[str, Any]:
    """Hardware and commit when the command began: its own records are tracked files, which its
    first run changes.
    """
    return provenance("cpu")


def make_missing(
    path: Path,
    keys: Iterable[Key],
    key_of: Callable[[Record], Key],
    make: Callable[[Key], Record],
    result: Callable[[Record], str],
) -> None:
    """Make the records that the file does not have yet, and print each with its result."""
    source()
    for key in keys:
        # read again: another process may have made it meanwhile
        if key in {key_of(record) for record in read(path)}:
            continue
        record = make(key)
        add(path, record)
        words = ", ".join(map(str, key))
        print(f"{words}: {result(record)}, {record['seconds']} s", flush=True)
