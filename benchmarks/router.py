"""python -m benchmarks.router: a mixture of experts whose router is trained by `arsm.choices`,
beside other ways.

Eight clusters of inputs, each with labels of its own: an expert is a small network that can learn
one cluster and not all of them, so accuracy measures routing. The ways differ in what the router
learns from:

- `arsm.choices` with several estimators, and RLOO(4) written by hand for this one model,
- Switch: the largest gate's expert, its output times the gate's probability,
- Gumbel straight-through, which runs all experts,
- no training of the router at all, and a single expert.

Every way may add Switch's balancing loss. Its coefficient and the learning rate are chosen for each
way from the same grid, on seeds that are not reported. A training is one line of
results/router/runs.jsonl.xz, which is not made again:

    python -m benchmarks.router run --workers 16      # trainings, then the time per step
    python -m benchmarks.router report                # table.csv, from these and times.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm_experiments.runs.provenance import provenance
from benchmarks import records
from benchmarks.measure import interleaved, table

EXPERTS, INPUTS, HIDDEN, CLASSES, BATCH = 8, 16, 16, 4, 256
RESULTS = Path(__file__).parent.parent / "results" / "router"
RATES, BALANCES, STEPS = (1e-3, 3e-3, 1e-2), (0.0, 0.01, 0.1), 1000
CHOSEN_ON, REPORTED = (100, 101, 102), (0, 1, 2, 3, 4)
"""Seeds of data, initialisation and training."""


class Mixture(nn.Module):
    """A router and its experts: [N, 16] -> [N, 4]."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, experts))
        self.choice = arsm.Choice()
        self.first = nn.Parameter(torch.randn(experts, INPUTS, HIDDEN) / INPUTS**0.5)
        self.last = nn.Parameter(torch.randn(experts, HIDDEN, CLASSES) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.choice(self.gate(x).unsqueeze(1)))

    def experts(self, x: Tensor, z: Tensor) -> Tensor:
        """The chosen expert alone, z int64 [N, 1]; or all of them, weighted, z floating [N, 1,
        E].
        """
        if not z.is_floating_point():
            first, last = self.first[z[:, 0]], self.last[z[:, 0]]
            return torch.bmm(torch.bmm(x.unsqueeze(1), first).relu(), last).squeeze(1)
        hidden = torch.einsum("ni,eih->neh", x, self.first).relu()
        return torch.einsum("neh,ehc,ne->nc", hidden, self.last, z.squeeze(1))


class Mixtures:
    """Inputs around eight centres; the label is the largest of four linear functions that belong to
    the centre.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = 1.5 * self.normal(EXPERTS, INPUTS)
        self.labels = self.normal(EXPERTS, INPUTS, CLASSES)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        cluster = torch.randint(EXPERTS, (n,), generator=self.generator)
        noise = self.normal(n, INPUTS)
        label = torch.einsum("ni,nic->nc", noise, self.labels[cluster]).argmax(-1)
        return self.centres[cluster] + noise, label


def loss_of(model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def balance(logits: Tensor) -> Tensor:
    """E sum_e share_e mean p_e: 1 where all experts get as much, E where one gets all.

    Reference: Fedus, Zoph and Shazeer, Switch transformers, JMLR 2022.
    """
    p = logits.softmax(-1)
    share = F.one_hot(p.argmax(-1), EXPERTS).float().mean(0)
    return EXPERTS * (share * p.mean(0)).sum()


Losses = tuple[Tensor, Tensor | None]
"""Mean loss, and the router's logits [N, E] if it is trained."""


def ours(estimator: arsm.Estimator, model: Mixture, x: Tensor, y: Tensor) -> Losses:
    with arsm.choices(model, estimator) as run:
        loss = run(partial(loss_of, model), x, y).mean()
        assert model.choice.logits is not None
        return loss, model.choice.logits.squeeze(1)


def drop_in(model: Mixture, x: Tensor, y: Tensor, n: int = 4) -> Losses:
    """RLOO(4) by hand, for this model alone."""
    x, y = x.repeat(n, 1), y.repeat(n)
    q = torch.distributions.Categorical(logits=model.gate(x))
    z = q.sample()
    loss = F.cross_entropy(model.experts(x, z.unsqueeze(1)), y, reduction="none")
    by_sample = loss.detach().view(n, -1)
    advantage = (by_sample - by_sample.mean(0)) * n / (n - 1)
    return (loss + advantage.flatten() * q.log_prob(z)).mean(), q.logits


