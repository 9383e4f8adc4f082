"""The generated parts of results/agents/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, markdown, welch

TASKS = (
    "FrozenLake 8x8",
    "Taxi",
    "MiniGrid-DoorKey-5x5",
    "CartPole",
    "Acrobot",
    "LunarLander",
    "LunarLander, 180 s",
    "Knobs, K = 4",
    "Knobs, K = 16",
    "Spread, 3 agents",
)
METHODS = ("the default", "PPO", "A2C", "MaskablePPO")


def best(tables: Tables, task: str, method: str) -> Cell | None:
    """The return with sampled or with the likeliest actions, whichever is higher."""
    found = [
        tables.find("agents", f"{task}: {method}", f"return, {kind}")
        for kind in ("sampled", "likeliest")
    ]
    return max(filter(None, found), key=lambda cell: cell.mean, default=None)


def ranked(tables: Tables, task: str) -> tuple[dict[str, Cell], list[str]]:
    """The methods of a task, and those that are first or not decidedly behind the first."""
    found = {method: cell for method in METHODS if (cell := best(tables, task, method))}
    first = max(found.values(), key=lambda cell: cell.mean)
    return found, [name for name in found if not welch(first, found[name]).decided]


def table(tables: Tables) -> str:
    """Returns; bold is not decidedly behind the first."""
    rows = []
    for task in TASKS:
        found, level = ranked(tables, task)
        cells = []
        for method in METHODS:
            if method not in found:
                cells.append("")
                continue
            cell = found[method]
            digits = 2 if 0 <= cell.mean < 1 else 1
            words = f"{cell.mean:.{digits}f} ± {cell.std:.{digits}f} ({cell.seeds})"
            cells.append(f"**{words}**" if method in level else words)
        rows.append([task, *cells])
    return markdown(["", *METHODS], rows)


def finding(tables: Tables) -> str:
    """On how many tasks each method is not decidedly behind the first."""
    counts = {
        method: sum(method in ranked(tables, task)[1] for task in TASKS) for method in METHODS[:3]
    }
    alone = [task for task in TASKS if ranked(tables, task)[1] == ["the default"]]
    return (
        f"**The default is first, or not decidedly behind the first, on {counts['the default']} of "
        f"the {len(TASKS)} rows, PPO on {counts['PPO']} and A2C on {counts['A2C']}; it is alone in "
        f"front on {len(alone)}: {', '.join(alone)}.** Decided means that Welch's 95% interval of "
        "the difference leaves out 0, which five seeds rarely do."
    )


PARTS = {"table": table, "finding": finding}
