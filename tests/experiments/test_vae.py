"""The VAE experiment: its objective against enumeration, its run folders, killing and resuming."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import arsm
from arsm_experiments.adam import Optimiser
from arsm_experiments.data import load_mnist
from arsm_experiments.learned_temperature import LearnedTemperature
from arsm_experiments.replicas import Layout, Objective, Replicas
from arsm_experiments.runs.files import RunError
from arsm_experiments.runs.reader import load_checkpoint
from arsm_experiments.training import loop
from arsm_experiments.training.loop import initial_parameters, train
from arsm_experiments.training.measure import multi_sample_bound, probes
from arsm_experiments.training.pictures import save_sheet
from arsm_experiments.vae import Vae, VaeNetwork, bernoulli, dropout
from tests.experiments.interrupted import assert_goes_on_when_killed, assert_same
from tests.experiments.training_runs import assert_whole, total_loss
from tests.statistics import deviations

TINY = Vae(
    variables=2,
    categories=3,
    hidden=(6, 5),
    batch=50,
    images=500,
    epochs=3,
    measure_every=1,
    bound_samples=0,
    rates=(1e-2,),
    device="cpu",
)
NO_SETTINGS: dict[str, Tensor] = {}


@pytest.fixture
def images() -> Tensor:
    return load_mnist().train[:3].float()


@pytest.mark.parametrize("dropped", [False, True])
def test_weights_added_up_are_the_product_with_one_hot(dropped: bool) -> None:
    layer, z = (
        torch.nn.Linear(12, 5),
        torch.randint(4, (7, 3), generator=torch.Generator().manual_seed(0)),
    )
    kept = torch.rand(7, 3, 1) if dropped else None
    found = []
    for dense in (False, True):
        made = Vae().model(dense=dense).of_choices(layer, z, kept)
        found.append(
            (made.detach(), *torch.autograd.grad(made.square().sum(), list(layer.parameters())))
        )
        assert not Vae().model(dense=dense).of_choices(layer, z, kept, frozen=True).requires_grad
    torch.testing.assert_close(*found)


def enumerate_elbo(vae: VaeNetwork, x: Tensor) -> Tensor:
    """E_q[ln p(x, z) - ln q(z | x)] of every image, over all paths: [N]."""
    config = vae.config
    every = torch.tensor(list(itertools.product(range(config.categories), repeat=config.variables)))
    log_q1 = vae.encode(x)
    total = torch.zeros(len(x))
    for z1 in every:
        z1 = z1.expand(len(x), -1)
        paths = [[z1]] if config.layers == 1 else [[z1, z2.expand(len(x), -1)] for z2 in every]
        for zs in paths:
            logits = [log_q1] if config.layers == 1 else [log_q1, vae.encode_lower(z1)]
            log_q = torch.stack(
                [arsm.log_prob(phi, z).sum(-1) for phi, z in zip(logits, zs, strict=True)]
            ).sum(0)
            total = total + log_q.exp() * (vae.log_joint(zs, x) - log_q)
    return total


def gradients(vae: VaeNetwork, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(
        loss, list(vae.parameters()), allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kl", ["sampled", "analytic"])
@pytest.mark.parametrize("first_logit_fixed", [True, False])
def test_the_exact_loss_has_the_gradient_of_the_elbo(
    layers: Any, kl: Any, first_logit_fixed: bool, images: Tensor
) -> None:
    torch.manual_seed(0)
    config = replace(
        TINY, estimator="exact", layers=layers, kl=kl, first_logit_fixed=first_logit_fixed
    )
    vae = VaeNetwork(replace(config, independent_decoder_sample=False))
    loss, metrics = vae(total_loss, images, NO_SETTINGS)
    expected = -enumerate_elbo(vae, images).mean()
    torch.testing.assert_close(metrics["train"], expected.detach())
    torch.testing.assert_close(gradients(vae, loss), gradients(vae, expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 2},
        {"layers": 2, "afresh": True, "first_logit_fixed": False},
        {"layers": 2, "afresh": True, "as_released": True},
        {"kl": "analytic", "independent_decoder_sample": False},
    ],
)
def test_the_arsm_loss_is_unbiased_for_encoder_and_decoder(
    changes: dict[str, Any], images: Tensor
) -> None:
    """2,000 losses; the suite's one false-alarm rate holds (`tests.statistics`)."""
    torch.manual_seed(0)
    vae = VaeNetwork(replace(TINY, hidden=(3,), **changes))
    expected = gradients(vae, -enumerate_elbo(vae, images).mean())
    if vae.config.as_released:
        lower = sum(p.numel() for p in vae.lower_encoder.parameters())
        expected[vae.encoder_size - lower : vae.encoder_size] = 0
    layout = Layout.of(vae)
    weights = (
        torch.cat([p.detach().flatten() for p in vae.parameters()])
        .expand(2000, -1)
        .clone()
        .requires_grad_()
    )
    vae.dense = True

    def loss(vector: Tensor) -> Tensor:
        return torch.func.functional_call(
            vae, layout.unpack(vector), (total_loss, images, NO_SETTINGS)
        )[0]

    losses = torch.vmap(loss, randomness="different")(weights)
    (samples,) = torch.autograd.grad(losses.sum(), weights)
    # float32: allow for the rounding of values near 500
    assert float((deviations(samples.double(), expected.double()) - 1e-3).max()) <= 1