def switch(model: Mixture, x: Tensor, y: Tensor) -> Losses:
    logits = model.gate(x)
    largest, z = logits.softmax(-1).max(-1)
    return F.cross_entropy(largest.unsqueeze(-1) * model.experts(x, z.unsqueeze(1)), y), logits


def switch_predict(model: Mixture, x: Tensor) -> Tensor:
    largest, z = model.gate(x).softmax(-1).max(-1)
    return largest.unsqueeze(-1) * model.experts(x, z.unsqueeze(1))


def gumbel(model: Mixture, x: Tensor, y: Tensor) -> Losses:
    logits = model.gate(x)
    return F.cross_entropy(
        model.experts(x, F.gumbel_softmax(logits, tau=1.0, hard=True).unsqueeze(1)), y
    ), logits


def untrained(model: Mixture, x: Tensor, y: Tensor) -> Losses:
    with torch.no_grad():
        z = model.gate(x).argmax(-1, keepdim=True)
    return F.cross_entropy(model.experts(x, z), y), None


WAYS: dict[str, Callable[[Mixture, Tensor, Tensor], Losses]] = {
    "arsm.choices, RLOO(4)": partial(ours, arsm.RLOO(4)),
    "arsm.choices, RLOO(2)": partial(ours, arsm.RLOO(2)),
    "arsm.choices, ARSM": partial(ours, arsm.ARSM()),
    "arsm.choices, LocalExpectation": partial(ours, arsm.LocalExpectation()),
    "RLOO(4) by hand": drop_in,
    "Switch": switch,
    "Gumbel straight-through": gumbel,
    "untrained router": untrained,
    "one expert": untrained,
}


