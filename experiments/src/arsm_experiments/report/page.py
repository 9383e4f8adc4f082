"""The report as one self-contained HTML page: text, tables, curves, pictures, and the script that
draws them.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from arsm_experiments.labels import heading, readable
from arsm_experiments.report.chapters import Chapter
from arsm_experiments.report.interactive import interactive
from arsm_experiments.report.sections import Picture, pivot
from arsm_experiments.runs.reader import Record


def render(chapters: Sequence[Chapter]) -> str:
    """The whole report as HTML."""
    return render_page("report.html", chapters=chapters)


def render_page(template: str, **content: object) -> str:
    """A page with the style and script that the report and the demo share."""
    environment = Environment(
        loader=PackageLoader("arsm_experiments"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters.update(
        anchor=anchor,
        caption=caption,
        heading=heading,
        interactive=interactive,
        readable=readable,
        seeds=seeds,
        uri=data_uri,
    )
    environment.globals.update(pivot=pivot)
    return environment.get_template(template).render(**content, plotly=Markup(get_plotlyjs()))


def anchor(title: str) -> str:
    """A title as an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def caption(words: str) -> str:
    """A picture's caption, "LABEL: WHAT", with a readable label."""
    label, colon, rest = words.partition(": ")
    return readable(label) + colon + rest


def seeds(record: Record) -> str:
    """A run's seeds, from its metrics."""
    found = sorted({line["seed"] for line in record.metrics if "seed" in line})
    if not found:
        return str(record.config.get("seed", ""))
    consecutive = len(found) > 2 and found == list(range(found[0], found[-1] + 1))
    return f"{found[0]} to {found[-1]}" if consecutive else ", ".join(map(str, found))


def data_uri(picture: Picture) -> str:
    """An image file as a data URL."""
    kind = mimetypes.guess_type(picture.file)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(picture.content).decode()}"
