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
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
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
    where = records.place()
    torch.set_num_threads(1)
    budget = Budget(FAMILIES[family](instance), evaluations)
    start = time.process_time()
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
    # instance by instance, so that optimisers take turns and whole columns get finished
    keys = [
        (method, family, instance, budget)
        for instance in range(first, first + instances)
        for method in methods
        for budget in ([max(budgets)] if method in ANYTIME else budgets)
        for family in families
    ]
    records.make_in_processes(
        out,
        keys,
        lambda r: (r["method"], r["family"], r["instance"], r["budget"]),
        one_run,
        lambda r: f"{r['best']:.2f} in {r['seconds']:.0f} s",
        workers,
    )


Groups = dict[tuple[str, str, int], list[records.Record]]
"""The reported runs by family, method and budget."""


def report(runs: list[records.Record], folder: Path) -> None:
    """table.csv, and best.png: the mean best value over the held-out instances against evaluations.

    The figure leaves out optimisers with fewer instances than the others, whose mean would be of
    something else.
    """
    groups = _groups(runs)
    records.write_table(folder / "table.csv", [_row(*item) for item in sorted(groups.items())])
    _draw(groups, folder / "best.png")


def _groups(runs: list[records.Record]) -> Groups:
    found: dict[tuple[str, str, int], dict[int, records.Record]] = defaultdict(dict)
    # by budget, so that a run at the budget itself replaces the start of a longer one
    for record in sorted(runs, key=lambda record: record["budget"]):
        if record["instance"] not in HELD_OUT:
            continue
        for budget in BUDGETS:
            reaches = budget < record["budget"] and record["method"] in ANYTIME
            if budget == record["budget"] or reaches:
                best = record["curve"][CURVE.index(budget)]
                key = (record["family"], record["method"], budget)
                found[key][record["instance"]] = {**record, "best": best}
    return {key: list(by_instance.values()) for key, by_instance in found.items()}


def _row(key: tuple[str, str, int], group: list[records.Record]) -> list[object]:
    family, method, budget = key
    best = [record["best"] for record in group]
    return [
        f"{family}: {method}",
        f"best value after {budget:,} evaluations",
        f"{statistics.mean(best):.6g}",
        f"{statistics.stdev(best):.4g}" if len(best) > 1 else "",
        len(best),
        "",
        f"{sum(record['seconds'] for record in group):.1f}",
        "; ".join(sorted({record["hardware"] for record in group})),
        "; ".join(sorted({short_commit(record["commit"]) for record in group})),
    ]


def _draw(groups: Groups, path: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    from arsm_experiments.palette import save

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    most = max(map(len, groups.values()))
    complete = {key: group for key, group in groups.items() if len(group) == most}
    figure, axes = pyplot.subplots(1, len(FAMILIES), figsize=(13, 3.4), layout="constrained")
    for axis, family in zip(axes, FAMILIES, strict=True):
        _draw_family(axis, family, complete)
    axes[0].set_ylabel("best value, mean over instances")
    # beside the panels: every curve of the last one would pass behind it
    handles, names = axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
    save(figure, path)


def _draw_family(axis: Any, family: str, complete: Groups) -> None:
    for number, method in enumerate(METHODS):
        budgets = [b for f, m, b in complete if (f, m) == (family, method)]
        if not budgets:
            continue
        x = [n for n in CURVE if n <= max(budgets)]
        group = complete[family, method, max(budgets)]
        curves = [record["curve"][: len(x)] for record in group]
        y = [statistics.mean(values) for values in zip(*curves, strict=True)]
        wide = 2.5 if method == "arsm.maximize" else 1.2
        axis.plot(x, y, label=method, color=f"C{number}", linewidth=wide, zorder=wide)
    axis.set(title=family, xscale="log", xlabel="evaluations, 16 at a time")
    # from the best first value on: below it all curves are alike, and steep
    low = axis.get_ylim()[0]
    top = max(line.get_ydata()[-1] for line in axis.get_lines())
    start = max(line.get_ydata()[0] for line in axis.get_lines())
    axis.set_ylim(max(low, start), top + 0.05 * (top - start))


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
