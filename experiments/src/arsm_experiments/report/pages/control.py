"""The generated parts of results/control/README.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from arsm_experiments.control import WINDOW
from arsm_experiments.report.control import seed_series
from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch
from arsm_experiments.runs.archive import read_archive
from arsm_experiments.runs.reader import Record, make_record

LANDER = ", reward scale 0.01"
CHOSEN = f"rmsprop 0.01{LANDER}"
"""The choice of ARSM's grid on LunarLander."""
LONGER = "ARSM, 1,500 s"
LONGEST = "ARSM, 4,000 s"
"""Have so many CPU seconds on LunarLander instead of 400."""
LIMITS = {"ARSM": 400, "ARS": 400, LONGER: 1500, LONGEST: 4000}
"""CPU seconds on LunarLander; all other runs end after a number of episodes."""
FIRST_SEED = 200
"""Of the reported runs; earlier seeds chose the settings."""
NOT_CHOSEN = "A2C, not from the grid"
ROWS = {
    "CartPole-v0": {
        "ARSM": "arsm, rmsprop 0.03",
        "RELAX": "relax, adam 0.003, entropy 0.01",
        "A2C": "a2c, adam 0.03, entropy 0.01",
        NOT_CHOSEN: "a2c, adam 0.01",
    },
    "Acrobot-v1": {
        "ARSM": "arsm, adam 0.01, entropy 0.01",
        "ARS": "ars, adam 0.01, entropy 0.01",
        "RELAX": "relax, adam 0.01, entropy 0.01",
        "A2C": "a2c, rmsprop 0.01, entropy 0.01",
    },
    "LunarLander-v3": {
        "ARSM": f"arsm, {CHOSEN}, 400 CPU seconds",
        LONGER: f"arsm, {CHOSEN}, 1,500 CPU seconds",
        LONGEST: f"arsm, {CHOSEN}, 4,000 CPU seconds",
        "ARS": f"ars, {CHOSEN}, 400 CPU seconds",
        "RELAX": f"relax, rmsprop 0.01{LANDER}, entropy 0.01",
        "A2C": f"a2c, adam 0.003{LANDER}, entropy 0.01",
    },
}
NAMES = {"CartPole-v0": "CartPole", "Acrobot-v1": "Acrobot", "LunarLander-v3": "LunarLander"}
RIVALS = ("RELAX", "A2C")
PLACES = ("first", "second", "third")
"""Of ARSM, by the number of its rivals that are above it."""


def cell(tables: Tables, task: str, method: str, metric: str) -> Cell:
    """A number of control's table."""
    return tables.cell("control", f"{task}: {ROWS[task][method]}", metric)


Columns = dict[str, np.ndarray]
"""A seed's record, metric by metric."""


@cache
def _records(results: Path) -> list[Record]:
    runs = read_archive(results / "runs/control.tar.xz")
    return [make_record(Path(name), files) for name, files in runs.items()]


def on_lander(tables: Tables, method: str, key: str = "step") -> list[Columns]:
    """The reported seeds of a method on LunarLander, at the lines that have `key`."""
    task = "LunarLander-v3"
    name = ROWS[task][method].partition(",")[0]
    return [
        columns
        for record in _records(tables.results)
        if record.config["environment"] == task
        and record.config["method"] == name
        and record.config.get("cpu_seconds") == LIMITS.get(method)
        and record.config["seed"] >= FIRST_SEED
        for columns in seed_series(record, key)
    ]


def median(tables: Tables, task: str, method: str) -> str:
    """The median of the final averages over seeds, with the 10th and 90th percentile."""
    middle, low, high = (
        f"{cell(tables, task, method, metric).mean:.0f}"
        for metric in ("its median", "its 10th percentile", "its 90th percentile")
    )
    return f"{middle} ({low} to {high})"


def passes(tables: Tables, task: str, method: str) -> str:
    """The seeds that reach the completion line, of how many."""
    seeds = cell(tables, task, method, "final average").seeds
    return f"{cell(tables, task, method, 'seeds at the line').mean:.0f} of {seeds}"


