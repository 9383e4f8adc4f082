"""The generated parts of results/control/README.md and results/control/HISTORY.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from arsm_experiments.control import WINDOW
from arsm_experiments.report.control import seed_series
from arsm_experiments.report.pages.tables import Cell, Part, Tables, listed, markdown, welch
from arsm_experiments.report.welch import Difference
from arsm_experiments.runs.archive import read_archive
from arsm_experiments.runs.reader import Record, make_record

LANDER = "LunarLander-v3"
SCALED = ", reward scale 0.01"
CHOSEN = f"rmsprop 0.01{SCALED}"
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
    LANDER: {
        "ARSM": f"arsm, {CHOSEN}, 400 CPU seconds",
        LONGER: f"arsm, {CHOSEN}, 1,500 CPU seconds",
        LONGEST: f"arsm, {CHOSEN}, 4,000 CPU seconds",
        "ARS": f"ars, {CHOSEN}, 400 CPU seconds",
        "RELAX": f"relax, rmsprop 0.01{SCALED}, entropy 0.01",
        "A2C": f"a2c, adam 0.003{SCALED}, entropy 0.01",
    },
}
NAMES = {"CartPole-v0": "CartPole", "Acrobot-v1": "Acrobot", LANDER: "LunarLander"}
RIVALS = ("RELAX", "A2C")
COMPARED = ("ARSM", *RIVALS)
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
    name = ROWS[LANDER][method].partition(",")[0]
    return [
        columns
        for record in _records(tables.results)
        if record.config["environment"] == LANDER
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
    """Final returns, seeds at the line and cost of every method."""
    header = ["", "", "final return: median (10th to 90th percentile)", "seeds that pass"]
    header += ["million steps", "CPU seconds"]
    rows = []
    for task, methods in ROWS.items():
        for place, method in enumerate(name for name in methods if name != LONGER):
            name = NAMES[task] if place == 0 else ""
            rows.append([name, method, *_results(tables, task, method)])
    return markdown(header, rows)


def _results(tables: Tables, task: str, method: str) -> list[str]:
    """Cells of the main table."""
    return [
        median(tables, task, method),
        passes(tables, task, method).replace(" of ", "/"),
        _millions(cell(tables, task, method, "simulator steps").mean),
        f"{cell(tables, task, method, 'CPU seconds').mean:,.0f}",
    ]


def every_row(tables: Tables) -> str:
    """The main table with the rows and the columns that it leaves out."""
    header = ["", "", "final return", "seeds that pass", "million steps", "CPU seconds"]
    header += ["episodes", "CPU seconds to the line", "ln variance"]
    rows = []
    for task, methods in ROWS.items():
        for place, (method, label) in enumerate(methods.items()):
            seconds = tables.find("control", f"{task}: {label}", "CPU seconds to the line")
            rows.append(
                [
                    NAMES[task] if place == 0 else "",
                    method,
                    *_results(tables, task, method),
                    f"{cell(tables, task, method, 'episodes').mean:,.0f}",
                    "" if seconds is None else f"{seconds.mean:,.0f}",
                    f"{cell(tables, task, method, 'log variance').mean:.1f}",
                ]
            )
    return markdown(header, rows)


def _millions(count: float) -> str:
    """Two digits, and all of the whole millions."""
    return f"{count / 1e6:.2g}" if count < 1e8 else f"{count / 1e6:.0f}"


def notes(tables: Tables) -> str:
    """Meaning of the columns, and where a run ends."""
    own, longest = (cell(tables, LANDER, name, "final average").seeds for name in ("ARSM", LONGEST))
    return (
        f"Higher is better. A return is the average over a seed's last {WINDOW} true episodes, or "
        "over all if it has fewer. A seed passes if this average ever reaches 195, -100 or 200. "
        "Steps (rollouts and replays counted) and CPU seconds are means over seeds; machines "
        f"differ. Rows have {own} seeds, `{LONGEST}` has {longest}. On LunarLander ARSM and ARS "
        "stop after 400 CPU seconds, or as many as the row names."
    )


def longer_runs(tables: Tables) -> str:
    """Where the runs of 1,500 CPU seconds end."""
    limit = cell(tables, LANDER, "A2C", "episodes").mean
    ends = sorted(int(seed["step"][-1]) for seed in on_lander(tables, LONGER))
    stopped, others = ends.count(int(limit)), [end for end in ends if end < limit]
    return (
        "On LunarLander ARSM and ARS stop after 400 CPU seconds or those named, or at "
        f"{limit:,.0f} episodes ({stopped} seed of `{LONGER}`; the others play {others[0]} to "
        f"{others[-1]}). RELAX and A2C stop after their episodes."
    )


def finding(tables: Tables) -> str:
    """ARSM beside its rivals: places by the median, and cost."""
    places: dict[str, list[str]] = {}
    overlap, shares = [], []
    for task, name in NAMES.items():
        places.setdefault(PLACES[above(tables, task)], []).append(name)
        if all(overlapping(tables, task, "ARSM", rival) for rival in RIVALS):
            overlap.append(name)
        shares.append(more_steps(tables, task))
    placed = listed([f"{place} on {listed(names)}" for place, names in places.items()])
    return (
        "**Finding.** **Of ARSM, RELAX and A2C, by the median over seeds, ARSM is "
        f"{placed}; the paper has it first on all three.** ARS is above it "
        f"{_where(ars_above(tables))}. ARSM's range over seeds overlaps with both rivals' "
        f"{_where(overlap)}. It plays {min(shares):.2g} to {max(shares):.2g} times the simulator "
        f"steps of the costlier rival, and {more_steps(tables, LANDER, LONGEST):.0f} times in its "
        "longest runs on LunarLander."
    )


def above(tables: Tables, task: str) -> int:
    """The number of rivals whose median is above ARSM's."""
    medians = {each: cell(tables, task, each, "its median").mean for each in COMPARED}
    return sum(medians[rival] > medians["ARSM"] for rival in RIVALS)


