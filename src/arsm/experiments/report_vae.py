"""The VAE's part of the report: the paper's table, each estimator at the learning rate that validation chose."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from arsm.experiments.record import Record
from arsm.experiments.sections import COLOURS, Figure, Panel, Result, Section, band
from arsm.experiments.vae import Vae

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Places = Callable[[Record], Sequence[Any]]
"""Where a run's measurements lie on the horizontal axis."""
# -ELBO (train, test) in nats by number of layers: Yin, Yue and Zhou, ARSM, ICML 2019, table 1 and section 5.2
PAPER = {
    1: {
        "reinforce": (127.0, 127.6),
        "relax": (117.4, 118.7),
        "gumbel-softmax:hard=True": (94.1, 96.4),
        "25*gumbel-softmax": (93.6, 95.9),
        "ar": (133.6, 135.0),
        "ars": (97.4, 101.4),
        "arsm": (82.0, 86.7),
    },
    2: {"gumbel-softmax": (91.3, 98.3), "arsm": (78.3, 89.5)},
}
PROTOCOL: dict[str, Any] = json.loads(json.dumps(Vae().config(rate=0.0, dropout=0.0)))
"""The paper's settings, as a run folder holds them."""
OWN_PLACE = ("rate", "estimator", "layers", "seeds", "precision", "measure_every", "bound_samples")
"""Settings that the report shows elsewhere, or that make no other row."""
PARTS = ("train", "validation", "test")
STATE = (
    ("variance of the encoder's gradient", "gradient_variance", True),
    ("entropy of q(z | x) a variable (nats)", "entropy", False),
    ("share of distinct pseudo actions", "pseudo_action_share", False),
)


@dataclass(frozen=True)
class Row:
    """One estimator, under one set of other settings."""

    grid: Sequence[Record]
    """Its runs, by learning rate."""
    chosen: Record
    colour: str

    @property
    def label(self) -> str:
        """The estimator, how its settings differ from the paper's, and how far it is if unfinished."""
        config = self.chosen.config
        changed = [f"{key.replace('_', ' ')} {config[key]}" for key in _changes(config)]
        done = self.chosen.metrics[-1]["epoch"]
        unfinished = f" ({done:,} epochs)" if done < config["epochs"] else ""
        return ", ".join((config["estimator"], *changed)) + unfinished

    @property
    def paper(self) -> tuple[float, float] | None:
        """The paper's train and test figures, where it has this row."""
        config = self.chosen.config
        return None if _changes(config) else PAPER[config["layers"]].get(_method(config))


def vae_sections(records: Sequence[Record]) -> list[Section]:
    """One section for every beginning of the run folders' names and number of layers, the paper's protocol first."""
    ordered = sorted((r for r in records if r.metrics), key=_group)
    return [_section(*key, list(group)) for key, group in groupby(ordered, key=_group)]


def _group(record: Record) -> tuple[str, int]:
    layers = record.config["layers"]
    return record.name.partition(f"{layers}layer-")[0].rstrip("-"), layers


def _section(prefix: str, layers: int, records: list[Record]) -> Section:
    rows = make_rows(records)
    slug = "-".join(filter(None, (prefix, f"{layers}layer")))
    title = f"VAE, {layers} layer{'s' * (layers > 1)}" + (f" ({prefix})" if prefix else "")
    config = rows[0].chosen.config
    text = (
        f"Binarized MNIST, K = {config['variables']}, C = {config['categories']} a layer, batches of "
        f"{config['batch']}, Adam. -ELBO in nats, from one sample an image, mean and standard deviation over seeds. "
        "The learning rate is the one at which the first seed's validation figure was best at any epoch. Train, "
        "validation, test and the bound are those of each seed's epoch of best validation; train is the mean over "
        "that epoch's steps, with dropout where there is any. Seconds are those of the whole run, in which all seeds "
        "and learning rates of an estimator train together."
    )
    figures = [
        _curves(rows, f"{slug}-iterations", "iterations", "", _steps, "iteration"),
        _curves(
            rows,
            f"{slug}-seconds",
            "seconds",
            "All seeds and learning rates of an estimator train together and share these seconds, which include "
            "compilation. ",
            _seconds,
            "second",
        ),
        _curves(
            rows,
            f"{slug}-evaluations",
            "evaluations",
            "Distinct evaluations of f on all images so far; a relaxing estimator's each come with a gradient of f. ",
            _evaluations,
            "evaluation of f",
        ),
        Figure(
            f"{slug}-state",
            "Gradient variance and the state of q",
            "The variance is from moving averages of the gradient's moments (decay 0.999), averaged over the encoder's "
            "parameters, on a log scale.",
            [Panel(name, partial(_draw, rows, key, _steps, "iteration", log)) for name, key, log in STATE],
            _legend(rows),
        ),
    ]
    if any(len(row.grid) > 1 for row in rows):
        figures.append(
            Figure(
                f"{slug}-rates",
                "Learning rates",
                "Lines are first seeds, whose best figure chooses the rate (a ring); dots are the other seeds.",
                [
                    Panel(f"{name} validation -ELBO (nats)", partial(_draw_rates, rows, name))
                    for name in ("best", "last")
                ],
                _legend(rows),
            )
        )
    return Section(title, text, records, [result for row in rows for result in _results(row)], figures)


