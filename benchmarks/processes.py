"""python -m benchmarks.processes: `arsm.maximize` with an f of 10 ms, in this process and in
several.

f takes 10 ms of a core. Every way evaluates the same points, which is checked.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

import arsm
from arsm_experiments.runs.provenance import provenance
from benchmarks.measure import seconds, table

SIZES = [2, 9, 4, 3, 5, 7] * 4


def f(z: Tensor) -> float:
    """10 ms of work, then a sum."""
    start = time.process_time()
    while time.process_time() - start < 0.01:
        pass
    return float(z.sum())


def main(workers: tuple[int, ...] = (1, 2), evaluations: int = 480) -> None:
    def timed(map: object = None) -> tuple[Tensor, float]:
        start = time.perf_counter()
        found = arsm.maximize(f, SIZES, evaluations=evaluations, map=map, progress=False)  # pyright: ignore[reportArgumentType]
        return found.state["points"], time.perf_counter() - start

    points, serial = timed()
    rows = [["in this process", seconds(serial), "1.0"]]
    for number in workers:
        with ProcessPoolExecutor(number) as processes:
            list(processes.map(f, [torch.zeros(1)] * 4 * number))  # started and imported
            same, spent = timed(processes.map)
        assert torch.equal(points, same), "the points depend on the processes"
        rows.append(
            [f"{number} process{'es' * (number > 1)}", seconds(spent), f"{serial / spent:.2f}"]
        )
    where = provenance("cpu")
    print(where["hardware"], where["commit"])
    title = (
        f"{evaluations} evaluations of 10 ms by arsm.maximize, 16 per round; the same points "
        "every time"
    )
    print(table(title, ["f runs", "time", "times faster"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--evaluations", type=int, default=480)
    options = parser.parse_args()
    main(tuple(options.workers), options.evaluations)
