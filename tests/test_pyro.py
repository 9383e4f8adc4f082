"""`arsm.pyro.ELBO`: the gradient of every parameter against enumeration and against Pyro's own exact ELBO.

A problem is written inside a plate of replicas, dimension -2, each with its own copy of the parameters: one step gives
as many independent samples of the gradient as there are replicas.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from tests.statistics import deviations
from tests.test_examples import load

pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")

import pyro
from pyro import distributions as dist
from pyro import poutine
from pyro.distributions.testing.rejection_gamma import RejectionStandardGamma
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoIAFNormal, AutoNormal
from pyro.ops.indexing import Vindex
from pyro.optim import PyroOptim
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample

import arsm.pyro
from arsm.pyro import sites
from arsm.pyro.categories import kl
from arsm.pyro.other_paths import OtherPaths, Stage

Parameters = dict[str, Tensor]
Program = Callable[[Parameters], Any]
REPLICAS = 1 << 11
ESTIMATORS = [arsm.RLOO(3), arsm.RLOO(4, ridge=1.0, live=1), arsm.ARSM(), arsm.LocalExpectation()]


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
        drawn = {n: torch.randn(*size, dtype=torch.float64, generator=generator) for n, size in self.sizes.items()}
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


# ---------------------------------------------------------------- problems


def dependent_guide(p: Parameters) -> None:
    a = pyro.sample("a", categorical(p["a"]))
    b = pyro.sample("b", bernoulli(pick(p["b"], a)))
    pyro.sample("c", categorical(p["c"] * (1 + b.unsqueeze(-1)) + a.unsqueeze(-1) * p["ca"]))


def dependent_model(p: Parameters) -> None:
    a = pyro.sample("a", categorical(p["prior"]))
    c = pyro.sample("c", categorical(p["prior"] * a.unsqueeze(-1)))  # the other way round than in the guide
    b = pyro.sample("b", bernoulli(c * pick(p["prior"], a)))
    pyro.sample("x", normal(pick(p["mean"], a) + b * c), obs=torch.tensor(0.7, dtype=torch.float64))


def reversed_model(p: Parameters) -> None:
    """p(c) p(b | c) p(a | b, c): only the last site of the guide has a KL in closed form."""
    c = pyro.sample("c", categorical(p["prior"]))
    b = pyro.sample("b", bernoulli(pick(p["prior"], c)))
    a = pyro.sample("a", categorical(p["prior"] * (1 + b.unsqueeze(-1)) - c.unsqueeze(-1)))
    pyro.sample("x", normal(pick(p["mean"], a) * (1 + b + c)), obs=torch.tensor(0.7, dtype=torch.float64))


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
    pyro.sample("y", normal(z.prod(-1, keepdim=True) * p["mean"][..., 0]), obs=torch.tensor(1.0, dtype=torch.float64))


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
    pyro.sample("x", normal(0.3 * u * pick(p["mean"], y) + b * w.cos()), obs=torch.tensor(0.7, dtype=torch.float64))


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
    pyro.sample("x", normal(pick(p["mean"], a) + b + 2 * c), obs=torch.tensor(0.7, dtype=torch.float64))


def several_guide(p: Parameters) -> None:
    """Different C, vectors of variables, one-hot values, an impossible category."""
    pyro.sample("a", categorical(p["a"]))
    pyro.sample("b", bernoulli(p["b"]).to_event(1))
    pyro.sample("c", dist.OneHotCategorical(logits=p["c"].masked_fill(torch.arange(4) == 1, -torch.inf)))


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
        pyro.sample("y", normal(p["mean"][..., 0] * total + w), obs=torch.tensor([[[0.5]], [[1.5]]]).double())


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
    Problem("nested plates", {"w": (1,), "z": (2, 2), **THREE}, nested_model, nested_guide, enumerable=False),
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
    pyro.sample("x", normal((a * p["mean"]).sum(-1) * (1 + b)), obs=torch.tensor(0.7, dtype=torch.float64))


PAIRS = Problem("two categories", {"a": (1, 3), "b": (1, 2), "mean": (1, 3)}, pairs_model, pairs_guide)


# ---------------------------------------------------------------- the exact gradient


class Odometer(Messenger):
    """Takes the chosen one of each latent site's possible values; the first of those that nobody chose."""

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
    """Nodes and weights that integrate a polynomial of degree 2 count - 1 against a standard normal exactly."""
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
        return [(base.loc + base.scale * node, weight.log()) for node, weight in zip(*hermite(6), strict=True)]
    hot = isinstance(base, dist.OneHotCategorical)
    count = 2 if isinstance(base, dist.Bernoulli) else base.logits.shape[-1]
    shape = fn.shape()[:-1] if hot else fn.shape()
    found = []
    for joint in itertools.product(range(count), repeat=shape.numel()):
        z = torch.tensor(joint).view(shape)
        value = (
            arsm.one_hot(z, count, torch.float64) if hot else z if isinstance(base, dist.Categorical) else z.double()
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
        total = total + odometer.log_weight.exp() * (guide_trace.log_prob_sum() - model_trace.log_prob_sum())
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


def worst(problem: Problem, estimator: arsm.Estimator, truth: Parameters, replicas: int = REPLICAS) -> float:
    """The largest deviation of any parameter's gradient; above 1 is a rejection."""
    p = problem.parameters(replicas)
    loss = arsm.pyro.ELBO(estimator).differentiable_loss(replicated(problem.model), replicated(problem.guide), p)
    found = dict(zip(p, gradients(loss, p), strict=True))
    return max(float(deviations(found[name], truth[name]).max()) for name in p)


@pytest.fixture(scope="module")
def truths() -> dict[str, tuple[Tensor, Parameters]]:
    return {problem.name: exact(problem) for problem in PROBLEMS}


# ---------------------------------------------------------------- unbiased


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_parameters_gradient_is_unbiased(problem: Problem, estimator: arsm.Estimator, truths: Any) -> None:
    assert worst(problem, estimator, truths[problem.name][1]) <= 1


@pytest.mark.parametrize("problem", [problem for problem in PROBLEMS if problem.enumerable], ids=str)
def test_enumeration_agrees_with_pyros_exact_elbo(problem: Problem, truths: Any) -> None:
    p = problem.parameters(1)
    guide = config_enumerate(replicated(problem.guide))
    loss = TraceEnum_ELBO(max_plate_nesting=2).differentiable_loss(replicated(problem.model), guide, p)
    value, truth = truths[problem.name]
    torch.testing.assert_close(loss, value)
    for found, name in zip(gradients(loss, p), p, strict=True):
        torch.testing.assert_close(found[0], truth[name])


@pytest.mark.parametrize("words", arsm.estimator_names())
def test_an_estimator_keeps_its_claim_or_is_refused_by_name(words: str, truths: Any) -> None:
    estimator = arsm.estimator(words)
    problem = PAIRS if words in ("disarm", "ugc") else PROBLEMS[3]
    fits = estimator.target == "mean" and estimator.given_sample and not len(estimator.learned)
    if estimator.needs_gradient or not fits:
        with pytest.raises(ValueError, match=type(estimator).__name__):
            arsm.pyro.ELBO(estimator)
    else:
        truth = exact(problem)[1] if problem is PAIRS else truths[problem.name][1]
        assert (worst(problem, estimator, truth) <= 1) is estimator.unbiased


def test_rows_may_lend_each_other_a_coefficient(truths: Any) -> None:
    assert worst(PROBLEMS[2], arsm.RLOO(4, ridge=1.0, surrogate="logits"), truths[PROBLEMS[2].name][1]) <= 1


def test_draws_are_averaged(truths: Any) -> None:
    assert worst(PROBLEMS[0], arsm.Average(arsm.ARSM(), 2), truths[PROBLEMS[0].name][1]) <= 1


# what 64 lines of glue get wrong, and these tests see
def held(self: OtherPaths, name: str, queries: Any, fn: Any = None, value: Any = OtherPaths._value) -> Tensor:
    """Sites below a pseudo vector keep the true sample."""
    self.above[name] = set()
    return value(self, name, queries, fn)


def unscaled(x: Tensor, scale: Any, mask: Any, scaled: Any = sites.scale_and_mask) -> Tensor:
    return scaled(x, 1.0, mask)


def only_own_plates(self: Stage, term: Any, moves: Any = Stage.moves) -> bool:
    """A global site is told of the terms outside the plates alone."""
    return moves(self, term) and len(term.plates) == len(self.dims)


@pytest.mark.parametrize(
    ("problem", "owner", "name", "wrong"),
    [
        ("dependent sites", OtherPaths, "_value", held),
        ("scaled plate", sites, "scale_and_mask", unscaled),
        ("global and local", Stage, "moves", only_own_plates),
        ("global beside local", Stage, "moves", only_own_plates),
    ],
)
def test_a_naive_integration_is_caught(
    problem: str, owner: Any, name: str, wrong: Any, truths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chosen,) = (each for each in PROBLEMS if each.name == problem)
    monkeypatch.setattr(owner, name, wrong)
    with pyro.validation_enabled(False):
        assert worst(chosen, arsm.RLOO(3), truths[problem][1]) > 1


# ---------------------------------------------------------------- plates


def drawn_rows() -> Any:
    return pyro.plate("data", 3, subsample_size=2, dim=-1)


def subsampled_guide(p: Parameters) -> None:
    g = pyro.sample("g", categorical(p["g"]))
    with drawn_rows() as i:
        pyro.sample("z", bernoulli(p["z"][:, i] + g))


def subsampled_model(p: Parameters) -> None:
    g = pyro.sample("g", categorical(p["g"] * 0))
    with drawn_rows() as i:
        z = pyro.sample("z", bernoulli(g * 1.0))
        pyro.sample("x", normal(pick(p["mean"], g) * z), obs=DATA[i])


def test_a_random_subsample_is_unbiased() -> None:
    """All replicas of a step share its subsample: a step is one sample."""
    problem = Problem("subsample", {"g": (1, 2), "z": (3,), "mean": (1, 2)}, subsampled_model, subsampled_guide)
    truth, p = exact(problem)[1], problem.parameters(64)
    loss = arsm.pyro.ELBO(arsm.LocalExpectation())
    samples = []
    for _ in range(100):
        step = loss.differentiable_loss(replicated(problem.model), replicated(problem.guide), p)
        samples.append([g.mean(0) for g in gradients(step, p)])
    for name, found in zip(p, zip(*samples, strict=True), strict=True):
        assert float(deviations(torch.stack(found), truth[name]).max()) <= 1, name


def test_one_subsample_per_step_is_shared_by_all_samples() -> None:
    seen: list[list[int]] = []
    elbo = arsm.pyro.ELBO(arsm.RLOO(4), max_rows=1)
    logits = torch.zeros(50, 3, requires_grad=True)

    def guide() -> None:
        with pyro.plate("guided", 50, subsample_size=5) as i:
            pyro.sample("z", categorical(logits[i]))

    def model() -> None:
        with pyro.plate("guided", 50, subsample_size=5) as i:
            assert i is not None
            seen.append(i.tolist())
            z = pyro.sample("z", categorical(torch.zeros(3)))
        with pyro.plate("modelled", 40, subsample_size=4) as j:
            assert j is not None
            seen.append(j.tolist())
            pyro.sample("x", normal(z.sum(-1, keepdim=True) * 1.0), obs=torch.ones(4))

    elbo.loss_and_grads(model, guide)
    assert len(seen) == 2 * (1 + 1 + 3)  # the true path, the check of the first step, a run per sample
    assert len({tuple(rows) for rows in seen}) == 2
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).nonzero().squeeze(-1).tolist() == sorted(seen[0])