def test_the_independent_sample_trains_the_decoder_and_nothing_else(images: Tensor) -> None:
    torch.manual_seed(0)
    vae = VaeNetwork(replace(TINY, estimator="exact"))
    found = []
    for seed in (1, 2):
        loss, _ = vae(
            total_loss, images, NO_SETTINGS, generator=torch.Generator().manual_seed(seed)
        )
        found.append(
            gradients(vae, loss).split(
                [vae.encoder_size, sum(p.numel() for p in vae.decoder.parameters())]
            )
        )
    (encoder, decoder), (other_encoder, other_decoder) = found
    assert torch.equal(encoder, other_encoder)
    assert not torch.equal(decoder, other_decoder)


def test_the_encoder_has_the_papers_shape_and_initialisation() -> None:
    vae = VaeNetwork(Vae(layers=2, first_logit_fixed=False))
    shapes = [tuple(p.shape) for p in vae.parameters() if p.ndim == 2]
    assert shapes == [
        (512, 784), (256, 512), (200, 256), (200, 200),
        (256, 200), (512, 256), (784, 512), (200, 200),
    ]  # fmt: skip
    for p in vae.parameters():
        if p.ndim == 1:
            assert not p.any()
        else:
            limit = (6 / sum(p.shape)) ** 0.5
            assert 0.99 * limit < float(p.detach().abs().max()) <= limit


@pytest.mark.parametrize("stacked", [False, True])
def test_as_released_the_first_encoder_takes_two_steps_and_the_second_none(stacked: bool) -> None:
    config = replace(TINY, layers=2, afresh=True, seeds=(0, 1))
    images = load_mnist().train[:1]
    moved = []
    for released in (False, True):
        replicas = replicas_of(replace(config, as_released=released), images, stacked=stacked)
        before = replicas.parameters.clone()
        replicas.train_step()
        moved.append([replicas.layout.unpack(row) for row in replicas.parameters - before])
    for once, released in zip(*moved, strict=True):
        for name, step in released.items():
            # Adam's first step is the rate in every element whose gradient is not 0
            seen = step != 0
            if name.startswith("lower_encoder"):
                assert not seen.any()
                assert once[name].any()
            else:
                assert seen.any()
                pace = 2 if name.startswith("encoder") else 1
                torch.testing.assert_close(
                    step[seen].abs(), torch.full_like(step[seen], pace), rtol=1e-3, atol=0
                )


def test_a_learned_temperature_begins_as_straight_through_gumbel_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, slope = (torch.randn(4, 3, 5, generator=generator) for _ in range(2))
    found = []
    for estimator in (
        arsm.GumbelSoftmax(hard=True),
        LearnedTemperature(),
        arsm.Average(LearnedTemperature(), 1),
    ):
        phi = logits.clone().requires_grad_()
        noise = torch.Generator().manual_seed(1)
        out = arsm.estimate(
            estimator, phi, lambda z, w: (z * w).sum((-2, -1)), slope, generator=noise
        )
        learned = list(estimator.learned.parameters())
        found.append((out.value.detach(), *torch.autograd.grad(out.value.sum(), [phi, *learned])))
    (value, grad), (same, same_grad, slow), _ = found
    assert torch.equal(value, same)
    assert torch.equal(grad, same_grad)
    # by hand, at tau = 1: d softmax(x / tau) / d tau = -s (x - s'x)
    log_pi = arsm.GumbelSoftmax().noise(logits, torch.Generator().manual_seed(1))
    x = logits - log_pi
    s = x.softmax(-1)
    expected = -(slope * s * (x - (s * x).sum(-1, keepdim=True))).sum()
    torch.testing.assert_close(slow, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], found[2])


def test_a_temperature_is_trained_with_the_model(tmp_path: Path) -> None:
    words = "3*gumbel-softmax:hard=True"
    config = replace(
        TINY, estimator=words, learned_temperature=True, layers=2, kl="analytic", root=tmp_path
    )
    (folder,) = train(replace(config, independent_decoder_sample=False))
    state = load_checkpoint(folder / "checkpoint.pt")["state"]
    temperature = Layout.of(config.model()).unpack(state["parameters"][0])["learned.0.value"]
    assert 0.01 < abs(float(temperature) - 1) < 0.5


