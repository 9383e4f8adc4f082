"""The parts of a report: results, shown as tables next to the paper's; figures; and pictures."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arsm_experiments.labels import heading, readable
from arsm_experiments.report.figures import Figure
from arsm_experiments.report.findings import finding
from arsm_experiments.report.welch import student_quantile
from arsm_experiments.runs.provenance import short_commit
from arsm_experiments.runs.reader import Record
from arsm_experiments.runs.table import COLUMNS, origin_once

Verdict = Literal["better", "worse", "undecided", "noise unknown", "not like for like"]
"""Our number compared with the paper's: "better" or "worse" if seeds alone do not explain the
difference; "undecided" if there are too few seeds to tell."""


@dataclass(frozen=True)
class Result:
    """One metric of one row of a table, over all seeds."""

    row: str
    metric: str
    values: Sequence[float]
    record: Record
    """The run that it is from."""
    paper: float | None = None
    """The paper's number; lower is better for all of them."""
    paper_std: float | None = None
    """Its spread, if the paper gives one."""
    like_for_like: bool = True
    """Whether the paper measured the same thing; not so for seconds on other hardware, or other
    images.
    """

    @property
    def name(self) -> str:
        """The row in readable words."""
        return readable(self.row)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) if math.isfinite(self.mean) else math.nan

    @property
    def ours(self) -> str:
        """Mean and spread."""
        return number(self.mean, self.std)

    @property
    def papers(self) -> str:
        """The paper's number, with its spread if it has one; empty if the paper measured something
        else.
        """
        if not self.like_for_like:
            return ""
        spread = f" ± {self.paper_std:g}" if self.paper_std is not None else ""
        return "" if self.paper is None else f"{self.paper:g}{spread}"

    @property
    def text(self) -> str:
        """Ours and the paper's, in one line."""
        return self.ours + (f" (paper {self.papers})" if self.papers else "")

    @property
    def difference(self) -> str:
        """Our mean minus the paper's number, if both measure the same thing."""
        if self.paper is None or not self.like_for_like:
            return ""
        text = number(self.mean - self.paper, self.std).partition(" ")[0]
        return text if text.startswith("-") else f"+{text}"

    @property
    def verdict(self) -> Verdict | None:
        """Whether our mean differs from the paper's number by more than chance, at the 5% level.

        If the paper gives no spread, its number counts as one run with the spread of ours: the
        difference then has variance std^2 (1 + 1/seeds), and Student's distribution gives its
        quantile.
        """
        if self.paper is None:
            return None
        if not self.like_for_like:
            return "not like for like"
        if self.std is None or math.isnan(self.std):
            return "noise unknown"
        theirs = self.std if self.paper_std is None else self.paper_std
        noise = math.hypot(self.std / math.sqrt(len(self.values)), theirs)
        if abs(self.mean - self.paper) <= student_quantile(len(self.values) - 1) * noise:
            return "undecided"
        return "better" if self.mean < self.paper else "worse"


def number(mean: float, spread: float | None = None) -> str:
    """The mean to its spread's first digit, or four digits: 0.516 ± 0.008, 2.5e6 ± 8e4. Tiny
    spreads are omitted.
    """
    if not spread or not math.isfinite(mean + spread) or spread < 1e-5 * abs(mean):
        return _plain_exponent(f"{mean:.4g}")
    if 1e-4 <= abs(mean) < 1e5:
        decimals = max(0, -math.floor(math.log10(spread)))
        return f"{mean:,.{decimals}f} ± {spread:,.{decimals}f}"
    return _plain_exponent(f"{mean:.1e} ± {spread:.0e}")


def _plain_exponent(text: str) -> str:
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", text)


@dataclass(frozen=True)
class Headline:
    """A line of the report's first table, which compares our results with the paper's."""

    what: str
    paper: str
    ours: str
    difference: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Picture:
    """An image file of a run to show as it is."""

    record: Record
    file: str
    caption: str

    @property
    def name(self) -> str:
        """Its name when exported."""
        return f"{self.record.name}-{self.file}"

    @property
    def content(self) -> bytes:
        """The file's bytes."""
        return self.record.pictures[self.file]


@dataclass(frozen=True)
class Section:
    """One comparison: its table, figures and pictures, all made from `records`."""

    title: str
    text: str
    records: Sequence[Record]
    results: Sequence[Result] = ()
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()
    headline: str = ""
    """The metric for the report's first table."""
    headline_words: str = ""
    """That metric with its unit, if its name does not say it."""
    claims: Sequence[Headline] = ()
    """Further lines of that table that are not single results."""
    trials: Sequence[Result] = ()
    """Results behind the choice of settings, for table.csv alone."""
    folded: str = ""
    """If not empty, the page says this sentence instead of a finding."""

    @property
    def finding(self) -> str:
        """The section in one sentence, from its results."""
        return finding(self.results)

    @property
    def headlines(self) -> list[Headline]:
        """This section's lines of the report's first table."""
        shown = [r for r in self.results if r.papers and r.metric == self.headline]
        words = self.headline_words or self.headline
        lines = [
            Headline(f"{r.name}: {words}", r.papers, r.ours, r.difference, r.verdict) for r in shown
        ]
        return [*lines, *self.claims]


def pivot(results: Iterable[Result]) -> tuple[list[str], list[tuple[str, list[Result | None]]]]:
    """(metrics, (row, one result per metric, or None)), both in order of appearance."""
    results = list(results)
    metrics = list(dict.fromkeys(r.metric for r in results))
    found = {(r.row, r.metric): r for r in results}
    rows = dict.fromkeys(r.row for r in results)
    return metrics, [(row, [found.get((row, metric)) for metric in metrics]) for row in rows]


def print_results(console: Console, section: Section) -> None:
    """A section's table on the terminal."""
    metrics, rows = pivot(section.results)
    table = Table(
        title=section.title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for metric in metrics:
        table.add_column(escape(heading(metric)), justify="right", overflow="fold")
    for row, cells in rows:
        table.add_row(escape(readable(row)), *("" if cell is None else cell.text for cell in cells))
    console.print(table)


def results_csv(sections: Iterable[Section]) -> str:
    """All results as table.csv."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for section in sections:
        lines = (_line(section.title, result) for result in (*section.results, *section.trials))
        writer.writerows(origin_once(lines))
    return out.getvalue()


def _line(title: str, result: Result) -> dict[str, Any]:
    sessions = result.record.sessions
    return {
        "row": f"{title}: {result.row}",
        "metric": result.metric,
        "mean": f"{result.mean:.6g}",
        "std": "" if result.std is None else f"{result.std:.6g}",
        "seeds": len(result.values),
        "paper": "" if result.paper is None else f"{result.paper:g}",
        "seconds": f"{result.record.seconds:.1f}",
        "hardware": "; ".join(sorted({session["hardware"] for session in sessions})),
        "commit": "; ".join(sorted({short_commit(session["commit"]) for session in sessions})),
    }
