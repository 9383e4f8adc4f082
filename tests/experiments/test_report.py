"""The report: one self-contained page whose numbers are those of the run folders."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

import arsm
from arsm_experiments.labels import NAMES, readable
from arsm_experiments.report.command import Report
from arsm_experiments.report.findings import finding
from arsm_experiments.report.sections import COLUMNS, Result, Section, Verdict, student_quantile
from arsm_experiments.report.toy import AT_EVERY_UPDATE, ON_THE_WAY, toy_sections
from arsm_experiments.runs.reader import Record, read_run
from arsm_experiments.toy import Toy

ESTIMATORS = ("exact", "arsm")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    toy = Toy(
        categories=(4,),
        updates=20,
        trace_every=5,
        variance_samples=5,
        seeds=3,
        estimators=ESTIMATORS,
        root=root,
    )
    toy.run(Console(quiet=True))
    return root


class Page(HTMLParser):
    """What a page refers to, its tags, its text, and the figures' data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.figures: list[dict[str, Any]] = []
        self.data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.references += [
            value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "srcset")
        ]
        self.data = ("type", "application/json") in attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.data and data.strip():
            self.figures.append(json.loads(data))
            self.data = False
        elif not {"script", "style"} & set(self.open):
            self.text += data


def test_the_page_is_complete(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    Report(root=runs, out=out).run(Console(quiet=True))
    page = Page(out.read_text())
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert {r for r in page.references if not r.startswith("data:")} <= {
        f"#{name}" for name in page.ids
    }
    assert [len(figure["wide"]["annotations"]) for figure in page.figures] == [
        4,
        len(ESTIMATORS),
        len(ESTIMATORS),
    ]
    assert [button["label"] for button in page.figures[0]["buttons"]] == [
        "update",
        "second",
        "evaluation of f",
    ]
    for words, name in zip(ESTIMATORS, ("true gradient", "ARSM"), strict=True):
        band, curve, *_ = [
            t for t in page.figures[0]["data"] if t["name"] == name and len(t["x"]) > 1
        ]
        steps, seeds = read_run(runs / "toy" / f"C4-step1-{words}").series("reward")
        assert (curve["x"], band["x"]) == (steps, [*steps, *reversed(steps)])
        np.testing.assert_allclose(curve["y"], np.mean(seeds, axis=0), rtol=1e-4)
        np.testing.assert_allclose(
            band["y"][: len(steps)], np.percentile(seeds, 90, axis=0), rtol=1e-4
        )
    for words in ESTIMATORS:
        assert f"C4-step1-{words}" in page.text
    session = read_run(runs / "toy" / "C4-step1-arsm").sessions[0]
    for text in (
        "0 to 2",
        "trace_every=5",
        session["hardware"],
        session["torch"],
        session["commit"] or "",
    ):
        assert text in page.text


def test_labels_cannot_break_the_page(runs: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folder = root / "toy" / "C4-step1-<b>x"
    folder.mkdir(parents=True)
    for path in (runs / "toy" / "C4-step1-arsm").glob("*.json*"):
        (folder / path.name).write_text(path.read_text().replace('"arsm"', '"<b>x"'))
    Report(root=root).run(Console(quiet=True))
    page = Page((root / "report.html").read_text())
    assert "b" not in page.tags
    assert "<b>x" in page.text


def test_exported_results_are_those_of_the_runs(runs: Path, tmp_path: Path) -> None:
    Report(root=runs, out=tmp_path / "page.html", export=tmp_path / "results").run(
        Console(quiet=True)
    )
    folder = tmp_path / "results" / "toy"
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    final = {
        words: [
            line["reward"]
            for line in read_run(runs / "toy" / f"C4-step1-{words}").metrics
            if line["step"] == 20
        ]
        for words in ESTIMATORS
    }
    found = {(row["row"], row["metric"]): row for row in rows}
    arsm = found["Toy, C = 4, step 1: arsm", "E[f]"]
    assert float(arsm["mean"]) == pytest.approx(fmean(final["arsm"]), rel=1e-5)
    assert float(arsm["std"]) == pytest.approx(stdev(final["arsm"]), rel=1e-4)
    assert arsm["seeds"] == "3"
    assert arsm["hardware"]
    optimum = 0.5 + 1 / 30
    gap = fmean((optimum - x) / (optimum - final["exact"][0]) for x in final["arsm"])
    assert float(found["Toy, C = 4, step 1: arsm", "gap / true gap"]["mean"]) == pytest.approx(
        gap, rel=1e-4
    )
    one = found["Toy, C = 4, step 1: arsm", "variance / arsm's at the start"]
    assert float(one["mean"]) == pytest.approx(1)
    for part in ("traces", "gradient", "probability"):
        assert (folder / f"C4-step1-{part}.png").read_bytes().startswith(b"\x89PNG")


def test_an_export_has_only_the_figures_that_its_page_shows(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "toy"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(
        "![traces](C4-step1-traces.png) and not C4-step1-gradient.png"
    )
    Report(root=runs, out=tmp_path / "page.html", export=tmp_path / "results").run(
        Console(quiet=True)
    )
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "table.csv",
        "C4-step1-traces.png",
    }


def test_an_unfinished_run_is_shown_as_such(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy" / "C4-step1-arsm"
    folder.mkdir(parents=True)
    for path in (runs / "toy" / "C4-step1-arsm").glob("*.json*"):
        (folder / path.name).write_bytes(path.read_bytes())
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: 3 * 3]))
    (section,) = toy_sections([read_run(folder)])
    assert {result.row for result in section.results} == {"arsm (10 updates)"}
    assert "gap / true gap" not in {result.metric for result in section.results}


