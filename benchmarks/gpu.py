"""One estimate on a GPU: `python -m benchmarks.gpu` needs torch and arsm alone and takes about
three minutes.

The kernels are first compared with the same operators in plain PyTorch on the CPU. Every time is
that of noise, estimate and backward; f is a look-up. "eager" is the host's loop over kernels,
"graph" a captured CUDA graph of the dense estimate, "compiled" is torch.compile(fullgraph=True),
captured as well.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import arsm
from arsm.noise import dirichlet
from arsm.question import attach
from arsm.sampling import uniforms
from arsm.univariate import merge, swap_all
from benchmarks.overhead import leave_one_out

MB = 1e6


def look_up(z: Tensor) -> Tensor:
    return z[:, 0].float()


def step(estimator: arsm.Estimator, evaluation: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    """The estimate's value [*B] as a function of the logits."""

    def value(logits: Tensor) -> Tensor:
        return arsm.estimate(
            estimator, logits, look_up, evaluation=evaluation, max_rows=None, **options
        ).value

    return value


def backward(value: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    logits.grad = None
    value(logits).sum().backward()


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], object], repetitions: int = 30) -> float:
    """The median over repetitions, each from an idle GPU to an idle GPU for the host, or between
    events.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def in_a_row(call: Callable[[], object], repetitions: int = 100) -> float:
    """Milliseconds per call, many of them queued: the GPU's own time."""
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repetitions):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repetitions


def added_memory(call: Callable[[], object]) -> float:
    """Peak megabytes on top of what was allocated before the call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MB


def report(name: str, found: Callable[[], str]) -> None:
    """One line, also where it fails: the rest is worth having."""
    start = time.perf_counter()
    try:
        words = found()
    except Exception:
        words = "FAILED\n" + traceback.format_exc(limit=4)[-2_000:]
    print(f"{name:58} {words}   [{time.perf_counter() - start:.0f} s]", flush=True)


def check(shape: tuple[int, ...], scale: float) -> str:
    """The Triton kernels against plain PyTorch on the CPU."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(shape, generator=generator)
    log_pi = dirichlet(logits, generator)
    here, there = swap_all(logits, log_pi), swap_all(logits.cuda(), log_pi.cuda())
    f = torch.where(here.can_win, torch.randn(shape, generator=generator).double(), 0.0)
    f = torch.where(here.can_win, f, f.gather(-1, here.z.unsqueeze(-1)))
    expected, found = merge(here, f), merge(there, f.cuda())
    repeated = merge(swap_all(logits.cuda(), log_pi.cuda()), f.cuda())
    same = torch.equal(here.can_win, there.can_win.cpu()) and torch.equal(here.z, there.z.cpu())
    worst = float((found.cpu() - expected).abs().max())
    return (
        f"winners equal: {same}, worst difference {worst:.1e}, repeats to the bit: "
        f"{torch.equal(found, repeated)}"
    )


def with_floor(ms: float, logits: Tensor) -> str:
    """A time beside that of a copy of the logits, whose bytes any estimate must read and its
    gradient write.
    """
    copy = torch.empty_like(logits)
    least = in_a_row(captured(lambda: copy.copy_(logits.detach())))
    return f"{ms:.3f} ms, {ms / least:.0f} times a copy of the logits ({least:.3f} ms)"


def large_vocabulary(scale: float) -> str:
    logits = (scale * torch.randn(256, 1, 50_257, device="cuda")).requires_grad_()
    compiled = torch.compile(step(arsm.ARSM(), "dense"), fullgraph=True, dynamic=False)
    call = lambda: backward(compiled, logits)  # noqa: E731
    memory = added_memory(call)
    return f"{with_floor(in_a_row(captured(call)), logits)}, {memory:.0f} MB added"


def large_vocabulary_eager(evaluation: str) -> str:
    logits = torch.randn(256, 1, 50_257, device="cuda", requires_grad=True)
    call = lambda: backward(step(arsm.ARSM(), evaluation), logits)  # noqa: E731
    memory = added_memory(call)
    return f"{milliseconds(call, 10):.2f} ms, {memory:.0f} MB added"


def operators(*shape: int) -> str:
    """The two operators alone, captured."""
    logits = torch.randn(shape, device="cuda")
    log_pi = dirichlet(logits)
    swaps = swap_all(logits, log_pi)
    f = torch.rand(shape, device="cuda")
    order, merging = captured(lambda: swap_all(logits, log_pi)), captured(lambda: merge(swaps, f))
    noise = captured(lambda: dirichlet(logits))
    return (
        f"noise {in_a_row(noise):.3f} ms, order {in_a_row(order):.3f} ms, merge "
        f"{in_a_row(merging):.3f} ms"
    )


