"""The generated parts of the pages of results/audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from arsm_experiments.ecosystem.figure import COLOURS, kind, summary
from arsm_experiments.report.pages.tables import Tables, markdown

TRAINERS = ("trl", "verl", "openrlhf", "skyrl", "tunix")
UNBIASED, BIASED, BROKEN = COLOURS
TOKEN_BY_TOKEN = "it has the gradient token by token"
"""The finding of a KL penalty that leaves out what a token does to later ones."""
CORRECT = "reduced audits of correct losses"
RATE = "0.05"
"""The declared rate of false alarms that the page names."""


def answer(tables: Tables) -> str:
    """How many gradients of current releases are as documented, our own apart."""
    judged = [line for line in _judged(tables) if _current(line) and _package(line) != "arsm"]
    kinds = Counter(map(kind, judged))
    penalties = sum(kind(line) == BROKEN and TOKEN_BY_TOKEN in line["finding"] for line in judged)
    packages = len(set(map(_package, judged)))
    scaled = sum(kind(line) == UNBIASED and _scaled(line) for line in judged)
    return (
        f"**Finding.** **Of {len(judged)} gradients in current releases of {packages} other "
        f"packages, {kinds[BROKEN]} are not as documented.** "
        f"{kinds[UNBIASED]} are unbiased, {scaled} of them up to a constant factor, and "
        f"{kinds[BIASED]} are biased without a promise of the opposite. {penalties} of the "
        f"{kinds[BROKEN]} are penalties on a KL divergence that are right for single tokens but "
        "not for whole answers."
    )


def _scaled(line: Mapping[str, str]) -> bool:
    """Whether an enumerated gradient has another length than the objective's; those that were
    sampled have an interval instead.
    """
    length, enumerated, _ = line["scale"].partition(", direction")
    return bool(enumerated) and abs(float(length) - 1) > 0.01


def packages(tables: Tables) -> str:
    """How many judged gradients of each current release are what."""
    releases: dict[str, list[dict[str, str]]] = {}
    for line in _judged(tables):
        if _current(line):
            release = f"{_package(line)} {line['version'].split(' ')[-1]}"
            releases.setdefault(release, []).append(line)
    return markdown(
        ["package", *COLOURS], [[name, *_counts(own)] for name, own in releases.items()]
    )


def _counts(lines: Sequence[dict[str, str]]) -> list[str]:
    """How many of these gradients are of each kind."""
    kinds = Counter(map(kind, lines))
    return [f"{kinds[name]}" for name in COLOURS]


def entries(tables: Tables) -> str:
    """All entries, those of older releases and those that were not judged among them."""
    header = ["package", "version", "entries", *COLOURS, "not judged"]
    names = tables.lines("audit/coverage.csv")
    covered = sum(bool(line["entry"]) for line in names)
    return "\n".join(
        [
            f"| {' | '.join(header)} |",
            "|---" * len(header) + "|",
            *summary(tables.results / "audit" / "table.csv"),
            "",
            "`coverage.csv` lists all names that the registries of the five trainers export: "
            f"{covered} have an entry, {len(names) - covered} a reason why not.",
        ]
    )


def _judged(tables: Tables) -> list[dict[str, str]]:
    """The entries that have a verdict."""
    return [
        line for line in tables.lines("audit/table.csv") if line["verdict"] in ("unbiased", "wrong")
    ]


def _package(line: Mapping[str, str]) -> str:
    """The package of an entry, with the release if that is an older one."""
    return line["row"].partition(":")[0]


def _current(line: Mapping[str, str]) -> bool:
    """Whether an entry is of a package's current release."""
    return " " not in _package(line)


def trust(tables: Tables) -> str:
    """The time of an audit, and its false alarms."""
    seconds = [float(line["seconds"]) for line in _judged(tables) if _package(line) in TRAINERS]
    (alarms,) = (
        line
        for line in tables.lines("audit/referee.csv")
        if line["row"] == CORRECT and line["declared"] == RATE
    )
    number = int(alarms["audits"])
    return (
        f"- An audit of a trainer's loss takes {min(seconds):.0f} to {max(seconds):.0f} CPU "
        "seconds on one thread.\n- Sampled audits of correct losses (`referee.csv`) gave "
        f"{number * float(alarms['value']):.0f} alarms in {number:,}, at a declared rate of "
        f"{float(RATE):.0%}."
    )


PARTS = {"answer": answer, "packages": packages, "trust": trust}
HISTORY_PARTS = {"entries": entries}
