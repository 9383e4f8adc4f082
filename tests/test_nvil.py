"""NVIL: its formula under fixed noise, what it learns, and its running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm.estimators.nvil import MLPBaseline, RunningMoments
from tests.by_hand import assert_equal, given, normal

B, K, C = 4, 2, 3


class Level(nn.Module):
    """A baseline with one parameter, which sees the first probability."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))

    def forward(self, p: Tensor) -> Tensor:
        return self.weight * p[:, 0, 0]


def f(z: Tensor, theta: Tensor) -> Tensor:
    x = (arsm.one_hot(z, C, theta.dtype).flatten(1) * theta).sum(-1)
    return x.sin() + 3 * x


def by_formula(
    logits: Tensor, theta: Tensor, z: Tensor, weight: Tensor, m: float, s: float
) -> Tensor:
    """(f(z) - b(p) - m) / s (1[z_k = c] - p_kc), one entry at a time."""
    p = logits.softmax(-1)
    rows = []
    for b in range(B):
        signal = (f(z[b : b + 1], theta[b : b + 1])[0] - weight * p[b, 0, 0] - m) / s
        rows.append(
            torch.stack(
                [
                    torch.stack([signal * (float(z[b, k] == c) - p[b, k, c]) for c in range(C)])
                    for k in range(K)
                ]
            )
        )
    return torch.stack(rows)


def setting() -> tuple[Tensor, Tensor, Tensor]:
    """logits [B, K, C], theta [B, K C], z [B, K]."""
    z = torch.randint(C, (B, K), generator=torch.Generator().manual_seed(2))
    return normal(0, B, K, C), normal(1, B, K * C), z


@pytest.mark.parametrize("normalise", [False, True])
def test_one_estimate_and_its_loss_are_the_formula(normalise: bool) -> None:
    logits, theta, z = setting()
    made = arsm.NVIL(Level(), normalise)
    made.running.update(torch.tensor([1.0, 3.0, 8.0]), decay=0.5)
    m = 2.0  # half the way from 0 to 4
    s = ((((1 - m) ** 2 + (3 - m) ** 2 + (8 - m) ** 2) / 3) / 2) ** 0.5
    out = arsm.estimate(made, logits, f, theta, noise=given(z.unsqueeze(-2)))
    weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    expected = by_formula(logits, theta, z, weight, m, s if normalise else 1.0)
    assert_equal(out.grad, expected.detach())
    loss = expected.square().sum((1, 2)).mean()
    assert out.estimator_loss is not None
    assert_equal(out.estimator_loss.detach(), loss.detach())
    (slope,) = torch.autograd.grad(out.estimator_loss, list(made.learned.parameters()))
    assert_equal(slope, torch.autograd.grad(loss, weight)[0])


def test_it_is_unbiased_exactly_if_it_does_not_normalise() -> None:
    assert arsm.NVIL().unbiased
    assert not arsm.NVIL(normalise=True).unbiased
    assert not arsm.Average(arsm.NVIL(normalise=True), 2).unbiased


def test_normalising_only_rescales() -> None:
    logits, theta, z = setting()
    plain, scaled = arsm.NVIL(), arsm.NVIL(normalise=True)
    for made in (plain, scaled):
        made.running.update(torch.tensor([0.0, 60.0]), decay=0.2)
    scale = float(scaled.running.scale())
    assert scale > 10
    first, second = (
        arsm.estimate(made, logits, f, theta, noise=given(z.unsqueeze(-2))).grad
        for made in (plain, scaled)
    )
    assert first is not None
    assert second is not None
    assert_equal(second * scale, first)


def test_before_anything_is_learned_it_is_reinforce() -> None:
    logits, theta, z = setting()
    noise = given(z.unsqueeze(-2))
    found = arsm.estimate(arsm.NVIL(normalise=True), logits, f, theta, noise=noise)
    assert_equal(found.grad, arsm.estimate(arsm.Reinforce(), logits, f, theta, noise=noise).grad)


