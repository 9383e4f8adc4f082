"""The report's page in a real browser: it is complete, it asks the network for nothing, and its
curves answer.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console

from arsm_experiments.compare import Compare
from arsm_experiments.report.command import Report
from arsm_experiments.runs.reader import Record, read_run
from arsm_experiments.toy import Toy
from tests.experiments.browser import Browser

UPDATES = 20
TRACES = "#toy-c-30-step-1 details.figure"
"""The first figure of the toy: expected reward, variance, entropy and pseudo actions."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    quiet = Console(quiet=True)
    Toy(
        updates=UPDATES,
        trace_every=5,
        variance_samples=5,
        seeds=3,
        estimators=("exact", "ars", "arsm"),
        root=root,
    ).run(quiet)
    kinds = ("reinforce", "arsm", "gumbel-softmax:temperature=0.5")
    Compare(problems=("toy-30",), estimators=kinds, samples=20, training=0, root=root).run(quiet)
    Report(root=root).run(quiet)
    return root


@pytest.fixture
def page(browser: Browser, runs: Path) -> Browser:
    """The page as a window of 1,300 pixels shows it, its first figure drawn."""
    browser.show(width=1300)
    browser.open(runs / "report.html")
    browser.evaluate("document.querySelector('details.section').open = true")
    browser.wait_for(f"document.querySelector('{TRACES} .plot').data !== undefined")
    return browser


def record(runs: Path, words: str) -> Record:
    return read_run(runs / "toy" / f"C30-step1-{words}")


def plot(what: str) -> str:
    """Something of the toy's first figure, in JavaScript."""
    return f"document.querySelector('{TRACES} .plot').{what}"


def shown(page: Browser, panel: int) -> list[str]:
    """The curves that a panel shows, by name."""
    own = f"t.xaxis === 'x{panel if panel > 1 else ''}' && (t.visible ?? true) === true"
    curve = "t.mode === 'lines' && t.x.length > 1 && !t.fill && t.line.dash !== 'dot'"
    return page.evaluate(plot(f"data.filter((t) => {own} && {curve}).map((t) => t.name)"))


def click_legend(page: Browser, name: str, times: int = 1) -> None:
    """Click on the figure's entry of this name."""
    entries = plot("querySelectorAll('.legend .traces')")
    page.evaluate(f"""[...{entries}].forEach((entry) => {{
      if (entry.textContent === {name!r}) entry.querySelector('.legendtoggle').id = 'chosen';
      else entry.querySelector('.legendtoggle').removeAttribute('id');
    }})""")
    page.click("#chosen", times)


def drawn_paths(page: Browser) -> int:
    return page.evaluate(plot("querySelectorAll('.scatterlayer .trace .lines path').length"))


def test_all_of_the_page_is_drawn_without_a_request_or_a_complaint(
    page: Browser, runs: Path
) -> None:
    page.evaluate(
        "document.querySelectorAll('details').forEach((element) => { element.open = true; })"
    )
    for place in range(page.evaluate("document.querySelectorAll('.plot').length")):
        one = f"document.querySelectorAll('.plot')[{place}]"
        page.evaluate(f"{one}.scrollIntoView({{behavior: 'instant'}})")
        page.wait_for(f"{one}.querySelector('.scatterlayer .trace') !== null")
    requests = [
        e["params"]["request"]["url"]
        for e in page.events
        if e["method"] == "Network.requestWillBeSent"
    ]
    assert requests == [(runs / "report.html").resolve().as_uri()]
    said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in page.events if event["method"] in said] == []