def table(tables: Tables) -> str:
    """Final averages, seeds at the line and cost of every method."""
    rows = []
    for task, methods in ROWS.items():
        for place, (method, label) in enumerate(methods.items()):
            seconds = tables.find("control", f"{task}: {label}", "CPU seconds to the line")
            rows.append(
                [
                    NAMES[task] if place == 0 else "",
                    method,
                    median(tables, task, method),
                    passes(tables, task, method).replace(" of ", "/"),
                    f"{cell(tables, task, method, 'episodes').mean:,.0f}",
                    _millions(cell(tables, task, method, "simulator steps").mean),
                    f"{cell(tables, task, method, 'CPU seconds').mean:,.0f}",
                    "" if seconds is None else f"{seconds.mean:,.0f}",
                    f"{cell(tables, task, method, 'log variance').mean:.1f}",
                ]
            )
    header = ["", "", "final average: median (10th to 90th percentile)", "seeds that pass"]
    header += ["episodes", "million steps", "CPU seconds", "to the line", "ln variance"]
    return markdown(header, rows)


def _millions(count: float) -> str:
    """Two digits, and all of the whole millions."""
    return f"{count / 1e6:.2g}" if count < 1e8 else f"{count / 1e6:.0f}"


def notes(tables: Tables) -> str:
    """What the table's columns mean, and where a run ends."""
    limit = cell(tables, "LunarLander-v3", "A2C", "episodes").mean
    ends = sorted(int(seed["step"][-1]) for seed in on_lander(tables, LONGER))
    stopped, others = ends.count(int(limit)), [end for end in ends if end < limit]
    return (
        f"Final averages are over a seed's last {WINDOW} true episodes, or all if it has fewer; a "
        "seed passes if this average ever reaches 195, -100 or 200. Steps include rollouts and "
        "replays. `To the line`: mean CPU seconds of the seeds that pass. ln variance: the "
        "gradient's, averaged over the run. On LunarLander ARSM and ARS stop after 400 CPU seconds "
        f"or those named, or at {limit:,.0f} episodes ({stopped} seed of `{LONGER}`; the others "
        f"play {others[0]} to {others[-1]}), other rows after their episodes; machines differ."
    )


def answer(tables: Tables) -> str:
    """ARSM beside its rivals: places by the median, seeds that pass, cost."""
    compared = ("ARSM", *RIVALS)
    places: dict[str, list[str]] = {}
    behind, overlap, more, shares = [], [], [], []
    for task, name in NAMES.items():
        medians = {each: cell(tables, task, each, "its median").mean for each in compared}
        above = sum(medians[rival] > medians["ARSM"] for rival in RIVALS)
        places.setdefault(PLACES[above], []).append(name)
        if "ARS" in ROWS[task] and cell(tables, task, "ARS", "its median").mean > medians["ARSM"]:
            behind.append(name)
        if all(overlapping(tables, task, "ARSM", rival) for rival in RIVALS):
            overlap.append(name)
        passed = {each: cell(tables, task, each, "seeds at the line").mean for each in compared}
        if all(passed["ARSM"] > passed[rival] for rival in RIVALS):
            more.append(name)
        steps = {each: cell(tables, task, each, "simulator steps").mean for each in compared}
        shares.append(f"{steps['ARSM'] / max(steps[rival] for rival in RIVALS):.2g}")

    task = "LunarLander-v3"
    spent, episodes = (
        {each: cell(tables, task, each, metric).mean for each in compared}
        for metric in ("CPU seconds", "episodes")
    )
    placed = listed([f"{place} on {listed(names)}" for place, names in places.items()])
    return (
        f"**By the median over seeds, ARSM is, of these three, {placed}; the paper has it ahead "
        f"everywhere. ARS is above it {_where(behind)}. Its range over seeds overlaps with both "
        f"rivals' {_where(overlap)}; {_where(more, 'only ')} do more of its seeds pass than of "
        f"theirs. It plays {listed(shares)} times the simulator steps of the costlier rival:** on "
        f"LunarLander {episodes['ARSM']:.0f} episodes in {spent['ARSM']:.0f} CPU seconds, where "
        f"A2C plays {episodes['A2C']:,.0f} in {spent['A2C']:.0f}. {_longest(tables)}"
    )


