"""Records of the comparison on a pretrained model, and the rules of its PROTOCOL.md."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arsm_experiments.runs.lines import parse as parse_lines
from arsm_experiments.sequences.levels import CHOSEN_ON
from arsm_experiments.sequences.noise import FRESH
from arsm_experiments.sequences.trials import METHODS, TRIAL

RIVALS = ("group 2", "group 4", "group 8", "group 16", "token baseline 8")
"""Unbiased rivals; ratios are to the best of them."""
OURS = ("branch", "branch, 4 epochs")
"""Methods that branch, by their names on the page."""
VALUE_MODEL = "ppo"
"""The method that trains a second model of the same size beside the policy."""
AGAIN = "b"
"""A level whose name ends with it was measured a second time, at weights of another fine-tuning."""
PLAIN = "branch 8"
"""The method that those of the fourth amendment are compared with."""
CANDIDATE = "c"
"""A level whose name ends with it is a measurement of the fourth amendment, which has a table of
its own.
"""
DRAWS = (2, 4, 8, 16, 32, 64)
GROUPS = (2, 4, 8, 16)
BOOTSTRAP = 10_000


@dataclass(frozen=True)
class Noise:
    """One method at one level, over all its rounds."""

    method: str
    accuracy: float
    cost: float
    """Variance x tokens."""
    error: float
    repeats: int
    unbiased: bool
    seconds: float
    memory: float


@dataclass(frozen=True)
class Trained:
    """One training run."""

    method: str
    """Its name on the page."""
    strategy: str
    rate: float
    seed: int
    metrics: list[dict[str, Any]]
    scores: list[float]
    """By question; empty if the run was cut."""
    session: dict[str, Any]
    chosen_on: int = CHOSEN_ON
    """Questions of a trial."""
    task: str = "countdown"

    @property
    def final(self) -> float:
        return self.metrics[-1]["accuracy"]

    @property
    def finished(self) -> bool:
        return bool(self.scores)


# ---------------------------------------------------------------- records


def read_noise(lines: Sequence[Mapping[str, Any]]) -> list[Noise]:
    """Average the rounds of every method of one level."""
    by_method: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_method[line["method"]].append(line)
    found = []
    for method, rounds in by_method.items():
        costs = [line["variance"] * line["tokens"] for line in rounds]
        errors = [
            math.hypot(
                line["variance_error"] * line["tokens"], line["variance"] * line["tokens_error"]
            )
            for line in rounds
        ]
        found.append(
            Noise(
                method,
                rounds[0]["accuracy"],
                statistics.mean(costs),
                math.hypot(*errors) / len(errors),
                sum(line["repeats"] for line in rounds),
                rounds[0]["unbiased"],
                statistics.mean(line["seconds"] for line in rounds),
                max((line["memory"] or 0) for line in rounds) / 1e9,
            )
        )
    return found


def read_trained(files: Mapping[str, Mapping[str, bytes]]) -> list[Trained]:
    """All training runs of an archive."""
    found = []
    for run in files.values():
        if "config.json" not in run:
            continue
        header = json.loads(run["config.json"])
        config = header["config"]
        found.append(
            Trained(
                method_name(config["strategy"]),
                config["strategy"],
                config["rate"],
                config["seed"],
                parse_lines(run["metrics.jsonl"]),
                json.loads(run.get("scores.json", b"[]")),
                header["sessions"][-1],
                config["chosen_on"],
                config["task"],
            )
        )
    return found


def method_name(strategy: str) -> str:
    """The page's name of a strategy, whatever its size."""
    kinds = {words.rstrip("0123456789"): name for name, words in METHODS.items()}
    return kinds.get(strategy.rstrip("0123456789"), strategy)


def place(method: str) -> tuple[int, str]:
    """The order of the page; others come last."""
    known = list(METHODS)
    return (known.index(method) if method in known else len(known), method)


# ---------------------------------------------------------------- rules of the protocol


def choose(noise: list[Noise]) -> list[str]:
    """The strategies of the training, with the sizes that have the least noise per token when
    questions are drawn afresh; where that was not measured, at fixed questions.
    """
    cost = {row.method: row.cost for row in noise}
    suffix = FRESH if any(name.endswith(FRESH) for name in cost) else ""

    def best(kind: str, sizes: tuple[int, ...]) -> int:
        known = [size for size in sizes if f"{kind} {size}{suffix}" in cost]
        return min(known, key=lambda size: cost[f"{kind} {size}{suffix}"])

    draws = best("branch", DRAWS)
    chosen = {
        "branch": f"branch:rloo:samples={draws}",
        "branch, 4 epochs": f"4*branch:rloo:samples={draws}",
        "group": f"group:{best('group', GROUPS)}",
    }
    return list((METHODS | chosen).values())


def ratio(one: Noise, other: Noise) -> tuple[float, float]:
    """one / other, and its standard error by the delta method."""
    if one.method == other.method:
        return 1.0, 0.0
    value = one.cost / other.cost
    return value, value * math.hypot(one.error / one.cost, other.error / other.cost)


