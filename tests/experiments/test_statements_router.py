"""Numbers on the router's page are those of its table."""

from __future__ import annotations

import re

from tests.experiments.statements import cells, means, rounds_to


def test_the_routers_page_quotes_its_table() -> None:
    found = means("router")
    by_label = {re.sub(r"[()]|Router: ", "", row): row for row, _ in found}
    rows = cells("router", 6)
    assert len(rows) == len(by_label)
    for label, (accuracy, *_, ms, ratio) in rows.items():
        row = by_label[label.replace("RLOO4 written by hand", "RLOO4 by hand")]
        assert rounds_to(found[row, "test accuracy"], accuracy.partition(" ")[0]), label
        if ms:
            value = found[row, "CPU ms per step"]
            assert rounds_to(value, ms.removesuffix(" ms")), label
            assert rounds_to(value / found["Router: RLOO(4) by hand", "CPU ms per step"], ratio), label
