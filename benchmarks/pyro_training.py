"""python -m benchmarks.pyro_training: training in Pyro, `arsm.pyro.ELBO` beside Pyro's own losses.

Four programs with discrete guides: a Gaussian mixture, a hidden Markov model with a mean-field and
with a chain guide, and a VAE of binarized digits. Two questions, both with validation off and on
one thread:

    CPU ms       of `loss_and_grads`, the median over steps that alternate between the losses
    ELBO         after equal CPU seconds of training with each loss, seed by seed; the optimiser,
                 its step size and the starting point are the same for all

The ELBO is that of the trained guide, by a hundred samples outside the clock. A run is one line of
results/pyro/runs.jsonl.xz, and those already there are not repeated:

    python -m benchmarks.pyro_training run      # about 9 CPU minutes
    python -m benchmarks.pyro_training report   # training.csv and training.png
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from pyro.optim import PyroOptim
from torch import Tensor, nn

import arsm
import arsm.pyro
from arsm_experiments.data import load_mnist
from arsm_experiments.runs.provenance import short_commit
from benchmarks import records

RESULTS = Path(__file__).parent.parent / "results" / "pyro"
RUNS = RESULTS / "runs.jsonl.xz"
SEEDS = 3
TIMED_STEPS, WARM_UP = 60, 10
SAMPLES = 100
"""Samples of the guide from which a trained ELBO is computed."""

Program = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """A model and a guide, and how they are trained."""

    model: Program
    guide: Program
    minibatch: Callable[[], tuple[Any, ...]]
    """Arguments of the next step."""
    held: tuple[Any, ...]
    """Arguments with which the ELBO is measured."""
    rows: int
    """Rows over which that ELBO is a sum."""
    rate: float
    seconds: float
    enumerable: bool = True
    settings: Any = field(default_factory=dict)
    """The `infer` of the guide's discrete sites, which a loss may set."""


# ---------------------------------------------------------------- the programs


def mixture(seed: int) -> Problem:
    """200 points from three Gaussians: weights, centres, and the component of every point."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.tensor([-4.0, 0.0, 4.0])[torch.randint(3, (200,), generator=generator)]
    points = centre + torch.randn(200, generator=generator)
    settings: Any = {}

    def model() -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("components", 3):
            centres = pyro.sample("centres", dist.Normal(0.0, 5.0))
        with pyro.plate("points", 200):
            z = pyro.sample("z", dist.Categorical(weights))
            means = Vindex(centres.unsqueeze(-2))[..., z]
            pyro.sample("x", dist.Normal(means, 1.0), obs=points)

    def guide() -> None:
        positive = dist.constraints.positive
        counts = pyro.param("counts", torch.full((3,), 10.0), constraint=positive)
        pyro.sample("weights", dist.Dirichlet(counts))
        with pyro.plate("components", 3):
            means = pyro.param("means", torch.tensor([-1.0, 0.0, 1.0]))
            widths = pyro.param("widths", torch.full((3,), 0.3), constraint=positive)
            pyro.sample("centres", dist.Normal(means, widths))
        with pyro.plate("points", 200):
            logits = pyro.param("logits", torch.zeros(200, 3))
            pyro.sample("z", dist.Categorical(logits=logits), infer=settings)

    return Problem(model, guide, tuple, (), 200, 0.03, 2.0, settings=settings)


STEPS, SEQUENCES = 8, 50
TRANSITION = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])


def hidden_markov(seed: int, chain: bool) -> Problem:
    """50 sequences of eight steps with three hidden states, whose levels are learned."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(3, (SEQUENCES,), generator=generator)
    observed: list[Tensor] = []
    for _ in range(STEPS):
        observed.append(2.0 * state + torch.randn(SEQUENCES, generator=generator))
        state = torch.multinomial(TRANSITION[state], 1, generator=generator).squeeze(-1)
    settings: Any = {}

    def model() -> None:
        levels = pyro.param("levels", torch.tensor([-1.0, 1.0, 3.0]))
        with pyro.plate("sequences", SEQUENCES):
            p = torch.ones(3) / 3
            for t in range(STEPS):
                z = pyro.sample(f"z_{t}", dist.Categorical(p))
                pyro.sample(f"y_{t}", dist.Normal(levels[z], 1.0), obs=observed[t])
                p = TRANSITION[z]

    def guide() -> None:
        logits = pyro.param("logits", torch.zeros(STEPS, SEQUENCES, 3))
        link = pyro.param("link", torch.zeros(3, 3)) if chain else None
        with pyro.plate("sequences", SEQUENCES):
            after: Tensor | float = 0.0
            for t in range(STEPS):
                q = dist.Categorical(logits=logits[t] + after)
                z = pyro.sample(f"z_{t}", q, infer=settings)
                after = 0.0 if link is None else link[z]

    return Problem(model, guide, tuple, (), SEQUENCES, 0.03, 4.0, settings=settings)


