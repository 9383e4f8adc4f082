"""Relaxing estimators against their formulas under fixed noise, and the noise of Gumbel-Rao given
the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import arsm
from arsm.draws import SampleNoise
from arsm.estimators.gumbel_rao import RaoNoise
from arsm.noise import argmin_sample, dirichlet
from arsm.relaxations import conditional_perturbed
from arsm.types import Noise
from tests.by_hand import given, normal
from tests.problems import extreme_logits
from tests.statistics import CRITICAL, FALSE_ALARM

K, C = 3, 4
WORDS = [
    "gumbel-softmax:temperature=0.7",
    "gumbel-softmax:temperature=0.7,hard=True",
    "straight-through",
    "gumbel-rao:temperature=0.7,samples=3",
    "gapped-straight-through:temperature=0.7,gap=0.8",
    "reinmax:temperature=1.3",
    "reinmax-rao:temperature=0.7,samples=3",
]


def f(z: Tensor, theta: Tensor) -> Tensor:
    """Smooth, and no sum of one term per variable."""
    x = (z.flatten(1) * theta).sum(-1)
    return x.sin() + 0.5 * x.square()


def gradient(words: str, logits: Tensor, theta: Tensor, noise: Noise) -> Tensor:
    logits = logits.clone().requires_grad_()
    value = arsm.estimate(arsm.estimator(words), logits, f, theta, noise=noise).value
    return torch.autograd.grad(value.sum(), logits)[0]


def map_noise(function: Callable[[Tensor], Tensor], noise: Noise) -> Noise:
    return type(noise)(*map(function, noise)) if isinstance(noise, tuple) else function(noise)


# ---------------------------------------------------------------- one variable's Jacobian dz/dphi,
# as each paper has it


def softmax_jacobian(s: Tensor) -> Tensor:
    return torch.diag(s) - torch.outer(s, s)


def gumbels(log_pi: Tensor) -> Tensor:
    """-ln E with E = pi times any sum: what the sum is must not matter."""
    return -torch.log(log_pi.exp() * 7.3)


def hard_gumbel_softmax(phi: Tensor, z: int, log_pi: Tensor, _: Tensor) -> Tensor:
    return softmax_jacobian(((phi + gumbels(log_pi)) / 0.7).softmax(-1)) / 0.7


def straight_through(phi: Tensor, z: int, log_pi: Tensor, _: Tensor) -> Tensor:
    return softmax_jacobian(phi.softmax(-1))


def gumbel_rao(phi: Tensor, z: int, log_pi: Tensor, conditional: Tensor) -> Tensor:
    return mean_jacobian_given(z, phi.softmax(-1), conditional)


def reinmax_rao(phi: Tensor, z: int, log_pi: Tensor, conditional: Tensor) -> Tensor:
    p = phi.softmax(-1)
    midpoint = (torch.eye(C, dtype=phi.dtype)[z] + p) / 2
    return 2 * mean_jacobian_given(z, midpoint, conditional) - softmax_jacobian(p) / 2


def mean_jacobian_given(z: int, p: Tensor, conditional: Tensor) -> Tensor:
    """Of softmax_0.7 at ln p + Gumbel noise given that z wins, averaged over the draws [n, C]."""
    total = torch.zeros(C, C, dtype=p.dtype)
    for draw in conditional:
        # uniforms: the top Gumbel from v_z, the others truncated at it
        v = torch.exp(-draw.exp() * 2.1)
        zeta = torch.tensor(
            [
                -math.log(-math.log(v[z]))
                if i == z
                else -math.log(-math.log(v[i]) / p[i] - math.log(v[z]))
                for i in range(C)
            ]
        ).double()
        total += softmax_jacobian((zeta / 0.7).softmax(-1)) / 0.7
    return total / len(conditional)


def gapped(phi: Tensor, z: int, log_pi: Tensor, _: Tensor) -> Tensor:
    zeta = phi.clone()
    for i in range(C):
        if i == z:
            zeta[i] += phi.max() - phi[i]
        else:
            zeta[i] -= max(float(phi[i] + 0.8 - phi.max()), 0.0)
    return softmax_jacobian((zeta / 0.7).softmax(-1)) / 0.7


def reinmax(phi: Tensor, z: int, log_pi: Tensor, _: Tensor) -> Tensor:
    def surrogate(x: Tensor) -> Tensor:
        one_hot = torch.eye(C, dtype=x.dtype)[z]
        pi_0 = x.softmax(-1)
        pi_1 = ((one_hot + (x / 1.3).softmax(-1)) / 2).detach()
        pi_1 = (x + (pi_1.log() - x).detach()).softmax(-1)
        return 2 * pi_1 - pi_0 / 2

    jacobian = torch.autograd.functional.jacobian(surrogate, phi)
    assert isinstance(jacobian, Tensor)
    return jacobian.T


HARD: dict[str, Callable[[Tensor, int, Tensor, Tensor], Tensor]] = dict(
    zip(
        WORDS[1:],
        [hard_gumbel_softmax, straight_through, gumbel_rao, gapped, reinmax, reinmax_rao],
        strict=True,
    )
)


@pytest.mark.parametrize("words", HARD)
def test_a_hard_sample_forward_and_the_papers_jacobian_backward(words: str) -> None:
    logits, theta = normal(0, 5, K, C), normal(1, 5, K * C).requires_grad_()
    estimator = arsm.estimator(words)
    noise = estimator.noise(logits, torch.Generator().manual_seed(2))
    log_pi = noise if isinstance(noise, Tensor) else torch.empty(5, K, C)
    conditional = noise.conditional if isinstance(noise, RaoNoise) else torch.empty(5, 0, K, C)
    out = arsm.estimate(estimator, logits, f, theta, noise=noise)
    z = (
        (log_pi - logits).argmin(-1)
        if isinstance(noise, Tensor)
        else arsm.extend.samples(logits, SampleNoise(*noise[:2]))[:, 0]
    )
    hard = torch.eye(C, dtype=logits.dtype)[z].requires_grad_()
    value = f(hard, theta)
    slope, by_theta = torch.autograd.grad(value.sum(), (hard, theta))
    expected = torch.zeros_like(logits)
    for b in range(5):
        for k in range(K):
            jacobian = HARD[words](logits[b, k], int(z[b, k]), log_pi[b, k], conditional[b, :, k])
            expected[b, k] = jacobian @ slope[b, k]
    assert torch.equal(out.z, z)
    torch.testing.assert_close(out.value, value)
    assert out.grad is None
    assert out.estimator_loss is None
    torch.testing.assert_close(gradient(words, logits, theta.detach(), noise), expected)
    torch.testing.assert_close(torch.autograd.grad(out.value.sum(), theta)[0], by_theta)


def test_a_soft_sample_forward_and_backward() -> None:
    logits, theta = normal(0, 5, K, C).requires_grad_(), normal(1, 5, K * C)
    estimator = arsm.estimator(WORDS[0])
    log_pi = dirichlet(logits, torch.Generator().manual_seed(2))
    out = arsm.estimate(estimator, logits, f, theta, noise=log_pi)
    value = f(((logits + gumbels(log_pi)) / 0.7).softmax(-1), theta)
    torch.testing.assert_close(out.value, value)
    torch.testing.assert_close(
        torch.autograd.grad(out.value.sum(), logits)[0], torch.autograd.grad(value.sum(), logits)[0]
    )


def test_the_soft_sample_leans_to_the_hard_one() -> None:
    logits = 3 * normal(0, 2000, K, C).float()
    noise = dirichlet(logits, torch.Generator().manual_seed(1))
    queries = arsm.GumbelSoftmax(0.3).ask(logits, noise)
    assert torch.equal(queries.points[0].argmax(-1), queries.z)


# ---------------------------------------------------------------- where straight-through and
# ReinMax are exact


def mean_gradient(words: str, phi: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """The expectation over z of an estimate that depends on the noise through z alone; one
    variable, phi [C].
    """
    p, total = phi.softmax(-1), torch.zeros_like(phi)
    for z in range(C):
        logits = phi.clone().requires_grad_()
        value = arsm.estimate(
            arsm.estimator(words), logits, f, noise=given(torch.tensor([[z]]))
        ).value
        total += p[z] * torch.autograd.grad(value, logits)[0]
    return total


@pytest.mark.parametrize(("words", "degree"), [("straight-through", 1), ("reinmax", 2)])
def test_exact_for_polynomials_of_low_degree(words: str, degree: int) -> None:
    phi, theta, curvature = normal(0, C), normal(1, C), normal(2, C, C)

    def polynomial(degree: int) -> Callable[[Tensor], Tensor]:
        def f(z: Tensor) -> Tensor:
            x = arsm.one_hot(z, C, torch.float64).flatten(1)
            terms = [
                (x * theta).sum(-1),
                torch.einsum("ni,ij,nj->n", x, curvature, x),
                (x @ curvature).pow(3).sum(-1),
            ]
            return torch.stack(terms[:degree]).sum(0)

        return f

    def error(degree: int) -> float:
        f = polynomial(degree)
        exact = arsm.estimate(arsm.estimator("exact"), phi, f).grad
        assert exact is not None
        return float((mean_gradient(words, phi, f) - exact).abs().max())

    assert error(degree) < 1e-12
    assert error(degree + 1) > 1e-2


# ---------------------------------------------------------------- the noise given the sample


def test_conditional_gumbels_have_the_right_winner_and_the_right_distribution() -> None:
    """A sample z, then noisy logits given z: their differences are logistic, as without the detour
    (Kolmogorov).
    """
    n, phi = 40_000, torch.tensor([0.5, -1.0, 0.0, 1.5], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    logits = phi.expand(n, 1, C)
    z = argmin_sample(logits, dirichlet(logits, generator))
    zeta = conditional_perturbed(logits, z, dirichlet(logits, generator))
    assert torch.equal(zeta.argmax(-1), z)
    pairs = [(i, j) for i in range(C) for j in range(i)]
    critical = math.sqrt(math.log(2 * len(pairs) / FALSE_ALARM) / 2)
    for i, j in pairs:
        cdf = torch.sigmoid((zeta[:, 0, i] - zeta[:, 0, j] - (phi[i] - phi[j])).sort().values)
        distance = (cdf - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
        assert distance * math.sqrt(n) < critical


def test_gumbel_rao_keeps_the_mean_and_lowers_the_variance() -> None:
    n = 1 << 15
    logits, theta = normal(0, 1, 2, C).expand(n, 2, C), normal(1, 1, 2 * C).expand(n, -1)
    samples = []
    for words in (
        "gumbel-softmax:temperature=0.5,hard=True",
        "gumbel-rao:temperature=0.5,samples=10",
    ):
        noise = arsm.estimator(words).noise(logits, torch.Generator().manual_seed(len(words)))
        samples.append(gradient(words, logits, theta, noise))
    plain, rao = samples
    error = (plain.mean(0) - rao.mean(0)).abs()
    assert (error <= CRITICAL * ((plain.var(0) + rao.var(0)) / n).sqrt()).all()
    assert rao.var(0).sum() < 0.8 * plain.var(0).sum()


def test_reinmax_rao_lowers_the_variance_of_reinmax() -> None:
    n = 1 << 13
    logits, theta = normal(0, 1, 2, C).expand(n, 2, C), normal(1, 1, 2 * C).expand(n, -1)
    variance = {}
    for words in ("reinmax", "reinmax-rao"):
        noise = arsm.estimator(words).noise(logits, torch.Generator().manual_seed(0))
        variance[words] = float(gradient(words, logits, theta, noise).var(0).sum())
    assert variance["reinmax-rao"] < 0.7 * variance["reinmax"]


def test_zgr_is_reinmax_at_temperature_1_sample_by_sample() -> None:
    """ZGR is the mean of straight-through's Jacobian and DARN's, (z - p) dln p(z)/dphi."""
    logits, theta = normal(0, 50, K, C).requires_grad_(), normal(1, 50, K * C)
    noise = arsm.ReinMax().noise(logits, torch.Generator().manual_seed(2))
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    z = arsm.one_hot(arsm.extend.samples(logits, noise)[:, 0], C, torch.float64)
    log_p_of_z = (z * log_p).sum(-1, keepdim=True)
    straight_through = p - p.detach()
    darn = (z - p.detach()) * (log_p_of_z - log_p_of_z.detach())
    value = f(z + (straight_through + darn) / 2, theta)
    zgr = torch.autograd.grad(value.sum(), logits)[0]
    torch.testing.assert_close(gradient("reinmax", logits.detach(), theta, noise), zgr)


def test_zgr_is_where_gumbel_rao_goes_as_its_temperature_falls() -> None:
    """So that the test above compares with the estimator of that name."""
    logits, theta = normal(0, 5, K, C), normal(1, 5, K * C)
    sample = arsm.ReinMax().noise(logits, torch.Generator().manual_seed(2))
    zgr = gradient("reinmax", logits, theta, sample)
    draws = dirichlet(logits, torch.Generator().manual_seed(3), 20_000)
    errors = [
        (
            gradient(
                f"gumbel-rao:temperature={temperature},samples=20000",
                logits,
                theta,
                RaoNoise(sample.uniform, sample.given, draws),
            )
            - zgr
        ).norm()
        / zgr.norm()
        for temperature in (1.0, 0.3, 0.1)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


# ---------------------------------------------------------------- numerical care


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "words",
    [
        "gumbel-softmax:temperature=0.05",
        "gumbel-softmax:temperature=0.05,hard=True",
        "straight-through",
        "gumbel-rao:temperature=0.05",
        "gapped-straight-through:temperature=0.05",
        "reinmax:temperature=0.05",
        "reinmax-rao:temperature=0.05",
    ],
)
def test_extreme_logits_masks_and_types(words: str, dtype: torch.dtype) -> None:
    logits = extreme_logits(dtype)
    theta = normal(0, 3, 6).to(dtype)
    seen = []

    def recorded(z: Tensor, theta: Tensor) -> Tensor:
        seen.append(z.detach())
        return f(z, theta)

    generator = torch.Generator().manual_seed(0)
    out = arsm.estimate(arsm.estimator(words), logits, recorded, theta, generator=generator)
    (gradient,) = torch.autograd.grad(out.value.sum(), logits)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()
    assert (gradient[logits.detach() == -torch.inf] == 0).all()
    assert gradient[2, 1].abs().max() > 0
    (points,) = seen
    assert points.dtype == dtype
    assert (points[logits.detach() == -torch.inf] == 0).all()


@pytest.mark.parametrize("words", WORDS)
def test_masking_a_category_is_leaving_it_out(words: str) -> None:
    logits, theta = normal(0, 6, 2, C), normal(1, 6, 2, C)
    masked = logits.clone()
    masked[..., 1] = -torch.inf
    kept = [0, 2, 3]
    noise = arsm.estimator(words).noise(logits, torch.Generator().manual_seed(2))
    left = map_noise(lambda x: x[..., kept] if x.shape[-1] == C else x, noise)
    whole = gradient(words, masked, theta.flatten(1), noise)
    part = gradient(words, logits[..., kept], theta[..., kept].flatten(1), left)
    torch.testing.assert_close(whole[..., kept], part)
    assert (whole[..., 1] == 0).all()


@pytest.mark.parametrize("words", WORDS)
def test_the_average_is_the_mean_of_its_draws(words: str) -> None:
    logits, theta = normal(0, 5, K, C), normal(1, 5, K * C)
    noise = arsm.estimator("3*" + words).noise(logits, torch.Generator().manual_seed(2))
    draws = [map_noise(lambda x, i=i: x[:, i], noise) for i in range(3)]
    mean = torch.stack([gradient(words, logits, theta, draw) for draw in draws]).mean(0)
    torch.testing.assert_close(gradient("3*" + words, logits, theta, noise), mean)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("gumbel-softmax:temperature=0", "temperature"),
        ("gumbel-rao:temperature=-1.0", "temperature"),
        ("gumbel-rao:samples=0", "samples"),
        ("gapped-straight-through:gap=-1.0", "gap"),
        ("gapped-straight-through:gap=1e999", "gap"),
        ("reinmax:temperature=0.0", "temperature"),
        ("reinmax-rao:temperature=0.0", "temperature"),
        ("reinmax-rao:samples=0", "samples"),
    ],
)
def test_impossible_options_are_refused(words: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        arsm.estimator(words)
