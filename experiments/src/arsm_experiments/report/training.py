"""Figures, pictures and sentences of training runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from arsm_experiments.labels import readable
from arsm_experiments.report.figures import Figure, Level, Panel, Series, band
from arsm_experiments.report.rows import Row, label_of, method, own_curves, values
from arsm_experiments.report.sections import Picture
from arsm_experiments.runs.reader import Record

Places = Callable[[Record], Sequence[Any]]
"""The keys of a run's measurements for each horizontal axis."""
HIGHEST = 1.5
"""Curves are drawn up to this many times the lowest loss."""
PARTS = ("train", "validation", "test")
SECONDS = (
    "Seconds are for the whole command, which trains all its seeds and learning rates together, "
    "or the sum if a row's seeds come from several commands."
)


def not_run(rows: Sequence[Row], paper: Mapping[str, Mapping[str, float]], metric: str) -> str:
    """A sentence with those of the paper's numbers that no run of ours repeats; empty if there are
    none.
    """
    run = {method(row.chosen.config) for row in rows if row.paper}
    absent = [
        f"{readable(words)} {row[metric]:g}" for words, row in paper.items() if words not in run
    ]
    return (
        f" The paper also has, for {metric}, without a run of ours: {', '.join(absent)}."
        if absent
        else ""
    )


def pictures(rows: Sequence[Row], what: str) -> list[Picture]:
    """The first seed's pictures of every row."""
    found = [(row, file) for row in rows for file in sorted(row.shown.pictures)[:1]]
    return [Picture(row.shown, file, f"{row.label}: {what}") for row, file in found]


# ---------------------------------------------------------------- figures


def figures(
    rows: Sequence[Row],
    slug: str,
    objective: str,
    titles: Mapping[str, str],
    state: Sequence[tuple[str, str, bool]],
) -> list[Figure]:
    """The objective's curves, one panel per part; diagnostics of the network; the rates if there
    are several.

    `state` has a panel's title, its metric, and whether it has a log scale.
    """
    dotted = (
        ", dotted lines the paper's numbers"
        if any(set(row.paper) & {*titles} for row in rows)
        else ""
    )
    again = (
        " If one seed chose the rate, the curves show the fresh seeds that were trained afterwards."
    )
    again *= any(row.fresh is not None for row in rows)
    ceiling = _ceiling(rows)
    cut = _cut(rows, ceiling)
    made = [
        Figure(
            objective,
            f"Lines are means over seeds, bands the 10th to 90th percentile{dotted}; the scale is "
            f"logarithmic.{cut}{again} All seeds and learning rates of a command train together, "
            "so seconds are for all of them, with compilation; the axis has the mean over seeds, "
            "and no row whose seeds ran on different machines. Evaluations are distinct "
            "evaluations of f on all images so far; for a relaxing estimator each one includes a "
            "gradient of f.",
            [
                _panel(rows, title, part, log=True, ceiling=ceiling)
                for part, title in titles.items()
            ],
            {f"{slug}-{name}": (axis,) for axis, name in zip(AXES, FILES, strict=True)},
        ),
        Figure(
            "Gradient variance and diagnostics of q",
            "The variance is from moving averages of the gradient's moments (decay 0.999), "
            "averaged over the encoder's parameters, on a log scale.",
            [_panel(rows, title, key, log) for title, key, log in state],
            {f"{slug}-state": ("iteration",)},
        ),
    ]
    if any(len(row.grid) > 1 for row in rows):
        made.append(
            Figure(
                "Learning rates",
                "Lines are the first seeds, whose lowest loss chose the rate (ring); dots are the "
                f"other seeds.{cut}",
                [_rates(rows, which, titles["validation"], ceiling) for which in ("best", "last")],
                {f"{slug}-rates": ("learning rate",)},
            )
        )
    return made


def _steps(record: Record) -> list[float]:
    return [float(step) for step in record.series("train")[0]]


def _seconds(record: Record) -> list[float]:
    return [fmean(seeds) for seeds in zip(*values(record, "seconds"), strict=True)]


