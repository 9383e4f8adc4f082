"""The sequences' table and figures, from their records: `python -m
arsm_experiments.sequences.publish`.

`results/sequences/records.tar.xz` holds the lines of JSON that `schedule` wrote, those of curves by
column; `provenance.json` among them says on which hardware and at which commit. `--records FOLDER`
first packs that folder into the archive.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import lzma
import os
import statistics
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arsm_experiments.palette import save
from arsm_experiments.runs.archive import by_column, by_line
from arsm_experiments.sequences.curves import GOALS, Record, Run, best_choice, crossing, finished
from arsm_experiments.sequences.measure import FRESH
from arsm_experiments.sequences.methods import read_lines

Runs = dict[str, dict[int, Run]]
"""Training runs by method and seed."""
RESULTS = Path("results/sequences")
COLUMNS = ("row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit")
TASKS = {
    "spelling": "spell_backward",
    "spiral": "spiral_matrix",
    "sorting": "small_sorting",
    "filtering": "small_filtering",
}
"""Tasks by their names on the page."""
COLUMNS_SUFFIX = ".columns"
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


def variances(folder: Path) -> dict[tuple[str, float], dict[str, Record]]:
    """Records by (task, level) and method."""
    found: dict[tuple[str, float], dict[str, Record]] = defaultdict(dict)
    for task in TASKS.values():
        for record in read_lines(folder / f"variance-{task}.jsonl"):
            found[task, record["level"]][record["method"]] = record
    return found


def between_prompts(methods: dict[str, Record]) -> float | None:
    """What drawing 128 prompts adds to the trace, the same for all unbiased methods; None where it
    was not measured.
    """
    both = [(methods[name + FRESH], methods[name]) for name in methods if name + FRESH in methods]
    return (
        statistics.mean(fresh["trace"] - fixed["trace"] for fresh, fixed in both) if both else None
    )


def relative(methods: dict[str, Record], name: str, added: float = 0.0) -> float:
    """(trace + added) x tokens, relative to the best group."""
    measured = {key: methods[key] for key in (*GROUPS, name) if key in methods}
    costs = {
        key: (max(record["trace"], 0) + added) * record["tokens"]
        for key, record in measured.items()
    }
    return costs[name] / min(costs[key] for key in GROUPS if key in costs)


def runs(folder: Path, task: str, start: float, goal: float) -> Runs:
    """Finished runs of the reported seeds, with the size and rate that seed 0 chose for a goal."""
    whole = finished(read_lines(folder / f"curves-{task}.jsonl"))
    found: Runs = defaultdict(dict)
    for (begun, method, seed), choices in whole.items():
        if seed and begun == start and (start, method, 0) in whole:
            choice = best_choice(whole[start, method, 0], goal)
            if choice in choices:
                found[method][seed] = choices[choice]
    return found


def variance_rows(
    task: str, level: float, methods: dict[str, Record], about: list[str]
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


def rows(folder: Path) -> Iterator[list[Any]]:
    """The lines of table.csv."""
    provenance = json.loads((folder / "provenance.json").read_text())
    for (task, level), methods in variances(folder).items():
        yield from variance_rows(task, level, methods, provenance["variance"])
    for task, start, goal in itertools.product(TASKS.values(), LEVELS, GOALS):
        found = runs(folder, task, start, goal)
        about = provenance[f"curves-{task}"]
        yield from goal_rows(found, goal, f"{task}, from {start}, ", about)
        yield from rival_rows(found, goal, f"{task}, from {start}, ", about)


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


def draw_variances(folder: Path, path: Path) -> None:
    """Each method's cost relative to the best group of whole sequences, by task and accuracy."""
    import matplotlib.pyplot as plt

    found = variances(folder)
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


def draw_curves(folder: Path, path: Path) -> None:
    """Accuracy against generated tokens of the runs to the last goal: mean and range over seeds.

    A run that has ended keeps its last accuracy.
    """
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TASKS), figsize=(11, 3.6), layout="constrained")
    for axes, title in zip(panels, TASKS, strict=True):
        best = runs(folder, TASKS[title], LEVELS[0], GOALS[-1])
        highest = 0.0
        for name, colour in CURVES.items():
            if name not in best:
                continue
            seeds = list(best[name].values())
            number = range(max(map(len, seeds)))
            x = [
                statistics.mean(records[i]["tokens"] for records in seeds if i < len(records)) / 1e3
                for i in number
            ]
            y = [
                [records[min(i, len(records) - 1)]["accuracy"] for records in seeds] for i in number
            ]
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


def write_table(folder: Path, path: Path) -> None:
    """table.csv."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(folder))


def unpack(archive: Path, folder: Path) -> None:
    """The records, as files of a folder."""
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    for path in folder.rglob(f"*{COLUMNS_SUFFIX}"):
        path.with_suffix(".jsonl").write_bytes(by_line(path.read_bytes()))
        path.unlink()


def pack(folder: Path, archive: Path) -> None:
    """A folder's records: of curves the last whole run of each kind, by column, seconds in tenths,
    other numbers to six digits.
    """
    part = archive.with_suffix(".part")
    with (
        lzma.open(part, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(mode="w", fileobj=packed) as files,
    ):
        for path in sorted([*folder.rglob("*.jsonl"), folder / "provenance.json"]):
            name = path.relative_to(folder)
            data = path.read_bytes()
            if path.name.startswith("curves"):
                name = name.with_suffix(COLUMNS_SUFFIX)
                data = by_column(_lines([shorten(record) for record in _whole_runs(path)]))
            elif path.suffix == ".jsonl":
                data = _lines([shorten(record) for record in read_lines(path)])
            entry = tarfile.TarInfo(str(name))
            entry.size = len(data)
            files.addfile(entry, io.BytesIO(data))
    os.replace(part, archive)


def _whole_runs(path: Path) -> list[Record]:
    """The measurements of the last whole run of each kind."""
    found = finished(read_lines(path))
    return [record for runs in found.values() for run in runs.values() for record in run]


def _lines(records: list[Record]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def shorten(record: Record) -> Record:
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(archive, folder)
        write_table(folder, options.results / "table.csv")
        draw_variances(folder, options.results / "variance.png")
        draw_curves(folder, options.results / "curves.png")


if __name__ == "__main__":
    main()
