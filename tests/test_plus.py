"""ARS+, ARSM+ and UGC: by hand, against quadrature, and their variance beside that of what they
improve.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import arsm
from arsm.estimators.ars_plus import reference_weight
from arsm.references import ReferenceNoise
from tests.by_definition import pseudo_actions
from tests.by_hand import assert_equal, normal


def gradient(estimator: arsm.Estimator, logits: Tensor, f, noise=None, seed: int = 0) -> Tensor:
    out = arsm.estimate(
        estimator,
        logits,
        f,
        noise=noise,
        generator=torch.Generator().manual_seed(seed),
        max_rows=None,
    )
    assert out.grad is not None
    return out.grad


def table(values: Tensor):
    """f of one variable."""
    return lambda z: values[z[:, 0]]


def trace(estimator: arsm.Estimator, logits: Tensor, f, draws: int = 5_000) -> float:
    """The trace of the variance at logits [K, C]."""
    return float(gradient(estimator, logits.expand(draws, *logits.shape), f).var(0).sum())


# ---------------------------------------------------------------- ARS+ and ARSM+


def test_one_interval_by_hand() -> None:
    """Three equal logits, pi = (0.2, 0.3, 0.5), reference 2: nobody but category 2 loses to
    category 0.

    z = 0. With pi_2 and pi_0 swapped 2 wins with 0.2 as long as pi_1 is above 0.2: whatever pi_2
    is, 2's number is pi_0 there, and category 0, which has pi_2, wins iff pi_2 is below both: pi_2
    < 0.2. So pi_2 lies above all thresholds: odds of 0.2 / 0.5 given the ratios of the others, l =
    2/7, u = 1, and the weight 2 (5/7 - 1) = -4/7.
    """
    logits, log_pi = (
        torch.zeros(1, 1, 3, dtype=torch.float64),
        torch.tensor([[[0.2, 0.3, 0.5]]], dtype=torch.float64).log(),
    )
    pseudo = torch.tensor([[[[2, 0, 0]]]])  # z^{0<->2}, z^{1<->2}, z
    weight = reference_weight(logits, log_pi, torch.tensor([[[2]]]), pseudo)
    torch.testing.assert_close(
        weight, torch.tensor([[[-4 / 7]]], dtype=torch.float64), rtol=1e-9, atol=0
    )
    f = torch.tensor([1.0, 5.0, -2.0], dtype=torch.float64)
    found = gradient(arsm.ARSPlus(), logits, table(f), ReferenceNoise(log_pi, torch.tensor([[2]])))
    torch.testing.assert_close(
        found[0, 0], -4 / 7 * (torch.tensor([-2.0, 1.0, 1.0]).double() - 0), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("categories", [2, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_the_weight_is_the_conditional_mean(categories: int, masked: bool) -> None:
    """Integrate over pi_j ~ Beta(1, C - 1) at fixed ratios: the mean of 1 - C pi_j given equal
    pseudo actions.
    """
    points = 5_000
    for seed in range(6):
        logits = 1.5 * normal(seed, 1, categories)
        if masked and categories > 2:
            logits[0, seed % categories] = -torch.inf
        j = seed // 2 % categories
        ratios = arsm.extend.dirichlet(logits[:, 1:], torch.Generator().manual_seed(seed)).exp()[0]
        # the quantiles of Beta(1, C - 1), all equally likely
        pi_j = 1 - (1 - (torch.arange(points).double() + 0.5) / points) ** (1 / (categories - 1))
        others = (1 - pi_j).unsqueeze(-1) * ratios
        log_pi = (
            torch.cat([others[:, :j], pi_j.unsqueeze(-1), others[:, j:]], -1).log().unsqueeze(1)
        )
        rows = logits.expand(points, 1, categories)
        pseudo = pseudo_actions(rows, log_pi)[..., j].unsqueeze(1)  # [N, 1, 1, C]
        found = reference_weight(rows, log_pi, torch.full((points, 1, 1), j), pseudo).flatten()
        kinds, kind = pseudo.flatten(1).unique(dim=0, return_inverse=True)
        for number, actions in enumerate(kinds):
            of_kind = kind == number
            expected = (1 - categories * pi_j[of_kind]).mean() * (len(actions.unique()) > 1)
            assert float((found[of_kind] - expected).abs().max()) < 5 * categories / (
                points * of_kind.double().mean()
            )


def test_at_two_categories_both_are_disarm() -> None:
    """The same numbers where the pair is the same: u = pi_0 decides for the one, 1 - u for the
    other.
    """
    logits = normal(0, 5000, 3, 2)
    log_pi = arsm.extend.dirichlet(logits, torch.Generator().manual_seed(0))
    u = log_pi.exp()[..., :1]
    w = normal(1, 3, 2)

    def f(z: Tensor) -> Tensor:
        return torch.cos(w[torch.arange(3), z].sum(-1)) + 3

    disarm, z = arsm.DisARM(), arsm.extend.argmin_sample(logits, log_pi)
    noise = u.logit() if torch.equal(disarm.ask(logits, u.logit()).points[0], z) else -u.logit()
    assert torch.equal(disarm.ask(logits, noise).points[0], z)
    expected = gradient(disarm, logits, f, noise)
    torch.testing.assert_close(
        gradient(arsm.ARSMPlus(), logits, f, log_pi), expected, rtol=1e-6, atol=1e-9
    )
    references = torch.randint(2, (5000, 1), generator=torch.Generator().manual_seed(3)).expand(
        5000, 3
    )
    torch.testing.assert_close(
        gradient(arsm.ARSPlus(), logits, f, ReferenceNoise(log_pi, references)),
        expected,
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.parametrize(
    ("variables", "categories", "scale"), [(1, 4, 0.0), (1, 10, 1.0), (1, 6, 3.0), (4, 5, 1.0)]
)
def test_the_variance_is_lower(variables: int, categories: int, scale: float) -> None:
    """Of the same noise: at most 0.95 for ARS+, which a conditional expectation guarantees, and
    below 1 for ARSM+.
    """
    logits, w = scale * normal(5, variables, categories), normal(6, variables, categories)

    def f(z: Tensor) -> Tensor:
        return torch.sin(w[torch.arange(variables), z].sum(-1))

    assert trace(arsm.ARSPlus(), logits, f) < 0.95 * trace(arsm.ARS(), logits, f)
    assert trace(arsm.ARSMPlus(), logits, f) < 0.98 * trace(arsm.ARSM(), logits, f)


def test_agreeing_rows_get_nothing() -> None:
    """A certain variable has no gradient, whatever the other does."""
    logits = torch.tensor([[[40.0, 0.0, 0.0], [0.0, 0.0, 0.0]]], dtype=torch.float64).expand(
        50, 2, 3
    )
    for estimator in (arsm.ARSPlus(), arsm.ARSMPlus()):
        found = gradient(estimator, logits, lambda z: z.sum(-1).double())
        assert not found[:, 0].any()
        assert found[:, 1].any()


def test_arsm_plus_asks_for_what_arsm_asks_for() -> None:
    logits = normal(7, 30, 4, 5)
    noise = arsm.ARSM().noise(logits, torch.Generator().manual_seed(0))
    plus, plain = (
        arsm.estimate(e, logits, lambda z: z.sum(-1).double(), noise=noise)
        for e in (arsm.ARSMPlus(), arsm.ARSM())
    )
    assert torch.equal(plus.info["distinct"], plain.info["distinct"])
    assert arsm.ARSMPlus().most_queries(logits) == arsm.ARSM().most_queries(logits) == 11


# ---------------------------------------------------------------- UGC


# two of four in S
CERTAIN = torch.tensor([[4.0, 0.0], [-5.0, 0.0], [0.3, 0.0], [0.0, 1.0]], dtype=torch.float64)


def test_a_flip_by_hand() -> None:
    """One variable of probability 0.2: 1/2 is the threshold, so that every estimate is the exact
    gradient.
    """
    logits = torch.tensor([0.2, 0.8], dtype=torch.float64).log().expand(20, 1, 2)
    found = gradient(arsm.UGC(), logits, table(torch.tensor([3.0, 1.0], dtype=torch.float64)))
    assert_equal(
        found, 0.16 * 2 * torch.tensor([[1.0, -1.0]], dtype=torch.float64).expand(20, 1, 2)
    )


def test_certain_variables_are_flipped_one_at_a_time_and_the_others_are_disarm() -> None:
    logits = CERTAIN.expand(400, 4, 2)
    w = normal(2, 4, 2)

    def f(z: Tensor) -> Tensor:
        return torch.cos(w[torch.arange(4), z].sum(-1))

    estimator = arsm.UGC()
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))
    queries = estimator.ask(logits, noise)
    changed = queries.points[2] != queries.points[0]
    assert torch.equal(changed.sum(-1), torch.ones(400, dtype=torch.int64))
    assert not changed[:, 2:].any()
    assert changed[:, 0].any()
    assert changed[:, 1].any()
    found, pair = (
        gradient(estimator, logits, f, noise),
        gradient(arsm.DisARM(), logits, f, noise.pair),
    )
    assert_equal(found[:, 2:], pair[:, 2:])
    p = logits.softmax(-1)
    difference = (
        2 * p.prod(-1) * (f(queries.points[0]) - f(queries.points[2])).unsqueeze(-1) * changed
    )
    sign = 1 - 2 * queries.points[0]
    assert_equal(found[:, :2, 0], (sign * difference)[:, :2])
    assert_equal(found[..., 1], -found[..., 0])


def test_the_variance_is_below_disarms_where_f_is_a_sum() -> None:
    w = normal(3, 4, 2)

    def additive(z: Tensor) -> Tensor:
        return w[torch.arange(4), z].sum(-1)

    rows = CERTAIN.expand(20_000, 4, 2)
    ugc, disarm = (gradient(e, rows, additive).var(0).sum(-1) for e in (arsm.UGC(), arsm.DisARM()))
    assert bool((ugc[:2] < 0.9 * disarm[:2]).all())
    torch.testing.assert_close(ugc[2:], disarm[2:], rtol=0.1, atol=0)


def test_disarm_can_be_better() -> None:
    """Parity with a fair coin: antithetic pairs that differ in the first variable have equal
    parities.
    """
    logits = torch.tensor([[math.log(9), 0.0], [0.0, 0.0]], dtype=torch.float64).expand(1000, 2, 2)
    disarm, ugc = (
        gradient(e, logits, lambda z: z.sum(-1).double() % 2)[:, 0]
        for e in (arsm.DisARM(), arsm.UGC())
    )
    assert not disarm.any()
    assert float(ugc.var(0).sum()) > 1e-3


def test_impossible_flips_are_not_made() -> None:
    logits = torch.tensor(
        [[[0.0, -torch.inf], [3.0, 0.0], [0.1, 0.0]]], dtype=torch.float64
    ).expand(100, 3, 2)

    def f(z: Tensor) -> Tensor:
        assert not z[:, 0].any()
        return z.sum(-1).double()

    assert not gradient(arsm.UGC(), logits, f)[:, 0].any()


def test_other_categories_are_refused() -> None:
    with pytest.raises(ValueError, match="2 categories, but these have 3; DisARM takes any"):
        arsm.estimate(arsm.UGC(), torch.zeros(1, 2, 3), lambda z: z.sum(-1).float())
