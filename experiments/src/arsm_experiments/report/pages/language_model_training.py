"""Training in results/language_model/README.md: its table and its findings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from arsm_experiments.report.pages.tables import Cell, Tables, markdown

RESULT = r"(\w+), all seeds: (.*), rate (\S+)"
RUN = r"(\w+): (.*) \(.*\), rate \S+, (.*)"
FINAL = "final accuracy"
TABLE = "language_model/table.csv"
OURS = ("branch", "branch, 4 epochs")
"""Methods that branch."""
ENDS = (", lower end", ", upper end")


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

    def less(self, best: str) -> str:
        """The difference to the best rival with its interval."""
        ends = [self.values[f"less {best}{end}"].mean for end in ("", *ENDS)]
        return f"{ends[0]:+.3f} ({ends[1]:+.3f}, {ends[2]:+.3f})"

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
    """Table and findings of the seeds; before there are any, how far the trials are."""
    found = results(tables)
    if not found:
        return _trials(tables)
    parts = [_results(found)]
    parts += [_findings(task, rows) for task, rows in found.items()]
    parts.append("![Mean reward over tokens and over seconds, mean over seeds](training.png)")
    return "\n\n".join(parts)


def best(rows: list[Result]) -> Result:
    """The rival with the highest mean final accuracy."""
    return max((row for row in rows if row.method not in OURS), key=lambda row: row.final.mean)


def _results(found: Mapping[str, list[Result]]) -> str:
    """Final rewards, tasks by methods."""
    methods = list(dict.fromkeys(row.method for rows in found.values() for row in rows))
    lines = []
    for task, rows in found.items():
        final = {row.method: f"{row.final.mean:.3f}±{row.final.std:.3f}" for row in rows}
        lines.append([task, *(final.get(method, "-") for method in methods)])
    return markdown(["", *methods], lines)


def _findings(task: str, rows: list[Result]) -> str:
    """How branching compares with the best rivals, and where the best stands at its end."""
    rival = best(rows)
    ours = [row for row in rows if row.method in OURS]
    leading = max(ours, key=lambda row: row.final.mean)
    by_name = {row.method: row for row in rows}
    gaps = "; ".join(f"`{row.method}` {row.less(rival.method)}" for row in ours)
    seeds = rival.final.seeds
    parts = [
        f"**{task.capitalize()}, {seeds} seed{'s' if seeds > 1 else ''}.** Less {rival.method}, "
        f"the best rival: {gaps}{_reached(leading, rival)}."
    ]
    parts += [
        f"Less {name}, the best without a value model: `{leading.method}` "
        f"{leading.less(name)}{_reached(leading, by_name[name])}."
        for name in rival.rivals[1:]
    ]
    then = rival.values[f"when {leading.method} ends"]
    parts.append(
        f"When `{leading.method}` ends, after {leading.seconds:.0f} s, {rival.method} is at "
        f"{then.mean:.3f}; it ends after {rival.seconds:.0f} s."
    )
    return " ".join(parts)


def _reached(row: Result, rival: Result) -> str:
    """The shares of a rival's tokens and seconds that a method needs to its final reward."""
    shares = [_share(row, rival, what) for what in ("tokens", "seconds")]
    if None in shares:
        return ""
    return f", level after {shares[0]:.2f} of its tokens and {shares[1]:.2f} of its seconds"


def _share(row: Result, rival: Result, what: str) -> float | None:
    ours, theirs = row.spent(what, rival.method), rival.spent(what, rival.method)
    return None if ours is None or not theirs else ours / theirs


def _trials(tables: Tables) -> str:
    ended: list[tuple[str, str, float]] = []
    count = 0
    for (row, _), cell in tables.cells(TABLE).items():
        matched = re.fullmatch(RUN, row)
        if matched is None:
            continue
        _, method, kind = matched.groups()
        count += kind.startswith("trial")
        if not kind.endswith("cut"):
            ended.append((method, kind, cell.mean))
    trials = sum(kind == "trial" for _, kind, _ in ended)
    return (
        f"**No comparison yet.** {trials} of {count} trials (three rates per method, seed 0) "
        f"ended{_seeds(ended)}. Trials only choose a method's rate. {_best_trials(ended)}\n\n"
        "![Accuracy over tokens of the trials, one panel per method](trials.png)"
    )


def _best_trials(ended: list[tuple[str, str, float]]) -> str:
    """The accuracy of each method at its best rate, the highest first."""
    found: dict[str, float] = {}
    for method, kind, accuracy in ended:
        if kind == "trial":
            found[method] = max(accuracy, found.get(method, 0.0))
    if not found:
        return ""
    best_first = sorted(found, key=lambda name: -found[name])
    words = "; ".join(f"{name} {found[name]:.2f}" for name in best_first)
    return f"Best trial per method, one run each: {words}."


def _seeds(ended: list[tuple[str, str, float]]) -> str:
    """The methods that have finished seeds, which nobody else has."""
    found: dict[str, list[float]] = {}
    for method, kind, accuracy in ended:
        if kind != "trial":
            found.setdefault(method, []).append(accuracy)
    if not found:
        return ", and no seed that the protocol reports"
    words = "; ".join(
        f"{method} at {', '.join(f'{accuracy:.3f}' for accuracy in own)}"
        for method, own in found.items()
    )
    return f". Seeds that ended: {words}"
