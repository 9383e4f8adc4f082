"""The report: one self-contained page whose numbers are those of the run folders."""

import csv
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from matplotlib.figure import Figure as MatplotlibFigure
from rich.console import Console

from arsm.experiments.record import read_run
from arsm.experiments.report import Report
from arsm.experiments.report_toy import toy_sections
from arsm.experiments.sections import COLUMNS, INK, Result, band
from arsm.experiments.toy import Toy

ESTIMATORS = ("exact", "arsm")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    toy = Toy(categories=(4,), updates=20, trace_every=5, variance_samples=5, seeds=3, estimators=ESTIMATORS, root=root)
    toy.run(Console(quiet=True))
    return root


class Page(HTMLParser):
    """What a page refers to, and how often each tag occurs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "srcset")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_needs_no_network(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    Report(root=runs, out=out).run(Console(quiet=True))
    source = out.read_text()
    page = Page(source)
    assert page.open == []
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert not re.search(r"@import|url\((?!#)", source)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 4 + 2 * len(ESTIMATORS)
    assert INK not in source
    assert "currentColor" in source
    assert "true gradient" in page.text
    for words in ESTIMATORS:
        assert f"C4-step1-{words}" in page.text
    assert "prefers-color-scheme: dark" in source


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
    Report(root=runs, out=tmp_path / "page.html", export=tmp_path / "results").run(Console(quiet=True))
    folder = tmp_path / "results" / "toy"
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    final = {
        words: [line["reward"] for line in read_run(runs / "toy" / f"C4-step1-{words}").metrics if line["step"] == 20]
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
    assert float(found["Toy, C = 4, step 1: arsm", "gap / true gap"]["mean"]) == pytest.approx(gap, rel=1e-4)
    one = found["Toy, C = 4, step 1: arsm", "variance / arsm's at the start"]
    assert float(one["mean"]) == pytest.approx(1)
    for part in ("traces", "gradient", "probability"):
        assert (folder / f"C4-step1-{part}.png").read_bytes().startswith(b"\x89PNG")


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


def test_different_problems_are_different_sections(runs: Path, tmp_path: Path) -> None:
    Toy(categories=(3, 5), updates=2, variance_samples=2, estimators=("ar", "arsm"), root=tmp_path).run(
        Console(quiet=True)
    )
    records = [read_run(folder) for folder in sorted((tmp_path / "toy").iterdir())]
    sections = toy_sections(records)
    assert [section.title for section in sections] == ["Toy, C = 3, step 1", "Toy, C = 5, step 1"]
    assert [len(section.records) for section in sections] == [2, 2]


def test_a_band_is_the_mean_and_the_10th_to_90th_percentile() -> None:
    seeds = np.random.default_rng(0).exponential(size=(20, 4))
    axes = MatplotlibFigure().add_subplot()
    band(axes, [0, 1, 2, 3], seeds.tolist(), "#000000")
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata()), seeds.mean(0))
    corners = np.asarray(axes.collections[0].get_paths()[0].vertices)
    low, high = np.percentile(seeds, (10, 90), axis=0)
    for step in range(4):
        heights = corners[corners[:, 0] == step, 1]
        assert heights.min() == pytest.approx(low[step])
        assert heights.max() == pytest.approx(high[step])


def test_a_log_axis_leaves_out_zero() -> None:
    axes = MatplotlibFigure().add_subplot()
    band(axes, [0, 1, 2], [[1.0, 0.0, 4.0], [3.0, 0.0, 0.0]], "#000000", log=True)
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0, 2]
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [2.0, 2.0]


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
def test_numbers_are_as_long_as_their_spread_allows(runs: Path, values: list[float], text: str) -> None:
    assert Result("row", "metric", values, read_run(runs / "toy" / "C4-step1-arsm")).text == text
