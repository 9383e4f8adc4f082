"""python -m benchmarks.router_transformer: routers inside a small transformer, with credit for the
losses that a choice can reach, beside other ways.

A character model of English technical prose (the help topics that ship with Python, `pydoc_data`):
two causal blocks of attention and eight experts, of which a router chooses for every token. Three
settings:

- top-1: one expert per token; the loss is nats per character.
- top-2: two experts per token, whose outputs are averaged.
- price: one expert per token, and a sequence pays `PRICE` nats for every expert of a block that it
  uses at all, as where weights must be fetched first. Whether a token pays depends on the tokens
  before it; what it saves, on those after it.

The ways differ in what the router learns from:

- leave-one-out, two samples of every sequence, each choice credited with the losses at its own and
  later positions (`arsm.Choice(reach="later")`), with the sequence's mean loss ("row"), or with its
  own position's loss alone ("own", which is biased here, as attention mixes positions),
- Switch: the largest gate's expert, its output times the gate's probability; for top-2 the two
  largest, weighed by the softmax of their two logits,
- Gumbel straight-through, which runs all experts; for top-2, relaxed top-2 sampling,
- no training of the router at all.

Where there is a price, Switch adds the expected number of experts that sampled routes would use, in
closed form, and Gumbel the same polynomial of its straight-through choices. "Switch" and "untrained
router" that know nothing of the price are the trainings of the first setting.

Protocol, fixed before the first reported training: every way has the same trials, `RATES` x
`BALANCES` (learning rate and coefficient of Switch's balancing loss) for `TRIAL_STEPS` steps on
seed 100, which is not reported, in the first setting. The trial with the lowest test loss decides
for all three settings, which are trained for `STEPS` steps on seeds 0, 1 and 2. Adam's rate falls
linearly. Test loss (with the price, where there is one) is that of the most probable experts on
held-out text. Times are CPU seconds of training steps in one thread. A training is a line of
results/router/transformer.jsonl.xz as soon as it is finished, and is not made again:

    python -m benchmarks.router_transformer run       # trainings, then the time per step
    python -m benchmarks.router_transformer report    # transformer.csv and transformer.png

References: Fedus, Zoph and Shazeer, Switch transformers, JMLR 2022; Jang, Gu and Poole, Categorical
reparameterization with Gumbel-softmax, ICLR 2017; Xie and Ermon, Reparameterizable subset sampling
via continuous relaxations, IJCAI 2019 (relaxed top-k).
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from benchmarks import records
from benchmarks.measure import interleaved

RESULTS = Path(__file__).parent.parent / "results" / "router"
EXPERTS, WIDTH, HIDDEN, HEADS, BLOCKS = 8, 32, 32, 2, 2
LENGTH, BATCH, STEPS, TRIAL_STEPS, CURVE = 32, 16, 500, 250, 5
SYMBOLS = 96
"""Printable ASCII and the line feed."""
RATES, BALANCES = (1e-2, 2e-2), (0.01, 0.1)
PRICE = 0.2
CHOSEN_ON, REPORTED = 100, (0, 1, 2)
"""Seeds of initialisation, batches and choices."""
BLOCK_OF_TEXT, HELD_OUT = 4000, 10
"""Every tenth block of so many characters is held out."""


# ---------------------------------------------------------------- text


class Text:
    """The help topics in alphabetical order: sequences [N, LENGTH + 1] of symbols."""

    def __init__(self, seed: int) -> None:
        written = "\n".join(topics[name] for name in sorted(topics))
        codes = [ord(c) - 31 if " " <= c <= "~" else 0 for c in written]
        blocks = torch.tensor(codes).split(BLOCK_OF_TEXT)[:-1]
        self.train = torch.cat([b for i, b in enumerate(blocks) if i % HELD_OUT])
        self.held_out = torch.stack([b for i, b in enumerate(blocks) if not i % HELD_OUT])
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        start = torch.randint(len(self.train) - LENGTH, (BATCH, 1), generator=self.generator)
        return self.train[start + torch.arange(LENGTH + 1)]

    def test(self) -> Tensor:
        """All held-out text, in sequences that do not cross a block's end."""
        return self.held_out.unfold(1, LENGTH + 1, LENGTH).flatten(0, 1)


# ---------------------------------------------------------------- model


