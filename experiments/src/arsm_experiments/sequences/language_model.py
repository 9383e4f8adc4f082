"""Tables and figures of results/language_model from its records, by the rules of its PROTOCOL.md.

`python -m arsm_experiments.sequences.language_model pack --starts STARTS --noise NOISE --runs RUNS`
adds what `levels`, `noise` and `trials` wrote to results/language_model/records.tar.xz; `unpack
--runs RUNS` writes the trials of that file as run folders, which `trials` then need not run again;
`write` makes table.csv and the figures and prints the page's tables; `choose
NOISE/noise-TASK-LEVEL.jsonl` prints the strategies of the training, whose sizes the noise decides.

Trials only choose a rate. Until every method has finished a seed, `write` draws the trials method
by method (trials.png) and compares no method with another; then it draws training.png.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arsm_experiments.runs.archive import KEPT, read_archive, write_archive
from arsm_experiments.runs.lines import parse as parse_lines
from arsm_experiments.runs.lines import read as read_lines
from arsm_experiments.runs.lines import written
from arsm_experiments.runs.table import COLUMNS, origin_once
from arsm_experiments.sequences.language_model_figures import (
    draw_noise,
    draw_training,
    draw_trials,
)
from arsm_experiments.sequences.language_model_rules import (
    CANDIDATE,
    OURS,
    PLAIN,
    RIVALS,
    Noise,
    Trained,
    accuracy_after,
    best_of_rivals,
    best_rival,
    by_round,
    by_task,
    choose,
    crossing,
    latest,
    mean_curve,
    paired,
    place,
    ratio,
    read_noise,
    read_trained,
    reported,
    task_and_level,
)
from arsm_experiments.sequences.noise import FRESH
from arsm_experiments.sequences.trials import EXPERIMENT, TRIAL

RESULTS = Path("results/language_model")
FINAL = "final accuracy"
COST = "variance x tokens, thousands"
RATIO = "variance x tokens / best rival"
TO_PLAIN = f"variance x tokens / {PLAIN}, by rounds"
ROUNDS = 4
"""Of a level of the fourth amendment that is reported."""
DIGITS = 10
"""Of a commit."""


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
        for folder in sorted((runs / EXPERIMENT).iterdir()):
            names = [name for name in (*KEPT, "scores.json") if (folder / name).exists()]
            run = {name: (folder / name).read_bytes() for name in names}
            if "scores.json" in run or _is_trial(run):
                found[folder.name] = run
    path.parent.mkdir(parents=True, exist_ok=True)
    write_archive(path, found)


def unpack(path: Path, runs: Path) -> None:
    """Write the trials that have ended as run folders."""
    for name, files in read_archive(path).items():
        if "scores.json" in files and _is_trial(files):
            folder = runs / EXPERIMENT / name
            folder.mkdir(parents=True)
            for file, whole in files.items():
                (folder / file).write_bytes(whole)


def _compares(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some noise was measured of a rival and of another method."""
    methods = {line["method"].removesuffix(FRESH) for line in lines}
    return bool(methods & set(RIVALS)) and bool(methods - set(RIVALS))


def _is_trial(run: Mapping[str, bytes]) -> bool:
    """Whether a run's files are those of a trial with at least one measurement."""
    if "config.json" not in run or not run.get("metrics.jsonl"):
        return False
    return json.loads(run["config.json"])["config"]["seed"] == TRIAL


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
        writer.writerows(origin_once(rows))
    words = []
    if levels:
        draw_noise(latest(levels), folder / "noise.png")
        words.append(_noise_table(levels))
    found = {task: reported(own) for task, own in by_task(runs).items()}
    found = {task: own for task, own in found.items() if any(own.values())}
    if found:
        draw_training(found, folder / "training.png")
    elif runs:
        draw_trials(runs, folder / "trials.png")
    return "\n".join(words)


def _noise_rows(name: str, noise: list[Noise], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    task, level = task_and_level(name)
    best = {kind: best_rival(noise, fresh=kind) for kind in (False, True)}
    common = {"paper": "", "hardware": lines[0]["hardware"], "commit": lines[0]["commit"][:DIGITS]}
    rows = []
    for row in noise:
        where = f"{task}, level {level} (accuracy {row.accuracy:.3f}), {row.method}"
        known = common | {"row": where, "seeds": row.repeats, "seconds": f"{row.seconds:.3g}"}
        found = {COST: (row.cost / 1000, row.error / 1000)}
        rival = best[row.method.endswith(FRESH)]
        if row.unbiased and rival is not None:
            found[RATIO] = ratio(row, rival)
        for metric, (value, error) in found.items():
            # as in all tables, the mean's standard error is std / sqrt(seeds)
            std = error * math.sqrt(row.repeats)
            rows.append(known | {"metric": metric, "mean": f"{value:.5g}", "std": f"{std:.4g}"})
        if level.endswith(CANDIDATE) and row.unbiased:
            plain = PLAIN + FRESH * row.method.endswith(FRESH)
            value, std, rounds = by_round(lines, row.method, plain)
            if rounds >= ROUNDS:
                about = {"metric": TO_PLAIN, "mean": f"{value:.5g}", "std": f"{std:.4g}"}
                rows.append(known | about | {"seeds": rounds})
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
                "commit": run.session["commit"][:DIGITS],
            }
        )
    return rows


