"""The generated parts of results/trl/README.md: both trainers on small models and on SmolLM2."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arsm_experiments.report.pages.tables import Tables, listed, markdown, welch, with_spread
from arsm_experiments.report.welch import Difference
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
"""Rows of the table of rewards: task, rate, and tokens."""
BUDGETS = {1.0: "budget 1", None: "every state"}
CREDIT = {"BranchTrainer": "", "TrueTokens": ", advantages [B, T]"}
"""Trainers of noise.json: with the credit of all tokens, and of the true ones alone."""


def rewards(tables: Tables) -> str:
    """Rewards of both trainers at equal tokens."""
    rows = []
    for task, rate, several in SHOWN:
        for place, tokens in enumerate(several):
            name = "" if place else f"{task}, rate {rate}"
            cells = [
                tables.cell(
                    "trl", f"{task}: {each}, rate {float(rate):g}", f"reward at {tokens} tokens"
                )
                for each in TRAINERS
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


def _update(tables: Tables) -> str:
    """What an update costs."""
    ranges = []
    for metric in ("cpu_seconds", "tokens"):
        ratios = [_ratio(tables, task, rate, metric) for task, rate, _ in SHOWN]
        ranges.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    seconds, tokens = ranges
    return (
        f"An update of BranchTrainer takes {seconds} of GRPOTrainer's CPU time, with {tokens} of "
        "its tokens."
    )


def _ratio(tables: Tables, task: str, rate: str, metric: str) -> float:
    """BranchTrainer's mean over GRPOTrainer's."""
    grpo, branch = (
        tables.cell("trl", f"{task}: {name}, rate {float(rate):g}", metric).mean
        for name in TRAINERS
    )
    return branch / grpo


def small(tables: Tables) -> str:
    """BranchTrainer's reward less GRPOTrainer's on the small tasks."""
    rates = ("1e-4", "3e-4", "1e-3")
    early, late = (
        [_gain(tables, "sort", rate, f"reward at {tokens} tokens") for rate in rates]
        for tokens in (30_000, 60_000)
    )
    after = [_gain(tables, "sort", rate, "after") for rate in rates]
    count = [
        _gain(tables, "count", rate, f"reward at {tokens} tokens")
        for rate, tokens in (("3e-4", 60_000), ("1e-3", 20_000))
    ]
    share = statistics.mean(_ratio(tables, "sort", rate, "tokens") for rate in rates)
    decided = [rate for rate, *gains in zip(rates, early, after, strict=True) if _any(gains)]
    rest = f"decided at {listed(decided)}" if decided else "undecided"
    return (
        "BranchTrainer less GRPOTrainer, with Welch's 95% interval:\n\n"
        f"- sort, 60,000 tokens, rates {listed(rates)}: {_signed(late)}. At 30,000, and on 2,000 "
        f"fresh questions after all 120 updates, with {share:.1f} of the tokens, it is {rest}.\n"
        f"- count, 60,000 tokens (3e-4) and 20,000 (1e-3): {_signed(count)}.\n"
        f"- {_update(tables)}\n"
        f"- {_signs(tables, {'sort': late, 'count': count})}"
    )


def _signs(tables: Tables, shown: Mapping[str, Sequence[Difference]]) -> str:
    """Whether the variances before the training have the signs of these differences."""
    ratios = _noise(tables)
    signs = {task: 1 - statistics.mean(ratios[task, 1.0, TRAINERS[1]]) for task in shown}
    pairs = [(signs[task], each) for task, own in shown.items() for each in own]
    agree = sum(sign * each.mean > 0 for sign, each in pairs)
    decided = sum(each.decided for _, each in pairs)
    later = _gain(tables, "count", "1e-3", "reward at 60000 tokens")
    words = "" if later.decided else ", undecided"
    return (
        f"Variance x tokens, measured before the training, agrees with the sign of {agree} of "
        f"these {len(pairs)} differences, {decided} of them decided. On count at 60,000 tokens "
        f"(1e-3) the difference is {later.mean:+.3f}{words}."
    )


def _any(gains: Sequence[Difference]) -> bool:
    """Whether one of them is decided."""
    return any(gain.decided for gain in gains)


def _gain(tables: Tables, task: str, rate: str, metric: str) -> Difference:
    """BranchTrainer less GRPOTrainer."""
    grpo, branch = (
        tables.cell("trl", f"{task}: {name}, rate {float(rate):g}", metric) for name in TRAINERS
    )
    return welch(branch, grpo)


def _signed(gains: Sequence[Difference]) -> str:
    return listed(
        [f"{x.mean:+.2f} ({x.mean - x.half:+.2f} to {x.mean + x.half:+.2f})" for x in gains]
    )


def smollm2(tables: Tables) -> str:
    """Reward at equal tokens and at equal seconds, and accuracy on fresh questions."""
    path = tables.results / FILE
    if not path.exists():
        return "Not run yet."
    record = read_one(path)
    runs = {kind: [run for run in record["runs"] if run["trainer"] == kind] for kind in TRAINERS}
    if not all(runs.values()):
        return "Not run for both trainers yet."
    tokens = min(sum(each[0] for each in run["curve"]) for run in record["runs"])
    seconds = min(run["curve"][-1][2] for run in record["runs"])

    def row(name: str, measure: Callable[[Run], float], form: str = "{:.3f}") -> list[str]:
        """Mean and standard deviation over each trainer's runs."""
        return _row(name, [[measure(run) for run in own] for own in runs.values()], form)

    rows = [
        ["seeds", *(str(len(own)) for own in runs.values())],
        row("accuracy before", lambda run: run["before"]),
        row("accuracy after", lambda run: run["after"]),
        row(f"reward at {tokens:,.0f} tokens", lambda run: reward_at(run, tokens=tokens)),
        row(f"reward at {seconds:.0f} s", lambda run: reward_at(run, seconds=seconds)),
        row("updates", lambda run: len(run["curve"]), "{:.0f}"),
        row("tokens", lambda run: run["tokens"], "{:,.0f}"),
    ]
    words = f"\n{record['hardware']}, {record['trainings at once']} trainings at once; commit "
    return (
        markdown(["mean ± standard deviation over seeds", *runs], rows)
        + f"{words}{record['commit'][:10]}.\n\n![Reward against tokens and seconds](smollm2.png)"
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
    "rewards": rewards,
    "noise": noise,
    "small": small,
    "smollm2": smollm2,
}
