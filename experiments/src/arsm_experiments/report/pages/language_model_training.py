"""Training in results/language_model/README.md: its table and its findings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown

RESULT = r"(\w+), all seeds: (.*), rate (\S+)"
FINAL = "final accuracy"
TABLE = "language_model/table.csv"
OURS = ("branch", "branch, 4 epochs")
"""Methods that branch."""
ENDS = (", lower end", ", upper end")
AHEAD, UNDECIDED, BEHIND = "ahead", "undecided", "behind"
STANDINGS = {AHEAD: "ahead of", UNDECIDED: "level with", BEHIND: "behind"}
"""How a comparison with a rival ends, and the words before the rival's name."""
NAMES = {"chain": "sums", "countdown": "countdown", "translate": "translation"}
"""Tasks as the page calls them."""
SHOWN = 5
"""Methods of the page's table."""
TOKENS_TARGET, SECONDS_TARGET = 1 / 3, 1 / 2
"""Shares of the best rival's tokens and seconds that the protocol aims at."""


class Result(NamedTuple):
    """What the seeds of one task say of a method."""

    method: str
    rate: str
    values: dict[str, Cell]

    @property
    def final(self) -> Cell:
        return self.values[FINAL]

    @property
    def seconds(self) -> float:
        """Learning seconds until the end."""
        return self.values["learning seconds"].mean

    def less(self, rival: str) -> tuple[float, float, float]:
        """The difference to a rival, and the ends of its interval."""
        mean, low, high = (self.values[f"less {rival}{end}"].mean for end in ("", *ENDS))
        return mean, low, high

    def standing(self, rival: str) -> str:
        """One of `STANDINGS`."""
        _, low, high = self.less(rival)
        if low > 0:
            return AHEAD
        return BEHIND if high < 0 else UNDECIDED

    def told(self, rival: str) -> str:
        """A sentence with the difference to a rival and its interval."""
        return f"`{self.method}` is {self.standing(rival)}: {self.gap(rival)}."

    def gap(self, rival: str) -> str:
        """The difference to a rival with its interval."""
        mean, low, high = self.less(rival)
        return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"

    def spent(self, what: str, rival: str) -> float | None:
        """Tokens or seconds to a rival's final accuracy; None if it is not reached."""
        found = self.values.get(f"{what} to {rival}")
        return None if found is None else found.mean

    @property
    def rivals(self) -> list[str]:
        """The best rival, then the best one without a value model if that is another."""
        listed = [metric.removeprefix("less ") for metric in self.values if "less " in metric]
        return [name for name in listed if not name.endswith(ENDS)]


def results(tables: Tables) -> dict[str, list[Result]]:
    """By task, in the order of the table."""
    found: dict[str, dict[str, Result]] = {}
    for (row, metric), cell in tables.cells(TABLE).items():
        matched = re.fullmatch(RESULT, row)
        if matched is not None:
            task, method, rate = matched.groups()
            own = found.setdefault(task, {}).setdefault(method, Result(method, rate, {}))
            own.values[metric] = cell
    return {task: list(methods.values()) for task, methods in found.items()}


def training(tables: Tables) -> str:
    """The best methods."""
    return _rewards(results(tables), most=SHOWN)


def all_methods(tables: Tables) -> str:
    """Every method."""
    return _rewards(results(tables))


def _rewards(found: Mapping[str, list[Result]], most: int | None = None) -> str:
    """Final rewards and seconds, methods by tasks; the best of the first task come first."""
    by_name = [{row.method: row for row in rows} for rows in found.values()]
    methods = list(dict.fromkeys(row.method for rows in found.values() for row in rows))
    first = by_name[0]
    methods.sort(key=lambda method: -first[method].final.mean if method in first else math.inf)
    lines = []
    for method in methods[:most]:
        cells = [_reward_and_seconds(rows.get(method), rows) for rows in by_name]
        lines.append([method, *itertools.chain.from_iterable(cells)])
    heads = [(_name(task), "seconds") for task in found]
    return markdown(["", *itertools.chain.from_iterable(heads)], lines)


def _reward_and_seconds(row: Result | None, rows: Mapping[str, Result]) -> tuple[str, str]:
    """Two cells; the reward is bold unless it is decidedly below the best rival's."""
    if row is None:
        return "-", "-"
    rival = best(list(rows.values()))
    reward = f"{row.final.mean:.3f}±{row.final.std:.3f}"
    bold = row.standing(rival.method) != BEHIND
    return f"**{reward}**" if bold else reward, f"{row.seconds:.0f}"


def best(rows: list[Result]) -> Result:
    """The rival with the highest mean final accuracy."""
    return max((row for row in rows if row.method not in OURS), key=lambda row: row.final.mean)


def leading(rows: list[Result]) -> Result:
    """The form of branching with the highest mean final accuracy."""
    return max((row for row in rows if row.method in OURS), key=lambda row: row.final.mean)


def finding(tables: Tables) -> str:
    """The better form of branching beside the best rivals, and its share of their seconds."""
    found = results(tables)
    shares = {
        task: _fraction(leading(rows).seconds / best(rows).seconds) for task, rows in found.items()
    }
    told = [f"{share} of its seconds on {_name(task)}" for task, share in shares.items()]
    first, *others = _standings(found).items()
    parts = [f"{_told(*first)}, after {listed(told)}"]
    parts += [_told(*each) for each in others]
    return (
        "Trained on equal tokens, the better of two forms of branching ends "
        f"{'; it is '.join(parts)}."
    )


