"""The generated parts of results/trl/README.md and HISTORY.md: both trainers on small models and on
SmolLM2.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arsm_experiments.report.pages.tables import (
    Cell,
    Tables,
    listed,
    markdown,
    welch,
    with_spread,
)
from arsm_experiments.report.welch import Difference, difference
from arsm_experiments.runs import lines
from arsm_experiments.runs.lines import read_one

FILE = "trl/smollm2.json"
TRAINERS = ("GRPOTrainer", "BranchTrainer")
SMOOTH = 5
"""Updates that a reward is averaged over."""
Run = dict[str, Any]
"""A training on SmolLM2, as it was recorded."""

SHOWN = (
    ("sort", "1e-4", (30_000, 60_000)),
    ("sort", "3e-4", (30_000, 60_000)),
    ("sort", "1e-3", (60_000,)),
    ("count", "3e-4", (20_000, 60_000)),
    ("count", "1e-3", (20_000,)),
)
"""Rows of the table of all rewards: task, rate, and tokens."""
RATES = {"sort": ("1e-4", "3e-4", "1e-3"), "count": ("3e-4", "1e-3")}
TOKENS = 60_000
AT_EQUAL_TOKENS = f"reward at {TOKENS} tokens"
"""Tokens at which the page compares the trainers."""
BUDGETS = {1.0: "budget 1", None: "every state"}
CREDIT = {"BranchTrainer": "", "TrueTokens": ", advantages [B, T]"}
"""Trainers of noise.json: with the credit of all tokens, and of the true ones alone."""


def rewards(tables: Tables) -> str:
    """Rewards of both trainers after the same tokens, and their differences."""
    rows = []
    for task, rates in RATES.items():
        for rate in rates:
            cells = [_cell(tables, task, each, rate, AT_EQUAL_TOKENS) for each in TRAINERS]
            gain = _gain(tables, task, rate, AT_EQUAL_TOKENS)
            words = _signed(gain, 3)
            told = f"**{words}**" if gain.decided else words
            rows.append([f"{task}, {rate}", *(with_spread(cell, 3) for cell in cells), told])
    return markdown(["task, rate", *TRAINERS, "difference"], rows)


def _cell(tables: Tables, task: str, trainer: str, rate: str, metric: str) -> Cell:
    return tables.cell("trl", f"{task}: {trainer}, rate {float(rate):g}", metric)


def all_rewards(tables: Tables) -> str:
    """Rewards of both trainers after several numbers of tokens."""
    rows = []
    for task, rate, several in SHOWN:
        for place, tokens in enumerate(several):
            name = "" if place else f"{task}, rate {rate}"
            cells = [
                _cell(tables, task, each, rate, f"reward at {tokens} tokens") for each in TRAINERS
            ]
            rows.append([name, f"{tokens:,}", *(with_spread(cell, 3) for cell in cells)])
    return markdown(["reward ± standard deviation, three seeds", "tokens", *TRAINERS], rows)


def _noise(tables: Tables) -> dict[tuple[str, float | None, str], list[float]]:
    """Variance x tokens relative to GRPOTrainer's, by task, budget and trainer: one per model."""
    runs = read_one(tables.results / "trl/noise.json")["runs"]
    units = {
        (run["task"], run["seed"]): run["per_token"]
        for run in runs
        if run["trainer"] == TRAINERS[0]
    }
    found: dict[tuple[str, float | None, str], list[float]] = {}
    for run in runs:
        if run["trainer"] in CREDIT:
            ratio = run["per_token"] / units[run["task"], run["seed"]]
            found.setdefault((run["task"], run["budget"], run["trainer"]), []).append(ratio)
    return found


def noise(tables: Tables) -> str:
    """Variance x tokens before training, one column per model."""
    found = _noise(tables)
    rows = [
        [f"{task}, {name}{words}", *(f"{x:.2f}" for x in found[task, budget, trainer])]
        for task in ("sort", "count")
        for trainer, words in CREDIT.items()
        for budget, name in BUDGETS.items()
    ]
    return markdown(["", *(f"model {place}" for place in range(3))], rows)


def noise_in_short(tables: Tables) -> str:
    """The same as means over the models, for docs/guides/other_trainers.md."""
    found = _noise(tables)
    rows = [
        [
            f"{task}, {name}",
            *(f"{statistics.mean(found[task, budget, trainer]):.2g}" for trainer in CREDIT),
        ]
        for task in ("sort", "count")
        for budget, name in BUDGETS.items()
    ]
    return markdown(["", "tokens and weights [B, T, n]", "advantages [B, T]"], rows)


