"""One estimate and one training step of the VAE on a GPU, at two commits:
`python -m benchmarks.gpu_against OLD`, where OLD is a folder with an earlier tree.

Each tree has a process of its own. Row by row, both prepare it at once (compile, capture, warm up),
then time it in turns, `--rounds` times, while the other one waits. All times go to --out.
The rows use functions of `benchmarks.gpu` and `benchmarks.vae` that both trees have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
OUT = HERE / "results" / "benchmarks" / "gpu_against.json"
REPETITIONS = 300
STEPS = 5  # of the VAE in one graph
ANSWER = "milliseconds: "


class Row(NamedTuple):
    """A prepared row."""

    milliseconds: Callable[[], float]
    """Measure it."""
    reads: object
    """Everything that a captured graph reads. The graph knows addresses and keeps no tensor alive:
    without this, the next tensors would take their memory, and a replay would read those.
    """


def by_hand() -> Row:
    """Leave-one-out written by hand, eager."""
    import torch

    from benchmarks.gpu import milliseconds
    from benchmarks.overhead import leave_one_out

    logits = torch.randn(64, 1, 10, device="cuda")
    return Row(lambda: milliseconds(lambda: leave_one_out(logits), REPETITIONS), logits)


def eager(words: str) -> Row:
    """A packed estimate and its backward at [64, 1, 10]."""
    import torch

    import arsm
    from benchmarks.gpu import backward, milliseconds, step

    logits = torch.randn(64, 1, 10, device="cuda", requires_grad=True)
    value = step(arsm.estimator(words), "packed")
    return Row(lambda: milliseconds(lambda: backward(value, logits), REPETITIONS), logits)


def dense(words: str, *shape: int, scale: float = 1.0, compiled: bool = False) -> Row:
    """The dense estimate and its backward, captured; first compiled where this is asked for."""
    import torch

    import arsm
    from benchmarks.gpu import backward, captured, in_a_row, step

    # the time depends on the logits: both trees get the same ones
    torch.manual_seed(0)
    logits = (scale * torch.randn(shape, device="cuda")).requires_grad_()
    value = step(arsm.estimator(words), "dense")
    if compiled:
        value = torch.compile(value, fullgraph=True, dynamic=False)
    replay = captured(lambda: backward(value, logits))
    return Row(lambda: in_a_row(replay, REPETITIONS), (value, logits))


def vae_step(replicas: int) -> Row:
    """A training step of the VAE in bfloat16, compiled and captured."""
    import torch

    from arsm_experiments.vae import Vae
    from benchmarks.gpu import in_a_row
    from benchmarks.vae import make

    torch.set_float32_matmul_precision("high")
    options = {"compiled": True, "steps_per_replay": STEPS}
    trained = make(replace(Vae(), precision="bf16"), replicas, "cuda", 10_000, **options)
    trained.epoch()
    graph = trained._graph
    assert graph is not None
    return Row(lambda: in_a_row(graph.replay, REPETITIONS // STEPS) / STEPS, trained)


VOCABULARY = (256, 1, 50_257)
ROWS: dict[str, Callable[[], Row]] = {
    "[64, 1, 10] leave-one-out by hand, eager": by_hand,
    "[64, 1, 10] ARSM, eager": lambda: eager("arsm"),
    "[64, 1, 10] RLOO, eager": lambda: eager("rloo"),
    "[64, 1, 10] ARSM, dense, captured": lambda: dense("arsm", 64, 1, 10),
    "[64, 1, 10] RLOO, dense, captured": lambda: dense("rloo", 64, 1, 10),
    "[256, 1, 50257] ARSM, compiled": lambda: dense("arsm", *VOCABULARY, compiled=True),
    "[256, 1, 50257] ARSM, compiled, scale 4": lambda: dense(
        "arsm", *VOCABULARY, scale=4.0, compiled=True
    ),
    "[1, 1, 1000000] ARSM, compiled": lambda: dense("arsm", 1, 1, 1_000_000, compiled=True),
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
    """Measure the rows that are asked for; a row is prepared when it is asked for first, and kept
    until another one is.
    """
    # Python put this file's folder first, where modules shadow the tree's package
    sys.path.pop(0)
    name = ""
    row = None
    for line in sys.stdin:
        try:
            if row is None or line.strip() != name:
                name = line.strip()
                row = None  # frees the last one's memory first
                row = ROWS[name]()
            found: float | str = row.milliseconds()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:300]
        print(f"{ANSWER}{json.dumps(found)}", flush=True)


def compare(folders: dict[str, Path], rows: list[str], rounds: int, out: Path) -> None:
    """Measure row by row, the trees in turns; every row is written down at once."""
    from arsm_experiments.runs.lines import write_one
    from arsm_experiments.runs.provenance import provenance

    times: dict[str, dict[str, list[float | str]]] = {
        row: {name: [] for name in folders} for row in rows
    }
    record = {"provenance": provenance("cuda"), "times": times}
    trees = {name: Tree(folder) for name, folder in folders.items()}
    for row in rows:
        # both at once, to prepare: these times are not kept
        for tree in trees.values():
            tree.ask(row)
        print(f"{row}, first: {[tree.answer() for tree in trees.values()]}", flush=True)
        for _ in range(rounds):
            for name, tree in trees.items():
                tree.ask(row)
                times[row][name].append(tree.answer())
                print(f"{row}, {name}: {times[row][name][-1]}", flush=True)
        write_one(out, record)
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