class Route(NamedTuple):
    """Where tokens go: k experts of each, and the weights of their outputs."""

    experts: Tensor
    """[N, T, k] int64."""
    weights: Tensor
    """[N, T, k]; or [N, T, E], which runs all experts."""


Router = Callable[[int, Tensor], Route]
"""Makes the route of a block from its logits [N, T, E]."""


class Experts(nn.Module):
    """Eight networks with one hidden layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.last = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        k = route.experts.shape[-1]
        if route.weights.shape[-1] != k:
            hidden = torch.einsum("nti,eih->enth", x, self.first).relu()
            return torch.einsum("enth,ehi,nte->nti", hidden, self.last, route.weights)
        # tokens sorted by expert, so that every expert runs once, on its own tokens
        chosen = route.experts.flatten()
        order = chosen.argsort()
        sizes = torch.bincount(chosen, minlength=EXPERTS).tolist()
        tokens = x.flatten(0, 1).index_select(0, order // k).split(sizes)
        outputs = [(part @ self.first[e]).relu() @ self.last[e] for e, part in enumerate(tokens)]
        weighted = torch.cat(outputs) * route.weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).flatten(0, 1).index_add(0, order // k, weighted).view_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inputs(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """A character model whose tokens are routed in every block."""

    def __init__(self, k: int, reach: Any) -> None:
        super().__init__()
        self.k = k
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.attention = nn.ModuleList(Attention() for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * BLOCKS + 1))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(BLOCKS))
        self.choices = nn.ModuleList(
            arsm.Choice(None if k == 1 else k, reach=reach) for _ in range(BLOCKS)
        )
        self.experts = nn.ModuleList(Experts() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor, router: Router) -> tuple[Tensor, list[Route]]:
        """[N, T] -> logits of the next symbols [N, T, V], and each block's route."""
        x = self.symbol(symbols) + self.position
        routes = []
        for block in range(BLOCKS):
            x = x + self.attention[block](self.norms[2 * block](x))
            h = self.norms[2 * block + 1](x)
            routes.append(router(block, self.gates[block](h)))
            x = x + self.experts[block](h, routes[-1])
        return self.head(self.norms[-1](x)), routes

    def chosen(self, block: int, logits: Tensor) -> Route:
        """The route of the block's `arsm.Choice`: outputs are averaged."""
        z = self.choices[block](logits)
        z = z.unsqueeze(-1) if self.k == 1 else z
        return Route(z, logits.new_full(z.shape, 1 / self.k))


def nats(scores: Tensor, text: Tensor) -> Tensor:
    """Cross-entropy of every position: [N, T]."""
    return F.cross_entropy(scores.transpose(1, 2), text[:, 1:], reduction="none")


def first_uses(routes: list[Route]) -> Tensor:
    """At how many blocks a position is the first of its sequence to use its expert: [N, T]."""
    found = 0.0
    for route in routes:
        used = F.one_hot(route.experts, EXPERTS).sum(2).clamp_max(1)
        before = used.cumsum(1) - used
        found = found + (used * (before == 0)).sum(-1)
    assert isinstance(found, Tensor)
    return found.float()


def used_experts(weights: Tensor) -> Tensor:
    """sum_e 1 - prod_t (1 - w_te): the experts in use for hard weights [N, T, E], and the expected
    number for independent samples of probabilities.
    """
    return (1 - (1 - weights).prod(1)).sum(-1)


def balance(logits: Tensor) -> Tensor:
    """E sum_e share_e mean p_e of a block, Switch's: 1 where all experts get as much."""
    p = logits.softmax(-1).flatten(0, 1)
    share = F.one_hot(p.argmax(-1), EXPERTS).float().mean(0)
    return EXPERTS * (share * p.mean(0)).sum()


# ---------------------------------------------------------------- ways


Losses = tuple[Tensor, list[Tensor]]
"""Mean loss, and every block's logits if its router is trained."""


def leave_one_out(model: Transformer, text: Tensor, price: float) -> Losses:
    local = model.choices[0].reach != "row"

    def losses(text: Tensor) -> Tensor:
        scores, routes = model(text[:, :-1], model.chosen)
        found = nats(scores, text)
        if price:
            found = found + price * first_uses(routes)
        return found if local else found.mean(-1)

    with arsm.choices(model, arsm.RLOO(2)) as run:
        loss = run(losses, text).mean()
        return loss, [choice.logits for choice in model.choices]  # pyright: ignore


