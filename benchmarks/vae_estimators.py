"""A training step of the VAE with each estimator, one replica: `python -m benchmarks.vae_estimators
[ESTIMATOR ...]`.

It needs a GPU. The estimators compile in separate processes, all at once. When all are ready, they
run one after the other, each alone on the GPU, for some hundred steps of the graph that training
replays. Prints one line of JSON per estimator; takes about a minute and a half.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from dataclasses import replace
from typing import Any

from arsm_experiments.runs.provenance import provenance
from arsm_experiments.vae import Vae

EPOCHS, IMAGES = 10, 11_000
PATIENCE = 75.0
"""Seconds to wait for the others to compile."""
AS_RELEASED = {
    "learned_temperature": True,
    "kl": "analytic",
    "first_logit_fixed": False,
    "independent_decoder_sample": False,
}
"""How the paper's authors train Gumbel-Softmax."""
CONFIGS = (
    Vae("arsm"),
    Vae("25*gumbel-softmax:hard=True", **AS_RELEASED),  # pyright: ignore[reportArgumentType]
    Vae("25*gumbel-softmax"),
    Vae("gumbel-softmax:hard=True", **AS_RELEASED),  # pyright: ignore[reportArgumentType]
    Vae("gumbel-softmax:hard=True"),
    Vae("relax"),
    Vae("reinforce"),
    Vae("ar"),
    Vae("ars"),
    Vae("arsm:pooled=True"),
    Vae("rloo:samples=46,live=1"),
)


def time_step(config: Vae, ready: Any, start: Any, alone: Any) -> None:
    """Compile, report that, wait for the start and for the lock, and print milliseconds per
    step.
    """
    import torch

    from benchmarks.vae import make, step_seconds

    torch.set_float32_matmul_precision("high")
    replicas = make(
        replace(config, precision="bf16"), 1, "cuda", IMAGES, compiled=True, steps_per_replay=5
    )
    replicas.epoch()
    torch.cuda.synchronize()
    ready.release()
    start.wait()
    with alone:
        seconds = step_seconds(replicas, EPOCHS)
        found = {"label": Vae.label(config.config(0.0, 0.0)), "milliseconds": 1e3 * seconds}
        made = provenance("cuda")
        print(json.dumps(found | {name: made[name] for name in ("hardware", "commit")}), flush=True)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ready, start, alone = context.Semaphore(0), context.Event(), context.Lock()
    chosen = [config for config in CONFIGS if not sys.argv[1:] or config.estimator in sys.argv[1:]]
    workers = [
        context.Process(target=time_step, args=(config, ready, start, alone)) for config in chosen
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + PATIENCE
    late = sum(not ready.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in workers)
    if late:
        print(
            f"{late} of {len(workers)} had not compiled within {PATIENCE:g} s: beside them, times "
            "are longer."
        )
    start.set()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    main()
