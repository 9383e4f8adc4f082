"""python -m benchmarks.pyro_vae: gradients of a digits VAE in Pyro, `arsm.pyro.ELBO` beside Pyro's
own ELBOs.

A categorical VAE (784-200-KC, KC-200-784, ReLU) is trained on binarized MNIST. At several points of
its training every method estimates the gradient of -ELBO for one fixed minibatch many times, the
methods in turn, on one thread. For each:

    variance     the trace of the gradient's covariance, of all parameters and of the guide's
    CPU ms       median processor time of `loss_and_grads`
    cost         variance x CPU ms, relative to the best of Pyro's own

Pyro's baselines are given what training gives them: the running average sees a new minibatch before
every measured gradient, and the network has been fitted at the very parameters that are measured. A
running average over the same images in every step, which only training on all data at once allows,
is a row of its own and not among Pyro's best. Validation is off for all.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO
from pyro.optim import PyroOptim
from rich.console import Console
from torch import Tensor, nn

import arsm
import arsm.pyro
from arsm_experiments.data import load_mnist
from arsm_experiments.progress import progress_bars
from arsm_experiments.runs.files import write_atomically
from arsm_experiments.runs.provenance import provenance, short_commit
from arsm_experiments.runs.table import COLUMNS
from benchmarks.measure import hardware, table

BATCH, HIDDEN, CATEGORIES = 100, 200, 6
RUNNING = "__baseline_avg_downstream_cost_z"
"""The parameter in which TraceGraph_ELBO keeps a running average of site z."""
FULL_BATCH = "TraceGraph_ELBO, running average, 8 particles, same images in every step"
STEPS_OF_BASELINE, WARM_UP = 300, 20

ESTIMATORS = [
    "rloo:samples=8",
    "rloo:samples=8,live=1",
    "rloo:samples=8,ridge=1.0,surrogate=logits",
    "rloo:samples=16,ridge=1.0,surrogate=logits",
    "rloo:samples=16,ridge=1.0,surrogate=logits,live=4",
    "rloo:samples=32,ridge=1.0,surrogate=logits,live=4",
    "local-expectation",
    "arsm",
    "arsm:pooled=True",
]


class Digits:
    """The VAE as Pyro's model and guide; the guide's site carries the baseline that a method asks
    for.
    """

    def __init__(self, variables: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.variables = variables
        width = variables * CATEGORIES
        self.encoder = nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))
        self.decoder = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 784))
        self.baseline = nn.Sequential(
            nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1), nn.Flatten(-2)
        )
        self.infer: Any = {}

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("images", BATCH):
            z = pyro.sample("z", self._site(torch.zeros(self.variables, CATEGORIES)))
            one_hot = arsm.one_hot(z, CATEGORIES)
            pixels = self.decoder(one_hot.flatten(-2) if self.variables > 1 else one_hot)
            pyro.sample("x", dist.Bernoulli(logits=pixels).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("images", BATCH):
            logits = self.encoder(x).unflatten(-1, (self.variables, CATEGORIES))
            pyro.sample("z", self._site(logits), infer=self.infer)

    def _site(self, logits: Tensor) -> Any:
        # only a site without event dimensions can be enumerated
        fn = dist.Categorical(logits=logits if self.variables > 1 else logits.squeeze(-2))
        return fn.to_event(1) if self.variables > 1 else fn

    def parameters(self) -> list[nn.Parameter]:
        """The guide's four tensors, then the model's."""
        return [*self.encoder.parameters(), *self.decoder.parameters()]


@dataclass
class Method:
    """A loss, the guide's settings for it, and what was measured."""

    name: str
    loss: Any
    infer: dict[str, Any] = field(default_factory=dict)
    rival: bool = True
    """Whether it is one of Pyro's own, as they are used with minibatches."""
    refresh: bool = False
    """Whether a step on another minibatch comes before each measured gradient."""
    milliseconds: list[float] = field(default_factory=list)
    total: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)

    def add(self, gradients: list[Tensor]) -> None:
        """One more sample of the gradient."""
        g = [x.double() for x in gradients]
        self.total = [a + b for a, b in zip(self.total, g, strict=True)] if self.total else g
        squares = [x.square() for x in g]
        self.squares = (
            [a + b for a, b in zip(self.squares, squares, strict=True)] if self.squares else squares
        )

    def variance(self) -> tuple[float, float]:
        """Of all parameters together, and of the guide's."""
        n = len(self.milliseconds)
        parts = [
            float((square - total.square() / n).sum() / (n - 1))
            for total, square in zip(self.total, self.squares, strict=True)
        ]
        return sum(parts), sum(parts[:4])


