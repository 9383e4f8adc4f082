"""A figure for Plotly on the page, which provides legend, zoom, buttons and hover text.

The page's style sheet sets the colours of text and grid for light and dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from arsm_experiments.report.figures import (
    ENTRY,
    NEUTRAL,
    TITLE,
    Figure,
    Level,
    Panel,
    Series,
    grid,
    lines,
)

POINTS = 120
"""Maximum points per curve."""
DIGITS = 5
FONT = 11
CLOSE = 0.03
"""Levels that are closer than this fraction of their height have their labels on opposite sides."""
LETTER, LINE, SAMPLE = 6.0, 17, 45
"""In pixels: width of a character, height of a line, width of a legend entry without its text."""
BUTTONS, TITLE_HEIGHT, AXIS = 36, 22, 44
"""In pixels: height of the buttons, of a title line, and of the space below an axis."""
PANEL, NAME = 210, 19
"""In pixels: height of a panel, or per name on a categorical axis."""


class Width(NamedTuple):
    """A window's width."""

    pixels: int
    """Approximate width of a figure."""
    columns: int
    """Maximum number of columns."""


WIDE, NARROW = Width(940, 3), Width(330, 1)


def interactive(figure: Figure) -> dict[str, Any]:
    """Data for the page's script: traces, buttons, and one layout for wide and one for narrow
    windows.
    """
    figure = figure.in_words()
    traces = [
        trace for place, panel in enumerate(figure.panels) for trace in _panel_traces(panel, place)
    ]
    traces = _with_legend(traces, figure)
    buttons = _buttons(figure) if len(figure.axes) > 1 else []
    return {
        "data": traces,
        "buttons": buttons,
        "wide": _layout(figure, WIDE),
        "narrow": _layout(figure, NARROW),
    }


def _panel_traces(panel: Panel, place: int, axis: str = "") -> list[dict[str, Any]]:
    """A panel's curves against an axis (the first if the panel does not have it), each preceded by
    its band.
    """
    axis = axis if axis in panel.views else next(iter(panel.views))
    series = [each.thinned(POINTS) for each in panel.drawn(axis)]
    on = {"xaxis": f"x{number(place)}", "yaxis": f"y{number(place)}"}
    traces = [trace for each in series for trace in _series_traces(each, panel, axis)]
    places = [x for each in series for x in each.x]
    ends = [min(places), max(places)] if places else []
    heights = [level.y for level in panel.levels]
    curves = [each.y[-1] for each in series if each.line and len(each.y)]
    curves += [panel.ceiling] if panel.ceiling is not None else []
    for level in panel.levels:
        near = CLOSE * level.y
        level_below = any(0 < level.y - height < near for height in heights)
        others = heights if level_below else heights + curves
        crowded = any(0 < height - level.y < near for height in others)
        traces.append(_level_trace(level, ends, "bottom left" if crowded else "top left"))
    return [trace | on for trace in traces]


def _series_traces(series: Series, panel: Panel, axis: str) -> list[dict[str, Any]]:
    name = "<br>".join(html.escape(line) for line in lines(series.name, ENTRY))
    shared = {"type": "scatter", "name": name, "legendgroup": series.name, "showlegend": False}
    x, y, low, high = (_rounded(values) for values in (series.x, series.y, series.low, series.high))
    made = []
    if any(len(each.low) for each in panel.views[axis]):
        filled = {
            "fill": "toself",
            "fillcolor": series.colour + "26",
            "line": {"width": 0},
            "mode": "lines",
        }
        made.append(
            shared
            | filled
            | {"x": [*x, *x[::-1]] if low else [], "y": [*high, *low[::-1]], "hoverinfo": "skip"}
        )
    if panel.names:
        words = {"text": [html.escape(panel.names[int(place)]) for place in series.y]}
        said = "<b>%{text}</b><br>%{x:.4g}<extra></extra>"
    else:
        words = {"customdata": [list(ends) for ends in zip(low, high, strict=True)]}
        spread = " (%{customdata[0]:.5g} to %{customdata[1]:.5g})" if low else ""
        said = (
            f"<b>{name}</b><br>%{{y:.5g}}{spread}<br>%{{xaxis.title.text}} "
            f"%{{x:,.6~g}}<extra></extra>"
        )
    ring = series.mark == "ring"
    curve = {
        "mode": "+".join(["lines"] * series.line + ["markers"] * series.dots),
        "line": {"color": series.colour, "width": 2},
        "marker": {
            "color": series.colour,
            "size": 13 if ring else 7,
            "symbol": "circle-open" if ring else "circle",
        },
        "hovertemplate": said,
        "cliponaxis": not panel.names,
    }
    return [*made, shared | curve | words | {"x": x, "y": y}]


