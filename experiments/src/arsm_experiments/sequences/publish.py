"""The sequences' table and figures, from their records: `python -m
arsm_experiments.sequences.publish`.

`results/sequences/records.tar.xz` is an archive of runs, as `results/runs` holds them: one for the
trainings of every task, one for its variances, and one for all checkpoints. `--records FOLDER`
first makes it from the lines of JSON that `schedule` wrote; FOLDER/provenance.json says on which
hardware and at which commit.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arsm_experiments.palette import save
from arsm_experiments.runs import lines
from arsm_experiments.runs.archive import read_archive, write_archive
from arsm_experiments.runs.reader import FORMAT, Record, make_record
from arsm_experiments.runs.table import COLUMNS
from arsm_experiments.sequences.curves import (
    GOALS,
    Measurement,
    Run,
    best_choice,
    crossing,
    finished,
)
from arsm_experiments.sequences.measure import FRESH

Records = dict[str, Record]
"""Runs by name: curves-TASK, variance-TASK and pretraining."""
Runs = dict[str, dict[int, Run]]
"""Training runs by method and seed."""
RESULTS = Path("results/sequences")
TASKS = {
    "spelling": "spell_backward",
    "spiral": "spiral_matrix",
    "sorting": "small_sorting",
    "filtering": "small_filtering",
}
"""Tasks by their names on the page."""
LEVELS = (0.1, 0.45, 0.8)
GROUPS = ("group 2", "group 4", "group 8", "group 16")
RIVALS = ("value head", "token baseline 8", "group 4", "group 8", "grpo 8", "vineppo 2")
OURS = ("likeliest", "branch rloo 64, chance")
DRAWN = {
    "token baseline 8": "#6e6e6e",
    "value head": "#c28f2c",
    "branch rloo 16, true returns": "#a9cbee",
    "branch rloo 16": "#5a94d1",
    "branch rloo 64, chance": "#1f5fa8",
    "likeliest": "#b5473c",
}
CURVES = {
    "group 4": "#8fa3ad",
    "group 8": "#b9a48c",
    "token baseline 8": "#6e6e6e",
    "grpo 8": "#9b6fb5",
    "value head": "#c28f2c",
    "vineppo 2": "#3a8f4d",
    "branch rloo 64, chance": "#1f5fa8",
    "likeliest": "#b5473c",
}
SHOWN = {"spelling": 200, "spiral": 80}
"""Thousands of tokens up to which curves are drawn, where the slowest method would squeeze the
others.
"""


def variances(records: Records) -> dict[tuple[str, float], dict[str, Measurement]]:
    """Measurements by (task, level) and method."""
    found: dict[tuple[str, float], dict[str, Measurement]] = defaultdict(dict)
    for task in TASKS.values():
        for line in records[f"variance-{task}"].metrics:
            found[task, line["level"]][line["method"]] = line
    return found


def between_prompts(methods: dict[str, Measurement]) -> float | None:
    """What drawing 128 prompts adds to the trace, the same for all unbiased methods; None where it
    was not measured.
    """
    both = [(methods[name + FRESH], methods[name]) for name in methods if name + FRESH in methods]
    return (
        statistics.mean(fresh["trace"] - fixed["trace"] for fresh, fixed in both) if both else None
    )


def relative(methods: dict[str, Measurement], name: str, added: float = 0.0) -> float:
    """(trace + added) x tokens, relative to the best group."""
    measured = {key: methods[key] for key in (*GROUPS, name) if key in methods}
    costs = {
        key: (max(record["trace"], 0) + added) * record["tokens"]
        for key, record in measured.items()
    }
    return costs[name] / min(costs[key] for key in GROUPS if key in costs)


def runs(records: Records, task: str, start: float, goal: float) -> Runs:
    """Finished runs of the reported seeds, with the size and rate that seed 0 chose for a goal."""
    whole = finished(records[f"curves-{task}"].metrics)
    found: Runs = defaultdict(dict)
    for (begun, method, seed), choices in whole.items():
        if seed and begun == start and (start, method, 0) in whole:
            choice = best_choice(whole[start, method, 0], goal)
            if choice in choices:
                found[method][seed] = choices[choice]
    return found


def variance_rows(
    task: str, level: float, methods: dict[str, Measurement], about: list[str]
) -> Iterator[list[Any]]:
    """Variance times tokens at a checkpoint, relative to the best group, at fixed prompts."""
    for name, record in methods.items():
        if not name.endswith(FRESH):
            where = f"{task}, accuracy {record['accuracy']:.2f} (level {level}), {name}"
            rest = ["", record["repeats"], "", f"{record['seconds']:.3f}", *about]
            yield [where, "trace x tokens / best group", f"{relative(methods, name):.3f}", *rest]


def rival_rows(found: Runs, goal: float, where: str, about: list[str]) -> Iterator[list[Any]]:
    """Tokens to a goal over the best rival's: means, and slowest seed over fastest; none where a
    seed failed to.
    """
    tokens: dict[str, list[float]] = {}
    for method, seeds in found.items():
        reached = [crossing(run, goal) for run in seeds.values()]
        if None not in reached:
            tokens[method] = [known[0] for known in reached if known is not None]
    rivals = [tokens[name] for name in RIVALS if name in tokens]
    for method in OURS:
        if method in tokens and rivals:
            best, metric = min(rivals, key=statistics.mean), f"tokens to {goal} / best rival"
            mean, worst = (
                statistics.mean(tokens[method]) / statistics.mean(best),
                max(tokens[method]) / min(best),
            )
            yield [f"{where}{method}", metric, f"{mean:.2f}", "", "", "", "", *about]
            yield [
                f"{where}{method}",
                f"{metric}, slowest seed / fastest seed",
                f"{worst:.2f}",
                "",
                "",
                "",
                "",
                *about,
            ]


def goal_rows(found: Runs, goal: float, where: str, about: list[str]) -> Iterator[list[Any]]:
    """How far the runs to a goal came, and the tokens that it took them if every one got there."""
    for method, seeds in found.items():
        ends = [run[-1] for run in seeds.values()]
        name = f"{where}{method}, updates of {ends[0]['per_update']}, rate {ends[0]['rate']:g}"
        seconds = f"{statistics.mean(end['seconds'] for end in ends):.0f}"
        yield line(
            name, f"last accuracy, to {goal}", [end["accuracy"] for end in ends], seconds, about
        )
        reached = [known for run in seeds.values() if (known := crossing(run, goal)) is not None]
        if len(reached) == len(seeds):
            tokens, times = zip(*reached, strict=True)
            yield line(
                name, f"tokens to {goal}", list(tokens), f"{statistics.mean(times):.0f}", about
            )


def about(record: Record) -> list[str]:
    """Hardware and commit of a run."""
    session = record.sessions[-1]
    return [session["hardware"], session["commit"]]


def rows(records: Records) -> Iterator[list[Any]]:
    """The lines of table.csv."""
    for (task, level), methods in variances(records).items():
        yield from variance_rows(task, level, methods, about(records[f"variance-{task}"]))
    for task, start, goal in itertools.product(TASKS.values(), LEVELS, GOALS):
        found = runs(records, task, start, goal)
        made = about(records[f"curves-{task}"])
        yield from goal_rows(found, goal, f"{task}, from {start}, ", made)
        yield from rival_rows(found, goal, f"{task}, from {start}, ", made)


def line(where: str, metric: str, values: list[float], seconds: str, about: list[str]) -> list[Any]:
    """A row of several seeds."""
    spread = f"{statistics.stdev(values):.4g}" if len(values) > 1 else ""
    return [
        where,
        metric,
        f"{statistics.mean(values):.4g}",
        spread,
        len(values),
        "",
        seconds,
        *about,
    ]


def draw_variances(records: Records, path: Path) -> None:
    """Each method's cost relative to the best group of whole sequences, by task and accuracy."""
    import matplotlib.pyplot as plt

    found = variances(records)
    figure, panels = plt.subplots(
        1, len(TASKS), figsize=(11, 3.4), sharey=True, layout="constrained"
    )
    for axes, title in zip(panels, TASKS, strict=True):
        task = TASKS[title]
        for name, colour in DRAWN.items():
            levels = [
                found[task, level] for level in LEVELS if name in found.get((task, level), {})
            ]
            x = [methods[name]["accuracy"] for methods in levels]
            y = [
                max(relative(methods, name, between_prompts(methods) or 0.0), 1e-3)
                for methods in levels
            ]
            axes.plot(x, y, "o-", color=colour, label=name, markersize=4, linewidth=1.4)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("accuracy of the model")
        axes.set_yscale("log")
    panels[0].set_ylabel("variance x tokens, best group = 1")
    handles = {
        h.get_label(): h
        for axes in panels
        for h in axes.get_lines()
        if not str(h.get_label()).startswith("_")
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=8,
    )
    save(figure, path)
    plt.close(figure)


