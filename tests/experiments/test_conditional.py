"""Half to half: its likelihood and gradients against enumeration, its run folders, killing and
resuming.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm_experiments.conditional import HALF, Conditional, ConditionalNetwork
from arsm_experiments.data import load_mnist
from arsm_experiments.replicas import Layout, Objective, Replicas
from arsm_experiments.runs.reader import read_run
from arsm_experiments.training.loop import initial_parameters, train
from arsm_experiments.training.measure import multi_sample_bound, probes
from tests.experiments.interrupted import assert_goes_on_when_killed, assert_same
from tests.experiments.training_runs import assert_whole, total_loss
from tests.statistics import deviations

TINY = Conditional(
    variables=2,
    categories=3,
    batch=50,
    images=500,
    epochs=3,
    measure_every=1,
    measure_samples=2,
    test_samples=3,
    rates=(1e-2,),
    device="cpu",
)
ESTIMATORS = (
    *(
        "arsm",
        "arsm:pooled=True",
        "ars",
        "rloo:samples=3",
        "rloo:samples=3,live=1",
        "reinforce",
        "relax",
    ),
    *("straight-through", "gumbel-softmax", "gumbel-softmax:hard=True", "muprop"),
)
DROPOUT = 0.4
KEPT = torch.tensor([0, 1 / (1 - DROPOUT)])


@pytest.fixture
def images() -> Tensor:
    return load_mnist().train[:3].float()


def make(config: Conditional, *, dense: bool = False) -> ConditionalNetwork:
    """A network whose weights are large enough to bend f."""
    torch.manual_seed(0)
    network = config.model(dense=dense)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn(p.shape), alpha=0.3)
    return network


def log_probabilities(
    network: ConditionalNetwork, x: Tensor, kept: tuple[Tensor, Tensor] | tuple[()] = ()
) -> tuple[Tensor, Tensor]:
    """ln p(z2 | x_u) and ln p(x_l | z2) for all z2, by enumeration: [N, Z] each; `kept` [K, 1] of
    z1 and of z2.
    """
    config = network.config
    every = torch.tensor(list(itertools.product(range(config.categories), repeat=config.variables)))
    one = arsm.one_hot(every, config.categories)
    maps = network.first, network.second, network.last

    def log_q(logits: Tensor) -> Tensor:
        """[N, K C] -> [N, Z]."""
        return torch.einsum(
            "nkc,zkc->nz", logits.unflatten(-1, (config.variables, -1)).log_softmax(-1), one
        )

    inputs = [one * each if kept else one for each in (kept or (1, 1))]
    log_z1 = log_q(maps[0](x[:, :HALF]))
    log_z2 = (log_z1.unsqueeze(-1) + log_q(maps[1](inputs[0].flatten(1)))).logsumexp(1)
    pixels = maps[2](inputs[1].flatten(1))
    log_p = -torch.nn.functional.binary_cross_entropy_with_logits(
        pixels.expand(len(x), -1, -1),
        x[:, None, HALF:].expand(-1, len(every), -1),
        reduction="none",
    ).sum(-1)
    return log_z2, log_p


def enumerate_bound(network: ConditionalNetwork, x: Tensor) -> Tensor:
    """The training objective for one path or two, over all paths and all that dropout may keep:
    [].
    """
    config = network.config
    (rate,) = config.dropouts
    masks = list(itertools.product(range(2), repeat=2 * config.variables)) if rate else [()]
    total = torch.zeros(())
    for mask in masks:
        kept = tuple(KEPT[torch.tensor(mask)].view(2, config.variables, 1)) if mask else ()
        weight = math.prod(1 - rate if k else rate for k in mask)
        log_z2, log_p = log_probabilities(network, x, kept)  # pyright: ignore[reportArgumentType]
        q = log_z2.exp()
        if config.bound_samples == 1:
            value = (q * log_p).sum(-1)
        else:
            pair = torch.logaddexp(log_p.unsqueeze(-1), log_p.unsqueeze(-2)) - math.log(2)
            value = (q.unsqueeze(-1) * q.unsqueeze(-2) * pair).sum((-2, -1))
        total = total + weight * value.mean()
    return total


def projected(network: ConditionalNetwork, gradients: Tensor) -> Tensor:
    """[n, P] -> [n, maps x 16]: each parameter's gradient in 16 random directions, a test of few
    comparisons.
    """
    parts = gradients.double().split([p.numel() for p in network.parameters()], -1)
    generator = torch.Generator().manual_seed(1)
    directions = [
        torch.randn(part.shape[-1], 16, dtype=torch.float64, generator=generator) for part in parts
    ]
    return torch.cat(
        [part @ way / way.shape[0] ** 0.5 for part, way in zip(parts, directions, strict=True)], -1
    )


def sampled_gradients(network: ConditionalNetwork, x: Tensor, n: int = 3000) -> Tensor:
    """n independent gradients of the loss, [n, P]: mapped, or one by one where the estimator cannot
    be mapped.
    """
    settings = {"dropout": torch.tensor(DROPOUT)}
    if not network.estimator.vmappable:
        # the mean over copies of the images is an estimate too, and quicker than as many losses
        x = x.repeat(30, 1)
        losses = (network(total_loss, x, settings)[0] for _ in range(n // 15))
        return torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]
                )
                for loss in losses
            ]
        )
    layout = Layout.of(network)
    weights = (
        torch.cat([p.detach().flatten() for p in network.parameters()])
        .expand(n, -1)
        .clone()
        .requires_grad_()
    )

    def loss(vector: Tensor) -> Tensor:
        return torch.func.functional_call(
            network, layout.unpack(vector), (total_loss, x, settings)
        )[0]

    return torch.autograd.grad(torch.vmap(loss, randomness="different")(weights).sum(), weights)[0]


def worst_deviation(config: Conditional, x: Tensor) -> float:
    """Of the loss's gradient from that of the enumerated objective."""
    network = make(config, dense=True)
    exact = torch.autograd.grad(-enumerate_bound(network, x), list(network.parameters()))
    expected = projected(network, torch.cat([g.flatten() for g in exact]).unsqueeze(0)).squeeze(0)
    torch.manual_seed(1)
    return float(deviations(projected(network, sampled_gradients(network, x)), expected).max())