def switch_route(k: int, logits: Tensor) -> Route:
    largest, experts = logits.topk(k, -1)
    return Route(experts, logits.softmax(-1).gather(-1, experts) if k == 1 else largest.softmax(-1))


def switch(model: Transformer, text: Tensor, price: float) -> Losses:
    seen: list[Tensor] = []

    def router(block: int, logits: Tensor) -> Route:
        seen.append(logits)
        return switch_route(model.k, logits)

    loss = nats(model(text[:, :-1], router)[0], text).mean()
    if price:
        expected = sum(used_experts(logits.softmax(-1)).mean() for logits in seen)
        loss = loss + price * expected / LENGTH
    return loss, seen


def gumbel(model: Transformer, text: Tensor, price: float) -> Losses:
    seen: list[Tensor] = []
    relaxed: list[Tensor] = []

    def router(block: int, logits: Tensor) -> Route:
        seen.append(logits)
        perturbed = logits - torch.empty_like(logits).exponential_().log()
        soft = perturbed.softmax(-1)
        if model.k == 2:
            soft = soft + (perturbed + torch.log1p(-soft.clamp_max(1 - 1e-6))).softmax(-1)
        experts = perturbed.topk(model.k, -1).indices
        hard = torch.zeros_like(soft).scatter(-1, experts, 1.0)
        relaxed.append(hard + soft - soft.detach())
        return Route(experts, relaxed[-1] / model.k)

    loss = nats(model(text[:, :-1], router)[0], text).mean()
    if price:
        used = sum(used_experts(weights).mean() for weights in relaxed)
        loss = loss + price * used / LENGTH
    return loss, seen


def untrained(model: Transformer, text: Tensor, price: float) -> Losses:
    """The gates keep their random weights."""
    loss = nats(model(text[:, :-1], functools.partial(likeliest, model))[0], text).mean()
    return loss, []


def likeliest(model: Transformer, block: int, logits: Tensor) -> Route:
    """The most probable experts, whose outputs are averaged."""
    experts = logits.topk(model.k, -1).indices
    return Route(experts, torch.full(experts.shape, 1 / model.k))


@dataclass(frozen=True)
class Way:
    """A way to train a router."""

    losses: Callable[[Transformer, Tensor, float], Losses]
    reach: str = "row"

    @property
    def route(self) -> Callable[[Transformer, int, Tensor], Route]:
        """The route in evaluation: that of training, without its noise."""
        if self.losses is switch:
            return lambda model, block, logits: switch_route(model.k, logits)
        return likeliest


LATER, ROW, OWN = "leave-one-out, later", "leave-one-out, row", "leave-one-out, own"
WAYS = {
    LATER: Way(leave_one_out, "later"),
    ROW: Way(leave_one_out, "row"),
    OWN: Way(leave_one_out, "own"),
    "Switch": Way(switch),
    "Gumbel straight-through": Way(gumbel),
    "untrained router": Way(untrained),
}
PRICED = "price"
SETTINGS = {
    "top-1": list(WAYS),
    "top-2": [LATER, "Switch", "Gumbel straight-through", "untrained router"],
    PRICED: [LATER, ROW, "Switch", "Gumbel straight-through"],
}
Key = tuple[str, str, float, float, int]
"""Setting, way, rate, balance, seed."""


def build(setting: str, way: str) -> Transformer:
    return Transformer(2 if setting == "top-2" else 1, WAYS[way].reach)


def total(setting: str, way: str, coefficient: float, model: Transformer, text: Tensor) -> Tensor:
    price = PRICE if setting == PRICED else 0.0
    loss, logits = WAYS[way].losses(model, text, price)
    for each in logits:
        loss = loss + coefficient * balance(each) / len(logits)
    return loss


class Score(NamedTuple):
    """Held-out text with the most probable experts."""

    nats: float
    """Per character."""
    used: float
    """Experts that a sequence uses, per block."""
    shares: list[float]
    """Each block's perplexity of its experts' shares: 8 where all get as many tokens."""


