"""The generated parts of the pages of results/maximize."""

from __future__ import annotations

import re
import statistics
from collections import Counter
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
SPOKEN = {"schedule": "schedules", "architecture": "architectures"}
"""Families as sentences name them, where the table's name does not read well."""
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


def answer(tables: Tables) -> str:
    """The families on which `arsm.maximize` leads, and what is undecided."""
    outcomes = _outcomes(_runs(tables))
    led = [
        SPOKEN.get(family, family)
        for family in DECIMALS
        if all(outcomes[rival, family] == "ahead" for rival in RIVALS)
    ]
    level = [
        SPOKEN.get(family, family)
        for family in DECIMALS
        if outcomes["CatCMA", family] == "undecided"
    ]
    counts = Counter(outcomes.values())
    return (
        f"**Finding.** **`arsm.maximize` is ahead of all its main rivals on {listed(led)} alone. "
        f"Against CatCMA the result is undecided on {listed(level)}.** Of {len(outcomes)} "
        f"comparisons with {listed([METHODS[rival] for rival in RIVALS])}, it is ahead in "
        f"{counts['ahead']}, behind in {counts['behind']} and undecided in {counts['undecided']}."
    )


def details(tables: Tables) -> str:
    """Differences instance by instance, and seconds."""
    runs = _runs(tables)
    told = []
    for rival in RIVALS:
        words = []
        for family, decimals in DECIMALS.items():
            mean, ahead = gain(runs, rival, family)
            words.append(f"{family} {mean.mean:+.{decimals}f} ± {mean.half:.{decimals}f} ({ahead})")
        told.append(f"- **{METHODS[rival]}**: {listed(words)}.")
    seconds = [f"{METHODS[method]} {_seconds(runs, method)}" for method in (OURS, *RIVALS)]
    told += [
        f"- **Undecided**: {_undecided(runs)}.",
        f"- **CPU seconds per run** on {listed(CHEAP)}: {listed(seconds)}.",
    ]
    return "\n".join(told)


def _outcomes(runs: Runs) -> dict[tuple[str, str], str]:
    """Whether `arsm.maximize` is ahead of a rival on a family, behind, or neither."""
    found: dict[tuple[str, str], str] = {}
    for rival in RIVALS:
        for family in DECIMALS:
            mean, _ = gain(runs, rival, family)
            outcome = "ahead" if mean.mean > 0 else "behind"
            if abs(mean.mean) <= mean.half:
                outcome = "undecided"
            found[rival, family] = outcome
    return found


def gain(runs: Runs, rival: str, family: str) -> tuple[Cell, int]:
    """Best values of `arsm.maximize` less a rival's over the instances, and on how many it is
    ahead.
    """
    ours, theirs = (runs[method, family] for method in (OURS, rival))
    gains = [ours[n]["best"] - theirs[n]["best"] for n in sorted(ours.keys() & theirs)]
    mean = Cell(statistics.mean(gains), statistics.stdev(gains), len(gains))
    return mean, sum(gain > 0 for gain in gains)


def _undecided(runs: Runs) -> str:
    """The rivals that cannot be told apart from `arsm.maximize`, by family."""
    level: dict[str, list[str]] = {}
    for (rival, family), outcome in _outcomes(runs).items():
        if outcome == "undecided":
            level.setdefault(family, []).append(METHODS[rival])
    return "; ".join(f"{family} against {listed(rivals)}" for family, rivals in level.items())


def stopped(tables: Tables) -> str:
    """The runs that were stopped for repeating themselves, by method and family."""
    runs = _runs(tables)
    parts = []
    for method, name in METHODS.items():
        words = []
        for family in DECIMALS:
            whole = list(runs[method, family].values())
            ended = sorted(int(x["evaluations"]) for x in whole if x["evaluations"] < x["budget"])
            if ended:
                count = "all" if len(ended) == len(whole) else f"{len(ended)}"
                ends = f"{ended[0]:,} to {ended[-1]:,}" if len(ended) > 1 else f"{ended[0]:,}"
                words.append(f"{count} on {family} ({ends})")
        if words:
            parts.append(f"{name.partition(', 16 neighbours')[0]}, {listed(words)}")
    return (
        "A run that has asked for 6,000 points, repeats included, is stopped. This ended runs "
        f"before 2,000 evaluations: {'; '.join(parts)}."
    )


def _runs(tables: Tables) -> Runs:
    found: Runs = {}
    for run in lines.read(tables.results / "maximize/runs.jsonl.xz"):
        own = found.setdefault((run["method"], run["family"]), {})
        own[run["instance"]] = {
            name: run[name] for name in ("best", "seconds", "evaluations", "budget")
        }
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


PARTS: dict[str, Callable[[Tables], str]] = {"answer": answer, "table": table, "details": details}
HISTORY_PARTS: dict[str, Callable[[Tables], str]] = {"stopped": stopped, "processes": processes}
