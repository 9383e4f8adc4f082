"""Programs that `arsm.pyro.ELBO` refuses, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm

pytest.importorskip("pyro", reason="pyro-ppl is not installed; pip install 'arsm[pyro]'")

import pyro
from pyro import distributions as dist
from pyro.distributions.testing.rejection_gamma import RejectionStandardGamma
from pyro.ops.indexing import Vindex

import arsm.pyro
from tests.pyro_problems import bernoulli, categorical, coin, normal


def run(
    model: Callable[[], Any], guide: Callable[[], Any], estimator: arsm.Estimator | None = None
) -> Tensor:
    loss = arsm.pyro.ELBO(estimator or arsm.RLOO(3), vectorize_particles=True)
    return loss.differentiable_loss(model, guide)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (dist.Poisson(torch.tensor(2.0)), "'z' is Poisson"),
        (dist.Geometric(torch.tensor(0.2)), "'z' is Geometric"),
        (
            RejectionStandardGamma(torch.tensor(2.0)),
            "'z' is RejectionStandardGamma, which is reparameterised in part",
        ),
        (
            dist.OneHotCategoricalStraightThrough(torch.ones(3)),
            "'z' is OneHotCategoricalStraightThrough",
        ),
        (
            dist.RelaxedBernoulliStraightThrough(torch.tensor(1.0), torch.tensor(0.5)),
            "StraightThrough",
        ),
    ],
)
def test_other_distributions_are_refused_by_name(fn: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(lambda: pyro.sample("z", fn), lambda: pyro.sample("z", fn))


def test_a_misspelt_option_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r'arsm.pyro.ELBO has no .* did you mean "num_particles"'):
        arsm.pyro.ELBO(num_particle_s=8)  # pyright: ignore[reportCallIssue]


def test_an_option_without_its_name_is_refused() -> None:
    with pytest.raises(TypeError, match="takes estimator and max_rows by position, but got 3"):
        arsm.pyro.ELBO(arsm.RLOO(8), 1024, 4)  # pyright: ignore[reportCallIssue]


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
        pyro.sample(
            "x",
            normal(heads() + torch.nn.functional.dropout(torch.ones(99)).mean()),
            obs=torch.zeros(()),
        )

    for model in (summing, noisy):
        with pytest.raises(
            ValueError, match="'x' has other log probabilities in a plate than alone"
        ):
            run(model, heads)


@pytest.mark.parametrize("site", [normal, bernoulli])
def test_a_site_whose_samples_would_spread_over_a_plate_is_refused(
    site: Callable[[Tensor], Any],
) -> None:
    """As many rows as queries: the paths of a site outside the plate would broadcast to the plate's
    rows.
    """

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

    with pytest.raises(
        ValueError, match="'x' loses a parameter's gradient under Pyro's provenance tracking"
    ):
        run(model, coin, estimator)


def test_a_gradient_lost_beside_one_that_is_kept_is_refused() -> None:
    weight = torch.ones((), requires_grad=True)

    def model() -> None:
        h = weight * (1 + coin())
        pyro.sample("x", normal(h + Twice.apply(h)), obs=torch.zeros(()))  # pyright: ignore

    with pytest.raises(ValueError, match="'x' loses a parameter's gradient"):
        run(model, coin)


@pytest.mark.parametrize(
    "site", [bernoulli, normal, dist.Delta, lambda x: bernoulli(x).mask(torch.tensor(True))]
)
@pytest.mark.parametrize(
    "above", [bernoulli, normal], ids=["below a discrete site", "below a continuous site"]
)
def test_a_gradient_lost_in_the_guide_is_refused(site: Any, above: Any) -> None:
    weight = torch.ones((), requires_grad=True)

    def guide() -> None:
        u = pyro.sample("u", above(torch.zeros(())))
        pyro.sample("w", site(Twice.apply(weight * (1 + u))))  # pyright: ignore[reportArgumentType]

    def model() -> None:
        u = pyro.sample("u", above(torch.zeros(())))
        w = pyro.sample(
            "w", normal(torch.zeros(())) if site is dist.Delta else site(torch.zeros(()))
        )
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
    """`[..., z]` pairs every sample of the array with every sample of z; on copies of one path all
    pairs are equal.
    """
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
