"""The generated parts of results/router/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch, with_spread

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


def finding(tables: Tables) -> str:
    """Who is ahead of whom, by Welch's intervals."""
    cells = tables.cells(TABLE)

    def behind(setting: str, way: str, other: str) -> str:
        priced = "untrained router, price unseen"
        ways = (
            priced if (setting, name) == ("price", "untrained router") else name
            for name in (way, other)
        )
        found = welch(*(cells[f"{setting}: {name}", "test loss"] for name in ways))
        return f"{found.mean:.2f} ({found.mean - found.half:.2f} to {found.mean + found.half:.2f})"

    later, row, own = (f"leave-one-out, {reach}" for reach in ("later", "row", "own"))
    gumbel, untrained = "Gumbel straight-through", "untrained router"
    return (
        "**Finding** (differences with Welch's 95% interval). Switch has the least mean loss in "
        "all three settings, and is the quickest of those that train a router. The next is "
        f'{behind("top-1", own, "Switch")} behind with one expert (`"own"`), '
        f"{behind('top-2', gumbel, 'Switch')} with two (Gumbel) and "
        f'{behind("price", later, "Switch")} with the price (`"later"`). Without a price '
        '`"later"` and `"row"` end behind a router that is not trained at all, by '
        f"{behind('top-1', later, untrained)} and {behind('top-1', row, untrained)}: we take the "
        'later losses to be mostly noise from other tokens\' choices. `"own"`, which leaves these '
        f'out, is {behind("top-1", later, own)} better than `"later"`; `"row"` is '
        f"{behind('top-1', row, later)} worse, and {behind('price', row, later)} with the price: "
        "undecided. There Gumbel and the untrained router are "
        f"{behind('price', gumbel, later)} and {behind('price', untrained, later)} behind "
        '`"later"`: undecided.'
    )


def _loss(cells: dict[tuple[str, str], Cell], setting: str, way: str) -> str:
    if (setting, way) == ("price", "untrained router"):
        way = "untrained router, price unseen"
    cell = cells.get((f"{setting}: {way}", "test loss"))
    return "" if cell is None else with_spread(cell, 3)


BY_HAND = "RLOO(4) by hand"


def mixture(tables: Tables) -> str:
    """Accuracy and time per step of the mixture without positions."""

    def of(way: str, metric: str = "test accuracy") -> Cell:
        return tables.cell("router", f"Router: {way}", metric)

    ours = [f"arsm.choices, {name}" for name in ("RLOO(4)", "RLOO(2)", "LocalExpectation", "ARSM")]
    means = [of(way).mean for way in ours]
    others = {
        "leave-one-out by hand": BY_HAND,
        "Gumbel straight-through": "Gumbel straight-through",
        "Switch": "Switch",
        "an untrained router": "untrained router",
        "one expert": "one expert",
    }
    accuracy = ", ".join(f"{name} {of(way).mean:.3f}" for name, way in others.items())
    unit = of(BY_HAND, "CPU ms per step").mean
    steps = {
        "`RLOO(4)`": ours[0],
        "`RLOO(2)`": ours[1],
        "Switch": "Switch",
        "Gumbel": "Gumbel straight-through",
    }
    times = listed(
        [f"{name} {of(way, 'CPU ms per step').mean / unit:.2f}" for name, way in steps.items()]
    )
    return (
        "Accuracy with Switch's balancing loss: `RLOO(4)`, `RLOO(2)`, `LocalExpectation()` and "
        f"`ARSM()` inside `arsm.choices` {min(means):.3f} to {max(means):.3f} (standard deviation "
        f"{of(ours[0]).std:.3f}), {accuracy}. CPU time of a step, relative to leave-one-out by "
        f"hand: {times}."
    )


PARTS = {"transformer": table, "finding": finding, "mixture": mixture}
