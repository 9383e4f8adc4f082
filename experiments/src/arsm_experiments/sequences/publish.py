"""The sequences' table and figures, from their records: `python -m arsm_experiments.sequences.publish`.

`results/sequences/records.tar.xz` holds the lines of JSON that `measure`, `curves` and `speed` wrote; `provenance.json`
among them says on which hardware and at which commit. Its folder `earlier` has the first measurements, of methods that
were not all measured again, and `updates-of-1000` trainings with more tokens per update.
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

from arsm_experiments.palette import save
from arsm_experiments.sequences.measure import FRESH
from arsm_experiments.sequences.methods import read_lines

Record = dict[str, Any]
RESULTS = Path("results/sequences")
COLUMNS = ("row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit")
TASKS = ("number_sorting", "spell_backward", "chain_sum", "number_filtering")
LEVELS = (0.1, 0.45, 0.8)
GROUPS = ("group 2", "group 4", "group 8", "group 16")
ACCURACIES = (0.5, 0.55, 0.6, 0.7, 0.9)
PARTS = {"": "", "updates-of-1000": "updates of 1,000 tokens, "}
"""Folders of training runs, and how their methods are named."""
COSTS = (
    "plan microseconds per token",
    "gradient microseconds per token",
    "plan memory / logits",
    "gradient memory / logits",
)
DRAWN = (
    "token baseline 8",
    "critic alone",
    "branch rloo 16, true returns",
    "branch rloo 16",
    "branch rloo 64, chance",
    "branch all, chance",
)
COLOURS = ("#8c8c8c", "#3a8f4d", "#7fb2e5", "#1f5fa8", "#e59a8f", "#b5473c")
CURVES = {
    "group 8": "#bcbcbc",
    "token baseline 8": "#6e6e6e",
    "grpo 8": "#9b6fb5",
    "value head": "#c28f2c",
    "vineppo 2": "#3a8f4d",
    "branch rloo 16, true returns": "#7fb2e5",
    "branch rloo 64, chance": "#e59a8f",
    "branch all, chance": "#b5473c",
}


def variances(folder: Path) -> dict[tuple[str, float], dict[str, Record]]:
    """Records by (task, level) and method."""
    found: dict[tuple[str, float], dict[str, Record]] = defaultdict(dict)
    for task in TASKS:
        for record in read_lines(folder / f"variance-{task}.jsonl"):
            found[task, record["level"]][record["method"]] = record
    return found


def earlier(folder: Path) -> dict[tuple[str, float], dict[str, Record]]:
    """The first measurements, under today's names: every `Branch` then used the true returns."""
    return {
        key: {name + ", true returns" * name.startswith("branch"): record for name, record in methods.items()}
        for key, methods in variances(folder / "earlier").items()
    }


def between_prompts(methods: dict[str, Record]) -> float | None:
    """What drawing 128 prompts adds to the trace, the same for all unbiased methods; None where it was not measured."""
    both = [(methods[name + FRESH], methods[name]) for name in methods if name + FRESH in methods]
    return statistics.mean(fresh["trace"] - fixed["trace"] for fresh, fixed in both) if both else None


def relative(methods: dict[str, Record], name: str, added: float = 0.0) -> float:
    """(trace + added) x tokens, relative to the best group."""
    costs = {key: (methods[key]["trace"] + added) * methods[key]["tokens"] for key in (*GROUPS, name) if key in methods}
    return costs[name] / min(costs[key] for key in GROUPS if key in costs)