@pytest.mark.parametrize(
    "words", ["arsm", "arsm:pooled=True", "ars", "rloo:samples=3,live=1", "reinforce", "muprop"]
)
def test_all_maps_get_an_unbiased_gradient(words: str, images: Tensor) -> None:
    assert worst_deviation(replace(TINY, estimator=words), images) <= 1


def test_a_biased_gradient_is_caught(images: Tensor) -> None:
    assert worst_deviation(replace(TINY, estimator="straight-through"), images) > 1


@pytest.mark.parametrize("words", ["vimco", "arsm", "rloo:samples=3,live=1"])
def test_the_gradient_of_the_two_sample_bound_is_unbiased(words: str, images: Tensor) -> None:
    assert worst_deviation(replace(TINY, estimator=words, bound_samples=2), images) <= 1


@pytest.mark.parametrize(("words", "samples"), [("arsm", 1), ("arsm", 2), ("vimco", 2)])
def test_dropout_leaves_the_gradient_unbiased(words: str, samples: int, images: Tensor) -> None:
    config = replace(TINY, estimator=words, bound_samples=samples, dropouts=(DROPOUT,))
    assert worst_deviation(config, images) <= 1


def test_pseudo_samples_of_an_image_share_what_is_dropped(images: Tensor) -> None:
    seen: dict[bytes, set[bytes]] = {}

    class Watched(ConditionalNetwork):
        def likelihood(self, z2: Tensor, x_l: Tensor, kept: Tensor | None = None) -> Tensor:
            assert kept is not None
            for image, own in zip(x_l, kept, strict=True):
                seen.setdefault(image.numpy().tobytes(), set()).add(own.numpy().tobytes())
            return super().likelihood(z2, x_l, kept)

    network = Watched(replace(TINY, variables=20, dropouts=(DROPOUT,)))
    network(total_loss, images, {"dropout": torch.tensor(DROPOUT)})
    assert [len(kept) for kept in seen.values()] == [1, 1, 1]
    assert len(set.union(*seen.values())) == 3


def test_the_network_has_the_papers_shape_and_initialisation() -> None:
    network = ConditionalNetwork(Conditional())
    assert [tuple(p.shape) for p in network.parameters() if p.ndim == 2] == [
        (200, 392),
        (200, 200),
        (392, 200),
    ]
    assert network.encoder_size == 392 * 200 + 200 + 200 * 200 + 200
    for p in network.parameters():
        if p.ndim == 1:
            assert not p.any()
        else:
            limit = (6 / sum(p.shape)) ** 0.5
            assert 0.99 * limit < float(p.detach().abs().max()) <= limit


def replicas_of(
    config: Conditional, images: Tensor, *, stacked: bool, dense: bool, compiled: bool = False
) -> Replicas:
    weights = initial_parameters(config, images)
    settings = {
        "rate": torch.full((len(weights),), 1e-2),
        "dropout": torch.full((len(weights),), DROPOUT),
    }
    network = config.model(dense=dense)
    return Replicas(
        network,
        Objective(ConditionalNetwork.encode, network.losses, metrics=network.metrics),
        weights,
        images,
        settings,
        list(config.seeds),
        batch=5,
        watched=network.encoder_size,
        stacked=stacked,
        compiled=compiled,
    )


