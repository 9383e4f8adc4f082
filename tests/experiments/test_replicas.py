"""Stacked replicas learn what single ones do; Adam, its schedule and averages; several
processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import arsm
from arsm.noise import dirichlet
from arsm.types import Noise
from arsm_experiments.adam import Optimiser
from arsm_experiments.data import load_mnist
from arsm_experiments.layout import Layout, pack
from arsm_experiments.replicas import Objective, Replicas
from arsm_experiments.training.loop import check_finite, initial_parameters
from arsm_experiments.vae import Vae, VaeNetwork
from tests.experiments.training_runs import total_loss

SMALL = Vae(variables=3, categories=3, hidden=(8, 6), batch=10, seeds=(0, 1, 2), bound_samples=0)
RATES = (1e-3, 3e-3, 1e-2)
IMAGES = 40


@dataclass(frozen=True, eq=False)
class FixedNoise(arsm.Estimator):
    """An estimator that draws the same noise every time."""

    inner: Any
    drawn: Noise
    unbiased = True

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Noise:
        return self.drawn

    def ask(self, logits: Tensor, noise: Noise) -> arsm.extend.Queries:
        return self.inner.ask(logits, noise)

    def tell(self, logits: Tensor, queries: arsm.extend.Queries, values: Tensor) -> Tensor:
        return self.inner.tell(logits, queries, values)


def make(
    config: Vae,
    replicas: list[int],
    *,
    stacked: bool,
    estimator: Any = None,
    device: str = "cpu",
    **options: Any,
) -> Replicas:
    module = VaeNetwork(config, dense=stacked or "compiled" in options).to(device)
    if estimator is not None:
        module.estimator = estimator
    chosen, images = torch.tensor(replicas), load_mnist().train[:IMAGES]
    return Replicas(
        module,
        Objective(VaeNetwork.encode, module.losses, module.prepare, module.metrics),
        initial_parameters(config, images)[chosen],
        images.to(device),
        {
            "rate": torch.tensor(RATES)[chosen],
            "dropout": torch.zeros(len(chosen)),
            **{
                name: torch.full((len(chosen),), getattr(config, name))
                for name in ("input_dropout", "decoder_dropout", "weight_decay")
            },
        },
        [config.seeds[r] for r in replicas],
        batch=config.batch,
        watched=module.encoder_size,
        stacked=stacked,
        **options,
    )


def test_an_epoch_trains_each_replica_on_every_image_once_in_an_order_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = make(SMALL, [0, 1], stacked=True)
    taken = Replicas.next_batch
    batches: list[Tensor] = []
    monkeypatch.setattr(
        Replicas,
        "next_batch",
        lambda self, where: batches.append(taken(self, where)) or batches[-1],
    )
    replicas.epoch()
    replicas.epoch()
    assert [batch.shape[1] for batch in batches] == [SMALL.batch] * (2 * IMAGES // SMALL.batch)
    # [replicas and epochs, images, 784]
    epochs = torch.cat(batches, 1).unflatten(1, (2, IMAGES)).flatten(0, 1)
    numbers = (epochs.unsqueeze(2) == replicas.data.float()).all(-1).long().argmax(-1)
    assert torch.equal(numbers.sort(-1).values, torch.arange(IMAGES).expand(4, -1))
    assert len({tuple(order) for order in numbers.tolist()}) == 4


def test_a_step_that_is_not_finite_is_noticed_without_being_waited_for() -> None:
    replicas = make(SMALL, [0, 1], stacked=True)
    check_finite(replicas.epoch()["not_finite"], epoch=1)
    with torch.no_grad():
        replicas.parameters[1] = torch.nan
    flags = replicas.epoch()["not_finite"]
    assert flags.tolist() == [0.0, 1.0]
    with pytest.raises(FloatingPointError, match="in epoch 2; try a smaller learning rate"):
        check_finite(flags, epoch=2)


def exact(**changes: Any) -> Vae:
    """A configuration without any noise."""
    return replace(SMALL, estimator="exact", independent_decoder_sample=False, **changes)


@pytest.mark.parametrize("words", ["arsm", "arsm:pooled=True", "rloo:samples=4"])
def test_stacked_replicas_under_fixed_noise_equal_single_runs(words: str) -> None:
    config = replace(SMALL, independent_decoder_sample=False)
    inner = arsm.estimator(words)
    logits = torch.zeros(config.batch, config.variables, config.categories)
    estimator = FixedNoise(inner, inner.noise(logits, torch.Generator().manual_seed(5)))
    together = make(config, [0, 1, 2], stacked=True, estimator=estimator)
    means = [together.epoch() for _ in range(2)]
    for r in range(3):
        alone = make(config, [r], stacked=False, estimator=estimator)
        own = [alone.epoch() for _ in range(2)]
        torch.testing.assert_close(
            together.parameters[r], alone.parameters[0], rtol=1e-4, atol=1e-5
        )
        for many, one in zip(means, own, strict=True):
            torch.testing.assert_close(many["train"][r], one["train"][0], rtol=1e-5, atol=0)
            assert many["evaluations"][r] == one["evaluations"][0]


def test_replicas_one_by_one_are_bit_for_bit_what_they_are_alone() -> None:
    config = replace(SMALL, dropouts=(0.2,), layers=2, estimator="ars")
    together = make(config, [0, 1, 2], stacked=False)
    together.epoch()
    for r in range(3):
        alone = make(config, [r], stacked=False)
        alone.epoch()
        assert torch.equal(together.parameters[r], alone.parameters[0])
    assert not torch.equal(
        *(Layout.of(together.module).unpack(p)["encoder.0.weight"] for p in together.parameters[:2])
    )


def test_every_replica_has_its_own_noise_and_order() -> None:
    config = replace(SMALL, seeds=(0, 1))
    replicas = make(config, [0, 1], stacked=True)
    with torch.no_grad():
        replicas.parameters[1].copy_(replicas.parameters[0])
    replicas.settings["rate"].fill_(1e-3)
    replicas.epoch()
    assert not torch.equal(replicas.order[0], replicas.order[1])
    assert sorted(replicas.order[1].tolist()) == list(range(IMAGES))
    x = load_mnist().validation[:50].float().expand(2, -1, -1)
    same = replicas.parameters.detach()[:1].expand(2, -1)
    first, second = replicas.run(VaeNetwork.negative_elbo, same, x, generators=[])
    assert first != second


@pytest.mark.parametrize(
    ("schedule", "decay"), [("constant", 0.0), ("cosine", 0.0), ("cosine", 10.0)]
)
def test_adam_is_torchs_adam(schedule: Any, decay: float) -> None:
    config = exact(seeds=(0,), weight_decay=decay)
    replicas = make(
        config, [0], stacked=False, optimiser=Optimiser(schedule, total_steps=8, averaging=0.6)
    )
    reference = VaeNetwork(config)
    start = initial_parameters(config, replicas.data)[0]
    for p, value in zip(
        reference.parameters(), Layout.of(reference).unpack(start).values(), strict=True
    ):
        p.data.copy_(value)
    matrices, biases = (
        [p for p in reference.parameters() if (p.ndim == 1) == bias] for bias in (False, True)
    )
    groups = [{"params": matrices, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=RATES[0])
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 8)
    average, gradients = start, []
    for step in range(1, 9):
        if step % replicas.steps_per_epoch == 1:
            replicas.order.copy_(
                torch.randperm(IMAGES, generator=torch.Generator().manual_seed(step))
            )
        x = replicas.next_batch(replicas.order[0])
        replicas.train_step()
        optimiser.zero_grad()
        reference(total_loss, x, {})[0].backward()
        gradients.append(
            torch.cat(
                [p.grad.flatten() for p in reference.parameters() if p.grad is not None]
            ).double()
        )
        optimiser.step()
        if schedule == "cosine":
            cosine.step()
        average = average.lerp(pack(reference), max(1 / step, 0.4))
    torch.testing.assert_close(
        replicas.parameters[0].detach(), pack(reference), rtol=1e-4, atol=2e-6
    )
    torch.testing.assert_close(replicas.weights[0], average, rtol=1e-4, atol=2e-6)

    weight = torch.tensor([0.999 ** (8 - i) for i in range(1, 9)], dtype=torch.float64)
    seen = torch.stack(gradients)[:, : replicas.watched]
    first, second = ((weight[:, None] * seen**n).sum(0) / weight.sum() for n in (1, 2))
    torch.testing.assert_close(
        replicas.gradient_variance()[0], (second - first**2).mean(), rtol=1e-3, atol=0
    )


REGULARISED = {"input_dropout": 0.1, "decoder_dropout": 0.1, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("words", "stacked", "changes"),
    [
        ("arsm", True, {}),
        ("relax", True, {}),
        ("arsm", False, {}),
        ("arsm:pooled=True", True, REGULARISED),
        *(
            pytest.param(words, False, {}, marks=pytest.mark.slow)
            for words in ("muprop", "rebar", "double-control")
        ),
    ],
)
def test_the_step_traces_without_a_break(
    words: str, stacked: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    replicas = make(
        replace(SMALL, estimator=words, **changes), [0, 1, 2], stacked=stacked, compiled=True
    )
    assert not replicas.epoch()["not_finite"].any()
    # all stacks share them: the code, the losses, the metrics, Adam, its scale and the slow moment
    assert len(graphs) == 5 + len(replicas._losses)
    for half in replicas.state["first_moment"].tensor_split([replicas.watched], -1):
        assert bool((half != 0).any(-1).all())


@pytest.mark.parametrize("stacked", [False, True])
def test_learned_parts_learn(stacked: bool) -> None:
    replicas = make(replace(SMALL, estimator="relax"), [0, 1], stacked=stacked)
    start = replicas.parameters.detach().clone()
    replicas.epoch()
    for moved in replicas.parameters.detach() - start:
        parts = replicas.layout.unpack(moved)
        assert all(
            bool((parts[f"learned.0.{name}"] != 0).any())
            for name in ("hidden.weight", "out.weight")
        )


@pytest.mark.parametrize(
    ("words", "stacked"), [("nvil", False), ("nvil", True), ("aimle:rate=0.1", False)]
)
def test_running_statistics_are_every_replicas_own(words: str, stacked: bool) -> None:
    config = replace(SMALL, estimator=words)
    replicas = make(config, [0, 1], stacked=stacked)
    start = {name: buffer.clone() for name, buffer in replicas.buffers.items()}
    assert len(start) == 2
    replicas.epoch()
    for name, buffer in replicas.buffers.items():
        assert bool((buffer != start[name]).all()), name
        assert buffer[0] != buffer[1] or words != "nvil", name
    state = replicas.state_dict(slice(1, 2))
    replicas.epoch()
    replicas.load_state_dict(slice(1, 2), state)
    for name, buffer in replicas.buffers.items():
        assert torch.equal(buffer[1:], state["buffers"][name])
    if not stacked:
        alone = make(config, [1], stacked=False)
        alone.epoch()
        for name, buffer in alone.buffers.items():
            assert torch.equal(buffer, state["buffers"][name])


def test_nvils_running_mean_is_that_of_its_definition() -> None:
    """One step from m = 0: the mean over images of f - b, times 1 - decay; b starts at 0."""
    config = replace(SMALL, estimator="nvil", batch=IMAGES)
    replicas = make(config, [0], stacked=False)
    train = replicas.epoch()["train"]
    torch.testing.assert_close(
        replicas.buffers["learned.1.mean"], -(1 - 0.8) * train.double(), rtol=1e-5, atol=0
    )


@pytest.mark.slow
def test_one_process_compiles_as_many_engines_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    trained = []
    with torch._dynamo.config.patch(recompile_limit=4):
        for batch in (4, 5, 10, 20):
            trained.append(make(replace(SMALL, batch=batch), [0, 1], stacked=True, compiled=True))
            assert not trained[-1].epoch()["not_finite"].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "options",
    [{"compiled": True}, {"steps_per_replay": 4}, {"compiled": True, "steps_per_replay": 2}],
    ids=str,
)
def test_on_a_gpu_compiled_and_captured_epochs_equal_eager_ones(options: dict[str, Any]) -> None:
    eager = make(exact(), [0, 1, 2], stacked=True, device="cuda")
    faster = make(exact(), [0, 1, 2], stacked=True, device="cuda", **options)
    for _ in range(2):
        means = [replicas.epoch()["train"] for replicas in (eager, faster)]
        torch.testing.assert_close(*means, rtol=1e-4, atol=0)
    assert int(faster.state["step"]) == 2 * faster.steps_per_epoch
    torch.testing.assert_close(eager.parameters, faster.parameters, rtol=1e-3, atol=1e-5)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="choose a smaller one"):
        make(replace(SMALL, batch=IMAGES + 1), [0], stacked=False)
    with pytest.raises(ValueError, match="must divide the 4 steps"):
        make(SMALL, [0], stacked=True, steps_per_replay=3)


# ---------------------------------------------------------------- several processes


def worker(rank: int, folder: str) -> None:
    """One of two processes: an epoch of the replicas, then DDP with the estimator inside the
    wrapped module.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    replicas = make(exact(), [0, 1, 2], stacked=False)
    means = replicas.epoch()
    x, noise = shared_batch()
    model = DistributedDataParallel(Wrapped(noise.chunk(2)[rank]))
    model(x.chunk(2)[rank]).backward()
    gradients = [p.grad for p in model.parameters()]
    torch.save((replicas.state["first_moment"], means["train"], gradients), f"{folder}/{rank}.pt")
    own = [
        torch.rand(8, generator=generator)
        for generator in make(SMALL, [0, 1, 2], stacked=False).noise_generators
    ]
    torch.save(torch.stack(own), f"{folder}/noise-{rank}.pt")
    dist.destroy_process_group()


