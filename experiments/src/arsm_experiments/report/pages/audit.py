"""The generated parts of results/audit/README.md."""

from __future__ import annotations

from collections.abc import Mapping

from arsm_experiments.ecosystem.figure import COLOURS, kind, summary
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
    judged = [
        line
        for line in tables.lines("audit/table.csv")
        if line["verdict"] in ("unbiased", "wrong") and _current(line)
    ]
    count = len({_package(line) for line in judged})
    broken = sum(kind(line) == "not as documented" for line in judged)
    names = tables.lines("audit/coverage.csv")
    entries = sum(bool(line["entry"]) for line in names)
    return "\n".join(
        [
            *lines,
            "",
            f"Of current releases, our own apart, {len(judged)} gradients of {count} packages are "
            f"judged, {broken} of them not as documented. Announced bias is no defect. "
            "`coverage.csv` lists all names that the registries of the five trainers export: "
            f"{entries} have an entry, {len(names) - entries} a reason why not.",
        ]
    )


def _package(line: Mapping[str, str]) -> str:
    """The package of an entry, with the release if that is an older one."""
    return line["row"].partition(":")[0]


def _current(line: Mapping[str, str]) -> bool:
    """Whether an entry is of another package's current release."""
    return _package(line) != "arsm" and " " not in _package(line)


def trust(tables: Tables) -> str:
    """What an audit takes, and its false alarms."""
    lines = [
        line
        for line in tables.lines("audit/table.csv")
        if line["row"].partition(":")[0] in TRAINERS and line["verdict"] in ("unbiased", "wrong")
    ]
    seconds = [float(line["seconds"]) for line in lines]
    (alarms,) = (
        line
        for line in tables.lines("audit/referee.csv")
        if line["row"] == CORRECT and line["declared"] == RATE
    )
    number = int(alarms["audits"])
    return (
        f"An audit of a trainer's loss takes {min(seconds):.0f} to {max(seconds):.0f} CPU seconds "
        "on one thread. Sampled audits of correct losses (`referee.csv`) gave "
        f"{number * float(alarms['value']):.0f} alarms in {number:,}, at a declared rate of "
        f"{float(RATE):.0%}."
    )


PARTS = {"packages": packages, "trust": trust}
