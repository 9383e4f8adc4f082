"""Numbers on the page about black boxes are those of its table."""

from __future__ import annotations

import re

from tests.experiments.statements import cells, means, rounds_to


def test_the_black_boxes_page_quotes_its_table() -> None:
    found, quoted = means("maximize"), 0
    budgets = [(family, n) for family in ("pairwise", "MAX-SAT", "architecture") for n in ("1,000", "3,000", "10,000")]
    for label, values in cells("maximize", 9).items():
        known = {re.sub(r"[()]", "", row.partition(": ")[2]): row.partition(": ")[2] for row, _ in found}
        method = {"annealing, one chain, 16 neighbours at a time": "annealing, speculative"}.get(label, label)
        for (family, n), text in zip(budgets, values, strict=True):
            value = found.get((f"{family}: {known[method]}", f"best value after {n} evaluations"))
            assert (value is None) == (text == ""), (label, family, n)
            if value is not None:
                assert rounds_to(value, text), f"{label}, {family}, {n}: {value}"
                quoted += 1
    assert quoted == len(found)
