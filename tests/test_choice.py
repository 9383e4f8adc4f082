"""Choices inside modules: against enumeration where they depend on each other, in every way to run a model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
            self.log_q = self.log_q + arsm.log_prob(logits.log_softmax(-1), z.expand(len(logits), -1)).sum(-1)
        else:
            self.log_q = self.log_q + arsm.subset_log_prob(logits.squeeze(1), z.expand(len(logits), -1))
        return z.expand(len(logits), -1)


class Nested(nn.Module):
    """Two choices of the first kind, then one that depends on them, then one that depends on both, as modules."""

    def __init__(self, make: Callable[[], nn.Module] = arsm.Choice) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2 * 3)
        self.second = nn.Linear(2 * 3 + 2, 2)
        self.third = nn.Linear(2 * 3 + 2, 2)
        self.out = nn.Linear(2 * 3 + 2 + 2, 1)
        self.choice = nn.ModuleDict({"a": make(), "inner": nn.ModuleList([make(), make()])})

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.choice["inner"]
        a = arsm.one_hot(self.choice["a"](self.first(x).unflatten(-1, (2, 3))), 3, x.dtype).flatten(1)
        b = arsm.one_hot(inner[0](self.second(torch.cat([a, x], -1)).unsqueeze(1)), 2, x.dtype).flatten(1)
        c = arsm.one_hot(inner[1](self.third(torch.cat([a, b], -1)).unsqueeze(1)), 2, x.dtype).flatten(1)
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
    TopTwo: [[torch.tensor(pair), torch.tensor([c])] for pair in combinations(range(4), 2) for c in range(3)],
    Pair: [[torch.tensor(pair)] for pair in combinations(range(4), 2)],
}
SUBSETS: dict[type[nn.Module], list[int | None]] = {Nested: [None] * 3, TopTwo: [2, None], Pair: [2]}


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
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}

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
    ("kind", "estimator"), [(TopTwo, arsm.RLOO(3)), (Pair, arsm.RLOO(2)), (Pair, arsm.SubsetRLOO(2, 3))], ids=repr
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
    monkeypatch.setattr(Run, "_require_equal", lambda *_: None)  # the logits below them differ, which it refuses
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
    """Two choices, with dropout before, between or after them; its parameters are rows of the batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.drops = nn.ModuleDict({place: nn.Dropout(0.5 if place == where else 0.0) for place in PLACES})
        self.one, self.two = arsm.Choice(), arsm.Choice()

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """x [N, 2], first [N, 2, 3], second [N, 3, 2] -> [N]."""
        h = self.drops["before"](x)
        a = arsm.one_hot(self.one(torch.einsum("ni,nic->nc", h, first).unsqueeze(1)), 3, x.dtype).squeeze(1)
        a = self.drops["between"](a)
        b = arsm.one_hot(self.two(torch.einsum("nc,nco->no", a, second).unsqueeze(1)), 2, x.dtype).squeeze(1)
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
@pytest.mark.parametrize("words", ["rloo:samples=3", "reinforce", "arsm", "local-expectation", "carms:samples=3"])
def test_dropout_is_unbiased_or_refused(words: str, where: str) -> None:
    """Estimators that run the model again compare choices of the same logits: none after the dropout."""
    estimator = arsm.estimator(words)
    if where != "after" and words not in ("rloo:samples=3", "reinforce"):
        with pytest.raises(RuntimeError, match=r"use RLOO\(n\), which runs the model once"):
            sampled_noisy(where, estimator)
        return
    assert float(deviations(sampled_noisy(where, estimator), exact_noisy(where)).max()) <= 1


@pytest.mark.parametrize("where", ["before", "between"])
def test_dropout_before_a_choice_would_bias(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from arsm.choice_run import Run

    monkeypatch.setattr(Run, "_require_equal", lambda *_: None)
    found = sampled_noisy(where, arsm.LocalExpectation())
    assert float(deviations(found, exact_noisy(where)).max()) > 1


class Deep(nn.Module):
    """A deep router, whose last layer may be wide awake about masks."""

    def __init__(self, dropout: float, masked: float) -> None:
        super().__init__()
        sizes = itertools.pairwise([16] * 7)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in sizes))
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
            pytest.raises(RuntimeError, match="logits of a Choice") if dropout else contextlib.nullcontext(),
        ):
            for _ in range(3):
                run(model, x)


