"""MuProp, REBAR and RELAX: their formulas under fixed noise, what their losses reach, and that
learning pays.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import arsm
from arsm.estimators.relax import MLPControl
from arsm.noise import dirichlet
from arsm.types import Noise
from tests.by_hand import noise_for, normal
from tests.problems import extreme_logits

B, K, C = 4, 2, 3
WORDS = ["muprop", "rebar:temperature=0.4,scale=0.8", "relax:temperature=0.4"]


def f(z: Tensor, theta: Tensor) -> Tensor:
    """Smooth, and no sum of one term per variable; z one-hot, relaxed or integer."""
    x = (arsm.one_hot(z, theta.shape[-1] // z.shape[1], theta.dtype).flatten(1) * theta).sum(-1)
    return x.sin() + 0.5 * x.square()


class Cubic(nn.Module):
    """A control variate with two parameters, for formulas and finite differences."""

    direction: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(-0.3, dtype=torch.float64))
        self.register_buffer("direction", normal(9, K, C))

    def forward(self, s: Tensor, p: Tensor) -> Tensor:
        x = (s * self.direction * (1 + p)).sum((-2, -1))
        return self.weight * x.pow(3) + (self.weight * x).sin() + self.bias


def setting() -> tuple[Tensor, Tensor, Tensor]:
    """logits [B, K, C], theta [B, K C], ln pi [B, K, C]."""
    logits = normal(0, B, K, C)
    return logits, normal(1, B, K * C), dirichlet(logits, torch.Generator().manual_seed(2))


def estimator(words: str) -> arsm.Estimator:
    """Float64, and with a control that is no constant."""
    made = (
        arsm.RELAX(Cubic(), temperature=0.4) if words.startswith("relax") else arsm.estimator(words)
    )
    made.learned.double()
    return made


def grad_of(made: arsm.Estimator, logits: Tensor, theta: Tensor, noise: Noise) -> Tensor:
    if isinstance(noise, Tensor) and noise.shape == logits.shape:
        noise = noise_for(made, logits, noise)
    grad = arsm.estimate(made, logits, f, theta, noise=noise).grad
    assert grad is not None
    return grad


def by_definition(
    logits: Tensor,
    log_pi: Tensor,
    f_at_z: Callable[[Tensor], Tensor],
    c: Callable[[Tensor], Tensor],
) -> Tensor:
    """[f(z) - c(zeta~)] dln q(z) + dc(zeta) - dc(zeta~), one row of logits [K, C], by autograd on
    both noises.

    The exponential clocks T = E / p give zeta = -ln T; given their first, z, they are T~_z = E~_z
    and T~_i = E~_i / p_i + E~_z, where tying the noises means E~_z = T_z and E~_i = p_i (T_i -
    T_z).
    """
    phi = logits.clone().requires_grad_()
    p, exponential = phi.softmax(-1), 1.7 * log_pi.exp()
    clocks = exponential / p
    z = clocks.argmin(-1)
    first = clocks.detach().gather(-1, z.unsqueeze(-1))
    again = torch.where(clocks == first, first, p.detach() * (clocks.detach() - first))
    tied = torch.stack(
        [
            torch.stack(
                [
                    again[k, i] if i == z[k] else again[k, i] / p[k, i] + first[k, 0]
                    for i in range(C)
                ]
            )
            for k in range(K)
        ]
    )
    torch.testing.assert_close(tied, clocks)
    log_q = torch.stack([p[k, z[k]].log() for k in range(K)]).sum()
    surrogate = (f_at_z(z) - c(-tied.log())).detach() * log_q + c(-clocks.log()) - c(-tied.log())
    return torch.autograd.grad(surrogate, phi)[0]


def test_muprop_is_its_formula() -> None:
    logits, theta, log_pi = setting()
    grad = grad_of(arsm.estimator("muprop"), logits, theta, log_pi)
    for b in range(B):
        p = logits[b].softmax(-1).requires_grad_()
        at_mean = f(p.unsqueeze(0), theta[b : b + 1])[0]
        (h,) = torch.autograd.grad(at_mean, p)
        z = torch.eye(C, dtype=p.dtype)[(log_pi[b] - logits[b]).argmin(-1)]
        p = p.detach()
        residual = (
            f(z.unsqueeze(0), theta[b : b + 1])[0]
            - at_mean
            - sum(h[k] @ (z[k] - p[k]) for k in range(K))
        )
        expected = torch.stack(
            [
                residual * (z[k] - p[k]) + (torch.diag(p[k]) - torch.outer(p[k], p[k])) @ h[k]
                for k in range(K)
            ]
        )
        torch.testing.assert_close(grad[b], expected.detach())


@pytest.mark.parametrize("words", WORDS[1:])
def test_rebar_and_relax_are_their_formula(words: str) -> None:
    logits, theta, log_pi = setting()
    made = estimator(words)
    grad = grad_of(made, logits, theta, log_pi)
    for b in range(B):

        def control(zeta: Tensor, b: int = b) -> Tensor:
            s = (zeta / 0.4).softmax(-1).unsqueeze(0)
            if isinstance(made, arsm.RELAX):
                return made.control(s, logits[b : b + 1].softmax(-1))[0]
            return 0.8 * f(s, theta[b : b + 1])[0]

        def sampled(z: Tensor, b: int = b) -> Tensor:
            return f(z.unsqueeze(0), theta[b : b + 1])[0]

        torch.testing.assert_close(grad[b], by_definition(logits[b], log_pi[b], sampled, control))


@pytest.mark.parametrize("words", WORDS)
def test_the_value_is_f_at_the_sample_with_its_own_gradient(words: str) -> None:
    logits, theta, log_pi = setting()
    theta.requires_grad_()
    made = estimator(words)
    out = arsm.estimate(made, logits, f, theta, noise=noise_for(made, logits, log_pi), max_rows=3)
    value = f((log_pi - logits).argmin(-1), theta)
    torch.testing.assert_close(out.value, value)
    torch.testing.assert_close(
        torch.autograd.grad(out.value.sum(), theta)[0], torch.autograd.grad(value.sum(), theta)[0]
    )


@pytest.mark.parametrize("words", WORDS)
def test_the_logits_get_the_estimate_and_nothing_else(words: str) -> None:
    logits, theta, log_pi = setting()
    logits.requires_grad_()
    made = estimator(words)
    out = arsm.estimate(made, logits, f, theta, noise=noise_for(made, logits, log_pi))
    assert out.grad is not None
    torch.testing.assert_close(
        torch.autograd.grad(out.value.sum(), logits)[0], out.grad, rtol=0, atol=0
    )


# ---------------------------------------------------------------- learned parts


def loss_of(made: arsm.Estimator, logits: Tensor, theta: Tensor, noise: Noise) -> Tensor:
    loss = arsm.estimate(made, logits, f, theta, noise=noise).estimator_loss
    assert loss is not None
    return loss


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("words", WORDS[1:])
def test_the_estimators_loss_has_the_slope_of_finite_differences(words: str, draws: int) -> None:
    logits, theta, _ = setting()
    made = arsm.Average(estimator(words), draws)
    noise = made.noise(logits, torch.Generator().manual_seed(3))
    parameters = list(made.learned.parameters())
    slopes = torch.autograd.grad(loss_of(made, logits, theta, noise), parameters)
    assert len(slopes) == 2
    for parameter, slope in zip(parameters, slopes, strict=True):
        sides = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                parameter.add_(step)
            sides.append(loss_of(made, logits, theta, noise).detach())
        with torch.no_grad():
            parameter.add_(1e-5)
        torch.testing.assert_close(slope, (sides[0] - sides[1]) / 2e-5, rtol=1e-6, atol=1e-9)
        assert slope != 0


@pytest.mark.parametrize("words", WORDS[1:])
def test_the_estimators_loss_reaches_its_own_parameters_alone(words: str) -> None:
    logits, theta, log_pi = setting()
    logits.requires_grad_()
    theta.requires_grad_()
    loss = loss_of(estimator(words), logits, theta, log_pi)
    assert torch.autograd.grad(loss, (logits, theta), allow_unused=True) == (None, None)


def test_a_fixed_control_variate_has_nothing_to_learn() -> None:
    logits, theta, log_pi = setting()
    learned, fixed = estimator(WORDS[1]), estimator(WORDS[1])
    fixed.learned.requires_grad_(False)
    outs = [arsm.estimate(made, logits, f, theta, noise=log_pi) for made in (learned, fixed)]
    assert [
        out.estimator_loss is not None and out.estimator_loss.requires_grad for out in outs
    ] == [True, False]
    torch.testing.assert_close(outs[0].grad, outs[1].grad)


class Learning(nn.Module):
    """The loss of an estimator's learned parts."""

    def __init__(self, made: arsm.Estimator) -> None:
        super().__init__()
        self.made, self.learned = made, made.learned

    def forward(self, logits: Tensor, theta: Tensor, noise: Noise) -> Tensor:
        return loss_of(self.made, logits, theta, noise)


