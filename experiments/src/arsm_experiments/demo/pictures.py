"""The demo's pictures as markup: a sheet of digits, answers with their credit, and an animated cart
with its pole.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from PIL import Image
from torch import Tensor

from arsm_experiments.training.pictures import save_sheet

SECOND = 50
"""Steps of CartPole."""
PAUSE = 40
"""Number of steps that the last position is held."""


def sheet(images: Tensor, words: str) -> Markup:
    """Images [rows, columns, 784] in 0..1 as one picture."""
    file = io.BytesIO()
    save_sheet(images, file)
    return _image(file.getvalue(), words)


def _image(content: bytes, words: str) -> Markup:
    data = base64.b64encode(content).decode()
    width, height = Image.open(io.BytesIO(content)).size
    return Markup('<img src="data:image/png;base64,{}" alt="{}" width="{}" height="{}">').format(
        data, words, 2 * width, 2 * height
    )


@dataclass(frozen=True)
class Answer:
    """One row of the picture of answers."""

    words: str
    """What it is."""
    tokens: Sequence[str]
    verdict: str = ""
    credit: Sequence[float | None] | None = None
    """The credit of each token; None for a token that is only repeated or has none."""
    replaced: int | None = None
    """Where a branch left; what comes before it is shown faintly."""


def answers(rows: Sequence[Answer]) -> Markup:
    """Answers below each other, every token coloured by its credit: blue for more of it, red for
    less.
    """
    credits = [abs(c) for row in rows for c in row.credit or () if c is not None]
    largest = max(credits, default=0.0) or 1.0
    lines = [
        Markup('<tr><th scope="row">{} <b>{}</b></th>{}</tr>').format(
            row.words,
            row.verdict,
            Markup("").join(_token(row, place, largest) for place in range(len(row.tokens))),
        )
        for row in rows
    ]
    return Markup('<div class="wide answers"><table>{}</table></div>').format(
        Markup("").join(lines)
    )


def _token(row: Answer, place: int, largest: float) -> Markup:
    credit = None if row.credit is None else row.credit[place]
    kind, strength, below = "", 0.0, ""
    if row.replaced is not None and place < row.replaced:
        kind = "kept"
    elif place == row.replaced:
        kind = "replaced"
    if credit is not None:
        strength = abs(credit) / largest
        below = f"{credit:+.2f}" if round(credit, 2) else "0"
    colour = "var(--more)" if (credit or 0) > 0 else "var(--less)"
    shade = f"color-mix(in srgb, {colour} {100 * strength:.0f}%, transparent)"
    return Markup(
        '<td class="{}"><span style="background: {}">{}</span><small>{}</small></td>'
    ).format(kind, shade, row.tokens[place], below)


def cart_pole(path: Sequence[tuple[float, float]], words: str) -> Markup:
    """Animate the cart's position (-2.4 to 2.4) and the pole's angle (radians) without a script."""
    held = [*path, *[path[-1]] * PAUSE]
    seconds = len(held) / SECOND
    places = ";".join(f"{100 * x:.1f} 0" for x, _ in held)
    angles = ";".join(f"{57.2958 * angle:.1f}" for _, angle in held)
    repeat = f'dur="{seconds:.2f}s" repeatCount="indefinite"'
    return Markup(
        '<svg class="cart" viewBox="-250 -130 500 170" role="img" '
        f'aria-label="{escape(words)}"><line class="track" x1="-240" y1="20" x2="240" '
        'y2="20"/><g><animateTransform attributeName="transform" type="translate" '
        f'values="{places}" {repeat}/><rect class="body" x="-28" y="-8" width="56" height="26" '
        'rx="4"/><g><line class="pole" x1="0" y1="-8" x2="0" y2="-112"/><animateTransform '
        f'attributeName="transform" type="rotate" values="{angles}" {repeat}/></g></g></svg>'
    )