def test_a_true_gradient_that_arrives_is_no_measure(tmp_path: Path) -> None:
    toy = Toy(
        categories=(4,),
        steps=(1e6,),
        updates=200,
        variance_samples=2,
        estimators=("exact", "arsm"),
        root=tmp_path,
    )
    toy.run(Console(quiet=True))
    (section,) = toy_sections([read_run(folder) for folder in sorted((tmp_path / "toy").iterdir())])
    assert {(result.row, result.metric): result.mean for result in section.results}[
        "true gradient", "E[f]"
    ] == 0.5 + 1 / toy.r
    assert "gap / true gap" not in {result.metric for result in section.results}


def test_the_variance_over_a_run_is_that_of_every_update_where_it_was_measured(
    tmp_path: Path,
) -> None:
    """30 updates measured at 0, 20 and 30: the two means stand for 20 and for 10 updates."""
    Toy(
        categories=(4,),
        updates=30,
        trace_every=20,
        variance_samples=4,
        seeds=2,
        estimators=("arsm", "reinforce"),
        variance_of_every_update=2,
        root=tmp_path,
    ).run(Console(quiet=True))
    names = ("arsm", "reinforce")
    records = {name: read_run(tmp_path / "toy" / f"C4-step1-{name}") for name in names}
    (section,) = toy_sections(list(records.values()))
    means = {
        name: [
            (20 * first + 10 * second) / 30
            for first, second in record.series("variance_of_every_update")[1]
        ]
        for name, record in records.items()
    }
    found = {(r.row, r.metric): list(r.values) for r in section.results}
    for name in names:
        expected = [x / fmean(means["arsm"]) for x in means[name]]
        assert found[name, AT_EVERY_UPDATE] == pytest.approx(expected)
        assert found[name, ON_THE_WAY] != pytest.approx(expected)


def test_different_problems_are_different_sections(runs: Path, tmp_path: Path) -> None:
    Toy(
        categories=(3, 5), updates=2, variance_samples=2, estimators=("ar", "arsm"), root=tmp_path
    ).run(Console(quiet=True))
    records = [read_run(folder) for folder in sorted((tmp_path / "toy").iterdir())]
    sections = toy_sections(records)
    assert [section.title for section in sections] == ["Toy, C = 3, step 1", "Toy, C = 5, step 1"]
    assert [len(section.records) for section in sections] == [2, 2]


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (100, 1.984)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=2e-3)


@pytest.mark.parametrize(
    ("values", "paper", "spread", "difference", "verdict"),
    [
        (
            [87.0, 86.6, 87.4],
            86.7,
            None,
            "+0.3",
            "undecided",
        ),  # noise: 4.30 x 0.4 x sqrt(1 + 1/3) = 1.99
        ([87.0, 86.6, 87.4], 85.1, None, "+1.9", "undecided"),
        ([87.0, 86.6, 87.4], 84.9, None, "+2.1", "worse"),
        ([87.0, 86.6, 87.4], 89.1, None, "-2.1", "better"),
        ([58.0, 58.2, 58.4], 58.9, 0.0, "-0.7", "better"),  # noise: 4.30 x 0.2 / sqrt(3) = 0.50
        ([58.0, 58.2, 58.4], 58.9, 0.2, "-0.7", "undecided"),
        ([87.0], 80.0, None, "+7", "noise unknown"),
    ],
)
def test_the_papers_figure_is_beaten_beyond_noise_only(
    runs: Path,
    values: list[float],
    paper: float,
    spread: float | None,
    difference: str,
    verdict: Verdict,
) -> None:
    record = read_run(runs / "toy" / "C4-step1-arsm")
    result = Result("arsm", "test", values, record, paper, spread)
    assert (result.difference, result.verdict) == (difference, verdict)
    other_way = Result("arsm", "test", values, record, paper, spread, like_for_like=False)
    assert (other_way.difference, other_way.verdict) == ("", "not like for like")
    (line,) = Section("VAE", "", [record], [result, other_way], headline="test").headlines[:1]
    assert (line.ours, line.difference, line.verdict) == (result.ours, difference, verdict)
    assert not Section("VAE", "", [record], [result], headline="train").headlines


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5327], "0.5327"),
        ([0.5, 0.5], "0.5"),
        ([0.510, 0.522], "0.516 ± 0.008"),
        ([20.0, 30.0], "25 ± 7"),
        ([2.0e6, 3.0e6], "2.5e6 ± 7e5"),
        ([2.0e-7], "2e-7"),
        ([0.51670001, 0.51670002], "0.5167"),
        ([float("nan"), 1.0], "nan"),
    ],
)
def test_numbers_are_as_long_as_their_spread_allows(
    runs: Path, values: list[float], text: str
) -> None:
    assert Result("row", "metric", values, read_run(runs / "toy" / "C4-step1-arsm")).text == text