def test_an_estimate_changes_nothing_and_adapt_moves_the_running_statistics() -> None:
    logits, theta, z = setting()
    made = arsm.NVIL(Level(), decay=0.6)
    before = {name: part.clone() for name, part in made.learned.state_dict().items()}
    out = arsm.estimate(made, logits, f, theta, noise=given(z.unsqueeze(-2)))
    after = made.learned.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    made.adapt(out)
    left = f(z, theta) - 0.9 * logits.softmax(-1)[:, 0, 0]
    mean = 0.4 * left.mean()
    assert_equal(made.running.mean, mean)
    assert_equal(made.running.variance, 0.4 * (left - mean).square().mean())


def test_the_statistics_of_a_constant_stream_are_its_own() -> None:
    running = RunningMoments()
    for _ in range(200):
        running.update(torch.tensor([4.0, 10.0]), decay=0.8)
    assert_equal(running.mean, torch.tensor(7.0, dtype=torch.float64))
    assert_equal(running.scale(), torch.tensor(3.0, dtype=torch.float64))


def test_small_signals_are_not_blown_up() -> None:
    running = RunningMoments()
    for _ in range(200):
        running.update(torch.tensor([-0.1, 0.1]), decay=0.8)
    assert float(running.scale()) == 1.0


def test_learning_takes_the_level_of_each_row_away() -> None:
    """Rows differ in the level of f: one constant cannot remove it, a baseline per row can."""
    torch.manual_seed(0)
    logits = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64)
    level = torch.tensor([30.0, -30.0], dtype=torch.float64)

    def leveled(z: Tensor, level: Tensor) -> Tensor:
        return level + z[:, 0]

    made = arsm.NVIL()
    rows = logits.repeat(8, 1, 1), level.repeat(8)
    optimiser = None
    losses = []
    for _ in range(120):
        out = arsm.estimate(made, rows[0], leveled, rows[1])
        assert out.estimator_loss is not None
        optimiser = optimiser or torch.optim.Adam(made.learned.parameters(), 0.3)
        optimiser.zero_grad()
        out.estimator_loss.backward()
        optimiser.step()
        made.adapt(out)
        losses.append(float(out.estimator_loss.detach()))
    assert sum(losses[-10:]) < 1e-2 * sum(losses[:10])


def test_state_is_saved_with_the_learned_parts() -> None:
    logits, theta, z = setting()
    made, fresh = arsm.NVIL(), arsm.NVIL()
    out = arsm.estimate(made, logits, f, theta)
    made.adapt(out)
    nn.init.normal_(next(iter(made.baseline.parameters())))
    fresh.learned.load_state_dict(made.learned.state_dict())
    noise = given(z.unsqueeze(-2))
    assert_equal(*(arsm.estimate(e, logits, f, theta, noise=noise).grad for e in (made, fresh)))


def test_adapt_takes_a_bare_vector_and_refuses_an_estimate_without_logits() -> None:
    made = arsm.NVIL(decay=0.0)
    out = arsm.estimate(made, torch.zeros(3), lambda z: 5.0 + 0 * z[:, 0])
    made.adapt(out)
    assert float(made.running.mean) == 5.0
    with pytest.raises(ValueError, match=r"out\.logits is None"):
        made.adapt(arsm.Estimate(out.value, out.z, out.grad))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        arsm.estimator("nvil:baseline=3")
    with pytest.raises(ValueError, match="decay"):
        arsm.NVIL(decay=1.0)

    class Wide(nn.Module):
        def forward(self, p: Tensor) -> Tensor:
            return p.sum(-1)

    logits, theta, _ = setting()
    with pytest.raises(ValueError, match="one value per row"):
        arsm.estimate(arsm.NVIL(Wide()), logits, f, theta)


def test_a_baseline_without_a_size_cannot_be_mapped() -> None:
    made = arsm.NVIL(MLPBaseline())

    def gradient(logits: Tensor, z: Tensor) -> Tensor | None:
        noise = given(z)
        return arsm.estimate(
            made, logits, lambda z: z[:, 0].float(), noise=noise, evaluation="dense", max_rows=None
        ).grad

    logits, z = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="NVIL's network has no size yet"):
        torch.vmap(gradient)(logits, z)
    gradient(logits[0], z[0])
    torch.vmap(gradient)(logits, z)