@pytest.mark.parametrize("words", ["relax", "2*relax"])
def test_stacked_replicas_learn_as_each_would_alone(words: str) -> None:
    """Inside vmap, where nothing seems to require a gradient."""
    made = arsm.estimator(words)
    logits, theta, _ = setting()
    given = logits, theta, made.noise(logits, torch.Generator().manual_seed(0))
    model = Learning(made)
    model(*given)  # learns its sizes
    for seed, parameter in enumerate(model.double().parameters()):
        parameter.data.copy_(normal(seed, *parameter.shape))
    weights = {
        name: torch.stack([p, 2 * p]).detach().requires_grad_()
        for name, p in model.named_parameters()
    }

    def loss(own: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, own, given)

    stacked = torch.autograd.grad(torch.vmap(loss)(weights).sum(), list(weights.values()))
    alone = torch.autograd.grad(
        torch.stack([loss({n: p[r] for n, p in weights.items()}) for r in range(2)]).sum(),
        list(weights.values()),
    )
    for one, other in zip(stacked, alone, strict=True):
        torch.testing.assert_close(one, other)
        assert bool((one != 0).flatten(1).any(-1).all())


def test_outside_vmap_a_gradient_with_learned_parts_is_seen() -> None:
    """Even if the estimator does not say that it learns."""
    silent = arsm.RELAX()
    object.__setattr__(silent, "learned", nn.ModuleList())
    assert loss_of(silent, *setting()).requires_grad


