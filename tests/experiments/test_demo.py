"""The demo's page in a real browser: its parts ran, its sentences are true, and it fits every
window.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest
import torch
from rich.console import Console

import arsm
from arsm import sequences
from arsm_experiments.demo.command import Demo
from arsm_experiments.demo.part import Part
from arsm_experiments.demo.parts import PARTS, mended, surrogate
from arsm_experiments.demo.sequence import DIGITS, END, one_answer, questions, right
from tests.experiments.browser import Browser

SCALE = 0.01


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "page" / "demo.html"
    Demo(out=out, scale=SCALE).run(Console(quiet=True))
    return out


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "touch"), [(1280, False), (390, True)])
def test_the_page_opens_in_a_browser(
    browser: Browser, out: Path, width: int, touch: bool, dark: bool
) -> None:
    browser.show(width=width, height=812, dark=dark, touch=touch)
    browser.open(out)
    assert browser.evaluate("document.querySelectorAll('main section').length") == len(PARTS)
    for place in range(browser.evaluate("document.querySelectorAll('.plot').length")):
        one = f"document.querySelectorAll('.plot')[{place}]"
        browser.evaluate(f"{one}.scrollIntoView({{behavior: 'instant'}})")
        browser.wait_for(f"{one}.querySelector('.scatterlayer .trace') !== null")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    hidden = (
        "[...document.querySelectorAll('.ytick text')].filter((text) => "
        "getComputedStyle(text).display === 'none')"
    )
    assert browser.evaluate(f"{hidden}.map((text) => text.textContent)") == []
    background: list[int] = browser.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (fmean(background) < 0.3 * 255) == dark
    requests = [
        e["params"]["request"]["url"]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith("data:")] == [out.resolve().as_uri()]
    said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in browser.events if event["method"] in said] == []


def test_the_pole_moves(browser: Browser, out: Path) -> None:
    browser.show(width=1280)
    browser.open(out)
    turned = "document.querySelector('.cart g g').transform.animVal[0].angle"
    browser.evaluate(
        "document.querySelectorAll('.cart').forEach((cart) => { cart.pauseAnimations(); })"
    )
    angles = set()
    for second in (0.02, 0.06, 0.1, 0.14):
        browser.evaluate(f"document.querySelector('.cart').setCurrentTime({second})")
        angles.add(round(browser.evaluate(turned), 2))
    assert len(angles) == 4


def test_the_page_prints(browser: Browser, out: Path) -> None:
    browser.show(width=1280, dark=True)
    browser.open(out)
    assert browser.call("Page.printToPDF")["data"]


def test_options_that_cannot_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="positive"):
        Demo(scale=0).check()
    with pytest.raises(ValueError, match="is a folder"):
        Demo(out=tmp_path).check()


def test_the_questions_have_answers() -> None:
    prompts, answers = questions(50, torch.Generator().manual_seed(0))
    assert right(prompts, answers).all()
    assert not right(prompts, answers.roll(1, -1)).any()


def test_the_picture_of_an_answer_shows_a_branch_that_mends_it() -> None:
    """An untrained model answers at random; branches can still end right, for one question in
    hundreds, so the model is one that is nearly right.
    """

    class NearlyRight(torch.nn.Module):
        """Sorts, but doubts its third token."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            digits = tokens[:, :DIGITS]
            end = torch.full((len(tokens), 1), END)
            follows = torch.cat([digits, digits.sort(-1).values, end], -1)[:, : tokens.shape[1]]
            logits = 12.0 * torch.nn.functional.one_hot(follows, 12).double()
            logits[:, DIGITS + 2 : DIGITS + 3, :10] *= 0.1
            return logits

    picture, caption = one_answer(sequences.Recompute(NearlyRight()))
    rows = str(picture).split("<tr>")
    assert [row.count("<td") for row in rows] == [0, DIGITS, DIGITS + 1, DIGITS + 1]
    assert "<b>wrong</b>" in rows[2]
    assert "<b>right</b>" in rows[3]
    assert rows[3].count('class="replaced"') == 1
    # blame where the branch left, praise for what it chose instead
    assert re.findall(r"<small>(-\d.\d\d)</small>", rows[2])
    assert re.findall(r"<small>(\+\d.\d\d)</small>", rows[3])
    assert "nearly chosen" in caption


def test_the_referee_catches_one_and_passes_the_other() -> None:
    part = PARTS["the referee"](SCALE, lambda share: None)
    assert re.search(r"baseline: wrong\. With the factor 4/3: unbiased\.", part.found)
    assert "(n - 1)/n with n = 4" in part.printed


def test_the_surrogates_differ_by_their_factor() -> None:
    logits = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(0))
    values = torch.tensor([1.0, 2.0, 5.0])
    first, second = (
        torch.random.manual_seed(0) and loss(logits, lambda z: values[z[..., 0]])
        for loss in (surrogate, mended)
    )
    torch.testing.assert_close(first * 4 / 3, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["one choice", "one latent code", "one sequence task", "one agent"]
)
def test_what_the_demo_shows_at_full_length(name: str) -> None:
    part: Part = PARTS[name](1.0, lambda share: None)
    numbers = [
        float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", part.found)
    ]
    if name == "one choice":
        assert part.found.index("ARSM ends with the best category on top in 10 of 10 runs")
    if name == "one latent code":
        before, after = numbers[-2:]
        assert after < 0.35 * before
    if name == "one sequence task":
        first, _, token, answer = numbers[1:5]
        assert min(token, answer) > first + 10
    if name == "one agent":
        after, before = numbers[-2:]
        assert after > 3 * before
    assert arsm.__version__
