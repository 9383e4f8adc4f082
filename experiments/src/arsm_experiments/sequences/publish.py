"""The sequences' table and figures, from their records: `python -m arsm_experiments.sequences.publish`.

`results/sequences/records.tar.xz` holds the lines of JSON that `measure`, `curves` and `speed` wrote; `provenance.json`
among them says on which hardware and at which commit.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arsm_experiments.sequences.methods import read_lines

Record = dict[str, Any]
RESULTS = Path("results/sequences")
COLUMNS = ("row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit")
TASKS = ("number_sorting", "spell_backward", "chain_sum", "number_filtering")
LEVELS = (0.1, 0.45, 0.8)
GROUPS = ("group 2", "group 4", "group 8", "group 16")
ACCURACIES = (0.5, 0.7, 0.9)
DRAWN = (
    "token baseline 8",
    "value head, lambda 0.95",
    "branch rloo 4",
    "branch rloo 16",
    "branch arsm",
    "critic alone",
)
COLOURS = ("#8c8c8c", "#c28f2c", "#7fb2e5", "#1f5fa8", "#b5473c", "#3a8f4d")


def cost(record: Record) -> float:
    """Trace of the gradient's covariance x generated tokens."""
    return record["trace"] * record["tokens"]


def variances(folder: Path) -> dict[tuple[str, float], dict[str, Record]]:
    """Records by (task, level) and method."""
    found: dict[tuple[str, float], dict[str, Record]] = defaultdict(dict)
    for task in TASKS:
        for record in read_lines(folder / f"variance-{task}.jsonl"):
            found[task, record["level"]][record["method"]] = record
    return found


def runs(folder: Path, task: str) -> dict[tuple[str, float], dict[int, list[Record]]]:
    """Finished training runs of the reported seeds by (method, rate) and seed; seed 0 chose the rates."""
    whole: dict[tuple[str, float, int], list[Record]] = {}
    for record in read_lines(folder / f"curves-{task}.jsonl"):
        key = record["method"], record["rate"], record["seed"]
        if record["update"] == 0:
            whole[key] = []
        whole[key].append(record)
    found: dict[tuple[str, float], dict[int, list[Record]]] = defaultdict(dict)
    for (method, rate, seed), records in whole.items():
        if seed and records[-1]["end"]:
            found[method, rate][seed] = records
    return found


