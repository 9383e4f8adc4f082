"""Conditional MNIST's table: the 1,000-sample number beside the paper's, and the rows that belong
there.
"""

import csv
import math
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import pytest
from rich.console import Console

from arsm_experiments.conditional import Conditional
from arsm_experiments.report.command import Report
from arsm_experiments.report.conditional import conditional_sections
from tests.experiments import training_runs
from tests.experiments.training_runs import TEST_GAP, rows_of

TRAIN_GAP, MANY_GAP = 2.0, -3.0

write_run = partial(
    training_runs.write_run, train_gap=TRAIN_GAP, evaluations=80.0, at_end={"best_test": MANY_GAP}
)


@pytest.mark.parametrize(
    ("options", "paper"),
    [
        (Conditional("arsm"), 58.3),
        (Conditional("straight-through"), 61.8),
        (Conditional("gumbel-softmax:hard=True,temperature=0.5"), 59.7),
        (Conditional("gumbel-softmax"), None),
        (Conditional("muprop"), 63.0),
        (Conditional("arsm:pooled=True"), None),
        (Conditional("rloo:samples=46,live=1"), None),
        (Conditional("arsm", schedule="cosine"), None),
        (Conditional("arsm", bound_samples=5), None),
        (Conditional("arsm", measure_samples=100), 58.3),
    ],
)
def test_the_papers_figure_stands_beside_its_own_rows(
    tmp_path: Path, options: Conditional, paper: float | None
) -> None:
    record = write_run(tmp_path, options, [[70.0, 62.0, 63.0]])
    (section,) = conditional_sections([record])
    (cells,) = rows_of(section).values()
    many = cells["test, 1,000 samples"]
    assert many.values == [62.0 + MANY_GAP]
    assert (many.paper, many.paper_std) == (paper, 0.2 if paper == 58.3 else None)
    assert many.verdict == ("not like for like" if paper else None)
    assert [cell.metric for cell in cells.values() if cell.paper is not None] == [many.metric] * (
        paper is not None
    )


def test_a_figure_of_fewer_samples_is_not_compared_with_the_papers(tmp_path: Path) -> None:
    record = write_run(tmp_path, Conditional(test_samples=100), [[70.0, 62.0, 63.0]])
    (section,) = conditional_sections([record])
    (cells,) = rows_of(section).values()
    assert cells["test, 100 samples"].values == [62.0 + MANY_GAP]
    assert all(cell.paper is None for cell in cells.values())
    assert not section.headlines


def test_a_seed_whose_gradients_overflowed_is_left_out(tmp_path: Path) -> None:
    losses = [[70.0, 62.0, 63.0], [271.0, 271.0, 271.0], [70.0, 63.0, 64.0]]
    record = write_run(tmp_path, Conditional(seeds=(0, 1, 2)), losses)
    for line in record.metrics:
        if line["seed"] == 1:
            line["gradient_variance"] = math.inf
    (section,) = conditional_sections([record])
    (cells,) = rows_of(section).values()
    assert cells["test, 1,000 samples"].values == [62.0 + MANY_GAP, 63.0 + MANY_GAP]


def test_the_first_seed_chooses_the_rate_and_every_seed_its_epoch(tmp_path: Path) -> None:
    curves = {
        1e-4: [[70.0, 61.0, 64.0], [70.0, 66.0, 65.0]],
        3e-4: [[70.0, 63.0, 62.0], [70.0, 60.0, 60.0]],
    }
    records = [
        write_run(tmp_path, Conditional(rates=(rate,), seeds=(0, 1)), validation)
        for rate, validation in curves.items()
    ]
    (section,) = conditional_sections(records)
    (cells,) = rows_of(section).values()
    assert cells["learning rate"].values == [1e-4]
    assert cells["validation, 10 samples"].values == [61.0, 65.0]
    assert cells["train"].values == [61.0 + TRAIN_GAP, 65.0 + TRAIN_GAP]
    assert cells["test, 10 samples"].values == [61.0 + TEST_GAP, 65.0 + TEST_GAP]
    assert cells["test, 10 samples, last epoch"].values == [64.0 + TEST_GAP, 65.0 + TEST_GAP]
    assert cells["test, 1,000 samples"].values == [61.0 + MANY_GAP, 65.0 + MANY_GAP]


