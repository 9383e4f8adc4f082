"""The head of a language model in parts: the gradient of whole logits, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group, Transformers, heads
from tests.slot_models import MODELS as SLOT_MODELS
from tests.slot_models import ragged, wrapped
from tests.test_sequences_memory import peak_bytes
from tests.test_sequences_transformers import Adapted

transformers = pytest.importorskip(
    "transformers", reason="transformers is in the extra `transformers`"
)
V, T = 23, 5
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | options))


def gemma() -> Any:
    config = transformers.Gemma2Config(**SHAPE, head_dim=4, final_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config)


def cohere() -> Any:
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SHAPE, logit_scale=0.3))


def granite() -> Any:
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SHAPE, logits_scaling=3.0))


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=V, n_positions=32, n_embd=8, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def with_lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is in the extra `transformers`")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(llama(), config)


def with_a_trained_head_alone() -> Any:
    model = llama()
    model.model.requires_grad_(False)
    return model


MODELS = {
    "tied": lambda: llama(tie_word_embeddings=True),
    "not tied": lambda: llama(tie_word_embeddings=False),
    "GPT-2": gpt2,
    "soft cap": gemma,
    "scale": cohere,
    "divisor": granite,
    "LoRA": with_lora,
    "head alone": with_a_trained_head_alone,
}
STRATEGIES: dict[str, sequences.Strategy] = {
    "Branch": Branch(arsm.RLOO(4)),
    "Group": Group(3),
    "energies": Group(arsm.OTB(3)),
    "logits": Branch(arsm.ARSM(references=1)),
}


class OnePiece(Transformers):
    """Logits of all states at once."""

    def headed(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> None:
        return None


def made(name: str) -> Any:
    torch.manual_seed(0)
    module = MODELS[name]().double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    return (tokens * torch.arange(1, tokens.shape[1] + 1)).sum(-1).double().sin()


def estimate(
    strategy: sequences.Strategy, model: Transformers, *, padded: bool = True
) -> sequences.SequenceEstimate:
    prompts = torch.arange(18).view(6, 3) % V
    return sequences.estimate(
        strategy,
        model,
        prompts,
        reward,
        max_tokens=T,
        eos=1,
        temperature=0.8,
        mask=torch.arange(3) >= torch.arange(6).unsqueeze(-1) % 3 if padded else None,
        micro_batch=4,
        generator=torch.Generator().manual_seed(3),
    )


def gradients(value: Tensor, module: nn.Module) -> list[Tensor | None]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weighted = (value * torch.arange(1.0, len(value) + 1)).sum()
    return list(torch.autograd.grad(weighted, trained, allow_unused=True))


@pytest.fixture
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three states at a time."""
    monkeypatch.setattr(heads, "CELLS", 3 * V)


@pytest.mark.filterwarnings("ignore:.*is decoded in waves")
@pytest.mark.usefixtures("few_cells")
@pytest.mark.parametrize("name", MODELS)
def test_every_head_in_parts_has_the_gradient_of_one_piece(name: str) -> None:
    module = made(name)
    padded = name != "soft cap"  # Gemma's attention makes padding NaN in float64
    expected = estimate(Group(3), OnePiece(module), padded=padded)
    model = Transformers(module)
    out = estimate(Group(3), model, padded=padded)
    assert model._has_head
    torch.testing.assert_close(out.tokens, expected.tokens)
    wanted = gradients(expected.value, module)
    assert any(x is not None and float(x.abs().max()) > 1e-3 for x in wanted)
    # Cohere's normalisation and Gemma's attention round to float32, also in a float64 model
    rounds = name in ("scale", "soft cap")
    allowed: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5} if rounds else {}
    torch.testing.assert_close(gradients(out.value, module), wanted, **allowed)


@pytest.mark.parametrize("make", SLOT_MODELS)
def test_padding_behind_the_tokens_needs_no_mask(make: Callable[[], Any]) -> None:
    model = wrapped(make)
    prompts, mask = ragged(7)
    tokens = (prompts + 3) % 13
    expected = model.logits(prompts, tokens, mask)
    masks: list[Any] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    whole = model.headed(prompts, tokens, mask)
    assert whole is not None
    assert masks == [None]
    # Gemma's own attention turns padding in front into NaN
    some = mask.all(-1) if bool(expected.isnan().any()) else mask.any(-1)
    torch.testing.assert_close(whole.head(whole.hidden)[some], expected[some], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_cells")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_strategy_in_parts_has_the_gradient_of_one_piece(
    strategy: sequences.Strategy,
) -> None:
    module = made("tied")
    expected = estimate(strategy, OnePiece(module))
    out = estimate(strategy, Transformers(module))
    torch.testing.assert_close(out.tokens, expected.tokens)
    torch.testing.assert_close(gradients(out.value, module), gradients(expected.value, module))


