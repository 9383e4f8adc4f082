"""python -m benchmarks.vector_quantisation: an autoencoder of binarized MNIST with codes out of a
codebook of 512 vectors; when does a stochastic code pay?

The encoder gives a vector per position, q's logits are minus its squared distances from the codes
times a learned factor, and the decoder sees the chosen codes. Two settings, with four codes per
image:

- "fixed rate": 36 bits whatever the image; the test loss is the nats of the pixels given the
  nearest codes.
- "bound": the loss is the negative ELBO with a uniform prior on the codes: they cost KL(q, uniform)
  nats, 4 ln 512 = 25.0 where they are deterministic and less where q leaves them open. Test codes
  are drawn from q.

The ways:

- VQ-VAE: the nearest code; the decoder's gradient is copied to the encoder, and two squared
  distances train codebook and encoder. In the second setting it is the training of the first, with
  25.0 nats for its codes.
- straight-through, hard Gumbel-softmax and leave-one-out of four samples, by `arsm.estimate`.

Protocol, fixed before the first training: batches of 50 of the 55,000 training images; encodings
start with mean 0 and variance 1, and codes as encodings of training images; Adam, whose rate falls
linearly. Every way has the same trials, `RATES`, for `TRIAL_STEPS` steps on seed 100, which is not
reported; the best is trained for `STEPS` steps on seeds 0, 1 and 2. The test loss is that of the
10,000 test images. This is less than one epoch: it ranks the ways early in training and does not
show what they end at. A training is a line of results/vector_quantisation/runs.jsonl.xz as soon as
it is finished, and is not made again:

    python -m benchmarks.vector_quantisation run
    python -m benchmarks.vector_quantisation report      # table.csv

Reference: van den Oord, Vinyals and Kavukcuoglu, Neural discrete representation learning, NeurIPS
2017.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm_experiments.data import load_mnist
from arsm_experiments.runs.provenance import short_commit
from benchmarks import records

RESULTS = Path(__file__).parent.parent / "results" / "vector_quantisation"
CODES, WIDTH, HIDDEN, PIXELS = 512, 16, 128, 784
BATCH, STEPS, TRIAL_STEPS = 50, 800, 400
RATES = (2e-3, 6e-3)
CHOSEN_ON, REPORTED = 100, (0, 1, 2)
"""Seeds of initialisation, batches and codes."""
COMMITMENT = 0.25


class Setting(NamedTuple):
    """What is trained and tested."""

    positions: int
    """Codes per image."""
    bound: bool
    """Whether a code costs its KL divergence from the uniform prior."""


SETTINGS = {
    "fixed rate": Setting(4, False),
    "bound": Setting(4, True),
}
VQ = "VQ-VAE"
ESTIMATORS: dict[str, arsm.Estimator] = {
    "straight-through": arsm.StraightThrough(),
    "hard Gumbel-softmax": arsm.GumbelSoftmax(hard=True),
    "leave-one-out": arsm.RLOO(4),
}
Key = tuple[str, str, float, int]
"""Setting, way, rate, seed."""


class Autoencoder(nn.Module):
    """Images [N, 784] to positions [N, K, WIDTH], and codes of these to images."""

    def __init__(self, positions: int, images: Tensor) -> None:
        super().__init__()
        self.positions = positions
        code = positions * WIDTH
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, code))
        self.decoder = nn.Sequential(nn.Linear(code, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))
        with torch.no_grad():
            # without this all images have nearly the same encoding at first, and the same code
            last, plain = self.encoder[-1], self.encoder(images)
            assert isinstance(last, nn.Linear)
            last.weight.div_(plain.std(0).unsqueeze(-1))
            last.bias.sub_(plain.mean(0)).div_(plain.std(0))
            found = self.encode(images).flatten(0, 1)
            self.codebook = nn.Parameter(found[torch.randperm(len(found))[:CODES]].clone())
            # logits with a standard deviation of 2 at the start
            self.sharpness = nn.Parameter((2 / self.distances(found.unsqueeze(1)).std()).log())

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).unflatten(-1, (self.positions, WIDTH))

    def distances(self, h: Tensor) -> Tensor:
        """Squared, from every code: [N, K, WIDTH] -> [N, K, CODES]."""
        squares = h.square().sum(-1, keepdim=True) + self.codebook.square().sum(-1)
        return squares - 2 * h @ self.codebook.T

    def logits(self, x: Tensor) -> Tensor:
        return -self.sharpness.exp() * self.distances(self.encode(x))

    def nats(self, codes: Tensor, x: Tensor) -> Tensor:
        """-ln p(x | codes [N, K, WIDTH]): [N]."""
        scores = self.decoder(codes.flatten(-2))
        return F.binary_cross_entropy_with_logits(scores, x, reduction="none").sum(-1)

    def nats_of(self, z: Tensor, x: Tensor) -> Tensor:
        """The same of codes by number [N, K], or of one-hot codes with a gradient."""
        return self.nats(z @ self.codebook if z.is_floating_point() else self.codebook[z], x)


def copied(model: Autoencoder, x: Tensor) -> Tensor:
    """VQ-VAE's loss."""
    h = model.encode(x)
    codes = model.codebook[model.distances(h).argmin(-1)]
    nats = model.nats(h + (codes - h).detach(), x)
    moved = (codes - h.detach()).square().sum((-2, -1))
    committed = (codes.detach() - h).square().sum((-2, -1))
    return (nats + moved + COMMITMENT * committed).mean()


def divergence(logits: Tensor) -> Tensor:
    """KL(q, uniform), summed over positions: [N]."""
    log_q = logits.log_softmax(-1)
    return (math.log(CODES) + (log_q.exp() * log_q).sum(-1)).sum(-1)