def test_the_decoder_loss_has_the_gradient_of_the_likelihood(images: Tensor) -> None:
    torch.manual_seed(0)
    vae = VaeNetwork(TINY)
    code = vae.encode(images).detach()
    pixels, _, slope = vae.decoder_loss(images, code, NO_SETTINGS, torch.Generator().manual_seed(1))
    zs, _ = vae.sample(code, torch.Generator().manual_seed(1))
    parameters = list(vae.decoder.parameters())
    expected = torch.autograd.grad(-vae.log_joint(zs, images).mean(), parameters)
    torch.testing.assert_close(torch.autograd.grad(pixels, parameters, slope), expected)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    h = dropout(torch.ones(100_000), torch.tensor(0.3), torch.Generator().manual_seed(0))
    assert abs(float((h == 0).float().mean()) - 0.3) < 0.01  # seven standard errors
    assert sorted(set(h.tolist())) == pytest.approx([0, 1 / 0.7])


def test_dropout_of_the_decoder_is_for_its_own_sample_only(images: Tensor) -> None:
    config = replace(TINY, estimator="exact", hidden=(40, 30))
    settings = {"decoder_dropout": torch.tensor(0.5)}
    found = []
    for rate in (0.0, 0.5):
        torch.manual_seed(0)
        vae = VaeNetwork(replace(config, decoder_dropout=rate))
        code = vae.encode(images)
        drawn = [torch.Generator().manual_seed(1) for _ in range(3)]
        estimate = vae.loss(images, code, settings, drawn[0])[0].detach()
        own = vae.decoder_loss(images, code, settings, drawn[1])[0].detach()
        found.append((estimate, own, vae.negative_elbo(images, drawn[2]).detach()))
    (estimate, own, elbo), (same, other, same_elbo) = found
    assert torch.equal(estimate, same)
    assert torch.equal(elbo, same_elbo)
    assert not torch.equal(own, other)


