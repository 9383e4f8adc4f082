"""The generated parts of results/conditional/README.md."""

from __future__ import annotations

from collections.abc import Mapping

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch
from arsm_experiments.report.rows import CHOSE

TEST = "test, 1,000 samples"
PROTOCOL = {
    "VIMCO, bound of 10 samples": "vimco, bound samples 10",
    "Gumbel-Softmax": "gumbel-softmax",
    "straight-through Gumbel-Softmax": "gumbel-softmax:hard=True",
    "straight-through": "straight-through",
    "leave-one-out, 46 samples": "rloo:samples=46,live=1",
    "MuProp": "muprop",
    "pooled ARSM": "arsm:pooled=True",
    "ARSM": "arsm",
    "ARS": "ars",
    "REINFORCE": "reinforce",
}
TUNED = "(mean-long): arsm, schedule cosine, pixel bias mean"
RECIPE = (
    "(mean): vimco, dropout 0.1, epochs 300, schedule cosine, pixel bias mean, bound samples 50"
)
BETTER = {"ARSM, better start and rate": TUNED, "VIMCO, bound of 50 samples, better start": RECIPE}
JANG = {
    "gumbel-softmax": "59.0",
    "gumbel-softmax:hard=True": "59.7",
    "straight-through": "61.8",
    "muprop": "63.0",
}
"""Test -ln p on sampled pixels: Jang, Gu and Poole, ICLR 2017, table 1."""
SEEDS = 3
PAPER = {"arsm": "58.3 ± 0.2"}
"""Images not described."""


def cell(tables: Tables, row: str, metric: str = TEST) -> Cell:
    """A number of the table; the paper's protocol has no group in front of its rows."""
    separator = " " if row.startswith("(") else ": "
    return tables.cell("conditional", f"Conditional MNIST{separator}{row}", metric)


def sampled(tables: Tables, words: str, metric: str = TEST) -> Cell | None:
    """A number of the row on sampled pixels, if it was run."""
    row = f"Conditional MNIST (sampled): {words}, sampled pixels True"
    return tables.find("conditional", row, metric)


def table(tables: Tables) -> str:
    """-ln p on thresholded and on sampled pixels, beside the papers' numbers."""
    rows = []
    for name, row in (PROTOCOL | BETTER).items():
        drawn = sampled(tables, row)
        rows.append(
            [
                name,
                f"{cell(tables, row, 'evaluations, last epoch').mean:.1f}",
                cell(tables, row, "train").spread,
                f"{cell(tables, row).mean:.1f} ± {cell(tables, row).std:.1f}"
                + "*" * bool(cell(tables, row, CHOSE).mean),
                "" if drawn is None else _with_seeds(drawn),
                JANG.get(row, PAPER.get(row, "")),
            ]
        )
    header = ["", "f calls", "train", "test, thresholded", "test, sampled pixels", "papers"]
    return markdown(header, rows)


def _with_seeds(cell: Cell) -> str:
    """Mean and standard deviation, and the number of seeds where it is not that of the page."""
    seeds = "" if cell.seeds == SEEDS else f" (n = {cell.seeds})"
    return f"{cell.mean:.1f} ± {cell.std:.1f}{seeds}"


def finding(tables: Tables) -> str:
    """ARSM beside the paper's number, and the rivals."""
    arsm, tuned, recipe = cell(tables, "arsm"), cell(tables, TUNED), cell(tables, RECIPE)
    leave = cell(tables, "rloo:samples=46,live=1")
    straight = cell(tables, "gumbel-softmax:hard=True")
    return (
        f"**At the paper's settings ARSM reaches {arsm.interval}, the paper 58.3; straight-through "
        f"Gumbel-Softmax is {welch(arsm, straight).text} nats better on the same images and "
        f"leave-one-out {welch(arsm, leave).text} (Welch's 95% intervals).** Output biases that "
        "start from the mean image, ten times the rate and a cosine schedule together bring "
        f"ARSM to {tuned.interval}. A bound of 50 samples, this start, thirty times the rate with "
        f"the schedule, and dropout bring VIMCO to {recipe.interval}."
    )


def pixels(tables: Tables) -> str:
    """Which rows are like for like with Jang et al.'s."""
    names = {words: name for name, words in PROTOCOL.items()}
    everything = {words: drawn for words in names if (drawn := sampled(tables, words)) is not None}
    found = {words: everything[words] for words in JANG if words in everything}
    told = "; ".join(
        f"{names[words]} {drawn.interval}, theirs {JANG[words]}" for words, drawn in found.items()
    )
    missing = [names[words] for words in JANG if words not in found]
    rest = (
        f" The other rows ({', '.join(missing)}) have no finished run on sampled pixels: their "
        "papers' numbers are not comparable with ours."
        if missing
        else ""
    )
    gains = [float(JANG[words]) - drawn.mean for words, drawn in found.items()]
    better = (
        f" Each is better than theirs, by {min(gains):.1f} to {max(gains):.1f} nats; we do not "
        "know why."
        if len(gains) > 1 and min(gains) > 0
        else ""
    )
    return f"On sampled pixels: {told}.{better}{_arsm_sampled(everything, names)}{rest}"


def _arsm_sampled(found: Mapping[str, Cell], names: Mapping[str, str]) -> str:
    """ARSM on sampled pixels, and how far the others without a number of Jang et al. are ahead."""
    if "arsm" not in found:
        return ""
    arsm = found["arsm"]
    ahead = []
    for words in ("gumbel-softmax:hard=True", "rloo:samples=46,live=1"):
        if words in found:
            lead = welch(arsm, found[words])
            undecided = "" if lead.decided else " (undecided)"
            ahead.append(f"{names[words].partition(',')[0]} is {lead.text} nats better{undecided}")
    told = f": {listed(ahead)}" if ahead else ""
    return f" ARSM reaches {arsm.interval} there, the paper 58.3{told}."


def limits(tables: Tables) -> str:
    """What depends on the runs on sampled pixels that there are."""
    told = []
    if any(sampled(tables, words) is None for words in PROTOCOL.values()):
        told.append("Sampled pixels for every row.")
    leave = sampled(tables, "rloo:samples=46,live=1")
    if leave is not None and leave.seeds < SEEDS:
        told.append(
            "One of leave-one-out's three seeds is left out there: its gradients overflowed on the "
            "GPU ([how](HISTORY.md)). It was not repeated."
        )
    return "- " + " ".join(told) if told else ""


PARTS = {"table": table, "finding": finding, "pixels": pixels, "limits": limits}
