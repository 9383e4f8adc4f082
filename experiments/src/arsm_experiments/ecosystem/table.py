"""Run entries, each in a process of its own, and keep the table of their results."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from arsm_experiments.ecosystem import ENTRIES
from arsm_experiments.ecosystem.entry import Entry, Found
from arsm_experiments.runs.provenance import provenance


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    row: str
    version: str
    claim: str
    verdict: str
    finding: str
    scale: str
    draws: str
    seconds: str
    hardware: str
    commit: str
    command: str


def run_entry(entry: Entry) -> Result:
    """One entry, here and now."""
    version = seconds = ""
    if importlib.util.find_spec(entry.module) is None:
        found = Found("not installed", f"pip install {entry.package}")
    else:
        version = f"{entry.package} {importlib.metadata.version(entry.package)}"
        start = time.perf_counter()
        try:
            found = entry.run()
        except Exception as error:  # another package may raise anything
            found = Found("does not run", f"{type(error).__name__}: {error}"[:300])
        seconds = f"{time.perf_counter() - start:.0f}"
    made = provenance("cpu")
    command = f'python -m arsm_experiments.ecosystem "{entry.name}"'
    return Result(entry.name, version, entry.claim, *found, seconds, made["hardware"], made["commit"] or "", command)


def run_apart(entry: Entry) -> Result:
    """One entry in a process of its own, because some packages change torch when they are imported."""
    code = f"from arsm_experiments.ecosystem.__main__ import main; main(['--json', {entry.name!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"row"')]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Result(entry.name, entry.package, entry.claim, "does not run", last[:300], *[""] * 6)
    return Result(**json.loads(lines[-1]))


def export(results: Sequence[Result], folder: Path) -> None:
    """Write table.csv, keeping the rows of entries that were not run this time."""
    target = folder / "table.csv"
    rows: dict[str, dict[str, str]] = {}
    if target.exists():
        rows = {row["row"]: row for row in csv.DictReader(io.StringIO(target.read_text()))}
    rows |= {result.row: asdict(result) for result in results if result.verdict != "not installed"}
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[entry.name] for entry in ENTRIES if entry.name in rows)
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(text.getvalue())
    os.replace(part, target)
