"""Which kernels an estimate and a VAE step launch on a GPU: `python -m benchmarks.gpu_profile
FILE`.

Writes names, counts and times of all kernels to FILE and prints one line per case.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

import arsm
from arsm import kernels as arsm_kernels
from arsm.noise import dirichlet
from arsm.univariate import merge, swap_all
from arsm_experiments.vae import Vae
from benchmarks.gpu import (
    backward,
    captured,
    check,
    in_a_row,
    large_vocabulary,
    milliseconds,
    report,
    small,
    step,
)
from benchmarks.vae import make

REPETITIONS = 10


def kernels(call: Callable[[], object]) -> dict[str, tuple[float, float]]:
    """Launches and microseconds per call, by kernel."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(REPETITIONS):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            found[event.name][0] += 1 / REPETITIONS
            found[event.name][1] += event.time_range.elapsed_us() / REPETITIONS
    return {name: (count, time) for name, (count, time) in found.items()}


def write(file: TextIO, title: str, found: dict[str, tuple[float, float]]) -> str:
    """A table of kernels, slowest first."""
    launches, total = (sum(column) for column in zip(*found.values(), strict=True))
    print(f"\n{title}: {launches:.1f} kernels, {total:.1f} us", file=file)
    for name, (count, time) in sorted(found.items(), key=lambda item: -item[1][1]):
        print(f"{count:7.1f} {time:9.1f} us  {name[:150]}", file=file)
    file.flush()
    return f"{launches:.0f} kernels, {total:.1f} us in all"


def check_pairs() -> str:
    """The pairs of several variables against plain PyTorch on the CPU."""
    same = []
    for variables, categories, scale in ((20, 10, 1.0), (3, 16, 4.0), (60, 2, 0.0)):
        generator = torch.Generator().manual_seed(0)
        logits = scale * torch.randn(200, variables, categories, generator=generator)
        log_pi = dirichlet(logits, generator)
        here, there = (
            arsm_kernels.pairs(logits, log_pi),
            arsm_kernels.pairs(logits.cuda(), log_pi.cuda()),
        )
        same += [torch.equal(x, y.cpu()) for x, y in zip(here, there, strict=True)]
    return f"equal: {all(same)}"


def operators(file: TextIO, *shape: int) -> str:
    """The two operators alone."""
    logits = torch.randn(shape, device="cuda")
    log_pi = dirichlet(logits)
    swaps = swap_all(logits, log_pi)
    f = torch.rand(shape, device="cuda")
    write(file, f"order {list(shape)}", kernels(lambda: swap_all(logits, log_pi)))
    write(file, f"merge {list(shape)}", kernels(lambda: merge(swaps, f)))
    times = [
        in_a_row(captured(call))
        for call in (lambda: swap_all(logits, log_pi), lambda: merge(swaps, f))
    ]
    return f"order {times[0]:.3f} ms, merge {times[1]:.3f} ms"


def compiled(file: TextIO, *shape: int) -> str:
    """A dense estimate and its backward, compiled, then captured."""
    logits = torch.randn(shape, device="cuda", requires_grad=True)
    value = torch.compile(step(arsm.ARSM(), "dense"), fullgraph=True, dynamic=False)
    call = captured(lambda: backward(value, logits))
    words = write(file, f"arsm {list(shape)}, compiled and captured", kernels(call))
    return f"{in_a_row(call):.3f} ms; {words}"


def eager(file: TextIO, words: str) -> str:
    """A packed estimate and its backward."""
    logits = torch.randn(64, 1, 10, device="cuda", requires_grad=True)
    call = lambda: backward(step(arsm.estimator(words), "packed"), logits)  # noqa: E731
    launched = write(file, f"{words} [64, 1, 10], eager", kernels(call))
    return f"{milliseconds(call, 100):.2f} ms; {launched}"


def vae_step(file: TextIO, count: int) -> str:
    """A training step on images of MNIST, compiled and captured."""
    torch.set_float32_matmul_precision("high")
    replicas = make(
        replace(Vae(), precision="bf16"), count, "cuda", 10_000, compiled=True, steps_per_replay=5
    )
    replicas.epoch()
    graph = replicas._graph
    assert graph is not None
    found = kernels(graph.replay)
    words = write(file, f"5 VAE steps, {count} replicas", found)
    return f"{in_a_row(graph.replay) / 5:.3f} ms per step; 5 steps: {words}"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    with Path(sys.argv[1]).open("w") as file:
        for shape in ((300, 4, 20), (64, 1, 100), (8, 1, 50_257), (1, 1, 1_000_000)):
            for scale in (1.0, 4.0):
                report(
                    f"check {list(shape)}, logits of scale {scale:g}",
                    lambda x=(shape, scale): check(*x),
                )
        report("check pairs", check_pairs)
        for words in ("arsm", "rloo"):
            report(f"[64, 1, 10] {words}, eager", lambda words=words: eager(file, words))
        report("[64, 1, 10] ars, eager", lambda: small("ars"))
        for shape in ((256, 1, 50_257), (1, 1, 1_000_000)):
            report(f"{list(shape)} operators", lambda shape=shape: operators(file, *shape))
        report("[256, 1, 50257] arsm, compiled", lambda: large_vocabulary(1.0))
        for shape in ((256, 1, 50_257), (1, 1, 1_000_000)):
            report(f"{list(shape)} arsm, compiled", lambda shape=shape: compiled(file, *shape))
        for count in (1, 15):
            report(f"VAE step, bf16, {count} replicas", lambda count=count: vae_step(file, count))


if __name__ == "__main__":
    main()
