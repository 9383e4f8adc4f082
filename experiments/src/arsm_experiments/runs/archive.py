"""One compressed archive per experiment, ROOT/<experiment>.tar.xz, with the files that a report
needs of each run.

The same runs always make the same bytes: names are sorted, and times and owners are left out.
Metrics are stored by column.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arsm_experiments.runs.files import RunError, write_atomically

SUFFIX = ".tar.xz"
KEPT = ("config.json", "metrics.jsonl")
PACKING = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}
"""Without position bits: text, unlike machine code, is not aligned."""
BY_COLUMN = "metrics.columns"
"""An archive's form of metrics.jsonl."""
DIGITS = 8
"""Digits of an archived metric: two more than tables have, for differences such as the toy's
gap.
"""
FEWER_DIGITS = {
    **dict.fromkeys(("train", "validation", "test"), 6),
    **dict.fromkeys(("evaluations", "log_variance", "variance", "variance_of_every_update"), 5),
    **dict.fromkeys(("seconds", "learning_seconds", "cpu_seconds"), 4),
    **dict.fromkeys(("entropy", "gradient_variance"), 3),
    **dict.fromkeys(("pseudo_action_share", "pseudo_actions"), 3),
    **dict.fromkeys(("probability_first", "probability_last"), 3),
    **dict.fromkeys(("gradient_first", "gradient_last"), 3),
}
"""Metrics whose own digits are what tables show, or that are only drawn: three are finer than a
pixel of a panel 250 pixels high."""

DRAWN_DIGITS = {**dict.fromkeys(("reward", "train", "test"), 4), "evaluations": 3}
"""Fewer still on lines that no table shows."""

Files = Mapping[str, bytes]
"""A run's files by name."""


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a run folder that a report needs: configuration, metrics and pictures."""
    pictures = (path for pattern in ("*.png", "*.gif") for path in folder.glob(pattern))
    paths = [path for name in KEPT if (path := folder / name).is_file()]
    return {path.name: path.read_bytes() for path in (*paths, *sorted(pictures))}


def for_archive(files: Files) -> dict[str, bytes]:
    """Keep only the first picture of each kind: an archive holds those of one seed."""
    kinds = {Path(name).suffix: name for name in sorted(files, reverse=True) if name not in KEPT}
    return {name: content for name, content in files.items() if name in (*KEPT, *kinds.values())}


def in_tables(metrics: Sequence[Mapping[str, Any]]) -> set[int]:
    """Where the lines are whose numbers tables show: of each seed the first, the best by validation
    and the last; all lines of a run without seeds.
    """
    by_seed: dict[int, list[int]] = {}
    for place, line in enumerate(metrics):
        if "seed" not in line:
            return set(range(len(metrics)))
        by_seed.setdefault(line["seed"], []).append(place)
    shown = set()
    for places in by_seed.values():
        shown |= {places[0], places[-1]}
        if "validation" in metrics[places[0]]:
            shown.add(min(places, key=lambda place: metrics[place]["validation"]))
    return shown


def thinned(
    metrics: Sequence[Mapping[str, Any]], shown: set[int], every: int
) -> list[Mapping[str, Any]]:
    """The lines of a training that tables show, and those at multiples of `every` epochs: a curve
    of 50 points looks like one of 100 in a panel 500 pixels wide.
    """
    return [
        line for place, line in enumerate(metrics) if place in shown or line["epoch"] % every == 0
    ]


def shortened(metrics: Sequence[Mapping[str, Any]], shown: set[int]) -> bytes:
    """A metrics.jsonl with numbers of as many digits as tables and figures need."""
    return b"".join(
        json.dumps(_short(line, in_table=place in shown)).encode() + b"\n"
        for place, line in enumerate(metrics)
    )


def _short(line: Mapping[str, Any], *, in_table: bool) -> dict[str, Any]:
    digits = FEWER_DIGITS if in_table else FEWER_DIGITS | DRAWN_DIGITS
    return {
        key: float(f"{value:.{digits.get(key, DIGITS)}g}") if isinstance(value, float) else value
        for key, value in line.items()
    }


def by_column(lines: bytes) -> bytes:
    """A metrics.jsonl by column, one line per metric: numbers of one kind beside each other take a
    fifth to a third less room. None stands for a line without the metric.
    """
    metrics = [json.loads(line) for line in lines.splitlines()]
    keys = dict.fromkeys(key for line in metrics for key in line)
    columns = ({key: [line.get(key) for line in metrics]} for key in keys)
    return b"".join(
        json.dumps(column, separators=(",", ":")).encode() + b"\n" for column in columns
    )


def by_line(columns: bytes) -> bytes:
    """The inverse of `by_column`."""
    found: dict[str, list[Any]] = {}
    for column in columns.splitlines():
        found |= json.loads(column)
    lines = zip(*found.values(), strict=True)
    metrics = (
        {key: value for key, value in zip(found, line, strict=True) if value is not None}
        for line in lines
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in metrics)


def read_archive(path: Path) -> dict[str, dict[str, bytes]]:
    """The files of every run, by the run's name."""
    found: dict[str, dict[str, bytes]] = {}
    try:
        unpacked = io.BytesIO(lzma.decompress(path.read_bytes()))
        with tarfile.open(fileobj=unpacked, mode="r:") as archive:
            for member in archive:
                run, _, name = member.name.rpartition("/")
                file = archive.extractfile(member)
                if not run or "/" in run or file is None:
                    raise tarfile.TarError(f"it has {member.name}")
                content = file.read()
                if name == BY_COLUMN:
                    name, content = "metrics.jsonl", by_line(content)
                found.setdefault(run, {})[name] = content
    except (tarfile.TarError, lzma.LZMAError) as error:
        raise RunError(
            f"{path} is no archive of runs ({error}); restore it, or delete it."
        ) from None
    return found


def write_archive(path: Path, runs: Mapping[str, Files]) -> None:
    """Write all runs, by name; the same runs make the same bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for run in sorted(runs):
            for name, data in sorted(runs[run].items()):
                if name == "metrics.jsonl":
                    name, data = BY_COLUMN, by_column(data)
                member = tarfile.TarInfo(f"{run}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    packed = lzma.compress(content.getvalue(), filters=[PACKING])
    write_atomically(path, lambda file: file.write(packed))