def test_chunks_of_paths_are_one_run() -> None:
    for estimator in (arsm.RLOO(5), arsm.RLOO(5, live=2), arsm.ARSM()):
        found = []
        for max_rows in (1, 30, None):
            torch.manual_seed(3)
            p = PROBLEMS[3].parameters(10)
            loss = arsm.pyro.ELBO(estimator, max_rows)
            step = loss.differentiable_loss(replicated(PROBLEMS[3].model), replicated(PROBLEMS[3].guide), p)
            found.append(torch.cat([g.flatten() for g in gradients(step, p)]))
        torch.testing.assert_close(found[0], found[2])
        torch.testing.assert_close(found[1], found[2])


def test_a_kl_in_closed_form_has_no_variance() -> None:
    """Where nothing else depends on the site."""
    p = {"q": torch.randn(500, 1, 3), "p": torch.randn(500, 1, 3)}
    p = {name: x[:1].expand_as(x).clone().requires_grad_() for name, x in p.items()}

    def guide(p: Parameters) -> None:
        pyro.sample("z", categorical(p["q"]))

    def model(p: Parameters) -> None:
        pyro.sample("z", categorical(p["p"]))

    loss = arsm.pyro.ELBO(arsm.RLOO(2)).differentiable_loss(replicated(model), replicated(guide), p)
    for found in gradients(loss, p):
        assert found.abs().max() > 0.01
        torch.testing.assert_close(found, found[:1].expand_as(found))


