"""Measuring and printing time, memory and hardware, shared by all benchmarks."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over several repetitions."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{seconds(self.median)} ({seconds(self.low)} to {seconds(self.high)})"


def seconds(x: float) -> str:
    """A duration with a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x / 1e-6:.3g} us"


def interleaved(
    calls: dict[str, Callable[[], object]],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the calls alternately, so that a busy moment of the machine affects all of them; the
    first round warms up.

    With one thread, `time.process_time` excludes the time of other processes on a shared machine.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if repetition:
                times[name].append(clock() - start)
    return {name: Timing(statistics.median(t), min(t), max(t)) for name, t in times.items()}


def peak_memory() -> int:
    """Peak memory of this process in bytes (Linux); `ru_maxrss` would include its parent's."""
    (line,) = (
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def in_subprocess(module: str, *arguments: str) -> str:
    """The output of `python -m module arguments`: a fresh process, whose peak memory is its own."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def hardware() -> str:
    """The processor, its cores, threads in use and torch's version."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Columns of text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    return "\n".join([title, *(line.rstrip() for line in lines), ""])
