"""python -m benchmarks.maximize: `arsm.maximize` beside other optimisers of discrete black boxes.

Four families with ten instances each, 16 points at a time, the best value after 2,000
distinct evaluations. An optimiser that does not use its budget is run once, at the largest;
the others once per budget. A run is one line of results/maximize/runs.jsonl.xz, and those already
there are not repeated:

    python -m benchmarks.maximize run               # needs optuna, nevergrad and cmaes
    python -m benchmarks.maximize run --methods "Optuna TPE" --instances 3
    python -m benchmarks.maximize report            # table.csv and the figure

Instances 0 to 9 and 20 to 39 are for the development of `arsm.maximize` and of its constants; only
10 to 19 are reported. The optimisers take turns, on one thread, so that a busy machine meets all of
them; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from arsm_experiments.runs.provenance import short_commit
from benchmarks import records
from benchmarks.black_boxes import FAMILIES
from benchmarks.rivals import ANYTIME, RIVALS, Budget, Spent

RESULTS = Path(__file__).parent.parent / "results" / "maximize"
RUNS = RESULTS / "runs.jsonl.xz"
BUDGETS = (2_000,)
INSTANCES = 10
HELD_OUT = range(10, 20)
"""The instances that are reported; `arsm.maximize` was developed on others."""
SELDOM = ("Optuna TPE", "nevergrad NGOpt")
"""Optimisers that take minutes per run, and run only where they are asked for."""
CURVE = tuple(sorted({round(16 * 125 ** (i / 28)) for i in range(29)} | {500, 1_000, 2_000}))
"""Evaluations after which a run's best is kept: 16 to 2,000."""


def ours(budget: Budget, seed: int) -> None:
    """`arsm.maximize` as it comes."""
    import arsm

    box = budget.box
    found = arsm.maximize(
        lambda z: box.f(z.numpy()),
        box.sizes,
        batched=True,
        evaluations=budget.evaluations,
        seed=seed,
        progress=False,
    )
    budget.best = found.history.tolist()


METHODS: dict[str, Callable[[Budget, int], None]] = {"arsm.maximize": ours, **RIVALS}


def digits(value: float) -> float:
    """Six significant digits, which keeps the records small."""
    return float(f"{value:.6g}")


def one_run(method: str, family: str, instance: int, evaluations: int) -> dict[str, Any]:
    """The record of a run; the instance's number is the optimiser's seed."""
    where = {
        name: value
        for name, value in records.source().items()
        if name in ("hardware", "commit", "torch")
    }
    torch.set_num_threads(1)
    budget, start = Budget(FAMILIES[family](instance), evaluations), time.process_time()
    with contextlib.suppress(Spent):
        METHODS[method](budget, instance)
    return {
        "method": method,
        "family": family,
        "instance": instance,
        "budget": evaluations,
        "best": digits(budget.best[-1]),
        "evaluations": len(budget.best),
        "curve": [
            digits(budget.best[min(n, len(budget.best)) - 1]) for n in CURVE if n <= evaluations
        ],
        "seconds": round(time.process_time() - start, 2),
        **where,
    }


def run(
    methods: list[str],
    families: list[str],
    budgets: list[int],
    first: int,
    instances: int,
    workers: int,
    out: Path,
) -> None:
    """Make the runs that are missing, with the time left after each."""
    done = {(r["method"], r["family"], r["instance"], r["budget"]) for r in records.read(out)}
    missing = [
        key
        for instance in range(first, first + instances)
        for method in methods
        for budget in ([max(budgets)] if method in ANYTIME else budgets)
        for family in families
        if (key := (method, family, instance, budget)) not in done
    ]
    started = time.monotonic()
    with ProcessPoolExecutor(workers) as processes:
        pending = [processes.submit(one_run, *key) for key in missing]
        for number, finished in enumerate(as_completed(pending), 1):
            record = finished.result()
            records.add(out, record)
            left = (time.monotonic() - started) / number * (len(missing) - number)
            where = (
                f"{record['method']}, {record['family']} {record['instance']}, {record['budget']:,}"
            )
            print(
                f"{number}/{len(missing)} {where}: {record['best']:.2f} in {record['seconds']:.0f} "
                f"s; about {left / 60:.0f} min left",
                flush=True,
            )


