"""The generated parts of results/agents/README.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any

from arsm_experiments.report.pages.tables import Cell, Part, Tables, listed, markdown, welch
from arsm_experiments.runs import lines

TASKS = (
    "FrozenLake 8x8",
    "Taxi",
    "MiniGrid-DoorKey-5x5",
    "CartPole",
    "Acrobot",
    "LunarLander",
    "Knobs, K = 4",
    "Knobs, K = 16",
    "Spread, 3 agents",
)
BRANCHING = ("RLOO(2)", "RLOO(4)", "ARSM", "ARSM, pooled")
BOTH = ("both", "both, more branches")
OWN = ("value", *BOTH, *BRANCHING)
"""This library's credits."""
RIVALS = ("PPO", "A2C", "MaskablePPO")
METHODS = (*OWN, *RIVALS)
SECONDS, STEPS = "equal CPU seconds", "equal steps"
RIVAL = "Stable-Baselines3's A2C, tuned"


Runs = dict[tuple[str, int], dict[str, dict[str, float]]]
"""Returns at both moments, by row and seed and by method."""
KINDS = ("sampled", "likeliest")
"""Actions of an evaluation."""
ENOUGH = 3
"""Seeds of a row from which on its differences are tested."""


def blocks(tables: Tables) -> Runs:
    """All rows and seeds, with the kind of action, and of a rival with the settings, that have the
    better mean over the row's seeds.
    """
    # by row, method and moment, then by settings and kind of action: returns by seed
    tried: dict[tuple[str, str, str], dict[tuple[str, str], dict[int, float]]] = {}
    for line in lines.read(tables.results / "agents/runs.jsonl.xz"):
        method = line["method"].removesuffix(", 2")
        for moment, end in ((SECONDS, line), (STEPS, line["at_steps"])):
            for kind in KINDS:
                own = tried.setdefault((line["row"], method, moment), {})
                own.setdefault((line["method"], kind), {})[line["seed"]] = end[kind]
    found: Runs = {}
    for (row, method, moment), ways in tried.items():
        for seed, reached in max(ways.values(), key=lambda x: fmean(x.values())).items():
            found.setdefault((row, seed), {}).setdefault(method, {})[moment] = reached
    return found


def seeds_of(runs: Runs, task: str) -> list[int]:
    """The seeds that a task was run with."""
    return [seed for row, seed in runs if row == task]


def over_seeds(runs: Runs, task: str, method: str, moment: str) -> Cell | None:
    """Over the seeds of a task; None where the method does not run."""
    found = [runs[task, seed].get(method) for seed in seeds_of(runs, task)]
    values = [each[moment] for each in found if each is not None]
    if not values:
        return None
    return Cell(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))


def level(cell: Cell, first: Cell) -> bool:
    """Whether there are enough seeds to test a method, and it is not decidedly behind the first."""
    return cell.seeds >= ENOUGH and not welch(first, cell).decided


def table(tables: Tables) -> str:
    """Mean returns at equal CPU seconds and at equal steps."""
    runs = blocks(tables)
    rows = []
    for task in [task for task in TASKS if seeds_of(runs, task)]:
        words: dict[str, list[str]] = {method: [] for method in METHODS}
        for moment in (SECONDS, STEPS):
            cells = {name: over_seeds(runs, task, name, moment) for name in METHODS}
            there = {name: cell for name, cell in cells.items() if cell is not None}
            first = max(there.values(), key=lambda cell: cell.mean)
            for name, cell in there.items():
                size = abs(cell.mean)
                text = f"{cell.mean:.{2 if size < 1 else 1 if size < 100 else 0}f}"
                words[name].append(f"**{text}**" if level(cell, first) else text)
        cells_of_row = ["/".join(words[method]) for method in METHODS]
        rows.append([f"{task} ({len(seeds_of(runs, task))})", *cells_of_row])
    return markdown(["", *METHODS], rows)


def beaten(runs: Runs, methods: Sequence[str], other: str, moment: str) -> tuple[int, int, float]:
    """In how many blocks the best of these methods has a higher return than the other, and a lower
    one; and the two-sided p-value of the sign test.
    """
    pairs = [
        (max(own[name][moment] for name in methods if name in own), own[other][moment])
        for own in runs.values()
        if other in own
    ]
    more, less = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    tail = sum(math.comb(more + less, k) for k in range(min(more, less) + 1))
    return more, less, min(1.0, 2 * tail / 2 ** (more + less))


def against(runs: Runs, methods: Sequence[str], other: str, moment: str) -> str:
    """Comparisons won and lost: "3 to 12 (p = 0.04)"."""
    more, less, p = beaten(runs, methods, other, moment)
    return f"{more} to {less} (p {f'= {p:.2g}' if p >= 0.001 else '< 0.001'})"


