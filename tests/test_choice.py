"""Choices inside modules: against enumeration where they depend on each other, in every way to run
a model.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

import arsm
from arsm.types import Queries
from tests.statistics import deviations

ROWS = 1 << 14


class Scripted(nn.Module):
    """In the place of a Choice: the values of a fixed path, and their probability."""

    def __init__(self, path: list[Tensor], k: list[int | None]) -> None:
        super().__init__()
        self.path, self.k, self.log_q = path, k, torch.zeros((), dtype=torch.float64)

    def forward(self, logits: Tensor) -> Tensor:
        z, k = self.path.pop(0), self.k.pop(0)
        if k is None:
            self.log_q = self.log_q + arsm.log_prob(
                logits.log_softmax(-1), z.expand(len(logits), -1)
            ).sum(-1)
        else:
            self.log_q = self.log_q + arsm.subset_log_prob(
                logits.squeeze(1), z.expand(len(logits), -1)
            )
        return z.expand(len(logits), -1)


class Nested(nn.Module):
    """Two choices of the first kind, then one that depends on them, then one that depends on both,
    as modules.
    """

    def __init__(self, make: Callable[[], nn.Module] = arsm.Choice) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2 * 3)
        self.second = nn.Linear(2 * 3 + 2, 2)
        self.third = nn.Linear(2 * 3 + 2, 2)
        self.out = nn.Linear(2 * 3 + 2 + 2, 1)
        self.choice = nn.ModuleDict({"a": make(), "inner": nn.ModuleList([make(), make()])})

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.choice["inner"]
        a = arsm.one_hot(self.choice["a"](self.first(x).unflatten(-1, (2, 3))), 3, x.dtype).flatten(
            1
        )
        b = arsm.one_hot(
            inner[0](self.second(torch.cat([a, x], -1)).unsqueeze(1)), 2, x.dtype
        ).flatten(1)
        c = arsm.one_hot(
            inner[1](self.third(torch.cat([a, b], -1)).unsqueeze(1)), 2, x.dtype
        ).flatten(1)
        return self.out(torch.cat([a, b, c], -1)).squeeze(-1)


class TopTwo(nn.Module):
    """Two of four, then a choice that depends on them."""

    def __init__(self, make: Callable[..., nn.Module] = arsm.Choice) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.second = nn.Linear(4, 3)
        self.out = nn.Linear(4 + 3, 1)
        self.pair, self.one = make(k=2), make()

    def forward(self, x: Tensor) -> Tensor:
        a = arsm.one_hot(self.pair(self.first(x).unsqueeze(1)), 4, x.dtype).sum(-2)
        b = arsm.one_hot(self.one(self.second(a).unsqueeze(1)), 3, x.dtype).flatten(1)
        return self.out(torch.cat([a, b], -1)).squeeze(-1)


class Pair(nn.Module):
    """Two of four."""

    def __init__(self, make: Callable[..., nn.Module] = arsm.Choice) -> None:
        super().__init__()
        self.first, self.out, self.pair = nn.Linear(2, 4), nn.Linear(4, 1), make(k=2)

    def forward(self, x: Tensor) -> Tensor:
        a = arsm.one_hot(self.pair(self.first(x).unsqueeze(1)), 4, x.dtype).sum(-2)
        return self.out(a).squeeze(-1)


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    model = kind().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).sin() + x.square().sum(-1)


X = torch.tensor([[0.4, -1.1]], dtype=torch.float64)
PATHS: dict[type[nn.Module], list[list[Tensor]]] = {
    Nested: [
        [torch.tensor([a, b]), torch.tensor([c]), torch.tensor([d])]
        for a, b, c, d in itertools.product(range(3), range(3), range(2), range(2))
    ],
    TopTwo: [
        [torch.tensor(pair), torch.tensor([c])]
        for pair in combinations(range(4), 2)
        for c in range(3)
    ],
    Pair: [[torch.tensor(pair)] for pair in combinations(range(4), 2)],
}
SUBSETS: dict[type[nn.Module], list[int | None]] = {
    Nested: [None] * 3,
    TopTwo: [2, None],
    Pair: [2],
}


def exact(kind: type[nn.Module], model: nn.Module) -> tuple[Tensor, Tensor]:
    """E[loss] and its gradient in all parameters, by enumeration of all paths."""
    scripted = copy.deepcopy(model)
    total = torch.zeros((), dtype=torch.float64)
    for path in PATHS[kind]:
        script = Scripted(list(path), list(SUBSETS[kind]))
        if kind is Nested:
            scripted.choice = nn.ModuleDict({"a": script, "inner": nn.ModuleList([script, script])})
        else:
            scripted.pair = scripted.one = script
        value = loss_of(scripted)(X)
        total = total + (script.log_q.exp() * value).sum()
    gradients = torch.autograd.grad(total, list(scripted.parameters()))
    return total.detach(), torch.cat([g.flatten() for g in gradients])


def sampled(model: nn.Module, estimator: arsm.Estimator) -> tuple[Tensor, Tensor]:
    """Values [n] and gradients [n, P] of independent rows, each with parameters of its own."""
    names = [name for name, _ in model.named_parameters()]
    stacked = {
        name: parameter.detach().expand(ROWS, *parameter.shape).clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }

    rows = torch.arange(ROWS)
    lookup: dict[str, Tensor] = {}
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }

    def forward_of(name: str) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            weight = stacked[f"{name}.weight"].index_select(0, lookup["rows"])
            bias = stacked[f"{name}.bias"].index_select(0, lookup["rows"])
            return torch.einsum("noi,ni->no", weight, inputs) + bias

        return forward

    for name, module in linears.items():
        module.forward = forward_of(name)  # pyright: ignore[reportAttributeAccessIssue]

    def loss(x: Tensor, row: Tensor) -> Tensor:
        lookup["rows"] = row
        return loss_of(model)(x)

    with arsm.choices(model, estimator, generator=torch.Generator().manual_seed(0)) as run:
        value = run(loss, X.expand(ROWS, -1), rows)
    gradients = torch.autograd.grad(value.sum(), [stacked[name] for name in names])
    return value.detach(), torch.cat([g.flatten(1) for g in gradients], 1)


def worst(kind: type[nn.Module], estimator: arsm.Estimator) -> dict[str, float]:
    model = model_of(kind)
    expected = exact(kind, model)
    value, gradient = sampled(model, estimator)
    return {
        "value": float(deviations(value, expected[0])),
        "gradient": float(deviations(gradient, expected[1]).max()),
    }


WAYS = [
    "rloo:samples=3",
    "reinforce",
    "arsm",
    "ars",
    "local-expectation",
    "carms:samples=3",
    "rloo:samples=6,ridge=1.0",
]


@pytest.mark.parametrize("words", WAYS)
def test_nested_choices_agree_with_enumeration(words: str) -> None:
    found = worst(Nested, arsm.estimator(words))
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [(TopTwo, arsm.RLOO(3)), (Pair, arsm.RLOO(2)), (Pair, arsm.SubsetRLOO(2, 3))],
    ids=repr,
)
def test_subsets_agree_with_enumeration(kind: type[nn.Module], estimator: arsm.Estimator) -> None:
    found = worst(kind, estimator)
    assert max(found.values()) <= 1, found


class OwnSample(arsm.RLOO):
    """A baseline that contains the sample itself."""

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        return super().weights(values) * (self.samples - 1) / self.samples

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        return super().tell(logits, queries, values) * (self.samples - 1) / self.samples


@dataclass(frozen=True, eq=False)
class Heavy(arsm.ARSM):
    """10% too much."""

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        return 1.1 * super().tell(logits, queries, values)


@pytest.mark.parametrize("estimator", [OwnSample(3), Heavy()], ids=lambda e: type(e).__name__)
def test_a_planted_bias_is_caught(estimator: arsm.Estimator) -> None:
    found = worst(Nested, estimator)
    assert found["gradient"] > 1
    assert found["value"] <= 1


def test_forgotten_earlier_choices_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices before the one under test must be held."""
    from arsm.choice_run import Run

    inner = Run._values_of_others

    def forgetful(self: Run, function: Any, batch: Any, calls: Any, t: int, others: Any) -> Tensor:
        redrawn = [copy.copy(call) for call in calls]
        for call in redrawn[:t]:
            object.__setattr__(call, "z", call.z.roll(1, 0))
        return inner(self, function, batch, redrawn, t, others)

    monkeypatch.setattr(Run, "_values_of_others", forgetful)
    # the logits below them differ, which it refuses
    monkeypatch.setattr("arsm.choice_run.check_again", lambda *_: None)
    assert worst(Nested, arsm.LocalExpectation())["gradient"] > 1