def _longest(tables: Tables) -> str:
    """How far each seed of ARSM comes on LunarLander with the most time."""
    task = "LunarLander-v3"
    seconds = cell(tables, task, LONGEST, "CPU seconds").mean
    passed = cell(tables, task, LONGEST, "seeds at the line").mean
    seeds = on_lander(tables, LONGEST)
    episodes = listed([f"{seed['step'][-1]:.0f}" for seed in seeds])
    finals = [float(seed["average_return"][-1]) for seed in seeds]
    best = max(cell(tables, task, rival, "its median").mean for rival in RIVALS)
    above = ", above both rivals' medians" if min(finals) > best else ""
    return (
        f"With {seconds:,.0f} seconds its {len(seeds)} seeds play {episodes} episodes and end at "
        f"{listed([f'{final:.0f}' for final in finals])}{above}; "
        f"{passed:.0f} passes the line."
    )


def _where(names: list[str], before: str = "") -> str:
    return f"{before}on {listed(names)}" if names else "nowhere"


def overlapping(tables: Tables, task: str, *methods: str) -> bool:
    """Whether the ranges from the 10th to the 90th percentile meet."""
    ends = ("its 10th percentile", "its 90th percentile")
    low, high = ([cell(tables, task, each, end).mean for each in methods] for end in ends)
    return max(low) <= min(high)


def variance(tables: Tables) -> str:
    """Where ARSM's gradient has less variance than the others', and where not."""
    parts = []
    less = {rival: [] for rival in RIVALS}
    for task, methods in ROWS.items():
        own = cell(tables, task, "ARSM", "log variance")
        differences = {
            other: welch(cell(tables, task, other, "log variance"), own)
            for other in (*RIVALS, NOT_CHOSEN)
            if other in methods
        }
        for rival in RIVALS:
            if differences[rival].decided and differences[rival].mean > 0:
                less[rival].append(NAMES[task])
        words = [f"{other.replace(',', '')} {x.short}" for other, x in differences.items()]
        parts.append(f"{NAMES[task]} {', '.join(words)}")
    decided = ", ".join(
        f"against {name} on {_which(less[rival])}"
        for rival, name in {"RELAX": "RELAX", "A2C": "the grid's A2C"}.items()
    )
    first = {name: _early_variance(tables, name) for name in ("ARSM", *RIVALS)}
    early = {rival: welch(first[rival], first["ARSM"]) for rival in RIVALS}
    words = [f"{rival} {x.short}" for rival, x in early.items()]
    lower = [rival for rival, x in early.items() if x.decided and x.mean < 0]
    end = f" (decidedly less for {listed(lower)})" if lower else ""
    return (
        "ln of the others' gradient variance less ARSM's (95% interval): "
        f"{'; '.join(parts)}. The paper has less for ARSM than for A2C and RELAX on all three "
        f"tasks; here that is decided {decided}. LunarLander's runs differ in length; over their "
        f"first {WINDOW} episodes it is {listed(words)}{end}."
    )


def _which(tasks: list[str]) -> str:
    if len(tasks) == len(NAMES):
        return "all three"
    return listed(tasks) if tasks else "none"


def _early_variance(tables: Tables, method: str) -> Cell:
    """ln variance on LunarLander, averaged over each seed's first episodes."""
    values = [
        float(seed["log_variance"][seed["step"] <= WINDOW].mean())
        for seed in on_lander(tables, method, "log_variance")
    ]
    return Cell(fmean(values), stdev(values), len(values))


PARTS = {"answer": answer, "table": table, "notes": notes, "variance": variance}
