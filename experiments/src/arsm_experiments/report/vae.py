"""The VAE's part of the report: the paper's table, each estimator at the learning rate that
validation chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from arsm_experiments.report.rows import CHOSE, TRIED, Row, last, make_rows, trials
from arsm_experiments.report.sections import Result, Section
from arsm_experiments.report.training import PARTS, SECONDS, figures, not_run, pictures
from arsm_experiments.runs.reader import Record

AS_RELEASED = (
    ", first logit fixed False, independent decoder sample False, kl analytic, learned "
    "temperature True"
)
"""The authors' settings of straight-through Gumbel-Softmax, in a label."""
# -ELBO (train, test) in nats by number of layers: Yin, Yue and Zhou, ARSM, ICML 2019, table 1 and
# section 5.2
PAPER = {
    1: {
        "reinforce": (127.0, 127.6),
        "relax": (117.4, 118.7),
        "gumbel-softmax:hard=True": (94.1, 96.4),
        f"gumbel-softmax:hard=True{AS_RELEASED}": (94.1, 96.4),
        f"25*gumbel-softmax:hard=True{AS_RELEASED}": (93.6, 95.9),
        "ar": (133.6, 135.0),
        "ars": (97.4, 101.4),
        "arsm": (82.0, 86.7),
    },
    2: {
        f"gumbel-softmax:hard=True{AS_RELEASED}": (91.3, 98.3),
        "arsm, first logit fixed False, afresh True": (78.3, 89.5),
    },
}
"""By estimator if it has the default settings, else by the whole label of the runs with the paper's
settings.
"""
FRESH = "fresh"
"""The group, or the end of its name, of runs whose seeds were not used to choose the rate."""
STATE = (
    ("variance of the encoder's gradient", "gradient_variance", True),
    ("entropy of q(z | x) per variable (nats)", "entropy", False),
    ("share of distinct pseudo actions", "pseudo_action_share", False),
)


def vae_sections(records: Sequence[Record]) -> list[Section]:
    """One section per group and number of layers, the paper's protocol first; fresh seeds with the
    grid that chose.
    """
    ordered = sorted((r for r in records if r.metrics), key=_group)
    runs = {key: list(group) for key, group in groupby(ordered, key=_group)}
    labels = {record.label for record in ordered}
    sections = [
        _section(group, layers, own, runs.get((FRESH, layers), []), labels)
        for (group, layers), own in runs.items()
        if group != FRESH
    ]
    shown = {record.folder for section in sections for record in section.records}
    others = (
        (layers, [r for r in own if r.folder not in shown])
        for (group, layers), own in runs.items()
        if group == FRESH
    )
    return sections + [_section(FRESH, layers, own, [], labels) for layers, own in others if own]


def _group(record: Record) -> tuple[str, int]:
    """Group and layers; all groups of fresh seeds are one."""
    group = FRESH if record.group.endswith(f"-{FRESH}") else record.group
    return group, record.config["layers"]


def _section(
    group: str, layers: int, records: list[Record], fresh: list[Record], labels: set[str]
) -> Section:
    paper = {
        words: {"train": train, "test": test} for words, (train, test) in PAPER[layers].items()
    }
    rows = make_rows(records, paper, "bound_samples", fresh=fresh)
    again = [part for row in rows for part in row.parts]
    slug = "-".join(filter(None, (group, f"{layers}layer")))
    title = f"VAE, {layers} layer{'s' * (layers > 1)}" + (f" ({group})" if group else "")
    config = rows[0].chosen.config
    afterwards = "Rows show the fresh seeds that were trained at this rate afterwards, if any. "
    text = (
        f"Binarized MNIST, K = {config['variables']}, C = {config['categories']} per layer, "
        f"batches of {config['batch']}, Adam. -ELBO in nats, from one sample per image, mean and "
        "standard deviation over seeds. The learning rate is the one at which the first seed's "
        "best validation loss was lowest. "
        f"{afterwards if again else ''}Train, "
        "validation, test and the bound are those of each seed's epoch of best validation; train "
        f"is the mean over that epoch's steps, with dropout where there is any. {SECONDS}"
    ) + (
        ""
        if group
        else not_run(rows, {words: paper[words] for words in paper if words not in labels}, "test")
    )
    titles = {part: f"-ELBO, {part} (nats)" for part in PARTS}
    return Section(
        title,
        text,
        [*records, *again],
        [result for row in rows for result in _results(row)],
        figures(rows, slug, "-ELBO", titles, STATE),
        pictures(rows, "test images, their reconstructions, samples from the prior"),
        headline="test",
        headline_words="test -ELBO in nats",
        trials=[
            Result(row.label, metric, [found], run)
            for row in rows
            for metric, found, run in trials(row)
        ],
    )


def _results(row: Row) -> list[Result]:
    """Results of an estimator at its rate, over all seeds."""
    record = row.shown
    found = {
        "learning rate": [record.config["rate"]],
        TRIED: [float(row.tried)],
        "train": row.at_best("train"),
        "validation": row.at_best("validation"),
        "test": last(record, "best_test") or row.at_best("test"),
        "test, last epoch": last(record, "test"),
        f"bound, {record.config['bound_samples']:,} samples": last(record, "bound"),
        CHOSE: [float(row.flattered)],
        "evaluations, last epoch": last(record, "evaluations"),
        "seconds": [record.seconds],
    }
    return [
        Result(row.label, metric, seeds, record, row.paper.get(metric))
        for metric, seeds in found.items()
        if seeds
    ]