def _evaluations(record: Record) -> list[float]:
    """Evaluations of f so far, mean over seeds; each measurement counts per image since the one
    before.
    """
    steps, counts = record.series("evaluations")
    images = [record.config["batch"] * (after - before) for before, after in pairwise((0, *steps))]
    each = [fmean(seeds) for seeds in zip(*counts, strict=True)]
    return list(accumulate(count * number for count, number in zip(each, images, strict=True)))


SECOND = "second"
AXES: dict[str, Places] = {"iteration": _steps, SECOND: _seconds, "evaluation of f": _evaluations}
FILES = ("iterations", "seconds", "evaluations")


def _panel(
    rows: Sequence[Row], title: str, key: str, log: bool = False, ceiling: float | None = None
) -> Panel:
    below = [
        row for row in rows if ceiling is None or min(map(min, values(row.shown, key))) < ceiling
    ]
    views = {
        axis: [
            band(row.name, row.colour, places(row.shown), values(row.shown, key))
            for row in below
            if axis != SECOND or _one_machine(row.shown)
        ]
        for axis, places in AXES.items()
    }
    levels = [
        Level("paper", row.paper[key], row.colour, row.name, f"{row.paper[key]:g}")
        for row in below
        if key in row.paper
    ]
    return Panel(title, views, log="y" if log else "", ceiling=ceiling, levels=levels)


def _one_machine(record: Record) -> bool:
    """Whether all seeds ran on machines of one kind."""
    return len({session["hardware"] for session in record.sessions}) == 1


def _ceiling(rows: Sequence[Row]) -> float | None:
    """Where to cut the curves: rows far above the best one, and early epochs, would squeeze the
    rest.
    """
    best = min(min(seed) for row in rows for seed in own_curves(row.chosen, "validation"))
    return (
        HIGHEST * best
        if max(values(row.chosen, "train")[0][0] for row in rows) > HIGHEST * best
        else None
    )


def _cut(rows: Sequence[Row], ceiling: float | None) -> str:
    """A sentence that says what the scale cuts off; empty if nothing."""
    if ceiling is None:
        return ""
    above = [
        readable(row.label)
        for row in rows
        if min(map(min, values(row.shown, "validation"))) >= ceiling
    ]
    wholly = f", {', '.join(above)} entirely" if above else ""
    return f" The scale ends at {ceiling:.0f} nats; higher values are cut off{wholly}."


def _rates(rows: Sequence[Row], which: str, title: str, ceiling: float | None) -> Panel:
    """The loss of every rate, each seed's best or last, of rows with several rates."""
    pick = min if which == "best" else (lambda seed: seed[-1])
    series = [each for row in rows if _compares(row, ceiling) for each in _of_rates(row, pick)]
    if ceiling is not None and all(value < ceiling for own in series for value in own.y):
        ceiling = None
    return Panel(f"{which}: {title}", {"learning rate": series}, log="y", ceiling=ceiling)


def _compares(row: Row, ceiling: float | None) -> bool:
    """Whether a row has several rates, and not all of them above the ceiling."""
    losses = (loss for record in row.grid for loss in own_curves(record, "validation"))
    return len(row.grid) > 1 and (ceiling is None or min(map(min, losses)) < ceiling)


def _of_rates(row: Row, pick: Callable[[Sequence[float]], float]) -> list[Series]:
    """A line through the first seeds, dots for the others, and a ring around the chosen rate."""
    name = f"{label_of(row.chosen)}, rate {row.chosen.config['rate']:g}"
    first: dict[float, float] = {}
    others: list[tuple[float, float]] = []
    for record in row.grid:
        rate = record.config["rate"]
        loss, *rest = map(pick, own_curves(record, "validation"))
        first[rate] = loss
        others += [(rate, value) for value in rest]
    chosen = row.chosen.config["rate"]
    return [
        Series(name, row.colour, list(first), list(first.values()), mark="linked"),
        Series(
            name,
            row.colour,
            [rate for rate, _ in others],
            [loss for _, loss in others],
            mark="dots",
        ),
        Series(name, row.colour, [chosen], [first[chosen]], mark="ring"),
    ]
