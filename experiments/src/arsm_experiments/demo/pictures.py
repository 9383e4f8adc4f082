"""The demo's pictures as markup: a sheet of digits, and an animated cart with its pole."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

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


def cart_pole(path: Sequence[tuple[float, float]], words: str) -> Markup:
    """Animate the cart's position (-2.4 to 2.4) and the pole's angle (radians) without a script."""
    held = [*path, *[path[-1]] * PAUSE]
    seconds = len(held) / SECOND
    places = ";".join(f"{100 * x:.1f} 0" for x, _ in held)
    angles = ";".join(f"{57.2958 * angle:.1f}" for _, angle in held)
    repeat = f'dur="{seconds:.2f}s" repeatCount="indefinite"'
    return Markup(
        f'<svg class="cart" viewBox="-250 -130 500 170" role="img" aria-label="{escape(words)}">'
        '<line class="track" x1="-240" y1="20" x2="240" y2="20"/>'
        f'<g><animateTransform attributeName="transform" type="translate" values="{places}" {repeat}/>'
        '<rect class="body" x="-28" y="-8" width="56" height="26" rx="4"/>'
        f'<g><line class="pole" x1="0" y1="-8" x2="0" y2="-112"/>'
        f'<animateTransform attributeName="transform" type="rotate" values="{angles}" {repeat}/></g></g></svg>'
    )
