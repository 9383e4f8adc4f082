"""Rows of training runs: each estimator at the learning rate that validation chose, with the seeds
that report it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, isfinite
from typing import Any

from arsm_experiments.report.figures import palette
from arsm_experiments.runs.merge import merge_seeds
from arsm_experiments.runs.reader import Record

CHOSE = "seeds that chose the rate"
"""Seeds of a row that were also used to choose its learning rate: they flatter it."""
TRIED = "learning rates tried"
TRIAL = "validation of the trial at "
"""Followed by the rate: the first seed's best."""
TRIAL_EPOCHS = "epochs of the trials"
"""If fewer than the row has."""
ENOUGH = 3
"""So many other seeds report a row without the one that chose its rate."""


@dataclass(frozen=True)
class Row:
    """One label: an estimator with one set of other settings."""

    grid: Sequence[Record]
    """Its runs, by learning rate."""
    chosen: Record
    colour: str
    paper: Mapping[str, float]
    """The paper's numbers by metric, if it has this row."""
    fresh: Record | None = None
    """Seeds that did not choose the rate, if there are enough."""
    parts: Sequence[Record] = ()
    """Their runs, if they ran apart from the grid."""
    tried: int = 1
    """The number of rates that the shown one was chosen from."""

    @property
    def label(self) -> str:
        """The label of the shown runs, with the epochs that all seeds have reached if one is
        unfinished.
        """
        return label_of(self.shown)

    @property
    def shown(self) -> Record:
        """The run of tables and curves: the fresh seeds if any, because the seed that chose the
        rate flatters it.
        """
        return self.fresh or self.chosen

    @property
    def flattered(self) -> bool:
        """Whether one of its seeds also chose the rate."""
        return self.fresh is None and self.tried > 1

    @property
    def trials(self) -> dict[float, float]:
        """The first seed's best validation by rate; empty if there is one rate."""
        until = _common_end(self.grid)
        found = {record.config["rate"]: _best(record, until) for record in self.grid}
        return found if len(found) > 1 else {}

    @property
    def trial_epochs(self) -> float:
        """Epochs that all rates have reached."""
        return min(last(record, "epoch")[0] for record in self.grid)

    @property
    def name(self) -> str:
        """Its label and learning rate, for the legend."""
        fresh = ", fresh seeds" if self.fresh else ""
        return f"{self.label}, rate {self.chosen.config['rate']:g}{fresh}"

    def at_best(self, key: str) -> list[float]:
        """The metric at each seed's best validation, among the epochs that all seeds have
        reached. An archive may have dropped that epoch's measurement of the other seeds.
        """
        until = self.shown.series("validation")[0][-1]
        wanted = self.shown.by_seed(key)
        found = []
        for seed, validation in self.shown.by_seed("validation").items():
            reached = [step for step in validation if step <= until]
            found.append(wanted[seed][min(reached, key=validation.__getitem__)])
        return found


def label_of(record: Record) -> str:
    """The run's label, with the epochs that all seeds have reached if one is unfinished."""
    done = last(record, "epoch")[0]
    return record.label + (f" ({done:,} epochs)" if done < record.config["epochs"] else "")


def make_rows(
    records: Sequence[Record],
    paper: Mapping[str, Mapping[str, float]],
    *counts: str,
    fresh: Sequence[Record] = (),
) -> list[Row]:
    """The estimators in the paper's order, then by name, each with its grid of rates and the chosen
    one.

    `paper` has a number by metric for each method, in its order. Seeds that ran in several commands
    are put together, unless these commands differ in the numbers of samples named in `counts`; an
    unfinished run stays out while a finished one has its settings. `fresh` are runs of seeds that
    were trained after their rate had been chosen, perhaps by trials of fewer epochs.
    """

    def place(record: Record) -> tuple[int, str]:
        return [*paper, method(record.config)].index(method(record.config)), record.label

    def alike(record: Record) -> tuple[object, ...]:
        return record.label, *(record.config[key] for key in ("rate", *counts))

    def setting(record: Record) -> tuple[object, ...]:
        """What fresh seeds have in common with the trial that chose their rate."""
        numbers = (record.config[key] for key in ("rate", "precision", *counts))
        return _without_epochs(record.label), *numbers

    learning = _learning(records)
    finished = {alike(record) for record in learning if is_complete(record)}
    shown = [r for r in learning if is_complete(r) or alike(r) not in finished]
    ordered = sorted(merge_seeds(shown, alike), key=place)
    again = _Fresh([record for record in _learning(fresh) if is_complete(record)], setting)
    grids = again.joined([list(group) for _, group in groupby(ordered, key=place)])
    colours = palette([grid[0].config["estimator"] for grid in grids])

    def others(chosen: Record) -> Record | None:
        return _other_seeds([run for run in shown if alike(run) == alike(chosen)])

    return [
        _row(grid, colour, again, others, paper)
        for grid, colour in zip(grids, colours, strict=True)
    ]


def _row(
    grid: list[Record],
    colour: str,
    again: _Fresh,
    others: Callable[[Record], Record | None],
    paper: Mapping[str, Mapping[str, float]],
) -> Row:
    """A grid, the rate that it chooses, and the seeds that report it: those that were trained
    afterwards or, without any, the `others` at that rate.
    """
    grid.sort(key=lambda record: record.config["rate"])
    rates = grid
    if _seeds(_choice(grid)) == 1 and not again.of(_choice(grid)):
        # until other seeds report the choice, the row stays at the rate that has several
        rates = [record for record in grid if _seeds(record) > 1] or grid
    chosen = _choice(rates)
    parts = again.of(chosen)
    if parts:
        seeds = merge_seeds(parts, again.setting)[0]
    else:
        seeds = others(chosen) if len(rates) > 1 else None
    known = _paper(seeds or chosen, paper)
    return Row(grid, chosen, colour, known, seeds, parts, len(rates))