# ---------------------------------------------------------------- words for people


def result(
    row: str, values: list[float], metric: str = "test", paper: float | None = None
) -> Result:
    return Result(row, metric, values, cast(Record, None), paper)


def test_every_estimator_has_a_name_for_people() -> None:
    assert set(arsm.estimator_names()) <= set(NAMES)
    assert len(set(NAMES.values())) == len(NAMES)
    assert readable("rloo:samples=46,live=1, epochs 500 (740 epochs)") == (
        "leave-one-out, 46 samples, 1 differentiated, 500 epochs (740 epochs)"
    )
    assert readable("25*gumbel-softmax:hard=True") == "straight-through Gumbel-Softmax, mean of 25"
    assert readable("arsm, adam 0.01, hidden none") == "ARSM, Adam 0.01, no hidden layer"
    assert readable("TraceGraph_ELBO, 8 particles") == "TraceGraph_ELBO, 8 particles"


def test_rows_and_legends_have_no_raw_words(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    Report(root=runs, out=out).run(Console(quiet=True))
    page = Page(out.read_text())
    names = {trace["name"] for figure in page.figures for trace in figure["data"]}
    assert {"ARSM", "true gradient"} <= names
    assert "arsm" not in names


def test_a_finding_is_what_the_numbers_say() -> None:
    rows = [
        result("arsm", [3.0, 3.1, 3.2]),
        result("rloo", [2.0, 2.1, 2.2]),
        result("relax", [9.0, 9.1], paper=10.0),
    ]
    said = finding(rows)
    assert said.startswith(
        "Leave-one-out has the lowest test -ELBO, 2.1 ± 0.1; ARSM follows with 3.1 ± 0.1."
    )
    assert "1 row undecided" in said
    assert "undecided by Welch" in finding(
        [result("arsm", [3.0, 3.4, 3.2]), result("rloo", [3.0, 3.1, 3.3])]
    )
    higher = finding(
        [result("arsm", [3.0], "final average"), result("a2c", [2.0], "final average")]
    )
    assert higher.startswith("ARSM has the highest final average return, 3;")
    last = finding(
        [result(words, [value]) for words, value in (("rloo", 1.0), ("relax", 2.0), ("arsm", 3.0))]
    )
    assert last.endswith("ARSM is number 3 of 3 with 3.")
    assert finding([result("arsm", [1.0], "seconds")]) == ""


def test_a_finding_names_the_settings_of_a_method_with_several_and_ranks_estimators_only() -> None:
    rows = [("arsm, adam 0.01", 1.0), ("arsm, adam 0.01, hidden 32", 3.0), ("a2c, adam 0.01", 2.0)]
    said = finding([result(row, [value], "final average") for row, value in rows])
    best = (
        "ARSM (Adam 0.01, hidden units 32) has the highest final average return, 3; A2C follows "
        "with 2"
    )
    assert said == f"{best}, each at the best of its settings here."
    said = finding(
        [
            result(row, [value], "error x evaluations")
            for row, value in (("floor", 1.0), ("rloo", 2.0))
        ]
    )
    assert said == "Leave-one-out reaches a mean squared error x evaluations of 2."


def test_a_figure_of_the_paper_that_is_not_like_for_like_is_not_shown() -> None:
    other = Result("arsm", "seconds", [1.0, 2.0], cast(Record, None), 10.0, like_for_like=False)
    assert other.papers == ""
    assert Section("", "", (), [other], headline="seconds").headlines == []
    assert result("arsm", [1.0, 2.0], paper=10.0).papers == "10"


def test_a_section_in_which_nothing_moves_says_so(tmp_path: Path) -> None:
    toy = Toy(
        categories=(500,),
        updates=3,
        trace_every=1,
        variance_samples=2,
        seeds=2,
        estimators=ESTIMATORS,
        root=tmp_path,
    )
    toy.run(Console(quiet=True))
    Report(root=tmp_path).run(Console(quiet=True))
    text = (tmp_path / "report.html").read_text()
    assert (
        '<span class="found">Little to see: with this step size even the true gradient goes only'
        in text
    )
    assert Page(text).open == []