def draw_curves(records: Records, path: Path) -> None:
    """Accuracy against generated tokens of the runs to the last goal: mean and range over seeds.

    A run that has ended keeps its last accuracy.
    """
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TASKS), figsize=(11, 3.6), layout="constrained")
    for axes, title in zip(panels, TASKS, strict=True):
        best = runs(records, TASKS[title], LEVELS[0], GOALS[-1])
        highest = 0.0
        for name, colour in CURVES.items():
            if name not in best:
                continue
            seeds = list(best[name].values())
            number = range(max(map(len, seeds)))
            x = [
                statistics.mean(run[i]["tokens"] for run in seeds if i < len(run)) / 1e3
                for i in number
            ]
            y = [[run[min(i, len(run) - 1)]["accuracy"] for run in seeds] for i in number]
            highest = max(highest, *map(max, y))
            axes.plot(x, [statistics.mean(v) for v in y], color=colour, label=name, linewidth=1.5)
            axes.fill_between(
                x, [min(v) for v in y], [max(v) for v in y], color=colour, alpha=0.2, linewidth=0
            )
        axes.set_title(f"{title}, from {LEVELS[0]}", fontsize=10)
        axes.set_ylim(0, 1 if highest > 0.5 else 0.3)
        axes.set_xlim(0, SHOWN.get(title))
        axes.set_xlabel("generated tokens, thousands")
    panels[0].set_ylabel("accuracy, one sample")
    handles = {h.get_label(): h for axes in panels for h in axes.get_lines()}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    save(figure, path)
    plt.close(figure)