def report(runs: list[dict[str, Any]], folder: Path) -> None:
    """table.csv, and best.png: the mean best value over the held-out instances against evaluations.

    The figure leaves out optimisers with fewer instances than the others, whose mean would be of
    something else.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    from arsm_experiments.palette import save

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    found: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in sorted(runs, key=lambda record: record["budget"]):
        if record["instance"] not in HELD_OUT:
            continue
        for budget in BUDGETS:
            if budget == record["budget"] or (
                budget < record["budget"] and record["method"] in ANYTIME
            ):
                best = record["curve"][CURVE.index(budget)]
                found[record["family"], record["method"], budget][record["instance"]] = {
                    **record,
                    "best": best,
                }
    groups = {key: list(by_instance.values()) for key, by_instance in found.items()}
    most = max(map(len, groups.values()))
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit"]
        )
        for (family, method, budget), group in sorted(groups.items()):
            best = [record["best"] for record in group]
            std = f"{statistics.stdev(best):.4g}" if len(best) > 1 else ""
            seconds = f"{sum(record['seconds'] for record in group):.1f}"
            metric = f"best value after {budget:,} evaluations"
            row = [
                f"{family}: {method}",
                metric,
                f"{statistics.mean(best):.6g}",
                std,
                len(best),
                "",
                seconds,
            ]
            hardware = sorted({record["hardware"] for record in group})
            commits = sorted({short_commit(record["commit"]) for record in group})
            writer.writerow([*row, "; ".join(hardware), "; ".join(commits)])
    figure, axes = pyplot.subplots(1, len(FAMILIES), figsize=(16, 4.2), layout="constrained")
    colours = {method: f"C{i}" for i, method in enumerate(METHODS)}
    for axis, family in zip(axes, FAMILIES, strict=True):
        full = [key for key, group in groups.items() if key[0] == family and len(group) == most]
        largest = {
            method: max((b for _, m, b in full if m == method), default=0) for method in METHODS
        }
        for method, budget in largest.items():
            if not budget:
                continue
            x = [n for n in CURVE if n <= budget]
            curves = [record["curve"][: len(x)] for record in groups[family, method, budget]]
            y = [statistics.mean(values) for values in zip(*curves, strict=True)]
            wide = 2.5 if method == "arsm.maximize" else 1.2
            axis.plot(x, y, label=method, color=colours[method], linewidth=wide, zorder=wide)
        axis.set(title=family, xscale="log", xlabel="evaluations, 16 at a time")
        low = axis.get_ylim()[0]
        top = max(line.get_ydata()[-1] for line in axis.get_lines())
        start = max(line.get_ydata()[0] for line in axis.get_lines())
        axis.set_ylim(max(low, start), top + 0.05 * (top - start))
    axes[0].set_ylabel("best value, mean over instances")
    axes[-1].legend(fontsize=8)
    save(figure, folder / "best.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make the runs that are missing")
    runs.add_argument(
        "--methods",
        nargs="+",
        default=[method for method in METHODS if method not in SELDOM],
        choices=list(METHODS),
        metavar="METHOD",
    )
    runs.add_argument(
        "--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY"
    )
    runs.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS))
    runs.add_argument("--instances", type=int, default=INSTANCES)
    runs.add_argument("--first", type=int, default=HELD_OUT[0], help="number of the first instance")
    runs.add_argument("--workers", type=int, default=1)
    runs.add_argument("--out", type=Path, default=RUNS)
    commands.add_parser("report", help="table.csv and best.png from the runs")
    options = vars(parser.parse_args())
    if options.pop("command") == "run":
        run(**options)
    else:
        runs = records.read(RUNS)
        records.write(RUNS, runs)
        report(runs, RESULTS)


if __name__ == "__main__":
    main()
