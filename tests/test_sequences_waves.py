"""Models that cannot be decoded in slots are decoded in waves, with a warning that says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arsm.sequences import Recompute, Slots, Waves, decoder
from tests.slot_models import SMALL, V, gpt2, llama, transformers, wrapped


def dynamic() -> Any:
    return llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=V, hidden_size=8, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config)


def llama4() -> Any:
    kinds = ["chunked_attention", "full_attention"]
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=24, num_local_experts=1, layer_types=kinds
    )
    return transformers.Llama4ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dynamic, "its dynamic positions depend on the other rows of a batch"),
        (bloom, "it takes no positions"),
        (llama4, "its layers include chunked_attention"),
    ],
)
def test_models_that_cannot_are_decoded_in_waves(make: Callable[[], Any], reason: str) -> None:
    model = wrapped(make, torch.float32)
    with pytest.warns(UserWarning, match=f"Transformers is decoded in waves.*{reason}"):
        assert isinstance(decoder(model), Waves)


def test_active_dropout_is_refused() -> None:
    model = wrapped(gpt2)
    model.model.train()
    with pytest.warns(UserWarning, match=r"its dropout is active; call model.eval\(\)"):
        assert isinstance(decoder(model), Waves)
    model.model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(decoder(model), Slots)
        assert isinstance(decoder(Recompute(nn.Identity())), Waves)


def test_model_that_gives_other_probabilities_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(llama)
    inner: Any = model.model
    norm = inner.model.norm.forward

    def mixed(x: Tensor) -> Tensor:
        """Rows that influence each other, if they have one token."""
        return norm(x + x.flip(0) if x.shape[1] == 1 else x)

    monkeypatch.setattr(inner.model.norm, "forward", mixed)
    with pytest.warns(UserWarning, match="a trial gave other probabilities than the model"):
        assert isinstance(decoder(model), Waves)


def test_rounding_of_narrow_copies_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of bfloat16 copies, nor of a caller's autocast, however far from the model."""
    from arsm.sequences.transformers import ROUNDING

    monkeypatch.setitem(ROUNDING, 2, 1e-9)
    monkeypatch.setitem(ROUNDING, 4, 1e-4)
    model = wrapped(llama, torch.float32)
    inner: Any = model.model
    with torch.no_grad():
        inner.lm_head.weight.mul_(100)
    assert model._distance(model.slots(torch.bfloat16)) > 0.01
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        assert isinstance(decoder(model, dtype=torch.bfloat16), Slots)
        assert isinstance(decoder(model), Slots)