# ---------------------------------------------------------------- modes


def router(choice: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (2, 6)), choice or arsm.Choice())


def score(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (model(x).double() * torch.tensor([1.0, 10.0])).sum(-1)


def test_evaluation_mode_takes_the_most_probable() -> None:
    model, x = router().eval(), torch.randn(7, 4)
    assert torch.equal(model(x), model[:2](x).argmax(-1))  # pyright: ignore[reportIndexIssue]
    pair = arsm.Choice(k=2).eval()
    assert pair(torch.tensor([[[0.0, 3.0, -1.0, 1.0]]])).tolist() == [[1, 3]]


def test_training_mode_draws() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0], dtype=torch.float64)
    z = arsm.Choice()(logits.expand(ROWS, 1, 4))
    assert z.dtype == torch.int64
    assert float(deviations(arsm.one_hot(z, 4, torch.float64).squeeze(1), logits.softmax(-1)).max()) <= 1


def test_a_choice_that_would_learn_nothing_raises() -> None:
    model, x = router(), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="nothing will give them"):
        model(x)
    with torch.no_grad():
        assert model(x).shape == (3, 2)
    with arsm.choices(model.eval(), arsm.RLOO(2)) as run:
        with pytest.raises(RuntimeError, match=r"call model\.train"):
            run(score(model), x)
        with torch.no_grad():
            assert run(score(model), x).shape == (3,)
    model.train()
    with arsm.choices(model, arsm.RLOO(2)), pytest.raises(RuntimeError, match="call the model in that function"):
        model(x)
    with pytest.raises(RuntimeError, match="nothing will give them"):
        model(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("frozen", [False, True])  # whose logits need no gradient
@pytest.mark.parametrize("estimator", [arsm.RLOO(2), arsm.ARSM()])
def test_activation_checkpointing_is_named(
    reentrant: bool, inside: bool, frozen: bool, estimator: arsm.Estimator
) -> None:
    model, x = Routed(0.0), torch.randn(3, 4)
    for part in (model.norm, model.gate):
        part.requires_grad_(not frozen)
    with arsm.choices(model, estimator) as run:
        loss = run(
            lambda x: checkpoint(model, x.detach().requires_grad_(reentrant), use_reentrant=reentrant)[:, 0], x
        ).mean()
        if inside:
            with pytest.raises(RuntimeError, match="checkpoint the modules before and after it"):
                loss.backward()
    if not inside:
        with pytest.raises(RuntimeError, match="checkpoint the modules before and after it"):
            loss.backward()


def test_an_error_in_the_function_leaves_the_model_as_it_was() -> None:
    model, x = router(), torch.randn(3, 4)
    with pytest.raises(ZeroDivisionError), arsm.choices(model, arsm.RLOO(2)) as run:
        run(lambda x: x / (1 // 0), x)
    with pytest.raises(RuntimeError, match="nothing will give them"):
        model(x)
    with arsm.choices(model, arsm.RLOO(2)) as run:
        assert run(score(model), x).shape == (3,)


def test_a_copy_of_a_model_in_a_run_is_a_model_of_its_own() -> None:
    model, x = router(), torch.randn(3, 4)
    with arsm.choices(model, arsm.RLOO(2)) as run:
        value = run(score(model), x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with arsm.choices(other, arsm.RLOO(2)) as its_own:
                assert its_own(score(other), x).shape == (3,)
        value.mean().backward()


@pytest.mark.parametrize("k", [None, 2])
def test_evaluation_mode_can_be_exported(k: int | None) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (1, 6)), arsm.Choice(k)).eval()
    exported, x = torch.export.export(model, (torch.randn(3, 4),)), torch.randn(3, 4)
    assert torch.equal(exported.module()(x), model(x))


def test_logits_are_there_for_balancing_losses() -> None:
    model, x = router(), torch.randn(3, 4)
    choice: Any = model[2]  # pyright: ignore[reportIndexIssue]

    def loss(x: Tensor) -> Tensor:
        value = score(model)(x)
        balance = choice.logits.softmax(-1).mean(1).square().sum(-1)
        assert balance.requires_grad
        return value + balance

    with arsm.choices(model, arsm.RLOO(2)) as run:
        run(loss, x).mean().backward()
    assert choice.logits is None


@pytest.mark.parametrize("estimator", [arsm.RLOO(2), arsm.ARSM(), arsm.StraightThrough()], ids=repr)
def test_logits_keep_their_graph_after_the_run(estimator: arsm.Estimator) -> None:
    model, x = router(), torch.randn(3, 4)
    choice: Any = model[2]  # pyright: ignore[reportIndexIssue]
    with arsm.choices(model, estimator) as run:
        run(lambda x: model(x).flatten(1).sum(-1) + 0.0, x)
        assert len(choice.logits) == len(x) * max(1, estimator.paths)
        found = torch.autograd.grad(balance(choice.logits), list(model.parameters()))
    wanted = torch.autograd.grad(balance(model[:2](x)), list(model.parameters()))  # pyright: ignore[reportIndexIssue]
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected)


def balance(logits: Tensor) -> Tensor:
    """Mixes all rows, so it cannot stand in the loss function."""
    return logits.softmax(-1).mean((0, 1)).square().sum()


def test_values_have_their_own_sign_and_dtype() -> None:
    model, x = router(), torch.randn(3, 4)
    with arsm.choices(model, arsm.RLOO(4)) as run:
        assert bool((run(lambda x: -1 - score(model)(x), x) <= -1).all())


@pytest.mark.parametrize("estimator", [arsm.RLOO(4), arsm.ARSM(), arsm.StraightThrough()], ids=repr)
def test_autocast(estimator: arsm.Estimator) -> None:
    model = nn.ModuleList([router(), nn.Linear(12, 1)])
    x = torch.randn(64, 4)

    def loss(x: Tensor) -> Tensor:
        return model[1](arsm.one_hot(model[0](x), 6).flatten(1)).squeeze(-1)

    with torch.autocast("cpu", torch.bfloat16), arsm.choices(model, estimator) as run:
        value = run(loss, x)
    value.mean().backward()
    assert value.dtype == torch.float32
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert float(model[0][0].weight.grad.abs().max()) > 0  # pyright: ignore[reportIndexIssue]


class Routed(nn.Module):
    """A router over experts behind dropout and layer normalisation."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(4), nn.Dropout(dropout)
        self.gate, self.choice = nn.Linear(4, 3), arsm.Choice()
        self.experts = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.norm(x))
        z = self.choice(self.gate(h).unsqueeze(1))
        return torch.einsum("ni,nio->no", h, torch.einsum("nc,cio->nio", arsm.one_hot(z, 3).squeeze(1), self.experts))


def quadrants(n: int) -> tuple[Tensor, Tensor]:
    """The label flips with the sign of the first input: no single linear expert is right."""
    x = torch.randn(n, 4)
    return x, ((x[:, 0] > 0) == (x[:, 1] > 0)).long()


def train(model: nn.Module, call: Callable[[Tensor], Tensor], estimator: arsm.Estimator, steps: int = 150) -> float:
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        x, y = quadrants(64)
        with arsm.choices(model, estimator) as run:
            loss = run(lambda x, y: F.cross_entropy(call(x), y, reduction="none"), x, y).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()
    x, y = quadrants(1000)
    return float((call(x).argmax(-1) == y).float().mean())


@pytest.mark.parametrize(("estimator", "dropout"), [(arsm.RLOO(4), 0.1), (arsm.ARSM(), 0.0)], ids=repr)
def test_a_router_with_dropout_and_layer_norm_learns(estimator: arsm.Estimator, dropout: float) -> None:
    torch.manual_seed(0)
    model = Routed(dropout)
    assert train(model, model, estimator) > 0.7  # the best single expert: 0.5


@pytest.mark.parametrize("estimator", [arsm.RLOO(4), arsm.ARSM(), arsm.StraightThrough()], ids=repr)
def test_compiled_models_make_the_same_choices(estimator: arsm.Estimator) -> None:
    torch.manual_seed(0)
    model = Routed(0.0)
    x, y = quadrants(16)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        with arsm.choices(model, estimator, generator=torch.Generator().manual_seed(1)) as run:
            run(lambda x, y: F.cross_entropy(call(x), y, reduction="none"), x, y).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    eager, compiled = gradients(model), gradients(torch.compile(model, backend="aot_eager"))  # pyright: ignore
    assert len(eager) == len(compiled) == 5
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(eager, compiled, strict=True))


class Lossy(nn.Module):
    """The loss of a model as a module, which DDP can search for unused parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.unused = model, nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, estimator: arsm.Estimator, generator: torch.Generator) -> Tensor:
        with arsm.choices(self.model, estimator, generator=generator) as run:
            return run(lambda x, y: F.cross_entropy(self.model(x), y, reduction="none"), x, y)


