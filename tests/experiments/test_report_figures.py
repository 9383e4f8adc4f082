"""Figures of the report, on the page and as files: the same curves, words and colours."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image

from arsm_experiments.palette import save
from arsm_experiments.report.figures import (
    COLOURS,
    ENTRY,
    TITLE,
    Figure,
    Level,
    Panel,
    Series,
    band,
    palette,
)
from arsm_experiments.report.interactive import interactive, number
from arsm_experiments.report.picture import draw_panel, save_figure


def test_a_figure_with_the_same_pixels_is_not_written_again(tmp_path: Path) -> None:
    """Another compressor makes other bytes of the same picture."""
    path = tmp_path / "figure.png"
    save(MatplotlibFigure(), path)
    with Image.open(path) as picture:
        picture.load()
    picture.save(path, compress_level=1)
    written = path.read_bytes()
    save(MatplotlibFigure(), path)
    assert path.read_bytes() == written
    save(MatplotlibFigure(facecolor="red"), path)
    assert path.read_bytes() != written


def test_a_band_is_the_mean_or_median_and_the_10th_to_90th_percentile() -> None:
    seeds = np.random.default_rng(0).exponential(size=(20, 4))
    low, high = np.percentile(seeds, (10, 90), axis=0)
    mean = band("arsm", "#000000", [0, 1, 2, 3], seeds.tolist())
    median = band("arsm", "#000000", [0, 1, 2, 3], seeds.tolist(), "median")
    np.testing.assert_allclose(mean.y, seeds.mean(0))
    np.testing.assert_allclose(median.y, np.median(seeds, 0))
    for series in (mean, median):
        np.testing.assert_allclose(series.low, low)
        np.testing.assert_allclose(series.high, high)
    assert not band("arsm", "#000000", [0, 1, 2, 3], seeds[:1].tolist()).low


def test_arsm_has_one_colour_everywhere() -> None:
    assert palette(["reinforce", "ar", "arsm", "rloo"]) == [
        COLOURS[1],
        COLOURS[2],
        COLOURS[0],
        COLOURS[3],
    ]
    assert palette(["arsm", "arsm"]) == [COLOURS[0], COLOURS[1]]
    assert len(set(palette(["rloo"] * len(COLOURS)))) == len(COLOURS)
    assert len(palette(["rloo"] * 30)) == 30


def test_a_thinned_series_keeps_its_ends() -> None:
    x = [float(i) for i in range(1000)]
    series = Series(
        "arsm", "#000000", x, [2 * v for v in x], [v - 1 for v in x], [v + 1 for v in x]
    ).thinned(50)
    assert len(series.x) == 50
    assert (series.x[0], series.x[-1]) == (0.0, 999.0)
    np.testing.assert_allclose(np.diff(series.x), 999 / 49, atol=1)
    np.testing.assert_allclose(series.y, 2 * np.asarray(series.x))
    np.testing.assert_allclose(series.high, np.asarray(series.low) + 2)


def test_what_has_no_place_on_the_axes_is_left_out_of_page_and_picture() -> None:
    series = Series(
        "arsm", "#0090d6", [0, 1, 2, 3, 4, 5], [1 / 3, float("nan"), float("inf"), 0.0, 1.0, 2.0]
    )
    plain = Panel("test", {"iteration": [series]})
    for panel, places in (
        (plain, [0, 3, 4, 5]),
        (replace(plain, log="y"), [4, 5]),
        (replace(plain, log="x"), [3, 4, 5]),
    ):
        (curve,) = interactive(Figure("-ELBO", "", [panel], {}))["data"][1:]
        assert curve["x"] == places
        assert curve["y"] == [(0.33333, 0, 0, 0, 1, 2)[place] for place in places]
        axes = MatplotlibFigure().add_subplot()
        draw_panel(axes, panel, "iteration")
        assert [list(line.get_xdata()) for line in axes.lines] == [places]  # pyright: ignore[reportArgumentType]


def test_the_single_point_that_a_log_scale_leaves_of_a_line_is_not_drawn() -> None:
    collapsed, measured_once = (
        Series("a", "#0090d6", [0, 1, 2], [1.0, 0.0, 0.0]),
        Series("b", "#0090d6", [1], [1.0]),
    )
    panel = Panel("variance", {"update": [collapsed, measured_once]}, log="y")
    assert [list(series.x) for series in panel.drawn("update")] == [[], [1]]


def test_what_has_no_variance_has_a_gap_and_no_band() -> None:
    """Equal estimates leave rounding errors for a variance."""
    y, low = [1.0, 2.0, 1e-30, 1.0, 1e-30, 3.0, 4.0], [0.5, 1.0, 0.0, 0.5, 0.0, 1e-30, 2.0]
    series = Series("a", "#0090d6", list(range(7)), y, low, [5.0] * 7)
    first, last = Panel("variance", {"update": [series]}, log="y", floor=1e-8).drawn("update")
    assert (first.x, first.y, first.low) == ([0, 1], [1.0, 2.0], [0.5, 1.0])
    assert (last.x, last.y, last.low) == ([5, 6], [3.0, 4.0], [3.0, 2.0])


def test_labels_of_close_levels_do_not_meet() -> None:
    levels = [Level("paper", y, "#0090d6", label=f"{y}") for y in (3.0, 3.01, 3.02, 9.0)]
    axes = MatplotlibFigure().add_subplot()
    draw_panel(
        axes,
        Panel("", {"update": [Series("a", "#0090d6", [0, 1], [0.0, 10.0])]}, levels=levels),
        "update",
    )
    heights = [text.get_position()[1] for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == ["3.0", "3.01", "3.02", "9.0"]
    assert all(b - a > 0.05 for a, b in itertools.pairwise(heights))


def described() -> Figure:
    """A figure with all that a figure can have."""
    x = [1.0, 2.0, 30.0]
    curves = [
        Series("arsm", "#0090d6", x, [4.0, 3.0, 6.0], [3.0, 2.0, 5.0], [5.0, 4.0, 7.0]),
        Series("a long label " * 9, "#e0562b", x[:1], [2.5], mark="dots"),
    ]
    moved = [replace(curve, x=[10 * value for value in curve.x]) for curve in curves]
    level = Level("paper", 6.5, "#0090d6", "arsm")
    curve = Panel(
        "variance",
        {"update": curves, "second": moved},
        log="y",
        floor=2.0,
        ceiling=9.0,
        levels=[level],
    )
    ranking = Panel(
        "cost",
        {"cost": [Series("arsm", "#0090d6", [1.0, 100.0, 1e5], [0, 1, 2])]},
        log="x",
        names="abc",
    )
    return Figure(
        "Both", "", [curve, ranking, replace(curve, log="")], {"both": ("update", "cost")}
    )


@pytest.mark.parametrize("layout", ["wide", "narrow"])
def test_a_figure_of_the_page_is_one_that_plotly_knows(layout: str) -> None:
    """Its own classes refuse properties and values that it does not have."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    drawn = interactive(described())
    made = graph_objects.Figure(drawn["data"], drawn[layout])
    made.layout.updatemenus[0].buttons = drawn["buttons"]
    assert [menu.label for menu in made.layout.updatemenus[0].buttons] == [
        "update",
        "second",
        "cost",
    ]
    tops = [made.layout[f"yaxis{place}"].domain[1] for place in (1, 2, 3)]
    assert tops == sorted(tops, reverse=True)
    assert all(
        0 <= made.layout[f"yaxis{place}"].domain[0] < top
        for place, top in zip((1, 2, 3), tops, strict=True)
    )