def decidedly_ahead(runs: Runs, method: str, other: str, moment: str) -> list[str]:
    """The rows with enough seeds on which a method is decidedly ahead of the other."""
    found = []
    for task in TASKS:
        first, second = (over_seeds(runs, task, name, moment) for name in (method, other))
        if first is None or second is None or min(first.seeds, second.seeds) < ENOUGH:
            continue
        gain = welch(first, second)
        if gain.decided and gain.mean > 0:
            found.append(task)
    return found


def answer(tables: Tables) -> str:
    """What branching is good for in an agent, and what not."""
    runs = blocks(tables)
    alone = {m: against(runs, ("RLOO(2)",), "value", m) for m in (SECONDS, STEPS)}
    both = {m: against(runs, ("both",), "value", m) for m in (SECONDS, STEPS)}
    spent = until_solved(tables)
    return (
        f"**Branches alone are not the better credit: against the learned value, in {len(runs)} "
        f"comparisons (a row and a seed each), `RLOO(2)` scores {alone[SECONDS]} at equal CPU "
        f"seconds and {alone[STEPS]} at equal simulator steps. As an addition to the "
        f"value they show no gain: {both[SECONDS]} and {both[STEPS]}. Where rollouts cost almost "
        "nothing they come close: on batched CartPole ARSM takes "
        f"{spent['ARSM'] / spent['value']:.1f} times the value's CPU seconds to 475.** Scores are "
        "won to lost, without ties; p is the sign test's."
    )


def in_short(tables: Tables) -> str:
    """The sentence of the guide about environments."""
    runs = blocks(tables)
    alone, both = (against(runs, (name,), "value", SECONDS) for name in ("RLOO(2)", "both"))
    return (
        f"In {len(runs)} short comparisons on {len({row for row, _ in runs})} tasks, at equal CPU "
        f"seconds, `RLOO(2)` alone scored {alone} against it, won to lost, and branches added to "
        f"it {both}."
    )


def finding(tables: Tables) -> str:
    """The default beside its rivals."""
    runs = blocks(tables)
    rivals = "; ".join(
        f"{rival} {against(runs, ('value',), rival, SECONDS)} and "
        f"{against(runs, ('value',), rival, STEPS)}"
        for rival in ("PPO", "A2C")
    )
    ahead = [
        f"{rival} on {listed(where)}"
        for rival in RIVALS
        if (where := decidedly_ahead(runs, rival, "value", SECONDS))
    ]
    return (
        "`value`, the default, against its rivals, at equal CPU seconds and at equal steps: "
        f"{rivals}. Decidedly ahead of it at equal CPU seconds: {'; '.join(ahead) or 'none'}."
    )


def overshoot(tables: Tables) -> str:
    """How far runs go beyond the limits at which they are read."""
    # by whether it is a rival: the largest shares of steps and of CPU seconds
    most = {True: [1.0, 1.0], False: [1.0, 1.0]}
    for line in lines.read(tables.results / "agents/runs.jsonl.xz"):
        own = most[line["method"].removesuffix(", 2") in RIVALS]
        own[0] = max(own[0], line["at_steps"]["steps"] / line["compared_at"])
        own[1] = max(own[1], line["cpu"] / line["seconds"])
    ours, theirs = most[False], most[True]
    return (
        "A run is read after the iteration that passes a limit: ours with up to "
        f"{ours[0]:.1f} times the steps and {ours[1] - 1:.0%} more CPU seconds, the rivals' with "
        f"{theirs[0] - 1:.0%} and {theirs[1] - 1:.0%} more."
    )


def default_rule(tables: Tables) -> str:
    """The protocol's rule for another default, applied to the rows with enough seeds."""
    runs = blocks(tables)
    rows = [task for task in TASKS if len(seeds_of(runs, task)) >= ENOUGH]
    bold = Counter[str]()
    for task in rows:
        there = {name: over_seeds(runs, task, name, SECONDS) for name in METHODS}
        cells = {name: cell for name, cell in there.items() if cell is not None}
        first = max(cells.values(), key=lambda cell: cell.mean)
        for name in [name for name in OWN if name in cells]:
            bold[name] += level(cells[name], first)
    ahead = {name: decidedly_ahead(runs, name, "value", SECONDS) for name in OWN}
    behind = {name: decidedly_ahead(runs, "value", name, SECONDS) for name in OWN}
    met = [
        name
        for name in OWN[1:]
        if bold[name] > bold["value"] and len(ahead[name]) >= 2 and not behind[name]
    ]
    others = ", ".join(f"`{name}` {bold[name]} ({len(behind[name])})" for name in OWN[1:])
    ahead_words = "; ".join(f"`{name}` on {listed(ahead[name])}" for name in OWN if ahead[name])
    end = f"names {listed(met)}" if met else "is not met: it stays `Value()`"
    return (
        f"Rows in bold at equal CPU seconds, of {len(rows)}, and decidedly behind `value`, in "
        f"brackets: `value` {bold['value']}, {others}. Decidedly ahead of `value`: "
        f"{ahead_words or 'none'}. The protocol's rule for another default (in bold on more rows, "
        f"ahead on two, behind on none) {end}."
    )


