"""One estimate and one training step of the VAE on a GPU, at two commits:
`python -m benchmarks.gpu_against OLD`, where OLD is a folder with an earlier tree.

Each tree has a process of its own. Row by row, both prepare it at once (compile, capture, warm up),
then time it in turns, `--rounds` times, while the other one waits. Every time goes to --out at
once. A row that fails costs that tree its process, since an error of the GPU spoils all that
follows in it; the next row has a fresh one.
The rows use functions of `benchmarks.gpu` and `benchmarks.vae` that both trees have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

PROGRAM = Path(__file__).resolve()
HERE = PROGRAM.parent.parent
OUT = HERE / "results" / "benchmarks" / "gpu_against.json"
REPETITIONS = 300
STEPS = 5  # of the VAE in one graph
PATIENCE = 150.0
"""Seconds until a process that does not answer is ended; compiling 15 replicas takes longest."""
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
MILLION = (1, 1, 1_000_000)
ROWS: dict[str, Callable[[], Row]] = {
    "[256, 1, 50257] ARSM, compiled": lambda: dense("arsm", *VOCABULARY, compiled=True),
    "[256, 1, 50257] ARSM, compiled, scale 4": lambda: dense(
        "arsm", *VOCABULARY, scale=4.0, compiled=True
    ),
    "[1, 1, 1000000] ARSM, compiled": lambda: dense("arsm", *MILLION, compiled=True),
    "[64, 1, 10] leave-one-out by hand, eager": by_hand,
    "[64, 1, 10] ARSM, eager": lambda: eager("arsm"),
    "[64, 1, 10] RLOO, eager": lambda: eager("rloo"),
    "[64, 1, 10] ARSM, dense, captured": lambda: dense("arsm", 64, 1, 10),
    "[64, 1, 10] RLOO, dense, captured": lambda: dense("rloo", 64, 1, 10),
    "[256, 1, 50257] ARSM, dense, captured": lambda: dense("arsm", *VOCABULARY),
    "[1, 1, 1000000] ARSM, dense, captured": lambda: dense("arsm", *MILLION),
    "VAE step, 1 replica": lambda: vae_step(1),
    "VAE step, 15 replicas": lambda: vae_step(15),
}


class Tree:
    """Measures rows with one tree's code, in a process of its own."""

    def __init__(self, folder: Path, program: Path) -> None:
        paths = [str(folder / "src"), str(folder / "experiments" / "src"), str(folder)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._folder = folder
        self._program = program
        self._process = self._start()

    def ask(self, row: str) -> None:
        """Begin to measure a row."""
        if self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` tells how it ended
            self._process.stdin.write(row + "\n")
            self._process.stdin.flush()

    def answer(self) -> float | str:
        """Milliseconds of the row that was asked for, or why it failed: then the process ends."""
        impatience = threading.Timer(PATIENCE, self._process.kill)
        impatience.start()
        found = self._read()
        impatience.cancel()
        if isinstance(found, str):
            self.end()
        return found

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        # the file itself, not the module: the tree's own package `benchmarks` must be imported
        return subprocess.Popen(
            [sys.executable, str(self._program), "--listen"],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _read(self) -> float | str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        return f"the process ended with status {self._process.wait()}"


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


def compare(
    folders: dict[str, Path],
    rows: list[str],
    rounds: int,
    out: Path,
    program: Path = PROGRAM,
) -> None:
    """Measure row by row, the trees in turns; every time is written down at once.

    program: what a tree's process runs.
    """
    import torch

    from arsm_experiments.runs.lines import write_one
    from arsm_experiments.runs.provenance import provenance

    times: dict[str, dict[str, list[float | str]]] = {
        row: {name: [] for name in folders} for row in rows
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {"provenance": provenance(device), "times": times}
    trees = {name: Tree(folder, program) for name, folder in folders.items()}
    for row in rows:
        failures = _prepare(trees, row)
        for name, why in failures.items():
            times[row][name].append(why)
        write_one(out, record)
        for _ in range(rounds):
            for name in [name for name in trees if name not in failures]:
                trees[name].ask(row)
                times[row][name].append(trees[name].answer())
                print(f"{row}, {name}: {times[row][name][-1]}", flush=True)
                write_one(out, record)
    for tree in trees.values():
        tree.end()
    for row, by_tree in times.items():
        medians = {name: _median(found) for name, found in by_tree.items()}
        print(f"{row:45}" + "".join(f" {name} {median}" for name, median in medians.items()))


def _prepare(trees: dict[str, Tree], row: str) -> dict[str, str]:
    """Prepare a row in all trees at once; these times are not kept. Returns why trees failed."""
    missing = list(trees)
    failures: dict[str, str] = {}
    # a second time where it fails, in a fresh process: the row before may be to blame
    for _ in range(2):
        for name in missing:
            trees[name].ask(row)
        found = {name: trees[name].answer() for name in missing}
        print(f"{row}, first: {found}", flush=True)
        failures = {name: why for name, why in found.items() if isinstance(why, str)}
        missing = list(failures)
    return failures


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
