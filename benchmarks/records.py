"""Records of the benchmarks' runs: the lines of JSON that the experiments write and read."""

from __future__ import annotations

from arsm_experiments.runs.lines import Line as Record
from arsm_experiments.runs.lines import add, read, write

__all__ = ["Record", "add", "read", "write"]
