"""The generated parts of results/control/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, markdown, welch

SPREAD = ", schedule linear, episodes an iteration {}, reward scale 0.01{}, common random numbers"
WIDE = f"arsm, adam 0.003, budget 32{SPREAD.format(8, ', hidden 64 64')}"
LANDER = ", reward scale 0.01, entropy 0.01"
LINEAR = "arsm, rmsprop 0.05, budget 256, episodes an iteration 2, entropy 0.1, hidden none"
ROWS = {
    "CartPole-v0": {
        "ARSM": "arsm, rmsprop 0.03",
        "RELAX": "relax, adam 0.003, entropy 0.01",
        "A2C": "a2c, adam 0.03, entropy 0.01",
        "A2C, not from the grid": "a2c, adam 0.01",
    },
    "Acrobot-v1": {
        "ARSM": "arsm, adam 0.01, entropy 0.01",
        "A2C": "a2c, rmsprop 0.01, entropy 0.01",
        "REINFORCE with a value baseline": "reinforce, rmsprop 0.003, entropy 0.01",
        "RELAX": "relax, adam 0.01, entropy 0.01",
        "ARSM, 32 units, 256 rollouts": "arsm, adam 0.01, budget 256, entropy 0.01, hidden 32",
        "ARSM, linear policy, 2 x 256 rollouts": LINEAR,
    },
    "LunarLander-v3": {
        "A2C": f"a2c, adam 0.003{LANDER}",
        "RELAX": f"relax, rmsprop 0.01{LANDER}",
        "ARSM, 4 x 64 rollouts": f"arsm, adam 0.03, budget 64{SPREAD.format(4, '')}",
        "ARSM, 8 x 32 rollouts": f"arsm, adam 0.02, budget 32{SPREAD.format(8, '')}",
        "ARSM, 8 x 32 rollouts, 64 and 64 units": WIDE,
    },
}
NAMES = {"CartPole-v0": "CartPole", "Acrobot-v1": "Acrobot", "LunarLander-v3": "LunarLander"}


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


def table(tables: Tables) -> str:
    """Final averages, seeds at the line and cost of every method."""
    rows = []
    for task, methods in ROWS.items():
        for place, method in enumerate(methods):
            seeds = cell(tables, task, method, "final average").seeds
            solved = cell(tables, task, method, "seeds at the line").mean
            seconds = tables.find(
                "control", f"{task}: {methods[method]}", "CPU seconds to the line"
            )
            rows.append(
                [
                    NAMES[task] if place == 0 else "",
                    method,
                    median(tables, task, method),
                    f"{solved:.0f} of {seeds}",
                    f"{cell(tables, task, method, 'simulator steps').mean / 1e6:.2g}",
                    "" if seconds is None else f"{seconds.mean:,.0f}",
                    f"{cell(tables, task, method, 'log variance').mean:.1f}",
                ]
            )
    header = ["", "", "final average: median (10th to 90th percentile)", "seeds that pass"]
    header += ["million steps", "CPU seconds to the line, mean", "ln variance"]
    return markdown(header, rows)


def finding(tables: Tables) -> str:
    """ARSM with the paper's network and budget beside its rivals."""
    passes = {
        task: ", ".join(
            f"{method} {cell(tables, task, method, 'seeds at the line').mean:.0f}"
            for method in ("ARSM", "RELAX", "A2C")
        )
        for task in ("CartPole-v0", "Acrobot-v1")
    }
    steps = {
        task: cell(tables, task, "ARSM", "simulator steps").mean
        / max(
            cell(tables, task, method, "simulator steps").mean
            for method in ROWS[task]
            if "ARSM" not in method
        )
        for task in passes
    }
    wide = "ARSM, 8 x 32 rollouts, 64 and 64 units"
    return (
        "**Seeds of ten that pass the completion line with the paper's network and budget: on "
        f"CartPole {passes['CartPole-v0']}; on Acrobot {passes['Acrobot-v1']}. ARSM "
        f"plays at least {steps['CartPole-v0']:.0f} and {steps['Acrobot-v1']:.0f} times the "
        "simulator steps of its rivals.** On LunarLander no setting with the paper's network "
        "has a median above 200; with 64 and 64 units the median of three seeds is "
        f"{median(tables, 'LunarLander-v3', wide)}. That setting is the best of three on these "
        "same seeds, its rivals have one setting each, and fewer episodes."
    )


def variance(tables: Tables) -> str:
    """Where ARSM's gradient has less variance than its rivals', and where not."""
    plain = dict.fromkeys(NAMES, "ARSM") | {"LunarLander-v3": "ARSM, 4 x 64 rollouts"}
    parts = []
    for task, method in plain.items():
        own = cell(tables, task, method, "log variance")
        lower = {
            rival: welch(cell(tables, task, rival, "log variance"), own)
            for rival in ("A2C", "RELAX")
        }
        words = ", ".join(f"{rival} {x.mean:.1f} ± {x.half:.1f}" for rival, x in lower.items())
        parts.append(f"{NAMES[task]}: {words}")
    return (
        "The rivals' ln variance, averaged over the run, less ARSM's (95% interval): "
        + "; ".join(parts)
        + "."
    )


PARTS = {"table": table, "finding": finding, "variance": variance}
