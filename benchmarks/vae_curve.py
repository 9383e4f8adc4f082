"""Does a faster training step train alike? `python -m benchmarks.vae_curve RUN.pt` trains, with two
files it compares.

A run trains 15 seeds of the VAE with ARSM on 10,000 images of MNIST for 100 epochs, in series with
different noise. Then it averages the gradient over as many epochs at fixed weights, which the first
run saves (--weights FILE). Run it at two commits, copying this file to the older one if needed: the
losses should agree within their errors. Short and many series find differences of the first epochs
(--epochs 20 --series 14); --precision float32 is the reference for rounding. A killed run keeps the
series that it finished.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.progress import track
from torch import Tensor

from arsm_experiments.replicas import Replicas, seed_of
from arsm_experiments.vae import Vae
from benchmarks.measure import table
from benchmarks.vae import make

SEEDS, IMAGES, FEW = 15, 10_000, 20
Precision = Literal["float32", "tf32", "bf16"]


def build(precision: Precision = "bf16", seeds: int = SEEDS, images: int = IMAGES) -> Replicas:
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    on_gpu = torch.cuda.is_available()
    options = {"compiled": True, "steps_per_replay": 5} if on_gpu else {}
    return make(
        replace(Vae(), precision=precision), seeds, "cuda" if on_gpu else "cpu", images, **options
    )


def restart(replicas: Replicas, start: dict[str, Any], seed: int) -> None:
    """From these weights, with new noise: on a GPU that of torch's generator, else that of each
    replica's own.
    """
    replicas.load_state_dict(slice(None), start)
    torch.manual_seed(seed)
    for number, generator in enumerate(replicas.noise_generators):
        generator.manual_seed(seed_of(f"{number} {seed}"))


def losses(replicas: Replicas, start: dict[str, Any], epochs: int, seed: int) -> Tensor:
    """-ELBO of each epoch's training images: [epochs, R]."""
    restart(replicas, start, seed)
    return torch.stack([replicas.epoch()["train"].clone() for _ in range(epochs)]).cpu()


def mean_gradient(replicas: Replicas, start: dict[str, Any], epochs: int, seed: int) -> Tensor:
    """At fixed weights, the mean over the ends of epochs of Adam's first moment: [R, P]."""
    restart(replicas, start, seed)
    replicas.settings["rate"].zero_()
    total = torch.zeros_like(replicas.parameters)
    for _ in range(epochs):
        replicas.epoch()
        total += replicas.state["first_moment"]
    return (total / epochs).cpu()


def train(out: Path, weights: Path, epochs: int, series: int, replicas: Replicas) -> None:
    fresh = replicas.state_dict(slice(None))
    curves: list[Tensor] = []
    for seed in track(range(series), "series"):
        curves.append(losses(replicas, fresh, epochs, seed))
        save({"curves": torch.stack(curves)}, out)
    if not weights.exists():
        losses(replicas, fresh, min(FEW, epochs), 0)
        save(replicas.state_dict(slice(None)), weights)
    start = torch.load(weights, weights_only=True)
    save(
        {"curves": torch.stack(curves), "gradient": mean_gradient(replicas, start, epochs, series)},
        out,
    )


def save(found: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    torch.save(found, partial)
    os.replace(partial, path)


def compare(old: Path, new: Path) -> str:
    a, b = (torch.load(path, weights_only=True) for path in (old, new))
    series = min(len(each["curves"]) for each in (a, b))
    # [epochs, runs]
    before, after = (each["curves"][:series].transpose(0, 1).flatten(1) for each in (a, b))
    difference = (after - before).mean(1)
    error = (after - before).std(1) / before.shape[1] ** 0.5
    ratio = (difference / error).nan_to_num(0.0)
    shown = {1, 2, 5, 10, 20, 50, 100, int(ratio.abs().argmax()) + 1}
    rows = [
        [
            str(e + 1),
            f"{before[e].mean():.3f}",
            f"{before[e].std():.3f}",
            f"{difference[e]:.4f} ± {error[e]:.4f}",
            f"{ratio[e]:.1f}",
        ]
        for e in range(len(before))
        if e + 1 in shown
    ]
    header = ["epoch", "old", "sd of runs", "new - old", "in errors"]
    title = (
        f"-ELBO of {before.shape[1]} runs; shown is also the epoch where the two are the most "
        "errors apart"
    )
    lines = [str(table(title, header, rows))]
    if "gradient" in a and "gradient" in b:
        gradient = (b["gradient"] - a["gradient"]).norm() / a["gradient"].norm()
        lines.append(f"mean gradient at the same weights: relative difference {gradient:.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", type=Path, nargs="+", help="the run to write, or an old and a new one"
    )
    parser.add_argument("--weights", type=Path, default=Path("weights.pt"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--series", type=int, default=3)
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    given = parser.parse_args()
    if len(given.files) == 1:
        train(given.files[0], given.weights, given.epochs, given.series, build(given.precision))
    else:
        print(compare(*given.files))