@torch.no_grad()
def score(way: str, model: Transformer, text: Tensor) -> Score:
    scores, routes = model(text[:, :-1], functools.partial(WAYS[way].route, model))
    used = float(first_uses(routes).sum(1).mean()) / BLOCKS
    shares = []
    for route in routes:
        share = torch.bincount(route.experts.flatten(), minlength=EXPERTS).double()
        share = share / share.sum()
        shares.append(round(float(torch.special.entr(share).sum().exp()), 2))
    return Score(round(float(nats(scores, text).mean()), 4), round(used, 3), shares)


def training(key: Key, steps: int | None = None) -> records.Record:
    """The record of a training."""
    setting, way, rate, coefficient, seed = key
    steps = steps or (TRIAL_STEPS if seed == CHOSEN_ON else STEPS)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    where = records.source()
    text = Text(seed)
    model, test = build(setting, way), text.test()
    optimiser = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05, steps)
    curve, spent = [], 0.0
    for step in range(1, steps + 1):
        batch = text.batch()
        start = time.process_time()
        loss = total(setting, way, coefficient, model, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        spent += time.process_time() - start
        if step * CURVE % steps == 0:
            found = score(way, model, test[::4])
            curve.append([step, round(spent, 2), found.nats, found.used])
    found = score(way, model, test)
    return {
        "setting": setting,
        "way": way,
        "rate": rate,
        "balance": coefficient,
        "seed": seed,
        "steps": steps,
        **found._asdict(),
        "curve": curve,
        "seconds": round(spent, 2),
        "hardware": where["hardware"],
        "commit": where["commit"],
        "python": platform.python_version(),
    }


def key_of(record: records.Record) -> Key:
    return tuple(record[name] for name in ("setting", "way", "rate", "balance", "seed"))  # pyright: ignore


# ---------------------------------------------------------------- trials


def priced(record: records.Record) -> float:
    """Nats per character with the price."""
    return record["nats"] + PRICE * record["used"] * BLOCKS / LENGTH


def test_loss(record: records.Record) -> float:
    return priced(record) if record["setting"] == PRICED else record["nats"]


def trials(way: str) -> list[Key]:
    balances = (0.0,) if way == "untrained router" else BALANCES
    return [("top-1", way, rate, b, CHOSEN_ON) for rate in RATES for b in balances]


def shown(record: records.Record) -> str:
    """A training's result, as it is printed."""
    return f"{test_loss(record):.4f}, {record['seconds']} s"


def chosen(done: list[records.Record], way: str) -> tuple[float, float]:
    """Rate and balance of a way's best trial."""
    best = min((r for r in done if key_of(r) in trials(way)), key=test_loss)
    return best["rate"], best["balance"]


def run(repetitions: int, out: Path) -> None:
    """The trials, then the reported seeds with each way's choice, then the time per step."""
    path = out / "transformer.jsonl.xz"

    def make(keys: Iterator[Key]) -> None:
        records.make_missing(path, keys, key_of, training, shown)

    every = [(setting, way) for setting, ways in SETTINGS.items() for way in ways]
    make(key for way in WAYS for key in trials(way))
    best = {way: chosen(records.read(path), way) for way in WAYS}
    make((setting, way, *best[way], seed) for seed in REPORTED for setting, way in every)
    times = out / "transformer_times.json"
    if times.exists():
        return
    where = records.source()
    measured = {
        "hardware": where["hardware"],
        "commit": where["commit"],
        "ms": step_times(repetitions),
    }
    records.write_one(times, measured)


def step_times(repetitions: int) -> dict[str, float]:
    """Median CPU milliseconds per step, forward and backward, in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = Text(0).batch()

    def step(setting: str, way: str, model: Transformer) -> None:
        model.zero_grad()
        total(setting, way, 0.01, model, batch).backward()

    calls: dict[str, Callable[[], object]] = {
        f"{setting}: {way}": functools.partial(step, setting, way, build(setting, way))
        for setting, ways in SETTINGS.items()
        for way in ways
    }
    return {
        name: round(1000 * t.median, 3)
        for name, t in interleaved(calls, repetitions, time.process_time).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make the trainings that are missing, time the steps")
    runs.add_argument("--repetitions", type=int, default=100)
    runs.add_argument("--out", type=Path, default=RESULTS)
    commands.add_parser("report", help="transformer.csv and transformer.png from the trainings")
    options = vars(parser.parse_args())
    if options.pop("command") == "run":
        run(**options)
        return
    from benchmarks.router_transformer_report import report

    report(RESULTS)


if __name__ == "__main__":
    main()
