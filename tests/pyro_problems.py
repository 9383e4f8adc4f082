"""Pyro programs with discrete sites, and the exact gradient of their ELBO by enumeration.

A problem is written inside a plate of replicas, dimension -2, each with its own copy of the
parameters: one step gives as many independent samples of the gradient as there are replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from tests.statistics import deviations

pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")

import pyro
from pyro import distributions as dist
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample

import arsm.pyro

Parameters = dict[str, Tensor]
Program = Callable[[Parameters], Any]
REPLICAS = 1 << 11


@dataclass(frozen=True)
class Problem:
    """A model and a guide inside a plate of replicas."""

    name: str
    sizes: dict[str, tuple[int, ...]]
    """Parameters [1 or the local plate's size, ...]."""
    model: Program
    guide: Program
    enumerable: bool = True
    """Whether TraceEnum_ELBO gives its exact gradient."""

    def __str__(self) -> str:
        return self.name

    def parameters(self, replicas: int) -> Parameters:
        """[replicas, *size] each, the same values for every replica."""
        generator = torch.Generator().manual_seed(1)
        drawn = {
            n: torch.randn(*size, dtype=torch.float64, generator=generator)
            for n, size in self.sizes.items()
        }
        return {n: x.expand(replicas, *x.shape).clone().requires_grad_() for n, x in drawn.items()}


def replicated(program: Program) -> Program:
    def run(p: Parameters) -> Any:
        with pyro.plate("replica", next(iter(p.values())).shape[0], dim=-2):
            return program(p)

    return run


def categorical(logits: Tensor) -> Any:
    return dist.Categorical(logits=logits)


def bernoulli(logits: Tensor) -> Any:
    return dist.Bernoulli(logits=logits)


def pick(table: Tensor, z: Tensor) -> Tensor:
    """table [..., C], z [...] int64, both broadcast: [...]."""
    table, z = torch.broadcast_tensors(table, z.unsqueeze(-1))
    return table.gather(-1, z[..., :1]).squeeze(-1)


def normal(mean: Tensor, scale: float = 1.0) -> Any:
    return dist.Normal(mean, scale)


def coin(name: str = "z") -> Tensor:
    return pyro.sample(name, bernoulli(torch.zeros(())))


# ---------------------------------------------------------------- problems


def dependent_guide(p: Parameters) -> None:
    a = pyro.sample("a", categorical(p["a"]))
    b = pyro.sample("b", bernoulli(pick(p["b"], a)))
    pyro.sample("c", categorical(p["c"] * (1 + b.unsqueeze(-1)) + a.unsqueeze(-1) * p["ca"]))


def dependent_model(p: Parameters) -> None:
    a = pyro.sample("a", categorical(p["prior"]))
    # the other way round than in the guide
    c = pyro.sample("c", categorical(p["prior"] * a.unsqueeze(-1)))
    b = pyro.sample("b", bernoulli(c * pick(p["prior"], a)))
    pyro.sample("x", normal(pick(p["mean"], a) + b * c), obs=torch.tensor(0.7, dtype=torch.float64))


def reversed_model(p: Parameters) -> None:
    """p(c) p(b | c) p(a | b, c): only the last site of the guide has a KL in closed form."""
    c = pyro.sample("c", categorical(p["prior"]))
    b = pyro.sample("b", bernoulli(pick(p["prior"], c)))
    a = pyro.sample("a", categorical(p["prior"] * (1 + b.unsqueeze(-1)) - c.unsqueeze(-1)))
    pyro.sample(
        "x", normal(pick(p["mean"], a) * (1 + b + c)), obs=torch.tensor(0.7, dtype=torch.float64)
    )


SUBSAMPLE = torch.tensor([0, 2])
DATA = torch.tensor([0.5, -1.0, 1.5, 2.0], dtype=torch.float64)


def rows() -> Any:
    """Two of four rows: a scale of 2."""
    return pyro.plate("data", 4, subsample=SUBSAMPLE, dim=-1)


def scaled_guide(p: Parameters) -> None:
    with rows() as i, poutine.scale(scale=0.7):
        a = pyro.sample("a", categorical(p["a"][:, i]))
        pyro.sample("b", bernoulli(pick(p["b"], a)))


def scaled_model(p: Parameters) -> None:
    with rows() as i:
        with poutine.scale(scale=0.7):
            a = pyro.sample("a", categorical(p["prior"]))
            b = pyro.sample("b", bernoulli(a * pick(p["prior"], a)))
        with poutine.scale(scale=1.3):
            pyro.sample("x", normal(pick(p["mean"], a) * (1 + b)), obs=DATA[i])


def global_guide(p: Parameters) -> None:
    g = pyro.sample("g", categorical(p["g"]))
    with rows() as i:
        pyro.sample("z", categorical(p["z"][:, i] + g.unsqueeze(-1) * p["zg"]))


def unlinked_guide(p: Parameters) -> None:
    pyro.sample("g", categorical(p["g"]))
    with rows() as i:
        pyro.sample("z", categorical(p["z"][:, i]))


def global_model(p: Parameters) -> None:
    g = pyro.sample("g", categorical(p["prior"]))
    with rows() as i:
        z = pyro.sample("z", categorical(torch.zeros(2, dtype=torch.float64)))
        pyro.sample("x", normal(pick(p["mean"], g) + z * g), obs=DATA[i])


def aggregate_guide(p: Parameters) -> None:
    """A global site below the local ones: the rows of the plate share it."""
    with rows() as i:
        z = pyro.sample("z", categorical(p["z"][:, i]))
    pyro.sample("g", categorical(p["g"] * (1 + z.sum(-1, keepdim=True).unsqueeze(-1))))


def aggregate_model(p: Parameters) -> None:
    g = pyro.sample("g", categorical(p["prior"]))
    with rows() as i:
        z = pyro.sample("z", categorical(torch.zeros(2, dtype=torch.float64)))
        pyro.sample("x", normal(pick(p["mean"], g) + z * g), obs=DATA[i])
    pyro.sample(
        "y",
        normal(z.prod(-1, keepdim=True) * p["mean"][..., 0]),
        obs=torch.tensor(1.0, dtype=torch.float64),
    )


def silent_guide(p: Parameters) -> None:
    """As above, but the global site has no log probability."""
    with rows() as i:
        z = pyro.sample("z", categorical(p["z"][:, i]))
    pyro.sample("g", categorical(p["g"] * (1 + z.sum(-1, keepdim=True).unsqueeze(-1))).mask(False))


def silent_model(p: Parameters) -> None:
    g = pyro.sample("g", categorical(p["prior"]).mask(False))
    with rows() as i:
        z = pyro.sample("z", categorical(torch.zeros(2, dtype=torch.float64)))
        pyro.sample("x", normal(pick(p["mean"], g) + z * g), obs=DATA[i])


def mixed_guide(p: Parameters) -> None:
    u = pyro.sample("u", dist.Normal(p["u"], 0.3 * p["width"].exp()))
    y = pyro.sample("y", categorical(p["y"] * u.unsqueeze(-1)))
    w = pyro.sample("w", dist.Normal(pick(p["w"], y), 0.3 * p["width"].exp() * (1 + y)))
    pyro.sample("b", bernoulli(w.sin() * p["u"]))


def mixed_model(p: Parameters) -> None:
    u = pyro.sample("u", normal(torch.zeros((), dtype=torch.float64)))
    y = pyro.sample("y", categorical(p["prior"]))
    w = pyro.sample("w", normal(pick(p["prior"], y)))
    b = pyro.sample("b", bernoulli(u))
    pyro.sample(
        "x",
        normal(0.3 * u * pick(p["mean"], y) + b * w.cos()),
        obs=torch.tensor(0.7, dtype=torch.float64),
    )


MASK: Any = torch.tensor([True, False])


def masked_guide(p: Parameters) -> None:
    with rows() as i:
        with poutine.mask(mask=MASK):
            a = pyro.sample("a", categorical(p["a"][:, i]))
        pyro.sample("b", bernoulli(pick(p["b"], a)).mask(MASK))


def masked_model(p: Parameters) -> None:
    with rows() as i:
        with poutine.mask(mask=MASK):
            a = pyro.sample("a", categorical(p["prior"]))
        b = pyro.sample("b", bernoulli(a * pick(p["prior"], a)).mask(MASK))
        with poutine.mask(mask=MASK):
            pyro.sample("x", normal(pick(p["mean"], a) * (1 + b)), obs=DATA[i])


def choosing_guide(p: Parameters) -> None:
    """Masks that depend on a site, and a site without any log probability below it."""
    a = pyro.sample("a", categorical(p["a"]))
    with poutine.mask(mask=a == 1):  # pyright: ignore[reportArgumentType]
        pyro.sample("b", bernoulli(p["b"][..., 0]))
    pyro.sample("c", bernoulli(pick(p["b"], a)).mask(False))


def choosing_model(p: Parameters) -> None:
    """For two of three categories of a, its mask is that of the guide."""
    a = pyro.sample("a", categorical(p["prior"]))
    with poutine.mask(mask=a >= 1):  # pyright: ignore[reportArgumentType]
        b = pyro.sample("b", bernoulli(p["prior"][..., 0]))
    c = pyro.sample("c", bernoulli(p["prior"][..., 0]).mask(False))
    pyro.sample(
        "x", normal(pick(p["mean"], a) + b + 2 * c), obs=torch.tensor(0.7, dtype=torch.float64)
    )


def several_guide(p: Parameters) -> None:
    """Different C, vectors of variables, one-hot values, an impossible category."""
    pyro.sample("a", categorical(p["a"]))
    pyro.sample("b", bernoulli(p["b"]).to_event(1))
    pyro.sample(
        "c", dist.OneHotCategorical(logits=p["c"].masked_fill(torch.arange(4) == 1, -torch.inf))
    )


def several_model(p: Parameters) -> None:
    a = pyro.sample("a", categorical(p["prior"]))
    b = pyro.sample("b", bernoulli(torch.zeros(2, dtype=torch.float64)).to_event(1))
    c = pyro.sample("c", dist.OneHotCategorical(logits=torch.zeros(4, dtype=torch.float64)))
    mean = pick(p["mean"], a) + (b * c[..., :2]).sum(-1) + b.prod(-1) * c[..., 3]
    pyro.sample("x", normal(mean), obs=torch.tensor(0.7, dtype=torch.float64))


def chain_guide(p: Parameters) -> None:
    """Sites in a sequential plate, each below the one before it."""
    z = torch.zeros((), dtype=torch.float64)
    for t in map(int, pyro.plate("steps", 3)):
        z = pyro.sample(f"z_{t}", bernoulli(p["z"][..., t] + 2 * z))


def chain_model(p: Parameters) -> None:
    z = torch.zeros((), dtype=torch.float64)
    for t in map(int, pyro.plate("steps", 3)):
        shifted = pyro.deterministic(f"shifted_{t}", p["prior"][..., t] - z)
        z = pyro.sample(f"z_{t}", bernoulli(shifted))
        pyro.factor(f"x_{t}", -(z - 0.3 * t + p["mean"][..., t]).square())


def nested_guide(p: Parameters) -> None:
    with pyro.plate("outer", 2, dim=-3):
        w = pyro.sample("w", bernoulli(p["w"]))
        with pyro.plate("inner", 2, dim=-1):
            pyro.sample("z", categorical(p["z"] * (1 + w.unsqueeze(-1))))


def nested_model(p: Parameters) -> None:
    with pyro.plate("outer", 2, dim=-3):
        w = pyro.sample("w", bernoulli(torch.zeros((), dtype=torch.float64)))
        with pyro.plate("inner", 2, dim=-1):
            z = pyro.sample("z", categorical(w.unsqueeze(-1) * p["prior"][..., :2]))
        total = z.sum(-1, keepdim=True)  # the rows of the inner plate share this
        pyro.sample(
            "y",
            normal(p["mean"][..., 0] * total + w),
            obs=torch.tensor([[[0.5]], [[1.5]]]).double(),
        )


THREE = {"prior": (1, 3), "mean": (1, 3)}
LOCAL = {"a": (4, 3), "b": (1, 3), **THREE}
CHAIN = {"a": (1, 3), "b": (1, 3), "c": (1, 3), "ca": (1, 3), **THREE}
SHARED = {"g": (1, 3), "z": (4, 2), "zg": (1, 2), **THREE}
PROBLEMS = [
    Problem("dependent sites", CHAIN, dependent_model, dependent_guide),
    Problem("a model in reverse", CHAIN, reversed_model, dependent_guide),
    Problem("scaled plate", LOCAL, scaled_model, scaled_guide),
    Problem("global and local", SHARED, global_model, global_guide),
    Problem("global beside local", SHARED, global_model, unlinked_guide),
    Problem("global below local", SHARED, aggregate_model, aggregate_guide, enumerable=False),
    Problem("silent below local", SHARED, silent_model, silent_guide, enumerable=False),
    Problem(
        "continuous sites",
        {"u": (1,), "width": (1,), "y": (1, 3), "w": (1, 3), **THREE},
        mixed_model,
        mixed_guide,
        enumerable=False,
    ),
    Problem("a chain", {"z": (1, 3), **THREE}, chain_model, chain_guide, enumerable=False),
    Problem(
        "nested plates",
        {"w": (1,), "z": (2, 2), **THREE},
        nested_model,
        nested_guide,
        enumerable=False,
    ),
    Problem("masks", LOCAL, masked_model, masked_guide),
    Problem(
        "masks by samples",
        {"a": (1, 3), "b": (1, 3), **THREE},
        choosing_model,
        choosing_guide,
        enumerable=False,
    ),
    Problem(
        "several sizes",
        {"a": (1, 3), "b": (1, 2), "c": (1, 4), **THREE},
        several_model,
        several_guide,
        enumerable=False,
    ),
]


def pairs_guide(p: Parameters) -> None:
    a = pyro.sample("a", bernoulli(p["a"]).to_event(1))
    pyro.sample("b", categorical(p["b"] * (1 + a[..., :1])))


def pairs_model(p: Parameters) -> None:
    a = pyro.sample("a", bernoulli(torch.zeros(3, dtype=torch.float64)).to_event(1))
    b = pyro.sample("b", categorical(p["b"] * 0))
    pyro.sample(
        "x", normal((a * p["mean"]).sum(-1) * (1 + b)), obs=torch.tensor(0.7, dtype=torch.float64)
    )


PAIRS = Problem(
    "two categories", {"a": (1, 3), "b": (1, 2), "mean": (1, 3)}, pairs_model, pairs_guide
)


# ---------------------------------------------------------------- the exact gradient


class Odometer(Messenger):
    """Takes the chosen one of each latent site's possible values; the first of those that nobody
    chose.
    """

    def __init__(self, chosen: list[int]) -> None:
        super().__init__()
        self.chosen, self.counts, self.log_weight = chosen, [], torch.zeros((), dtype=torch.float64)

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["value"] is not None:
            return
        values = possible(msg["fn"])
        at = self.chosen[len(self.counts)] if len(self.counts) < len(self.chosen) else 0
        self.counts.append(len(values))
        msg["value"], log_weight = values[at]
        msg["done"] = True
        self.log_weight = self.log_weight + log_weight


def hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights that integrate a polynomial of degree 2 count - 1 against a standard normal
    exactly.
    """
    beside = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return nodes, vectors[0].square()


def possible(fn: Any) -> list[tuple[Tensor, Tensor]]:
    """Every value and its log probability; quadrature nodes for Normal."""
    if isinstance(fn, _Subsample):
        subsets = list(itertools.combinations(range(fn.size), fn.subsample_size or fn.size))
        return [(torch.tensor(s), -torch.tensor(float(len(subsets))).log()) for s in subsets]
    base = fn
    while isinstance(base, (dist.Independent, dist.MaskedDistribution)):
        base = base.base_dist
    if isinstance(base, dist.Normal):
        assert fn.shape().numel() == 1
        return [
            (base.loc + base.scale * node, weight.log())
            for node, weight in zip(*hermite(6), strict=True)
        ]
    hot = isinstance(base, dist.OneHotCategorical)
    count = 2 if isinstance(base, dist.Bernoulli) else base.logits.shape[-1]
    shape = fn.shape()[:-1] if hot else fn.shape()
    found = []
    for joint in itertools.product(range(count), repeat=shape.numel()):
        z = torch.tensor(joint).view(shape)
        value = (
            arsm.one_hot(z, count, torch.float64)
            if hot
            else z
            if isinstance(base, dist.Categorical)
            else z.double()
        )
        found.append((value, base.log_prob(value).sum()))
    return [(value, log_weight) for value, log_weight in found if log_weight > -torch.inf]


def expected_loss(model: Program, guide: Program, p: Parameters) -> Tensor:
    """E[-(ln p - ln q)], every joint value of all latent sites weighted by its probability."""
    total, chosen = torch.zeros((), dtype=torch.float64), []
    while chosen is not None:
        with Odometer(chosen) as odometer:
            guide_trace = poutine.trace(guide).get_trace(p)
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(p)
        total = total + odometer.log_weight.exp() * (
            guide_trace.log_prob_sum() - model_trace.log_prob_sum()
        )
        chosen = chosen + [0] * (len(odometer.counts) - len(chosen))
        while chosen and chosen[-1] + 1 == odometer.counts[len(chosen) - 1]:
            chosen.pop()
        chosen = [*chosen[:-1], chosen[-1] + 1] if chosen else None
    return total


def exact(problem: Problem) -> tuple[Tensor, Parameters]:
    """The expected loss and its gradients [*size], by enumeration."""
    p = problem.parameters(1)
    loss = expected_loss(replicated(problem.model), replicated(problem.guide), p)
    # a masked row's gradient is zero, and enumeration leaves its rounding there
    found = [g[0].masked_fill(g[0].abs() < 1e-13, 0) for g in gradients(loss, p)]
    return loss.detach(), dict(zip(p, found, strict=True))


def gradients(loss: Tensor, p: Parameters) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(p.values()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, p.values(), strict=True)]


def worst(
    problem: Problem,
    estimator: arsm.Estimator,
    truth: Parameters,
    replicas: int = REPLICAS,
    max_rows: int | None = 1 << 14,
) -> float:
    """The largest deviation of any parameter's gradient; above 1 is a rejection.

    Without validation it is that of the second step, which has the structure of the first.
    """
    p = problem.parameters(replicas)
    elbo = arsm.pyro.ELBO(estimator, max_rows, vectorize_particles=True)
    programs = replicated(problem.model), replicated(problem.guide)
    if not is_validation_enabled():
        elbo.differentiable_loss(*programs, p)
    loss = elbo.differentiable_loss(*programs, p)
    found = dict(zip(p, gradients(loss, p), strict=True))
    return max(float(deviations(found[name], truth[name]).max()) for name in p)