BATCH, HIDDEN, CHOICES, CATEGORIES = 100, 200, 8, 6


def digits(seed: int) -> Problem:
    """A VAE of binarized digits: eight choices of six categories, minibatches of 100."""
    torch.manual_seed(seed)
    width = CHOICES * CATEGORIES
    encoder = nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))
    decoder = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 784))
    mnist = load_mnist()
    images, held = mnist.train.float(), mnist.validation.float()[:500]
    settings: Any = {}
    order = torch.Generator().manual_seed(seed)

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("images", len(x)):
            prior = dist.Categorical(logits=torch.zeros(CHOICES, CATEGORIES)).to_event(1)
            z = pyro.sample("z", prior)
            pixels = decoder(arsm.one_hot(z, CATEGORIES).flatten(-2))
            pyro.sample("x", dist.Bernoulli(logits=pixels).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("images", len(x)):
            logits = encoder(x).unflatten(-1, (CHOICES, CATEGORIES))
            pyro.sample("z", dist.Categorical(logits=logits).to_event(1), infer=settings)

    def minibatch() -> tuple[Tensor]:
        return (images[torch.randint(len(images), (BATCH,), generator=order)],)

    return Problem(model, guide, minibatch, (held,), 500, 1e-3, 8.0, False, settings)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "mixture": mixture,
    "HMM, mean-field guide": lambda seed: hidden_markov(seed, chain=False),
    "HMM, chain guide": lambda seed: hidden_markov(seed, chain=True),
    "digits VAE": digits,
}


# ---------------------------------------------------------------- the losses


@dataclass(frozen=True)
class Loss:
    """A loss, and the settings that it wants of the guide's discrete sites."""

    make: Callable[[], Any]
    infer: dict[str, Any] = field(default_factory=dict)
    enumerates: bool = False


RUNNING_AVERAGE = {"baseline": {"use_decaying_avg_baseline": True}}
"""What Pyro's manual advises against the variance of its score-function gradients."""

LOSSES: dict[str, Loss] = {
    "Trace_ELBO, 1 particle": Loss(Trace_ELBO),
    "Trace_ELBO, 8 particles": Loss(lambda: Trace_ELBO(8, vectorize_particles=True)),
    "TraceGraph_ELBO, 1 particle": Loss(TraceGraph_ELBO),
    "TraceGraph_ELBO, 8 particles": Loss(lambda: TraceGraph_ELBO(8, vectorize_particles=True)),
    "TraceGraph_ELBO, running average, 8 particles": Loss(
        lambda: TraceGraph_ELBO(8, vectorize_particles=True), RUNNING_AVERAGE
    ),
    "TraceEnum_ELBO": Loss(lambda: TraceEnum_ELBO(max_plate_nesting=1), enumerates=True),
    "arsm.pyro.ELBO, RLOO(8)": Loss(lambda: arsm.pyro.ELBO(arsm.RLOO(8))),
    "arsm.pyro.ELBO, RLOO(32)": Loss(lambda: arsm.pyro.ELBO(arsm.RLOO(32))),
    "arsm.pyro.ELBO, RLOO(8, ridge=1.0)": Loss(
        lambda: arsm.pyro.ELBO(arsm.RLOO(8, ridge=1.0)),
    ),
}


