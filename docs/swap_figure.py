"""The figure of the first page: one race, one swap, and all swaps, of noise that the library drew.

    python docs/swap_figure.py

writes docs/assets/swap-light.svg and swap-dark.svg.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from arsm.noise import dirichlet

NAMES = "ABCDE"
COLOURS = ("#4477aa", "#cc4455", "#228833", "#997700", "#aa3377")
INK = {"light": "#333333", "dark": "#dddddd"}
LOGITS = torch.tensor([0.6, 0.1, -0.3, 0.4, -0.2], dtype=torch.float64)
SEED = 27
SWAP = (0, 4)


def winners(log_pi: torch.Tensor) -> torch.Tensor:
    """The winner of the race after each pair (c, j) exchanged its noise: [C] -> [C, C]."""
    categories = len(LOGITS)
    found = torch.empty(categories, categories, dtype=torch.int64)
    for c in range(categories):
        for j in range(categories):
            swapped = log_pi.clone()
            swapped[[c, j]] = log_pi[[j, c]]
            found[c, j] = (swapped - LOGITS).argmin()
    return found


def draw(folder: Path) -> None:
    """Write both figures."""
    log_pi = dirichlet(LOGITS, torch.Generator().manual_seed(SEED))
    pseudo = winners(log_pi)
    swapped = log_pi.clone()
    swapped[list(SWAP)] = log_pi[list(SWAP[::-1])]
    for scheme, ink in INK.items():
        style: dict[Any, Any] = {
            "text.color": ink,
            "axes.labelcolor": ink,
            "axes.edgecolor": ink,
            "xtick.color": ink,
            "ytick.color": ink,
            "font.size": 10,
            "svg.hashsalt": "arsm",
            # letters instead of their outlines: half the bytes, and a reader can select them
            "svg.fonttype": "none",
            "font.family": "sans-serif",
        }
        with mpl.rc_context(style):
            figure = Figure(figsize=(9.6, 3.1), layout="constrained")
            left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
            race(left, log_pi, None, ink)
            race(middle, swapped, log_pi, ink)
            left.set_title("the race: the first one wins")
            middle.set_title(f"{NAMES[SWAP[0]]} and {NAMES[SWAP[1]]} exchange their noise")
            table(right, pseudo, ink)
            right.set_title("who wins, for all exchanges")
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
            (folder / f"swap-{scheme}.svg").write_text(shortened(drawn.getvalue()))


def shortened(svg: str) -> str:
    """Without indentation, comments, names that nothing refers to, and decimals where they count
    least.
    """
    svg = re.sub(r"[1-9]\d*\.\d{3,}", lambda number: f"{float(number[0]):.2f}", svg)
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # one font for all letters, named once
    svg = re.sub(r"font-family: [^;]*; | transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg = svg.replace("<svg ", '<svg font-family="DejaVu Sans, Verdana, sans-serif" ', 1)
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda name: name[0] if name[1] in used else "", svg)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"\s*([A-Za-z])\s*", r"\1", path[0]), svg)
    svg = re.sub(r'(?<= style=")[^"]*', lambda style: re.sub(r"([:;]) ", r"\1", style[0]), svg)
    return re.sub(r"> <", "><", re.sub(r"\s+", " ", svg)) + "\n"


def race(axes: Axes, log_pi: torch.Tensor, before: torch.Tensor | None, ink: str) -> None:
    """Each category's arrival; hollow where an exchange has taken it away."""
    arrival = log_pi - LOGITS
    winner = int(arrival.argmin())
    axes.axvline(float(arrival[winner]), color=COLOURS[winner], linewidth=1, linestyle=":")
    for i, name in enumerate(NAMES):
        y, x = -i, float(arrival[i])
        if before is not None and i in SWAP:
            old = float(before[i] - LOGITS[i])
            axes.plot(
                old,
                y,
                "o",
                markersize=9,
                markerfacecolor="none",
                markeredgecolor=COLOURS[i],
                alpha=0.6,
            )
            axes.annotate(
                "",
                (x, y),
                (old, y),
                arrowprops={"arrowstyle": "->", "color": ink, "shrinkA": 6, "shrinkB": 6},
            )
        axes.plot(x, y, "o", markersize=9, color=COLOURS[i])
        if i == winner:
            axes.annotate(
                f"{name} wins", (x, y), (8, 5), textcoords="offset points", color=ink, weight="bold"
            )
    axes.set(
        yticks=range(0, -len(NAMES), -1),
        yticklabels=list(NAMES),
        xlabel="arrival, ln \u03c0\u1d62 \u2212 \u03c6\u1d62",
    )
    axes.set(xlim=(-4.3, 0.2), ylim=(-len(NAMES) + 0.5, 0.7))
    axes.spines[["top", "right"]].set_visible(False)


def table(axes: Axes, pseudo: torch.Tensor, ink: str) -> None:
    """The pseudo action of every pair."""
    for c, row in enumerate(pseudo.tolist()):
        for j, winner in enumerate(row):
            edge = ink if {c, j} == set(SWAP) else "none"
            axes.add_patch(
                Rectangle(
                    (j - 0.46, -c - 0.46),
                    0.92,
                    0.92,
                    facecolor=COLOURS[winner],
                    edgecolor=edge,
                    lw=2,
                )
            )
            axes.text(j, -c, NAMES[winner], ha="center", va="center", color="white", weight="bold")
    axes.set(xticks=range(len(NAMES)), xticklabels=list(NAMES), xlabel="j")
    axes.set(yticks=range(0, -len(NAMES), -1), yticklabels=list(NAMES))
    axes.set_ylabel("c", rotation=0)
    axes.set(xlim=(-0.6, 4.6), ylim=(-4.6, 0.6), aspect="equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "assets")
