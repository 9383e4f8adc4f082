"""A training step of the categorical VAE: its time compared with that of its matrix products.

CPU: a whole ARSM step, its matrix products alone, and the straightforward way, one decoder call for
every swap. GPU: eager, compiled and captured in a CUDA graph, for 1 and 15 replicas, beside the
floor: the step's operations at the rate that a large product of matrices reaches on the same
machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm.noise import dirichlet
from arsm_experiments.data import PIXELS, load_mnist
from arsm_experiments.replicas import Objective, Replicas
from arsm_experiments.training.loop import initial_parameters
from arsm_experiments.vae import SLOPE, Vae, VaeNetwork, bernoulli, linear_layers, log_q
from benchmarks.measure import interleaved, table

REPETITIONS = 15
CHUNK = 1024


def widths(config: Vae) -> list[tuple[int, ...]]:
    """Layer widths of the encoder and the decoder."""
    size = config.variables * config.categories
    free = config.variables * (config.categories - 1) if config.first_logit_fixed else size
    return [(PIXELS, *config.hidden, free), (size, *reversed(config.hidden), PIXELS)]


def swaps(config: Vae) -> int:
    return config.categories * (config.categories - 1) // 2


def make(config: Vae, replicas: int, device: str, images: int, **options: bool | int) -> Replicas:
    stacked = device != "cpu"
    config = replace(config, seeds=tuple(range(replicas)))
    module = VaeNetwork(config, dense=stacked).to(device)
    zeros, data = torch.zeros(replicas), load_mnist().train[:images]
    return Replicas(
        module,
        Objective(VaeNetwork.encode, module.losses, module.prepare, module.metrics),
        initial_parameters(config, data),
        data.to(device),
        {"rate": zeros + config.rates[0], "dropout": zeros, "input_dropout": zeros},
        list(config.seeds),
        batch=config.batch,
        watched=module.encoder_size,
        stacked=stacked,
        **options,  # pyright: ignore[reportArgumentType]
    )


# ---------------------------------------------------------------- CPU


def matrix_products(config: Vae) -> Callable[[], None]:
    """The products of one step: the decoder on all swaps; both networks on the batch, forward and
    backward.
    """
    encoder, decoder = (
        [
            (layer, torch.randn(CHUNK, layer.in_features))
            for layer in linear_layers(*sizes)
            if isinstance(layer, nn.Linear)
        ]
        for sizes in widths(config)
    )
    rows = config.batch * swaps(config)

    @torch.no_grad()
    def run() -> None:
        for done in range(0, rows, CHUNK):
            for layer, x in decoder:
                F.linear(x[: rows - done], layer.weight, layer.bias)
        for layer, x in encoder + decoder:
            x = x[: config.batch]
            y = F.linear(x, layer.weight, layer.bias)
            torch.mm(y.T, x)
            torch.mm(y, layer.weight)

    return run


def swap_loop(config: Vae, x: Tensor) -> Callable[[], None]:
    """The straightforward way: one argmin and one decoder call for every swap, then the formula and
    Adam.
    """
    module = VaeNetwork(config)
    optimiser = torch.optim.Adam(module.parameters(), lr=config.rates[0])
    c = config.categories

    def run() -> None:
        logits = module.encode(x)
        phi = logits.detach()
        log_pi = dirichlet(phi)

        def value(z: Tensor) -> Tensor:
            h = arsm.one_hot(z, c).flatten(1)
            for layer in module.decoder[:-1]:
                h = F.leaky_relu(layer(h), SLOPE)
            return bernoulli(module.decoder[-1](h), x) - log_q(phi, z)

        f = torch.zeros(c, c, len(x))
        with torch.no_grad():
            true = (log_pi - phi).argmin(-1)
            f[range(c), range(c)] = value(true)
            for i in range(c):
                for j in range(i):
                    order = list(range(c))
                    order[i], order[j] = j, i
                    f[i, j] = f[j, i] = value((log_pi[..., order] - phi).argmin(-1))
        gradient = torch.einsum("cjn,nkj->nkc", f - f.mean(0), 1 / c - log_pi.exp())
        independent = (dirichlet(phi) - phi).argmin(-1)
        loss = -((logits * gradient).sum((1, 2)) + value(independent)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return run


def on_cpu(config: Vae) -> None:
    replicas = make(config, 1, "cpu", images=2000)
    replicas.epoch()
    calls: dict[str, Callable[[], object]] = {
        "its matrix products": matrix_products(config),
        "ARSM step": replicas.train_step,
        "a loop over swaps": swap_loop(config, replicas.next_batch(replicas.order[0])),
    }
    times = interleaved(calls, REPETITIONS)
    floor = times["its matrix products"].median
    rows = [[name, str(timing), f"{timing.median / floor:.2f}"] for name, timing in times.items()]
    print(
        table(
            f"VAE step on a CPU, batch {config.batch}",
            ["way", "median (range)", "times the products"],
            rows,
        )
    )


# ---------------------------------------------------------------- GPU


def floor(config: Vae, replicas: int) -> float:
    """Seconds for the step's operations at the rate of large products in the same precision."""
    encoder, decoder = (
        sum(a * b for a, b in itertools.pairwise(sizes)) for sizes in widths(config)
    )
    trained = 3 * 2 * config.batch * (encoder + decoder)
    evaluated = 2 * config.batch * (swaps(config) + 1) * decoder
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return replicas * (trained / product_rate(torch.float32) + evaluated / product_rate(dtype))


def product_rate(dtype: torch.dtype, size: int = 8192, repetitions: int = 10) -> float:
    """Operations per second of a large product."""
    a = torch.randn(size, size, device="cuda", dtype=dtype)
    torch.mm(a, a)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        torch.mm(a, a)
    torch.cuda.synchronize()
    return repetitions * 2 * size**3 / (time.perf_counter() - start)


def step_seconds(replicas: Replicas, epochs: int) -> float:
    """Seconds per step, over whole epochs."""
    replicas.epoch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(epochs):
        replicas.epoch()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (epochs * replicas.steps_per_epoch)


WAYS: dict[str, dict[str, bool | int]] = {
    "eager": {},
    "compiled": {"compiled": True},
    "graph": {"steps_per_replay": 1},
    "compiled, graph": {"compiled": True, "steps_per_replay": 1},
    "compiled, graph of 5 steps": {"compiled": True, "steps_per_replay": 5},
}


def on_gpu(config: Vae) -> None:
    torch.set_float32_matmul_precision("high")
    rows = []
    for precision, replicas in itertools.product(("tf32", "bf16"), (1, 15)):
        chosen = replace(config, precision=precision)
        least = floor(chosen, replicas)
        for way, options in WAYS.items():
            seconds = step_seconds(
                make(chosen, replicas, "cuda", images=11_000, **options), epochs=5
            )
            rows.append(
                [precision, str(replicas), way, f"{1e3 * seconds:.3f}", f"{seconds / least:.1f}"]
            )
            print("  ".join(rows[-1]), flush=True)
    title = f"VAE step on {torch.cuda.get_device_name()}, batch {config.batch}"
    print(table(title, ["precision", "replicas", "way", "ms", "times the floor"], rows))


def main() -> None:
    config = Vae()
    if torch.cuda.is_available():
        on_gpu(config)
    on_cpu(config)


if __name__ == "__main__":
    main()