def methods(vae: Digits) -> list[Method]:
    """Pyro's ELBOs and ours."""
    running = {"baseline": {"use_decaying_avg_baseline": True}}

    def network(particles: int) -> dict[str, Any]:
        return {
            "baseline": {
                "nn_baseline": lambda x: vae.baseline(x).expand(particles, BATCH).squeeze(0)
            }
        }

    made = [
        Method("Trace_ELBO, 1 particle", Trace_ELBO()),
        Method("Trace_ELBO, 8 particles", Trace_ELBO(8, vectorize_particles=True)),
        Method(
            "TraceGraph_ELBO, running average, 1 particle", TraceGraph_ELBO(), running, refresh=True
        ),
        Method(
            "TraceGraph_ELBO, running average, 8 particles",
            TraceGraph_ELBO(8, vectorize_particles=True),
            running,
            refresh=True,
        ),
        Method(FULL_BATCH, TraceGraph_ELBO(8, vectorize_particles=True), running, rival=False),
        Method("TraceGraph_ELBO, network, 1 particle", TraceGraph_ELBO(), network(1)),
        Method(
            "TraceGraph_ELBO, network, 8 particles",
            TraceGraph_ELBO(8, vectorize_particles=True),
            network(8),
        ),
    ]
    if vae.variables == 1:
        made.append(
            Method("TraceEnum_ELBO", TraceEnum_ELBO(max_plate_nesting=1), {"enumerate": "parallel"})
        )
    return made + [
        Method(f"arsm.pyro.ELBO, {e}", arsm.pyro.ELBO(arsm.estimator(e)), rival=False)
        for e in ESTIMATORS
    ]


def measure(vae: Digits, images: Tensor, samples: int, advance: Callable[[], None]) -> list[Method]:
    """Every method's gradients for one minibatch, the methods in turn."""
    minibatch = torch.Generator().manual_seed(7)

    def draw() -> Tensor:
        return images[torch.randint(len(images), (BATCH,), generator=minibatch)]

    fixed, compared = draw(), methods(vae)
    fit_baseline(vae, draw, advance)
    averages: dict[str, Tensor] = {}
    for sample in range(samples + WARM_UP):
        for method in compared:
            vae.infer = with_input(method.infer, fixed)
            restore(averages.get(method.name))
            if method.refresh:
                method.loss.loss_and_grads(vae.model, vae.guide, draw())
                averages[method.name] = pyro.get_param_store()[RUNNING].detach().clone()
            for parameter in vae.parameters():
                parameter.grad = None
            start = time.process_time()
            method.loss.loss_and_grads(vae.model, vae.guide, fixed)
            seconds = time.process_time() - start
            if method.name == FULL_BATCH:
                averages[method.name] = pyro.get_param_store()[RUNNING].detach().clone()
            if sample >= WARM_UP:  # the first ones warm up
                method.milliseconds.append(1e3 * seconds)
                method.add(
                    [
                        p.grad if p.grad is not None else torch.zeros_like(p)
                        for p in vae.parameters()
                    ]
                )
        advance()
    return compared