def finding(tables: Tables) -> str:
    """The small tasks, then SmolLM2."""
    sort, count = (_standings(tables, task, AT_EQUAL_TOKENS) for task in RATES)
    return (
        f"**Finding. On `sort`, where one wrong token decides, BranchTrainer is {sort} after "
        f"{TOKENS:,} tokens. On `count`, a dense reward, it is {count}.** {_on_smollm2(tables)}"
    )


def _standings(tables: Tables, task: str, metric: str) -> str:
    """How BranchTrainer compares at each rate: "ahead at 1e-4 (+0.04) and undecided at 3e-4"."""
    return _in_words({rate: _gain(tables, task, rate, metric) for rate in RATES[task]})


def _in_words(gains: Mapping[str, Difference]) -> str:
    """Differences by rate, those that are decided first."""
    found: dict[str, list[str]] = {"ahead": [], "behind": [], "undecided": []}
    for rate, gain in gains.items():
        if gain.decided:
            found["ahead" if gain.mean > 0 else "behind"].append(f"{rate} ({gain.mean:+.2f})")
        else:
            found["undecided"].append(rate)
    return listed([f"{how} at {listed(rates)}" for how, rates in found.items() if rates])


def _on_smollm2(tables: Tables) -> str:
    """Gains in accuracy within equal seconds, and the tokens that they took."""
    runs = _runs(tables)
    grpo, branch = (
        statistics.mean(run["after"] - run["before"] for run in own) for own in runs.values()
    )
    tokens = [statistics.mean(run["tokens"] for run in own) for own in runs.values()]
    after = [_moments([run["after"] for run in own]) for own in runs.values()]
    decided = difference(*after[1], *after[0]).decided
    return (
        f"On SmolLM2-135M, in the same seconds, GRPOTrainer gains {grpo:.2f} in accuracy and "
        f"BranchTrainer {branch:.2f}{'' if decided else ' (their difference is undecided)'}. "
        f"BranchTrainer generated {tokens[1] / tokens[0]:.2f} of the tokens."
    )


def _moments(values: Sequence[float]) -> tuple[float, float, int]:
    return statistics.mean(values), statistics.stdev(values), len(values)


def details(tables: Tables) -> str:
    """Other numbers of tokens, the cost of an update, and the variances."""
    early = _standings(tables, "sort", "reward at 30000 tokens")
    sort, after = (_standings(tables, task, "after") for task in RATES)
    count = _gain(tables, "count", "1e-3", "reward at 20000 tokens")
    share = statistics.mean(_ratio(tables, "sort", rate, "tokens") for rate in RATES["sort"])
    return "\n".join(
        [
            f"- **Sort at 30,000 tokens**: {early}.",
            f"- **Sort after all 120 updates**, on 2,000 fresh questions and with {share:.1f} of "
            f"GRPOTrainer's tokens: {sort}.",
            f"- **Count at 20,000 tokens**, rate 1e-3: {_signed(count)}.",
            f"- **Count after all 120 updates**: {after}.",
            f"- {_at_equal_seconds(tables)}",
            f"- {_update(tables)}",
            f"- {_variances(tables)}",
            f"- {_signs(tables)}",
        ]
    )


def _at_equal_seconds(tables: Tables) -> str:
    """Rewards when the quickest training of a task and rate ends, taking its updates as equally
    long.
    """
    runs = lines.read(tables.results / "trl/runs.jsonl.xz")
    told = []
    for task, rates in RATES.items():
        gains = {}
        for rate in rates:
            own = [run for run in runs if (run["task"], run["rate"]) == (task, float(rate))]
            seconds = min(run["cpu_seconds"] for run in own)
            grpo, branch = (
                _moments([_reward_after(run, seconds) for run in own if run["trainer"] == trainer])
                for trainer in TRAINERS
            )
            gains[rate] = difference(*branch, *grpo)
        told.append(f"on {task} {_in_words(gains)}")
    return f"**At equal CPU seconds** BranchTrainer is {'; '.join(told)}."


def _reward_after(run: Run, seconds: float) -> float:
    """The mean reward of the ten updates before a training has had so many CPU seconds."""
    updates = round(len(run["curve"]) * seconds / run["cpu_seconds"])
    return statistics.mean(reward for _, reward in run["curve"][max(0, updates - 10) : updates])


def _update(tables: Tables) -> str:
    """The cost of an update."""
    ranges = []
    for metric in ("cpu_seconds", "tokens"):
        ratios = [_ratio(tables, task, rate, metric) for task, rate, _ in SHOWN]
        ranges.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    seconds, tokens = ranges
    return (
        f"**An update** of BranchTrainer takes {seconds} of GRPOTrainer's CPU time, with {tokens} "
        "of its tokens."
    )


def _ratio(tables: Tables, task: str, rate: str, metric: str) -> float:
    """BranchTrainer's mean over GRPOTrainer's."""
    grpo, branch = (_cell(tables, task, name, rate, metric).mean for name in TRAINERS)
    return branch / grpo


