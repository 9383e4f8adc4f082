"""Run folders: everything an experiment leaves behind, safe against being killed at any moment.

    runs/<experiment>/<name>/
        config.json      what was asked for, where it ran (one session for each start and resume), whether it finished
        metrics.jsonl    one flat object a line: step, seed (if any), seconds and the metrics
        checkpoint.pt    the state at the last checkpoint, its step, and how much of metrics.jsonl belongs to it
        events.*         the same metrics for TensorBoard

A checkpoint replaces the one before it in a single rename, after the metrics before it are on the disk. Resuming cuts
metrics.jsonl back to the checkpoint, so that a run that was killed and resumed leaves the same file as one that
never was, but for its seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

FORMAT = 1
ADDED = {
    "vae": {"sampled_pixels": False},
    "conditional": {"sampled_pixels": False, "pixel_bias": "zero"},
}
"""Settings that came after an experiment's first runs, with what those had."""
NO_CHECKPOINT = {"step": 0, "seconds": 0.0, "metrics_bytes": 0, "rng": None, "state": None}


class RunError(Exception):
    """Something about a run folder that its user can put right."""


class Run:
    """An open run folder, made by `open_run`; a context manager, and left without an exception the run is finished."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder = folder
        self._finished = header.get("finished", False)
        self._header = {**header, "finished": False}
        self._events: SummaryWriter | NoEvents | None = None
        self._metrics = _lock(folder)
        path = folder / "checkpoint.pt"
        checkpoint = load_checkpoint(path) if path.exists() else NO_CHECKPOINT
        self.step: int = checkpoint["step"]
        """The step of the last checkpoint, 0 without one."""
        self.state: dict[str, Any] | None = checkpoint["state"]
        """What was saved then, None without a checkpoint."""
        self._seconds_before: float = checkpoint["seconds"]
        self._started = time.monotonic()
        self._cut_metrics(checkpoint["metrics_bytes"])
        if checkpoint["rng"] is not None:
            torch.set_rng_state(checkpoint["rng"]["cpu"])
            if torch.cuda.is_available() and len(checkpoint["rng"]["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(checkpoint["rng"]["cuda"])

    def __enter__(self) -> Run:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None and not self._finished:
            self._header["finished"] = True
            self._write_header()
        if self._events is not None:
            self._events.close()
        self._metrics.close()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds spent, those before a resume included up to its checkpoint."""
        return self._seconds_before + time.monotonic() - self._started

    def log(self, step: int, metrics: Mapping[str, float], seed: int | None = None) -> None:
        """Append a flat dict of numbers, for one seed where the run holds several."""
        place = {"step": step} if seed is None else {"step": step, "seed": seed}
        line = {**place, "seconds": round(self.seconds, 3), **metrics}
        events = self._begin()
        self._metrics.write(json.dumps(line).encode() + b"\n")
        self._metrics.flush()
        add_events(events, line)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Checkpoint a dict of tensors, numbers, strings, lists and dicts.

        The state of torch's global random numbers is kept with it; that of your generators belongs into `state`.
        """
        os.fsync(self._metrics.fileno())
        checkpoint = {
            "format": FORMAT,
            "step": step,
            "seconds": self.seconds,
            "metrics_bytes": self._metrics.tell(),
            "rng": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            },
            "state": state,
        }
        whole = io.BytesIO()
        torch.save(checkpoint, whole)  # not into the file: torch does not say that a disk is full
        write_atomically(self.folder / "checkpoint.pt", lambda file: file.write(whole.getbuffer()))
        self._begin().flush()

    def _begin(self) -> SummaryWriter | NoEvents:
        """Note the session at its first sign of life, so that opening a finished run leaves it as it is."""
        if self._events is None:
            self._finished = False
            self._write_header()
            try:
                from torch.utils.tensorboard.writer import SummaryWriter  # takes a second to import
            except ModuleNotFoundError:
                self._events = NoEvents()
            else:
                for old in self.folder.glob("events.out.tfevents.*"):  # they may go further than the checkpoint
                    old.unlink()
                self._events = SummaryWriter(self.folder)
                for line in read_metrics(self.folder / "metrics.jsonl"):
                    add_events(self._events, line)
        return self._events

    def _write_header(self) -> None:
        write_atomically(self.folder / "config.json", lambda file: file.write(_pretty(self._header)))

    def _cut_metrics(self, size: int) -> None:
        found = self._metrics.seek(0, os.SEEK_END)
        if found < size:
            raise RunError(
                f"{self.folder}/metrics.jsonl has {found} bytes, but its checkpoint was made after {size}; restore the "
                "file, or start again under another --root."
            )
        self._metrics.truncate(size)
        self._metrics.seek(size)


def add_events(events: SummaryWriter | NoEvents, line: Mapping[str, float]) -> None:
    """What a line of metrics says, for TensorBoard."""
    for key, value in line.items():
        if key not in ("step", "seed", "seconds"):
            events.add_scalar(f"{key}/{line['seed']}" if "seed" in line else key, value, int(line["step"]))


class NoEvents:
    """Where TensorBoard is not installed."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Record:
    """A run folder as the report reads it."""

    folder: Path
    experiment: str
    name: str
    config: dict[str, Any]
    sessions: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    seconds: float
    """Wall clock."""

    def by_seed(self, key: str) -> dict[int | None, dict[int, float]]:
        """The metric by step, along each seed's own run."""
        found: dict[int | None, dict[int, float]] = {}
        for line in self.metrics:
            if key in line:
                found.setdefault(line.get("seed"), {})[line["step"]] = line[key]
        return found

    def series(self, key: str) -> tuple[list[int], list[list[float]]]:
        """(steps, one list of values a seed): the metric at the steps that all seeds have come to."""
        by_seed = self.by_seed(key)
        steps = sorted(set.intersection(*(set(x) for x in by_seed.values()))) if by_seed else []
        return steps, [[values[step] for step in steps] for values in by_seed.values()]