def _standings(found: Mapping[str, list[Result]]) -> dict[str, dict[str, list[str]]]:
    """Tasks by rival and by how the better form of branching stands to it."""
    standings: dict[str, dict[str, list[str]]] = {}
    for task, rows in found.items():
        ours = leading(rows)
        for rival in best(rows).rivals:
            of_rival = standings.setdefault(rival, {})
            of_rival.setdefault(ours.standing(rival), []).append(_name(task))
    return standings


def _told(rival: str, tasks: Mapping[str, Sequence[str]]) -> str:
    """A comparison with one rival: "ahead of GRPO on countdown, undecided on translation"."""
    if len(tasks) == 1:
        (standing,) = tasks
        unsure = " (undecided)" if standing == UNDECIDED else ""
        return f"{STANDINGS[standing]} {_short(rival)}{unsure}"
    words = STANDINGS | {UNDECIDED: "undecided against"}
    first, *others = (standing for standing in STANDINGS if standing in tasks)
    told = [f"{words[first]} {_short(rival)} on {listed(tasks[first])}"]
    told += [f"{standing} on {listed(tasks[standing])}" for standing in others]
    return ", ".join(told)


def _name(task: str) -> str:
    """The task as the page calls it."""
    return NAMES.get(task, task)


def _short(method: str) -> str:
    """The name of a method without its number of steps: PPO, GRPO."""
    return method.partition(",")[0].upper()


def _fraction(share: float) -> str:
    """A share in words, if one is near."""
    words = {1: "all", 2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth"}
    near = words.get(round(1 / share))
    return near if near and abs(share * round(1 / share) - 1) < 0.1 else f"{share:.2f}"


def in_short(tables: Tables) -> list[str]:
    """The better form of branching beside each rival, and whether the protocol's target is met."""
    found = results(tables)
    rivals = list(_standings(found))
    return [*(_gaps(rival, found) for rival in rivals), _target(found)]


def _gaps(rival: str, found: Mapping[str, list[Result]]) -> str:
    """The better form of branching less one rival by task, and other forms that are behind."""
    compared = {task: rows for task, rows in found.items() if rival in best(rows).rivals}
    told = [f"{leading(rows).gap(rival)} on {_name(task)}" for task, rows in compared.items()]
    behind = [
        f" On {_name(task)}, `{row.method}` is behind it: {row.gap(rival)}."
        for task, rows in compared.items()
        for row in rows
        if row.method in OURS and row is not leading(rows) and row.standing(rival) == BEHIND
    ]
    return f"**The better form less `{rival}`**: {listed(told)}.{''.join(behind)}"


def differences(tables: Tables) -> str:
    """A comparison for each task and rival."""
    found = results(tables)
    told = []
    for task, rows in found.items():
        told.append(_beside_best(task, rows))
        told += [_beside(task, rows, name) for name in best(rows).rivals[1:]]
    return "\n".join(f"- {each}" for each in told)


def _beside_best(task: str, rows: list[Result]) -> str:
    """All forms of branching less the best rival, and where it stands when the better one ends."""
    rival, ours = best(rows), leading(rows)
    gaps = [row.told(rival.method) for row in rows if row.method in OURS]
    then = rival.values[f"when {ours.method} ends"].mean
    return (
        f"**{_name(task).capitalize()}, less `{rival.method}`.** {' '.join(gaps)} When "
        f"`{ours.method}` ends, after {ours.seconds:.0f} s, `{rival.method}` is at {then:.3f}; it "
        f"ends after {rival.seconds:.0f} s."
    )


def _beside(task: str, rows: list[Result], name: str) -> str:
    """The better form of branching less a rival, and what it needs to the rival's reward."""
    ours = leading(rows)
    (rival,) = (row for row in rows if row.method == name)
    first = best(rows)
    shares = _shares(first, rival)
    theirs = f" `{first.method}` needs {shares[0]:.2f} of these tokens." if shares else ""
    return (
        f"**{_name(task).capitalize()}, less `{name}`**, the best without a value model. "
        f"{ours.told(name)}{_reached(ours, rival)}{theirs}"
    )


def _reached(row: Result, rival: Result) -> str:
    """The shares of a rival's tokens and seconds that a method needs to its final reward."""
    shares = _shares(row, rival)
    if shares is None:
        return ""
    tokens, seconds = shares
    return (
        f" It needs {tokens:.2f} of that method's tokens and {seconds:.2f} of its seconds to reach "
        "its final reward."
    )


def _shares(row: Result, rival: Result) -> tuple[float, float] | None:
    """Tokens and seconds to a rival's final reward relative to the rival's; None if it is not
    reached.
    """
    tokens, seconds = (_share(row, rival, what) for what in ("tokens", "seconds"))
    return None if tokens is None or seconds is None else (tokens, seconds)


def _share(row: Result, rival: Result, what: str) -> float | None:
    ours, theirs = row.spent(what, rival.method), rival.spent(what, rival.method)
    return None if ours is None or not theirs else ours / theirs


def _target(found: Mapping[str, list[Result]]) -> str:
    """The protocol's target for the training, by task."""
    tasks: dict[str, list[str]] = {}
    for task, rows in found.items():
        shares = _shares(leading(rows), best(rows))
        met = shares is not None and shares[0] <= TOKENS_TARGET and shares[1] <= SECONDS_TARGET
        tasks.setdefault("met" if met else "missed", []).append(_name(task))
    told = listed([f"{verdict} on {listed(names)}" for verdict, names in tasks.items()])
    return (
        "**The target**, the best rival's final reward with a third of its tokens and half of its "
        f"seconds, is {told}."
    )