class Wrapped(torch.nn.Module):
    """The ELBO's ARSM estimate, made inside forward."""

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vae = VaeNetwork(SMALL)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        def elbo(z: Tensor, x: Tensor) -> Tensor:
            return self.vae.log_joint([z], x)

        out = arsm.estimate(arsm.ARSM(), self.vae.encode(x), elbo, x, noise=self.noise)
        return -out.value.mean()


def shared_batch() -> tuple[Tensor, Tensor]:
    x = load_mnist().train[:8].float()
    logits = torch.zeros(8, SMALL.variables, SMALL.categories)
    return x, dirichlet(logits, torch.Generator().manual_seed(3))


def test_two_processes_give_one_processs_gradients(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = make(exact(), [0, 1, 2], stacked=False)
    means = alone.epoch()
    x, noise = shared_batch()
    model = Wrapped(noise)
    model(x).backward()
    for moment, train, gradients in found:
        torch.testing.assert_close(moment, alone.state["first_moment"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(train, means["train"], rtol=1e-5, atol=0)
        torch.testing.assert_close(
            gradients, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-5
        )
    assert torch.equal(found[0][0], found[1][0])
    drawn = torch.cat([torch.load(tmp_path / f"noise-{rank}.pt") for rank in range(2)])
    assert len(drawn.unique(dim=0)) == 6  # no two seeds or processes have the same noise


def test_every_replica_starts_at_a_multiple_of_64_bytes() -> None:
    vector = pack(torch.nn.Linear(3, 5))
    assert len(vector) == 32
    assert not vector[20:].any()