def open_run(
    root: Path,
    experiment: str,
    name: str,
    config: dict[str, Any],
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
) -> Run:
    """Make `root/experiment/name`, or with `resume` go on with it where it exists.

    `config` is what decides the results, seeds included, as JSON can hold it; resuming refuses one that differs.
    """
    folder = root / experiment / name
    config = json.loads(json.dumps(config))
    session = provenance(device)
    if not folder.exists():
        header = {"format": FORMAT, "experiment": experiment, "config": config, "sessions": [session]}
        _create(folder, header)
        return Run(folder, header)
    if not resume:
        raise RunError(f"{folder} exists; pass --resume to go on with it, or choose another --root.")
    header = read_header(folder)
    if header["experiment"] != experiment:
        raise RunError(f"{folder} holds a run of {header['experiment']}, not of {experiment}; choose another --root.")
    differ = sorted(k for k in {*config, *header["config"]} if config.get(k) != header["config"].get(k))
    if differ:
        changes = ", ".join(f"{k} ({header['config'].get(k)} there, {config.get(k)} here)" for k in differ)
        raise RunError(f"{folder} cannot be resumed with another {changes}; use its own, or choose another --root.")
    if header.get("finished") and not (folder / "checkpoint.pt").exists():
        raise RunError(f"{folder} holds a finished run without its checkpoint; choose another --root.")
    return Run(folder, {**header, "sessions": [*header["sessions"], session]})


def is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the folder holds a run of these settings, among others perhaps, that has come to its end."""
    try:
        header = read_header(folder)
    except RunError:
        return False
    asked = json.loads(json.dumps(config))
    return header.get("finished", False) and all(header["config"].get(key) == asked[key] for key in asked)


def find_runs(root: Path) -> list[Path]:
    """All run folders under root, sorted."""
    return sorted(path.parent for path in root.glob("*/*/config.json"))


def read_run(folder: Path) -> Record:
    """A run folder, finished or not; a last line that a killed run left unfinished is passed over."""
    header = read_header(folder)
    metrics = read_metrics(folder / "metrics.jsonl")
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    return Record(folder, header["experiment"], folder.name, header["config"], header["sessions"], metrics, seconds)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl."""
    metrics = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            metrics.append(json.loads(line))
            if not {"step", "seconds"} <= metrics[-1].keys():
                raise KeyError
        except (ValueError, KeyError, AttributeError):
            raise RunError(
                f"{path} is damaged in line {number}; resume the run if that line is younger than its checkpoint, or "
                "delete its folder."
            ) from None
    return metrics


