"""The generated parts of results/conditional/README.md and results/conditional/HISTORY.md."""

from __future__ import annotations

from collections.abc import Mapping

from arsm_experiments.report.pages.tables import (
    Cell,
    Part,
    Tables,
    listed,
    markdown,
    welch,
    with_spread,
)
from arsm_experiments.report.rows import CHOSE

TEST = "test, 1,000 samples"
CALLS = "evaluations, last epoch"
LEAVE_ONE_OUT = "rloo:samples=46,live=1"
STRAIGHT = "gumbel-softmax:hard=True"
PROTOCOL = {
    "VIMCO on a bound of 10 samples": "vimco, bound samples 10",
    "Gumbel-Softmax": "gumbel-softmax",
    "straight-through Gumbel-Softmax": STRAIGHT,
    "straight-through": "straight-through",
    "leave-one-out, 46 samples": LEAVE_ONE_OUT,
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
BETTER_LEAVE_ONE_OUT = f"(mean): {LEAVE_ONE_OUT}, epochs 500, schedule cosine, pixel bias mean"
BETTER = {
    "ARSM, better start and rate": TUNED,
    "VIMCO on a bound of 50 samples, better start": RECIPE,
}
JANG = {
    "gumbel-softmax": "59.0",
    STRAIGHT: "59.7",
    "straight-through": "61.8",
    "muprop": "63.0",
}
"""Test -ln p on sampled pixels: Jang, Gu and Poole, ICLR 2017, table 1."""
AHEAD = {STRAIGHT: "straight-through Gumbel-Softmax", LEAVE_ONE_OUT: "leave-one-out"}
"""Rivals that the page's sentences put beside ARSM."""
PAPER = {"arsm": "58.3 ± 0.2"}
"""Images not described."""


def cell(tables: Tables, row: str, metric: str = TEST) -> Cell:
    """A number of the table; the paper's protocol has no group in front of its rows."""
    separator = " " if row.startswith("(") else ": "
    return tables.cell("conditional", f"Conditional MNIST{separator}{row}", metric)


def has_sampled(tables: Tables, words: str) -> bool:
    """Whether a row was trained on sampled pixels."""
    return tables.find("conditional", _sampled_row(words), TEST) is not None


def sampled(tables: Tables, words: str, metric: str = TEST) -> Cell:
    """A number of the row on sampled pixels."""
    return tables.cell("conditional", _sampled_row(words), metric)


def _sampled_row(words: str) -> str:
    return f"Conditional MNIST (sampled): {words}, sampled pixels True"


def table(tables: Tables) -> str:
    """-ln p on thresholded and on sampled pixels, beside the papers' numbers."""
    rows = []
    for name, row in (PROTOCOL | BETTER).items():
        drawn = with_spread(sampled(tables, row), 1) if has_sampled(tables, row) else ""
        chose = "*" * bool(cell(tables, row, CHOSE).mean)
        rows.append(
            [
                name,
                f"{cell(tables, row, CALLS).mean:.1f}",
                f"{cell(tables, row).mean:.1f} ± {cell(tables, row).std:.1f}{chose}",
                drawn,
                JANG.get(row, PAPER.get(row, "")),
            ]
        )
    return markdown(["", "f calls", "thresholded", "sampled pixels", "papers"], rows)


def train(tables: Tables) -> str:
    """The training objective of every row."""
    rows = [[name, cell(tables, row, "train").spread] for name, row in (PROTOCOL | BETTER).items()]
    return markdown(["", "train"], rows)


def finding(tables: Tables) -> str:
    """The best two estimators at the paper's settings, and ARSM beside its rivals."""
    ends = {name: cell(tables, row).mean for name, row in PROTOCOL.items()}
    first, second, *_ = sorted(ends, key=lambda name: ends[name])
    arsm = cell(tables, "arsm")
    ahead = [f"{name} {_better(arsm, cell(tables, row))}" for row, name in AHEAD.items()]
    return (
        f"**Finding.** **At the paper's settings, on thresholded pixels, {first} ends lowest, at "
        f"{ends[first]:.1f} nats, then {second} at {ends[second]:.1f}. ARSM reaches "
        f"{arsm.mean:.1f}; the paper has 58.3, on images that it does not describe.** On the same "
        f"images {listed(ahead)}. With a start, rate and schedule chosen with one of its seeds "
        f"ARSM reaches {cell(tables, TUNED).mean:.1f}."
    )


def _better(arsm: Cell, rival: Cell) -> str:
    """Nats by which a rival is better than ARSM."""
    lead = welch(arsm, rival)
    word = "better" if lead.mean > 0 else "worse"
    undecided = "" if lead.decided else " (undecided)"
    return f"is {abs(lead.mean):.1f} nats {word}{undecided}"


def details(tables: Tables) -> str:
    """Intervals on thresholded pixels, and settings that were tuned."""
    arsm, tuned, recipe = (cell(tables, row) for row in ("arsm", TUNED, RECIPE))
    rivals = {row: cell(tables, row) for row in AHEAD}
    leave = cell(tables, BETTER_LEAVE_ONE_OUT)
    return (
        f"- On thresholded pixels ARSM reaches {arsm.interval}. {_leads(arsm, rivals)}.\n"
        "- Output biases that start from the mean image, ten times the rate and a cosine schedule "
        f"together bring ARSM to {tuned.interval}. Similar changes bring leave-one-out to "
        f"{leave.mean:.1f}.\n"
        "- A bound of 50 samples, this start, thirty times the rate with the schedule, and dropout "
        f"bring VIMCO to {recipe.interval}."
    )


def _leads(arsm: Cell, rivals: Mapping[str, Cell]) -> str:
    """How far rivals are ahead of ARSM, in a sentence that lacks its full stop."""
    told = []
    for row, rival in rivals.items():
        lead = welch(arsm, rival)
        undecided = "" if lead.decided else " (undecided)"
        told.append(f"{AHEAD[row]} is {lead.text} nats better{undecided}")
    return _capital(listed(told))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def pixels(tables: Tables) -> str:
    """ARSM on sampled pixels, and the rows that are like for like with Jang et al.'s."""
    arsm = sampled(tables, "arsm")
    rivals = {row: sampled(tables, row) for row in AHEAD}
    told = [
        f"On sampled pixels ARSM reaches {arsm.interval}, the paper 58.3. {_leads(arsm, rivals)}.",
        *_beside_jang(tables),
    ]
    return "\n".join(f"- {bullet}" for bullet in told)


def _beside_jang(tables: Tables) -> list[str]:
    """How far our runs on sampled pixels are below Jang et al.'s numbers, if all of them are."""
    gains = [float(theirs) - sampled(tables, words).mean for words, theirs in JANG.items()]
    if min(gains) <= 0:
        return []
    return [
        f"On sampled pixels {len(gains)} rows are {min(gains):.1f} to {max(gains):.1f} nats below "
        "Jang et al.'s; we do not know why."
    ]


PARTS: dict[str, Part] = {
    "finding": finding,
    "table": table,
    "details": details,
    "pixels": pixels,
}
HISTORY_PARTS: dict[str, Part] = {"train": train}