def test_the_table_holds_the_numbers_of_the_run_folders(page: Browser, runs: Path) -> None:
    lines = "[...document.querySelectorAll('#toy-c-30-step-1 .wide tr')]"
    table: list[list[str]] = page.evaluate(
        f"{lines}.map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    header, *rows = table
    assert [row[0] for row in rows] == ["true gradient", "ARS", "ARSM"]
    for words, row in zip(("exact", "ars", "arsm"), rows, strict=True):
        cells = dict(zip(header, row, strict=True))
        final = [line for line in record(runs, words).metrics if line["step"] == UPDATES]
        assert float(cells["expected reward"].split()[0]) == pytest.approx(
            fmean(line["reward"] for line in final), rel=1e-3
        )
        calls = fmean(line["evaluations"] for line in final) / UPDATES
        assert float(cells["calls of f per update"].split()[0]) == pytest.approx(calls, rel=0.1)
    assert "10 to 10,000" in page.evaluate("document.querySelector('.headline').innerText")


def wait_until_shown(page: Browser, panel: int, names: list[str]) -> None:
    end = time.monotonic() + 20
    while shown(page, panel) != names:
        assert time.monotonic() < end, shown(page, panel)
        time.sleep(0.05)


def test_a_click_in_the_legend_hides_a_curve_in_every_panel(page: Browser) -> None:
    assert shown(page, 1) == ["true gradient", "ARS", "ARSM"]
    before = drawn_paths(page)
    click_legend(page, "ARS")
    for panel in (1, 3, 4):
        wait_until_shown(page, panel, ["true gradient", "ARSM"])
    assert drawn_paths(page) < before
    click_legend(page, "ARS")
    wait_until_shown(page, 1, ["true gradient", "ARS", "ARSM"])
    page.wait_for(plot(f"querySelectorAll('.scatterlayer .trace .lines path').length === {before}"))


def test_a_double_click_in_the_legend_leaves_one_curve(page: Browser) -> None:
    click_legend(page, "ARSM", times=2)
    wait_until_shown(page, 1, ["ARSM"])
    click_legend(page, "ARSM", times=2)
    wait_until_shown(page, 1, ["true gradient", "ARS", "ARSM"])


@pytest.mark.parametrize(
    ("axis", "key"), [("evaluation of f", "evaluations"), ("second", "seconds")]
)
def test_the_axis_can_be_switched(page: Browser, runs: Path, axis: str, key: str) -> None:
    def arsm(what: str) -> list[float]:
        return page.evaluate(
            plot(f"data.find((t) => t.name === 'ARSM' && t.x.length > 1 && !t.fill).{what}")
        )

    heights = arsm("y")
    assert page.evaluate(plot("layout.xaxis.title.text")) == "update"
    assert arsm("x") == list(range(0, UPDATES + 1, 5))
    click_legend(page, "ARS")
    wait_until_shown(page, 1, ["true gradient", "ARSM"])
    buttons = plot("querySelectorAll('.updatemenu-button')")
    page.evaluate(f"[...{buttons}].find((button) => button.textContent === {axis!r}).id = 'axis'")
    page.click("#axis")
    for panel in ("", 2, 3, 4):
        page.wait_for(plot(f"layout.xaxis{panel}.title.text === {axis!r}"))
    means = [fmean(seeds) for seeds in zip(*record(runs, "arsm").series(key)[1], strict=True)]
    assert arsm("x") == pytest.approx(means, rel=1e-4)
    assert arsm("y") == heights
    assert shown(page, 1) == ["true gradient", "ARSM"], "what was hidden stays hidden"


def test_a_curve_says_its_numbers_under_the_mouse_and_can_be_zoomed(page: Browser) -> None:
    page.evaluate(plot("scrollIntoView({block: 'start', behavior: 'instant'})"))
    places = page.evaluate(
        f"""(() => {{
          const plot = document.querySelector('{TRACES} .plot'), box = plot.getBoundingClientRect();
          const {{ xaxis, yaxis }} = plot._fullLayout;
          const arsm = plot.data.find((t) => t.name === 'ARSM' && t.x.length > 1 && !t.fill);
          const x = (i) => box.x + xaxis._offset + xaxis.d2p(arsm.x[i]);
          const top = box.y + yaxis._offset;
          const point = [x(2), top + yaxis.d2p(arsm.y[2])], middle = top + yaxis._length / 2;
          return {{ point, middle, left: x(1), right: x(3) }};
        }})()"""
    )
    page.mouse("mouseMoved", *places["point"])
    page.wait_for(plot("querySelector('.hoverlayer text') !== null"))
    label = page.evaluate(plot("querySelector('.hoverlayer').textContent"))
    assert "update 10" in label
    assert any(name in label for name in ("ARSM", "true gradient"))
    page.mouse("mousePressed", places["left"], places["middle"])
    page.mouse("mouseMoved", places["right"], places["middle"])
    page.mouse("mouseReleased", places["right"], places["middle"])
    low, high = page.evaluate(plot("layout.xaxis.range"))
    assert (low, high) == pytest.approx((5, 15), abs=0.5)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "touch"), [(1300, False), (768, True), (375, True)])
