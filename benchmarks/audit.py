"""How far the audit can be trusted: its false alarms, the errors that it catches and its time.

    python -m benchmarks.audit                       # all parts: about an hour of one core
    python -m benchmarks.audit rates --minutes 5     # a part of it; run again to go on

Every audit appends a line to runs/audit/PART.jsonl; audits that have one are not run again.
results/audit/referee.csv is made of these lines; a part without any keeps its rows there.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.surrogates import CORRECT, REDUCED, REDUCED_SAMPLES

import arsm
from arsm.referee import PROBLEMS, Problem
from arsm.referee.judge import AllDraws, judge
from arsm.referee.measure import Draws, Loss, draw_gradients, generators, one_thread
from arsm_experiments.runs.provenance import provenance
from benchmarks import records

RATES = (0.05, 0.2, 0.5)
"""Declared false-alarm rates, all far above the default of 1e-6."""
SIMPLE = (
    "score function",
    "leave-one-out, 2 samples",
    "leave-one-out, 4 samples",
    "leave-one-out, rows of the batch",
)
ERRORS = tuple(x / 1000 for x in range(4, 17))
"""Relative errors of the length."""
POWER = ("leave-one-out, 4 samples", "score function")
CONFIDENCE = 0.99


def measured(loss: Loss, problems: Sequence[Problem], samples: int, seed: int) -> list[Draws]:
    """The draws of one audit."""
    with generators(seed), one_thread():
        return [
            draw_gradients(loss, problem, samples, 1, torch.float32, lambda _: None)
            for problem in problems
        ]


def alarm(draws: list[Draws], rate: float) -> bool:
    """Whether the audit calls the loss wrong."""
    found = judge("", AllDraws(draws), [d.problem for d in draws], rate)
    assert found.verdict != "not decided"
    return found.verdict == "wrong"


def rates(seed: int) -> dict[str, Any]:
    """Whether a reduced audit of a correct loss raises an alarm at each rate, and with intervals of
    half the length.
    """
    draws = measured(CORRECT[SIMPLE[seed % len(SIMPLE)]], REDUCED, REDUCED_SAMPLES, seed)
    half_width = Draws.half_width
    with patch.object(Draws, "half_width", lambda self, failure: half_width(self, failure) / 2):
        halved = alarm(draws, RATES[0])
    return {"seed": seed, "alarms": [alarm(draws, rate) for rate in RATES], "halved": halved}


def longer(d: Draws, error: float) -> Draws:
    """The draws of the same loss times 1 + error."""
    target = d.truth.gradient.flatten(1)
    target = torch.cat([target, target.any(1, keepdim=True).to(target)], 1)
    factor = 1 + error
    return replace(
        d,
        error=factor * d.error + error * target,
        variance=factor**2 * d.variance,
        spread=factor * d.spread,
        by_call=factor * d.by_call + error * target,
    )


def power(seed: int) -> dict[str, Any]:
    """Which errors of the length an audit of the default size catches, for each loss."""
    found: dict[str, Any] = {"seed": seed}
    for name in POWER:
        draws = measured(CORRECT[name], PROBLEMS, 1 << 16, seed)
        found[name] = [alarm([longer(d, error) for d in draws], 1e-6) for error in ERRORS]
    return found


def seconds(seed: int) -> dict[str, Any]:
    """CPU seconds of one default audit; the seed is the number of the loss."""
    name = list(CORRECT)[seed]
    start = time.process_time()
    found = arsm.audit(CORRECT[name])
    return {
        "seed": seed,
        "loss": name,
        "cpu": time.process_time() - start,
        "verdict": found.verdict,
    }


PARTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "rates": (rates, 2000),
    "power": (power, 300),
    "seconds": (seconds, len(CORRECT)),
}
"""What to run with every seed, and how many seeds."""


METRICS = {
    "false alarms": "rates",
    "caught": "power",
    "CPU seconds of a default audit": "seconds",
}
"""The part that each metric of the table comes from."""


def share(count: int, total: int) -> tuple[float, float, float]:
    """A share with Clopper and Pearson's interval."""

    def at_most(k: int, p: float) -> float:
        logs = (
            math.lgamma(total + 1) - math.lgamma(i + 1) - math.lgamma(total - i + 1)
            for i in range(k + 1)
        )
        return sum(
            math.exp(x + i * math.log(p) + (total - i) * math.log1p(-p)) for i, x in enumerate(logs)
        )

    def solve(k: int, level: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > level else (low, middle)
        return low

    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if count == 0 else solve(count - 1, 1 - tail)
    return count / total, low, 1.0 if count == total else solve(count, tail)


def rows(folder: Path) -> Iterator[list[object]]:
    """The lines of the table."""

    def line(
        row: str, metric: str, count: int, own: list[dict[str, Any]], declared: float | str = ""
    ) -> list[object]:
        numbers = (f"{x:.4g}" for x in share(count, len(own)))
        return [row, metric, *numbers, declared, len(own), *place(own)]

    def place(own: list[dict[str, Any]]) -> list[str]:
        return [
            "; ".join(sorted({x["hardware"] for x in own})),
            "; ".join(sorted({x["commit"][:10] for x in own})),
        ]

    if own := records.read(folder / "rates.jsonl"):
        for i, rate in enumerate(RATES):
            yield line(
                "reduced audits of correct losses",
                "false alarms",
                sum(x["alarms"][i] for x in own),
                own,
                rate,
            )
        row = "reduced audits, intervals of half their length"
        yield line(row, "false alarms", sum(x["halved"] for x in own), own, RATES[0])
    if own := records.read(folder / "power.jsonl"):
        for name in POWER:
            for i, error in enumerate(ERRORS):
                yield line(
                    f"{name}, {error:.1%} too long",
                    "caught",
                    sum(x[name][i] for x in own),
                    own,
                    1e-6,
                )
    for x in records.read(folder / "seconds.jsonl"):
        cpu = f"{x['cpu']:.1f}"
        yield [x["loss"], "CPU seconds of a default audit", cpu, "", "", 1e-6, 1, *place([x])]


def main() -> None:
    """Run the audits that have no line yet, then write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="audits at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/audit"))
    parser.add_argument("--table", type=Path, default=Path("results/audit/referee.csv"))
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; known are {', '.join(PARTS)}.")
    made = {
        name: value for name, value in provenance("cpu").items() if name in ("hardware", "commit")
    }
    end = time.monotonic() + 60 * chosen.minutes
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        for part in chosen.parts or PARTS:
            run, audits = PARTS[part]
            path = chosen.folder / f"{part}.jsonl"
            done = {line["seed"] for line in records.read(path)}
            for line in pool.imap_unordered(
                run, [seed for seed in range(audits) if seed not in done]
            ):
                records.add(path, line | made)
                if time.monotonic() > end:
                    break
    write_table(chosen.folder, chosen.table)


def write_table(folder: Path, table: Path) -> None:
    """The rows of all parts; those of a part without a line are left as they are."""
    found = list(rows(folder))
    measured = {METRICS[str(row[1])] for row in found}
    kept: list[list[object]] = []
    if table.exists():
        with table.open(newline="") as file:
            kept = [[*row] for row in csv.reader(file) if METRICS.get(row[1]) not in measured]
    header = ["row", "metric", "value", "low", "high", "declared", "audits", "hardware", "commit"]
    kept = [row for row in kept if row != header]
    parts = list(PARTS)
    every = sorted([*found, *kept], key=lambda row: parts.index(METRICS[str(row[1])]))
    with table.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *every])
    for row in found:
        print(*row[:7], sep=", ")


if __name__ == "__main__":
    main()
