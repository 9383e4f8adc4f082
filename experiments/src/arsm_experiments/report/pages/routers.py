"""The generated parts of results/router/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch, with_spread
from arsm_experiments.runs import lines

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

SPOKEN = {
    "leave-one-out, later": '`"later"`',
    "leave-one-out, row": '`"row"`',
    "leave-one-out, own": '`"own"`',
    "leave-one-out, own, price unseen": '`"own"`, trained without it',
    "Switch, price unseen": "Switch trained without it",
    "Gumbel straight-through": "Gumbel",
    "untrained router": "an untrained router",
}
"""Ways as sentences name them."""
PRICE_OF_AN_EXPERT = 0.2 * 2 / 32
"""Nats per character for one expert used per block: 0.2 nats, two blocks, 32 characters."""


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

    def behind(setting: str, way: str, other: str = "Switch") -> str:
        first, second = (cells[f"{setting}: {name}", "test loss"] for name in (way, other))
        found = welch(first, second)
        return f"{found.mean:.2f} ({found.mean - found.half:.2f} to {found.mean + found.half:.2f})"

    def the_next(setting: str, words: str) -> str:
        """The way with the least mean after Switch, and how far behind it is."""
        begin = f"{setting}: "
        means = {
            row.removeprefix(begin): cell.mean
            for (row, metric), cell in cells.items()
            if metric == "test loss" and row.startswith(begin) and row != f"{begin}Switch"
        }
        way = min(means, key=means.__getitem__)
        return f"{behind(setting, way)} {words} ({SPOKEN[way]})"

    later, row, own = (f"leave-one-out, {reach}" for reach in ("later", "row", "own"))
    gumbel, untrained = "Gumbel straight-through", "untrained router"
    return (
        "**Finding** (differences with Welch's 95% interval). Switch has the least mean loss in "
        "all three settings, and is the quickest of those that train a router. The next is "
        f"{the_next('top-1', 'behind with one expert')}, {the_next('top-2', 'with two')} and "
        f'{the_next("price", "with the price")}; there `"own"`, also trained without it, is '
        f'{behind("price", f"{own}, price unseen")} behind and `"later"` '
        f'{behind("price", later)}. Without a price `"later"` and `"row"` end behind an untrained '
        f"router, by {behind('top-1', later, untrained)} and {behind('top-1', row, untrained)}: "
        "we take the later losses to be mostly noise from other tokens' choices. "
        f'`"own"`, which leaves these out, is {behind("top-1", later, own)} better than '
        f'`"later"`; `"row"` is {behind("top-1", row, later)} worse, and '
        f"{behind('price', row, later)} with the price: undecided. There Gumbel is "
        f'{behind("price", gumbel, later)} behind `"later"`: undecided.'
    )


def price(tables: Tables) -> str:
    """Experts in use where they cost something, and why."""
    cells = tables.cells(TABLE)
    later, switch = "leave-one-out, later", "Switch"

    def used(setting: str, way: str) -> float:
        return cells[f"{setting}: {way}", "experts used"].mean

    def predicted(way: str) -> float:
        paid = PRICE_OF_AN_EXPERT * used("price", way)
        return cells[f"price: {way}", "test loss"].mean - paid

    saved = PRICE_OF_AN_EXPERT * (used("price", switch) - used("price", later))
    lost = predicted(later) - predicted(switch)
    balances = _balances(tables)
    gumbel = balances["Gumbel straight-through"]
    assert gumbel == balances[switch]
    return (
        f'**Where the route has a price**, `"later"` uses {used("price", later):.1f} experts and '
        f"Switch {used('price', switch):.1f}. It saves {saved:.2f} nats in price and loses "
        f"{lost:.2f} in prediction. The price is not the only cause: the trials gave "
        f"leave-one-out a balancing coefficient of {balances[later]:g}, Switch and Gumbel "
        f'{gumbel:g}, and without a price `"later"` already uses only '
        f"{used('top-1', later):.1f}."
    )


def _balances(tables: Tables) -> dict[str, float]:
    """The balancing coefficient that each way's trials chose."""
    trainings = lines.read(tables.results / "router/transformer.jsonl.xz")
    return {run["way"]: run["balance"] for run in trainings if run["setting"] == "price"}


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


PARTS = {"transformer": table, "finding": finding, "price": price, "mixture": mixture}