def shifted(mean: float) -> Any:
    """Its shift is a tensor of its own, which happens to be zero."""
    shift = dist.transforms.AffineTransform(torch.zeros(()), 1.0)
    return dist.TransformedDistribution(normal(torch.tensor(mean)), [shift])


@pytest.mark.parametrize(
    ("q", "p"),
    [
        (dist.FoldedDistribution(normal(torch.ones(()))), dist.FoldedDistribution(normal(torch.zeros(())))),
        (shifted(1.0), shifted(0.0)),
        (normal(torch.ones(2)).mask(torch.tensor([True, False])), normal(torch.zeros(2)).mask(True)),
        (dist.OneHotCategorical(torch.ones(2)), dist.Bernoulli(torch.tensor([0.3, 0.6])).to_event(1)),
        (dist.Wishart(torch.tensor(5.5), torch.eye(3)), dist.Wishart(torch.tensor(6.5), 2 * torch.eye(3))),
    ],
    ids=["folded", "equal values of two transforms", "two masks", "one-hot under Bernoulli", "Wishart"],
)
def test_a_kl_that_pyro_or_pytorch_gets_wrong_is_sampled(q: Any, p: Any) -> None:
    assert kl(q, p) is None


def test_a_kl_between_log_normals_is_in_closed_form() -> None:
    q, p = (dist.LogNormal(torch.full((3,), mean), 1.0).to_event(1) for mean in (1.0, 0.0))
    torch.testing.assert_close(kl(q, p), torch.tensor(1.5))