def test_page_and_picture_have_the_same_words_and_numbers(tmp_path: Path) -> None:
    figure = described().in_words()
    drawn = interactive(figure)
    entries = [trace for trace in drawn["data"] if trace.get("showlegend", True)]
    assert [entry["legendgroup"] for entry in entries] == [*figure.legend, "paper"]
    assert max(len(line) for entry in entries for line in entry["name"].split("<br>")) <= ENTRY
    for place, panel in enumerate(figure.panels):
        axis = next(iter(panel.views))
        axes = MatplotlibFigure().add_subplot()
        draw_panel(axes, panel, axis)
        own = [
            trace
            for trace in drawn["data"][len(entries) :]
            if trace["xaxis"] == f"x{number(place)}"
        ]
        curves = [
            trace for trace in own if "fill" not in trace and trace["line"].get("dash") is None
        ]
        lines = [line for line in axes.lines if line.get_linestyle() != ":"]
        assert [trace["x"] for trace in curves] == [
            np.asarray(line.get_xdata()).tolist() for line in lines
        ]
        assert [trace["y"] for trace in curves] == [
            np.asarray(line.get_ydata()).tolist() for line in lines
        ]
        assert drawn["wide"][f"xaxis{number(place)}"]["title"]["text"] == axes.get_xlabel()
        assert drawn["wide"]["annotations"][place]["text"] == f"<b>{axes.get_title('left')}</b>"
        assert drawn["wide"][f"xaxis{number(place)}"].get("type", "linear") == axes.get_xscale()
        assert drawn["wide"][f"yaxis{number(place)}"].get("type", "linear") == axes.get_yscale()
        assert [axes.get_ylim()[0], axes.get_ylim()[1]] == (
            [2.0, 9.0] if panel.ceiling else [2.1, -0.1]
        )
    save_figure(figure, "both", tmp_path)
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_button_moves_the_curves_to_another_axis() -> None:
    figure = described()
    drawn = interactive(figure)
    update, second, cost = drawn["buttons"]
    for button, scale in ((update, 1), (second, 10)):
        moved, layout, places = button["args"]
        assert len(places) == len(moved["x"]) == len(moved["y"])
        for place, x in zip(places, moved["x"], strict=True):
            assert x == [scale * value for value in drawn["data"][place]["x"]]
        assert layout["xaxis.title.text"] == button["label"]
        assert "xaxis2.title.text" not in layout
    assert {drawn["data"][place]["xaxis"] for place in cost["args"][2]} == {"x2"}


