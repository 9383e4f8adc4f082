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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from arsm_experiments.ecosystem import ENTRIES
from arsm_experiments.ecosystem.entry import Entry, Found
from arsm_experiments.ecosystem.environments import environment_of, variables
from arsm_experiments.runs.provenance import provenance, short_commit


@dataclass(frozen=True)
class Audited:
    """A line of the table."""

    row: str
    version: str
    claim: str
    verdict: str
    finding: str
    scale: str
    draws: str
    seconds: str
    """Of one core: what a loaded machine does not change."""
    hardware: str
    commit: str
    wall: str = ""
    """Seconds by the clock, of one thread, next to whatever else the machine did."""


def run_entry(entry: Entry) -> Audited:
    """One entry, here and now."""
    version = seconds = wall = ""
    if importlib.util.find_spec(entry.module) is None:
        found = Found("not installed", f"pip install {entry.package}")
    else:
        version = f"{entry.package} {importlib.metadata.version(entry.package)}"
        start, clock = time.process_time(), time.perf_counter()
        try:
            found = entry.run()
        except Exception as error:  # another package may raise anything
            found = Found("does not run", f"{type(error).__name__}: {error}"[:300])
        seconds = f"{time.process_time() - start:.0f}"
        wall = f"{time.perf_counter() - clock:.0f}"
    made = provenance("cpu")
    return Audited(
        entry.name,
        version,
        entry.claim,
        *found,
        seconds,
        made["hardware"],
        short_commit(made["commit"]),
        wall,
    )


def run_apart(entries: Sequence[Entry], environments: Path | None) -> Iterator[Audited]:
    """Entries of one package in a process of their own, because some packages change torch when
    they are imported.

    It runs in the environment made for the package, or in this one where there is no folder of
    environments.
    """
    python = sys.executable
    requirements = entries[0].requirements
    if environments is not None and requirements:
        try:
            python = str(environment_of(requirements, environments))
        except subprocess.CalledProcessError as error:
            yield from (_failed(entry, "not installable", str(error)) for entry in entries)
            return
    names = [entry.name for entry in entries]
    code = f"from arsm_experiments.ecosystem.__main__ import main; main(['--json', *{names!r}])"
    waiting = {entry.name: entry for entry in entries}
    with subprocess.Popen(
        [python, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=variables(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"row"'):
                result = Audited(**json.loads(line))
                del waiting[result.row]
                yield result
    yield from (_failed(entry, "does not run", "the process ended") for entry in waiting.values())


def _failed(entry: Entry, verdict: str, reason: str) -> Audited:
    return Audited(entry.name, entry.package, entry.claim, verdict, reason[:300], *[""] * 5)


def export(results: Sequence[Audited], folder: Path) -> None:
    """Write table.csv, keeping the rows of entries that were not run this time."""
    target = folder / "table.csv"
    rows: dict[str, dict[str, str]] = {}
    if target.exists():
        rows = {row["row"]: row for row in csv.DictReader(io.StringIO(target.read_text()))}
    rows |= {result.row: asdict(result) for result in results if result.verdict != "not installed"}
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Audited)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[entry.name] for entry in ENTRIES if entry.name in rows)
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(text.getvalue())
    os.replace(part, target)