def test_normal_sites_are_drawn_again_with_the_same_noise() -> None:
    """Then nothing here depends on the choice but its own KL."""
    p = {name: x.expand(500, 1, 3).clone().requires_grad_() for name, x in {"q": torch.randn(3)}.items()}
    means = torch.tensor([-1.0, 0.0, 3.0])

    def guide(p: Parameters) -> None:
        y = pyro.sample("y", categorical(p["q"]))
        pyro.sample("w", dist.Normal(torch.stack([means[y], -means[y]], -1), 0.5).to_event(1))

    def model(p: Parameters) -> None:
        y = pyro.sample("y", categorical(torch.zeros(3)))
        w = pyro.sample("w", dist.Normal(torch.stack([means[y], -means[y]], -1), 0.5).to_event(1))
        pyro.sample("x", normal((w[..., 0] - means[y]) * (w[..., 1] + means[y])), obs=torch.tensor(1.0))

    loss = arsm.pyro.ELBO(arsm.RLOO(3)).differentiable_loss(replicated(model), replicated(guide), p)
    (found,) = gradients(loss, p)
    assert found.abs().max() > 0.01
    torch.testing.assert_close(found, found[:1].expand_as(found))


# ---------------------------------------------------------------- as Pyro's own ELBOs are used


def no_plates(p: Parameters) -> tuple[Callable[[], None], Callable[[], None]]:
    def guide() -> None:
        a = pyro.sample("a", categorical(pyro.param("logits_a", p["a"])))
        pyro.sample("b", bernoulli(pyro.param("logits_b", p["b"])[a]))

    def model() -> None:
        a = pyro.sample("a", categorical(torch.zeros(3)))
        b = pyro.sample("b", bernoulli(a - 1.0))
        pyro.sample("x", normal(a * (1 - 2.0 * b)), obs=torch.tensor(2.0))

    return model, guide