def _replica(rank: int, port: int, out: Any) -> None:
    """For each estimator: gradients that two processes share, and the mean of those that each has alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Routed(0.0)
    wrapped = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(10 + rank)
    x, y = quadrants(32)

    def gradient(call: nn.Module, estimator: arsm.Estimator) -> Tensor:
        model.zero_grad()
        with arsm.choices(call, estimator, generator=torch.Generator().manual_seed(rank)) as run:
            run(lambda x, y: F.cross_entropy(call(x), y, reduction="none"), x, y).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    found = []
    for estimator in (arsm.RLOO(4), arsm.ARSM()):
        shared, alone = gradient(wrapped, estimator), gradient(model, estimator)
        torch.distributed.all_reduce(alone)
        searched = copy.deepcopy(model)
        searching = nn.parallel.DistributedDataParallel(Lossy(searched), find_unused_parameters=True)
        searched.zero_grad()
        searching(x, y, estimator, torch.Generator().manual_seed(rank)).mean().backward()
        whole = torch.cat([p.grad.flatten() for p in searched.parameters() if p.grad is not None])
        found.append((shared.tolist(), (alone / 2).tolist(), whole.tolist()))
    refusal = None
    try:
        with arsm.choices(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), arsm.RLOO(4)):
            pass
    except ValueError as error:
        refusal = str(error)
    out.put((rank, (found, refusal)))
    torch.distributed.destroy_process_group()


def test_two_processes_share_their_gradients() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")  # a forked process would wait for threads that it lost
    out = spawn.SimpleQueue()
    processes = [spawn.Process(target=_replica, args=(rank, port, out)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(out.get() for _ in processes)
    for process in processes:
        process.join()
    assert "whose forward returns run(function, *batch)" in found[0][1]
    for (first, mean, whole), (second, _, _) in zip(found[0][0], found[1][0], strict=True):
        assert first == second == whole
        assert first == pytest.approx(mean, abs=1e-6)
        assert max(abs(g) for g in mean) > 0


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed; pip install 'arsm[examples]'")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Routed()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with arsm.choices(self.model, arsm.RLOO(4)) as run:
                losses = run(lambda x, y: F.cross_entropy(self.model(x), y, reduction="none"), *batch)
            return losses.mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.02)

    torch.manual_seed(0)
    module = Module()
    data = torch.utils.data.TensorDataset(*quadrants(64 * 150))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=64))
    x, y = quadrants(1000)
    assert float((module.eval().model(x).argmax(-1) == y).float().mean()) > 0.7


# ---------------------------------------------------------------- refusals


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.BatchNorm1d(4), router()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.norm(x))


def test_batch_normalisation_in_training_is_refused() -> None:
    model, x = Normalised(), torch.randn(5, 4)
    with arsm.choices(model, arsm.RLOO(2)) as run:
        with pytest.raises(ValueError, match="norm normalises over the batch"):
            run(score(model), x)
        model.norm.eval()
        run(score(model), x).sum().backward()


@pytest.mark.parametrize(
    "estimator", [arsm.VIMCO(4), arsm.RELAX(), arsm.REBAR(), arsm.MuProp(), arsm.DoubleControl(4)], ids=repr
)
def test_estimators_that_do_not_fit_are_refused_by_name(estimator: arsm.Estimator) -> None:
    with pytest.raises(ValueError, match=type(estimator).__name__), arsm.choices(router(), estimator):
        pass


@pytest.mark.parametrize(
    ("choice", "estimator"),
    [
        (arsm.Choice(k=2), arsm.ARSM()),
        (arsm.Choice(k=2), arsm.SIMPLE(3)),
        (arsm.Choice(), arsm.SIMPLE(2)),
        (arsm.Choice(), arsm.SubsetRLOO(2)),
    ],
    ids=repr,
)
def test_subsets_need_an_estimator_that_knows_them(choice: arsm.Choice, estimator: arsm.Estimator) -> None:
    with pytest.raises(ValueError, match="RLOO fits all"), arsm.choices(router(choice), estimator):
        pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda model, x: model(x).double().mean(), "one floating value per row"),
        (lambda model, x: model(x)[:, 0], "one floating value per row"),
        (lambda model, x: model(x.repeat(2, 1)).double().mean(-1), "unflatten tokens"),
        (lambda model, x: model(x).double().sum(-1) * torch.nan, "must be finite"),
    ],
)
def test_wrong_loss_functions_are_refused(function: Callable[..., Tensor], words: str) -> None:
    model = router()
    with arsm.choices(model, arsm.RLOO(2)) as run, pytest.raises(ValueError, match=words):
        run(lambda x: function(model, x), torch.randn(3, 4))


class Optional(nn.Module):
    """Its first choice is made only if a row is positive; such a row is certain of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(arsm.Choice() for _ in range(3))
        self.logits = nn.Parameter(torch.tensor([100.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        logits = (self.logits * (x > 0).unsqueeze(-1)).unsqueeze(1)
        made = self.choices if bool((x > 0).any()) else list(self.choices)[1:]
        return sum((choice(logits).squeeze(1) for choice in made), torch.zeros_like(x))


def test_choices_that_depend_on_the_other_rows_are_refused() -> None:
    model, x = Optional(), torch.tensor([1.0] + 16 * [-1.0])
    with arsm.choices(model, arsm.ARSM()) as run:
        with pytest.raises(RuntimeError, match="which choices it makes"):
            run(model, x)
        assert run(model, -x.abs()).shape == (17,)


def test_wrong_batches_models_and_logits_are_refused() -> None:
    model, x = router(), torch.randn(3, 4)
    with arsm.choices(model, arsm.RLOO(2)) as run:
        for batch in [(), (x, torch.zeros(2)), (x, "y")]:
            with pytest.raises(ValueError, match="with the same N"):
                run(score(model), *batch)  # pyright: ignore[reportArgumentType]
        with pytest.raises(RuntimeError, match="already inside another"), arsm.choices(model, arsm.RLOO(2)):
            pass
    with (
        pytest.raises(TypeError, match="the module that contains the choices"),
        arsm.choices(score(model), arsm.RLOO(2)),  # pyright: ignore[reportArgumentType]
    ):
        pass
    with pytest.raises(ValueError, match=r"contains no arsm\.Choice"), arsm.choices(nn.Linear(2, 2), arsm.RLOO(2)):
        pass
    with pytest.raises(ValueError, match=r"\[N, K, C\], but got torch.float32 \[3, 4\]"):
        arsm.Choice()(x)
    with pytest.raises(ValueError, match="at least 5 categories"):
        arsm.Choice(k=5)(x.unsqueeze(1))