def test_rebar_learns_its_temperature_for_a_linear_f_too() -> None:
    logits, theta, log_pi = setting()

    def linear(z: Tensor, theta: Tensor) -> Tensor:
        return (z.flatten(1) * theta).sum(-1)

    made = estimator(WORDS[1])
    loss = arsm.estimate(made, logits, linear, theta, noise=log_pi).estimator_loss
    assert loss is not None
    assert all(slope != 0 for slope in torch.autograd.grad(loss, list(made.learned.parameters())))


def test_learned_parts_are_found_through_the_average_and_are_the_estimators_own() -> None:
    rebar, relax = arsm.REBAR(), arsm.RELAX()
    assert list(rebar.learned) == [rebar.control]
    assert list(arsm.Average(relax, 2).learned) == [relax.control]
    assert len(arsm.ARSM().learned) == 0


def total_variance(made: arsm.Estimator, logits: Tensor, theta: Tensor, n: int = 4000) -> float:
    generator = torch.Generator().manual_seed(99)
    grad = arsm.estimate(
        made, logits.expand(n, -1, -1), f, theta.expand(n, -1), generator=generator
    ).grad
    assert grad is not None
    return float(grad.var(0).sum())


@pytest.mark.parametrize(
    ("words", "rate", "steps"),
    [("rebar:temperature=0.05,scale=0.1", 0.05, 100), ("relax", 0.03, 300)],
)
def test_learning_lowers_the_variance(words: str, rate: float, steps: int) -> None:
    """From words, with an optimiser made before the first logits are seen."""
    torch.manual_seed(0)
    logits, theta = normal(5, K, C).float(), normal(6, K * C).float() + 1
    made = arsm.estimator(words)
    optimiser = torch.optim.Adam(made.learned.parameters(), lr=rate)
    before = total_variance(made, logits, theta)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = arsm.estimate(
            made, logits.expand(64, -1, -1), f, theta.expand(64, -1), generator=generator
        ).estimator_loss
        assert loss is not None
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert total_variance(made, logits, theta) < 0.5 * before