@pytest.mark.parametrize(
    "draw",
    [
        lambda m: dist.Beta(m, 2.0),
        lambda m: dist.Dirichlet(torch.stack([m, 2 * torch.ones_like(m)], -1)),
        lambda m: dist.Exponential(m),
        lambda m: dist.Gamma(m, 1.0),
        lambda m: dist.LogNormal(m, 0.5),
        lambda m: dist.Gumbel(m, 0.5),
        lambda m: dist.TransformedDistribution(dist.Beta(m, 2.0), [dist.transforms.ExpTransform()]),
    ],
    ids=["beta", "dirichlet", "exponential", "gamma", "log-normal", "Gumbel", "transformed"],
)
def test_a_draw_below_a_discrete_site_keeps_its_gradient_and_its_noise(draw: Callable[[Tensor], Any]) -> None:
    """The true path alone (a certain site), against the same draw without a site above it."""
    rates = torch.tensor([1.0, 2.0, 1.5])

    def model(m: Tensor, above: bool) -> None:
        with pyro.plate("rows", 3):
            if above:
                pyro.sample("z", bernoulli(torch.zeros(3)))
            prior = draw(torch.ones(3))
            w = pyro.sample("w", prior)
            rows = w[..., 0] if prior.event_dim else w
            pyro.sample("x", normal(rows * torch.tensor([1.0, -3.0, 2.0])), obs=torch.ones(3))

    def guide(m: Tensor, above: bool) -> None:
        with pyro.plate("rows", 3):
            torch.manual_seed(1)
            z = pyro.sample("z", bernoulli(torch.full((3,), 50.0))) if above else torch.ones(3)
            torch.manual_seed(2)
            pyro.sample("w", draw(m * z))

    found = []
    for above in (True, False):
        m = rates.clone().requires_grad_()
        arsm.pyro.ELBO(arsm.Reinforce()).loss_and_grads(model, guide, m, above)
        found.append(m.grad)
    torch.testing.assert_close(*found)


def test_svi_learns_without_any_plate() -> None:
    pyro.clear_param_store()
    model, guide = no_plates({"a": torch.zeros(3), "b": torch.zeros(3)})
    svi = SVI(model, guide, PyroOptim(torch.optim.Adam, {"lr": 0.15}), arsm.pyro.ELBO(arsm.RLOO(4)))
    for _ in range(60):
        assert isinstance(svi.step(), float)
    a, b = torch.tensor([[a, b] for a in (0.0, 1.0, 2.0) for b in (0.0, 1.0)]).T
    joint = bernoulli(a - 1).log_prob(b) + normal(a * (1 - 2 * b)).log_prob(torch.tensor(2.0))
    posterior = joint.softmax(-1).view(3, 2).sum(-1)
    assert (pyro.param("logits_a").softmax(-1) - posterior).abs().max() < 0.15
    evidence = float(joint.logsumexp(-1)) - math.log(3)
    losses: list[Any] = [svi.evaluate_loss() for _ in range(50)]
    assert -evidence - 0.1 < sum(losses) / 50 < -evidence + 0.4


def test_losses_agree_with_the_expectation(truths: Any) -> None:
    """`loss`, `loss_and_grads` and the value of `differentiable_loss`, over the replicas of one step."""
    for problem in PROBLEMS[:4]:
        elbo, p = arsm.pyro.ELBO(arsm.RLOO(3)), problem.parameters(REPLICAS)
        programs = replicated(problem.model), replicated(problem.guide)
        value = REPLICAS * float(truths[problem.name][0])
        module = elbo(*programs)  # pyright: ignore[reportArgumentType]
        for found in (elbo.loss(*programs, p), elbo.loss_and_grads(*programs, p), module(p).item()):
            assert found == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("linked", [False, True], ids=["beside the choice", "with a site below the choice"])
