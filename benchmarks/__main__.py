"""python -m benchmarks [name ...]: time and memory as tables."""

from __future__ import annotations

import argparse

import torch

from benchmarks import gpu, overhead, rl, swap, univariate, vae
from benchmarks.measure import hardware

BENCHMARKS = {
    "univariate": univariate.main,
    "swap": swap.main,
    "overhead": overhead.main,
    "vae": vae.main,
    "rl": rl.main,
    "gpu": gpu.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time and memory, printed as tables.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    names = parser.parse_args().names or [name for name in BENCHMARKS if name != "gpu" or torch.cuda.is_available()]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}; known are {', '.join(BENCHMARKS)}.")
    print(hardware(), end="\n\n")
    for name in names:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
