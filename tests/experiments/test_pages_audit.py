"""Sentences and tables of results/audit, on made-up verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from arsm_experiments.report.pages import audit
from arsm_experiments.report.pages.tables import Tables
from tests.experiments.made_up_tables import write_lines

PENALTY = f"[divergence] Instead of the divergence's gradient {audit.TOKEN_BY_TOKEN}: ..."
ENTRIES = [
    ("trl: a", "trl 1.16.0", "unbiased", "unbiased", "", 7, "0.500, direction 1.000"),
    ("trl: b", "trl 1.16.0", "no claim", "wrong", PENALTY, 9),
    ("trl: c", "trl 1.16.0", "unbiased", "wrong", PENALTY, 2),
    ("trl: d", "trl 1.16.0", "unbiased", "does not run", "", 900),
    ("trl: e", "trl 1.16.0", "unbiased", "wrong", PENALTY, 4),
    ("trl 1.9.2: a", "trl 1.9.2", "unbiased", "wrong", PENALTY, 800),
    ("tunix: a", "google-tunix 0.1.7", "the right gradient: exact", "wrong", "[scale]", 3),
    ("torch: a", "torch 2.13.0", "unbiased", "unbiased", "", 700, "0.939 [0.9, 0.98]"),
    ("arsm: a", "arsm 0.3.0", "unbiased", "wrong", PENALTY, 600),
]
"""Entry, version, claim, verdict, finding, seconds and, where it is unbiased, its length."""


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    folder = tmp_path / "audit"
    header = ("row", "version", "claim", "verdict", "finding", "seconds", "scale")
    write_lines(folder / "table.csv", header, ENTRIES)
    names = [("trl", "A", "trl: a", ""), ("trl", "B", "", "no reward"), ("verl", "C", "", "none")]
    write_lines(folder / "coverage.csv", ("package", "name", "entry", "reason"), names)
    rates = [
        (audit.CORRECT, "0.002", "0.05", "2000"),
        (audit.CORRECT, "0.3", "0.5", "2000"),
        ("other", "0.1", "0.05", "70"),
    ]
    write_lines(folder / "referee.csv", ("row", "value", "declared", "audits"), rates)
    return Tables(tmp_path)


def test_the_answer_leaves_out_old_releases_our_own_and_what_did_not_run(tables: Tables) -> None:
    told = audit.answer(tables)
    assert "Of 6 gradients in current releases of 3 other packages, 3 are not as doc" in told
    assert "2 are unbiased, 1 of them up to a constant factor, and 1 are biased without" in told
    # one penalty promised nothing, and the scale is no penalty
    assert "2 of the 3 are penalties on a KL divergence" in told


def test_packages_are_counted_by_kind(tables: Tables) -> None:
    assert audit.packages(tables).splitlines()[2:] == [
        "| trl 1.16.0 | 1 | 1 | 2 |",
        "| tunix 0.1.7 | 0 | 0 | 1 |",
        "| torch 2.13.0 | 1 | 0 | 0 |",
        "| arsm 0.3.0 | 0 | 0 | 1 |",
    ]


def test_all_entries_are_listed_with_those_that_were_not_judged(tables: Tables) -> None:
    told = audit.entries(tables).splitlines()
    assert told[2:4] == [
        "| trl | 1.16.0 | 5 | 1 | 1 | 2 | 1 |",
        "| trl 1.9.2 | 1.9.2 | 1 | 0 | 0 | 1 | 0 |",
    ]
    assert told[-1].endswith("export: 1 have an entry, 2 a reason why not.")


def test_times_are_of_trainers_and_alarms_of_the_declared_rate(tables: Tables) -> None:
    told = audit.trust(tables)
    assert "takes 2 to 9 CPU seconds" in told
    assert "gave 4 alarms in 2,000, at a declared rate of 5%." in told
