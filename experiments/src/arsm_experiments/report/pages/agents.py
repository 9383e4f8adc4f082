"""The generated parts of results/agents/README.md and results/agents/HISTORY.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

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
SHOWN = ("value", "both", "RLOO(2)", "ARSM", "PPO", "A2C")
"""Columns of the page's table; HISTORY.md has all."""
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


def returns(runs: Runs, task: str, moment: str) -> dict[str, str]:
    """Mean returns of a task by method, in bold if not decidedly behind the first."""
    cells = {name: over_seeds(runs, task, name, moment) for name in METHODS}
    there = {name: cell for name, cell in cells.items() if cell is not None}
    first = max(there.values(), key=lambda cell: cell.mean)
    words = {}
    for name, cell in there.items():
        size = abs(cell.mean)
        text = f"{cell.mean:.{2 if size < 1 else 1 if size < 100 else 0}f}"
        words[name] = f"**{text}**" if level(cell, first) else text
    return words


def tasks_of(runs: Runs) -> list[str]:
    """The tasks that were run, in the table's order."""
    return [task for task in TASKS if seeds_of(runs, task)]


def table(tables: Tables) -> str:
    """Mean returns of the main methods at equal CPU seconds."""
    runs = blocks(tables)
    rows = []
    for task in tasks_of(runs):
        words = returns(runs, task, SECONDS)
        rows.append([task, *(words.get(method, "") for method in SHOWN)])
    return markdown(["", *SHOWN], rows)


def every_method(tables: Tables) -> str:
    """Mean returns of all methods at equal CPU seconds and at equal steps."""
    runs = blocks(tables)
    rows = []
    for task in tasks_of(runs):
        words = [returns(runs, task, moment) for moment in (SECONDS, STEPS)]
        cells = ["/".join(each[name] for each in words if name in each) for name in METHODS]
        rows.append([f"{task} ({len(seeds_of(runs, task))})", *cells])
    return markdown(["", *METHODS], rows)


class Score(NamedTuple):
    """Blocks in which a method has the higher return, and the lower one, than another."""

    won: int
    lost: int

    @property
    def p(self) -> float:
        """Two-sided p-value of the sign test."""
        blocks = self.won + self.lost
        tail = sum(math.comb(blocks, k) for k in range(min(self) + 1))
        return min(1.0, 2 * tail / 2**blocks)

    @property
    def decided(self) -> bool:
        """Whether the sign test's p-value is below 5%."""
        return self.p < 0.05

    @property
    def p_text(self) -> str:
        """The p-value in words."""
        return f"p = {self.p:.2g}" if self.p >= 0.001 else "p < 0.001"

    @property
    def text(self) -> str:
        """Comparisons won and lost: "3 to 12 (p = 0.04)"."""
        return f"{self.won} to {self.lost} ({self.p_text})"


def beaten(runs: Runs, method: str, other: str, moment: str) -> Score:
    """A method's score against another, over all blocks that have both."""
    pairs = [
        (own[method][moment], own[other][moment])
        for own in runs.values()
        if method in own and other in own
    ]
    return Score(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))


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


def finding(tables: Tables) -> str:
    """The value beside branches, alone and in addition."""
    runs = blocks(tables)
    alone = {moment: beaten(runs, "RLOO(2)", "value", moment) for moment in (SECONDS, STEPS)}
    both = beaten(runs, "both", "value", SECONDS)
    spent = until_solved(tables)
    return (
        f"**Finding.** **In short runs the learned value {_against_branches(list(alone.values()))}:"
        f" of {len(runs)} comparisons `RLOO(2)` wins {alone[SECONDS].won} and loses "
        f"{alone[SECONDS].lost} at equal CPU seconds, and wins {alone[STEPS].won} and loses "
        f"{alone[STEPS].lost} at equal simulator steps.** Branches added to the value win "
        f"{both.won} and lose {both.lost}{'' if both.decided else ' (undecided)'}. On batched "
        "CartPole, where rollouts cost almost nothing, ARSM takes "
        f"{spent['ARSM'] / spent['value']:.1f} times the value's CPU seconds to solve it."
    )


