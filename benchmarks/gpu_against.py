"""One estimate and one training step of the VAE on a GPU, at two commits:
`python -m benchmarks.gpu_against OLD`, where OLD is a folder with an earlier tree.

Each tree has a process of its own. Both first run all rows at once, which fills the compilers'
caches, then every row in turns, `--rounds` times, while the other one waits. All times go to --out.
The rows use functions of `benchmarks.gpu` and `benchmarks.gpu_profile` that both trees have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
OUT = HERE / "results" / "benchmarks" / "gpu_against.json"
REPETITIONS = 300
ANSWER = "milliseconds: "


def by_hand() -> float:
    """Leave-one-out written by hand, eager."""
    import torch

    from benchmarks.gpu import milliseconds
    from benchmarks.overhead import leave_one_out

    logits = torch.randn(64, 1, 10, device="cuda")
    return milliseconds(lambda: leave_one_out(logits), REPETITIONS)


def eager(words: str) -> float:
    """A packed estimate and its backward at [64, 1, 10]."""
    import torch

    import arsm
    from benchmarks.gpu import backward, milliseconds, step

    logits = torch.randn(64, 1, 10, device="cuda", requires_grad=True)
    value = step(arsm.estimator(words), "packed")
    return milliseconds(lambda: backward(value, logits), REPETITIONS)


def dense(words: str) -> float:
    """The dense estimate and its backward at [64, 1, 10], captured."""
    import torch

    import arsm
    from benchmarks.gpu import backward, captured, in_a_row, step

    logits = torch.randn(64, 1, 10, device="cuda", requires_grad=True)
    value = step(arsm.estimator(words), "dense")
    return in_a_row(captured(lambda: backward(value, logits)), REPETITIONS)


def said(words: str) -> float:
    """The first number of milliseconds in what a row prints."""
    found = re.search(r"([0-9.]+) ms", words)
    assert found is not None, words
    return float(found.group(1))


def large_vocabulary(scale: float) -> float:
    """ARSM at [256, 1, 50257], compiled and captured."""
    from benchmarks import gpu

    return said(gpu.large_vocabulary(scale))


def a_million(scale: float) -> float:
    """ARSM at [1, 1, 1000000], compiled and captured."""
    import torch

    from benchmarks import gpu

    # the time depends on the draws: both trees get the same logits
    torch.manual_seed(0)
    return said(gpu.a_million("compiled", scale))


def vae_step(replicas: int) -> float:
    """A training step of the VAE in bfloat16."""
    from benchmarks import gpu_profile

    with Path(os.devnull).open("w") as file:
        return said(gpu_profile.vae_step(file, replicas))


ROWS: dict[str, Callable[[], float]] = {
    "[64, 1, 10] leave-one-out by hand, eager": by_hand,
    "[64, 1, 10] ARSM, eager": lambda: eager("arsm"),
    "[64, 1, 10] RLOO, eager": lambda: eager("rloo"),
    "[64, 1, 10] ARSM, dense, captured": lambda: dense("arsm"),
    "[64, 1, 10] RLOO, dense, captured": lambda: dense("rloo"),
    "[256, 1, 50257] ARSM, compiled": lambda: large_vocabulary(1.0),
    "[256, 1, 50257] ARSM, compiled, scale 4": lambda: large_vocabulary(4.0),
    "[1, 1, 1000000] ARSM, compiled": lambda: a_million(1.0),
    "VAE step, 1 replica": lambda: vae_step(1),
    "VAE step, 15 replicas": lambda: vae_step(15),
}


class Tree:
    """A process that measures rows with one tree's code."""

    def __init__(self, folder: Path) -> None:
        paths = [str(folder / "src"), str(folder / "experiments" / "src"), str(folder)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        # the file itself, not the module: the tree's own package `benchmarks` must be imported
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--listen"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, row: str) -> None:
        """Begin to measure a row."""
        assert self._process.stdin is not None
        self._process.stdin.write(row + "\n")
        self._process.stdin.flush()

    def answer(self) -> float | str:
        """Milliseconds of the row that was asked for, or why it failed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        return "the process ended"


def listen() -> None:
    """Measure the rows that are asked for, one after the other."""
    # Python put this file's folder first, where modules shadow the tree's package
    sys.path.pop(0)
    for line in sys.stdin:
        try:
            found: float | str = ROWS[line.strip()]()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:300]
        print(f"{ANSWER}{json.dumps(found)}", flush=True)


def compare(folders: dict[str, Path], rows: list[str], rounds: int, out: Path) -> None:
    """Measure all rows in turns; every round is written down at once."""
    from arsm_experiments.runs.provenance import provenance

    times: dict[str, dict[str, list[float | str]]] = {
        row: {name: [] for name in folders} for row in rows
    }
    record = {"provenance": provenance("cuda"), "times": times}
    trees = {name: Tree(folder) for name, folder in folders.items()}
    # both at once, for the caches: these times are not kept
    for row in rows:
        for tree in trees.values():
            tree.ask(row)
    for row in rows:
        print(f"{row}, first: {[tree.answer() for tree in trees.values()]}", flush=True)
    for _ in range(rounds):
        for row in rows:
            for name, tree in trees.items():
                tree.ask(row)
                times[row][name].append(tree.answer())
                print(f"{row}, {name}: {times[row][name][-1]}", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    for row, by_tree in times.items():
        medians = {name: _median(found) for name, found in by_tree.items()}
        print(f"{row:45}" + "".join(f" {name} {median}" for name, median in medians.items()))


def _median(found: list[float | str]) -> str:
    numbers = [x for x in found if isinstance(x, float)]
    return f"{statistics.median(numbers):.3f}" if numbers else "-"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--listen", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.listen:
        listen()
        return
    if given.old is None:
        parser.error("OLD is missing: a folder with an earlier tree, such as `git worktree` makes.")
    compare({"old": given.old.resolve(), "new": HERE}, given.rows, given.rounds, given.out)


if __name__ == "__main__":
    main()