def test_an_automatic_guide_counts_its_jacobian(linked: bool) -> None:
    """AutoNormal samples ln w, and w is a Delta whose density is the Jacobian; Pyro's own KL leaves that out."""

    def sites() -> None:
        z = coin()
        if linked:
            pyro.sample("y", normal(z))

    def model() -> None:
        w = pyro.sample("w", dist.Gamma(torch.full((2,), 2.0), 1.0).to_event(1))
        sites()
        pyro.sample("x", normal(w.sum(-1)), obs=torch.tensor(3.0))

    automatic = AutoNormal(poutine.block(model, expose=["w"]))

    def guide() -> None:
        automatic()
        sites()

    def measured(elbo: Any) -> list[Tensor]:
        torch.manual_seed(0)
        automatic.zero_grad()
        loss = torch.tensor(elbo.loss_and_grads(model, guide))
        return [loss, *(parameter.grad.clone() for parameter in automatic.parameters())]  # pyright: ignore

    guide()  # makes the parameters
    torch.testing.assert_close(measured(arsm.pyro.ELBO(arsm.RLOO(3))), measured(Trace_ELBO()))


def test_an_automatic_guide_may_be_a_flow() -> None:
    """Its transforms and their inverses point to each other after the first step."""
    pyro.clear_param_store()

    def model() -> None:
        w = pyro.sample("w", normal(torch.zeros(2)).to_event(1))
        pyro.sample("x", normal(coin() * w[..., 0]), obs=torch.ones(()))

    automatic = AutoIAFNormal(poutine.block(model, expose=["w"]))
    elbo = arsm.pyro.ELBO(arsm.RLOO(3))
    for _ in range(3):
        assert math.isfinite(elbo.loss_and_grads(model, lambda: (automatic(), coin())))
    assert all(parameter.grad is not None for parameter in automatic.parameters())


def test_the_example_learns() -> None:
    reached = load("pyro_vae").main(steps=120, batch=50, losses=["arsm.pyro.ELBO"])
    assert reached["arsm.pyro.ELBO"] < 195  # with Pyro's own ELBOs it is 200


# ---------------------------------------------------------------- refused


def run(model: Callable[[], Any], guide: Callable[[], Any], estimator: arsm.Estimator | None = None) -> Tensor:
    return arsm.pyro.ELBO(estimator or arsm.RLOO(3)).differentiable_loss(model, guide)


def coin(name: str = "z") -> Tensor:
    return pyro.sample(name, bernoulli(torch.zeros(())))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (dist.Poisson(torch.tensor(2.0)), "'z' is Poisson"),
        (dist.Geometric(torch.tensor(0.2)), "'z' is Geometric"),
        (RejectionStandardGamma(torch.tensor(2.0)), "'z' is RejectionStandardGamma, which is reparameterised in part"),
        (dist.OneHotCategoricalStraightThrough(torch.ones(3)), "'z' is OneHotCategoricalStraightThrough"),
        (dist.RelaxedBernoulliStraightThrough(torch.tensor(1.0), torch.tensor(0.5)), "StraightThrough"),
    ],
)
def test_other_distributions_are_refused_by_name(fn: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(lambda: pyro.sample("z", fn), lambda: pyro.sample("z", fn))


def test_a_latent_site_that_the_guide_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="Model site 'w' is neither observed nor in the guide"):
        run(lambda: (coin("z"), coin("w")), coin)


def test_an_observed_guide_site_is_refused() -> None:
    with pytest.raises(ValueError, match="Guide site 'y' is observed"):
        run(coin, lambda: (coin(), pyro.sample("y", normal(torch.zeros(())), obs=torch.zeros(()))))


def test_a_model_without_room_for_a_plate_is_refused() -> None:
    def heads() -> Tensor:
        return pyro.sample("z", bernoulli(torch.tensor(30.0)))

    def summing() -> None:
        pyro.sample("x", normal(heads().sum()), obs=torch.zeros(()))  # over the samples, too

    def noisy() -> None:
        pyro.sample("x", normal(heads() + torch.nn.functional.dropout(torch.ones(99)).mean()), obs=torch.zeros(()))

    for model in (summing, noisy):
        with pytest.raises(ValueError, match="'x' has other log probabilities in a plate than alone"):
            run(model, heads)