def total(way: str, coefficient: float, model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = WAYS[way](model, x, y)
    return loss if logits is None or coefficient == 0 else loss + coefficient * balance(logits)


def training(way: str, rate: float, coefficient: float, seed: int, steps: int) -> dict[str, Any]:
    """The record of a training: accuracy of the most probable expert on 10,000 fresh inputs."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    where, start = provenance("cpu"), time.monotonic()
    data, model = Mixtures(seed), Mixture(1 if way == "one expert" else EXPERTS)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        loss = total(way, coefficient, model, *data.draw(BATCH))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x, y = data.draw(10_000)
    with torch.no_grad():
        predicted = switch_predict(model, x) if way == "Switch" else model.eval()(x)
        chosen = torch.bincount(model.gate(x).argmax(-1), minlength=EXPERTS)
    return {
        "way": way,
        "rate": rate,
        "balance": coefficient,
        "seed": seed,
        "steps": steps,
        "accuracy": round(float((predicted.argmax(-1) == y).float().mean()), 4),
        "experts": int((chosen >= 100).sum()),
        "seconds": round(time.monotonic() - start, 1),
        "hardware": where["hardware"],
        "commit": where["commit"],
    }


def step_times(repetitions: int) -> dict[str, float]:
    """Median milliseconds per step, forward and backward, with the balancing loss; in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, model = Mixtures(0).draw(BATCH), Mixture()

    def step(way: str) -> None:
        model.zero_grad()
        total(way, 0.01, model, *batch).backward()

    calls: dict[str, Callable[[], object]] = {
        name: partial(step, name) for name in WAYS if name != "one expert"
    }
    return {
        name: 1000 * t.median
        for name, t in interleaved(calls, repetitions, time.process_time).items()
    }


def chosen(trainings: list[records.Record]) -> dict[str, tuple[float, float]]:
    """The (rate, balance) of each way with the best mean accuracy on the seeds that are not
    reported.
    """
    found: dict[str, dict[tuple[float, float], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for r in trainings:
        if r["seed"] in CHOSEN_ON:
            found[r["way"]][r["rate"], r["balance"]].append(r["accuracy"])
    return {
        way: max(grid, key=lambda key: statistics.mean(grid[key])) for way, grid in found.items()
    }


def run(
    ways: list[str], balances: list[float], workers: int, steps: int, repetitions: int, out: Path
) -> None:
    """The grid, then the reported seeds with each way's choice, then the time per step."""
    path = out / "runs.jsonl.xz"

    def make(keys: Iterable[tuple[str, float, float, int]]) -> None:
        records.make_in_processes(
            path,
            keys,
            lambda r: (r["way"], r["rate"], r["balance"], r["seed"]),
            partial(training, steps=steps),
            lambda r: f"{r['accuracy']:.3f}",
            workers,
        )

    fixed = {"untrained router", "one expert"}
    make(
        (way, rate, coefficient, seed)
        for seed in CHOSEN_ON
        for way in ways
        for rate in RATES
        for coefficient in ((0.0,) if way in fixed else balances)
    )
    make(
        (way, *key, seed)
        for way, key in chosen(records.read(path)).items()
        if way in ways
        for seed in REPORTED
    )
    if (out / "times.json").exists():
        return
    where = provenance("cpu")
    times = {
        "hardware": where["hardware"],
        "commit": where["commit"],
        "ms": step_times(repetitions),
    }
    records.write_one(out / "times.json", times)


def report(folder: Path) -> None:
    """table.csv, and the same on the terminal."""
    path = folder / "runs.jsonl.xz"
    trainings = records.read(path)
    times = records.read_one(folder / "times.json")
    records.write(path, trainings)
    lines: list[list[str]] = []
    rows: list[list[object]] = []
    for way, (rate, coefficient) in chosen(trainings).items():
        group = [
            r
            for r in trainings
            if r["way"] == way
            and r["seed"] in REPORTED
            and (r["rate"], r["balance"]) == (rate, coefficient)
        ]
        rows += _rows(way, group, times)
        lines.append([way, f"{rate:g}, {coefficient:g}", *_cells(way, group, times["ms"])])
    print(
        table(
            "Router",
            ["way", "rate, balance", "accuracy", "experts used", "step", "times by hand"],
            lines,
        )
    )
    records.write_table(folder / "table.csv", rows)


def _rows(way: str, group: list[records.Record], times: dict[str, Any]) -> list[list[object]]:
    """A way's accuracy and time per step, for table.csv."""
    name = f"Router: {way}"
    found = [r["accuracy"] for r in group]
    accuracy: list[object] = [
        name,
        "test accuracy",
        f"{statistics.mean(found):.4f}",
        f"{statistics.stdev(found):.4f}",
        len(found),
        "",
        f"{sum(r['seconds'] for r in group):.1f}",
        group[0]["hardware"],
        group[0]["commit"],
    ]
    if way not in times["ms"]:
        return [accuracy]
    ms = f"{times['ms'][way]:.3f}"
    place = (times["hardware"], times["commit"])
    return [accuracy, [name, "CPU ms per step", ms, "", 1, "", "", *place]]


def _cells(way: str, group: list[records.Record], ms: dict[str, float]) -> list[str]:
    """A way's accuracy, experts and time per step, for the terminal."""
    found = [r["accuracy"] for r in group]
    accuracy = f"{statistics.mean(found):.3f} +- {statistics.stdev(found):.3f}"
    experts = f"{statistics.mean(r['experts'] for r in group):.1f}"
    if way not in ms:
        return [accuracy, experts, "", ""]
    return [accuracy, experts, f"{ms[way]:.2f} ms", f"{ms[way] / ms['RLOO(4) by hand']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser(
        "run", help="make the trainings that are missing, and time the steps"
    )
    runs.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    runs.add_argument("--balances", nargs="+", type=float, default=list(BALANCES))
    runs.add_argument("--workers", type=int, default=1)
    runs.add_argument("--steps", type=int, default=STEPS)
    runs.add_argument("--repetitions", type=int, default=200)
    runs.add_argument("--out", type=Path, default=RESULTS)
    commands.add_parser("report", help="table.csv from the trainings and times.json")
    options = vars(parser.parse_args())
    if options.pop("command") == "run":
        run(**options)
    else:
        report(RESULTS)


if __name__ == "__main__":
    main()