def test_relax_begins_as_reinforce() -> None:
    logits, theta, log_pi = setting()
    torch.testing.assert_close(
        *(grad_of(arsm.estimator(w), logits, theta, log_pi) for w in ("relax", "reinforce"))
    )


def test_a_learned_control_survives_a_checkpoint() -> None:
    logits, theta, _ = setting()
    made, fresh = arsm.estimator("2*relax"), arsm.estimator("2*relax")
    noise = made.noise(logits, torch.Generator().manual_seed(0))
    arsm.estimate(made, logits, f, theta, noise=noise)
    for parameter in made.learned.parameters():
        nn.init.normal_(parameter)
    fresh.learned.load_state_dict(made.learned.state_dict())
    learned, loaded, other = (
        grad_of(x, logits, theta, noise) for x in (made, fresh, arsm.estimator("2*relax"))
    )
    torch.testing.assert_close(learned, loaded, rtol=0, atol=0)
    assert not torch.allclose(learned, other)


# ---------------------------------------------------------------- care and refusals


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("words", ["muprop", "rebar:temperature=0.05", "relax:temperature=0.05"])
def test_extreme_logits_masks_and_types(words: str, dtype: torch.dtype) -> None:
    logits = extreme_logits(dtype)
    theta = normal(0, 3, 6).to(dtype)
    made = arsm.estimator(words)
    if isinstance(made, arsm.RELAX) and isinstance(made.control, MLPControl):
        nn.init.normal_(made.control.out.weight)
    out = arsm.estimate(made, logits, f, theta, generator=torch.Generator().manual_seed(0))
    assert out.grad is not None
    assert out.grad.isfinite().all()
    assert (out.grad[logits.detach() == -torch.inf] == 0).all()
    assert out.grad[2, 1].abs().max() > 0
    if out.estimator_loss is not None:
        for slope in torch.autograd.grad(out.estimator_loss, list(made.learned.parameters())):
            assert slope.isfinite().all()


@pytest.mark.parametrize("words", WORDS)
def test_masking_a_category_is_leaving_it_out(words: str) -> None:
    logits, log_pi = (
        normal(0, B, K, C + 1),
        dirichlet(normal(0, B, K, C + 1), torch.Generator().manual_seed(2)),
    )
    theta = normal(1, B, K, C + 1)
    logits[..., 1] = -torch.inf
    kept = [0, 2, 3]
    whole, part = (
        arsm.estimate(
            made,
            logits[..., c],
            f,
            theta[..., c].flatten(1),
            noise=noise_for(made, logits[..., c], log_pi[..., c]),
        )
        for c in ([0, 1, 2, 3], kept)
        for made in [arsm.estimator(words)]
    )
    assert whole.grad is not None
    torch.testing.assert_close(whole.grad[..., kept], part.grad)


@pytest.mark.parametrize("words", WORDS)
def test_the_average_is_the_mean_of_its_draws(words: str) -> None:
    logits, theta, _ = setting()
    made = estimator(words)
    average = arsm.Average(made, 3)
    noise = average.noise(logits, torch.Generator().manual_seed(4))
    draws = [
        grad_of(made, logits, theta, tree_map(lambda x, i=i: x[:, i], noise)) for i in range(3)
    ]
    torch.testing.assert_close(grad_of(average, logits, theta, noise), torch.stack(draws).mean(0))


