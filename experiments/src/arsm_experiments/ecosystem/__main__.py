"""python -m arsm_experiments.ecosystem: run the entries that match."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from arsm_experiments.ecosystem import ENTRIES
from arsm_experiments.ecosystem.environments import default_folder
from arsm_experiments.ecosystem.table import Audited, export, run_apart, run_entry


def main(arguments: list[str] | None = None) -> None:
    """Run the entries that match, print a line each, and export them if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m arsm_experiments.ecosystem",
        description="Released packages under arsm.audit.",
    )
    parser.add_argument(
        "names", nargs="*", default=["*"], help="entries, with wildcards (default: all)"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write FOLDER/table.csv and directions.png"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=default_folder(),
        metavar="FOLDER",
        help="where each package gets a virtual environment of its own (default: %(default)s)",
    )
    parser.add_argument(
        "--here", action="store_true", help="run in this environment, with what is installed in it"
    )
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    exact = {entry.name: entry for entry in ENTRIES}
    patterns = [name for name in given.names if name not in exact]
    chosen = [
        e
        for e in ENTRIES
        if e.name in given.names or any(fnmatch.fnmatch(e.name, p) for p in patterns)
    ]
    if not chosen:
        parser.error(
            f"no entry matches {given.names}; known are: {'; '.join(e.name for e in ENTRIES)}."
        )
    if given.json:
        for entry in chosen:
            print(json.dumps(asdict(run_entry(entry))), flush=True)
        return
    from arsm_experiments.ecosystem.figure import draw  # the environments have no matplotlib

    results: list[Audited] = []
    start = time.perf_counter()
    for _, group in itertools.groupby(chosen, key=lambda entry: entry.requirements):
        for result in run_apart(list(group), None if given.here else given.environments):
            results.append(result)
            left = (time.perf_counter() - start) / len(results) * (len(chosen) - len(results))
            print(f"{result.row}: {result.verdict}. {result.finding}".rstrip(), flush=True)
            print(
                f"{len(results)} of {len(chosen)}, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
            if given.export:
                export(results, given.export)
    if given.export:
        draw(given.export / "table.csv", given.export / "directions.png")


if __name__ == "__main__":
    main()
