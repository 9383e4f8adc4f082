"""Programs that Pyro's own ELBOs run: `arsm.pyro.ELBO` runs them, or says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from tests.statistics import deviations

pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")

import pyro
from pyro import distributions as dist
from pyro.ops.indexing import Vindex

import arsm.pyro
from arsm.pyro.stages import pose_stages
from arsm.pyro.true_path import TruePath
from tests.pyro_problems import bernoulli, categorical, coin, normal


def fresh_leaf() -> None:
    """Makes a tensor that requires a gradient, in every run again."""
    logit = torch.tensor(0.3, requires_grad=True)
    rows = pyro.plate("rows", 6, 3, dim=-1)
    columns = pyro.plate("columns", 5, 2, dim=-2)
    with rows:
        pyro.sample("x", bernoulli(logit))
    with columns:
        pyro.sample("y", bernoulli(logit))
    with rows, columns:
        pyro.sample("z", bernoulli(logit))


def without_size() -> None:
    with pyro.plate("rows"):
        z = pyro.sample("z", bernoulli(torch.zeros(4)))
        pyro.factor("f", z, has_rsample=True)


@pytest.mark.parametrize("program", [fresh_leaf, without_size])
def test_a_correct_program_runs_without_a_warning(program: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = arsm.pyro.ELBO(arsm.RLOO(3)).loss_and_grads(program, program)
    assert loss == pytest.approx(0, abs=1e-5)


def test_an_ordered_logistic_credits_its_predictor() -> None:
    logit = torch.zeros(4, requires_grad=True)

    def guide() -> Tensor:
        with pyro.plate("rows", 4):
            return pyro.sample("z", bernoulli(logit))

    def model() -> None:
        with pyro.plate("rows", 4):
            z = pyro.sample("z", bernoulli(torch.zeros(4)))
            levels = dist.OrderedLogistic(3 * z, torch.tensor([-1.0, 1.0, 2.0]))
            pyro.sample("x", levels, obs=torch.tensor([0, 1, 2, 3]))

    arsm.pyro.ELBO(arsm.LocalExpectation()).loss_and_grads(model, guide)
    assert logit.grad is not None
    levels = dist.OrderedLogistic(torch.tensor([[0.0], [3.0]]), torch.tensor([-1.0, 1.0, 2.0]))
    low, high = levels.log_prob(torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(logit.grad, -(high - low) / 4)


@pytest.mark.parametrize("reparameterised", [True, False])
def test_a_factor_in_the_guide_is_part_of_ln_q(reparameterised: bool) -> None:
    """-ELBO = E[h] of the factor h, here 2 w z; or the score of a density that h stands for."""
    replicas = 4000
    logit = torch.full((replicas,), 0.4, dtype=torch.float64, requires_grad=True)
    w = torch.full((replicas,), 0.7, dtype=torch.float64, requires_grad=True)

    def guide() -> None:
        with pyro.plate("replicas", replicas):
            z = pyro.sample("z", bernoulli(logit))
            pyro.factor("h", 2 * w * z, has_rsample=reparameterised)

    def model() -> None:
        with pyro.plate("replicas", replicas):
            pyro.sample("z", bernoulli(logit.detach()))

    loss = arsm.pyro.ELBO(arsm.RLOO(3)).differentiable_loss(model, guide)
    of_logit, of_w = torch.autograd.grad(loss, [logit, w])
    p = logit[:1].detach().sigmoid()
    assert float(deviations(of_logit, (1.4 * p * (1 - p))[0]).max()) <= 1
    # the score: E[h dh/dw] = 4 w p
    truth = 2 * p if reparameterised else 4 * 0.7 * p
    assert float(deviations(of_w, truth[0]).max()) <= 1


def test_a_factor_must_say_whether_it_is_reparameterised() -> None:
    with pytest.raises(ValueError, match="'h' is a factor without has_rsample"):
        arsm.pyro.ELBO(arsm.RLOO(3)).loss(coin, lambda: pyro.factor("h", coin()))


def test_a_guide_without_discrete_sites_is_warned_of() -> None:
    def model() -> None:
        pyro.sample("x", normal(torch.zeros(())), obs=torch.ones(()))

    with pytest.warns(UserWarning, match="nothing to estimate"):
        arsm.pyro.ELBO(arsm.RLOO(3)).loss_and_grads(model, lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = arsm.pyro.ELBO(arsm.RLOO(3), strict_enumeration_warning=False)
        quiet.loss_and_grads(model, lambda: None)


def test_a_batch_without_a_plate_is_refused() -> None:
    def program() -> None:
        pyro.sample("z", bernoulli(torch.zeros(3)))

    with pytest.raises(ValueError, match="invalid log_prob shape"):
        arsm.pyro.ELBO(arsm.RLOO(3)).loss_and_grads(program, program)


def mixture(index: Callable[[Tensor, Tensor], Tensor], logits: Tensor) -> tuple[Any, Any]:
    """A textbook mixture: three centres in a plate, one of them for each row."""
    data = torch.tensor([-2.0, 0.1, 0.2, 1.9, 2.3])

    def model() -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("centres", 3):
            loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 3.0))
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("x", normal(index(loc, z)), obs=data)

    def guide() -> None:
        pyro.sample("weights", dist.Delta(torch.tensor([0.2, 0.3, 0.5]), event_dim=1))
        with pyro.plate("centres", 3):
            pyro.sample("loc", dist.Delta(torch.tensor([-2.0, 0.0, 2.0])))
        with pyro.plate("data", 5):
            pyro.sample("z", categorical(logits))

    return model, guide


INDEXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loc[z]": lambda loc, z: loc[z],
    "Vindex(loc)[..., z]": lambda loc, z: Vindex(loc)[..., z],
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_a_mixture_that_does_not_fit_in_a_plate_runs_sample_by_sample(
    index: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Local expectation is exact here, however the samples run."""
    found = []
    for chosen in (index, lambda loc, z: Vindex(loc.unsqueeze(-2))[..., z]):
        logits = torch.zeros(5, 3, requires_grad=True)
        loss = arsm.pyro.ELBO(arsm.LocalExpectation())
        if chosen is index:
            with pytest.warns(UserWarning, match="sample by sample"):
                loss.loss_and_grads(*mixture(chosen, logits))
        else:
            loss.loss_and_grads(*mixture(chosen, logits))
        found.append(logits.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("max_rows", [None, 10])
def test_a_known_structure_gives_the_same_gradient(max_rows: int | None) -> None:
    """The second step without validation runs the model once, and untracked."""
    logits = torch.randn(5, 3, requires_grad=True)
    programs = mixture(lambda loc, z: Vindex(loc.unsqueeze(-2))[..., z], logits)
    loss = arsm.pyro.ELBO(arsm.LocalExpectation(), max_rows)
    found = []
    with pyro.validation_enabled(False):
        for _ in range(2):
            (gradient,) = torch.autograd.grad(loss.differentiable_loss(*programs), [logits])
            found.append(gradient)
    torch.testing.assert_close(*found)


def test_a_structure_that_changes_is_found_again() -> None:
    logits = torch.zeros(3, requires_grad=True)
    loss = arsm.pyro.ELBO(arsm.LocalExpectation())

    def guide(more: bool) -> None:
        pyro.sample("z", categorical(logits))

    def model(more: bool) -> None:
        z = pyro.sample("z", categorical(torch.zeros(3)))
        if more:
            pyro.sample("x", normal(z * 1.0), obs=torch.zeros(()))

    with pyro.validation_enabled(False):
        loss.loss_and_grads(model, guide, False)
        loss.loss_and_grads(model, guide, True)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([-5.0, -2.0, 7.0]) / 18)


