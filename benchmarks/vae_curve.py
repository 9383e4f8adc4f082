"""Does a faster training step train alike? `python -m benchmarks.vae_curve RUN.pt` trains, with two files it compares.

A run trains 15 seeds of the VAE with ARSM in bf16 on 10,000 images of MNIST for 100 epochs, in series with different
noise. Then it averages the gradient over as many epochs at fixed weights, which the first run saves (--weights FILE).
Run it at two commits, copying this file to the older one if needed: the losses should agree within their errors.
Short and many series find differences of the first epochs (--epochs 20 --series 14). A killed run keeps the series that
it finished.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from arsm_experiments.replicas import Replicas
from arsm_experiments.vae import Vae
from benchmarks.vae import make

SEEDS, IMAGES, FEW = 15, 10_000, 20


def build(seeds: int = SEEDS, images: int = IMAGES) -> Replicas:
    torch.set_float32_matmul_precision("high")
    on_gpu = torch.cuda.is_available()
    options = {"compiled": True, "steps_per_replay": 5} if on_gpu else {}
    return make(replace(Vae(), precision="bf16"), seeds, "cuda" if on_gpu else "cpu", images, **options)


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


def train(out: Path, weights: Path, epochs: int, series: int, **options: int) -> None:
    replicas = build(**options)
    fresh = replicas.state_dict(slice(None))
    curves: list[Tensor] = []
    for seed in track(range(series), "series"):
        curves.append(losses(replicas, fresh, epochs, seed))
        save({"curves": torch.stack(curves)}, out)
    if not weights.exists():
        losses(replicas, fresh, min(FEW, epochs), 0)
        save(replicas.state_dict(slice(None)), weights)
    start = torch.load(weights, weights_only=True)
    save({"curves": torch.stack(curves), "gradient": mean_gradient(replicas, start, epochs, series)}, out)


def save(found: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    torch.save(found, partial)
    os.replace(partial, path)


def compare(old: Path, new: Path) -> str:
    a, b = (torch.load(path, weights_only=True) for path in (old, new))
    series = min(len(each["curves"]) for each in (a, b))
    difference = (b["curves"][:series] - a["curves"][:series]).transpose(0, 1).flatten(1)  # [epochs, series x seeds]
    lines = []
    for epoch in (1, 2, 5, 10, 20, 50, 100):
        if epoch <= len(difference):
            own = difference[epoch - 1]
            error = own.std() / len(own) ** 0.5
            mean = a["curves"][:series, epoch - 1].mean()
            lines.append(f"epoch {epoch}, {len(own)} runs: {mean:.3f}, new - old {own.mean():.4f} +- {error:.4f}")
    if "gradient" in a and "gradient" in b:
        gradient = (b["gradient"] - a["gradient"]).norm() / a["gradient"].norm()
        lines.append(f"mean gradient at the same weights: relative difference {gradient:.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="the run to write, or an old and a new one")
    parser.add_argument("--weights", type=Path, default=Path("weights.pt"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--series", type=int, default=3)
    given = parser.parse_args()
    if len(given.files) == 1:
        train(given.files[0], given.weights, given.epochs, given.series)
    else:
        print(compare(*given.files))