def _variances(tables: Tables) -> str:
    """Variance x tokens before the training, lowest to highest over the models."""
    found = _noise(tables)

    def told(task: str, trainer: str) -> str:
        ratios = found[task, 1.0, trainer]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    branch, true = CREDIT
    return (
        "**Variance x tokens** of the gradient before the training, relative to GRPOTrainer's: "
        f"{told('sort', branch)} on sort and {told('count', branch)} on count. With the true "
        f"tokens' credit alone (advantages [B, T]) it is {told('sort', true)} on sort; nothing was "
        "trained with it."
    )


def _signs(tables: Tables) -> str:
    """Whether the variances before the training have the signs of the table's differences."""
    ratios = _noise(tables)
    signs = {task: 1 - statistics.mean(ratios[task, 1.0, TRAINERS[1]]) for task in RATES}
    pairs = [
        (signs[task], _gain(tables, task, rate, AT_EQUAL_TOKENS))
        for task, rates in RATES.items()
        for rate in rates
    ]
    agree = [gain for sign, gain in pairs if sign * gain.mean > 0]
    decided = [gain for _, gain in pairs if gain.decided]
    both = sum(gain.decided for gain in agree)
    return (
        f"**These variances** have the sign of {len(agree)} of the {len(pairs)} differences in the "
        f"table, and of {both} of the {len(decided)} that are decided."
    )


def _gain(tables: Tables, task: str, rate: str, metric: str) -> Difference:
    """BranchTrainer less GRPOTrainer."""
    grpo, branch = (_cell(tables, task, name, rate, metric) for name in TRAINERS)
    return welch(branch, grpo)


def _signed(x: Difference, decimals: int = 2) -> str:
    """A difference with its interval."""
    mean, low, high = (
        f"{value:+.{decimals}f}" for value in (x.mean, x.mean - x.half, x.mean + x.half)
    )
    return f"{mean} ({low} to {high})"


def _runs(tables: Tables) -> dict[str, list[Run]]:
    """The trainings on SmolLM2 by trainer."""
    record = read_one(tables.results / FILE)
    return {kind: [run for run in record["runs"] if run["trainer"] == kind] for kind in TRAINERS}


def smollm2(tables: Tables) -> str:
    """Reward at equal tokens and at equal seconds, and accuracy on fresh questions."""
    runs = _runs(tables)
    everyone = [run for own in runs.values() for run in own]
    tokens = min(sum(each[0] for each in run["curve"]) for run in everyone)
    seconds = min(run["curve"][-1][2] for run in everyone)

    def row(name: str, measure: Callable[[Run], float], form: str = "{:.3f}") -> list[str]:
        """Mean and standard deviation over each trainer's runs."""
        return _row(name, [[measure(run) for run in own] for own in runs.values()], form)

    rows = [
        row("accuracy before", lambda run: run["before"]),
        row("accuracy after", lambda run: run["after"]),
        row(f"reward at {tokens:,.0f} tokens", lambda run: reward_at(run, tokens=tokens)),
        row(f"reward at {seconds:.0f} s", lambda run: reward_at(run, seconds=seconds)),
        row("updates", lambda run: len(run["curve"]), "{:.0f}"),
        row("tokens", lambda run: run["tokens"], "{:,.0f}"),
    ]
    return markdown(["", *runs], rows)


def provenance(tables: Tables) -> str:
    """The machine and the version of the trainings on SmolLM2."""
    record = read_one(tables.results / FILE)
    seeds = listed([f"{len(own)} seeds of {kind}" for kind, own in _runs(tables).items()])
    return (
        f"{seeds}; {record['hardware']}, {record['trainings at once']} trainings at once; commit "
        f"{record['commit'][:10]}."
    )


def reward_at(run: Run, *, tokens: float | None = None, seconds: float | None = None) -> float:
    """The mean reward of the last updates that ended within so many tokens or seconds."""
    spent = itertools.accumulate(each[0] for each in run["curve"])
    within = [
        reward
        for (_, reward, end), total in zip(run["curve"], spent, strict=True)
        if (tokens is None or total <= tokens) and (seconds is None or end <= seconds)
    ]
    # a first update that is larger than the limit counts all the same
    return statistics.mean(within[-SMOOTH:] or [run["curve"][0][1]])


def _row(name: str, several: Sequence[Sequence[float]], form: str) -> list[str]:
    """Mean and standard deviation of each trainer."""
    cells = []
    for values in several:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells.append(f"{form} ± {form}".format(statistics.mean(values), spread))
    return [name, *cells]


PARTS = {
    "finding": finding,
    "rewards": rewards,
    "details": details,
    "smollm2": smollm2,
}
HISTORY_PARTS = {"rewards": all_rewards, "noise": noise, "smollm2": provenance}