ONLY_TIMED = ("TraceGraph_ELBO, 1 particle",)
"""Losses that differ little from another one, which is trained."""
Key = tuple[str, str, int]
"""Problem, loss and seed of a record."""
TIMES = ("", -1)
"""Loss and seed of the record with the times of all losses."""


def fitting(problem: Problem) -> dict[str, Loss]:
    """The losses that can train the program: 6^8 codes of an image cannot be enumerated."""
    return {
        name: loss for name, loss in LOSSES.items() if problem.enumerable or not loss.enumerates
    }


def prepared(problem: Problem, loss: Loss) -> tuple[Any, Program]:
    """The loss, and the guide with its settings."""
    problem.settings.clear()
    problem.settings.update(loss.infer)
    guide = config_enumerate(problem.guide) if loss.enumerates else problem.guide
    return loss.make(), guide


# ---------------------------------------------------------------- the measurements


def time_steps(name: str) -> dict[str, float]:
    """Median CPU ms of `loss_and_grads` for each loss, in turn."""
    pyro.clear_param_store()
    problem = PROBLEMS[name](0)
    made = {each: prepared(problem, loss) for each, loss in fitting(problem).items()}
    times: dict[str, list[float]] = {each: [] for each in made}
    for step in range(WARM_UP + TIMED_STEPS):
        for each, (loss, guide) in made.items():
            problem.settings.clear()
            problem.settings.update(LOSSES[each].infer)
            args = problem.minibatch()
            start = time.process_time()
            loss.loss_and_grads(problem.model, guide, *args)
            if step >= WARM_UP:
                times[each].append(1e3 * (time.process_time() - start))
    return {each: statistics.median(values) for each, values in times.items()}