@pytest.mark.parametrize("site", [normal, bernoulli])
def test_a_site_whose_samples_would_spread_over_a_plate_is_refused(site: Callable[[Tensor], Any]) -> None:
    """As many rows as queries: the paths of a site outside the plate would broadcast to the plate's rows."""

    def guide() -> None:
        with pyro.plate("rows", 3):
            z = pyro.sample("z", bernoulli(torch.zeros(3)))
        pyro.sample("s", site(z.mean(-1)))  # inside one more plate it needs keepdim=True

    def model() -> None:
        s = pyro.sample("s", site(torch.zeros(())))
        with pyro.plate("rows", 3):
            z = pyro.sample("z", bernoulli(torch.zeros(3)))
            pyro.sample("x", normal(z * (1 + s)), obs=torch.zeros(3))

    with pytest.raises(ValueError, match=r"in a plate than alone|with a plate around it"):
        run(model, guide, arsm.LocalExpectation())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient


@pytest.mark.parametrize("estimator", [arsm.Reinforce(), arsm.RLOO(2)], ids=repr)
def test_a_gradient_that_provenance_tracking_loses_is_refused(estimator: arsm.Estimator) -> None:
    weight = torch.ones((), requires_grad=True)

    def model() -> None:
        pyro.sample("x", normal(Twice.apply(weight * coin())), obs=torch.zeros(()))  # pyright: ignore[reportArgumentType]

    with pytest.raises(ValueError, match="'x' loses a parameter's gradient under Pyro's provenance tracking"):
        run(model, coin, estimator)


def test_a_gradient_lost_beside_one_that_is_kept_is_refused() -> None:
    weight = torch.ones((), requires_grad=True)

    def model() -> None:
        h = weight * (1 + coin())
        pyro.sample("x", normal(h + Twice.apply(h)), obs=torch.zeros(()))  # pyright: ignore

    with pytest.raises(ValueError, match="'x' loses a parameter's gradient"):
        run(model, coin)


@pytest.mark.parametrize("site", [bernoulli, normal, dist.Delta, lambda x: bernoulli(x).mask(torch.tensor(True))])
@pytest.mark.parametrize("above", [bernoulli, normal], ids=["below a discrete site", "below a continuous site"])
def test_a_gradient_lost_in_the_guide_is_refused(site: Any, above: Any) -> None:
    weight = torch.ones((), requires_grad=True)

    def guide() -> None:
        u = pyro.sample("u", above(torch.zeros(())))
        pyro.sample("w", site(Twice.apply(weight * (1 + u))))  # pyright: ignore[reportArgumentType]

    def model() -> None:
        u = pyro.sample("u", above(torch.zeros(())))
        w = pyro.sample("w", normal(torch.zeros(())) if site is dist.Delta else site(torch.zeros(())))
        pyro.sample("x", normal(u + w), obs=torch.zeros(()))

    with pytest.raises(ValueError, match="'w' loses a parameter's gradient"):
        run(model, guide)


def test_every_model_of_an_elbo_is_checked() -> None:
    weight = torch.ones((), requires_grad=True)
    elbo = arsm.pyro.ELBO(arsm.RLOO(3))

    def model() -> None:
        pyro.sample("x", normal(Twice.apply(weight * coin())), obs=torch.zeros(()))  # pyright: ignore[reportArgumentType]

    elbo.loss_and_grads(coin, coin)
    with pytest.raises(ValueError, match="'x' loses a parameter's gradient"):
        elbo.loss_and_grads(model, coin)


def test_samples_that_meet_in_a_mean_are_refused() -> None:
    """The mean over copies of one path is that of the path."""

    def guide() -> Tensor:
        with pyro.plate("rows", 3):
            return pyro.sample("z", bernoulli(torch.zeros(3)))

    def model(dims: tuple[int, ...]) -> None:
        z = guide()
        with pyro.plate("again", 3):
            pyro.sample("x", normal(z - z.mean(dims, keepdim=True)), obs=torch.zeros(3))

    run(lambda: model((-1,)), guide, arsm.LocalExpectation())
    with pytest.raises(ValueError, match="'x' has other log probabilities in a plate than alone"):
        run(lambda: model(()), guide, arsm.LocalExpectation())


