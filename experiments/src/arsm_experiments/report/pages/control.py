"""The generated parts of results/control/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, welch

LANDER = ", reward scale 0.01"
CHOSEN = f"rmsprop 0.01{LANDER}, 400 CPU seconds"
"""The choice of ARSM's grid on LunarLander."""
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
        "ARSM": f"arsm, {CHOSEN}",
        "ARS": f"ars, {CHOSEN}",
        "RELAX": f"relax, rmsprop 0.01{LANDER}, entropy 0.01",
        "A2C": f"a2c, adam 0.003{LANDER}, entropy 0.01",
    },
}
NAMES = {"CartPole-v0": "CartPole", "Acrobot-v1": "Acrobot", "LunarLander-v3": "LunarLander"}
RIVALS = ("RELAX", "A2C")


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
                    f"{cell(tables, task, method, 'simulator steps').mean / 1e6:.2g}",
                    f"{cell(tables, task, method, 'CPU seconds').mean:,.0f}",
                    "" if seconds is None else f"{seconds.mean:,.0f}",
                    f"{cell(tables, task, method, 'log variance').mean:.1f}",
                ]
            )
    header = ["", "", "final average: median (10th to 90th percentile)", "seeds that pass"]
    header += ["episodes", "million steps", "CPU seconds", "to the line", "ln variance"]
    return markdown(header, rows)


def finding(tables: Tables) -> str:
    """The branching methods beside their rivals on each task."""
    counts, shares = [], []
    for task, methods in ROWS.items():
        compared = [name for name in methods if name in ("ARSM", "ARS", *RIVALS)]
        words = ", ".join(f"{name} {passes(tables, task, name)}" for name in compared)
        counts.append(f"on {NAMES[task]} {words}")
        steps = {name: cell(tables, task, name, "simulator steps").mean for name in compared}
        shares.append(f"{steps['ARSM'] / max(steps[name] for name in RIVALS):.2g}")
    task = "LunarLander-v3"
    medians = ", ".join(f"{name} {median(tables, task, name)}" for name in ROWS[task])
    spent = {name: cell(tables, task, name, "CPU seconds").mean for name in ROWS[task]}
    episodes = {name: cell(tables, task, name, "episodes").mean for name in ROWS[task]}
    return (
        f"**Seeds that pass the completion line: {'; '.join(counts)}. ARSM plays at least "
        f"{listed(shares)} times the simulator steps of its rivals.** Medians on LunarLander: "
        f"{medians}; its rollouts leave ARSM {episodes['ARSM']:.0f} episodes in "
        f"{spent['ARSM']:.0f} CPU seconds, where A2C plays {episodes['A2C']:,.0f} in "
        f"{spent['A2C']:.0f}."
    )


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
        "ln variance of the others, averaged over the run, less ARSM's (95% interval): "
        f"{'; '.join(parts)}. The paper has less for ARSM than for A2C and RELAX on all three "
        f"tasks; here that is decided {decided}."
    )


PARTS = {"table": table, "finding": finding, "variance": variance}