def test_relaxations_run_one_differentiable_pass() -> None:
    """Straight-through by hand: one-hot samples whose derivative is softmax's."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(3, 8), "choice": arsm.Choice()}).double()
    weight, x = torch.randn(8, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        z = model["choice"](model["linear"](x).unflatten(-1, (2, 4)))
        assert z.is_floating_point()
        return (arsm.one_hot(z, 4).flatten(1) * weight).sum(-1)

    with arsm.choices(model, arsm.StraightThrough()) as run:
        value = run(loss, x)
    value.sum().backward()
    linear: Any = model["linear"]
    found = linear.weight.grad.clone()
    model.zero_grad()
    (linear(x).unflatten(-1, (2, 4)).softmax(-1).flatten(1) * weight).sum().backward()
    assert torch.allclose(found, linear.weight.grad)


def test_simple_relaxes_subsets() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Unflatten(1, (1, 5)), arsm.Choice(k=2)).double()
    weight, x = torch.arange(5.0, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    with arsm.choices(model, arsm.SIMPLE(2)) as run:
        run(lambda x: (model(x).squeeze(1) * weight).sum(-1), x).sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    (arsm.subset_marginals(model[0](x), 2) * weight).sum().backward()
    assert torch.allclose(found, model[0].weight.grad)


# ---------------------------------------------------------------- randomness in the model


class Noisy(nn.Module):
    """Two choices, with dropout before, between or after them; its parameters are rows of the
    batch.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.drops = nn.ModuleDict(
            {place: nn.Dropout(0.5 if place == where else 0.0) for place in PLACES}
        )
        self.one, self.two = arsm.Choice(), arsm.Choice()

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """x [N, 2], first [N, 2, 3], second [N, 3, 2] -> [N]."""
        h = self.drops["before"](x)
        a = arsm.one_hot(
            self.one(torch.einsum("ni,nic->nc", h, first).unsqueeze(1)), 3, x.dtype
        ).squeeze(1)
        a = self.drops["between"](a)
        b = arsm.one_hot(
            self.two(torch.einsum("nc,nco->no", a, second).unsqueeze(1)), 2, x.dtype
        ).squeeze(1)
        out = self.drops["after"](torch.cat([a, b], -1))
        return ((out * torch.arange(1.0, 6.0, dtype=x.dtype)).sum(-1) + h.sum(-1)).cos()