def more_steps(tables: Tables, task: str, own: str = "ARSM") -> float:
    """ARSM's simulator steps, in those of the costlier rival."""
    steps = {each: cell(tables, task, each, "simulator steps").mean for each in (own, *RIVALS)}
    return steps[own] / max(steps[rival] for rival in RIVALS)


def details(tables: Tables) -> str:
    """Cost on LunarLander, seeds that pass, ARS and the variance, a bullet each."""
    bullets = [
        _shortest(tables),
        _longest(tables),
        f"More seeds of ARSM than of either rival pass {_where(most_pass(tables), 'only ')}.",
        less_variance(tables),
        early_variance(tables),
    ]
    return "\n".join(f"- {bullet}" for bullet in bullets)


def most_pass(tables: Tables) -> list[str]:
    """The tasks on which more seeds of ARSM pass than of each rival."""
    found = []
    for task, name in NAMES.items():
        passed = {each: cell(tables, task, each, "seeds at the line").mean for each in COMPARED}
        if all(passed["ARSM"] > passed[rival] for rival in RIVALS):
            found.append(name)
    return found


def ars_above(tables: Tables) -> list[str]:
    """The tasks on which the median of ARS is above ARSM's."""
    return [
        name
        for task, name in NAMES.items()
        if "ARS" in ROWS[task]
        and cell(tables, task, "ARS", "its median").mean
        > cell(tables, task, "ARSM", "its median").mean
    ]


def _shortest(tables: Tables) -> str:
    """Episodes on LunarLander beside A2C's."""
    seconds, episodes = (
        {each: cell(tables, LANDER, each, metric).mean for each in ("ARSM", "A2C")}
        for metric in ("CPU seconds", "episodes")
    )
    return (
        f"In {seconds['ARSM']:.0f} CPU seconds ARSM plays {episodes['ARSM']:.0f} episodes of "
        f"LunarLander. A2C plays {episodes['A2C']:,.0f} in {seconds['A2C']:.0f}."
    )


def _longest(tables: Tables) -> str:
    """How far each seed of ARSM comes on LunarLander with the most time."""
    seconds = cell(tables, LANDER, LONGEST, "CPU seconds").mean
    passed = cell(tables, LANDER, LONGEST, "seeds at the line").mean
    seeds = on_lander(tables, LONGEST)
    episodes = listed([f"{seed['step'][-1]:.0f}" for seed in seeds])
    finals = [float(seed["average_return"][-1]) for seed in seeds]
    best = max(cell(tables, LANDER, rival, "its median").mean for rival in RIVALS)
    above = ", above both rivals' medians" if min(finals) > best else ""
    return (
        f"In {seconds:,.0f} CPU seconds {len(seeds)} seeds of ARSM play {episodes} episodes and "
        f"end at {listed([f'{final:.0f}' for final in finals])}{above}; {passed:.0f} passes the "
        "line."
    )


