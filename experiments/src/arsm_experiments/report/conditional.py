"""Conditional MNIST's part of the report: the paper's table, each estimator at the learning rate
validation chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from arsm_experiments.labels import readable
from arsm_experiments.report.rows import CHOSE, Row, last, make_rows
from arsm_experiments.report.sections import Result, Section
from arsm_experiments.report.training import PARTS, SECONDS, figures, not_run, pictures
from arsm_experiments.runs.reader import Record

# test -ln p(x_l | x_u) in nats: Yin, Yue and Zhou, ARSM, ICML 2019, table 2, whose other rows are
# those of Jang, Gu and Poole, Categorical reparameterization with Gumbel-Softmax, ICLR 2017
PAPER = {
    "arsm": 58.3,
    "straight-through": 61.8,
    "gumbel-softmax:hard=True": 59.7,
    "muprop": 63.0,
}
PAPER_SAMPLES = 1000
PAPER_SPREAD = {"arsm": 0.2}
STATE = (
    ("variance of both upper maps' gradient", "gradient_variance", True),
    ("entropy of z1 and z2 per variable (nats)", "entropy", False),
    ("share of distinct pseudo actions", "pseudo_action_share", False),
)


def conditional_sections(records: Sequence[Record]) -> list[Section]:
    """One section per group, the paper's protocol first."""
    ordered = sorted((r for r in records if r.metrics), key=lambda r: r.group)
    return [_section(group, list(runs)) for group, runs in groupby(ordered, key=lambda r: r.group)]


def _section(group: str, records: list[Record]) -> Section:
    headline = _test(PAPER_SAMPLES)
    paper = {words: {headline: number} for words, number in PAPER.items()}
    rows = make_rows(records, paper, "measure_samples", "test_samples")
    config = rows[0].chosen.config
    size = config["variables"] * config["categories"]
    text = (
        "The lower half of binarized MNIST digits from the upper half: linear maps "
        f"392-{size}-{size}-392 through two layers of {config['variables']} "
        f"{config['categories']}-way variables, batches of {config['batch']}, Adam. -ln p(x_l | "
        "x_u) in nats from S samples, -ln 1/S sum_s p(x_l | z_s), mean and standard deviation "
        "over seeds; more samples give a lower number. Train is the training objective: one "
        "sample per image unless the row says bound samples, relaxed where the estimator relaxes. "
        "The learning rate is the one at which the first seed's best validation loss was lowest; "
        "all numbers except the last epoch's are from each seed's epoch of best validation. "
        f"{SECONDS} The paper does not say how it binarized its images, and its numbers are not "
        f"like for like: {_papers()}."
    ) + ("" if group else not_run(rows, paper, headline))
    few = (
        " or ".join(
            f"{n:,}" for n in sorted({row.chosen.config["measure_samples"] for row in rows})
        )
        + " samples"
    )
    titles = {
        part: f"-ln p, {part} (nats{'' if part == 'train' else ', ' + few})" for part in PARTS
    }
    return Section(
        "Conditional MNIST" + (f" ({group})" if group else ""),
        text,
        records,
        [result for row in rows for result in _results(row)],
        figures(rows, group or "protocol", "-ln p(lower half | upper half)", titles, STATE),
        pictures(rows, "test images, their upper halves, and sampled completions"),
        headline=headline,
        headline_words=f"{headline}, -ln p in nats",
    )


def _papers() -> str:
    """The paper's numbers in words."""
    spreads = {words: f" ± {spread:g}" for words, spread in PAPER_SPREAD.items()}
    return ", ".join(
        f"{readable(words)} {number:g}{spreads.get(words, '')}" for words, number in PAPER.items()
    )


def _test(samples: int) -> str:
    return f"test, {samples:,} samples"


def _results(row: Row) -> list[Result]:
    """Results of an estimator at its rate, over all seeds."""
    record, config = row.shown, row.shown.config
    few = config["measure_samples"]
    found = {
        "learning rate": [config["rate"]],
        "train": row.at_best("train"),
        f"validation, {few:,} samples": row.at_best("validation"),
        _test(few): row.at_best("test"),
        f"{_test(few)}, last epoch": last(record, "test"),
        _test(config["test_samples"]): last(record, "best_test"),
        CHOSE: [float(row.flattered)],
        "evaluations, last epoch": last(record, "evaluations"),
        "seconds": [record.seconds],
    }
    spread = PAPER_SPREAD.get(config["estimator"])
    return [
        Result(
            row.label,
            metric,
            seeds,
            record,
            number,
            spread if number is not None else None,
            like_for_like=False,
        )
        for metric, seeds in found.items()
        if seeds
        for number in [row.paper.get(metric)]
    ]
