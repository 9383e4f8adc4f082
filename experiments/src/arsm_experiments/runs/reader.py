"""Reading runs, from folders and from archives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arsm_experiments.runs.archive import SUFFIX, Files, read_archive, read_folder
from arsm_experiments.runs.files import RunError

FORMAT = 2
PICTURES = (".png", ".gif")


@dataclass(frozen=True)
class Record:
    """A run, as the report reads it."""

    folder: Path
    """Its path: a folder, or ARCHIVE/NAME."""
    experiment: str
    group: str
    """The section of the report that shows it; empty for the paper's own settings."""
    label: str
    """The method, and the settings that differ from the paper's, in words."""
    config: dict[str, Any]
    sessions: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    seconds: float
    """Wall clock."""
    pictures: Mapping[str, bytes]
    """Image files by name."""

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.folder.name

    def by_seed(self, key: str) -> dict[int | None, dict[int, float]]:
        """The metric by step, for each seed."""
        found: dict[int | None, dict[int, float]] = {}
        for line in self.metrics:
            if key in line:
                found.setdefault(line.get("seed"), {})[line["step"]] = line[key]
        return found

    def series(self, key: str) -> tuple[list[int], list[list[float]]]:
        """The metric at the steps that all seeds have reached: (steps, one list of values per
        seed).
        """
        by_seed = self.by_seed(key)
        steps = sorted(set.intersection(*(set(x) for x in by_seed.values()))) if by_seed else []
        return steps, [[values[step] for step in steps] for values in by_seed.values()]


def read_runs(root: Path) -> list[Record]:
    """All runs under root, by experiment and name; a folder takes precedence over an archived run
    of the same name.
    """
    found: dict[Path, Files] = {}
    for archive in sorted(root.glob(f"*{SUFFIX}")):
        runs = read_archive(archive)
        found |= {
            root / archive.name.removesuffix(SUFFIX) / name: files for name, files in runs.items()
        }
    # later, so that folders replace what archives hold
    found |= {path.parent: read_folder(path.parent) for path in root.glob("*/*/config.json")}
    return [make_record(folder, found[folder]) for folder in sorted(found)]


def read_run(folder: Path) -> Record:
    """Read a run folder, finished or not; an incomplete last line of a killed run is skipped."""
    return make_record(folder, read_folder(folder))


def make_record(folder: Path, files: Files) -> Record:
    """A run from its files by name."""
    header = parse_header(folder, files.get("config.json"))
    metrics = parse_metrics(folder / "metrics.jsonl", files.get("metrics.jsonl", b""))
    return Record(
        folder,
        header["experiment"],
        header["group"],
        header["label"],
        header["config"],
        header["sessions"],
        metrics,
        max((line["seconds"] for line in metrics), default=0.0),
        {name: content for name, content in files.items() if name.endswith(PICTURES)},
    )


def is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the folder holds a finished run with these settings."""
    try:
        header = read_header(folder)
    except RunError:
        return False
    # a run may have more settings than were asked for: some are decided while it runs
    asked = json.loads(json.dumps(config))
    return header.get("finished", False) and all(
        header["config"].get(key) == asked[key] for key in asked
    )


def read_header(folder: Path) -> dict[str, Any]:
    """The content of config.json."""
    path = folder / "config.json"
    return parse_header(folder, path.read_bytes() if path.is_file() else None)


def parse_header(folder: Path, content: bytes | None) -> dict[str, Any]:
    """Parse config.json; None means a folder without one."""
    if content is None:
        raise RunError(
            f"{folder} is not a run folder: it has no config.json; choose another --root, or "
            "delete it."
        )
    try:
        header = json.loads(content)
        if (
            header["format"] != FORMAT
            or not {"experiment", "group", "label", "config", "sessions"} <= header.keys()
        ):
            raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(
            f"{folder}/config.json is not one that this version of arsm writes; choose another "
            "--root, or delete the folder."
        ) from None
    return header


def parse_metrics(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Parse the complete lines of a metrics.jsonl."""
    metrics = []
    # what follows the last line's end was never written to its end
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            metrics.append(json.loads(line))
            if not {"step", "seconds"} <= metrics[-1].keys():
                raise KeyError
        except (ValueError, KeyError, AttributeError):
            raise RunError(
                f"{path} is damaged in line {number}; resume the run if that line is newer than "
                "its checkpoint, or delete its folder."
            ) from None
    return metrics


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint.pt written by `Run.save`: `step`, `state` and more, on the
    CPU.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["format"] != FORMAT:
            raise KeyError
        return checkpoint
    # torch.load raises various exceptions for files that it cannot read
    except Exception:
        raise RunError(
            f"{path} is damaged or not one that this version of arsm writes; delete it to start "
            "this run again."
        ) from None