def test_biases_may_begin_at_the_mean_image(tmp_path: Path) -> None:
    images = load_mnist().train[:500]
    config = replace(TINY, root=tmp_path, name="mean", pixel_bias="mean", seeds=(0, 1))
    network = config.model()
    for row in initial_parameters(config, images):
        bias = Layout.of(network).unpack(row)["last.bias"]
        often = images[:, HALF:].float().mean(0).clamp(1e-3, 1 - 1e-3)
        torch.testing.assert_close(bias.sigmoid(), often)
    zero, mean = (
        train(each)[0] for each in (replace(config, name="zero", pixel_bias="zero"), config)
    )
    for before, after in zip(
        read_run(zero).series("train")[1], read_run(mean).series("train")[1], strict=True
    ):
        assert after[0] < before[0] - 50


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("paths", [1, 2])
def test_the_likelihood_in_pieces_comes_close_to_enumeration(stacked: bool, paths: int) -> None:
    config, x = replace(TINY, seeds=(0, 1), bound_samples=paths), load_mnist().test[:25]
    replicas = replicas_of(config, x, stacked=stacked, dense=stacked)
    networks = []
    for r, seed in enumerate(config.seeds):
        network = make(config)
        for p in network.parameters():
            p.data.mul_(1 + seed)
        replicas.parameters.data[r, : sum(p.numel() for p in network.parameters())] = torch.cat(
            [p.detach().flatten() for p in network.parameters()]
        )
        networks.append(network)
    torch.manual_seed(0)
    task, generators = ConditionalNetwork.log_likelihood, probes(config, replicas, 0)
    one, many = (
        multi_sample_bound(replicas, task, replicas.weights, x, s, generators) for s in (1, 3000)
    )
    for r, network in enumerate(networks):
        with torch.no_grad():
            log_z2, log_p = log_probabilities(network, x.float())
        likelihood = -(log_z2 + log_p).logsumexp(-1).mean()
        bound = -(log_z2.exp() * log_p).sum(-1).mean()
        assert likelihood < bound - 2
        assert float(many[r]) == pytest.approx(
            float(likelihood), abs=0.03 * float(bound - likelihood)
        )
        assert float(one[r]) > float(likelihood) + 0.3 * float(bound - likelihood)


@pytest.mark.parametrize("words", [*ESTIMATORS, "vimco"])
def test_each_estimator_trains_in_turn_and_stacked(words: str) -> None:
    samples = 3 if words in ("vimco", "ars", "gumbel-softmax") else 1
    config = replace(
        TINY, estimator=words, seeds=(0, 1), bound_samples=samples, dropouts=(DROPOUT,)
    )
    for stacked, dense in [(False, False), (False, True)] + [(True, True)] * arsm.estimator(
        words
    ).vmappable:
        replicas = replicas_of(config, load_mnist().train[:10], stacked=stacked, dense=dense)
        start = replicas.parameters.detach().clone()
        metrics = replicas.epoch()
        assert int(replicas.state["step"]) == 2
        for r, parameters in enumerate(replicas.parameters.detach()):
            moved = replicas.layout.unpack(parameters - start[r])
            assert all(
                float(moved[f"{name}.weight"].abs().max()) > 0
                for name in ("first", "second", "last")
            )
        assert not metrics["not_finite"].any()
        assert bool((metrics["evaluations"] >= samples).all())


def test_what_takes_turns_cannot_be_stacked() -> None:
    replicas = replicas_of(
        replace(TINY, estimator="muprop"), load_mnist().train[:10], stacked=True, dense=True
    )
    with pytest.raises(RuntimeError):
        replicas.epoch()


def test_the_stacked_bound_traces_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = replace(TINY, estimator="vimco", bound_samples=2, seeds=(0, 1), dropouts=(DROPOUT,))
    replicas = replicas_of(config, load_mnist().train[:10], stacked=True, dense=True, compiled=True)
    assert not replicas.epoch()["not_finite"].any()
    assert bool((replicas.state["first_moment"] != 0).any(-1).all())