def replicas_of(config: Vae, images: Tensor, *, stacked: bool) -> Replicas:
    weights = initial_parameters(config, images)
    rates = {"rate": torch.ones(len(weights))}
    module = VaeNetwork(config, dense=stacked)
    return Replicas(
        module,
        Objective(VaeNetwork.encode, module.losses, module.prepare, module.metrics),
        weights,
        images,
        rates,
        list(config.seeds),
        batch=1,
        watched=module.encoder_size,
        optimiser=Optimiser(paces=module.paces),
        stacked=stacked,
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_the_importance_weighted_bound_comes_close_to_the_likelihood(stacked: bool) -> None:
    config, images = replace(TINY, seeds=(0, 1)), load_mnist().test[:60]
    replicas = replicas_of(config, images, stacked=stacked)
    torch.manual_seed(0)
    generators = probes(config, replicas, 0)
    bounds = multi_sample_bound(
        replicas, VaeNetwork.log_mean_weight, replicas.weights, images, 400, generators
    )
    every = torch.tensor(list(itertools.product(range(3), repeat=2)))
    for r, seed in enumerate(config.seeds):
        vae = VaeNetwork(config)
        for p, value in zip(
            vae.parameters(), replicas.layout.unpack(replicas.weights[r]).values(), strict=True
        ):
            p.data.copy_(value)
        x = images.float()
        with torch.no_grad():
            likelihood = (
                -torch.stack([vae.log_joint([z.expand(60, -1)], x) for z in every])
                .logsumexp(0)
                .mean()
            )
            elbo = -enumerate_elbo(vae, x).mean()
        assert likelihood < elbo, seed
        assert float(bounds[r]) == pytest.approx(
            float(likelihood), abs=0.1 * float(elbo - likelihood)
        )


@pytest.mark.parametrize("layers", [1, 2])
def test_measuring_stacked_replicas_finds_what_measuring_them_one_by_one_does(layers: Any) -> None:
    config = replace(TINY, seeds=(0, 1, 2), layers=layers)
    x = load_mnist().test[:2000].float().expand(3, -1, -1)
    found = []
    for stacked in (False, True):
        replicas = replicas_of(config, load_mnist().test[:10], stacked=stacked)
        generators = [torch.Generator().manual_seed(seed) for seed in config.seeds]
        torch.manual_seed(0)
        tasks = (VaeNetwork.diagnostics, VaeNetwork.negative_elbo, VaeNetwork.pictures)
        found.append(
            [replicas.run(task, replicas.weights, x, generators=generators) for task in tasks]
        )
    (one, elbo, pictures), (other, other_elbo, other_pictures) = found
    torch.testing.assert_close(one["entropy"], other["entropy"])
    # one sample per image: 2,000 of them agree far better than this
    torch.testing.assert_close(
        one["pseudo_action_share"], other["pseudo_action_share"], rtol=0, atol=0.05
    )
    torch.testing.assert_close(elbo / 2000, other_elbo / 2000, rtol=0, atol=1.0)
    assert torch.equal(pictures[:, 0], x)
    assert torch.equal(other_pictures[:, 0], x)
    torch.testing.assert_close(pictures.mean(2), other_pictures.mean(2), rtol=0, atol=0.05)


def test_a_run_leaves_metrics_pictures_and_its_best_weights(tmp_path: Path) -> None:
    config = replace(
        TINY, root=tmp_path, seeds=(3, 4), rates=(3e-3, 1e-2), bound_samples=20, averaging=0.9
    )
    folders = train(config)
    assert [folder.name for folder in folders] == [
        "1layer-arsm-rate0.003-seed-3",
        "1layer-arsm-rate0.01-seed-3",
    ]
    for folder in folders:
        last = assert_whole(folder)
        assert {"best_test", "bound"} <= last.keys()
        assert last["bound"] < last["best_test"]
        assert 1 <= last["evaluations"] <= 4


def test_a_sheet_has_its_images_side_by_side(tmp_path: Path) -> None:
    sheet = torch.arange(2 * 3 * 784).view(2, 3, 784) % 256 / 255
    save_sheet(sheet, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "L", (3 * 28, 2 * 28))
        for row, column, pixel in ((0, 0, 0), (1, 2, 783), (1, 0, 30)):
            y, x = divmod(pixel, 28)
            assert picture.getpixel((28 * column + x, 28 * row + y)) == round(
                255 * float(sheet[row, column, pixel])
            )


def test_sampled_pixels_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(loop, "load_mnist", lambda **options: asked.append(options) or load_mnist())
    train(replace(TINY, root=tmp_path, data=tmp_path, sampled_pixels=True))
    assert asked == [{"folder": tmp_path, "sampled": True}]


def test_impossible_options_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for changes, words in [
        ({"rates": (0.0,)}, "--rates must be positive"),
        ({"seeds": (1, 1)}, "--seeds must be one or more different"),
        ({"dropouts": (1.0,)}, r"must lie in \[0, 1\)"),
        ({"categories": 1}, "--categories must be at least 2"),
        ({"estimator": "armm"}, "did you mean"),
        ({"afresh": True}, "--afresh needs two layers"),
        ({"as_released": True}, "--as-released needs two layers"),
        ({"decoder_dropout": 1.0}, r"--decoder-dropout must lie in \[0, 1\)"),
        (
            {"decoder_dropout": 0.1, "independent_decoder_sample": False},
            "--decoder-dropout needs the decoder's own",
        ),
        ({"weight_decay": -0.1}, "--weight-decay must be at least 0"),
        ({"learned_temperature": True}, '--learned-temperature is for "gumbel-softmax:hard=True"'),
    ]:
        with pytest.raises(ValueError, match=words):
            train(replace(TINY, root=tmp_path, **changes))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- killed and resumed

RESUMED = {
    "layers": 2,
    "estimator": "arsm:pooled=True",
    "dropouts": (0.1, 0.2),
    "averaging": 0.9,
    "schedule": "cosine",
    "input_dropout": 0.1,
    "decoder_dropout": 0.1,
    "weight_decay": 0.1,
}


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert_goes_on_when_killed(replace(TINY, **RESUMED), tmp_path)


def test_folders_at_different_epochs_catch_up_bit_for_bit(tmp_path: Path) -> None:
    whole = train(replace(TINY, **RESUMED, root=tmp_path / "whole"))
    config = replace(TINY, **RESUMED, root=tmp_path / "parts", resume=True)
    # the first folder alone is at the end already when the second joins
    ahead = train(replace(config, dropouts=(0.1,)))
    assert train(config)[:1] == ahead
    assert_same([tmp_path / "parts" / "vae" / folder.name for folder in whole], whole)


def test_another_configuration_is_not_resumed(tmp_path: Path) -> None:
    config = replace(TINY, epochs=1, root=tmp_path)
    train(config)
    with pytest.raises(RunError, match="exists"):
        train(config)
    with pytest.raises(RunError, match="batch"):
        train(replace(config, batch=25, resume=True))


def test_the_likelihood_that_is_compiled_is_the_eager_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat(
        [torch.randn(5, 784, generator=generator) * 10, torch.zeros(1, 784)]
    ).requires_grad_()
    x = torch.rand(6, 784, generator=generator).round()
    compiled = torch.compile(bernoulli, backend="eager", fullgraph=True)
    found, expected = compiled(logits, x), bernoulli(logits, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-3)
    slopes = [torch.autograd.grad(value.sum(), logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)


def test_a_rate_that_is_too_large_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="try a smaller learning rate"):
        train(replace(TINY, rates=(1e30,), root=tmp_path, device="cpu"))
