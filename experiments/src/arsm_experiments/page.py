"""The report as one HTML page that holds all it needs: text, tables, curves, pictures, and the script that draws."""

from __future__ import annotations

import base64
import math
import mimetypes
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from arsm_experiments.figures import Figure, Panel, Series
from arsm_experiments.record import Record
from arsm_experiments.sections import Picture, Section, pivot

POINTS = 200
"""A curve has at most so many points on the page."""
DIGITS = 5


@dataclass(frozen=True)
class Chapter:
    """One experiment's part of the page."""

    title: str
    sections: Sequence[Section]


def render(chapters: Sequence[Chapter]) -> str:
    """The whole report as HTML."""
    environment = Environment(
        loader=PackageLoader("arsm_experiments"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters.update(anchor=anchor, data=figure_data, uri=data_uri, seeds=seeds)
    environment.globals.update(pivot=pivot)
    return environment.get_template("report.html").render(chapters=chapters, plotly=Markup(get_plotlyjs()))


def anchor(title: str) -> str:
    """A title as a link's target."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def seeds(record: Record) -> str:
    """A run's seeds, as they are in its metrics."""
    found = sorted({line["seed"] for line in record.metrics if "seed" in line})
    if not found:
        return str(record.config.get("seed", ""))
    consecutive = len(found) > 2 and found == list(range(found[0], found[-1] + 1))
    return f"{found[0]} to {found[-1]}" if consecutive else ", ".join(map(str, found))


def data_uri(picture: Picture) -> str:
    """An image file as a link that holds it."""
    kind = mimetypes.guess_type(picture.path)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(picture.path.read_bytes()).decode()}"


def figure_data(figure: Figure) -> dict[str, Any]:
    """What the page's script draws a figure from."""
    return {"axes": figure.axes, "panels": [_panel_data(panel) for panel in figure.panels]}


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "views": {axis: [_series_data(s.thinned(POINTS)) for s in view] for axis, view in panel.views.items()},
        "fromZero": {axis: panel.from_zero(axis) for axis in panel.views},
        "log": panel.log,
        "floor": panel.floor,
        "levels": [asdict(level) for level in panel.levels],
        "names": panel.names,
    }


def _series_data(series: Series) -> dict[str, Any]:
    values = {key: [_rounded(v) for v in getattr(series, key)] for key in ("x", "y", "low", "high")}
    return {"name": series.name, "colour": series.colour, "mark": series.mark, **values}


def _rounded(value: float) -> float | int | None:
    """As many digits as can be seen; nothing for what is no number."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short