def train(name: str, loss_name: str, seed: int) -> dict[str, float]:
    """Train for the problem's CPU seconds; -ELBO per row of the trained guide."""
    pyro.clear_param_store()
    problem = PROBLEMS[name](seed)
    torch.manual_seed(100 + seed)
    loss, guide = prepared(problem, fitting(problem)[loss_name])
    optimiser = PyroOptim(torch.optim.Adam, {"lr": problem.rate})
    svi = SVI(problem.model, guide, optimiser, loss)
    steps, start = 0, time.process_time()
    while time.process_time() - start < problem.seconds:
        svi.step(*problem.minibatch())
        steps += 1
    problem.settings.clear()
    torch.manual_seed(0)
    held = Trace_ELBO(20, vectorize_particles=True)
    with torch.no_grad():
        parts = [
            held.loss(problem.model, problem.guide, *problem.held) for _ in range(SAMPLES // 20)
        ]
    return {"elbo": -statistics.mean(parts) / problem.rows, "steps": steps}


def warm_up(name: str) -> None:
    """One step with every loss: the first one of a process loads parts of torch for seconds."""
    problem = PROBLEMS[name](0)
    for loss in fitting(problem).values():
        pyro.clear_param_store()
        made, guide = prepared(problem, loss)
        optimiser = PyroOptim(torch.optim.Adam, {"lr": problem.rate})
        SVI(problem.model, guide, optimiser, made).step(*problem.minibatch())


def run(out: Path, problems: list[str]) -> None:
    """Make the runs that are missing, the losses in turn."""
    warm_up(problems[0])
    records.make_missing(out, keys(problems), key_of, make, shown)


def keys(problems: list[str]) -> Iterator[Key]:
    """The times of all problems, then the trainings."""
    yield from ((name, *TIMES) for name in problems)
    for seed in range(SEEDS):
        for name in problems:
            losses = fitting(PROBLEMS[name](seed))
            yield from ((name, loss, seed) for loss in losses if loss not in ONLY_TIMED)


def key_of(record: records.Record) -> Key:
    """Problem, loss and seed."""
    return record["problem"], record["loss"], record["seed"]


def make(key: Key) -> records.Record:
    """The times of a problem's steps, or one training."""
    name, loss, seed = key
    record: records.Record = {"problem": name, "loss": loss, "seed": seed}
    if key[1:] == TIMES:
        record["ms"] = {each: round(ms, 3) for each, ms in time_steps(name).items()}
        return record | records.place()
    found = train(name, loss, seed)
    found["elbo"] = round(found["elbo"], 4)
    return record | {"seconds": PROBLEMS[name](seed).seconds} | found | records.place()


def shown(record: records.Record) -> str:
    """What was found, as it is printed."""
    about = {"problem", "loss", "seed", *records.place()}
    return str({name: value for name, value in record.items() if name not in about})


def report(runs: list[dict[str, Any]], path: Path) -> None:
    """training.csv: the time of a step, and the ELBO after equal CPU seconds."""
    rows: list[list[Any]] = []
    for record in runs:
        if record["seed"] != -1:
            continue
        base = record["ms"]["Trace_ELBO, 8 particles"]
        place = ["", record["hardware"], short_commit(record["commit"])]
        for loss, ms in record["ms"].items():
            label = f"{record['problem']}: {loss}"
            rows.append([label, "CPU ms", f"{ms:.4g}", "", 1, "", *place])
            ratio = f"{ms / base:.3g}"
            metric = "time / Trace_ELBO's with 8 particles"
            rows.append([label, metric, ratio, "", 1, "", *place])
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in runs:
        if record["seed"] >= 0:
            groups[record["problem"], record["loss"]].append(record)
    for (problem, loss), group in groups.items():
        seconds = group[0]["seconds"]
        spent = f"{seconds * len(group):.1f}"
        place = [spent, group[0]["hardware"], short_commit(group[0]["commit"])]
        for metric, key, digits_shown in (
            (f"ELBO per row after {seconds:g} CPU s", "elbo", 6),
            (f"steps in {seconds:g} CPU s", "steps", 4),
        ):
            values = [record[key] for record in group]
            std = f"{statistics.stdev(values):.4g}" if len(values) > 1 else ""
            mean = f"{statistics.mean(values):.{digits_shown}g}"
            rows.append([f"{problem}: {loss}", metric, mean, std, len(values), "", *place])
    records.write_table(path, rows)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """training.png: every training's ELBO, one panel per program."""
    from matplotlib.figure import Figure

    from arsm_experiments import palette

    names = [name for name in LOSSES if name not in ONLY_TIMED]
    figure = Figure(figsize=(10.5, 2.8), layout="constrained")
    panels = figure.subplots(1, len(PROBLEMS), sharey=True)
    for axis, problem in zip(panels, PROBLEMS, strict=True):
        for place, name in enumerate(names):
            own = [run for run in runs if (run["problem"], run["loss"]) == (problem, name)]
            elbos = [run["elbo"] for run in own]
            colour = "C0" if name.startswith("arsm") else "0.5"
            axis.plot(elbos, [place] * len(elbos), "o", color=colour, markersize=4.5, alpha=0.8)
        seconds = next(run["seconds"] for run in runs if run["problem"] == problem and run["loss"])
        axis.set_title(f"{problem}, {seconds:g} s", fontsize=9)
        axis.set_xlabel("ELBO per row")
        axis.grid(alpha=0.3)
    panels[0].set_yticks(range(len(names)), names, fontsize=9)
    panels[0].invert_yaxis()
    palette.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make the runs that are missing")
    runs.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    runs.add_argument("--out", type=Path, default=RUNS)
    commands.add_parser("report", help="training.csv and training.png from the runs")
    options = vars(parser.parse_args())
    if options.pop("command") == "report":
        found = records.read(RUNS)
        records.write(RUNS, found)
        report(found, RESULTS / "training.csv")
        draw(found, RESULTS / "training.png")
        return
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    run(**options)


if __name__ == "__main__":
    main()
