"""python -m benchmarks.router: a mixture of experts whose router is trained by `arsm.choices`, beside other ways.

Eight clusters of inputs, each with labels of its own: an expert is a small network that can learn one cluster and not
all of them, so accuracy measures routing. The ways differ in what the router learns from:

- `arsm.choices` with RLOO, and the same estimator written by hand for this one model,
- Switch: the largest gate's expert, its output times the gate's probability, with a balancing loss,
- Gumbel straight-through, which runs all experts,
- no training of the router at all, and a single expert.

Writes results/router/table.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm_experiments.runs.provenance import provenance
from benchmarks.measure import interleaved, table

EXPERTS, INPUTS, HIDDEN, CLASSES, BATCH = 8, 16, 16, 4, 256
RESULTS = Path(__file__).parent.parent / "results" / "router"


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
        """The chosen expert alone, z int64 [N, 1]; or all of them, weighted, z floating [N, 1, E]."""
        if not z.is_floating_point():
            first, last = self.first[z[:, 0]], self.last[z[:, 0]]
            return torch.bmm(torch.bmm(x.unsqueeze(1), first).relu(), last).squeeze(1)
        hidden = torch.einsum("ni,eih->neh", x, self.first).relu()
        return torch.einsum("neh,ehc,ne->nc", hidden, self.last, z.squeeze(1))


class Mixtures:
    """Inputs around eight centres; the label is the largest of four linear functions that belong to the centre."""

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


def ours(estimator: arsm.Estimator, model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    with arsm.choices(model, estimator) as run:
        return run(partial(loss_of, model), x, y).mean()


def drop_in(model: Mixture, x: Tensor, y: Tensor, n: int = 4) -> Tensor:
    """RLOO(4) by hand, for this model alone."""
    x, y = x.repeat(n, 1), y.repeat(n)
    q = torch.distributions.Categorical(logits=model.gate(x))
    z = q.sample()
    loss = F.cross_entropy(model.experts(x, z.unsqueeze(1)), y, reduction="none")
    by_sample = loss.detach().view(n, -1)
    advantage = (by_sample - by_sample.mean(0)) * n / (n - 1)
    return (loss + advantage.flatten() * q.log_prob(z)).mean()


def switch(model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    """Fedus, Zoph and Shazeer, Switch transformers, JMLR 2022: scale by the gate, balance with coefficient 0.01."""
    p = model.gate(x).softmax(-1)
    largest, z = p.max(-1)
    share = F.one_hot(z, EXPERTS).float().mean(0)
    loss = F.cross_entropy(largest.unsqueeze(-1) * model.experts(x, z.unsqueeze(1)), y)
    return loss + 0.01 * EXPERTS * (share * p.mean(0)).sum()


def switch_predict(model: Mixture, x: Tensor) -> Tensor:
    largest, z = model.gate(x).softmax(-1).max(-1)
    return largest.unsqueeze(-1) * model.experts(x, z.unsqueeze(1))


def gumbel(model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    z = F.gumbel_softmax(model.gate(x), tau=1.0, hard=True).unsqueeze(1)
    return F.cross_entropy(model.experts(x, z), y)


def untrained(model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = model.gate(x).argmax(-1, keepdim=True)
    return F.cross_entropy(model.experts(x, z), y)


WAYS: dict[str, Callable[[Mixture, Tensor, Tensor], Tensor]] = {
    "arsm.choices, RLOO(4)": partial(ours, arsm.RLOO(4)),
    "arsm.choices, RLOO(2)": partial(ours, arsm.RLOO(2)),
    "arsm.choices, ARSM": partial(ours, arsm.ARSM()),
    "RLOO(4) by hand": drop_in,
    "Switch": switch,
    "Gumbel straight-through": gumbel,
    "untrained router": untrained,
    "one expert": untrained,
}


def accuracy(way: str, seed: int, steps: int) -> float:
    """On 10,000 fresh inputs, with the most probable expert."""
    torch.manual_seed(seed)
    data = Mixtures(seed)
    model = Mixture(1 if way == "one expert" else EXPERTS)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        loss = WAYS[way](model, *data.draw(BATCH))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x, y = data.draw(10_000)
    with torch.no_grad():
        predicted = switch_predict(model, x) if way == "Switch" else model.eval()(x)
    return float((predicted.argmax(-1) == y).float().mean())


def step_times(repetitions: int) -> dict[str, list[float]]:
    """Seconds per step, forward and backward: median, least, most."""
    torch.manual_seed(0)
    batch, model = Mixtures(0).draw(BATCH), Mixture()

    def step(way: Callable[[Mixture, Tensor, Tensor], Tensor]) -> None:
        model.zero_grad()
        way(model, *batch).backward()

    calls: dict[str, Callable[[], object]] = {
        name: partial(step, way) for name, way in WAYS.items() if name != "one expert"
    }
    return {name: [t.median, t.low, t.high] for name, t in interleaved(calls, repetitions).items()}


def main(steps: int = 1000, seeds: int = 3, repetitions: int = 200) -> None:
    torch.set_num_threads(1)
    times = step_times(repetitions)
    base = times["RLOO(4) by hand"][0]
    rows, lines = [], []
    where = provenance("cpu")
    place = [where["hardware"], where["commit"]]
    for way in WAYS:
        start = time.monotonic()
        found = [accuracy(way, seed, steps) for seed in range(seeds)]
        spent = f"{time.monotonic() - start:.1f}"
        mean, std = statistics.mean(found), statistics.stdev(found) if seeds > 1 else 0.0
        rows.append([f"Router: {way}", "test accuracy", f"{mean:.4f}", f"{std:.4f}", seeds, "", spent, *place])
        cells = ["", ""]
        if way in times:
            milliseconds = 1000 * times[way][0]
            rows.append([f"Router: {way}", "ms per step", f"{milliseconds:.3f}", "", 1, "", "", *place])
            cells = [f"{milliseconds:.2f} ms", f"{times[way][0] / base:.2f}"]
        lines.append([way, f"{mean:.3f} +- {std:.3f}", *cells])
        print(f"{way}: {mean:.3f} in {spent} s", flush=True)
    print(table("A router over 8 experts", ["way", "test accuracy", "step", "times by hand"], lines))
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "metric", "mean", "std", "seeds", "paper", "seconds", "hardware", "commit"])
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=200)
    main(**vars(parser.parse_args()))