def plain_name(words: str) -> str:
    """Words as a part of a folder's name: rloo:samples=4 as rloo-samples=4, 4*arsm as 4xarsm."""
    return words.translate(str.maketrans({":": "-", ",": "-", "/": "-", "*": "x", " ": "", "^": ""}))


def merge_seeds(
    records: Sequence[Record], *apart: str, seconds: Callable[[Iterable[float]], float] = sum
) -> list[Record]:
    """One record of those that differ in their seeds only, or in the settings `apart`.

    It is the one with the smallest seed, with the metrics and sessions of all; a seed that ran twice counts once.
    `seconds` makes one figure of theirs: the sum where they ran one after another.
    """
    alike: dict[str, list[Record]] = {}
    for record in records:
        config = {key: value for key, value in record.config.items() if key not in ("seed", "seeds", *apart)}
        alike.setdefault(json.dumps(config, sort_keys=True), []).append(record)
    merged = []
    for parts in alike.values():
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


def read_header(folder: Path) -> dict[str, Any]:
    """What config.json holds, with the settings that it is too old to know."""
    path = folder / "config.json"
    if not path.is_file():
        raise RunError(f"{folder} is no run folder: it has no config.json; choose another --root, or delete it.")
    try:
        header = json.loads(path.read_text())
        if header["format"] != FORMAT or not {"experiment", "config", "sessions"} <= header.keys():
            raise KeyError
        header["config"] = {**ADDED.get(header["experiment"], {}), **header["config"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(
            f"{path} is not one that this version of arsm writes; choose another --root, or delete the folder."
        ) from None
    return header


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `Run.save` wrote to a checkpoint.pt: its `step`, its `state` and more, on the CPU."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["format"] != FORMAT:
            raise KeyError
        return checkpoint
    except Exception:  # torch.load has no one exception for files that it cannot read
        raise RunError(
            f"{path} is damaged or not one that this version of arsm writes; delete it to start this run again."
        ) from None


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write path whole or not at all: a file beside it, flushed to the disk, then renamed."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}; make room, or choose another --root."
        ) from error
    beside.replace(path)
    _sync_folder(path.parent)


def provenance(device: torch.device | str) -> dict[str, Any]:
    """Where and with what this process runs."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": _hardware(torch.device(device)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _commit() -> str | None:
    """The commit of the source this runs from, "-dirty" if changed since; None if installed or not under git."""
    if "ARSM_COMMIT" in os.environ:  # for a copy of the source without its history
        return os.environ["ARSM_COMMIT"]
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ignored = subprocess.run([*git, "check-ignore", "-q", str(here)], capture_output=True).returncode == 0
        if not ignored:
            words = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            return subprocess.run(words, capture_output=True, check=True, text=True).stdout.strip() or None
    return None


def _hardware(device: torch.device) -> str:
    """The GPU's name, or the processor's and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _create(folder: Path, header: dict[str, Any]) -> None:
    """Make the folder with its config.json in one rename, so that no half of it is ever seen."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as beside:
        made = Path(beside) / folder.name
        made.mkdir()
        write_atomically(made / "config.json", lambda file: file.write(_pretty(header)))
        made.rename(folder)
    _sync_folder(folder.parent)


def _pretty(header: dict[str, Any]) -> bytes:
    return json.dumps(header, indent=2).encode() + b"\n"


def _lock(folder: Path) -> BinaryIO:
    """metrics.jsonl, which one process at a time may hold."""
    file = (folder / "metrics.jsonl").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"{folder} is in use by another process; wait for it, or choose another --root.") from None
    return file


def _sync_folder(folder: Path) -> None:
    """Put a rename on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
