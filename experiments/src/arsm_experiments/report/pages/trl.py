"""The generated part of results/trl/README.md: both trainers on SmolLM2."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from arsm_experiments.report.pages.tables import Tables, markdown
from arsm_experiments.runs.lines import read_one

FILE = "trl/smollm2.json"
TRAINERS = ("GRPOTrainer", "BranchTrainer")
SMOOTH = 5
"""Updates that a reward is averaged over."""


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
    rows = [
        ["seeds", *(str(len(own)) for own in runs.values())],
        _row("accuracy before", [[run["before"] for run in own] for own in runs.values()]),
        _row("accuracy after", [[run["after"] for run in own] for own in runs.values()]),
        _row(
            f"reward at {tokens:,.0f} tokens",
            [[reward_at(run, tokens=tokens) for run in own] for own in runs.values()],
        ),
        _row(
            f"reward at {seconds:.0f} s",
            [[reward_at(run, seconds=seconds) for run in own] for own in runs.values()],
        ),
        _row("updates", [[len(run["curve"]) for run in own] for own in runs.values()], "{:.0f}"),
        _row("tokens", [[run["tokens"] for run in own] for own in runs.values()], "{:,.0f}"),
    ]
    words = f"\n{record['hardware']}, {record['trainings at once']} trainings at once; commit "
    return (
        markdown(["mean ± standard deviation over seeds", *runs], rows)
        + f"{words}{record['commit'][:10]}.\n\n![Reward against tokens and seconds](smollm2.png)"
    )


def reward_at(
    run: dict[str, Any], *, tokens: float | None = None, seconds: float | None = None
) -> float:
    """The mean reward of the last updates that ended within so many tokens or seconds."""
    spent = itertools.accumulate(each[0] for each in run["curve"])
    within = [
        reward
        for (_, reward, end), total in zip(run["curve"], spent, strict=True)
        if (tokens is None or total <= tokens) and (seconds is None or end <= seconds)
    ]
    # a first update that is larger than the limit counts all the same
    return statistics.mean(within[-SMOOTH:] or [run["curve"][0][1]])


def _row(name: str, several: Sequence[Sequence[float]], form: str = "{:.3f}") -> list[str]:
    """Mean and standard deviation of each trainer."""
    cells = []
    for values in several:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells.append(f"{form} ± {form}".format(statistics.mean(values), spread))
    return [name, *cells]


PARTS = {"smollm2": smollm2}