@pytest.mark.parametrize("words", WORDS[:2])
def test_f_without_a_derivative_in_z_is_refused(words: str) -> None:
    logits, theta, _ = setting()

    def rounded(z: Tensor, theta: Tensor) -> Tensor:
        return f(z.argmax(-1), theta)

    theta.requires_grad_()
    with pytest.raises(ValueError, match="differentiable"):
        arsm.estimate(arsm.estimator(words), logits, rounded, theta)
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are switched off"):
        arsm.estimate(arsm.estimator(words), logits, f, theta)


def test_impossible_options_are_refused() -> None:
    for words in ("rebar:temperature=0.0", "relax:temperature=-1"):
        with pytest.raises(ValueError, match="temperature"):
            arsm.estimator(words)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        arsm.estimator("relax:control=3")
    with pytest.raises(ValueError, match="no option"):
        arsm.estimator("rebar:control=3")


def test_a_control_of_the_wrong_shape_is_refused() -> None:
    class Wide(nn.Module):
        def forward(self, s: Tensor, p: Tensor) -> Tensor:
            return s.sum(-1)

    logits, theta, _ = setting()
    with pytest.raises(ValueError, match="one value per row"):
        arsm.estimate(arsm.RELAX(Wide()), logits, f, theta)


@pytest.mark.parametrize("words", ["rebar", "relax"])
def test_a_mask_in_all_but_name_is_one(words: str) -> None:
    logits = torch.zeros(2, 1, 4)
    logits[..., 0] = torch.finfo(torch.float32).min
    logits.requires_grad_()
    made = arsm.estimator(words)
    out = arsm.estimate(made, logits, lambda z: f_of_category(z).square())
    assert out.grad is not None
    assert out.estimator_loss is not None
    assert out.grad.isfinite().all()
    out.estimator_loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.learned.parameters())


def f_of_category(z: Tensor) -> Tensor:
    """From one-hot points or categories."""
    return (z * torch.arange(4.0)).sum((-2, -1)) if z.is_floating_point() else z[:, 0].float()


def test_a_control_without_a_size_cannot_be_mapped() -> None:
    made = arsm.RELAX()

    def gradient(logits: Tensor, noise: Tensor) -> Tensor | None:
        return arsm.estimate(
            made, logits, f_of_category, noise=noise, evaluation="dense", max_rows=None
        ).grad

    logits = torch.zeros(3, 2, 1, 4)
    noise = made.noise(logits)
    with pytest.raises(RuntimeError, match="estimate once before you map it"):
        torch.vmap(gradient)(logits, noise)
    gradient(logits[0], noise[0])
    torch.vmap(gradient)(logits, noise)


def test_a_control_that_first_sees_logits_in_inference_can_still_learn() -> None:
    made = arsm.RELAX()
    with torch.inference_mode():
        arsm.estimate(made, torch.zeros(2, 1, 4), f_of_category)
    out = arsm.estimate(made, torch.zeros(2, 1, 4, requires_grad=True), f_of_category)
    assert out.estimator_loss is not None
    out.estimator_loss.backward()


@pytest.mark.parametrize("words", ["gumbel-softmax", "straight-through", "reinmax", "gumbel-rao"])
def test_relaxations_refuse_an_f_that_has_no_way_to_z(words: str) -> None:
    decoder = nn.Linear(4, 1)
    logits = torch.zeros(3, 1, 4, requires_grad=True)

    def rounded(z: Tensor) -> Tensor:
        return decoder(arsm.one_hot(z.argmax(-1), 4).flatten(1)).squeeze(-1)

    with pytest.raises(ValueError, match="no way from f's values to z"):
        arsm.estimate(arsm.estimator(words), logits, rounded)
    arsm.estimate(
        arsm.estimator(words), logits, lambda z: decoder(z.flatten(1)).squeeze(-1)
    ).value.sum().backward()
    assert logits.grad is not None
    arsm.estimate(arsm.estimator(words), logits.detach(), rounded)  # nobody asks for a gradient