PLACES = ("before", "between", "after")
WEIGHTS = (
    torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
)


class Masked(nn.Module):
    """In the place of dropout: a fixed mask."""

    def __init__(self, mask: tuple[int, ...]) -> None:
        super().__init__()
        self.mask = torch.tensor(mask, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.mask * x


def exact_noisy(where: str) -> Tensor:
    """The gradient of E[f] in both weights, over all masks and all choices."""
    weights = [w.clone().requires_grad_() for w in WEIGHTS]
    masks = list(itertools.product((0, 1), repeat={"before": 2, "between": 3, "after": 5}[where]))
    total = torch.zeros((), dtype=torch.float64)
    for mask, a, b in itertools.product(masks, range(3), range(2)):
        model, script = Noisy(where), Scripted([torch.tensor([a]), torch.tensor([b])], [None, None])
        model.drops[where] = Masked(mask)
        model.one = model.two = script  # pyright: ignore[reportAttributeAccessIssue]
        value = model(X, *(w.unsqueeze(0) for w in weights))
        total = total + (script.log_q.exp() * value).sum() / len(masks)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, weights)])


def sampled_noisy(where: str, estimator: arsm.Estimator) -> Tensor:
    """Its estimates [n, P]."""
    torch.manual_seed(0)
    rows = [w.expand(ROWS, -1, -1).clone().requires_grad_() for w in WEIGHTS]
    model = Noisy(where)
    with arsm.choices(model, estimator, generator=torch.Generator().manual_seed(0)) as run:
        value = run(model, X.expand(ROWS, -1), *rows)
    return torch.cat([g.flatten(1) for g in torch.autograd.grad(value.sum(), rows)], 1)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "words", ["rloo:samples=3", "reinforce", "arsm", "local-expectation", "carms:samples=3"]
)
def test_dropout_is_unbiased_or_refused(words: str, where: str) -> None:
    """Estimators that run the model again compare choices of the same logits: none after the
    dropout.
    """
    estimator = arsm.estimator(words)
    if where != "after" and words not in ("rloo:samples=3", "reinforce"):
        with pytest.raises(RuntimeError, match=r"use RLOO\(n\), which runs the model once"):
            sampled_noisy(where, estimator)
        return
    assert float(deviations(sampled_noisy(where, estimator), exact_noisy(where)).max()) <= 1


