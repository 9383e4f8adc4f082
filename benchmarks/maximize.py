"""python -m benchmarks.maximize: `arsm.maximize` beside other optimisers of discrete black boxes.

Three families with ten instances each, 16 points at a time, the best value after 1,000, 3,000 and 10,000 distinct
evaluations. A run is one line of `runs.jsonl`, and those already there are not repeated:

    python -m benchmarks.maximize run                        # needs optuna, nevergrad and cmaes for all of them
    python -m benchmarks.maximize run --methods arsm --instances 3
    python -m benchmarks.maximize report                     # table.csv and the figure, from runs.jsonl
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.black_boxes import FAMILIES
from benchmarks.measure import hardware
from benchmarks.rivals import RIVALS, Budget, Spent

RESULTS = Path(__file__).parent.parent / "results" / "maximize"
BUDGETS = (1_000, 3_000, 10_000)
INSTANCES = 10
CURVE = tuple(round(16 * 625 ** (i / 28)) for i in range(29))
"""Evaluations after which a run's best is kept: 16 to 10,000."""


def ours(budget: Budget, seed: int) -> None:
    """`arsm.maximize` as it comes."""
    import arsm

    box = budget.box
    found = arsm.maximize(
        lambda z: box.f(z.numpy()), box.sizes, batched=True, evaluations=budget.evaluations, seed=seed, progress=False
    )
    budget.best = found.history.tolist()


METHODS: dict[str, Callable[[Budget, int], None]] = {"arsm.maximize": ours, **RIVALS}


def commit() -> str:
    """The commit that is checked out."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def run(methods: list[str], budgets: list[int], instances: list[int], out: Path) -> None:
    """Make the runs that are missing, instance by instance."""
    done = {(r["method"], r["family"], r["instance"], r["budget"]) for r in read(out)}
    missing = [
        (method, family, instance, budget)
        for instance in instances
        for budget in budgets
        for method in methods
        for family in FAMILIES
        if (method, family, instance, budget) not in done
    ]
    started = time.monotonic()
    for number, (method, family, instance, evaluations) in enumerate(missing):
        budget, start = Budget(FAMILIES[family](instance), evaluations), time.monotonic()
        try:
            METHODS[method](budget, instance)
        except Spent:
            pass
        record = {
            "method": method,
            "family": family,
            "instance": instance,
            "budget": evaluations,
            "best": budget.best[-1],
            "evaluations": len(budget.best),
            "curve": [budget.best[min(n, len(budget.best)) - 1] for n in CURVE if n <= evaluations],
            "seconds": round(time.monotonic() - start, 2),
            "hardware": hardware(),
            "commit": commit(),
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        left = (time.monotonic() - started) / (number + 1) * (len(missing) - number - 1)
        print(
            f"{number + 1}/{len(missing)} {method}, {family} {instance}, {evaluations:,}: {record['best']:.2f} in "
            f"{record['seconds']:.0f} s; about {left / 60:.0f} min left",
            flush=True,
        )


def read(path: Path) -> list[dict]:
    """The runs so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