def test_a_panel_is_drawn_as_it_is_described() -> None:
    series = Series(
        "arsm", "#0090d6", [1.0, 30.0, 40.0], [4.0, 6.0, 0.0], [3.0, 5.0, 0.0], [5.0, 7.0, 0.0]
    )
    panel = Panel(
        "variance",
        {"update": [series]},
        log="y",
        floor=2.0,
        levels=[Level("optimum", 6.5, "#e0562b")],
    )
    axes = MatplotlibFigure().add_subplot()
    draw_panel(axes, panel, "update")
    assert (axes.get_title("left"), axes.get_xlabel(), axes.get_yscale()) == (
        "variance",
        "update",
        "log",
    )
    curve, level = axes.lines
    assert np.asarray(curve.get_xdata()).tolist() == [1, 30], "a log axis has no place for zero"
    assert same_color(curve.get_color(), "#0090d6")
    assert np.asarray(level.get_ydata()).tolist() == [6.5, 6.5]
    corners = np.asarray(axes.collections[0].get_paths()[0].vertices)
    assert {tuple(corner) for corner in corners.tolist()} >= {(1, 3), (1, 5), (30, 5), (30, 7)}
    assert axes.get_ylim()[0] == 2.0
    assert axes.get_xlim()[0] == 0.0
    draw_panel(
        axes, replace(panel, title="vae-short-1layer-gumbel-softmax-hard=True-rate0.0003"), "update"
    )
    assert max(map(len, axes.get_title("left").split("\n"))) <= TITLE


@pytest.mark.parametrize(("entries", "wide"), [(1, 0.2), (9, 5 * 0.34)])
def test_a_file_shows_the_axes_that_it_names_below_the_legend(
    entries: int, wide: float, tmp_path: Path
) -> None:
    """As many panels as views and as many lines as long names, in two columns if many, seen from
    the PNG's size.
    """
    line = [
        Series(f"arsm with settings {number:_>30}", "#0090d6", [0, 1], [0, 1])
        for number in range(entries)
    ]
    panels = [
        Panel("return", {"episode": line, "step": line, "second": line}),
        Panel("entropy", {"episode": line}),
    ]
    files = {"all": ("episode", "step", "second"), "one": ("second",)}
    for name, inches in (("all", (8, 5.4 + wide)), ("one", (4, 2.7 + 0.2 * entries))):
        save_figure(Figure("Along training", "", panels, files), name, tmp_path)
        header = (tmp_path / f"{name}.png").read_bytes()[16:24]
        size = int.from_bytes(header[:4]), int.from_bytes(header[4:])
        assert size == tuple(int(96 * inch) for inch in inches)  # whole pixels


@pytest.mark.parametrize(("values", "plain"), [((80, 150), True), ((0.8, 150), False)])
def test_a_log_scale_within_a_decade_has_plain_numbers(
    values: tuple[float, float], plain: bool
) -> None:
    figure = MatplotlibFigure()
    axes = figure.add_subplot()
    draw_panel(
        axes,
        Panel("-ELBO", {"iteration": [Series("arsm", "#0090d6", [0, 1], values)]}, log="y"),
        "iteration",
    )
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert ("100" in labels and "120" in labels) == plain


def test_colours_can_be_told_apart() -> None:
    def lab(colour: str) -> np.ndarray:
        """CIE Lab under D65, from the definition of sRGB."""
        coded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
        matrix = np.array(
            [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        )
        x, y, z = (matrix @ linear) / (0.9505, 1.0, 1.089)
        f = [np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    assert np.linalg.norm(lab("#00a37a") - lab("#2aa8a8")) < 29, (
        "two greens that were nearly the same"
    )
    for first, second in itertools.combinations(COLOURS, 2):
        assert np.linalg.norm(lab(first) - lab(second)) > 29, (first, second)
