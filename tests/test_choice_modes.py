"""Choices inside a module: training and evaluation, learning, and what is refused."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import arsm
from tests.statistics import deviations

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
    z = arsm.Choice()(logits.expand(1 << 14, 1, 4))  # so many rows that the frequencies tell
    assert z.dtype == torch.int64
    assert (
        float(deviations(arsm.one_hot(z, 4, torch.float64).squeeze(1), logits.softmax(-1)).max())
        <= 1
    )


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
    with (
        arsm.choices(model, arsm.RLOO(2)),
        pytest.raises(RuntimeError, match="call the model in that function"),
    ):
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
            lambda x: checkpoint(
                model, x.detach().requires_grad_(reentrant), use_reentrant=reentrant
            )[:, 0],
            x,
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
        return torch.einsum(
            "ni,nio->no",
            h,
            torch.einsum("nc,cio->nio", arsm.one_hot(z, 3).squeeze(1), self.experts),
        )


def quadrants(n: int) -> tuple[Tensor, Tensor]:
    """The label flips with the sign of the first input: no single linear expert is right."""
    x = torch.randn(n, 4)
    return x, ((x[:, 0] > 0) == (x[:, 1] > 0)).long()


def train(
    model: nn.Module, call: Callable[[Tensor], Tensor], estimator: arsm.Estimator, steps: int = 150
) -> float:
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


@pytest.mark.parametrize(
    ("estimator", "dropout"), [(arsm.RLOO(4), 0.1), (arsm.ARSM(), 0.0)], ids=repr
)
def test_a_router_with_dropout_and_layer_norm_learns(
    estimator: arsm.Estimator, dropout: float
) -> None:
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

    def forward(
        self, x: Tensor, y: Tensor, estimator: arsm.Estimator, generator: torch.Generator
    ) -> Tensor:
        with arsm.choices(self.model, estimator, generator=generator) as run:
            return run(lambda x, y: F.cross_entropy(self.model(x), y, reduction="none"), x, y)


class Causal(nn.Module):
    """Tokens [N, T, 4], routed and then summed with those before: losses [N, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.choice = nn.Linear(4, 3), arsm.Choice(reach="later")
        self.experts = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.experts[self.choice(self.gate(x))] * x).sum(-1).cumsum(-1)


def _by_position(call: nn.Module, model: nn.Module, estimator: arsm.Estimator, rank: int) -> Tensor:
    """The gradient of a model with a loss for each position."""
    model.zero_grad()
    x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(20 + rank))
    with arsm.choices(call, estimator, generator=torch.Generator().manual_seed(rank)) as run:
        run(call, x).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _replica(rank: int, port: int, out: Any) -> None:
    """For each estimator: gradients that two processes share, and the mean of those that each has
    alone.
    """
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
        searching = nn.parallel.DistributedDataParallel(
            Lossy(searched), find_unused_parameters=True
        )
        searched.zero_grad()
        searching(x, y, estimator, torch.Generator().manual_seed(rank)).mean().backward()
        whole = torch.cat([p.grad.flatten() for p in searched.parameters() if p.grad is not None])
        found.append((shared.tolist(), (alone / 2).tolist(), whole.tolist()))
    causal = Causal()
    shared_causal = nn.parallel.DistributedDataParallel(causal)
    for estimator in (arsm.RLOO(2), arsm.LocalExpectation()):
        shared = _by_position(shared_causal, causal, estimator, rank)
        alone = _by_position(causal, causal, estimator, rank)
        torch.distributed.all_reduce(alone)
        found.append((shared.tolist(), (alone / 2).tolist(), shared.tolist()))
    refusal = None
    try:
        with arsm.choices(
            nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), arsm.RLOO(4)
        ):
            pass
    except ValueError as error:
        refusal = str(error)
    out.put((rank, (found, refusal)))
    torch.distributed.destroy_process_group()


def test_two_processes_share_their_gradients() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # a forked process would wait for threads that it lost
    spawn = multiprocessing.get_context("spawn")
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
    lightning = pytest.importorskip(
        "lightning", reason="lightning is not installed; pip install 'arsm[examples]'"
    )

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Routed()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with arsm.choices(self.model, arsm.RLOO(4)) as run:
                losses = run(
                    lambda x, y: F.cross_entropy(self.model(x), y, reduction="none"), *batch
                )
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
    "estimator",
    [arsm.VIMCO(4), arsm.RELAX(), arsm.REBAR(), arsm.MuProp(), arsm.DoubleControl(4)],
    ids=repr,
)
def test_estimators_that_do_not_fit_are_refused_by_name(estimator: arsm.Estimator) -> None:
    with (
        pytest.raises(ValueError, match=type(estimator).__name__),
        arsm.choices(router(), estimator),
    ):
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
def test_subsets_need_an_estimator_that_knows_them(
    choice: arsm.Choice, estimator: arsm.Estimator
) -> None:
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
        with (
            pytest.raises(RuntimeError, match="already inside another"),
            arsm.choices(model, arsm.RLOO(2)),
        ):
            pass
    with (
        pytest.raises(TypeError, match="the module that contains the choices"),
        arsm.choices(score(model), arsm.RLOO(2)),  # pyright: ignore[reportArgumentType]
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"contains no arsm\.Choice"),
        arsm.choices(nn.Linear(2, 2), arsm.RLOO(2)),
    ):
        pass
    with pytest.raises(ValueError, match=r"\[N, K, C\], but got torch.float32 \[3, 4\]"):
        arsm.Choice()(x)
    with pytest.raises(ValueError, match="at least 5 categories"):
        arsm.Choice(k=5)(x.unsqueeze(1))
