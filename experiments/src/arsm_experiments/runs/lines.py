"""Records as JSON: the one reader and writer of metrics, of measurements and of the benchmarks'
runs.

Most files have a line per record; a measurement that is replaced as a whole is a file of its own. A
file whose name ends in .xz is compressed; a record is added to its lines as a stream of its own, so
that a run is kept as soon as it is finished.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from arsm_experiments.runs.files import write_atomically

Line = dict[str, Any]
COMPRESSED = ".xz"


def read(path: Path) -> list[Line]:
    """All records, none if there is no file. Lines that were cut short are left out."""
    if not path.exists():
        return []
    content = path.read_bytes()
    if path.suffix == COMPRESSED:
        content = lzma.decompress(content)
    return parse(content)


def parse(content: bytes) -> list[Line]:
    """The records of some lines, without those that were cut short."""
    found = []
    for line in content.splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def add(path: Path, record: Line) -> None:
    """Append one record, on a line of its own even if the last one was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if path.suffix == COMPRESSED:
            file.write(_packed([record]))
            return
        file.seek(max(0, file.tell() - 1))
        start = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(start + written([record]))


def write(path: Path, records: Iterable[Line]) -> None:
    """All records; compressed as one stream, which is several times smaller than one for each."""
    compressed = path.suffix == COMPRESSED
    path.write_bytes(_packed(records) if compressed else written(records))


def read_one(path: Path) -> Line:
    """The record of a file that has one."""
    content = path.read_bytes()
    return json.loads(lzma.decompress(content) if path.suffix == COMPRESSED else content)


def write_one(path: Path, record: Line) -> None:
    """A file with one record, atomically: another process may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(record, indent=1).encode() + b"\n"
    if path.suffix == COMPRESSED:
        content = _xz(content)
    write_atomically(path, lambda file: file.write(content))


def written(records: Iterable[Line]) -> bytes:
    """The lines of some records."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _packed(records: Iterable[Line]) -> bytes:
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    return _xz(lines.encode())


def _xz(content: bytes) -> bytes:
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
