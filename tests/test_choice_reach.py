"""Choices with a loss for each position: unbiased by enumeration of every pair of paths, or in the
mean of many rows, and a wrong reach is found.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import choice_run
from arsm.question import pose
from arsm.subsets import subset_log_prob
from tests.statistics import deviations

POSITIONS, CATEGORIES = 2, 3


class Blocks(nn.Module):
    """Choices at each position in several blocks; each block's logits depend on the choices of the
    blocks before it, at its own and earlier positions, or at all of them if it looks ahead.
    """

    def __init__(self, *choices: arsm.Choice, ahead: bool = False, mixed: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.choices = nn.ModuleList(choices)
        self.phi = nn.Parameter(normal(len(choices), POSITIONS, CATEGORIES))
        self.effect = normal(len(choices), CATEGORIES, CATEGORIES)
        self.read = nn.Parameter(normal(len(choices), CATEGORIES))
        self.ahead, self.mixed = ahead, mixed

    def mix(self, x: Tensor) -> Tensor:
        """[N, T, C], summed over the positions that are seen."""
        if self.ahead:
            return x.sum(1, keepdim=True).expand_as(x)
        return x.cumsum(1) if self.mixed else x

    def forward(self, x: Tensor) -> Tensor:
        """Losses [N, T] from zeros [N], or from a phi for each row, [N, blocks, T, C]."""
        state = torch.zeros(len(x), POSITIONS, CATEGORIES, dtype=torch.float64)
        loss = torch.zeros(len(x), POSITIONS, dtype=torch.float64)
        for block, choice in enumerate(self.choices):
            z = choice((self.phi[block] if x.ndim == 1 else x[:, block]) + state)
            if z.ndim == 2:
                z = z.unsqueeze(-1)
            chosen = arsm.one_hot(z, CATEGORIES, torch.float64).sum(-2)
            state = state + self.mix(chosen @ self.effect[block])
            loss = loss + (self.mix(chosen * self.read[block]).sum(-1) + state.sum(-1)).sin()
        return loss + loss.square()


def paths(model: Blocks) -> list[list[Tensor]]:
    """All ways to make the choices: one tensor [1, T] or [1, T, k] per block."""
    sets: list[list[Tensor]] = []
    for choice in model.choices:
        assert isinstance(choice, arsm.Choice)
        if choice.k is None:
            every = list(itertools.product(range(CATEGORIES), repeat=POSITIONS))
        else:
            members = list(itertools.combinations(range(CATEGORIES), choice.k))
            every = list(itertools.product(members, repeat=POSITIONS))
        sets.append([torch.tensor([each]) for each in every])
    return [list(each) for each in itertools.product(*sets)]


def forced(model: Blocks, estimator: arsm.Estimator, monkeypatch: Any) -> Tensor:
    """The expected gradient of the losses' weighted sum: every group of paths is one row."""
    one = paths(model)
    groups = list(itertools.product(one, repeat=estimator.paths))
    made = [
        torch.cat([group[i][block] for i in range(estimator.paths) for group in groups])
        for block in range(len(model.choices))
    ]
    probability: list[Tensor] = []
    calls = iter(made)

    def draw(logits: Tensor, choice: arsm.Choice, generator: Any) -> Tensor:
        z = next(calls)
        probability.append(choice_run._log_probs(logits.detach(), z, choice.k).sum(-1))
        return z

    monkeypatch.setattr(choice_run, "draw_choice", draw)
    x = torch.zeros(len(groups), dtype=torch.float64)
    with arsm.choices(model, estimator) as run:
        losses = run(model, x)
    of_path = sum(probability[1:], probability[0]).view(estimator.paths, -1)
    chance = of_path.sum(0).exp()
    assert float(chance.sum()) == pytest.approx(1)
    model.zero_grad()
    (chance.unsqueeze(-1) * losses * WEIGHTS).sum().backward()
    return gradients(model)


WEIGHTS = torch.tensor([1.0, -0.3], dtype=torch.float64)
"""The caller may weigh positions as it likes."""


def gradients(model: Blocks) -> Tensor:
    parts = [p.grad for p in (model.phi, model.read)]
    return torch.cat([g.flatten() for g in parts if g is not None])


def exact(model: Blocks) -> Tensor:
    """The gradient of the expectation, by enumeration of one path with autograd."""
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for path in paths(model):
        log_q, made = [], iter(path)

        def choose(choice: arsm.Choice, logits: Tensor, made: Any = made) -> Tensor:
            z = next(made)
            if choice.k is None:
                log_q.append(arsm.log_prob(logits.log_softmax(-1), z).sum())  # noqa: B023
            else:
                log_q.append(subset_log_prob(logits, z).sum())  # noqa: B023
            return z

        losses = Replaced(model, choose)(torch.zeros(1, dtype=torch.float64))
        total = total + sum(log_q[1:], log_q[0]).exp() * (losses * WEIGHTS).sum()
    total.backward()
    return gradients(model)