@dataclass(frozen=True)
class _Fresh:
    """Finished runs of seeds that report a rate which others chose."""

    runs: Sequence[Record]
    setting: Callable[[Record], Hashable]

    def of(self, chosen: Record) -> list[Record]:
        """Those that report this trial: with as many epochs or, without any, with the most."""
        found = [run for run in self.runs if self.setting(run) == self.setting(chosen)]
        epochs = {run.config["epochs"] for run in found}
        own = chosen.config["epochs"]
        wanted = own if own in epochs else max((n for n in epochs if n > own), default=None)
        return [run for run in found if run.config["epochs"] == wanted]

    def joined(self, grids: Sequence[list[Record]]) -> list[list[Record]]:
        """The grids; trials that differ in their epochs alone are one if it has fresh seeds."""
        families: dict[str, list[list[Record]]] = {}
        for grid in grids:
            families.setdefault(_without_epochs(grid[0].label), []).append(grid)
        found = []
        for family in families.values():
            ordered = sorted((run for grid in family for run in grid), key=_epochs)
            # of a rate that was tried twice, the longer trial
            together = list({run.config["rate"]: run for run in ordered}.values())
            longest = max(map(_epochs, together))
            reports = self.of(_choice(together))
            whole = len(family) == 1 or any(_epochs(run) == longest for run in reports)
            found += [together] if len(family) > 1 and whole else family
        return found


def is_complete(record: Record) -> bool:
    """Whether all seeds have reached the last epoch."""
    return last(record, "epoch")[0] >= record.config["epochs"]


def _without_epochs(label: str) -> str:
    """The settings of a label besides its epochs."""
    return re.sub(r", epochs \d+", "", label)


def _epochs(record: Record) -> int:
    return record.config["epochs"]


def _seeds(record: Record) -> int:
    return len(record.by_seed("validation"))


def _common_end(grid: Sequence[Record]) -> float:
    """The step until which trials are compared: the shortest one's end if they were to differ in
    their epochs.
    """
    if len({_epochs(record) for record in grid}) == 1:
        return inf
    return min(record.series("validation")[0][-1] for record in grid)


def _best(record: Record, until: float = inf) -> float:
    """The first seed's best validation."""
    _, curve = sorted(record.by_seed("validation").items())[0]
    return min(loss for step, loss in curve.items() if step <= until)


def _other_seeds(runs: Sequence[Record]) -> Record | None:
    """The seeds of one rate besides the first, which chose it; None if too few are left."""
    first = min(line["seed"] for run in runs for line in run.metrics)
    others = [
        replace(run, metrics=[line for line in run.metrics if line["seed"] != first])
        for run in runs
    ]
    merged = merge_seeds([run for run in others if run.metrics], alike=lambda run: run.label)
    return merged[0] if merged and _seeds(merged[0]) >= ENOUGH else None


def _choice(grid: Sequence[Record]) -> Record:
    """The rate that validation chooses."""
    until = _common_end(grid)
    return min(grid, key=lambda record: _best(record, until))


def _learning(records: Sequence[Record]) -> list[Record]:
    """The runs without seeds whose gradients overflowed Adam's second moments: such a seed stands
    still from then on, whatever its estimator.
    """
    found = []
    for record in records:
        variances = record.by_seed("gradient_variance")
        broken = {seed for seed, own in variances.items() if not all(map(isfinite, own.values()))}
        kept = [line for line in record.metrics if line["seed"] not in broken]
        if kept:
            found.append(replace(record, metrics=kept))
    return found


def _paper(record: Record, paper: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    """The paper's numbers for a run; none if its label names a setting that is not the paper's."""
    as_printed = record.label == record.config["estimator"]
    return paper.get(record.label) or (paper.get(method(record.config), {}) if as_printed else {})


def method(config: Mapping[str, Any]) -> str:
    """The estimator's words without its temperature, which the paper does not give."""
    name, _, options = config["estimator"].partition(":")
    kept = [
        option for option in options.split(",") if option and not option.startswith("temperature=")
    ]
    return ":".join(filter(None, (name, ",".join(kept))))


def trials(row: Row) -> list[tuple[str, float, Record]]:
    """What each trial of a row found, and their epochs if they were shorter."""
    runs = {record.config["rate"]: record for record in row.grid}
    found = [(f"{TRIAL}{rate:g}", loss, runs[rate]) for rate, loss in row.trials.items()]
    chose = row.tried == len(row.grid) > 1
    if chose and row.trial_epochs < row.shown.config["epochs"]:
        found.append((TRIAL_EPOCHS, row.trial_epochs, row.chosen))
    return found


def values(record: Record, key: str) -> list[list[float]]:
    """The metric at the epochs that all seeds have reached, one list per seed."""
    return record.series(key)[1]


def own_curves(record: Record, key: str) -> list[list[float]]:
    """The metric along each seed's whole run, one list per seed, the smallest seed's first."""
    return [list(curve.values()) for _, curve in sorted(record.by_seed(key).items())]


def last(record: Record, key: str) -> list[float]:
    """The metric at the last epoch that all seeds have reached; empty if one seed never measured
    it.
    """
    found = values(record, key)
    return [seed[-1] for seed in found] if len(found) == len(values(record, "epoch")) else []
