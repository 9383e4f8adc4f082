"""Tables and figures of results/language_model from its records, by the rules of its PROTOCOL.md.

`python -m arsm_experiments.sequences.language_model pack --starts STARTS --noise NOISE --runs RUNS`
adds what `levels`, `noise` and `trials` wrote to results/language_model/records.tar.xz; `write`
makes table.csv and the figures from that file and prints the page's tables; `choose
NOISE/noise-TASK-LEVEL.jsonl` prints the strategies of the training, whose sizes the noise decides.

Trials only choose a rate. Until every method has finished a seed, `write` draws the trials method
by method (trials.png) and compares no method with another; then it draws training.png.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arsm_experiments.palette import save
from arsm_experiments.runs.archive import KEPT, read_archive, write_archive
from arsm_experiments.runs.lines import parse as parse_lines
from arsm_experiments.runs.lines import read as read_lines
from arsm_experiments.runs.lines import written
from arsm_experiments.sequences.levels import CHOSEN_ON
from arsm_experiments.sequences.trials import METHODS, TRIAL

RESULTS = Path("results/language_model")
COLUMNS: tuple[str, ...] = (
    "row",
    "metric",
    "mean",
    "std",
    "seeds",
    "paper",
    "seconds",
    "hardware",
    "commit",
)
RIVALS = ("group 8", "group 16", "token baseline 8")
"""Unbiased rivals; ratios are to the best of them."""
SLOWEST = "ppo"
"""Its runs may be cut by the time; its trials are reported all the same."""
FINAL = "final accuracy"
COST = "variance x tokens, thousands"
RATIO = "variance x tokens / best rival"
AGAIN = "b"
"""A level whose name ends with it was measured a second time, at weights of another fine-tuning."""
DRAWS = (8, 16, 32, 64)
GROUPS = (8, 16)
BOOTSTRAP = 10_000
COLOURS = {
    "branch": "#b5473c",
    "group": "#5a94d1",
    "token baseline": "#6e6e6e",
    "grpo": "#9b6fb5",
    "grpo, 4 epochs": "#c9a9dd",
    "ppo": "#c28f2c",
    "raft": "#5b9a68",
}


@dataclass(frozen=True)
class Noise:
    """One method at one level, over all its rounds."""

    method: str
    accuracy: float
    cost: float
    """Variance x tokens."""
    error: float
    repeats: int
    unbiased: bool
    seconds: float
    memory: float


@dataclass(frozen=True)
class Trained:
    """One training run."""

    method: str
    """Its name on the page."""
    strategy: str
    rate: float
    seed: int
    metrics: list[dict[str, Any]]
    scores: list[float]
    """By question; empty if the run was cut."""
    session: dict[str, Any]
    chosen_on: int = CHOSEN_ON
    """Questions of a trial."""
    task: str = "countdown"

    @property
    def final(self) -> float:
        return self.metrics[-1]["accuracy"]

    @property
    def finished(self) -> bool:
        return bool(self.scores)


# ---------------------------------------------------------------- records


def pack(
    path: Path, starts: Path | None, noise: Path | None, runs: Path | None, *, anew: bool = False
) -> None:
    """Add records to the archive: lines to a file of levels or noise that is there, while a run of
    the same name is replaced.

    With `anew`, all earlier runs are dropped.

    Noise is kept where a rival and another method were measured: one alone tells nothing. Of runs
    that were cut only trials are kept: the protocol reports every trial, and a seed only
    if it has ended.
    """
    found: dict[str, dict[str, bytes]] = read_archive(path) if path.exists() else {}
    if anew:
        found = {name: files for name, files in found.items() if name in ("levels", "noise")}
    for name, folder in (("levels", starts), ("noise", noise)):
        if folder is not None:
            known = found.setdefault(name, {})
            for file in sorted(folder.glob("*.jsonl")):
                before = parse_lines(known.get(file.name, b""))
                fresh = [line for line in read_lines(file) if line not in before]
                if name == "levels" or _compares([*before, *fresh]):
                    known[file.name] = written([*before, *fresh])
    if runs is not None:
        for folder in sorted((runs / "language_model").iterdir()):
            names = [name for name in (*KEPT, "scores.json") if (folder / name).exists()]
            run = {name: (folder / name).read_bytes() for name in names}
            if "scores.json" in run or _is_trial(run):
                found[folder.name] = run
    path.parent.mkdir(parents=True, exist_ok=True)
    write_archive(path, found)


def _compares(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some noise was measured of a rival and of another method."""
    methods = {line["method"] for line in lines}
    return bool(methods & set(RIVALS)) and bool(methods - set(RIVALS))


