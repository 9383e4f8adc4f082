"""The generated parts of results/maximize/README.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown
from arsm_experiments.runs import lines

OURS = "arsm.maximize"
METHODS = {
    OURS: "`arsm.maximize`",
    "CatCMA": "CatCMA",
    "CatCMA without a cache": "CatCMA without a cache",
    "annealing, speculative": "annealing, one chain, 16 neighbours at a time",
    "annealing, 16 chains": "annealing, 16 chains",
    "nevergrad (1+1)": "nevergrad (1+1)",
    "nevergrad NGOpt": "nevergrad NGOpt",
    "Optuna TPE": "Optuna's TPE",
    "random search": "random search",
}
RIVALS = ("CatCMA", "nevergrad (1+1)", "nevergrad NGOpt", "Optuna TPE")
"""Those that `arsm.maximize` is compared with instance by instance."""
DECIMALS = {"QUBO": 1, "schedule": 1, "MAX-SAT": 1, "architecture": 2}
CHEAP = ("QUBO", "schedule", "MAX-SAT")
"""Families whose f takes hardly any time."""
BEST = "best value after 2,000 evaluations"

Runs = dict[tuple[str, str], dict[int, dict[str, float]]]
"""runs[method, family][instance], each with its best value and CPU seconds."""


def table(tables: Tables) -> str:
    """The mean best value of every method; the best is bold."""
    rows = {
        method: [
            f"{tables.cell('maximize', f'{family}: {method}', BEST).mean:.{decimals}f}"
            for family, decimals in DECIMALS.items()
        ]
        for method in METHODS
    }
    best = [max(column, key=float) for column in zip(*rows.values(), strict=True)]
    marked = [
        [METHODS[method], *(f"**{x}**" if x == b else x for x, b in zip(own, best, strict=True))]
        for method, own in rows.items()
    ]
    return markdown(["", *DECIMALS], marked)


def finding(tables: Tables) -> str:
    """Differences instance by instance, and seconds."""
    runs = _runs(tables)
    told = ["`arsm.maximize` less its rivals, instance by instance, with 95% intervals:", ""]
    for rival in RIVALS:
        words = []
        for family, decimals in DECIMALS.items():
            ours, theirs = (runs[method, family] for method in (OURS, rival))
            gains = [ours[n]["best"] - theirs[n]["best"] for n in sorted(ours.keys() & theirs)]
            mean = Cell(statistics.mean(gains), statistics.stdev(gains), len(gains))
            ahead = sum(gain > 0 for gain in gains)
            words.append(
                f"{family} {mean.mean:+.{decimals}f} ± {mean.half:.{decimals}f} "
                f"(ahead on {ahead} of {len(gains)})"
            )
        told.append(f"- {METHODS[rival]}: {listed(words)}.")
    told.append(
        "- CPU seconds per run on QUBO, schedules and MAX-SAT: "
        + listed([f"{METHODS[method]} {_seconds(runs, method)}" for method in (OURS, *RIVALS)])
        + "."
    )
    return "\n".join(told)


def _runs(tables: Tables) -> Runs:
    found: Runs = {}
    for run in lines.read(tables.results / "maximize/runs.jsonl.xz"):
        own = found.setdefault((run["method"], run["family"]), {})
        own[run["instance"]] = {"best": run["best"], "seconds": run["seconds"]}
    return found


def _seconds(runs: Runs, method: str) -> str:
    """The range of the means over instances."""
    means = [
        statistics.mean(run["seconds"] for run in runs[method, family].values()) for family in CHEAP
    ]
    decimals = 0 if min(means) >= 10 else 1
    return f"{min(means):.{decimals}f} to {max(means):.{decimals}f}"


def processes(tables: Tables) -> str:
    """The table of processes.txt."""
    text = (tables.results / "maximize/processes.txt").read_text()
    found = re.findall(r"^(in this process|\d+ process\w*) +(.*?s) +([\d.]+)$", text, re.MULTILINE)
    rows = [[way if way[0] == "i" else f"in {way}", time, times] for way, time, times in found]
    return markdown(["f runs", "time", "times faster"], rows)


PARTS: dict[str, Callable[[Tables], str]] = {
    "table": table,
    "finding": finding,
    "processes": processes,
}