def make_rows(records: Sequence[Record]) -> list[Row]:
    """The estimators in the paper's order and then by name, each with its grid of rates and the one chosen."""
    ordered = sorted(records, key=_place)
    grids = [sorted(group, key=lambda r: r.config["rate"]) for _, group in groupby(ordered, key=_place)]
    return [
        Row(grid, min(grid, key=lambda r: min(_values(r, "validation")[0])), COLOURS[place % len(COLOURS)])
        for place, grid in enumerate(grids)
    ]


def _place(record: Record) -> tuple[int, str, str]:
    config = record.config
    methods = list(PAPER[config["layers"]])
    place = methods.index(_method(config)) if _method(config) in methods else len(methods)
    return place, config["estimator"], json.dumps({key: config[key] for key in _changes(config)})


def _changes(config: dict[str, Any]) -> list[str]:
    """The settings in which a run differs from the paper's protocol."""
    return [key for key, value in PROTOCOL.items() if key not in OWN_PLACE and config[key] != value]


def _method(config: dict[str, Any]) -> str:
    """The estimator in words without its temperature, which the paper leaves open."""
    name, _, options = config["estimator"].partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith("temperature=")]
    return ":".join(filter(None, (name, ",".join(kept))))


def _results(row: Row) -> list[Result]:
    """What an estimator came to at its rate, over all seeds."""
    record = row.chosen
    validation = _values(record, "validation")
    best = [min(range(len(seed)), key=seed.__getitem__) for seed in validation]

    def at_best(key: str) -> list[float]:
        return [seed[place] for seed, place in zip(_values(record, key), best, strict=True)]

    values = {
        "learning rate": [record.config["rate"]],
        "train": at_best("train"),
        "validation": at_best("validation"),
        "test": _last(record, "best_test") or at_best("test"),
        "test, last epoch": _last(record, "test"),
        f"bound, {record.config['bound_samples']:,} samples": _last(record, "bound"),
        "seconds": [record.seconds],
    }
    paper: dict[str, float] = {} if row.paper is None else dict(zip(("train", "test"), row.paper, strict=True))
    return [Result(row.label, metric, seeds, record, paper.get(metric)) for metric, seeds in values.items() if seeds]


def _values(record: Record, key: str) -> list[list[float]]:
    """The metric along the run, one list a seed."""
    return record.series(key)[1]


def _last(record: Record, key: str) -> list[float]:
    """The metric at the end, one value a seed; none where the run has not come to it."""
    return [values[-1] for values in _values(record, key)]


# ---------------------------------------------------------------- figures


def _legend(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [(f"{row.label}, rate {row.chosen.config['rate']:g}", row.colour) for row in rows]


def _curves(rows: Sequence[Row], name: str, against: str, note: str, places: Places, label: str) -> Figure:
    return Figure(
        name,
        f"-ELBO against {against}",
        f"{note}Lines are means over seeds, bands their 10th to 90th percentile.",
        [Panel(f"-ELBO, {part} (nats)", partial(_draw, rows, part, places, label, False)) for part in PARTS],
        _legend(rows),
    )


def _steps(record: Record) -> list[float]:
    return [float(step) for step in record.series("train")[0]]


def _seconds(record: Record) -> list[float]:
    return [fmean(seeds) for seeds in zip(*_values(record, "seconds"), strict=True)]


def _evaluations(record: Record) -> list[float]:
    """Evaluations of f so far, mean over seeds: a measurement's count an image holds since the one before it."""
    steps, values = record.series("evaluations")
    images = [record.config["batch"] * (after - before) for before, after in pairwise((0, *steps))]
    each = [fmean(seeds) for seeds in zip(*values, strict=True)]
    return list(accumulate(count * number for count, number in zip(each, images, strict=True)))


def _draw(rows: Sequence[Row], key: str, places: Places, label: str, log: bool, axes: Axes) -> None:
    for row in rows:
        band(axes, places(row.chosen), _values(row.chosen, key), row.colour, log=log)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)


def _draw_rates(rows: Sequence[Row], which: str, axes: Axes) -> None:
    for row in rows:
        rates = [record.config["rate"] for record in row.grid]
        pick = min if which == "best" else (lambda seed: seed[-1])
        found = [[pick(seed) for seed in _values(record, "validation")] for record in row.grid]
        first = [seeds[0] for seeds in found]
        axes.plot(rates, first, color=row.colour, linewidth=1.5, marker="o", markersize=3)
        for rate, seeds in zip(rates, found, strict=True):
            axes.plot([rate] * (len(seeds) - 1), seeds[1:], color=row.colour, marker="o", markersize=3, linestyle="")
        chosen = rates.index(row.chosen.config["rate"])
        axes.plot(rates[chosen], first[chosen], color=row.colour, marker="o", markersize=8, fillstyle="none")
    axes.set_xlabel("learning rate")
