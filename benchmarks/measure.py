"""Measuring and printing time, memory and hardware, shared by all benchmarks."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from arsm_experiments.runs.provenance import provenance
from benchmarks import records


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over several repetitions."""

    median: float
    low: float
    high: float
    each: tuple[float, ...] = ()
    """Every repetition, for the record."""

    @staticmethod
    def of(times: Sequence[float]) -> Timing:
        """Median and range of single times."""
        return Timing(statistics.median(times), min(times), max(times), tuple(times))

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
    return {name: Timing.of(t) for name, t in times.items()}


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


@dataclass(frozen=True)
class Table:
    """Columns of text, and the single times behind them."""

    title: str
    header: list[str]
    rows: list[list[str]]
    seconds: dict[str, tuple[float, ...]]
    """Every repetition, by row."""

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.header))]
        text = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in lines
        )
        return "\n".join([self.title, *(line.rstrip() for line in text), ""])


def table(
    title: str,
    header: list[str],
    rows: list[list[str]],
    times: Mapping[str, Timing] | None = None,
) -> Table:
    """A table, with the times that it was made from."""
    seconds = {name: timing.each for name, timing in (times or {}).items()}
    return Table(title, header, rows, seconds)


def write_record(folder: Path, name: str, tables: Sequence[Table]) -> None:
    """Keep what a benchmark printed, NAME.txt, and every single time, NAME.jsonl.xz."""
    about = provenance("cpu")
    policy = os.environ.get("OMP_WAIT_POLICY", "default")
    load = round(os.getloadavg()[0], 1)
    head = (
        f"python -m benchmarks {name}, commit {about['commit']}, {about['hardware']}, torch "
        f"{about['torch']}, OMP_WAIT_POLICY={policy}; {load} processes ran or waited.\n\n"
    )
    record = {
        **about,
        "wait policy": policy,
        "processes that ran or waited": load,
        "tables": [
            {
                "title": table.title,
                "seconds": {
                    name: [float(f"{x:.4g}") for x in each] for name, each in table.seconds.items()
                },
            }
            for table in tables
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(head + "\n".join(map(str, tables)))
    records.write(folder / f"{name}.jsonl.xz", [record])