def _is_trial(run: Mapping[str, bytes]) -> bool:
    """Whether a run's files are those of a trial with at least one measurement."""
    if "config.json" not in run or not run.get("metrics.jsonl"):
        return False
    return json.loads(run["config.json"])["config"]["seed"] == TRIAL


def read_noise(lines: Sequence[Mapping[str, Any]]) -> list[Noise]:
    """Average the rounds of every method of one level."""
    by_method: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_method[line["method"]].append(line)
    found = []
    for method, rounds in by_method.items():
        costs = [line["variance"] * line["tokens"] for line in rounds]
        errors = [
            math.hypot(
                line["variance_error"] * line["tokens"], line["variance"] * line["tokens_error"]
            )
            for line in rounds
        ]
        found.append(
            Noise(
                method,
                rounds[0]["accuracy"],
                statistics.mean(costs),
                math.hypot(*errors) / len(errors),
                sum(line["repeats"] for line in rounds),
                rounds[0]["unbiased"],
                statistics.mean(line["seconds"] for line in rounds),
                max((line["memory"] or 0) for line in rounds) / 1e9,
            )
        )
    return found


def read_trained(files: Mapping[str, Mapping[str, bytes]]) -> list[Trained]:
    """All training runs of an archive."""
    found = []
    for run in files.values():
        if "config.json" not in run:
            continue
        header = json.loads(run["config.json"])
        config = header["config"]
        found.append(
            Trained(
                method_name(config["strategy"]),
                config["strategy"],
                config["rate"],
                config["seed"],
                parse_lines(run["metrics.jsonl"]),
                json.loads(run.get("scores.json", b"[]")),
                header["sessions"][-1],
                config["chosen_on"],
                config["task"],
            )
        )
    return found


def method_name(strategy: str) -> str:
    """The page's name of a strategy, whatever its size."""
    kinds = {words.rstrip("0123456789"): name for name, words in METHODS.items()}
    return kinds.get(strategy.rstrip("0123456789"), strategy)


def place(method: str) -> tuple[int, str]:
    """The order of the page; others come last."""
    known = list(METHODS)
    return (known.index(method) if method in known else len(known), method)


# ---------------------------------------------------------------- rules of the protocol


def choose(noise: list[Noise]) -> list[str]:
    """The strategies of the training, with the sizes that have the least noise per token."""
    cost = {row.method: row.cost for row in noise}

    def best(kind: str, sizes: tuple[int, ...]) -> int:
        known = [size for size in sizes if f"{kind} {size}" in cost]
        return min(known, key=lambda size: cost[f"{kind} {size}"])

    chosen = {
        "branch": f"branch:rloo:samples={best('branch', DRAWS)}",
        "group": f"group:{best('group', GROUPS)}",
    }
    return list((METHODS | chosen).values())


def ratio(one: Noise, other: Noise) -> tuple[float, float]:
    """one / other, and its standard error by the delta method."""
    if one.method == other.method:
        return 1.0, 0.0
    value = one.cost / other.cost
    return value, value * math.hypot(one.error / one.cost, other.error / other.cost)


def best_rival(noise: list[Noise]) -> Noise:
    """The best of the methods that do not branch."""
    return min((row for row in noise if row.method in RIVALS), key=lambda row: row.cost)


def reported(runs: list[Trained]) -> dict[str, list[Trained]]:
    """Runs of fresh seeds that all methods have finished, by method.

    A method that has only trials has finished none. The slowest method does not hold up the others:
    it is left out if it has not finished all of their seeds.
    """
    fresh = [run for run in runs if run.seed != TRIAL and run.finished]
    methods = sorted({run.method for run in runs}, key=place)
    seeds = {name: {run.seed for run in fresh if run.method == name} for name in methods}
    deciding = [seeds[name] for name in methods if name != SLOWEST] or list(seeds.values())
    common = set.intersection(*deciding) if deciding else set()
    return {
        name: sorted(
            (run for run in fresh if run.method == name and run.seed in common),
            key=lambda run: run.seed,
        )
        for name in methods
        if name != SLOWEST or common <= seeds[name]
    }


def by_task(runs: list[Trained]) -> dict[str, list[Trained]]:
    """The runs of every task."""
    found: dict[str, list[Trained]] = defaultdict(list)
    for run in runs:
        found[run.task].append(run)
    return dict(sorted(found.items()))


