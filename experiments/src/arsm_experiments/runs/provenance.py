"""The provenance of a run: commit, hardware and versions."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device | str) -> dict[str, Any]:
    """Commit, hardware and versions of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": _hardware(torch.device(device)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def short_commit(commit: str | None) -> str:
    """The first ten digits, and "-dirty" where there were changes; records keep all forty."""
    return re.sub(r"^([0-9a-f]{10})[0-9a-f]*", r"\1", commit or "")


def _commit() -> str | None:
    """The commit of this source, with "-dirty" if changed since; None if installed or not under
    git.
    """
    if "ARSM_COMMIT" in os.environ:  # for a copy of the source without its history
        return os.environ["ARSM_COMMIT"]
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ignored = (
            subprocess.run([*git, "check-ignore", "-q", str(here)], capture_output=True).returncode
            == 0
        )
        if not ignored:
            words = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            return (
                subprocess.run(words, capture_output=True, check=True, text=True).stdout.strip()
                or None
            )
    return None


def _hardware(device: torch.device) -> str:
    """The GPU's name, or the processor's and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
            name,
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
