"""The generated parts of benchmarks/README.md, from the records under results/benchmarks."""

from __future__ import annotations

import json
import lzma
from functools import partial

from arsm_experiments.report.pages.tables import Part, Tables

BENCHMARKS = ("univariate", "overhead")


def block(tables: Tables, name: str) -> str:
    """What the benchmark printed, and where and when it ran."""
    path = tables.results / "benchmarks" / f"{name}.jsonl.xz"
    record = json.loads(lzma.decompress(path.read_bytes()))
    text = "\n".join(table["text"] for table in record["tables"])
    load = record["processes that ran or waited"]
    return (
        f"```\n{text}```\n\n"
        f"{record['hardware']}, torch {record['torch']}, commit {record['commit'][:10]}; on average "
        f"{load:.0f} processes ran or waited meanwhile. Every single time is in "
        f"[`{name}.jsonl.xz`](../results/benchmarks/{name}.jsonl.xz)."
    )


PARTS: dict[str, Part] = {name: partial(block, name=name) for name in BENCHMARKS}