def best_of_rivals(found: Mapping[str, list[Trained]]) -> str:
    """The method with the highest mean final accuracy that does not branch."""
    final = {name: statistics.mean(run.final for run in own) for name, own in found.items()}
    return max((name for name in found if name != "branch"), key=lambda name: final[name])


def paired(ours: list[Trained], theirs: list[Trained]) -> tuple[float, float, float]:
    """The mean difference of final scores and its 95% interval, by a bootstrap over questions."""
    questions = len(ours[0].scores)
    gaps = [
        statistics.mean(a.scores[q] - b.scores[q] for a, b in zip(ours, theirs, strict=True))
        for q in range(questions)
    ]
    draw = random.Random(0)
    means = sorted(math.fsum(draw.choices(gaps, k=questions)) / questions for _ in range(BOOTSTRAP))
    low, high = means[int(0.025 * BOOTSTRAP)], means[int(0.975 * BOOTSTRAP) - 1]
    return statistics.mean(gaps), low, high


def mean_curve(runs: list[Trained]) -> list[tuple[float, float, float]]:
    """Tokens, learning seconds and accuracy, averaged over seeds measurement by measurement; a run
    that stopped keeps its last.
    """
    longest = max(len(run.metrics) for run in runs)
    points = []
    for i in range(longest):
        lines = [run.metrics[min(i, len(run.metrics) - 1)] for run in runs]
        points.append(
            (
                statistics.mean(line["tokens"] for line in lines),
                statistics.mean(line["learning_seconds"] for line in lines),
                statistics.mean(line["accuracy"] for line in lines),
            )
        )
    return points


def crossing(curve: list[tuple[float, float, float]], level: float) -> tuple[float, float] | None:
    """Tokens and seconds at which a curve first reaches a level, by a straight line."""
    if curve[0][2] >= level:
        return curve[0][:2]
    for before, after in itertools.pairwise(curve):
        if before[2] < level <= after[2]:
            share = (level - before[2]) / (after[2] - before[2])
            return (
                before[0] + share * (after[0] - before[0]),
                before[1] + share * (after[1] - before[1]),
            )
    return None


# ---------------------------------------------------------------- what is written


def write(folder: Path) -> str:
    """Write the table and the figures; the page's tables in Markdown."""
    files = read_archive(folder / "records.tar.xz")
    lines = {name: parse_lines(whole) for name, whole in files.get("noise", {}).items()}
    levels = {name: read_noise(found) for name, found in sorted(lines.items())}
    runs = read_trained(files)
    rows = [
        *(row for name, found in levels.items() for row in _noise_rows(name, found, lines[name])),
        *_training_rows(runs),
        *(row for task, own in by_task(runs).items() for row in _result_rows(task, own)),
    ]
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    words = []
    if levels:
        _draw_noise(latest(levels), folder / "noise.png")
        words.append(_noise_table(levels))
    found = {task: reported(own) for task, own in by_task(runs).items()}
    found = {task: own for task, own in found.items() if any(own.values())}
    if found:
        _draw_training(found, folder / "training.png")
    elif runs:
        _draw_trials(runs, folder / "trials.png")
    return "\n".join(words)


def latest(levels: Mapping[str, list[Noise]]) -> dict[str, list[Noise]]:
    """Without the first measurement of a task and level that was measured again."""
    return {
        name: noise
        for name, noise in levels.items()
        if f"{name.removesuffix('.jsonl')}{AGAIN}.jsonl" not in levels
    }


def _about(name: str) -> tuple[str, str]:
    """Task and level of noise-TASK-LEVEL.jsonl."""
    task, _, level = name.removeprefix("noise-").removesuffix(".jsonl").rpartition("-")
    return task, level


