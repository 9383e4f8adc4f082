"""The generated part of results/router/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, markdown, with_spread

TABLE = "router/transformer.csv"
SETTINGS = ("top-1", "top-2", "price")
NAMES = {
    "leave-one-out, later": '`RLOO(2)`, `reach="later"`',
    "leave-one-out, row": '`RLOO(2)`, `reach="row"`',
    "leave-one-out, own": '`RLOO(2)`, `reach="own"` (biased)',
    "Switch": "Switch",
    "Switch, price unseen": "Switch, price unseen",
    "Gumbel straight-through": "Gumbel straight-through",
    "untrained router": "untrained router",
    "untrained router, price unseen": "",
}
"""Ways as the table names them; the last is the row before it, scored with the price."""


def table(tables: Tables) -> str:
    """Test loss of every way in every setting, experts in use, and time."""
    cells = tables.cells(TABLE)
    rows = []
    for way, name in NAMES.items():
        if not name:
            continue
        losses = [_loss(cells, setting, way) for setting in SETTINGS]
        used = cells.get((f"price: {way}", "experts used"))
        if way == "untrained router":
            used = cells.get(("top-1: untrained router", "experts used"))
        step = cells.get((f"top-1: {way}", "CPU ms per step"))
        rows.append(
            [
                name,
                *losses,
                f"{used.mean:.1f}" if used else "",
                f"{step.mean:.1f} ms" if step else "",
            ]
        )
    header = ["", "one expert", "two experts", "with the price", "experts used there", "step"]
    return markdown(header, rows)


def _loss(cells: dict[tuple[str, str], Cell], setting: str, way: str) -> str:
    if (setting, way) == ("price", "untrained router"):
        way = "untrained router, price unseen"
    cell = cells.get((f"{setting}: {way}", "test loss"))
    return "" if cell is None else with_spread(cell, 3)


PARTS = {"transformer": table}
