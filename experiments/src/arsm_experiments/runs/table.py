"""The form of every table.csv: one line per metric of a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ORIGIN = ("seconds", "hardware", "commit")
"""Columns that stand in the first line of a row, and hold for its others."""
COLUMNS: tuple[str, ...] = ("row", "metric", "mean", "std", "seeds", "paper", *ORIGIN)


def origin_once(lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines with their origin in the first line of each row alone."""
    before: Mapping[str, Any] = {}
    for line in lines:
        same = all(line[key] == before.get(key) for key in ("row", *ORIGIN))
        before = line
        yield {**line, **dict.fromkeys(ORIGIN, "")} if same else dict(line)
