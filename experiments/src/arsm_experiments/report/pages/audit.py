"""The generated parts of results/audit/README.md."""

from __future__ import annotations

from arsm_experiments.ecosystem.figure import COLOURS, summary
from arsm_experiments.report.pages.tables import Tables

TRAINERS = ("trl", "verl", "openrlhf", "skyrl", "tunix")
CORRECT = "reduced audits of correct losses"
RATE = "0.05"
"""The declared rate of false alarms that the page names."""


def packages(tables: Tables) -> str:
    """How many parts of each package are what, and what the registries have."""
    header = ["package", "version", "entries", *COLOURS, "not judged"]
    lines = [
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
        *summary(tables.results / "audit" / "table.csv"),
    ]
    names = tables.lines("audit/coverage.csv")
    judged = sum(bool(line["entry"]) for line in names)
    return "\n".join(
        [
            *lines,
            "",
            "Announced bias is no defect. `coverage.csv` lists all names that the registries of "
            f"the five trainers export: {judged} have an entry, {len(names) - judged} a reason why "
            "not.",
        ]
    )


def trust(tables: Tables) -> str:
    """What an audit takes, and its false alarms."""
    lines = [
        line
        for line in tables.lines("audit/table.csv")
        if line["row"].partition(":")[0] in TRAINERS and line["verdict"] in ("unbiased", "wrong")
    ]
    seconds = [float(line["seconds"]) for line in lines]
    wall = max(float(line["wall"] or 0) for line in lines)
    (alarms,) = (
        line
        for line in tables.lines("audit/referee.csv")
        if line["row"] == CORRECT and line["declared"] == RATE
    )
    number = int(alarms["audits"])
    return (
        f"An audit of a trainer's loss takes {min(seconds):.0f} to {max(seconds):.0f} CPU seconds "
        f"on one thread, and up to {wall:.0f} by the clock on two busy cores. Sampled audits of "
        f"correct losses (`referee.csv`) gave {number * float(alarms['value']):.0f} alarms in "
        f"{number:,}, at a declared rate of {float(RATE):.0%}."
    )


PARTS = {"packages": packages, "trust": trust}
