"""The tables of benchmarks/README.md: what the commands printed, kept under results/benchmarks."""

from __future__ import annotations

import statistics
from functools import partial

from arsm_experiments.report.pages.tables import Part, Tables, markdown
from arsm_experiments.runs.lines import read_one

SHOWN = ("univariate", "overhead")


def block(tables: Tables, name: str) -> str:
    """The tables of NAME.txt, and the line above them, which says where they were made."""
    text = (tables.results / "benchmarks" / f"{name}.txt").read_text()
    about, _, printed = text.partition("\n\n")
    return f"```\n{printed.rstrip()}\n```\n\n`{about}`\n"


def against(tables: Tables) -> str:
    """Medians of the rows that two trees ran in turns on a GPU, and the tree that was new then."""
    measured = read_one(tables.results / "benchmarks" / "gpu_against.json")
    rows = []
    for name, times in measured["times"].items():
        old, new = (statistics.median(times[tree]) for tree in ("old", "new"))
        rows.append([name, f"{old:.3g} ms", f"{new:.3g} ms", f"{new / old:.2f}"])
    about = measured["provenance"]
    where = f"`after` is commit {about['commit'][:7]}, on one {about['hardware']}."
    return markdown(["", "before", "after", "after / before"], rows) + f"\n{where}"


PARTS: dict[str, Part] = {
    **{name: partial(block, name=name) for name in SHOWN},
    "against": against,
}