@pytest.mark.usefixtures("few_cells")
def test_clipped_epochs_in_parts() -> None:
    module = made("tied")
    found = []
    for model in (OnePiece(module), Transformers(module)):
        out = estimate(Branch(arsm.RLOO(4)), model)
        assert out.clipped is not None
        found.append(out.clipped(0.2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    one, parts = (gradients(again(), module) for again in found)
    torch.testing.assert_close(parts, one)


class Bent(Adapted):
    """Does more to its logits than its configuration says."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        out = super().forward(*arguments, **options)
        out.logits = out.logits + 0.1 * out.logits.sin()
        return out


@pytest.mark.filterwarnings("ignore:.*is decoded in waves")
def test_a_head_that_is_not_all_of_the_way_to_the_logits_is_left_alone() -> None:
    module = Bent(made("tied"))
    model = Transformers(module)
    out = estimate(Group(3), model)
    assert model._has_head is False
    expected = estimate(Group(3), OnePiece(module))
    torch.testing.assert_close(gradients(out.value, module), gradients(expected.value, module))


def test_a_compiled_model_is_left_alone() -> None:
    model = Transformers(torch.compile(made("tied"), backend="eager"))  # pyright: ignore
    prompts = torch.ones(1, 2, dtype=torch.int64)
    assert model.headed(prompts, prompts) is None


def test_the_hook_is_removed_when_the_model_fails() -> None:
    module = made("tied")
    model = Transformers(module)
    with pytest.raises(IndexError):
        model.headed(torch.full((1, 2), V), torch.zeros(1, 2, dtype=torch.int64))
    assert not module.lm_head._forward_pre_hooks


# ---------------------------------------------------------------- memory


def most_bytes(width: int, vocabulary: int, kind: type[Transformers]) -> int:
    """Beyond what exists before: an estimate and its gradient, all rows in one micro-batch."""
    torch.manual_seed(0)
    options = {"vocab_size": vocabulary, "tie_word_embeddings": True}
    model = kind(llama(**options, max_position_embeddings=128).eval())
    prompts = torch.zeros(4, 2, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)

    def call() -> None:
        out = sequences.estimate(
            Group(4),
            model,
            prompts,
            lambda prompts, tokens: tokens.double().mean(-1),
            max_tokens=width,
            micro_batch=16,
            generator=generator,
        )
        out.value.sum().backward()

    call()  # buffers of the slots are kept
    return peak_bytes(call)


def test_memory_does_not_grow_with_tokens_times_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary = 8000
    # as many logits at a time as one step of decoding has: one for each of the 16 rows
    monkeypatch.setattr(heads, "CELLS", 16 * vocabulary)
    logits = 16 * (40 - 10) * vocabulary * 4
    grown = most_bytes(40, vocabulary, Transformers) - most_bytes(10, vocabulary, Transformers)
    assert grown < 0.1 * logits
    grown = most_bytes(40, vocabulary, OnePiece) - most_bytes(10, vocabulary, OnePiece)
    assert grown > logits  # so that the test can fail


@pytest.mark.parametrize(("tokens", "read"), [(5, 16), (16, 16), (17, 20), (20, 20)])
def test_passes_read_a_round_number_of_tokens(tokens: int, read: int) -> None:
    """Up to the last position that the model knows; what is read behind changes nothing."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=20)
    model = Transformers(transformers.GPT2LMHeadModel(config).double().eval())
    widths = []
    model._inner.transformer.register_forward_hook(
        lambda module, given, out: widths.append(out[0].shape[1])
    )
    prompts = torch.arange(6).view(2, 3) % V
    # the last token is not read
    later = torch.arange(2 * (tokens - 2)).view(2, -1) % V
    whole = model.headed(prompts, later)
    assert whole is not None
    assert widths == [read]
    torch.testing.assert_close(whole.head(whole.hidden), model.logits(prompts, later))