LONG = (*TASKS[:6], "LunarLander, 180 s", *TASKS[6:])
LONG_METHODS = ("the default", "PPO", "A2C", "MaskablePPO")


def long_runs(tables: Tables) -> str:
    """The earlier table; bold is not decidedly behind the first."""
    cells = tables.cells("agents/table_120.csv")
    rows = []
    for task in LONG:
        found = {}
        for method in LONG_METHODS:
            kinds = [f"return, {kind}" for kind in ("sampled", "likeliest")]
            both = [cells.get((f"{task}: {method}", kind)) for kind in kinds]
            if best := max(filter(None, both), key=lambda cell: cell.mean, default=None):
                found[method] = best
        first = max(found.values(), key=lambda cell: cell.mean)
        words = []
        for method in LONG_METHODS:
            if method not in found:
                words.append("")
                continue
            cell = found[method]
            digits = 2 if 0 <= cell.mean < 1 else 1
            text = f"{cell.mean:.{digits}f} ± {cell.std:.{digits}f} ({cell.seeds})"
            words.append(text if welch(first, cell).decided else f"**{text}**")
        rows.append([task, *words])
    return markdown(["", *LONG_METHODS], rows)


def speed_lines(tables: Tables) -> list[dict[str, Any]]:
    """The lines of `benchmarks.rl`."""
    return lines.read(tables.results / "agents/speed.jsonl.xz")


def to_the_line(tables: Tables) -> tuple[dict[str, float], dict[str, str]]:
    """Median CPU seconds until CartPole is solved, and on how many seeds it was, by method."""
    spent, solved = {}, {}
    for name in ("ARSM", RIVAL):
        own = [line for line in speed_lines(tables) if line["method"] == name]
        spent[name] = median(line["cpu"] for line in own)
        solved[name] = f"{sum(x['average'] >= x['line'] for x in own)} of {len(own)}"
    return spent, solved


def until_solved(tables: Tables) -> dict[str, float]:
    """Median CPU seconds until CartPole-v1 is solved in the table's runs, by method."""
    spent: dict[str, list[float]] = {}
    for line in lines.read(tables.results / "agents/runs.jsonl.xz"):
        if line["row"] == "CartPole":
            spent.setdefault(line["method"], []).append(min(line["solved"], default=math.inf))
    return {method: median(seconds) for method, seconds in spent.items()}


def speed(tables: Tables) -> str:
    """Seconds to solve CartPole, and steps per second of Pong's rollouts."""
    spent, solved = to_the_line(tables)
    beside = until_solved(tables)
    # one run of the command each, the last one last
    *_, last = pong_rates(tables)
    pong, emulator = last["rollouts, branched by ale"], last["the emulator alone"]
    return (
        f"CartPole-v0 averages 195 after {spent['ARSM']:.1f} CPU seconds of ARSM "
        f"({solved['ARSM']} seeds) and after {spent[RIVAL]:.1f} of Stable-Baselines3's A2C with "
        f"the zoo's settings ({solved[RIVAL]}), medians over seeds: "
        f"{spent[RIVAL] / spent['ARSM']:.1f} times as long. Branches do not explain it: in this "
        "library's batched environment and loop, which that A2C lacks, the value reaches 475 on "
        f"CartPole-v1 after {beside['value']:.1f} seconds, ARSM after {beside['ARSM']:.1f}. "
        "Rollouts of Pong (from RAM, one frame per step, environments made before) that branch by "
        f"the emulator's state play {median(pong):,.0f} steps per CPU second ({min(pong):,.0f} to "
        f"{max(pong):,.0f}, {len(pong)} times); the emulator alone {median(emulator):,.0f} "
        f"({min(emulator):,.0f} to {max(emulator):,.0f})."
    )


def pong_rates(tables: Tables) -> list[dict[str, list[float]]]:
    """Steps per CPU second of Pong with one frame per step, by run and method."""
    runs: dict[str, dict[str, list[float]]] = {}
    for line in speed_lines(tables):
        if line.get("frames") == 1:
            own = runs.setdefault(line["commit"], {})
            own.setdefault(line["method"], []).append(line["steps"] / line["cpu"])
    return list(runs.values())


PARTS: dict[str, Part] = {
    "answer": answer,
    "table": table,
    "overshoot": overshoot,
    "finding": finding,
    "speed": speed,
}
HISTORY_PARTS: dict[str, Part] = {"default": default_rule, "long": long_runs}
