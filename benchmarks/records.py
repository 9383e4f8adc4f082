"""Records of the benchmarks' runs: the JSON that the experiments write and read, and the tables
made from it.
"""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from arsm_experiments.runs.lines import Line as Record
from arsm_experiments.runs.lines import add, read, read_one, write, write_one
from arsm_experiments.runs.provenance import provenance
from arsm_experiments.runs.table import COLUMNS, origin_once

__all__ = [
    "COLUMNS",
    "Record",
    "add",
    "make_in_processes",
    "make_missing",
    "place",
    "read",
    "read_one",
    "source",
    "write",
    "write_one",
    "write_table",
]

Key = TypeVar("Key", bound=tuple[Any, ...])


@functools.cache
def source() -> dict[str, Any]:
    """Hardware and commit when the command began: its own records are tracked files, which its
    first run changes.
    """
    return provenance("cpu")


def place() -> dict[str, Any]:
    """The part of the source that short records carry."""
    return {name: source()[name] for name in ("hardware", "commit", "torch")}


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
        print(f"{words}: {result(record)}", flush=True)


def make_in_processes(
    path: Path,
    keys: Iterable[Key],
    key_of: Callable[[Record], Key],
    make: Callable[..., Record],
    result: Callable[[Record], str],
    workers: int,
) -> None:
    """The same by several processes, which call `make` with the parts of a key; prints the time
    left.
    """
    done = {key_of(record) for record in read(path)}
    missing = [key for key in keys if key not in done]
    started = time.monotonic()
    with ProcessPoolExecutor(workers) as processes:
        pending = [processes.submit(make, *key) for key in missing]
        for number, finished in enumerate(as_completed(pending), 1):
            record = finished.result()
            add(path, record)
            words = ", ".join(map(str, key_of(record)))
            left = (time.monotonic() - started) / number * (len(missing) - number)
            print(
                f"{number}/{len(missing)} {words}: {result(record)}; about {left / 60:.0f} min "
                "left",
                flush=True,
            )


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """A table.csv of these lines."""
    lines = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(origin_once(lines))