def estimated(way: str, model: Autoencoder, x: Tensor, bound: bool) -> Tensor:
    logits = model.logits(x)
    loss = arsm.estimate(ESTIMATORS[way], logits, model.nats_of, x).value
    return (loss + divergence(logits)).mean() if bound else loss.mean()


class Score(NamedTuple):
    """The test images."""

    nats: float
    """-ln p(x | codes)."""
    rate: float
    """KL(q, uniform)."""
    codes: int
    """Codes in use anywhere."""


@torch.no_grad()
def score(way: str, model: Autoencoder, x: Tensor, bound: bool) -> Score:
    logits = model.logits(x)
    drawn = bound and way != VQ
    z = torch.distributions.Categorical(logits=logits).sample() if drawn else logits.argmax(-1)
    rate = divergence(logits).mean() if drawn else model.positions * math.log(CODES)
    nats = float(model.nats_of(z, x).mean())
    return Score(round(nats, 3), round(float(rate), 3), len(z.unique()))


def test_loss(record: records.Record) -> float:
    return record["nats"] + (record["rate"] if SETTINGS[record["setting"]].bound else 0.0)


def training(key: Key) -> records.Record:
    """The record of a training."""
    setting, way, rate, seed = key
    positions, bound = SETTINGS[setting]
    steps = TRIAL_STEPS if seed == CHOSEN_ON else STEPS
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    where = records.source()
    data = load_mnist()
    model = Autoencoder(positions, data.train[torch.randperm(len(data.train))[:CODES]].float())
    optimiser = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05, steps)
    spent = 0.0
    for _ in range(steps):
        x = data.train[torch.randint(len(data.train), (BATCH,))].float()
        start = time.process_time()
        loss = copied(model, x) if way == VQ else estimated(way, model, x, bound)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        spent += time.process_time() - start
    return {
        "setting": setting,
        "way": way,
        "rate_of_adam": rate,
        "seed": seed,
        "steps": steps,
        **score(way, model, data.test.float(), bound)._asdict(),
        "seconds": round(spent, 2),
        "hardware": where["hardware"],
        "commit": where["commit"],
    }


def key_of(record: records.Record) -> Key:
    return record["setting"], record["way"], record["rate_of_adam"], record["seed"]


def pairs() -> list[tuple[str, str]]:
    """All settings and ways that are trained."""
    every = [(setting, way) for setting in SETTINGS for way in (VQ, *ESTIMATORS)]
    return [pair for pair in every if pair != ("bound", VQ)]


def shown(record: records.Record) -> str:
    """A training's result, as it is printed."""
    return f"{test_loss(record):.2f}, {record['seconds']} s"


def chosen(done: list[records.Record], setting: str, way: str) -> float:
    """The rate of a way's best trial."""
    tried = [r for r in done if key_of(r)[:2] == (setting, way) and r["seed"] == CHOSEN_ON]
    return min(tried, key=test_loss)["rate_of_adam"]


def run(out: Path) -> None:
    """The trials, then the reported seeds with each way's choice."""
    path = out / "runs.jsonl.xz"

    def make(keys: Iterator[Key]) -> None:
        records.make_missing(path, keys, key_of, training, shown)

    make((*pair, rate, CHOSEN_ON) for pair in pairs() for rate in RATES)
    rates = {pair: chosen(records.read(path), *pair) for pair in pairs()}
    make((*pair, rates[pair], seed) for seed in REPORTED for pair in pairs())


def report(folder: Path) -> None:
    """Write table.csv: each way's best trial, and its reported seeds where they are made."""
    path = folder / "runs.jsonl.xz"
    trainings = records.read(path)
    records.write(path, trainings)
    rows = []
    for setting in SETTINGS:
        for way in (VQ, *ESTIMATORS):
            # VQ-VAE has one training for both settings
            trained = "fixed rate" if way == VQ else setting
            of_way = [r for r in trainings if key_of(r)[:2] == (trained, way)]
            trial = min((r for r in of_way if r["seed"] == CHOSEN_ON), key=test_loss)
            rows += _rows(f"trial, {setting}: {way}", SETTINGS[setting].bound, [trial])
            reported = [r for r in of_way if r["seed"] in REPORTED]
            if reported:
                rows += _rows(f"{setting}: {way}", SETTINGS[setting].bound, reported)
    records.write_table(folder / "table.csv", rows)


def _rows(name: str, bound: bool, group: list[records.Record]) -> list[list[object]]:
    metrics = {
        "test loss": [r["nats"] + (r["rate"] if bound else 0.0) for r in group],
        "nats of the pixels": [r["nats"] for r in group],
        "codes in use": [r["codes"] for r in group],
        "CPU ms per step": [1000 * r["seconds"] / r["steps"] for r in group],
    }
    spent = f"{sum(r['seconds'] for r in group):.1f}"
    place = (group[0]["hardware"], short_commit(group[0]["commit"]))
    rows: list[list[object]] = []
    for metric, found in metrics.items():
        spread = f"{statistics.stdev(found):.2f}" if len(found) > 1 else ""
        mean = f"{statistics.mean(found):.2f}"
        rows.append([name, metric, mean, spread, len(found), "", spent, *place])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make the trainings that are missing")
    runs.add_argument("--out", type=Path, default=RESULTS)
    commands.add_parser("report", help="table.csv from the trainings")
    options = vars(parser.parse_args())
    if options.pop("command") == "run":
        run(**options)
    else:
        report(RESULTS)


if __name__ == "__main__":
    main()