def _level_trace(level: Level, ends: Sequence[float], position: str) -> dict[str, Any]:
    """A dotted line across the range of the series, with its label at the right end."""
    words = html.escape(", ".join(filter(None, (level.meaning, level.name))))
    return {
        "type": "scatter",
        "mode": "lines+text",
        "text": ["", html.escape(level.label)],
        "textposition": position,
        "textfont": {"color": level.colour, "size": 10},
        "name": words,
        "legendgroup": level.name or level.meaning,
        "showlegend": False,
        "x": list(ends),
        "y": [level.y for _ in ends],
        "line": {"color": level.colour, "width": 1.5, "dash": "dot"},
        "hovertemplate": f"<b>{words}</b> %{{y:.5g}}<extra></extra>",
    }


def _with_legend(traces: list[dict[str, Any]], figure: Figure) -> list[dict[str, Any]]:
    """One entry per name, and one per meaning of dotted lines."""
    on = {"type": "scatter", "x": [None], "y": [None], "mode": "lines", "xaxis": "x", "yaxis": "y"}
    entries = [
        on
        | {
            "name": "<br>".join(html.escape(line) for line in lines(name, ENTRY)),
            "legendgroup": name,
        }
        | {"line": {"color": colour, "width": 3}}
        for name, colour in figure.legend.items()
    ]
    entries += [
        on
        | {
            "name": html.escape(words),
            "legendgroup": words,
            "line": {"color": NEUTRAL, "width": 2, "dash": "dot"},
        }
        for words in figure.meanings
    ]
    return [*entries, *traces]


# ---------------------------------------------------------------- where things stand


def _layout(figure: Figure, width: Width) -> dict[str, Any]:
    """Panels in rows under their titles, below the legend and the buttons that choose the
    horizontal axis.
    """
    columns = min(grid(len(figure.panels))[1], width.columns)
    rows = [figure.panels[i : i + columns] for i in range(0, len(figure.panels), columns)]
    heights = [max(NAME * len(panel.names) or PANEL for panel in row) for row in rows]
    titles = [TITLE_HEIGHT * max(len(lines(panel.title, TITLE)) for panel in row) for row in rows]
    inside = sum(heights) + sum(titles[1:]) + AXIS * (len(rows) - 1)
    layout = _frame(figure, width, inside, titles[0])
    gap = 56 / width.pixels
    share = (1 - gap * (columns - 1)) / columns
    top = 1.0
    for row_number, (row, height, above_row) in enumerate(zip(rows, heights, titles, strict=True)):
        top -= above_row / inside if row_number else 0
        for column, panel in enumerate(row):
            place = number(row_number * columns + column)
            left = column * (share + gap)
            layout[f"xaxis{place}"] = _x_axis(panel, next(iter(panel.views))) | {
                "domain": [left, min(1.0, left + share)],
                "anchor": f"y{place}",
            }
            layout[f"yaxis{place}"] = _y_axis(panel, width) | {
                "domain": [max(0.0, top - height / inside), top],
                "anchor": f"x{place}",
            }
            layout["annotations"].append(_title(panel, place))
        top -= (height + AXIS) / inside
    return layout


