"""Two losses of a replica, side by side: a code's own, and a decoder's that learns beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from arsm_experiments.data import load_mnist
from arsm_experiments.layout import pack
from arsm_experiments.replicas import Objective, Replicas
from tests.experiments.test_replicas import IMAGES, RATES


class TwoLosses(torch.nn.Module):
    """A code with a loss of its own, and a decoder that learns beside it, without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(784, 8), torch.nn.Linear(8, 784)

    def forward(self, task: Any, *args: Any, **options: Any) -> Any:
        return task(self, *args)

    def encode(self, x: Tensor, settings: dict[str, Tensor]) -> Tensor:
        return self.encoder(x)

    def code_loss(
        self, x: Tensor, code: Tensor, settings: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return (code - x[:, 400:408]).square().mean(), {"code": code.mean()}

    def decoder_loss(
        self, x: Tensor, code: Tensor, settings: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (self.decoder(code) - x).square().mean()
        return loss, {"decoder": loss.detach()}


def two_losses(device: str, prepare: Any = None, **options: Any) -> Replicas:
    torch.manual_seed(0)
    modules = [TwoLosses() for _ in range(3)]
    return Replicas(
        modules[0].to(device),
        Objective(TwoLosses.encode, (TwoLosses.code_loss, TwoLosses.decoder_loss), prepare),
        torch.stack([pack(module.cpu()) for module in modules]),
        load_mnist().train[:IMAGES].to(device),
        {"rate": torch.tensor(RATES)},
        [0, 1, 2],
        batch=10,
        watched=784 * 8 + 8,
        **options,
    )


class Prepared(TwoLosses):
    """Its decoder is shifted by twice its bias, which was computed beside the code."""

    def twice(self, images: int) -> dict[str, Tensor]:
        return {
            "twice": 2 * self.decoder.bias,
            "images": torch.full_like(self.decoder.bias[:1], images),
        }

    def decoder_loss(self, x: Tensor, code: Tensor, settings: dict[str, Tensor]) -> tuple[Any, ...]:
        shift = settings.get("twice", 2 * self.decoder.bias.detach())
        y = self.decoder(code) + shift
        return (
            y,
            {"images": settings.get("images", x.new_zeros(1)).squeeze()},
            (y.detach() - x) / x.numel(),
        )


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_prepared_joins_the_settings_and_a_slope_replaces_its_loss(
    stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TwoLosses", Prepared)
    trained = [
        two_losses("cpu", stacked=stacked, prepare=prepare) for prepare in (None, Prepared.twice)
    ]
    means = [replicas.epoch() for replicas in trained]
    assert torch.equal(trained[0].parameters, trained[1].parameters)
    assert float(means[1]["images"][0]) == trained[1].batch

    by_loss = two_losses("cpu", stacked=stacked)
    by_loss._losses = [by_loss._losses[0], partial(by_loss._each, summed_decoder_loss)]
    by_loss.epoch()
    torch.testing.assert_close(by_loss.parameters, trained[0].parameters)


def summed_decoder_loss(
    module: Prepared, x: Tensor, code: Tensor, settings: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What `Prepared.decoder_loss` gives the slope of."""
    y = module.decoder(code) + 2 * module.decoder.bias.detach()
    return (y - x).square().sum() / 2 / x.numel(), {}


def test_the_second_loss_learns_from_the_code_and_does_not_change_it() -> None:
    both = two_losses("cpu", stacked=False)
    first_alone = two_losses("cpu", stacked=False)
    first_alone._losses = [
        *first_alone._losses[:1],
        lambda *args: (args[1]["decoder.bias"].sum() * 0, {}),
    ]
    start = both.parameters.clone()
    means = both.epoch(), first_alone.epoch()
    assert torch.equal(
        both.parameters[:, : both.watched], first_alone.parameters[:, : both.watched]
    )
    assert torch.equal(means[0]["code"], means[1]["code"])
    assert torch.equal(start[:, both.watched :], first_alone.parameters[:, both.watched :])
    assert bool((both.parameters[:, both.watched :] != start[:, both.watched :]).any(-1).all())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_losses_side_by_side_learn_what_they_learn_in_turn(device: str) -> None:
    """On a GPU each loss and each unstacked replica has its own stream."""
    expected = two_losses(device, stacked=False)
    ways: list[dict[str, Any]] = [{"stacked": True}]
    if device == "cuda":
        ways += [
            {"stacked": False, "steps_per_replay": 2},
            {"stacked": True, "compiled": True, "steps_per_replay": 4},
        ]
    trained = [two_losses(device, **way) for way in ways]
    for _ in range(3):
        means = expected.epoch()
        for replicas in trained:
            torch.testing.assert_close(replicas.epoch(), means, rtol=1e-4, atol=1e-5)
            assert_learned_the_same(replicas, expected)


def assert_learned_the_same(found: Replicas, expected: Replicas) -> None:
    """The parameters agree, but for a few whose gradient is nearly zero.

    Adam divides a gradient by its own size. Where rounding turns the sign of a tiny one, the
    parameter moves by the rate in the other direction: on a GPU, where streams and compiled code
    add up in another order, this happens to about one in a thousand.
    """
    close = torch.isclose(found.parameters, expected.parameters, rtol=1e-3, atol=1e-5)
    differing = 1 - close.double().mean(1)
    assert float(differing.max()) < 0.005, f"shares of each replica that differ: {differing}"
    # one step in each direction, at every step
    furthest = 2 * expected.settings["rate"] * expected.state["step"]
    distance = (found.parameters - expected.parameters).abs().amax(1)
    assert bool((distance <= furthest).all()), f"distances {distance}, at most {furthest}"


def test_a_replica_that_learns_from_another_ones_gradient_is_found_out() -> None:
    expected = two_losses("cpu", stacked=True)
    exchanged = two_losses("cpu", stacked=True)
    update = exchanged._update

    def update_with_the_next_ones(
        parameters: Tensor, state: list[Tensor], gradients: list[Tensor], *scale: Tensor
    ) -> None:
        update(parameters, state, [x.roll(1, 0) for x in gradients], *scale)

    exchanged._update = update_with_the_next_ones
    expected.epoch()
    exchanged.epoch()
    with pytest.raises(AssertionError, match="shares of each replica"):
        assert_learned_the_same(exchanged, expected)
