"""Writing a run folder: metrics, checkpoints and TensorBoard events, resumable at any moment."""

from __future__ import annotations

import fcntl
import io
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from arsm_experiments.runs.files import RunError, make_folder, sync_folder, write_atomically
from arsm_experiments.runs.lines import written
from arsm_experiments.runs.provenance import provenance
from arsm_experiments.runs.reader import FORMAT, load_checkpoint, parse_metrics, read_header

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

NO_CHECKPOINT = {"step": 0, "seconds": 0.0, "metrics_bytes": 0, "rng": None, "state": None}


class Run:
    """An open run folder, made by `open_run`; as a context manager it marks the run finished if
    nothing is raised.
    """

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder = folder
        self._finished = header.get("finished", False)
        self._header = {**header, "finished": False}
        self._events: SummaryWriter | NoEvents | None = None
        self._metrics = _lock(folder)
        path = folder / "checkpoint.pt"
        checkpoint = load_checkpoint(path) if path.exists() else NO_CHECKPOINT
        self.step: int = checkpoint["step"]
        """The step of the last checkpoint; 0 without one."""
        self.state: dict[str, Any] | None = checkpoint["state"]
        """The state saved then; None without a checkpoint."""
        self._seconds_before: float = checkpoint["seconds"]
        self._started = time.monotonic()
        # lines after the checkpoint are of steps that will be made again
        self._cut_metrics(checkpoint["metrics_bytes"])
        # noise from the global generators goes on as if nothing had happened
        if checkpoint["rng"] is not None:
            torch.set_rng_state(checkpoint["rng"]["cpu"])
            # another number of GPUs has no state to go on with
            if (
                torch.cuda.is_available()
                and len(checkpoint["rng"]["cuda"]) == torch.cuda.device_count()
            ):
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
        """Wall-clock seconds, including those before a resume, up to the checkpoint."""
        return self._seconds_before + time.monotonic() - self._started

    def log(self, step: int, metrics: Mapping[str, float], seed: int | None = None) -> None:
        """Append a flat dict of numbers, for one seed if the run has several."""
        place = {"step": step} if seed is None else {"step": step, "seed": seed}
        line = {**place, "seconds": round(self.seconds, 3), **metrics}
        events = self._begin()
        self._metrics.write(written([line]))
        self._metrics.flush()
        add_events(events, line)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Checkpoint a dict of tensors, numbers, strings, lists and dicts.

        The state of torch's global generator is saved too; put those of your own generators into
        `state`.
        """
        # the checkpoint names the metrics' size: they must be on the disk before it
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
        # not directly into the file: torch does not report a full disk
        torch.save(checkpoint, whole)
        write_atomically(self.folder / "checkpoint.pt", lambda file: file.write(whole.getbuffer()))
        self._begin().flush()

    def _begin(self) -> SummaryWriter | NoEvents:
        """Record the session when it first writes: opening a finished run must not change it."""
        if self._events is None:
            self._finished = False
            self._write_header()
            try:
                # here, because it takes a second to import
                from torch.utils.tensorboard.writer import SummaryWriter
            except ModuleNotFoundError:
                self._events = NoEvents()
            else:
                # they may extend beyond the checkpoint
                for old in self.folder.glob("events.out.tfevents.*"):
                    old.unlink()
                self._events = SummaryWriter(self.folder)
                path = self.folder / "metrics.jsonl"
                for line in parse_metrics(path, path.read_bytes()):
                    add_events(self._events, line)
        return self._events

    def _write_header(self) -> None:
        write_atomically(
            self.folder / "config.json", lambda file: file.write(_pretty(self._header))
        )

    def _cut_metrics(self, size: int) -> None:
        found = self._metrics.seek(0, os.SEEK_END)
        if found < size:
            raise RunError(
                f"{self.folder}/metrics.jsonl has {found} bytes, but its checkpoint was made after "
                f"{size}; restore the file, or start again under another --root."
            )
        self._metrics.truncate(size)
        self._metrics.seek(size)


def add_events(events: SummaryWriter | NoEvents, line: Mapping[str, float]) -> None:
    """A line of metrics for TensorBoard."""
    for key, value in line.items():
        if key not in ("step", "seed", "seconds"):
            events.add_scalar(
                f"{key}/{line['seed']}" if "seed" in line else key, value, int(line["step"])
            )


class NoEvents:
    """Where TensorBoard is not installed."""

    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def open_run(
    root: Path,
    experiment: str,
    name: str,
    config: dict[str, Any],
    *,
    group: str = "",
    label: str = "",
    resume: bool = False,
    device: torch.device | str = "cpu",
) -> Run:
    """Create `root/experiment/name`; with `resume`, continue it if it exists.

    `config` holds all settings that determine the results, including seeds, as JSON; resuming with
    different ones is refused. `group` and `label` are the run's section and name in a report; see
    `Record`.
    """
    folder = root / experiment / name
    # as it will be read again, with lists for tuples
    config = json.loads(json.dumps(config))
    session = provenance(device)
    if not folder.exists():
        words = {"group": group, "label": label or name}
        header = {
            "format": FORMAT,
            "experiment": experiment,
            **words,
            "config": config,
            "sessions": [session],
        }
        _create(folder, header)
        return Run(folder, header)
    if not resume:
        raise RunError(f"{folder} exists; pass --resume to continue it, or choose another --root.")
    header = read_header(folder)
    if header["experiment"] != experiment:
        raise RunError(
            f"{folder} holds a run of {header['experiment']}, not of {experiment}; choose another "
            "--root."
        )
    differ = sorted(
        k for k in {*config, *header["config"]} if config.get(k) != header["config"].get(k)
    )
    if differ:
        changes = ", ".join(
            f"{k} ({header['config'].get(k)} there, {config.get(k)} here)" for k in differ
        )
        raise RunError(
            f"{folder} cannot be resumed with another {changes}; use its own, or choose another "
            "--root."
        )
    if header.get("finished") and not (folder / "checkpoint.pt").exists():
        raise RunError(
            f"{folder} holds a finished run without its checkpoint; choose another --root."
        )
    return Run(folder, {**header, "sessions": [*header["sessions"], session]})


def _create(folder: Path, header: dict[str, Any]) -> None:
    """Create the folder with its config.json in one rename, so that no incomplete folder is ever
    seen.
    """
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as beside:
        made = Path(beside) / folder.name
        made.mkdir()
        write_atomically(made / "config.json", lambda file: file.write(_pretty(header)))
        made.rename(folder)
    sync_folder(folder.parent)


def _pretty(header: dict[str, Any]) -> bytes:
    return json.dumps(header, indent=2).encode() + b"\n"


def _lock(folder: Path) -> BinaryIO:
    """Open metrics.jsonl, locked by this process."""
    file = (folder / "metrics.jsonl").open("ab")
    # a lock ends with its process, however that ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(
            f"{folder} is in use by another process; wait for it, or choose another --root."
        ) from None
    return file