def _noise_table(levels: dict[str, list[Noise]]) -> str:
    """Methods by levels: ratios to the best rival, with half of their 95% intervals."""
    names: dict[str, None] = {}
    for noise in levels.values():
        names |= dict.fromkeys(row.method for row in noise if row.unbiased)
    heads = [
        f"{' '.join(task_and_level(name))} ({levels[name][0].accuracy:.2f})" for name in levels
    ]
    text = io.StringIO()
    text.write(f"| | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}\n")
    for method in names:
        cells = []
        for noise in levels.values():
            row = next((row for row in noise if row.method == method), None)
            rival = best_rival(noise, fresh=method.endswith(FRESH))
            if row is None or rival is None:
                cells.append("")
                continue
            value, error = ratio(row, rival)
            cells.append(f"{value:.2f} ± {1.96 * error:.2f}")
        text.write(f"| {method} | {' | '.join(cells)} |\n")
    return text.getvalue()


def _result_rows(task: str, runs: list[Trained]) -> list[dict[str, Any]]:
    """What the seeds of one task say, method by method; nothing before all have finished one."""
    found = reported(runs)
    if not any(found.values()):
        return []
    curves = {name: mean_curve(own) for name, own in found.items()}
    rows = []
    for name, own in found.items():
        session = own[0].session
        common = {
            "row": f"{task}, all seeds: {name}, rate {own[0].rate:g}",
            "seeds": len(own),
            "paper": "",
            "seconds": f"{curves[name][-1][1]:.1f}",
            "hardware": session["hardware"],
            "commit": session["commit"][:DIGITS],
        }
        final = [run.final for run in own]
        spread = statistics.stdev(final) if len(final) > 1 else 0.0
        values = {FINAL: (statistics.mean(final), spread)}
        values |= {metric: (x, 0.0) for metric, x in _against(name, found, curves).items()}
        for metric, (value, std) in values.items():
            rows.append(common | {"metric": metric, "mean": f"{value:.6g}", "std": f"{std:.3g}"})
    return rows


def _against(
    name: str,
    found: Mapping[str, list[Trained]],
    curves: Mapping[str, list[tuple[float, float, float]]],
) -> dict[str, float]:
    """A method's results that need others: differences to the best rivals, what it spends until it
    is as good as they are at their end, and where it stands when a method that branches ends.
    """
    values = {"learning seconds": curves[name][-1][1]}
    for rival in best_of_rivals(found):
        ends = ("", ", lower end", ", upper end")
        gaps = paired(found[name], found[rival])
        values |= {f"less {rival}{end}": gap for end, gap in zip(ends, gaps, strict=True)}
        reached = crossing(curves[name], curves[rival][-1][2])
        if reached is not None:
            values[f"tokens to {rival}"] = reached[0]
            values[f"seconds to {rival}"] = reached[1]
    for ours in OURS:
        if ours in curves:
            values[f"when {ours} ends"] = accuracy_after(curves[name], curves[ours][-1][1])
    return values


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    for name in ("starts", "noise", "runs"):
        packing.add_argument(f"--{name}", type=Path)
    packing.add_argument("--anew", action="store_true", help="Drop the runs that are there")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("--runs", type=Path, required=True)
    writing = commands.add_parser("write")
    choosing = commands.add_parser("choose")
    choosing.add_argument("noise", type=Path, help="noise-TASK-LEVEL.jsonl")
    for each in (packing, unpacking, writing):
        each.add_argument("--results", type=Path, default=RESULTS)
    words = parser.parse_args()
    if words.command == "pack":
        path = words.results / "records.tar.xz"
        pack(path, words.starts, words.noise, words.runs, anew=words.anew)
    elif words.command == "unpack":
        unpack(words.results / "records.tar.xz", words.runs)
    elif words.command == "write":
        print(write(words.results))
    else:
        print(" ".join(choose(read_noise(read_lines(words.noise)))))


if __name__ == "__main__":
    main()