class Replaced:
    """A model with its choices made by a function."""

    def __init__(self, model: Blocks, choose: Any) -> None:
        self.model, self.choose = model, choose

    def __call__(self, x: Tensor) -> Tensor:
        before = [choice._run for choice in self.model.choices]
        for choice in self.model.choices:
            choice._run = self  # pyright: ignore[reportArgumentType]
        try:
            return self.model(x)
        finally:
            for choice, run in zip(self.model.choices, before, strict=True):
                choice._run = run  # pyright: ignore[reportArgumentType]


def choice(reach: str = "later", k: int | None = None) -> arsm.Choice:
    return arsm.Choice(k=k, reach=reach)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("estimator", [arsm.Reinforce(), arsm.RLOO(2)], ids=["reinforce", "rloo"])
@pytest.mark.parametrize(
    "model",
    [
        lambda: Blocks(choice()),
        lambda: Blocks(choice(k=2)),
        lambda: Blocks(choice("own"), mixed=False),
        lambda: Blocks(choice("own", k=2), mixed=False),
    ],
    ids=["later", "top-2", "own", "own top-2"],
)
def test_one_block_is_unbiased(
    model: Any, estimator: arsm.Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    torch.testing.assert_close(forced(made, estimator, monkeypatch), exact(made))


@pytest.mark.parametrize(
    "model",
    [
        lambda: Blocks(choice(), choice()),
        lambda: Blocks(choice(), choice(k=2)),
        lambda: Blocks(choice(), choice("row")),
        lambda: Blocks(choice("own"), choice("own"), mixed=False),
    ],
    ids=["later", "later and top-2", "later and row", "own"],
)
def test_nested_blocks_are_unbiased(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    torch.testing.assert_close(forced(made, arsm.Reinforce(), monkeypatch), exact(made))


@pytest.mark.parametrize(
    "model",
    [lambda: Blocks(choice()), lambda: Blocks(choice("own"), mixed=False)],
    ids=["later", "own"],
)
def test_local_expectation_is_unbiased(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration: every true sample is a row."""
    made = model()
    z = torch.cat([path[0] for path in paths(made)])
    chance = choice_run._log_probs(made.phi[0].expand(len(z), -1, -1), z, None).sum(-1).exp()
    chance = chance.detach()

    def given(estimator: arsm.Estimator, logits: Tensor, **options: Any) -> Any:
        return pose(estimator, logits, z=z, **options)

    monkeypatch.setattr(choice_run, "pose", given)
    with arsm.choices(made, arsm.LocalExpectation()) as run:
        losses = run(made, torch.zeros(len(z), dtype=torch.float64))
    (chance.unsqueeze(-1) * losses * WEIGHTS).sum().backward()
    torch.testing.assert_close(gradients(made), exact(made))


def per_row(model: Blocks, estimator: arsm.Estimator, rows: int = 1 << 12) -> tuple[Tensor, Tensor]:
    """Estimates for phi of many rows, and their mean by enumeration."""
    exact(model)
    wanted = model.phi.grad
    assert wanted is not None
    phi = model.phi.detach().expand(rows, *model.phi.shape).clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    with arsm.choices(model, estimator, generator=generator) as run:
        losses = run(model, phi)
    (losses * WEIGHTS).sum().backward()
    assert phi.grad is not None
    return phi.grad, wanted


@pytest.mark.parametrize(
    "estimator",
    [arsm.LocalExpectation(), arsm.ARSM(), arsm.CARMS(3), arsm.OTB(3), arsm.Exact(), arsm.RLOO(2)],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize(
    "model",
    [
        lambda: Blocks(choice(), choice()),
        lambda: Blocks(choice(), choice("row")),
        lambda: Blocks(choice("own"), choice("own"), mixed=False),
    ],
    ids=["later", "later and row", "own"],
)
def test_estimators_by_queries_are_unbiased(model: Any, estimator: arsm.Estimator) -> None:
    """Nested blocks, whose later choices are drawn again."""
    assert float(deviations(*per_row(model(), estimator)).max()) <= 1


def test_a_wrong_reach_is_biased_by_queries_too() -> None:
    model = Blocks(choice("own"), choice("own"))
    assert float(deviations(*per_row(model, arsm.LocalExpectation())).max()) > 3


def test_choices_that_reach_nothing_get_no_noise() -> None:
    """The second position's choice has no credit for the first position's loss, though ARSM
    changes both at once.
    """
    model = Blocks(choice())
    generator = torch.Generator().manual_seed(0)
    with arsm.choices(model, arsm.ARSM(), generator=generator) as run:
        losses = run(model, torch.zeros(64, dtype=torch.float64))
    losses[:, 0].sum().backward()
    assert model.phi.grad is not None
    assert float(model.phi.grad[0, 0].abs().max()) > 0
    assert float(model.phi.grad[0, 1].abs().max()) == 0


@pytest.mark.parametrize(
    "model",
    [
        lambda: Blocks(choice("later"), ahead=True),
        lambda: Blocks(choice("own")),
        lambda: Blocks(choice("own"), choice("own")),
        lambda: Blocks(choice("own", k=2)),
        lambda: Blocks(choice("later"), choice("row"), ahead=True),
    ],
    ids=["looks ahead", "causal", "nested", "top-2", "one of two"],
)
def test_a_wrong_reach_is_biased_and_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    wrong = forced(made, arsm.Reinforce(), monkeypatch)
    assert not torch.allclose(wrong, exact(made), rtol=1e-2)
    monkeypatch.undo()
    found = "reaches further than it says: another choice at position"
    estimators = [arsm.RLOO(2), arsm.LocalExpectation()]
    for estimator in estimators[: 1 if any(c.k for c in made.choices) else 2]:
        with (
            pytest.raises(ValueError, match=found),
            arsm.choices(made, estimator, check=True) as run,
        ):
            run(made, torch.zeros(5, dtype=torch.float64))


class Ahead(nn.Module):
    """The second choice at a position depends on the first one at the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = choice(), choice()
        self.phi = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(self.phi.expand(len(x), 4, 2))
        shifted = z.roll(-1, 1).float()
        y = self.second(self.phi + 3 * torch.stack([shifted, -shifted], -1))
        return y.float() + self.phi.sum()


def test_a_reach_by_way_of_later_choices_is_found() -> None:
    model = Ahead()
    with (
        pytest.raises(ValueError, match="changed a later choice at position"),
        arsm.choices(model, arsm.RLOO(2), check=True) as run,
    ):
        run(model, torch.zeros(3))


@pytest.mark.parametrize("k", [2, None])
def test_a_right_reach_passes_the_check_also_with_dropout(k: int | None) -> None:
    model = Blocks(choice(), choice(k=k), choice("row"))
    drop = nn.Dropout(0.5)
    estimator = arsm.RLOO(2) if k else arsm.LocalExpectation()
    with arsm.choices(model, estimator, check=True) as run:
        losses = run(lambda x: drop(model(x)), torch.zeros(5, dtype=torch.float64))
    assert losses.shape == (5, POSITIONS)


def test_several_sets_per_row_with_one_loss() -> None:
    """Top-2 routing of tokens [B, T, E]."""
    model = Blocks(choice("row", k=2))
    with arsm.choices(model, arsm.RLOO(3)) as run:
        loss = run(lambda x: model(x).sum(-1), torch.zeros(4, dtype=torch.float64))
    loss.sum().backward()
    assert model.phi.grad is not None
    model.eval()
    assert model.choices[0](torch.randn(4, 5, 3)).shape == (4, 5, 2)


def test_shapes_of_sets() -> None:
    logits = torch.randn(4, 1, 5)
    assert arsm.Choice(k=2)(logits).shape == (4, 2)
    assert choice(k=2)(logits).shape == (4, 1, 2)
    assert choice(k=2)(logits.expand(4, 3, 5)).shape == (4, 3, 2)
    assert "reach='later'" in repr(choice(k=2))


@pytest.mark.parametrize(
    ("estimator", "k", "words"),
    [
        (arsm.StraightThrough(), None, r"Choice\(reach='later'\) needs one that only evaluates f"),
        (arsm.GRPO(4), None, r"Choice\(reach='later'\) needs one that is unbiased"),
        (arsm.SIMPLE(2), 2, r"Choice\(reach='later'\) needs one that only evaluates f"),
        (arsm.LocalExpectation(), 2, r"Choice\(k=2, reach='later'\) needs one that weighs whole"),
        (arsm.SubsetRLOO(2), 2, r"Choice\(k=2, reach='later'\) needs one that weighs whole"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_other_estimators_are_refused(estimator: arsm.Estimator, k: int | None, words: str) -> None:
    model = Blocks(choice(k=k))
    with pytest.raises(ValueError, match=words), arsm.choices(model, estimator):
        pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, r"one floating value per position, \[4, T\] here"),
        (lambda x: x.view(4, 1).expand(4, 3), "logits for 2 positions, but the loss function"),
    ],
    ids=["rows", "other positions"],
)
@pytest.mark.parametrize(
    "estimator", [arsm.Reinforce(), arsm.LocalExpectation()], ids=lambda e: type(e).__name__
)
def test_losses_must_have_positions(function: Any, words: str, estimator: Any) -> None:
    model = Blocks(choice())

    def losses(x: Tensor) -> Tensor:
        found = model(x).sum(-1)
        return function(found) if len(x) == 4 else found.view(-1, 1).expand(-1, 3)

    with pytest.raises(ValueError, match=words), arsm.choices(model, estimator) as run:
        run(losses, torch.zeros(4, dtype=torch.float64))


def test_a_reach_has_three_values() -> None:
    with pytest.raises(ValueError, match='"row", "later" or "own"'):
        choice("all")
    with (
        pytest.raises(ValueError, match=r"takes logits \[N, 1, C\] with SIMPLE"),
        arsm.choices(model := Blocks(choice("row", k=2)), arsm.SIMPLE(2)) as run,
    ):
        run(lambda x: model(x).sum(-1), torch.zeros(4, dtype=torch.float64))


def test_less_is_credited_with_less_noise() -> None:
    def spread(reach: str) -> float:
        torch.manual_seed(0)
        model = Blocks(choice(reach), choice(reach), choice("later"))
        found = []
        for _ in range(200):
            with arsm.choices(model, arsm.RLOO(2)) as run:
                loss = run(model, torch.zeros(1, dtype=torch.float64))
            model.zero_grad()
            loss.sum().backward()
            found.append(gradients(model))
        return float(torch.stack(found).var(0).sum())

    assert spread("later") < 0.95 * spread("row")


class Gated(nn.Module):
    """Tokens [N, T, 4] that are routed and summed: losses [N, T]."""

    def __init__(self, k: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.route = nn.Linear(4, 3), choice(k=k)
        self.experts = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.route(self.gate(x))
        z = z if z.ndim == 3 else z.unsqueeze(-1)
        return (self.experts[z].sum(-2) * x).sum(-1).cumsum(-1).float()


def of_gate(model: Gated) -> Tensor:
    assert model.gate.weight.grad is not None
    return model.gate.weight.grad


KINDS = [(arsm.RLOO(3), 2), (arsm.RLOO(3), None), (arsm.LocalExpectation(), None)]


@pytest.mark.parametrize(("estimator", "k"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing_but_rounding(
    dtype: torch.dtype, estimator: arsm.Estimator, k: int | None
) -> None:
    def gradient(enabled: bool) -> Tensor:
        model = Gated(k)
        x = torch.randn(6, 5, 4)
        generator = torch.Generator().manual_seed(1)
        with (
            torch.autocast("cpu", dtype, enabled=enabled),
            arsm.choices(model, estimator, generator=generator) as run,
        ):
            found = run(model, x)
        found.mean().backward()
        return of_gate(model)

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("estimator", "k"), KINDS)
def test_compiled_models_get_the_same_gradient(estimator: arsm.Estimator, k: int | None) -> None:
    model, x = Gated(k), torch.randn(6, 5, 4)

    def gradient(call: Any) -> Tensor:
        model.zero_grad()
        with arsm.choices(model, estimator, generator=torch.Generator().manual_seed(1)) as run:
            run(call, x).mean().backward()
        return of_gate(model).clone()

    compiled: Any = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled), gradient(model))


@pytest.mark.parametrize(("estimator", "k"), KINDS)
def test_logits_are_there_for_balancing_losses(estimator: arsm.Estimator, k: int | None) -> None:
    """A balancing loss is added to the credit, and gets its ordinary gradient."""
    model, x = Gated(k), torch.randn(6, 5, 4)

    def gradient(credit: float, balance: float) -> Tensor:
        model.zero_grad()
        with arsm.choices(model, estimator, generator=torch.Generator().manual_seed(1)) as run:
            loss = credit * run(model, x).mean()
            assert model.route.logits is not None
            share = model.route.logits.softmax(-1).mean((0, 1))
            (loss + balance * share.square().sum()).backward()
        return of_gate(model).clone()

    alone = torch.autograd.grad(
        model.gate(x).softmax(-1).mean((0, 1)).square().sum(), model.gate.weight
    )[0]
    torch.testing.assert_close(gradient(0.0, 1.0), alone)
    torch.testing.assert_close(gradient(1.0, 0.5), gradient(1.0, 0.0) + 0.5 * alone)
