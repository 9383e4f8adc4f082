"""Every estimator against enumeration on every problem that it fits, and proof that the test can
fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import arsm
from arsm.estimators import NAMES
from arsm.scores import score
from arsm.types import Queries
from tests.problems import PROBLEMS, Problem, enumerate_target
from tests.roster import ROSTER, Entry, expectation
from tests.statistics import COMPARISONS, SAMPLES, deviations


def estimates(estimator: arsm.Estimator, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Independent values [n, R] and gradients in logits [n, R, K, C] and theta [n, R, P]: the rows
    of one batch.
    """
    logits = problem.logits.repeat(SAMPLES, 1, 1, 1).requires_grad_()
    theta = problem.theta.repeat(SAMPLES, 1, 1).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    out = arsm.estimate(estimator, logits, problem.f, theta, generator=generator, max_rows=None)
    by_logits, by_theta = torch.autograd.grad(out.value.sum(), (logits, theta))
    return out.value.detach(), by_logits, by_theta


def worst(
    estimator: arsm.Estimator,
    problem: Problem,
    target: Callable[[Tensor, Tensor], Tensor] = expectation,
) -> dict[str, float]:
    """The largest deviation of the value and of each gradient; above 1 is a rejection."""
    value, by_logits, by_theta = estimates(estimator, problem)
    truth = enumerate_target(problem, target)
    return {
        "value": float(deviations(value, truth.value).max()),
        "logits": float(deviations(by_logits, truth.logits).max()),
        "theta": float(deviations(by_theta, truth.theta).max()),
    }


def fitting(entry: Entry) -> list[Problem]:
    return [problem for problem in PROBLEMS if entry.fits(*problem.size)]


def claims_unbiased(entry: Entry) -> bool:
    return entry.make(*fitting(entry)[0].size).unbiased


UNBIASED = [entry for entry in ROSTER if claims_unbiased(entry)]
BIASED = [entry for entry in ROSTER if not claims_unbiased(entry)]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [pytest.param(e, p, id=f"{e.label}-{p.name}") for e in UNBIASED for p in fitting(e)],
)
def test_unbiased_estimators_agree_with_enumeration(entry: Entry, problem: Problem) -> None:
    deviation = worst(entry.make(*problem.size), problem, entry.target)
    assert max(deviation.values()) <= 1, deviation


@pytest.mark.parametrize("entry", BIASED, ids=lambda entry: entry.label)
def test_biased_estimators_are_rejected_somewhere(entry: Entry) -> None:
    found = {p.name: worst(entry.make(*p.size), p, entry.target)["logits"] for p in fitting(entry)}
    assert max(found.values()) > 1, found


def test_the_roster_has_every_name() -> None:
    kinds = {type(entry.make(*fitting(entry)[0].size)) for entry in ROSTER}
    assert not {name for name, kind in NAMES.items() if kind not in kinds}


def test_every_label_is_used_once() -> None:
    labels = [entry.label for entry in ROSTER]
    assert len(labels) == len(set(labels))


def test_the_suite_makes_no_more_comparisons_than_it_corrects_for() -> None:
    components = sum(
        problem.logits.numel() + problem.theta.numel() + len(problem.logits)
        for e in UNBIASED
        for problem in fitting(e)
    )
    assert components <= COMPARISONS


# ---------------------------------------------------------------- what must be caught


@dataclass(frozen=True)
class HeavyARSM(arsm.ARSM):
    """ARSM whose weight is 5% too large."""

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        return 1.05 * super().tell(logits, queries, values)


@dataclass(frozen=True)
class OwnSampleRLOO(arsm.RLOO):
    """RLOO whose baseline is the mean of all samples, its own among them."""

    paths = 0  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        centred = values - values.mean(0)
        x = score(
            logits.unsqueeze(-3).expand((*logits.shape[:-2], self.samples, *logits.shape[-2:])),
            queries.z,
        )
        return torch.einsum("n...,...nkc->...kc", centred / self.samples, x)


@dataclass(frozen=True)
class LightValue(arsm.Estimator):
    """REINFORCE that takes 95% of f at the true sample for its value."""

    unbiased = True
    inner: ClassVar[arsm.Reinforce] = arsm.Reinforce()

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> arsm.extend.SampleNoise:
        return self.inner.noise(logits, generator, z)

    def ask(self, logits: Tensor, noise: arsm.extend.SampleNoise) -> Queries:
        queries = self.inner.ask(logits, noise)
        return Queries(queries.points, queries.z, queries.same_as, 0.95 * queries.weight)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor | None:
        return self.inner.tell(logits, queries, values)


@pytest.mark.parametrize(
    ("estimator", "wrong"),
    [(HeavyARSM(), {"logits"}), (OwnSampleRLOO(), {"logits"}), (LightValue(), {"value", "theta"})],
    ids=lambda x: type(x).__name__,
)
def test_deliberate_bias_is_caught(estimator: arsm.Estimator, wrong: set[str]) -> None:
    rejected = {
        name for p in PROBLEMS for name, deviation in worst(estimator, p).items() if deviation > 1
    }
    assert rejected == wrong
