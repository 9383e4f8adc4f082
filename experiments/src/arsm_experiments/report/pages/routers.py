"""The generated parts of the pages of results/router."""

from __future__ import annotations

from collections.abc import Mapping

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch, with_spread
from arsm_experiments.report.welch import Difference
from arsm_experiments.runs import lines

TABLE = "router/transformer.csv"
SETTINGS = ("top-1", "top-2", "price")
WHERE = {"top-1": "with one expert", "top-2": "with two", "price": "with the price"}
"""Settings as sentences name them."""
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
    "leave-one-out, own, price unseen": '`"own"`, trained without the price',
    "Switch, price unseen": "Switch trained without the price",
    "Gumbel straight-through": "Gumbel",
    "untrained router": "the untrained router",
    "untrained router, price unseen": "the untrained router",
}
"""Ways as sentences name them."""
LATER, ROW, OWN = (f"leave-one-out, {reach}" for reach in ("later", "row", "own"))
SWITCH, GUMBEL, UNTRAINED = "Switch", "Gumbel straight-through", "untrained router"
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


Cells = Mapping[tuple[str, str], Cell]
"""cells[row, metric] of transformer.csv."""


def answer(tables: Tables) -> str:
    """Leave-one-out beside Switch, Gumbel and no training, and its reaches."""
    cells = tables.cells(TABLE)
    return (
        '**Finding.** **No: leave-one-out (`reach="later"`) is behind Switch '
        f"{_by_setting(cells, SWITCH)}, and behind Gumbel {_by_setting(cells, GUMBEL)}.** With "
        f"one expert it is {_gap(cells, 'top-1', LATER, UNTRAINED)} nats behind a router that is "
        "not trained. Crediting only the losses that a choice can reach gains "
        f"{_gap(cells, 'top-1', ROW, LATER)} with one expert; leaving out losses that it can "
        f'reach (`"own"`, biased) gains {_gap(cells, "top-1", LATER, OWN)}.'
    )


def _by_setting(cells: Cells, other: str) -> str:
    """How far leave-one-out is behind another way where that is decided, and where it is not."""
    gaps = {where: _behind(cells, setting, LATER, other) for setting, where in WHERE.items()}
    decided = [f"by {gap.mean:.2f} {where}" for where, gap in gaps.items() if gap.decided]
    undecided = [where for where, gap in gaps.items() if not gap.decided]
    rest = f" (undecided {listed(undecided)})" if undecided else ""
    return f"{listed(decided)}{rest}"


def _gap(cells: Cells, setting: str, way: str, other: str) -> str:
    """The test loss of one way less another's, and whether that is decided."""
    found = _behind(cells, setting, way, other)
    return f"{found.mean:.2f}{'' if found.decided else ' (undecided)'}"


def details(tables: Tables) -> str:
    """Who is ahead of whom, by Welch's intervals."""
    cells = tables.cells(TABLE)

    def behind(setting: str, way: str, other: str = SWITCH) -> str:
        found = _behind(cells, setting, way, other)
        low, high = found.mean - found.half, found.mean + found.half
        verdict = "" if found.decided else "; undecided"
        return f"{found.mean:.2f} ({low:.2f} to {high:.2f}{verdict})"

    def after_switch(setting: str) -> str:
        """The way with the least mean after Switch, and how far behind it is."""
        way = next(way for way in _ranked(cells, setting) if way != SWITCH)
        return f"{SPOKEN[way]} by {behind(setting, way)}"

    return "\n".join(
        [
            f"- **The next after Switch** is {after_switch('top-1')} with one expert, "
            f"{after_switch('top-2')} with two and {after_switch('price')} with the price.",
            "- **Behind the untrained router** with one expert per token are "
            f'`"later"` by {behind("top-1", LATER, UNTRAINED)} and `"row"` by '
            f'{behind("top-1", ROW, UNTRAINED)}; with two, `"later"` by '
            f"{behind('top-2', LATER, UNTRAINED)}. We take the later losses to be mostly noise "
            "from other tokens' choices.",
            '- **Reach.** `"later"` is behind `"own"`, which leaves these losses out, by '
            f'{behind("top-1", LATER, OWN)}. `"row"` is behind `"later"` by '
            f"{behind('top-1', ROW, LATER)}, and by {behind('price', ROW, LATER)} with the price.",
            f'- **With the price** `"later"` is behind Switch by {behind("price", LATER)}, and '
            f'`"own"`, trained without it, by {behind("price", f"{OWN}, price unseen")}. Gumbel is '
            f'behind `"later"` by {behind("price", GUMBEL, LATER)}.',
            _price(tables),
        ]
    )


def _ranked(cells: Cells, setting: str) -> list[str]:
    """The ways of a setting, the least mean test loss first."""
    begin = f"{setting}: "
    means = {
        row.removeprefix(begin): cell.mean
        for (row, metric), cell in cells.items()
        if metric == "test loss" and row.startswith(begin)
    }
    return sorted(means, key=means.__getitem__)


def _behind(cells: Cells, setting: str, way: str, other: str) -> Difference:
    """The test loss of one way less that of another, with Welch's interval."""
    first, second = (cells[f"{setting}: {name}", "test loss"] for name in (way, other))
    return welch(first, second)


def _price(tables: Tables) -> str:
    """Experts in use where they cost something, and why."""
    cells = tables.cells(TABLE)

    def used(setting: str, way: str) -> float:
        return cells[f"{setting}: {way}", "experts used"].mean

    def predicted(way: str) -> float:
        paid = PRICE_OF_AN_EXPERT * used("price", way)
        return cells[f"price: {way}", "test loss"].mean - paid

    saved = PRICE_OF_AN_EXPERT * (used("price", SWITCH) - used("price", LATER))
    lost = predicted(LATER) - predicted(SWITCH)
    balances = _balances(tables)
    assert balances[GUMBEL] == balances[SWITCH]
    return (
        f'- **Experts used.** With the price `"later"` uses {used("price", LATER):.1f} experts '
        f"and Switch {used('price', SWITCH):.1f}. This saves {saved:.2f} nats of the price and "
        f"loses {lost:.2f} in prediction. The price is not the only cause: leave-one-out had a "
        f"balancing coefficient of {balances[LATER]:g}, Switch and Gumbel "
        f'{balances[GUMBEL]:g}. Without a price `"later"` already uses only '
        f"{used('top-1', LATER):.1f}."
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


PARTS = {"answer": answer, "transformer": table, "details": details}
HISTORY_PARTS = {"mixture": mixture}