def _noise_rows(name: str, noise: list[Noise], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    task, level = _about(name)
    best = best_rival(noise)
    common = {"paper": "", "hardware": lines[0]["hardware"], "commit": lines[0]["commit"]}
    rows = []
    for row in noise:
        where = f"{task}, level {level} (accuracy {row.accuracy:.3f}), {row.method}"
        known = common | {"row": where, "seeds": row.repeats, "seconds": f"{row.seconds:.3g}"}
        found = {COST: (row.cost / 1000, row.error / 1000)}
        if row.unbiased:
            found[RATIO] = ratio(row, best)
        for metric, (value, error) in found.items():
            # as in all tables, the mean's standard error is std / sqrt(seeds)
            std = error * math.sqrt(row.repeats)
            rows.append(known | {"metric": metric, "mean": f"{value:.5g}", "std": f"{std:.4g}"})
    return rows


def _training_rows(runs: list[Trained]) -> list[dict[str, Any]]:
    rows = []
    for run in sorted(runs, key=lambda run: (run.task, place(run.method), run.seed, run.rate)):
        last = run.metrics[-1]
        kind = "trial" if run.seed == TRIAL else f"seed {run.seed}"
        kind += "" if run.finished else ", cut"
        questions = len(run.scores) or run.chosen_on
        rows.append(
            {
                "row": f"{run.task}: {run.method} ({run.strategy}), rate {run.rate:g}, {kind}",
                "metric": f"accuracy after {last['tokens']} tokens",
                "mean": f"{run.final:.4f}",
                "std": f"{math.sqrt(run.final * (1 - run.final) / questions):.3g}",
                "seeds": 1,
                "paper": "",
                "seconds": f"{last['learning_seconds']:.1f}",
                "hardware": run.session["hardware"],
                "commit": run.session["commit"],
            }
        )
    return rows


def _noise_table(levels: dict[str, list[Noise]]) -> str:
    """Methods by levels: ratios to the best rival, with half of their 95% intervals."""
    names: dict[str, None] = {}
    for noise in levels.values():
        names |= dict.fromkeys(row.method for row in noise if row.unbiased)
    heads = [f"{' '.join(_about(name))} ({levels[name][0].accuracy:.2f})" for name in levels]
    text = io.StringIO()
    text.write(f"| | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}\n")
    for method in names:
        cells = []
        for noise in levels.values():
            row = next((row for row in noise if row.method == method), None)
            value, error = (0.0, 0.0) if row is None else ratio(row, best_rival(noise))
            cells.append("" if row is None else f"{value:.2f} ± {1.96 * error:.2f}")
        text.write(f"| {method} | {' | '.join(cells)} |\n")
    return text.getvalue()


def _result_rows(task: str, runs: list[Trained]) -> list[dict[str, Any]]:
    """What the seeds of one task say, method by method; nothing before all have finished one."""
    found = reported(runs)
    if not any(found.values()):
        return []
    best = best_of_rivals(found)
    level = statistics.mean(run.final for run in found[best])
    rows = []
    for name, own in found.items():
        session = own[0].session
        common = {
            "row": f"{task}, all seeds: {name}, rate {own[0].rate:g}",
            "seeds": len(own),
            "paper": "",
            "seconds": f"{statistics.mean(run.metrics[-1]['learning_seconds'] for run in own):.1f}",
            "hardware": session["hardware"],
            "commit": session["commit"],
        }
        final = [run.final for run in own]
        gap, low, high = paired(own, found[best])
        values = {
            FINAL: (statistics.mean(final), statistics.stdev(final) if len(final) > 1 else 0.0),
            f"less {best}": (gap, 0.0),
            f"less {best}, lower end": (low, 0.0),
            f"less {best}, upper end": (high, 0.0),
        }
        reached = crossing(mean_curve(own), level)
        if reached is not None:
            values |= {
                f"tokens to {level:.4f}": (reached[0], 0.0),
                f"seconds to {level:.4f}": (reached[1], 0.0),
            }
        for metric, (value, std) in values.items():
            rows.append(common | {"metric": metric, "mean": f"{value:.6g}", "std": f"{std:.3g}"})
    return rows


def _draw_noise(levels: dict[str, list[Noise]], path: Path) -> None:
    """Variance x tokens over accuracy, relative to the best rival, one panel per task."""
    import matplotlib.pyplot as plt

    tasks = sorted({_about(name)[0] for name in levels})
    figure, axes = plt.subplots(
        1,
        len(tasks),
        figsize=(4.2 * len(tasks) + 1.6, 3.6),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    shades = {"branch 4": "#e8c3bd", "branch 8": "#d58a80", "branch 16": "#c66558"}
    shades |= {"branch 32": "#b5473c", "branch 64": "#7d2b22", "branch 32, chance": "#c28f2c"}
    shades |= {"group 8": "#8fb8e0", "group 16": "#5a94d1", "token baseline 8": "#6e6e6e"}
    for axis, task in zip(axes[0], tasks, strict=True):
        own = [noise for name, noise in levels.items() if _about(name)[0] == task]
        for number, (method, colour) in enumerate(shades.items()):
            points = sorted(
                (row.accuracy, *ratio(row, best_rival(noise)))
                for noise in own
                for row in noise
                if row.method == method
            )
            if points:
                x, y, error = zip(*points, strict=True)
                # side by side, or the intervals hide each other
                x = [accuracy + 0.006 * (number - len(shades) // 2) for accuracy in x]
                half = [1.96 * e for e in error]
                style = {"linestyle": "--"} if method in RIVALS else {}
                axis.errorbar(
                    x,
                    y,
                    half,
                    label=method,
                    color=colour,
                    marker="o",
                    markersize=3,
                    lw=1.1,
                    **style,
                )
        axis.set_yscale("log")
        axis.set_ylim(0.04, 8)
        axis.set_yticks([0.1, 0.25, 0.5, 1, 2, 4], ["0.1", "0.25", "0.5", "1", "2", "4"])
        axis.minorticks_off()
        axis.axhline(1, color="#bbbbbb", linewidth=0.8)
        axis.set_xlabel("accuracy of the model")
        axis.set_title(task)
    axes[0][0].set_ylabel("variance x tokens / best rival")
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def _draw_trials(runs: list[Trained], path: Path) -> None:
    """Accuracy over tokens of the trials, one panel per method: they choose its rate."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    trials = [run for run in runs if run.seed == TRIAL]
    methods = sorted({run.method for run in trials}, key=place)
    rates = sorted({run.rate for run in trials})
    shades = ["#c9b37e", "#5a94d1", "#b5473c", "#5b9a68"]
    wide = min(4, len(methods))
    high = math.ceil(len(methods) / wide)
    figure, axes = plt.subplots(
        high, wide, figsize=(2.3 * wide, 2.1 * high), squeeze=False, sharex=True, sharey=True
    )
    for axis, method in itertools.zip_longest(axes.flat, methods):
        if method is None:
            axis.set_axis_off()
            continue
        for run in sorted((run for run in trials if run.method == method), key=lambda r: r.rate):
            colour = shades[rates.index(run.rate) % len(shades)]
            tokens = [line["tokens"] / 1000 for line in run.metrics]
            accuracy = [line["accuracy"] for line in run.metrics]
            axis.plot(tokens, accuracy, color=colour, lw=1.3, ls="-" if run.finished else ":")
            if not run.finished:
                axis.plot(tokens[-1], accuracy[-1], "x", color=colour)
        axis.set_title(method, fontsize=9)
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.grid(color="#eeeeee")
    lines = [Line2D([], [], color=shades[i % len(shades)]) for i in range(len(rates))]
    names = [f"rate {rate:g}" for rate in rates]
    lines.append(Line2D([], [], color="#555555", ls=":", marker="x"))
    figure.supxlabel("generated tokens, thousands", fontsize=9)
    figure.supylabel(f"accuracy, {trials[0].chosen_on} questions", fontsize=9)
    figure.tight_layout()
    figure.legend(
        lines,
        [*names, "did not end"],
        fontsize=8,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(0.99, 0.12),
    )
    save(figure, path)
    plt.close(figure)


def _draw_training(tasks: Mapping[str, dict[str, list[Trained]]], path: Path) -> None:
    """Accuracy over tokens, the mean over seeds; one panel per task."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks) + 1.4, 3.4), squeeze=False)
    for axis, (task, by_method) in zip(axes[0], tasks.items(), strict=True):
        for name, runs in by_method.items():
            tokens, _, accuracy = zip(*mean_curve(runs), strict=True)
            thousands = [count / 1000 for count in tokens]
            width = 2.2 if name == "branch" else 1.2
            axis.plot(thousands, accuracy, label=name, color=COLOURS.get(name), lw=width)
        axis.set_title(task)
        axis.set_xlabel("generated tokens, thousands")
        axis.grid(color="#eeeeee")
    axes[0][0].set_ylabel("accuracy, mean over seeds")
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    for name in ("starts", "noise", "runs"):
        packing.add_argument(f"--{name}", type=Path)
    packing.add_argument("--anew", action="store_true", help="Drop the runs that are there")
    writing = commands.add_parser("write")
    choosing = commands.add_parser("choose")
    choosing.add_argument("noise", type=Path, help="noise-TASK-LEVEL.jsonl")
    for each in (packing, writing):
        each.add_argument("--results", type=Path, default=RESULTS)
    words = parser.parse_args()
    if words.command == "pack":
        path = words.results / "records.tar.xz"
        pack(path, words.starts, words.noise, words.runs, anew=words.anew)
    elif words.command == "write":
        print(write(words.results))
    else:
        print(" ".join(choose(read_noise(read_lines(words.noise)))))


if __name__ == "__main__":
    main()