def write_table(records: Records, path: Path) -> None:
    """table.csv."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(records))


def load(archive: Path) -> Records:
    """The runs of an archive, by name."""
    return {
        name: make_record(archive / name, files) for name, files in read_archive(archive).items()
    }


def pack(folder: Path, archive: Path) -> None:
    """Make the archive from a folder of `schedule`: of trainings the last whole one of each kind,
    seconds in tenths, other numbers to six digits.
    """
    known = json.loads((folder / "provenance.json").read_text())
    paths = sorted(folder.glob("*.jsonl"))
    write_archive(archive, {path.stem: _files(path, known) for path in paths})


def _files(path: Path, known: dict[str, Any]) -> dict[str, bytes]:
    """A file of lines as the files of a run: configuration and metrics."""
    group, _, task = path.stem.partition("-")
    records = _whole_runs(path) if group == "curves" else lines.read(path)
    hardware, commit = known.get(path.stem, known.get(group, ["", ""]))
    header = {
        "format": FORMAT,
        "experiment": "sequences",
        "group": group,
        "label": task,
        "config": {"data": known.get("data", "")},
        "sessions": [{"hardware": hardware, "commit": commit, "torch": known.get("torch", "")}],
        "finished": True,
    }
    if task:  # the label says it
        records = [{key: record[key] for key in record if key != "task"} for record in records]
    metrics = lines.written(shorten({"step": 0} | record) for record in records)
    return {"config.json": json.dumps(header).encode(), "metrics.jsonl": metrics}


def _whole_runs(path: Path) -> list[Measurement]:
    """The measurements of the last whole run of each kind."""
    found = finished(lines.read(path))
    return [record for runs in found.values() for run in runs.values() for record in run]


def shorten(record: Measurement) -> Measurement:
    """Without digits that say nothing."""
    numbers = {
        key: float(f"{value:.6g}") for key, value in record.items() if isinstance(value, float)
    }
    long = {"seconds": round(record["seconds"], 1)} if "end" in record else {}
    return record | numbers | long


def main() -> None:
    """Write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--records", type=Path, help="A folder to pack into the archive first")
    options = parser.parse_args()
    archive = options.results / "records.tar.xz"
    if options.records is not None:
        pack(options.records, archive)
    records = load(archive)
    write_table(records, options.results / "table.csv")
    draw_variances(records, options.results / "variance.png")
    draw_curves(records, options.results / "curves.png")


if __name__ == "__main__":
    main()
