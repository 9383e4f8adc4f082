"""ARSM of one variable: one estimate against the table of all pairs, and its growth up to a million
categories.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor

import arsm
from arsm.noise import dirichlet
from arsm.swap import run_race, swap_with, threshold
from benchmarks.measure import (
    Table,
    Timing,
    in_subprocess,
    interleaved,
    peak_memory,
    seconds,
    table,
)

COMPARED = 10_000
BLOCK = 500
BURST = 20
GROWTH = [10, 100, 1_000, 10_000, 100_000, 1_000_000]


def linear(z: Tensor) -> Tensor:
    return z[:, 0].double()


def by_table(logits: Tensor, log_pi: Tensor) -> Tensor:
    """g_c = sum_j (F_cj - mean_m F_mj) (1/C - pi_j) over the C x C table, BLOCK rows of it at a
    time.
    """
    categories = len(logits)
    race = run_race(logits, log_pi)
    theta, with_z = threshold(race), swap_with(race, race.z).long()
    category = torch.arange(categories)
    f = linear(category.unsqueeze(-1))
    weight = 1 / categories - log_pi.double().exp()
    sums = []
    for c in category.split(BLOCK):
        c = c.unsqueeze(-1)
        pseudo = torch.where(race.a < theta[c], c, torch.where(race.a[c] < theta, category, race.z))
        pseudo = torch.where(category == race.z, with_z[c], pseudo)
        pseudo = torch.where(c == race.z, with_z, pseudo)
        sums.append(f[pseudo] @ weight)
    total = torch.cat(sums)
    return total - total.mean()


def compare() -> Table:
    """One estimate under the same noise, in both ways, alternately."""
    torch.set_num_threads(1)
    logits = torch.zeros(COMPARED)
    log_pi = dirichlet(logits, torch.Generator().manual_seed(0))

    def estimate() -> Tensor | None:
        return arsm.estimate(
            arsm.ARSM(), logits, linear, noise=log_pi.unsqueeze(0), max_rows=None
        ).grad

    found = estimate()
    torch.testing.assert_close(found, by_table(logits, log_pi), rtol=0, atol=1e-9 * COMPARED)
    times = interleaved(
        {
            "table": lambda: by_table(logits, log_pi),
            "estimate": lambda: [estimate() for _ in range(BURST)],
        },
        5,
        time.process_time,
    )
    table_time = times["table"]
    one = Timing.of([x / BURST for x in times["estimate"].each])
    ratio = table_time.median / one.median
    rows = [
        ["C x C table", str(table_time)],
        ["arsm.estimate", str(one)],
        ["ratio", f"{ratio:.0f}"],
    ]
    return table(
        f"One ARSM estimate, C = {COMPARED:,}, one thread",
        ["way", "median (range)"],
        rows,
        {"C x C table": table_time, "arsm.estimate": one},
    )


def grow() -> Table:
    """Noise, estimate and backward, each size in its own process; equal logits need f at every
    category.
    """
    rows, times = [], {}
    for categories in GROWTH:
        result = json.loads(in_subprocess("benchmarks.univariate", str(categories)))
        timing = Timing.of(result["seconds"])
        times[f"{categories:,}"] = timing
        memory = f"{result['bytes'] / 1e6:,.0f} MB"
        rows.append(
            [
                f"{categories:,}",
                str(timing),
                seconds(timing.median / categories),
                memory,
                str(result["asked"]),
            ]
        )
    header = ["C", "median (range)", "per category", "peak memory added", "evaluations of f"]
    return table("Noise, estimate and backward, one thread", header, rows, times)


def measure(categories: int) -> str:
    """Time and added peak memory of one size, as JSON."""

    def step(size: int) -> int:
        logits = torch.zeros(size, requires_grad=True)
        out = arsm.estimate(arsm.ARSM(), logits, linear, max_rows=None)
        out.value.backward()
        return int(out.info["distinct"])

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step(10)
    before = peak_memory()
    timing = interleaved({"step": lambda: step(categories)}, 7, time.process_time)["step"]
    added = peak_memory() - before
    return json.dumps(
        {
            "seconds": timing.each,
            "bytes": added,
            "asked": step(categories),
        }
    )


def main() -> list[Table]:
    tables = [compare(), grow()]
    print(*tables, sep="\n")
    return tables


if __name__ == "__main__":
    print(measure(int(sys.argv[1])))