def test_samples_that_meet_in_an_index_are_refused() -> None:
    """`[..., z]` pairs every sample of the array with every sample of z; on copies of one path all pairs are equal."""
    z = torch.zeros(5, 3)

    def guide() -> None:
        pyro.sample("centres", normal(torch.zeros(3)).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("z", categorical(z))

    def model(indexed: Callable[[Any], Any]) -> None:
        centres = pyro.sample("centres", normal(torch.zeros(3)).to_event(1))
        with pyro.plate("data", 5):
            chosen = indexed(centres)[..., pyro.sample("z", categorical(z))]
            pyro.sample("x", normal(chosen), obs=torch.zeros(5))

    run(lambda: model(Vindex), guide)
    with pytest.raises(ValueError, match="'x' has other log probabilities in a plate than alone"):
        run(lambda: model(lambda centres: centres), guide)


def test_a_model_that_fails_in_a_plate_says_what_to_change() -> None:
    def branching() -> None:
        pyro.sample("x", normal(torch.ones(()) if coin() else -torch.ones(())), obs=torch.zeros(()))

    with pytest.raises(ValueError, match=r"with a plate around it \(Boolean value of Tensor"):
        run(branching, coin)


def test_sites_that_come_and_go_are_refused() -> None:
    def model() -> None:
        z = coin()
        if z.ndim == 0:
            pyro.sample("first", normal(z), obs=torch.zeros(()))
        pyro.sample("x", normal(z), obs=torch.zeros(()))

    torch.manual_seed(1)
    with pytest.raises(ValueError, match="Site 'first' exists for some samples only"):
        run(model, coin, arsm.RLOO(8))


def test_a_dependence_that_pyro_lost_is_found() -> None:
    def model() -> None:
        z = torch.from_numpy(coin().detach().numpy())
        pyro.sample("x", normal(z), obs=torch.zeros(()))

    with pytest.raises(ValueError, match="provenance tracking finds no way"):
        run(model, coin, arsm.LocalExpectation())


def test_an_impossible_sample_is_refused() -> None:
    def model() -> None:
        z = pyro.sample("z", categorical(torch.zeros(2)))
        pyro.sample("x", bernoulli(torch.where(z == 0, -torch.inf, 0.0)), obs=torch.ones(()))

    with pytest.raises(arsm.NotFiniteError, match="a sample of 'z'"):
        run(model, lambda: pyro.sample("z", categorical(torch.zeros(2))), arsm.LocalExpectation())


# ---------------------------------------------------------------- published numbers

RESULTS = Path(__file__).parent.parent / "results" / "pyro"
SAME_IMAGES = "the running average with 8 particles, same images in every step"


def test_the_page_quotes_its_table() -> None:
    with (RESULTS / "table.csv").open() as file:
        found = {(row["row"], row["metric"]): float(row["mean"]) for row in csv.DictReader(file)}
    quoted = 0
    for line in (RESULTS / "README.md").read_text().splitlines():
        label, *cells = (cell.strip(" *`").replace(",", "") for cell in line.strip("|").split("|"))
        if len(cells) != 5 or not cells[0][:1].isdigit():
            continue
        words = line.split("|")[1].strip()
        method = f"arsm.pyro.ELBO, {words.strip('`')}" if words.startswith("`") else words
        method = (
            "TraceGraph_ELBO, running average, 8 particles, same images in every step"
            if words == SAME_IMAGES
            else method
        )
        for cell, steps, part in zip(cells[1:], (0, 0, 550, 550), ("", ", guide") * 2, strict=True):
            value = found[f"Pyro VAE, K = 8, {steps} steps: {method}", "variance x time / best of Pyro's" + part]
            assert float(cell) == pytest.approx(value, rel=0.051), f"{label}, {steps} steps{part}: {value:.3g}"
            quoted += 1
    assert quoted == 4 * 16
