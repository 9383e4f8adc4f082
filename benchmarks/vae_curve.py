"""Does a faster training step train alike? `python -m benchmarks.vae_curve RUN.pt` trains, with two files it compares.

A run is 15 seeds of the VAE with ARSM in bf16 on 10,000 images of MNIST, in series of 100 epochs with other noise; then
the mean gradient over 100 epochs with a learning rate of 0, at weights that the first run has saved (--weights FILE).
Train at two commits, with this file copied to the older one where it lacks it, and compare: the same noise gives nearly
the same losses at first, and later the same ones within their errors.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arsm_experiments.data import load_mnist
from arsm_experiments.replicas import Replicas
from arsm_experiments.training.loop import initial_parameters
from arsm_experiments.vae import Vae, VaeNetwork

SEEDS, IMAGES, EPOCHS, SERIES, FEW = 15, 10_000, 100, 3, 20


def build(seeds: int = SEEDS, images: int = IMAGES) -> Replicas:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    config = replace(Vae(), precision="bf16", seeds=tuple(range(seeds)))
    module = VaeNetwork(config, dense=True).to(device)
    data, zeros = load_mnist().train[:images], torch.zeros(seeds)
    return Replicas(
        module,
        VaeNetwork.encode,
        module.losses,
        initial_parameters(config, data),
        data.to(device),
        {"rate": zeros + config.rates[0], "dropout": zeros, "input_dropout": zeros},
        list(config.seeds),
        batch=config.batch,
        watched=module.encoder_size,
        stacked=True,
        compiled=device == "cuda",
        steps_per_replay=5 if device == "cuda" else 0,
        **{name: getattr(module, name) for name in ("prepare", "metrics") if hasattr(module, name)},
    )


def losses(replicas: Replicas, start: dict[str, Any], epochs: int, seed: int) -> Tensor:
    """-ELBO of each epoch's training images: [epochs, R]."""
    replicas.load_state_dict(slice(None), start)
    torch.manual_seed(seed)
    return torch.stack([replicas.epoch()["train"].clone() for _ in range(epochs)]).cpu()


def mean_gradient(replicas: Replicas, start: dict[str, Any], epochs: int, seed: int) -> Tensor:
    """At fixed weights, the mean over the ends of epochs of Adam's first moment: [R, P]."""
    replicas.load_state_dict(slice(None), start)
    replicas.settings["rate"].zero_()
    torch.manual_seed(seed)
    total = torch.zeros_like(replicas.parameters)
    for _ in range(epochs):
        replicas.epoch()
        total += replicas.state["first_moment"]
    return (total / epochs).cpu()


def train(out: Path, weights: Path, epochs: int = EPOCHS, **options: int) -> None:
    replicas = build(**options)
    fresh = replicas.state_dict(slice(None))
    curves = torch.stack([losses(replicas, fresh, epochs, seed) for seed in range(SERIES)])
    if not weights.exists():
        losses(replicas, fresh, min(FEW, epochs), 0)
        save(replicas.state_dict(slice(None)), weights)
    start = torch.load(weights, weights_only=True)
    save({"curves": curves, "gradient": mean_gradient(replicas, start, epochs, SERIES)}, out)


def save(found: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    torch.save(found, partial)
    os.replace(partial, path)


def compare(old: Path, new: Path) -> str:
    a, b = (torch.load(path, weights_only=True) for path in (old, new))
    difference = (b["curves"] - a["curves"]).transpose(0, 1).flatten(1)  # [epochs, series x seeds]
    lines = []
    for epoch in (1, 5, 10, 20, 50, 100):
        if epoch <= len(difference):
            own = difference[epoch - 1]
            error = own.std() / len(own) ** 0.5
            lines.append(
                f"epoch {epoch}: {a['curves'][:, epoch - 1].mean():.3f}, new - old {own.mean():.4f} +- {error:.4f}"
            )
    gradient = (b["gradient"] - a["gradient"]).norm() / a["gradient"].norm()
    return "\n".join([*lines, f"mean gradient at the same weights: relative difference {gradient:.1e}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="the run to write, or an old and a new one")
    parser.add_argument("--weights", type=Path, default=Path("weights.pt"))
    given = parser.parse_args()
    if len(given.files) == 1:
        train(given.files[0], given.weights)
    else:
        print(compare(*given.files))
