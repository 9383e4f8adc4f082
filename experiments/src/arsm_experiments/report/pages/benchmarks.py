"""The tables of benchmarks/README.md: what the commands printed, kept under results/benchmarks."""

from __future__ import annotations

from functools import partial

from arsm_experiments.report.pages.tables import Part, Tables

SHOWN = ("univariate", "overhead")


def block(tables: Tables, name: str) -> str:
    """The tables of NAME.txt, and the line above them, which says where they were made."""
    text = (tables.results / "benchmarks" / f"{name}.txt").read_text()
    about, _, printed = text.partition("\n\n")
    return f"```\n{printed.rstrip()}\n```\n\n`{about}`\n"


PARTS: dict[str, Part] = {name: partial(block, name=name) for name in SHOWN}