@pytest.mark.parametrize("where", ["before", "between"])
def test_dropout_before_a_choice_would_bias(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arsm.choice_run.check_again", lambda *_: None)
    found = sampled_noisy(where, arsm.LocalExpectation())
    assert float(deviations(found, exact_noisy(where)).max()) > 1


class Deep(nn.Module):
    """A deep router, whose last layer may be wide awake about masks."""

    def __init__(self, dropout: float, masked: float) -> None:
        super().__init__()
        sizes = itertools.pairwise([16] * 7)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in sizes)
        )
        self.drop, self.gate, self.choice = nn.Dropout(dropout), nn.Linear(16, 6), arsm.Choice()
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(self.drop(self.body(x)))
        logits = torch.cat([logits[:, :-1], torch.full_like(logits[:, -1:], self.masked)], -1)
        return self.choice(logits.unsqueeze(1)).squeeze(1).float()


@pytest.mark.parametrize("masked", [-torch.inf, -1e9])
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "autocast"])
def test_rounding_is_told_from_dropout(kind: str, masked: float) -> None:
    """Other batch sizes round otherwise, in every dtype; rare dropout differs more."""
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    for dropout in (0.0, 0.05):
        torch.manual_seed(0)
        model, x = Deep(dropout, masked).to(dtype), torch.randn(64, 16, dtype=dtype)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
            arsm.choices(model, arsm.ARSM()) as run,
            pytest.raises(RuntimeError, match="logits of a Choice")
            if dropout
            else contextlib.nullcontext(),
        ):
            for _ in range(3):
                run(model, x)


@pytest.mark.parametrize("estimator", [arsm.RLOO(3), arsm.ARSM(), arsm.LocalExpectation()], ids=str)
def test_a_loss_function_may_write_all_its_values_into_one_place(
    estimator: arsm.Estimator,
) -> None:
    buffer = torch.empty(64)

    def gradients(copied: bool) -> tuple[Tensor, Tensor]:
        choice = arsm.Choice()
        logits = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        number = torch.arange(5)

        def loss(row: Tensor) -> Tensor:
            values = buffer[: len(row)].copy_(choice(logits[row]).float().sin().sum(-1) + row)
            return values.clone() if copied else values

        with arsm.choices(choice, estimator, generator=torch.Generator().manual_seed(1)) as run:
            found = run(loss, number)
        found.sum().backward()
        assert logits.grad is not None
        return found.detach(), logits.grad

    for found, expected in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