def _frame(figure: Figure, width: Width, inside: float, first_title: int) -> dict[str, Any]:
    """Everything around the panels, which are `inside` pixels high from the first title's end."""
    longest = max(len(name) for panel in figure.panels for name in (*panel.names, ""))
    left = (int(LETTER * longest) + 16 if width == WIDE else 16) if longest else 46
    # in Plotly a legend is as wide as the panels
    entrywidth, legend = _legend(figure, width.pixels - left)
    buttons = BUTTONS * (len(figure.axes) > 1)
    above = buttons + legend + first_title
    whole = inside + above + AXIS
    return {
        "autosize": True,
        "margin": {"t": above, "b": AXIS, "l": left, "r": 10, "autoexpand": False},
        "font": {"size": FONT, "family": "inherit"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "annotations": [],
        "legend": {
            "orientation": "h",
            "entrywidth": entrywidth,
            "maxheight": legend + LINE,
            "tracegroupgap": 0,
            "itemclick": "toggle",
            "itemdoubleclick": "toggleothers",
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "yref": "container",
            "yanchor": "top",
            "y": 1 - buttons / whole,
            "bgcolor": "rgba(0,0,0,0)",
        },
        "updatemenus": [_menu(1 + (above - 4) / inside)] if buttons else [],
        "meta": {"height": whole},
    }


def _menu(top: float) -> dict[str, Any]:
    """The row of buttons, which are added later."""
    return {
        "type": "buttons",
        "direction": "right",
        "bgcolor": "rgba(0,0,0,0)",
        "pad": {"l": 0, "t": 0},
        "x": 0,
        "xanchor": "left",
        "y": top,
        "yanchor": "top",
    }


def _title(panel: Panel, place: str) -> dict[str, Any]:
    """A panel's title, above it."""
    text = "<br>".join(html.escape(line) for line in lines(panel.title, TITLE))
    return {
        "text": f"<b>{text}</b>",
        "x": 0,
        "xref": f"x{place} domain",
        "xanchor": "left",
        "align": "left",
        "showarrow": False,
        "y": 1,
        "yref": f"y{place} domain",
        "yanchor": "bottom",
    }


def _legend(figure: Figure, width: int) -> tuple[float, int]:
    """The width of an entry, and the height of all, in pixels."""
    entries = [lines(words, ENTRY) for words in (*figure.legend, *figure.meanings)]
    longest = max((len(line) for entry in entries for line in entry), default=0)
    columns = max(1, min(len(entries), int(width / (SAMPLE + LETTER * longest))))
    tallest = [max(map(len, entries[i : i + columns])) for i in range(0, len(entries), columns)]
    return 0.97 * width / columns - SAMPLE, sum(LINE * count + 3 for count in tallest) + 10


def _x_axis(panel: Panel, axis: str) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": html.escape(axis), "standoff": 6}, "zeroline": False}
    made["rangemode"] = "tozero" if panel.from_zero(axis) else "normal"
    if panel.log != "x":
        made["nticks"] = 7
    return made | _scale(panel, "x", [x for series in panel.drawn(axis) for x in series.x])


def _y_axis(panel: Panel, width: Width) -> dict[str, Any]:
    if panel.names:
        # a name inside lies above its line
        where, room = ("outside", 0.5) if width == WIDE else ("inside top", 1.2)
        names = {
            "tickvals": list(range(len(panel.names))),
            "ticktext": [html.escape(name) for name in panel.names],
        }
        return {
            "range": [len(panel.names) - 0.5, -room],
            "zeroline": False,
            "ticklabelposition": where,
            **names,
        }
    heights = [y for view in panel.views for series in panel.drawn(view) for y in series.y]
    limits = {"minallowed": panel.floor, "maxallowed": panel.ceiling}
    if panel.log == "y":
        limits = {side: limit and math.log10(limit) for side, limit in limits.items()}
    limits = {side: limit for side, limit in limits.items() if limit is not None}
    return {"zeroline": False, "autorangeoptions": limits} | _scale(panel, "y", heights)


def _scale(panel: Panel, which: str, values: Sequence[float]) -> dict[str, Any]:
    """Ticks: only decades on a long log scale; large numbers are written as 20k."""
    if panel.log != which:
        return {
            "exponentformat": "SI" if any(abs(value) >= 10_000 for value in values) else "power"
        }
    values = [
        value for value in values if panel.floor is None or which == "x" or value >= panel.floor
    ]
    decades = math.log10(max(values) / min(values)) if values else 0
    ticks = {"dtick": math.ceil(decades / 6)} if decades > 2 else {}
    return {"type": "log", "exponentformat": "power", **ticks}


def _buttons(figure: Figure) -> list[dict[str, Any]]:
    """One button per horizontal axis; it moves the curves, and hidden curves stay hidden."""
    first = len(figure.legend) + len(figure.meanings)
    buttons = []
    for axis in figure.axes:
        moved: dict[str, list[Any]] = {"x": [], "y": [], "customdata": []}
        places: list[int] = []
        layout: dict[str, Any] = {}
        place = first
        for panel_place, panel in enumerate(figure.panels):
            traces = _panel_traces(panel, panel_place, axis)
            if axis in panel.views:
                places += range(place, place + len(traces))
                for key, values in moved.items():
                    values += [trace.get(key, []) for trace in traces]
                layout[f"xaxis{number(panel_place)}.title.text"] = html.escape(axis)
                layout |= {f"{which}axis{number(panel_place)}.autorange": True for which in "xy"}
            place += len(traces)
        buttons.append(
            {"label": html.escape(axis), "method": "update", "args": [moved, layout, places]}
        )
    return buttons


def number(place: int) -> str:
    """Plotly's suffix for the axes of the panel at this index: none, 2, 3, ..."""
    return str(place + 1) if place else ""


def _rounded(values: Sequence[float]) -> list[float | int]:
    """As many digits as are visible."""
    short = [float(f"{value:.{DIGITS}g}") for value in values]
    return [int(value) if value.is_integer() else value for value in short]