def _where(names: list[str], before: str = "") -> str:
    return f"{before}on {listed(names)}" if names else "nowhere"


def overlapping(tables: Tables, task: str, *methods: str) -> bool:
    """Whether the ranges from the 10th to the 90th percentile meet."""
    ends = ("its 10th percentile", "its 90th percentile")
    low, high = ([cell(tables, task, each, end).mean for each in methods] for end in ends)
    return max(low) <= min(high)


def lower_variance(tables: Tables) -> dict[str, list[str]]:
    """The tasks on which ARSM's gradient has decidedly less variance than a rival's."""
    return {
        rival: [
            name
            for task, name in NAMES.items()
            if (lead := _more_variance(tables, task, rival)).decided and lead.mean > 0
        ]
        for rival in RIVALS
    }


def _more_variance(tables: Tables, task: str, other: str) -> Difference:
    """ln of another method's gradient variance, less ARSM's."""
    return welch(*(cell(tables, task, name, "log variance") for name in (other, "ARSM")))


def less_variance(tables: Tables) -> str:
    """Where ARSM's gradient has less variance than the rivals', and where not."""
    less = lower_variance(tables)
    return (
        f"ARSM's gradient has decidedly less variance than RELAX's on {_which(less['RELAX'])} and "
        f"than the grid's A2C's on {_which(less['A2C'])}. In the paper it has less than both on "
        "all three."
    )


def early_differences(tables: Tables) -> dict[str, Difference]:
    """ln of the rivals' gradient variance, less ARSM's, in LunarLander's first episodes."""
    first = {name: _early_variance(tables, name) for name in COMPARED}
    return {rival: welch(first[rival], first["ARSM"]) for rival in RIVALS}


def early_variance(tables: Tables) -> str:
    """The rivals with less variance than ARSM in LunarLander's first episodes."""
    lower = {
        rival: lead
        for rival, lead in early_differences(tables).items()
        if lead.decided and lead.mean < 0
    }
    names = listed(list(lower) or ["neither rival"])
    verb = "have" if len(lower) > 1 else "has"
    leads = listed([lead.short for lead in lower.values()] or [""])
    return (
        f"Over LunarLander's first {WINDOW} episodes {names} {verb} decidedly less variance than "
        f"ARSM{f' (ln variance {leads})' if lower else ''}."
    )


def variance(tables: Tables) -> str:
    """Differences of ln variance on every task."""
    parts = []
    for task, methods in ROWS.items():
        others = [name for name in (*RIVALS, NOT_CHOSEN) if name in methods]
        words = [
            f"{other.replace(',', '')} {_more_variance(tables, task, other).short}"
            for other in others
        ]
        parts.append(f"{NAMES[task]} {', '.join(words)}")
    early = early_differences(tables)
    return (
        "ln of the others' gradient variance less ARSM's (95% interval): "
        f"{'; '.join(parts)}. LunarLander's runs differ in length. Over their first {WINDOW} "
        f"episodes it is {listed([f'{rival} {lead.short}' for rival, lead in early.items()])}."
    )


def _which(tasks: list[str]) -> str:
    if len(tasks) == len(NAMES):
        return "all three tasks"
    return listed(tasks) if tasks else "none"


def _early_variance(tables: Tables, method: str) -> Cell:
    """ln variance on LunarLander, averaged over each seed's first episodes."""
    values = [
        float(seed["log_variance"][seed["step"] <= WINDOW].mean())
        for seed in on_lander(tables, method, "log_variance")
    ]
    return Cell(fmean(values), stdev(values), len(values))


PARTS: dict[str, Part] = {
    "finding": finding,
    "table": table,
    "notes": notes,
    "details": details,
}
HISTORY_PARTS: dict[str, Part] = {
    "rows": every_row,
    "longer": longer_runs,
    "variance": variance,
}
