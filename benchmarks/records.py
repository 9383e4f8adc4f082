"""Records of runs: JSON lines in a file compressed by xz, to which a run is added as soon as it is
finished.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """All records, none if there is no file."""
    if not path.exists():
        return []
    with lzma.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def add(path: Path, record: Record) -> None:
    """Append a record as a compressed stream of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_packed([record]))


def write(path: Path, records: list[Record]) -> None:
    """All records as one stream, which is several times smaller than one for each."""
    path.write_bytes(_packed(records))


def _packed(records: list[Record]) -> bytes:
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    return lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