def tokens_to(records: list[Record], level: float) -> float | None:
    """Generated tokens at which the accuracy crosses a level, between two evaluations by a straight line."""
    for before, after in itertools.pairwise(records):
        if before["accuracy"] < level <= after["accuracy"]:
            share = (level - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["tokens"] + share * (after["tokens"] - before["tokens"])
    return None


def rows(folder: Path) -> Iterator[list[Any]]:
    """The lines of table.csv."""
    provenance = json.loads((folder / "provenance.json").read_text())
    for (task, level), methods in variances(folder).items():
        best = min(cost(methods[name]) for name in GROUPS if name in methods)
        for name, record in methods.items():
            where = f"{task}, accuracy {record['accuracy']:.2f} (level {level}), {name}"
            about = ["", record["repeats"], "", f"{record['seconds']:.3f}", *provenance["variance"]]
            yield [where, "trace x tokens", f"{cost(record):.4g}", *about]
            yield [where, "trace x tokens / best group", f"{cost(record) / best:.3f}", *about]
    for task in TASKS:
        for (method, rate), seeds in runs(folder, task).items():
            where, ends = f"{task}, {method}, rate {rate:g}", [records[-1] for records in seeds.values()]
            seconds = f"{statistics.mean(end['seconds'] for end in ends):.0f}"
            yield line(where, "last accuracy", [end["accuracy"] for end in ends], seconds, provenance["curves"])
            for level in ACCURACIES:
                reached = [tokens_to(records, level) for records in seeds.values()]
                if all(reached):
                    known = [x for x in reached if x is not None]
                    yield line(where, f"tokens to {level}", known, seconds, provenance["curves"])
    for record in read_lines(folder / "speed.jsonl"):
        if record["measured"] == "decoding":
            where = f"decoding, {record['rows']} rows"
            ratio = record["branched tokens per second"] / record["plain tokens per second"]
            about = ["", 1, "", "", *provenance["variance"]]
            yield [where, "plain tokens per second", f"{record['plain tokens per second']:.0f}", *about]
            yield [where, "branched / plain", f"{ratio:.2f}", *about]


def line(where: str, metric: str, values: list[float], seconds: str, about: list[str]) -> list[Any]:
    """A row of several seeds."""
    spread = f"{statistics.stdev(values):.4g}" if len(values) > 1 else ""
    return [where, metric, f"{statistics.mean(values):.4g}", spread, len(values), "", seconds, *about]


def draw_variances(folder: Path, path: Path) -> None:
    """Each method's cost relative to the best group of whole sequences, by task and accuracy."""
    import matplotlib.pyplot as plt

    found = variances(folder)
    figure, panels = plt.subplots(1, len(TASKS), figsize=(11, 3.4), sharey=True, layout="constrained")
    for axes, task in zip(panels, TASKS, strict=True):
        for name, colour in zip(DRAWN, COLOURS, strict=True):
            points = []
            for level in LEVELS:
                methods = found.get((task, level), {})
                if name in methods:
                    best = min(cost(methods[group]) for group in GROUPS if group in methods)
                    points.append((methods[name]["accuracy"], cost(methods[name]) / best))
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, "o-", color=colour, label=name, markersize=4, linewidth=1.4)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(task.replace("_", " "), fontsize=10)
        axes.set_xlabel("accuracy of the model")
        axes.set_yscale("log")
    panels[0].set_ylabel("variance x tokens, best group = 1")
    handles = {h.get_label(): h for axes in panels for h in axes.get_lines() if not str(h.get_label()).startswith("_")}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def draw_curves(folder: Path, path: Path) -> None:
    """Accuracy against generated tokens: mean, and the range over the seeds; each method at its best rate."""
    import matplotlib.pyplot as plt

    tasks = [task for task in TASKS if runs(folder, task)]
    figure, panels = plt.subplots(1, len(tasks), figsize=(11, 3.4), layout="constrained")
    names = ("branch rloo 8", "group 8", "token baseline 8", "grpo 8", "value head")
    colours = ("#1f5fa8", "#8c8c8c", "#c28f2c", "#b5473c", "#3a8f4d")
    for axes, task in zip(panels, tasks, strict=True):
        by_name: dict[str, dict[int, list[Record]]] = {}
        for (method, _), seeds in runs(folder, task).items():
            held = by_name.get(method)
            if held is None or last(seeds) > last(held):
                by_name[method] = seeds
        for name, colour in zip(names, colours, strict=True):
            if name not in by_name:
                continue
            columns = list(zip(*by_name[name].values(), strict=False))
            x = [statistics.mean(r["tokens"] for r in column) / 1e6 for column in columns]
            y = [[r["accuracy"] for r in column] for column in columns]
            axes.plot(x, [statistics.mean(v) for v in y], color=colour, label=name, linewidth=1.5)
            axes.fill_between(x, [min(v) for v in y], [max(v) for v in y], color=colour, alpha=0.15, linewidth=0)
        axes.set_title(task.replace("_", " "), fontsize=10)
        axes.set_xlabel("generated tokens, millions")
        axes.set_ylim(0, None)
    panels[0].set_ylabel("accuracy, one sample per question")
    handles = {h.get_label(): h for axes in panels for h in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def last(seeds: dict[int, list[Record]]) -> float:
    """The mean of the last accuracies."""
    return statistics.mean(records[-1]["accuracy"] for records in seeds.values())


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


def main(results: Path = RESULTS) -> None:
    """Write the table and the figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(results / "records.tar.xz", folder)
        write_table(folder, results / "table.csv")
        draw_variances(folder, results / "variance.png")
        draw_curves(folder, results / "curves.png")


if __name__ == "__main__":
    main()