def test_seeds_split_over_commands_are_one_row_of_their_section(tmp_path: Path) -> None:
    records = [
        write_run(
            tmp_path,
            Conditional(name=name, seeds=seeds, dropouts=(dropout,)),
            [[70.0, 62.0 + seeds[0], 63.0]],
        )
        for name, dropout in (("", 0.0), ("recipe", 0.1))
        for seeds in ((0,), (1,))
    ]
    protocol, recipe = conditional_sections(records)
    assert [section.title for section in (protocol, recipe)] == [
        "Conditional MNIST",
        "Conditional MNIST (recipe)",
    ]
    for section, row in ((protocol, "arsm"), (recipe, "arsm, dropout 0.1")):
        assert list(rows_of(section)) == [row]
        assert rows_of(section)[row]["test, 1,000 samples"].values == [
            62.0 + MANY_GAP,
            63.0 + MANY_GAP,
        ]
        assert len(section.records) == 2
    names = [record.name for record in records]
    ends = (
        "rate0.0001",
        "rate0.0001-seed-1",
        "rate0.0001-dropout0.1",
        "rate0.0001-dropout0.1-seed-1",
    )
    assert names == [
        f"{start}arsm-{end}"
        for start, end in zip(["", "", "recipe-", "recipe-"], ends, strict=True)
    ]


def test_rows_stand_in_the_papers_order_and_recipes_apart(tmp_path: Path) -> None:
    curve = [[70.0, 62.0, 63.0]]
    options = [
        Conditional("vimco", bound_samples=8, name="recipe"),
        Conditional(name="recipe", dropouts=(0.1,)),
        Conditional("rloo:samples=46,live=1"),
        Conditional("muprop"),
        Conditional("gumbel-softmax"),
        Conditional("vimco", bound_samples=8),
        Conditional(),
    ]
    sections = conditional_sections([write_run(tmp_path, each, curve) for each in options])
    assert {section.title: list(rows_of(section)) for section in sections} == {
        "Conditional MNIST": [
            "arsm",
            "muprop",
            "gumbel-softmax",
            "rloo:samples=46,live=1",
            "vimco, bound samples 8",
        ],
        "Conditional MNIST (recipe)": ["arsm, dropout 0.1", "vimco, bound samples 8"],
    }


def test_the_page_and_the_table_have_the_numbers(tmp_path: Path) -> None:
    best = [62.0, 61.6, 62.4]
    options = Conditional(seeds=(0, 1, 2))
    record = write_run(tmp_path / "runs", options, [[70.0, value, value + 1] for value in best])
    Report(root=tmp_path / "runs", export=tmp_path / "results").run(Console(quiet=True))
    page = (tmp_path / "runs" / "report.html").read_text()
    for text in ("Conditional MNIST", "59.0 ± 0.4", "58.3 ± 0.2", record.name):
        assert text in page
    with (tmp_path / "results" / "conditional" / "table.csv").open() as file:
        table = {(row["row"], row["metric"]): row for row in csv.DictReader(file)}
    test = table["Conditional MNIST: arsm", "test, 1,000 samples"]
    assert float(test["mean"]) == pytest.approx(fmean(best) + MANY_GAP, rel=1e-5)
    assert float(test["std"]) == pytest.approx(stdev(best), rel=1e-5)
    assert (test["seeds"], test["paper"]) == ("3", "58.3")
    for name in ("iterations", "seconds", "evaluations", "state"):
        assert (
            (tmp_path / "results" / "conditional" / f"protocol-{name}.png")
            .read_bytes()
            .startswith(b"\x89PNG")
        )