def a_million(how: str, scale: float) -> str:
    logits = (scale * torch.randn(1, 1, 1_000_000, device="cuda")).requires_grad_()
    value = step(arsm.ARSM(), "dense")
    if how == "compiled":
        value = torch.compile(value, fullgraph=True, dynamic=False)
    return with_floor(in_a_row(captured(lambda: backward(value, logits))), logits)


def small(words: str) -> str:
    logits = torch.randn(64, 1, 10, device="cuda", requires_grad=True)
    ms, frozen = (
        milliseconds(
            lambda x=x: backward(step(arsm.estimator(words), "packed", frozen=x), logits), 100
        )
        for x in (False, True)
    )
    by_hand = milliseconds(lambda: leave_one_out(logits.detach()), 100)
    return f"{ms:.2f} ms, {ms / by_hand:.1f} times RLOO by hand; with frozen=True {frozen:.2f} ms"


def least() -> str:
    """What any eager estimate does: draw noise, evaluate f at z and elsewhere, wait once, run its
    own backward.
    """
    logits = torch.randn(64, 1, 10, device="cuda", requires_grad=True)
    z, gradient = (
        torch.zeros(128, 1, dtype=torch.int64, device="cuda"),
        torch.ones_like(logits.detach()),
    )

    def call() -> None:
        logits.grad = None
        torch.empty_like(logits).exponential_()
        live, rest = look_up(z[:64]), look_up(z[64:])
        rest.sum().item()
        attach(live, logits, gradient).sum().backward()

    return f"{milliseconds(call, 100):.2f} ms"


def resolution() -> str:
    """A uniform number drawn in a compiled graph must not be one of float32's."""
    u = torch.compile(lambda x: uniforms(x, 1_000), fullgraph=True)(
        torch.zeros(64, 1, 4, device="cuda")
    )
    return (
        f"{float((u.float().double() == u).double().mean()):.4f} of the uniforms are float32's "
        "(0 is right)"
    )


def compiles(words: str, variables: int, categories: int) -> str:
    """Forward and backward in one graph each, with the same numbers as eager."""
    torch.compiler.reset()
    estimator = arsm.estimator(words)
    logits = torch.randn(2, variables, categories, device="cuda", requires_grad=True)
    noise = estimator.noise(logits)

    def value(logits: Tensor, noise: object) -> Tensor:
        out = arsm.estimate(
            estimator, logits, look_up, noise=noise, evaluation="dense", max_rows=None
        )
        return out.value

    results = []
    for call in (value, torch.compile(value, fullgraph=True, dynamic=False)):
        logits.grad = None
        call(logits, noise).sum().backward()
        results.append(torch.as_tensor(logits.grad))
    worst = float((results[0] - results[1]).abs().max() / results[0].abs().max())
    return f"compiles; worst relative difference {worst:.1e}"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for shape, scale in [
        ((64, 1, 100), 1.0),
        ((8, 1, 50_257), 0.0),
        ((8, 1, 50_257), 4.0),
        ((1, 1, 1_000_000), 1.0),
    ]:
        report(
            f"check {list(shape)}, logits of scale {scale:g}",
            lambda shape=shape, scale=scale: check(shape, scale),
        )
    report("noise drawn in a compiled graph", resolution)
    for words in ("arsm", "ars", "rloo"):
        report(f"[64, 1, 10] {words}, eager", lambda words=words: small(words))
    report("[64, 1, 10] noise, f, one wait and backward alone, eager", least)
    for shape in ((256, 1, 50_257), (1, 1, 1_000_000)):
        report(f"{list(shape)} operators", lambda shape=shape: operators(*shape))
    report("[1, 1, 1000000] arsm, graph", lambda: a_million("graph", 1.0))
    for scale in (1.0, 4.0):
        words = f"arsm, compiled, logits of scale {scale:g}"
        report(f"[256, 1, 50257] {words}", lambda scale=scale: large_vocabulary(scale))
        report(f"[1, 1, 1000000] {words}", lambda scale=scale: a_million("compiled", scale))
    for evaluation in ("packed", "dense"):
        report(
            f"[256, 1, 50257] arsm, eager, {evaluation}",
            lambda how=evaluation: large_vocabulary_eager(how),
        )
    for words, variables, categories in [
        ("arsm", 1, 10),
        ("arsm", 1, 10_000),
        ("arsm", 1, 1_000_000),
        ("ars", 1, 10),
        ("ars", 1, 10_000),
        ("ars", 1, 1_000_000),
        ("arsm:pooled=True", 3, 10),
        ("arsm:pooled=True", 1, 10_000),
        ("arsm:pooled=True", 1, 1_000_000),
    ]:
        name = f"[2, {variables}, {categories}] {words}, forward and backward"
        report(name, lambda case=(words, variables, categories): compiles(*case))


if __name__ == "__main__":
    main()
