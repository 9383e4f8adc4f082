"""One compressed archive per experiment, ROOT/<experiment>.tar.xz, with the files that a report needs of each run.

The same runs always make the same bytes: names are sorted, and times and owners are left out.
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
DIGITS = 8
"""Digits of an archived metric: two more than tables have, and half the bytes of all of them."""
DRAWN_DIGITS = 5
DRAWN = frozenset(
    {
        "entropy",
        "gradient_first",
        "gradient_last",
        "gradient_variance",
        "probability_first",
        "probability_last",
        "pseudo_action_share",
    }
)
"""Metrics that figures show and tables do not: DRAWN_DIGITS are finer than a pixel."""

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


def shortened(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """A metrics.jsonl with numbers of DIGITS digits, of DRAWN_DIGITS where they are only drawn."""

    def short(key: str, value: Any) -> Any:
        digits = DRAWN_DIGITS if key in DRAWN else DIGITS
        return float(f"{value:.{digits}g}") if isinstance(value, float) else value

    return b"".join(json.dumps({key: short(key, line[key]) for key in line}).encode() + b"\n" for line in metrics)


def read_archive(path: Path) -> dict[str, dict[str, bytes]]:
    """The files of every run, by the run's name."""
    found: dict[str, dict[str, bytes]] = {}
    try:
        content = io.BytesIO(lzma.decompress(path.read_bytes()))
        with tarfile.open(fileobj=content, mode="r:") as archive:
            for member in archive:
                run, _, name = member.name.rpartition("/")
                file = archive.extractfile(member)
                if not run or "/" in run or file is None:
                    raise tarfile.TarError(f"it has {member.name}")
                found.setdefault(run, {})[name] = file.read()
    except (tarfile.TarError, lzma.LZMAError) as error:
        raise RunError(f"{path} is no archive of runs ({error}); restore it, or delete it.") from None
    return found


def write_archive(path: Path, runs: Mapping[str, Files]) -> None:
    """Write all runs, by name; the same runs make the same bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for run in sorted(runs):
            for name, data in sorted(runs[run].items()):
                member = tarfile.TarInfo(f"{run}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    packed = lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    write_atomically(path, lambda file: file.write(packed))
