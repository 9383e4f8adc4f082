"""Merging the seeds of several runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from arsm_experiments.runs.reader import Record


def merge_seeds(
    records: Sequence[Record],
    alike: Callable[[Record], Hashable],
    seconds: Callable[[Iterable[float]], float] = sum,
) -> list[Record]:
    """Merge all runs that are `alike`, that is, differ only in their seeds, into one record.

    It is the record with the smallest seed, with the metrics and sessions of all; a seed that ran
    twice counts once. `seconds` combines their seconds: the sum if they ran one after another.
    """
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(alike(record), []).append(record)
    merged = []
    for parts in groups.values():
        parts.sort(key=lambda part: min(_seeds(part)))
        metrics, known = [], set()
        for part in parts:
            metrics += [line for line in part.metrics if line["seed"] not in known]
            known |= _seeds(part)
        sessions = [session for part in parts for session in part.sessions]
        spent = seconds(part.seconds for part in parts)
        merged.append(replace(parts[0], metrics=metrics, sessions=sessions, seconds=spent))
    return merged


def _seeds(record: Record) -> set[int]:
    return {line["seed"] for line in record.metrics}