def test_pyros_own_arguments() -> None:
    logits = torch.zeros(3, requires_grad=True)

    def guide() -> None:
        pyro.sample("z", categorical(logits))

    def model() -> None:
        z = pyro.sample("z", categorical(torch.zeros(3)))
        pyro.sample("x", normal(z * 1.0), obs=torch.zeros(()))

    assert arsm.pyro.ELBO(num_particles=6).estimator == arsm.RLOO(6)
    with pytest.raises(ValueError, match="num_particles of at least 2"):
        arsm.pyro.ELBO()
    for vectorize in (True, False, None):
        loss = arsm.pyro.ELBO(
            arsm.LocalExpectation(),
            num_particles=2,
            vectorize_particles=vectorize,
            max_plate_nesting=2,
            retain_graph=True,
        )
        (gradient,) = torch.autograd.grad(loss.differentiable_loss(model, guide), [logits])
        torch.testing.assert_close(gradient, torch.tensor([-5.0, -2.0, 7.0]) / 18)


@pytest.mark.parametrize(
    ("estimator", "questions"), [(arsm.RLOO(4), 1), (arsm.RLOO(4, surrogate="logits"), 3)]
)
def test_the_sites_of_a_chain_share_a_question(estimator: arsm.RLOO, questions: int) -> None:
    """Unless a row takes its baseline from the others: those of another stage share its samples."""

    def chain() -> None:
        z = torch.zeros(5)
        with pyro.plate("rows", 5):
            for t in range(3):
                z = pyro.sample(f"z_{t}", bernoulli(z - 0.5))

    stages = pose_stages(estimator, TruePath(chain, chain, (), {}).stages())
    assert len(stages) == 3
    assert len({id(stage.posed) for stage in stages}) == questions
    for stage in stages:
        assert stage.points.shape == (4, 5, 1)
        torch.testing.assert_close(stage.points[0], stage.z)
