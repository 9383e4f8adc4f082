"""`arsm.pyro.ELBO` over whole runs: guides whose choices depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from tests.pyro_problems import (
    PROBLEMS,
    Parameters,
    Problem,
    bernoulli,
    categorical,
    exact,
    gradients,
    normal,
    pick,
    replicated,
    worst,
)
from tests.statistics import deviations

pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")

import pyro
from pyro import distributions as dist

import arsm.pyro
from arsm.pyro.true_path import TruePath
from arsm.pyro.whole_paths import DrawOnce, WholePaths, fits

CHAINS = [problem for problem in PROBLEMS if problem.name != "several sizes"]
"""The problems with more than one stage."""


@pytest.fixture(scope="module")
def truths() -> dict[str, Parameters]:
    return {problem.name: exact(problem)[1] for problem in CHAINS}


@pytest.fixture(autouse=True)
def _structure_is_known() -> Any:
    """Without validation, the second step has the structure of the first."""
    with pyro.validation_enabled(False):
        yield


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_choices_of_several_stages_take_whole_runs(problem: Problem) -> None:
    p = problem.parameters(1)
    path = TruePath(replicated(problem.model), replicated(problem.guide), (p,), {})
    assert fits(arsm.RLOO(3), path.structure) is (problem in CHAINS)
    assert not fits(arsm.RLOO(3, ridge=1.0), path.structure)


@pytest.mark.parametrize("estimator", [arsm.RLOO(3), arsm.Reinforce()], ids=repr)
@pytest.mark.parametrize("problem", CHAINS, ids=str)
def test_gradients_are_unbiased(problem: Problem, estimator: Any, truths: Any) -> None:
    assert worst(problem, estimator, truths[problem.name]) <= 1


def test_gradients_are_unbiased_in_parts(truths: Any) -> None:
    for problem in (CHAINS[0], CHAINS[3], CHAINS[7]):
        assert worst(problem, arsm.RLOO(3), truths[problem.name], max_rows=1) <= 1


# what is easily done wrong, and these tests see


def only_direct(self: Any, terms: Any, rows: Any, names: Any) -> Tensor:
    """A site is told of the first term that depends on it alone."""
    kept = {
        name: next(key for key in terms if name in self.structure.depends[key]) for name in names
    }
    few = {key: x for key, x in terms.items() if key in kept.values()}
    return CREDIT(self, few, rows, names)


def masked_scores(self: Any, guide: Any, model: Any, count: int) -> None:
    """A masked site has no score."""
    ADD(self, guide, model, count)
    for name in self.choices:
        self.scores[name][-1] = self.scores[name][-1] * (guide[name]["mask"] is None)


def draw_all_once(self: Any, msg: Any) -> None:
    """All runs share the choices as well."""
    self.names = self.names | {"a", "b", "c"}
    DRAW(self, msg)


CREDIT, ADD, DRAW = WholePaths._credit, WholePaths._add, DrawOnce._pyro_sample


@pytest.mark.parametrize(
    ("problem", "owner", "name", "wrong"),
    [
        ("a chain", WholePaths, "_credit", only_direct),
        ("masks", WholePaths, "_add", masked_scores),
        ("dependent sites", DrawOnce, "_pyro_sample", draw_all_once),
    ],
)
def test_a_wrong_credit_is_caught(
    problem: str, owner: Any, name: str, wrong: Any, truths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chosen,) = (each for each in CHAINS if each.name == problem)
    monkeypatch.setattr(owner, name, wrong)
    assert worst(chosen, arsm.RLOO(3), truths[problem]) > 1


# ---------------------------------------------------------------- one estimate by hand


def chain(p: Parameters, seen: list[Tensor]) -> tuple[Any, Any]:
    """Two steps, the second below the first; two sequences."""
    x = torch.tensor([0.5, -1.0], dtype=torch.float64)

    def guide() -> None:
        with pyro.plate("sequences", 2):
            a = pyro.sample("a", categorical(p["a"]))
            b = pyro.sample("b", categorical(p["b"][a]))
            seen[:] = [a, b]

    def model() -> None:
        with pyro.plate("sequences", 2):
            a = pyro.sample("a", categorical(torch.zeros(3).double()))
            b = pyro.sample("b", categorical(torch.zeros(3).double()))
            pyro.sample("x", normal(pick(p["mean"], a) * (1.0 + b)), obs=x)

    return model, guide


def test_one_estimate_equals_its_formula() -> None:
    """1/n sum_i (F_i - mean of the others) d ln q, and the mean over runs of the terms' own
    gradients.
    """
    torch.manual_seed(0)
    drawn = {"a": (2, 3), "b": (3, 3), "mean": (3,)}
    p = {
        k: torch.randn(*size, dtype=torch.float64, requires_grad=True) for k, size in drawn.items()
    }
    seen: list[Tensor] = []
    model, guide = chain(p, seen)
    elbo = arsm.pyro.ELBO(arsm.RLOO(4))
    elbo.differentiable_loss(model, guide)
    loss = elbo.differentiable_loss(model, guide)
    found = gradients(loss, p)
    a, b = seen
    assert a.shape == b.shape == (4, 2)
    x = torch.tensor([0.5, -1.0], dtype=torch.float64)
    q_a, q_b = p["a"].log_softmax(-1), p["b"].log_softmax(-1)[a]
    uniform = torch.tensor(3.0).double().log()
    kl_a = (q_a.exp() * (q_a + uniform)).sum(-1)
    kl_b = (q_b.exp() * (q_b + uniform)).sum(-1)
    likelihood = normal(p["mean"][a] * (1.0 + b)).log_prob(x)
    value = (likelihood - kl_a - kl_b).mean(0).sum()
    for log_q, total in (
        (pick(q_a, a), (likelihood - kl_b).detach()),
        (pick(q_b, b), likelihood.detach()),
    ):
        others = (total.sum(0) - total) / 3
        value = value + ((total - others) / 4 * (log_q - log_q.detach())).sum()
    torch.testing.assert_close(loss, -value)
    for ours, by_hand in zip(found, gradients(-value, p), strict=True):
        torch.testing.assert_close(ours, by_hand)


# ---------------------------------------------------------------- how often it runs


def long_chain(steps: int, runs: list[str]) -> tuple[Any, Any]:
    logits = torch.zeros(steps, 5, 3, requires_grad=True)

    def guide() -> None:
        runs.append("guide")
        with pyro.plate("rows", 5):
            z = torch.zeros(5)
            for t in range(steps):
                z = pyro.sample(f"z_{t}", categorical(logits[t] + z.unsqueeze(-1)))

    def model() -> None:
        runs.append("model")
        with pyro.plate("rows", 5):
            for t in range(steps):
                z = pyro.sample(f"z_{t}", categorical(torch.zeros(3)))
                pyro.sample(f"x_{t}", normal(z * 1.0), obs=torch.ones(5))

    return model, guide


def test_a_chain_runs_once_however_long_it_is() -> None:
    runs: list[str] = []
    model, guide = long_chain(6, runs)
    elbo = arsm.pyro.ELBO(arsm.RLOO(8))
    elbo.loss_and_grads(model, guide)
    runs.clear()
    elbo.loss_and_grads(model, guide)
    assert runs == ["guide", "model"]


def test_runs_share_what_no_choice_comes_before() -> None:
    """One draw of the continuous site for all runs, and one subsample."""
    seen: list[tuple[Any, Any]] = []

    def guide() -> None:
        u = pyro.sample("u", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("rows", 9, subsample_size=4) as i:
            a = pyro.sample("a", bernoulli(u))
            w = pyro.sample("w", dist.Normal(a, 1.0))
            pyro.sample("b", bernoulli(w))
        seen.append((u, i))

    def model() -> None:
        u = pyro.sample("u", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("rows", 9, subsample_size=4):
            a = pyro.sample("a", bernoulli(torch.zeros(4)))
            w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0))
            b = pyro.sample("b", bernoulli(torch.zeros(4)))
            pyro.sample("x", normal(u * a + w * b), obs=torch.ones(4))

    elbo = arsm.pyro.ELBO(arsm.RLOO(6), max_rows=8)
    elbo.loss_and_grads(model, guide)
    seen.clear()
    elbo.loss_and_grads(model, guide)
    assert len(seen) == 3
    assert len({float(x) for u, _ in seen for x in u.flatten()}) == 1
    assert len({tuple(i.tolist()) for _, i in seen}) == 1


def test_runs_one_after_the_other_are_unbiased(truths: Any) -> None:
    problem = CHAINS[0]
    p = problem.parameters(1 << 10)
    elbo = arsm.pyro.ELBO(arsm.RLOO(3), vectorize_particles=False)
    programs = replicated(problem.model), replicated(problem.guide)
    elbo.differentiable_loss(*programs, p)
    found = gradients(elbo.differentiable_loss(*programs, p), p)
    for name, gradient in zip(p, found, strict=True):
        assert float(deviations(gradient, truths[problem.name][name]).max()) <= 1


def test_a_program_that_changes_with_its_samples_is_refused() -> None:
    def guide() -> None:
        a = pyro.sample("a", bernoulli(torch.zeros(())))
        pyro.sample("b", bernoulli(a))

    def model() -> None:
        a = pyro.sample("a", bernoulli(torch.zeros(())))
        b = pyro.sample("b", bernoulli(torch.zeros(())))
        flips.append(None)
        kind = normal(a + b) if len(flips) % 2 else dist.Laplace(a + b, 1.0)
        pyro.sample("x", kind, obs=torch.ones(()))

    flips: list[None] = []
    elbo = arsm.pyro.ELBO(arsm.RLOO(3), vectorize_particles=True)
    with pytest.raises(ValueError, match="for some samples only"):
        elbo.loss_and_grads(model, guide)


def test_an_infinite_term_names_its_sites() -> None:
    def guide() -> None:
        a = pyro.sample("a", bernoulli(torch.full((20,), 0.0)).to_event(1))
        pyro.sample("b", bernoulli(a.sum(-1)))

    def model() -> None:
        a = pyro.sample("a", bernoulli(torch.zeros(20)).to_event(1))
        pyro.sample("b", bernoulli(torch.zeros(())))
        pyro.factor("x", torch.where(a.sum(-1) > 0, -torch.inf, 0.0))

    elbo = arsm.pyro.ELBO(arsm.RLOO(3), vectorize_particles=True)
    with pytest.raises(ValueError, match="infinite or NaN for a sample of 'a';"):
        elbo.loss_and_grads(model, guide)