def with_input(infer: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """The site's settings with the images as input of the network, if there is one."""
    if "nn_baseline" not in infer.get("baseline", {}):
        return infer
    return {"baseline": {**infer["baseline"], "nn_baseline_input": x}}


def restore(average: Tensor | None) -> None:
    """Put a running average back, or start a new one."""
    store = pyro.get_param_store()
    if RUNNING in store:
        del store[RUNNING]
    if average is not None:
        store[RUNNING] = average


def fit_baseline(vae: Digits, draw: Callable[[], Tensor], advance: Callable[[], None]) -> None:
    """Train the network that predicts each image's ELBO, the VAE's parameters held."""
    optimizer, loss = torch.optim.Adam(vae.baseline.parameters(), 3e-3), TraceGraph_ELBO()
    for _ in range(STEPS_OF_BASELINE):
        x = draw()
        vae.infer = {"baseline": {"nn_baseline": vae.baseline, "nn_baseline_input": x}}
        optimizer.zero_grad()
        loss.loss_and_grads(vae.model, vae.guide, x)
        optimizer.step()
        advance()


def train(vae: Digits, images: Tensor, steps: int, advance: Callable[[], None]) -> None:
    """The same optimiser for every point: leave-one-out REINFORCE by `arsm.pyro.ELBO`."""
    vae.infer = {}
    svi = SVI(
        vae.model,
        vae.guide,
        PyroOptim(torch.optim.Adam, {"lr": 1e-3}),
        arsm.pyro.ELBO(arsm.RLOO(8)),
    )
    for _ in range(steps):
        svi.step(images[torch.randint(len(images), (BATCH,))])
        advance()


def rows(found: dict[str, list[list[Method]]]) -> list[list[str]]:
    """The table's rows: every method at every point, over the seeds."""
    written = []
    where = provenance("cpu")
    for point, seeds in found.items():
        best = [
            [
                min(m.variance()[part] * statistics.median(m.milliseconds) for m in run if m.rival)
                for part in (0, 1)
            ]
            for run in seeds
        ]
        for number, method in enumerate(seeds[0]):
            runs = [run[number] for run in seeds]
            times = [statistics.median(m.milliseconds) for m in runs]
            metrics: dict[str, list[float]] = {"CPU ms": times}
            for part, of in enumerate(("", ", guide")):
                variances = [m.variance()[part] for m in runs]
                metrics["variance" + of] = variances
                # exact: nothing to compare with
                if not any(m.name == "TraceEnum_ELBO" for m in seeds[0]):
                    costs = [
                        v * t / low[part] for v, t, low in zip(variances, times, best, strict=True)
                    ]
                    metrics["variance x time / best of Pyro's" + of] = costs
            for metric, values in metrics.items():
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                figures = [f"{statistics.mean(values):.4g}", f"{spread:.2g}", str(len(values)), ""]
                place = [
                    f"{sum(sum(m.milliseconds) for m in runs) / 1e3:.1f}",
                    where["hardware"],
                    short_commit(where["commit"]),
                ]
                written.append([f"{point}: {method.name}", metric, *figures, *place])
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pyro_vae", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of trained models (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=40, help="gradients per method (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[0, 550], help="points of the training"
    )
    parser.add_argument(
        "--out", type=Path, help="a CSV file to write, such as results/pyro/table.csv"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    images = load_mnist().train.float()
    print(f"{hardware()}, pyro {pyro.__version__}", end="\n\n")
    plans = [(8, steps) for steps in sorted(args.steps)] + [(1, min(args.steps))]
    found: dict[str, list[list[Method]]] = {}
    measuring = args.samples + WARM_UP + STEPS_OF_BASELINE
    total = args.seeds * (sum(measuring for _ in plans) + max(args.steps) + plans[-1][1])
    with progress_bars(Console(file=sys.stderr)) as progress:
        bar = progress.add_task("pyro", total=total)
        for seed in range(args.seeds):
            for variables in (8, 1):
                pyro.clear_param_store()
                vae, done = Digits(variables, seed), 0
                for steps in [steps for k, steps in plans if k == variables]:
                    train(vae, images, steps - done, lambda: progress.advance(bar))
                    done = steps
                    run = measure(vae, images, args.samples, lambda: progress.advance(bar))
                    found.setdefault(f"Pyro VAE, K = {variables}, {steps} steps", []).append(run)
    written = rows(found)
    for point in found:
        cells: dict[str, dict[str, str]] = {}
        for label, metric, mean, *_ in written:
            if label.startswith(point + ": "):
                cells.setdefault(label.removeprefix(point + ": "), {})[metric] = mean
        header = list(dict.fromkeys(metric for metrics in cells.values() for metric in metrics))
        lines = [
            [label, *(metrics.get(metric, "") for metric in header)]
            for label, metrics in cells.items()
        ]
        print(table(point, ["method", *header], lines))
    if args.out:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *written])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, lambda file: file.write(text.getvalue().encode()))


if __name__ == "__main__":
    main()
