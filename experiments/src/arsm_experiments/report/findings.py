"""One or two sentences that summarise a section of the report, written from its numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from arsm_experiments.labels import readable
from arsm_experiments.report.welch import difference

if TYPE_CHECKING:
    from arsm_experiments.report.sections import Result


class Measure(NamedTuple):
    """A metric that methods are ranked by."""

    pattern: str
    words: str
    higher: bool


MEASURES = (
    Measure(r"E\[f\]", "expected reward", True),
    Measure(r"test", "test -ELBO", False),
    Measure(r"test, 1,000 samples", "test -ln p", False),
    Measure(r"test, [\d,]+ samples", "test -ln p", False),
    Measure(r"final average", "final average return", True),
    Measure(r"error x evaluations", "mean squared error x evaluations", False),
)
REFERENCES = ("true gradient", "floor")
"""Rows that are not estimators."""


def finding(results: Sequence[Result]) -> str:
    """The best method, the second, ARSM's rank, and how our numbers compare with the paper's."""
    measure, rows = _measured(results)
    if measure is None:
        return ""
    best_rows: dict[str, Result] = {}
    for row in rows:
        if row.row not in REFERENCES:
            rival = best_rows.get(_method(row), row)
            best_rows[_method(row)] = max(
                rival, row, key=lambda r: r.mean if measure.higher else -r.mean
            )
    if not best_rows:
        return ""
    ranked = sorted(
        best_rows.items(), key=lambda item: -item[1].mean if measure.higher else item[1].mean
    )
    several = Counter(map(_method, rows))
    names = [
        name + (f" ({_settings(name, row)})" if several[name] > 1 else "") for name, row in ranked
    ]
    best, *others = (row for _, row in ranked)
    extreme = "highest" if measure.higher else "lowest"
    words = [f"{names[0]} reaches a {measure.words} of {best.ours}"]
    if others:
        words = [f"{names[0]} has the {extreme} {measure.words}, {best.ours}"]
        words.append(f"{names[1]} follows with {others[0].ours}" + _apart(best, others[0]))
    place = next((place for place, (method, _) in enumerate(ranked) if "ARSM" in method), 0)
    if place > 1:
        words.append(
            f"{names[place]} is number {place + 1} of {len(ranked)} with {ranked[place][1].ours}"
        )
    each = (
        ", each at the best of its settings here"
        if others and any(several[name] > 1 for name, _ in ranked)
        else ""
    )
    sentence = "; ".join(words) + each + "."
    return sentence[0].upper() + sentence[1:] + _beside_the_paper(rows)


def _method(row: Result) -> str:
    """Its name without the settings, which the table shows."""
    biased = " (biased)" if row.row.endswith(" (biased)") else ""
    return readable(row.row.partition(", ")[0].partition(" (")[0]) + biased


def _settings(name: str, row: Result) -> str:
    return readable(row.row).removeprefix(name).strip(", ")


def _measured(results: Sequence[Result]) -> tuple[Measure | None, list[Result]]:
    """The first measure that any row has, and the rows that have it."""
    for measure in MEASURES:
        rows = [
            r for r in results if re.fullmatch(measure.pattern, r.metric) and math.isfinite(r.mean)
        ]
        if rows:
            return measure, rows
    return None, []


def _apart(best: Result, second: Result) -> str:
    """Whether Welch's 95% interval decides between them; empty if there is only one seed."""
    if best.std is None or second.std is None:
        return ""
    found = difference(
        best.mean, best.std, len(best.values), second.mean, second.std, len(second.values)
    )
    return "" if found.decided else ", undecided by Welch's 95% interval"


def _beside_the_paper(rows: Sequence[Result]) -> str:
    verdicts = Counter(row.verdict for row in rows if row.papers)
    if not verdicts:
        return ""
    counts = [
        f"{number} {'row' if number == 1 else 'rows'} {verdict}"
        for verdict, number in verdicts.most_common()
    ]
    return f" Compared with the paper: {', '.join(counts)}."
