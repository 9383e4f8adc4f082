"""python -m arsm_experiments.ecosystem: run the entries that match."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from arsm_experiments.ecosystem import ENTRIES
from arsm_experiments.ecosystem.table import export, run_apart, run_entry


def main(arguments: list[str] | None = None) -> None:
    """Run the entries that match, print a line each, and export them if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m arsm_experiments.ecosystem", description="Released packages under arsm.audit."
    )
    parser.add_argument("names", nargs="*", default=["*"], help="entries, with wildcards (default: all)")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write FOLDER/table.csv")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    chosen = [e for e in ENTRIES if any(fnmatch.fnmatch(e.name, name) for name in given.names)]
    if not chosen:
        parser.error(f"no entry matches {given.names}; known are: {'; '.join(e.name for e in ENTRIES)}.")
    if given.json:
        print(json.dumps(asdict(run_entry(chosen[0]))))
        return
    results, start = [], time.perf_counter()
    for done, entry in enumerate(chosen):
        result = run_apart(entry)
        results.append(result)
        left = (time.perf_counter() - start) / (done + 1) * (len(chosen) - done - 1)
        print(f"{entry.name}: {result.verdict}. {result.finding}".rstrip(), flush=True)
        print(f"{done + 1} of {len(chosen)}, about {left:.0f} s left", file=sys.stderr, flush=True)
        if given.export:
            export(results, given.export)


if __name__ == "__main__":
    main()
