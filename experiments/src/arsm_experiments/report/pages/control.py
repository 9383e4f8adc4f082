"""The generated parts of results/control/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch

LANDER = ", reward scale 0.01"
CHOSEN = f"rmsprop 0.01{LANDER}"
"""The choice of ARSM's grid on LunarLander."""
LONGEST = "ARSM, 4,000 s"
"""Has so many CPU seconds on LunarLander instead of 400."""
ROWS = {
    "CartPole-v0": {
        "ARSM": "arsm, rmsprop 0.03",
        "RELAX": "relax, adam 0.003, entropy 0.01",
        "A2C": "a2c, adam 0.03, entropy 0.01",
        "A2C, not from the grid": "a2c, adam 0.01",
    },
    "Acrobot-v1": {
        "ARSM": "arsm, adam 0.01, entropy 0.01",
        "ARS": "ars, adam 0.01, entropy 0.01",
        "RELAX": "relax, adam 0.01, entropy 0.01",
        "A2C": "a2c, rmsprop 0.01, entropy 0.01",
    },
    "LunarLander-v3": {
        "ARSM": f"arsm, {CHOSEN}, 400 CPU seconds",
        "ARSM, 1,500 s": f"arsm, {CHOSEN}, 1,500 CPU seconds",
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
                    passes(tables, task, method),
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


def answer(tables: Tables) -> str:
    """ARSM beside its rivals: places by the median, seeds that pass, cost."""
    compared = ("ARSM", *RIVALS)
    places: dict[str, list[str]] = {}
    overlap, more, shares = [], [], []
    for task, name in NAMES.items():
        medians = {each: cell(tables, task, each, "its median").mean for each in compared}
        above = sum(medians[rival] > medians["ARSM"] for rival in RIVALS)
        places.setdefault(PLACES[above], []).append(name)
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
        f"**By the median over seeds, ARSM is {placed}; the paper has it ahead everywhere. Its "
        f"range over seeds overlaps with both rivals' {_where(overlap)}, and "
        f"{_where(more, 'only ')} do more of its seeds pass than of either rival's. It plays "
        f"{listed(shares)} times the simulator steps of the costlier rival:** on LunarLander "
        f"rollouts leave it {episodes['ARSM']:.0f} episodes in {spent['ARSM']:.0f} CPU seconds, "
        f"where A2C plays {episodes['A2C']:,.0f} in {spent['A2C']:.0f}; with {_longest(tables)}."
    )


def _longest(tables: Tables) -> str:
    """How far ARSM comes on LunarLander with the most time."""
    task = "LunarLander-v3"
    numbers = {
        metric: cell(tables, task, LONGEST, metric).mean
        for metric in ("CPU seconds", "episodes", "its median")
    }
    above = all(numbers["its median"] > cell(tables, task, r, "its median").mean for r in RIVALS)
    beside = ", above both rivals'," if above else ""
    return (
        f"{numbers['CPU seconds']:,.0f} seconds it plays {numbers['episodes']:.0f} episodes, its "
        f"median is {median(tables, task, LONGEST)}{beside} and the line is passed by "
        f"{passes(tables, task, LONGEST)} seeds"
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
            for other in (*RIVALS, "ARS")
            if other in methods
        }
        for rival in RIVALS:
            if differences[rival].decided and differences[rival].mean > 0:
                less[rival].append(NAMES[task])
        words = [f"{other} {x.mean:.1f} ± {x.half:.1f}" for other, x in differences.items()]
        parts.append(f"{NAMES[task]}: {', '.join(words)}")
    decided = ", and ".join(
        f"against {rival} on {listed(where) if where else 'none'}" for rival, where in less.items()
    )
    return (
        "ln of the others' gradient variance less ARSM's (95% interval): "
        f"{'; '.join(parts)}. The paper has less for ARSM than for A2C and RELAX on all three "
        f"tasks; here that is decided {decided}."
    )


PARTS = {"answer": answer, "table": table, "variance": variance}