def _against_branches(branches: Sequence[Score]) -> str:
    """The value's verdict against branches alone."""
    if all(score.decided and score.won < score.lost for score in branches):
        return "beats branches alone"
    if all(score.decided and score.won > score.lost for score in branches):
        return "is worse than branches alone"
    return "is not decidedly better than branches alone"


def in_short(tables: Tables) -> str:
    """The sentence of the guide about environments."""
    runs = blocks(tables)
    alone, both = (beaten(runs, name, "value", SECONDS).text for name in ("RLOO(2)", "both"))
    return (
        f"In {len(runs)} short comparisons on {len({row for row, _ in runs})} tasks, at equal CPU "
        f"seconds, `RLOO(2)` alone scored {alone} against it, won to lost, and branches added to "
        f"it {both}."
    )


def details(tables: Tables) -> str:
    """Scores of the value, its branches and its rivals, and the tasks on which it is behind."""
    runs = blocks(tables)
    pairs = [("RLOO(2)", "value"), ("both", "value"), ("value", "PPO"), ("value", "A2C")]
    bullets = [
        *(_scores(runs, method, other) for method, other in pairs),
        *(_ahead(runs, moment) for moment in (SECONDS, STEPS)),
    ]
    return "\n".join(f"- {bullet}" for bullet in bullets)


def _scores(runs: Runs, method: str, other: str) -> str:
    """A method's scores against another at both moments."""
    seconds, steps = (beaten(runs, method, other, moment).text for moment in (SECONDS, STEPS))
    return f"`{method}` against `{other}`: {seconds}, and {steps}."


def in_a_sentence(task: str) -> str:
    """A task's name without a comma: "Knobs (K = 4)"."""
    name, _, size = task.partition(", ")
    return f"{name} ({size})" if size else name


def _ahead(runs: Runs, moment: str) -> str:
    """The tasks on which a rival is decidedly ahead of the value."""
    ahead = [
        f"{rival} on {listed([in_a_sentence(task) for task in where])}"
        for rival in RIVALS
        if (where := decidedly_ahead(runs, rival, "value", moment))
    ]
    return f"Rivals decidedly ahead of `value` at {moment}: {'; '.join(ahead) or 'none'}."


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
        "- Exactly equal costs: a run is read after the iteration that passes a limit, ours with "
        f"up to {ours[0]:.1f} times the steps and {ours[1] - 1:.0%} more CPU seconds, the rivals' "
        f"with {theirs[0] - 1:.0%} and {theirs[1] - 1:.0%} more."
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
    """Seconds to solve CartPole."""
    spent, solved = to_the_line(tables)
    beside = until_solved(tables)
    return (
        f"- ARSM averages 195 on CartPole-v0 after {spent['ARSM']:.1f} CPU seconds "
        f"(median; {solved['ARSM']} seeds). Stable-Baselines3's A2C with the zoo's settings takes "
        f"{spent[RIVAL]:.1f} ({solved[RIVAL]}), {spent[RIVAL] / spent['ARSM']:.1f} times as long.\n"
        "- Branches do not explain it. In this library's batched environment and loop, which "
        "that A2C lacks, the value reaches 475 on CartPole-v1 after "
        f"{beside['value']:.1f} CPU seconds, ARSM after {beside['ARSM']:.1f}."
    )


def pong(tables: Tables) -> str:
    """Steps per second of Pong's rollouts."""
    # one run of the command each, the last one last
    *_, last = pong_rates(tables)
    rollouts, emulator = last["rollouts, branched by ale"], last["the emulator alone"]
    return (
        "Rollouts of Pong (from RAM, one frame per step, environments made before) that branch by "
        f"the emulator's state play {median(rollouts):,.0f} steps per CPU second "
        f"({min(rollouts):,.0f} to {max(rollouts):,.0f}, {len(rollouts)} times). The emulator "
        f"alone plays {median(emulator):,.0f} ({min(emulator):,.0f} to {max(emulator):,.0f})."
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
    "finding": finding,
    "table": table,
    "details": details,
    "speed": speed,
    "overshoot": overshoot,
}
HISTORY_PARTS: dict[str, Part] = {
    "every": every_method,
    "default": default_rule,
    "long": long_runs,
    "pong": pong,
}
