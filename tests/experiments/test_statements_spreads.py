"""Numbers with a spread on the pages of results/ are those of the tables."""

from __future__ import annotations

import csv
import re

import pytest

from tests.experiments.statements import RESULTS, rounds_to

SPREAD = re.compile(r"(-?[\d.,]*\d)(?: \([^)]*\))? ± ([\d.]*\d)")
ELSEWHERE = {
    "conditional": {("58.3", "0.2"), ("61.5", "0.1"), ("59.3", "0.1")},  # the paper's, and those of an earlier commit
    # tested in test_statements_vae.py
    "vae": {("88.49", "0.82"), ("88.54", "1.30"), ("80.9", "0.4"), ("81.9", "0.3"), ("78.7", "0.3")}
    | {("82.2", "0.4"), ("87.87", "0.36")},
}
"""Numbers with a spread that are in no table."""


@pytest.mark.parametrize("experiment", ["toy", "vae", "conditional", "control"])
def test_numbers_with_a_spread_are_in_the_table(experiment: str) -> None:
    with (RESULTS / experiment / "table.csv").open() as file:
        known = [(float(row["mean"]), float(row["std"])) for row in csv.DictReader(file) if row["std"]]
    found = set(SPREAD.findall((RESULTS / experiment / "README.md").read_text()))
    assert found or experiment == "control"
    for mean, spread in found - ELSEWHERE.get(experiment, set()):
        assert any(rounds_to(m, mean) and rounds_to(s, spread) for m, s in known), f"{mean} ± {spread}"