def test_the_page_fits_the_window_and_its_mode(
    page: Browser, width: int, touch: bool, dark: bool
) -> None:
    page.show(width=width, height=812, dark=dark, touch=touch)
    page.evaluate(
        "document.querySelectorAll('details').forEach((element) => { element.open = true; })"
    )
    page.wait_for(f"innerWidth === {width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width
    if width == 375:
        assert page.evaluate(
            "[...document.querySelectorAll('.wide')].some((e) => e.scrollWidth > e.clientWidth)"
        )
    page.wait_for(
        plot(
            f"data !== undefined && document.querySelector('{TRACES} .plot').clientWidth < {width}"
        )
    )
    colour = (
        "getComputedStyle(document.querySelector('.plot .xtick "
        "text')).fill.match(/\\d+/g).map(Number)"
    )
    assert (fmean(page.evaluate(colour)) > 0.5 * 255) == dark
    columns: int = page.evaluate(plot("layout.xaxis2.domain[0] > 0.3 ? 2 : 1"))
    assert columns == (1 if width <= 768 else 2)
    background: list[int] = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (fmean(background) < 0.3 * 255) == dark


TOO_WIDE = (
    "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > e.clientWidth).length"
)


def test_tables_fit_a_laptop(page: Browser) -> None:
    page.show(width=1280)
    page.wait_for("innerWidth === 1280")
    assert page.evaluate(TOO_WIDE) == 0


@pytest.mark.slow
def test_tables_of_the_published_runs_fit_a_laptop(browser: Browser, tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "results" / "runs"
    Report(root=root, out=tmp_path / "report.html").run(Console(quiet=True))
    browser.show(width=1280)
    browser.open(tmp_path / "report.html")
    browser.evaluate(
        "document.querySelectorAll('.section').forEach((element) => { element.open = true; })"
    )
    assert browser.evaluate("document.querySelectorAll('.wide').length") > 20
    assert browser.evaluate(TOO_WIDE) == 0


OPEN = "[...document.querySelectorAll('details.section')].map((section) => section.open)"


def test_sections_are_folded_until_somebody_asks(browser: Browser, runs: Path) -> None:
    browser.show(width=1280)
    browser.open(runs / "report.html")
    assert browser.evaluate(OPEN) == [False, False]
    height: int = browser.evaluate("document.documentElement.scrollHeight")
    # the menu's link opens where it leads, and nothing else
    browser.evaluate("location.hash = '#toy-c-30-step-1'")
    browser.wait_for(f"JSON.stringify({OPEN}) === '[true,false]'")
    button = "document.querySelector('button.fold')"
    assert browser.evaluate(f"{button}.textContent") == "Unfold all"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(OPEN) == [True, True]
    assert browser.evaluate("document.documentElement.scrollHeight") > height + 1000
    assert browser.evaluate(f"{button}.textContent") == "Fold all"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(OPEN) == [False, False]


@pytest.mark.parametrize("width", [375, 1280, 1600])
def test_the_menu_stays_in_the_window(page: Browser, width: int) -> None:
    page.show(width=width)
    page.wait_for(f"innerWidth === {width}")
    page.evaluate("scrollTo({top: 900, behavior: 'instant'})")
    top, right = page.evaluate(
        "(({top, right}) => [top, right])(document.querySelector('nav').getBoundingClientRect())"
    )
    assert top == 0
    assert right <= width


def test_paper_gets_every_figure_in_black(browser: Browser, runs: Path) -> None:
    page = browser
    page.show(width=1300, dark=True)
    page.open(runs / "report.html")
    page.evaluate(
        """addEventListener("beforeprint", () => {
          const plots = [...document.querySelectorAll(".plot")];
          const open = (plot) => plot.closest(".figure").open && plot.closest(".section").open;
          window.printed = plots.map((plot) => plot.data !== undefined && open(plot));
        })"""
    )
    assert page.call("Page.printToPDF")["data"]
    printed: list[bool] = page.evaluate("window.printed")
    assert len(printed) > 2
    assert all(printed)
    # what was folded is folded again
    page.wait_for(f"JSON.stringify({OPEN}) === '[false,false]'")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.plot .legendtext')).fill")
        == "rgb(0, 0, 0)"
    )
    page.call("Emulation.setEmulatedMedia", media="", features=[])