def runs(folder: Path, task: str, start: float) -> dict[tuple[str, float], dict[int, list[Record]]]:
    """Finished training runs of the reported seeds by (method, rate) and seed; seed 0 chose the rates."""
    whole: dict[tuple[str, float, int], list[Record]] = {}
    for record in read_lines(folder / f"curves-{task}.jsonl"):
        if record["start"] != start:
            continue
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
    found = variances(folder)
    for (task, level), methods in found.items():
        added = between_prompts(methods)
        for name, record in methods.items():
            where = f"{task}, accuracy {record['accuracy']:.2f} (level {level}), {name}"
            about = ["", record["repeats"], "", f"{record['seconds']:.3f}", *provenance["variance"]]
            if not name.endswith(FRESH):
                yield [where, "trace x tokens / best group", f"{relative(methods, name):.3f}", *about]
                if added is not None:
                    yield [where, "the same, fresh prompts", f"{relative(methods, name, added):.3f}", *about]
    for (task, level), methods in earlier(folder).items():
        for name, record in methods.items():
            if name not in found.get((task, level), {}):
                where = f"{task}, accuracy {record['accuracy']:.2f} (level {level}), {name}"
                about = ["", record["repeats"], "", f"{record['seconds']:.3f}", *provenance["earlier"]]
                yield [where, "trace x tokens / best group", f"{relative(methods, name):.3f}", *about]
    for (part, name), task, start in itertools.product(PARTS.items(), TASKS, LEVELS):
        for (method, rate), seeds in runs(folder / part, task, start).items():
            where = f"{task}, from {start}, {name}{method}, rate {rate:g}"
            ends = [records[-1] for records in seeds.values()]
            seconds = f"{statistics.mean(end['seconds'] for end in ends):.0f}"
            yield line(where, "last accuracy", [end["accuracy"] for end in ends], seconds, provenance[f"curves{part}"])
            for level in ACCURACIES:
                reached = [tokens_to(records, level) for records in seeds.values()]
                if all(reached):
                    known = [x for x in reached if x is not None]
                    yield line(where, f"tokens to {level}", known, seconds, provenance[f"curves{part}"])
    for record in read_lines(folder / "speed.jsonl"):
        about = ["", 1, "", "", *provenance["speed"]]
        if record["measured"] == "decoding":
            where = f"decoding, {record['model']} model, {record['rows']} rows"
            ratio = record["branched tokens per second"] / record["plain tokens per second"]
            yield [where, "plain tokens per second", f"{record['plain tokens per second']:.0f}", *about]
            yield [where, "branched / plain", f"{ratio:.2f}", *about]
            if "generate tokens per second" in record:
                yield [where, "generate's tokens per second", f"{record['generate tokens per second']:.0f}", *about]
        else:
            where = f"planning, {record['estimator']}, vocabulary {record['vocabulary']}"
            for metric in COSTS:
                yield [where, metric, f"{record[metric]:.2f}", *about]


def line(where: str, metric: str, values: list[float], seconds: str, about: list[str]) -> list[Any]:
    """A row of several seeds."""
    spread = f"{statistics.stdev(values):.4g}" if len(values) > 1 else ""
    return [where, metric, f"{statistics.mean(values):.4g}", spread, len(values), "", seconds, *about]


def draw_variances(folder: Path, path: Path) -> None:
    """Each method's cost relative to the best group of whole sequences, by task and accuracy."""
    import matplotlib.pyplot as plt

    found, before = variances(folder), earlier(folder)
    figure, panels = plt.subplots(1, len(TASKS), figsize=(11, 3.4), sharey=True, layout="constrained")
    for axes, task in zip(panels, TASKS, strict=True):
        for name, colour in zip(DRAWN, COLOURS, strict=True):
            points = []
            for level in LEVELS:
                methods = next(
                    (some[task, level] for some in (found, before) if name in some.get((task, level), {})), {}
                )
                if methods:
                    points.append((methods[name]["accuracy"], relative(methods, name)))
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
    save(figure, path, 64)
    plt.close(figure)


def draw_curves(folder: Path, path: Path) -> None:
    """Accuracy against generated tokens: mean, and the range over the seeds; each method at its best rate."""
    import matplotlib.pyplot as plt

    starts = [start for start in LEVELS if any(runs(folder, task, start) for task in TASKS)]
    size = (11, 0.8 + 2.6 * len(starts))
    figure, panels = plt.subplots(len(starts), len(TASKS), figsize=size, layout="constrained", squeeze=False)
    for axes, (start, task) in zip(panels.flat, itertools.product(starts, TASKS), strict=True):
        best = best_runs(folder, task, start)
        for name, colour in CURVES.items():
            if name not in best:
                continue
            columns = list(zip(*best[name].values(), strict=False))
            x = [statistics.mean(r["tokens"] for r in column) / 1e3 for column in columns]
            y = [[r["accuracy"] for r in column] for column in columns]
            axes.plot(x, [statistics.mean(v) for v in y], color=colour, label=name, linewidth=1.5)
            axes.fill_between(x, [min(v) for v in y], [max(v) for v in y], color=colour, alpha=0.15, linewidth=0)
        if not best:
            axes.text(0.5, 0.5, "no run finished", ha="center", va="center", color="#8c8c8c")
            axes.set_xticks([])
        axes.set_title(f"{task.replace('_', ' ')}, from {start}", fontsize=10)
        axes.set_ylim(0, 1)
    for axes in panels[-1]:
        axes.set_xlabel("generated tokens, thousands")
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy, one sample")
    handles = {h.get_label(): h for axes in panels.flat for h in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path, 64)
    plt.close(figure)


def best_runs(folder: Path, task: str, start: float) -> dict[str, dict[int, list[Record]]]:
    """Each method's runs by seed, at the rate with the highest last accuracy."""
    found: dict[str, dict[int, list[Record]]] = {}
    for (method, _), seeds in runs(folder, task, start).items():
        if method not in found or last(seeds) > last(found[method]):
            found[method] = seeds
    return found


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