def test_a_run_leaves_metrics_pictures_and_its_best_weights(tmp_path: Path) -> None:
    config = replace(
        TINY, root=tmp_path, seeds=(3, 4), rates=(3e-3, 1e-2), test_samples=10, averaging=0.9
    )
    folders = train(config)
    assert [folder.name for folder in folders] == ["arsm-rate0.003-seed-3", "arsm-rate0.01-seed-3"]
    for folder in folders:
        last = assert_whole(folder)
        assert last["best_test"] < last["test"]
        assert 1 <= last["evaluations"] <= 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", ["arsm", "muprop"])
def test_on_a_gpu_replicas_train_stacked_or_one_by_one(words: str, tmp_path: Path) -> None:
    # three: the side streams of two replicas that take turns never met
    config = replace(TINY, estimator=words, root=tmp_path, seeds=(0, 1, 2), device="cuda")
    (folder,) = train(config)
    _, train_loss = read_run(folder).series("train")
    assert len({tuple(loss) for loss in train_loss}) == 3
    assert all(loss[-1] < loss[0] for loss in train_loss)
    torch.rand(1, device="cuda")
    (again,) = train(replace(config, root=tmp_path / "again"))
    torch.testing.assert_close(
        read_run(again).series("train")[1][0][0], train_loss[0][0], rtol=1e-3, atol=0
    )


def test_a_picture_shows_image_half_and_completions(images: Tensor) -> None:
    whole, half, *completions = make(TINY).pictures(images)
    assert torch.equal(whole, images)
    assert set(half[:, HALF:].unique().tolist()) == {0.5}
    for sheet in (half, *completions):
        assert torch.equal(sheet[:, :HALF], images[:, :HALF])
    assert not torch.equal(completions[0], completions[1])


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "estimator": "vimco",
        "bound_samples": 2,
        "dropouts": (0.1, 0.2),
        "averaging": 0.9,
    }
    assert_goes_on_when_killed(
        replace(TINY, **options, schedule="cosine", measure_samples=1), tmp_path
    )


def test_training_stops_where_second_moments_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of 1e33 is finite, its square is not, and no update moves after it."""
    train_step = Replicas.train_step

    def broken(replicas: Replicas) -> None:
        train_step(replicas)
        if int(replicas.state["step"]) == 15:
            replicas.state["second_moment"][1] = torch.inf

    monkeypatch.setattr(Replicas, "train_step", broken)
    config = replace(TINY, root=tmp_path, seeds=(0, 1))
    with pytest.raises(FloatingPointError, match="gradients were not finite in epoch 2"):
        train(config)
    (folder,) = config.runs()
    assert {line["epoch"] for line in read_run(folder).metrics} == {1}


def test_a_resumed_run_keeps_the_best_weights_from_before(tmp_path: Path) -> None:
    config = replace(
        TINY, estimator="vimco", bound_samples=2, rates=(0.3,), averaging=0.9, schedule="cosine"
    )
    (whole,) = train(replace(config, root=tmp_path / "whole"))
    ((_, best, last),) = read_run(whole).series("validation")[1]
    assert best < last, "the second epoch must be the best for this test to say anything"

    def stop(epoch: int) -> None:
        if epoch == 2:
            raise KeyboardInterrupt

    again = replace(config, root=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        train(again, on_epoch=stop)
    assert_same(train(replace(again, resume=True)), [whole])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_samples": 150}, "--test-samples must be a multiple of 100"),
        ({"measure_samples": 0}, "--measure-samples must be at least 1"),
        ({"bound_samples": 0}, "--bound-samples must be at least 1"),
        ({"estimator": "vimco"}, '"vimco" takes its samples from --bound-samples'),
        ({"estimator": "vimco:samples=4", "bound_samples": 4}, "has no options here"),
        ({"estimator": "unordered-set", "variables": 1, "bound_samples": 2}, "is for one variable"),
        ({"estimator": "exact", "bound_samples": 20}, "would enumerate"),
    ],
)
def test_impossible_options_are_refused_in_a_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        train(replace(TINY, root=tmp_path, **changes))
    assert not any(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["nvil", "aimle:rate=0.1"])
def test_a_training_step_updates_running_statistics(words: str, images: Tensor) -> None:
    """By the estimates of both layers, in turn."""
    network = make(replace(TINY, estimator=words))
    learned = network.estimator.learned
    before = {name: buffer.clone() for name, buffer in learned.named_buffers()}
    adapted: list[arsm.Estimate] = []
    adapt = type(network.estimator).adapt

    def counted(self: arsm.Estimator, out: arsm.Estimate) -> None:
        adapted.append(out)
        adapt(self, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(network.estimator), "adapt", counted)
        total_loss(network, images, {})
    assert [out.z.shape[-1] for out in adapted] == [TINY.variables] * 2
    assert any(bool(buffer != before[name]) for name, buffer in learned.named_buffers())