def by_round(
    lines: Sequence[Mapping[str, Any]], method: str, other: str
) -> tuple[float, float, int]:
    """one / other as the geometric mean over the rounds that measured both, its standard deviation
    over rounds, and how many there are.

    The methods of a round share its seed. Where they also sample the same sequences, most of their
    errors are shared too.
    """
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in lines:
        found[line["method"]][line["round"]] = math.log(line["variance"] * line["tokens"])
    ours, theirs = found[method], found[other]
    logs = [ours[number] - theirs[number] for number in sorted(ours.keys() & theirs.keys())]
    if len(logs) < 2:
        return math.nan, math.nan, len(logs)
    mean = math.exp(statistics.mean(logs))
    return mean, mean * statistics.stdev(logs), len(logs)


def best_rival(noise: list[Noise], *, fresh: bool = False) -> Noise | None:
    """The best of the methods that do not branch, at fixed or at fresh questions."""
    names = [f"{name}{FRESH}" if fresh else name for name in RIVALS]
    return min((row for row in noise if row.method in names), key=_cost, default=None)


def _cost(row: Noise) -> float:
    return row.cost


def reported(runs: list[Trained]) -> dict[str, list[Trained]]:
    """Runs of fresh seeds that all methods have finished, by method.

    A method that has only trials has finished none.
    """
    fresh = [run for run in runs if run.seed != TRIAL and run.finished]
    methods = sorted({run.method for run in runs}, key=place)
    seeds = [{run.seed for run in fresh if run.method == name} for name in methods]
    common = set.intersection(*seeds) if seeds else set()
    return {
        name: sorted(
            (run for run in fresh if run.method == name and run.seed in common),
            key=lambda run: run.seed,
        )
        for name in methods
    }


def by_task(runs: list[Trained]) -> dict[str, list[Trained]]:
    """The runs of every task."""
    found: dict[str, list[Trained]] = defaultdict(list)
    for run in runs:
        found[run.task].append(run)
    return dict(sorted(found.items()))


def best_of_rivals(found: Mapping[str, list[Trained]]) -> list[str]:
    """The method with the highest mean final accuracy that does not branch; if that one has a value
    model, also the best one without.
    """
    final = {name: statistics.mean(run.final for run in own) for name, own in found.items()}
    rivals = sorted((name for name in found if name not in OURS), key=lambda name: -final[name])
    return rivals[:2] if rivals[0] == VALUE_MODEL else rivals[:1]


def paired(ours: list[Trained], theirs: list[Trained]) -> tuple[float, float, float]:
    """The mean difference of final scores and its 95% interval, by a bootstrap over questions."""
    questions = len(ours[0].scores)
    gaps = [
        statistics.mean(a.scores[q] - b.scores[q] for a, b in zip(ours, theirs, strict=True))
        for q in range(questions)
    ]
    draw = random.Random(0)
    means = sorted(math.fsum(draw.choices(gaps, k=questions)) / questions for _ in range(BOOTSTRAP))
    low, high = means[int(0.025 * BOOTSTRAP)], means[int(0.975 * BOOTSTRAP) - 1]
    return statistics.mean(gaps), low, high


def mean_curve(runs: list[Trained]) -> list[tuple[float, float, float]]:
    """Tokens, learning seconds and accuracy, averaged over seeds measurement by measurement; a run
    that stopped keeps its last.
    """
    longest = max(len(run.metrics) for run in runs)
    points = []
    for i in range(longest):
        lines = [run.metrics[min(i, len(run.metrics) - 1)] for run in runs]
        points.append(
            (
                statistics.mean(line["tokens"] for line in lines),
                statistics.mean(line["learning_seconds"] for line in lines),
                statistics.mean(line["accuracy"] for line in lines),
            )
        )
    return points


def accuracy_after(curve: list[tuple[float, float, float]], seconds: float) -> float:
    """The accuracy after so many learning seconds, by a straight line; at most the last."""
    for before, after in itertools.pairwise(curve):
        if before[1] <= seconds < after[1]:
            share = (seconds - before[1]) / (after[1] - before[1])
            return before[2] + share * (after[2] - before[2])
    return curve[-1][2]


def crossing(curve: list[tuple[float, float, float]], level: float) -> tuple[float, float] | None:
    """Tokens and seconds at which a curve first reaches a level, by a straight line."""
    if curve[0][2] >= level:
        return curve[0][:2]
    for before, after in itertools.pairwise(curve):
        if before[2] < level <= after[2]:
            share = (level - before[2]) / (after[2] - before[2])
            return (
                before[0] + share * (after[0] - before[0]),
                before[1] + share * (after[1] - before[1]),
            )
    return None


def latest(levels: Mapping[str, list[Noise]]) -> dict[str, list[Noise]]:
    """Without the first measurement of a task and level that was measured again, and without those
    of the fourth amendment.
    """
    stems = {name.removesuffix(".jsonl"): noise for name, noise in levels.items()}
    return {
        f"{stem}.jsonl": noise
        for stem, noise in stems.items()
        if f"{stem}{AGAIN}" not in stems and not stem.endswith(CANDIDATE)
    }


def task_and_level(name: str) -> tuple[str, str]:
    """Task and level of noise-TASK-LEVEL.jsonl."""
    task, _, level = name.removeprefix("noise-").removesuffix(".jsonl").rpartition("-")
    return task, level
