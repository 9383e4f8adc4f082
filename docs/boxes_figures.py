"""Two pictures made of boxes: which estimator to take, and what branching does.

    python docs/boxes_figures.py

writes docs/assets/choosing-*.svg and docs/assets/branching-*.svg, each for light and dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

LINE = 19
"""Height of a line of text."""


@dataclass(frozen=True)
class Scheme:
    """Colours for light or dark pages."""

    ink: str
    quiet: str
    question: str
    answer: str
    more: str
    less: str


SCHEMES = {
    "light": Scheme("#24292f", "#6b7280", "#eef2f7", "#dcebf7", "#4a90d9", "#e0562b"),
    "dark": Scheme("#e4e7eb", "#9aa2ad", "#262c34", "#24465f", "#4a90d9", "#e0562b"),
}


@dataclass
class Canvas:
    """SVG elements in the order in which they are drawn."""

    scheme: Scheme
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, lines: Sequence[str], fill: str, bold: bool = False
    ) -> float:
        """A box with lines of text in its middle; returns its height."""
        height = LINE * len(lines) + 16
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="7" fill="{fill}"/>'
        )
        for place, line in enumerate(lines):
            self.text(x + width / 2, y + 8 + LINE * (place + 0.72), line, bold=bold)
        return height

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = 14,
        bold: bool = False, colour: str | None = None,
    ) -> None:  # fmt: skip
        """One line of text."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight} '
            f'fill="{colour or self.scheme.ink}">{escape(words)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, words: str = "") -> None:
        """A line with a head, and a word beside its beginning."""
        self.parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{self.scheme.quiet}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )
        if words and y == to_y:
            self.text((x + to_x) / 2 - 3, y - 5, words, size=13, colour=self.scheme.quiet)
        elif words:
            self.text(
                x + 8, (y + to_y) / 2 + 3, words, anchor="start", size=13, colour=self.scheme.quiet
            )

    def svg(self, width: int, height: int, title: str) -> str:
        """The whole picture."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif">'
            f"<title>{escape(title)}</title>"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" '
            f'fill="{self.scheme.quiet}"/></marker></defs>' + "".join(self.parts) + "</svg>\n"
        )


# ---------------------------------------------------------------- which estimator

QUESTIONS: tuple[tuple[Sequence[str], str, Sequence[str], str], ...] = (
    (
        ("Are there choices one after the other,", "with a reward at the end?"),
        "yes",
        ("sequences.Branch()", "an answer, token by token; an episode: arsm.rl"),
        "no",
    ),
    (
        ("Is f a log-likelihood that will be judged", "with many samples?"),
        "yes",
        ("VIMCO(n)", "trains the bound with n samples"),
        "no",
    ),
    (
        ("Is f smooth in z,", "and does a bias do no harm?"),
        "yes",
        ("ReinMax(), GumbelSoftmax()", "one evaluation and its slope"),
        "no: unbiased",
    ),
    (
        ("Are there several variables?",),
        "yes",
        (
            "RLOO(n), with ridge=1.0 from ten samples on",
            "nearly uniform and cheap: LocalExpectation()",
        ),
        "no: one",
    ),
    (
        ("Are evaluations cheap?",),
        "yes",
        ("ARSM(), ARSMPlus()", "no number of samples to choose; C up to a million"),
        "no",
    ),
)
LAST = ("RLOO(n), UnorderedSet(k)", "two to ten evaluations")


def choosing(scheme: Scheme) -> str:
    """Questions from top to bottom; each has its estimator beside it."""
    canvas = Canvas(scheme)
    left, width, right, wide = 10, 310, 400, 390
    y = 10.0
    for question, yes, (name, why), no in QUESTIONS:
        height = canvas.box(left, y, width, question, scheme.question)
        answer = LINE * 2 + 16
        middle = y + height / 2
        canvas.arrow(left + width, middle, right - 4, middle, yes)
        _answer(canvas, right, middle - answer / 2, wide, name, why)
        canvas.arrow(left + width / 2, y + height, left + width / 2, y + height + 36, no)
        y += height + 40
    _answer(canvas, left, y, width, *LAST)
    return canvas.svg(800, int(y + LINE * 2 + 30), "Which estimator? Five questions.")


def _answer(canvas: Canvas, x: float, y: float, width: float, name: str, why: str) -> None:
    canvas.box(x, y, width, ["", ""], canvas.scheme.answer)
    canvas.text(x + width / 2, y + 8 + LINE * 0.72, name, bold=True)
    canvas.text(x + width / 2, y + 8 + LINE * 1.72, why, size=13)


# ---------------------------------------------------------------- branching

TRUE = ("12", "+", "30", "=", "41")
CREDIT = (0.0, 0.0, 0.0, 0.0, -0.5)
OTHERS = ((2, ("20", "=", "32"), "wrong"), (4, ("42",), "right"))
"""Branches: where they leave, what they write, and how they end."""


def branching(scheme: Scheme) -> str:
    """One answer and two branches of it; the credit goes to the token that decides."""
    canvas = Canvas(scheme)
    start, step, cell, row = 138, 62, 52, 56
    canvas.text(10, 38, "the answer", anchor="start")
    for place, (token, credit) in enumerate(zip(TRUE, CREDIT, strict=True)):
        fill = scheme.less if credit < 0 else scheme.question
        canvas.box(start + step * place, 16, cell, [token], fill, bold=True)
    end = start + step * len(TRUE)
    canvas.text(end + 6, 38, "wrong", anchor="start", bold=True)
    for line, (place, tokens, verdict) in enumerate(OTHERS, 1):
        y = 16 + row * line
        canvas.text(10, y + 22, f"token {place + 1} replaced", anchor="start")
        x = start + step * place
        canvas.arrow(x - 6, 34, x - 6 + 4, y + 14)
        for offset, token in enumerate(tokens):
            fill = scheme.more if verdict == "right" and offset == 0 else scheme.question
            canvas.box(x + step * offset, y, cell, [token], fill, bold=offset == 0)
        canvas.text(end + 6, y + 22, verdict, anchor="start", bold=True)
    width = end + 60
    return canvas.svg(width, 16 + row * 3, "Branching: one token replaced, then played on.")


FIGURES: dict[str, Callable[[Scheme], str]] = {"choosing": choosing, "branching": branching}


def draw(folder: Path) -> None:
    """Write all figures."""
    for name, make in FIGURES.items():
        for scheme, colours in SCHEMES.items():
            (folder / f"{name}-{scheme}.svg").write_text(make(colours))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "assets")
