"""Causal models of transformers: cached logits equal uncached ones, for two architectures."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group, TextReward, Transformers
from arsm.sequences.model import SlotsRefused

transformers = pytest.importorskip(
    "transformers", reason="transformers is in the extra `transformers`"
)
V = 13


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=24, n_embd=16, n_layer=2, n_head=2)
    )


def qwen2(**options: Any) -> Any:
    config = transformers.Qwen2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **options,
    )
    return transformers.Qwen2ForCausalLM(config)


def sliding() -> Any:
    return qwen2(use_sliding_window=True, sliding_window=3, max_window_layers=1)


@pytest.fixture(
    params=[gpt2, qwen2, sliding], ids=["GPT-2", "Qwen2", "Qwen2 with a sliding window"]
)
def model(request: pytest.FixtureRequest) -> Transformers:
    torch.manual_seed(0)
    module = request.param().double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Transformers(module)


def ragged(rows: int) -> tuple[Tensor, Tensor]:
    """Prompts of 1 to 5 tokens, padded in front."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(V, (rows, 5), generator=generator)
    return prompts, torch.arange(5) >= 4 - torch.arange(rows).unsqueeze(-1) % 5


def test_what_does_not_fit_into_the_positions_is_refused(model: Transformers) -> None:
    assert model.positions is not None
    prompts, mask = ragged(5)
    room = model.positions + 1 - 5  # the last token is not read
    sample = partial(
        sequences.estimate, Group(2), model, prompts, lambda *_: torch.zeros(10), mask=mask
    )
    assert sample(max_tokens=room).tokens.shape[-1] == room
    with pytest.raises(
        ValueError,
        match=rf"5 tokens and max_tokens = {room + 1} do not fit .* {model.positions} pos",
    ):
        sample(max_tokens=room + 1)
    reference = Transformers(copy.deepcopy(model.model))
    reference.positions = 8
    with pytest.raises(
        ValueError, match="5 tokens and max_tokens = 5 do not fit into the model's 8 positions"
    ):
        sample(max_tokens=5, kl=0.1, reference=reference)


@pytest.mark.parametrize("padded", [False, True])
def test_cached_logits_equal_uncached(model: Transformers, padded: bool) -> None:
    prompts, mask = ragged(6)
    mask = mask if padded else None
    tokens = torch.randint(V, (6, 7), generator=torch.Generator().manual_seed(2))
    whole = model.logits(prompts, tokens, mask)
    assert whole.shape == (6, 7, V)
    rows = torch.tensor([5, 1, 1, 3])
    state = model.start(prompts, mask)
    for t in range(7):
        torch.testing.assert_close(state.logits, whole[:, t])
        branch = model.select(state, rows)
        torch.testing.assert_close(branch.logits, whole[rows, t])
        if t < 6:
            other = (tokens[rows, t] + 1) % V
            model.step(branch, other)  # must not write into the state that it left
            torch.testing.assert_close(
                model.step(model.select(state, rows), tokens[rows, t]).logits, whole[rows, t + 1]
            )
            state = model.step(state, tokens[:, t])


def test_padding_is_not_seen(model: Transformers) -> None:
    prompts, mask = ragged(5)
    tokens = torch.randint(V, (5, 4), generator=torch.Generator().manual_seed(3))
    whole = model.logits(prompts, tokens, mask)
    for row in range(5):
        alone = model.logits(prompts[row : row + 1, mask[row]], tokens[row : row + 1])
        torch.testing.assert_close(whole[row], alone[0])


def length(prompts: Tensor, tokens: Tensor) -> Tensor:
    return (tokens == 7).double().sum(-1)


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(3)), Group(3)], ids=["Branch", "Group"])
def test_estimates(model: Transformers, strategy: sequences.Strategy) -> None:
    prompts, mask = ragged(6)
    generator = torch.Generator().manual_seed(0)
    out = sequences.estimate(
        strategy,
        model,
        prompts,
        length,
        max_tokens=6,
        eos=2,
        mask=mask,
        rows=8,
        micro_batch=8,
        generator=generator,
    )
    assert float(out.info["mismatch"]) < 1e-9
    (-out.value.mean()).backward()
    assert all(parameter.grad is not None for parameter in model.model.parameters())


def test_a_tokenizers_attention_mask_is_a_mask(model: Transformers) -> None:
    prompts, mask = ragged(6)

    def values(mask: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        out = sequences.estimate(
            Group(2), model, prompts, length, max_tokens=6, eos=2, mask=mask, generator=generator
        )
        return out.value

    torch.testing.assert_close(values(mask.long()), values(mask), rtol=0, atol=0)


class Forgetful(Transformers):
    """Forgets the padding after the first step."""

    def step(self, state: Any, tokens: Tensor) -> Any:
        return super().step(type(state)(state.logits, state.cache, None), tokens)

    def slots(self, dtype: torch.dtype | None = None) -> Any:
        raise SlotsRefused("its own step is to be tested.")


def test_a_step_that_sees_the_padding_is_caught() -> None:
    torch.manual_seed(0)
    module = gpt2().double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    prompts, mask = ragged(6)
    refused = pytest.raises(ValueError, match="step by step and one-pass logits differ")
    with refused, pytest.warns(UserWarning, match="decoded in waves"):
        sequences.estimate(Group(2), Forgetful(module), prompts, length, max_tokens=6, mask=mask)


def test_dropout_is_named() -> None:
    torch.manual_seed(0)
    module = gpt2().double().train()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = Transformers(module)

    def run(policy: Transformers, **options: Any) -> None:
        sequences.estimate(Group(2), policy, ragged(6)[0], length, max_tokens=6, **options)

    refused = partial(
        pytest.raises, ValueError, match=r"drop is active, but .* call model.eval\(\)"
    )
    with refused():
        run(model)
    module.eval()
    run(model)
    # its slots are kept, but not its mode
    module.train()
    with refused():
        run(model)
    with refused():
        run(Transformers(copy.deepcopy(module).eval()), reference=model, kl=0.1)


def test_numbers_are_dropouts_too() -> None:
    module = qwen2(attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"self_attn.attention_dropout is active"):
        sequences.estimate(Group(2), Transformers(module), ragged(6)[0], length, max_tokens=6)


def test_layers_of_linear_attention() -> None:
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    module = transformers.Lfm2ForCausalLM(config).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    prompts, mask = ragged(6)
    with pytest.warns(UserWarning, match="its layers include conv"):
        out = sequences.estimate(
            Branch(arsm.RLOO(3)), Transformers(module), prompts, length, max_tokens=6, mask=mask
        )
    assert out.branches is not None
    assert out.branches.row.shape[0] > 6
    assert float(out.info["mismatch"]) < 1e-9
    out.value.sum().backward()


def test_virtual_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is in the extra `trl`")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(TypeError, match=r"PromptTuningConfig puts virtual tokens .* as LoRA\."):
        Transformers(peft.get_peft_model(qwen2(), config))


class Adapted(nn.Module):
    """Like PEFT's models: arguments pass through `**kwargs`, and `get_base_model` is inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def get_base_model(self) -> nn.Module:
        return self.module

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return self.module(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize(
    "wrap",
    [Adapted, lambda module: torch.compile(module, backend="eager")],
    ids=["PEFT", "torch.compile"],
)
def test_a_wrapped_model_gives_the_same_logits(wrap: Any) -> None:
    torch.manual_seed(0)
    module = qwen2().double().eval()
    prompts, mask = ragged(6)
    plain, wrapped = Transformers(module), Transformers(wrap(module))
    torch.testing.assert_close(
        wrapped.start(prompts, mask).logits, plain.start(prompts, mask).logits
    )
    torch.testing.assert_close(
        wrapped.logits(prompts, prompts, mask), plain.logits(prompts, prompts, mask)
    )


def test_gradient_checkpointing_without_a_cache_is_named() -> None:
    module = qwen2().train()
    module.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="no cache, as one with gradient checkpointing"):
        sequences.estimate(Group(2), Transformers(module), ragged(6)[0], length, max_tokens=6)
    sequences.estimate(Group(2), Transformers(module.eval()), ragged(6)[0], length, max_tokens=6)


def test_wrong_models_and_prompts(model: Transformers) -> None:
    with pytest.raises(
        TypeError,
        match=r"Linear takes no attention_mask.*; wrap another module with Recompute",
    ):
        Transformers(nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"Qwen2ForCausalLM has no start, step and select; wrap it: Transformers"
    ):
        sequences.estimate(
            Group(2), model, ragged(6)[0], length, max_tokens=2, reference=qwen2(), kl=0.1
        )
    with pytest.raises(
        ValueError, match="token 13, but the model's vocabulary is 0 to 12; use the model's own"
    ):
        sequences.estimate(Group(2), model, torch.full((2, 3), V), length, max_tokens=2)


# ---------------------------------------------------------------- rewards with TRL's signature

PROMPTS, EOS = torch.tensor([[3, 4], [4, 5], [3, 5]]), 0


def letters(ids: list[list[int]]) -> list[str]:
    return ["".join(chr(ord("a") + i) for i in row) for row in ids]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def short(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [
        None if prompt == "two" else -float(len(text))
        for prompt, text in zip(prompts, completions, strict=True)
    ]


@pytest.mark.parametrize(("pad", "begin", "found"), [(0, 1, 0), (1, 1, None), (None, 1, None)])
def test_padding_that_begins_texts_is_no_padding(
    pad: int | None, begin: int, found: int | None
) -> None:
    sizes = {"vocab_size": 5, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    config = transformers.GPT2Config(**sizes, pad_token_id=pad, bos_token_id=begin)
    assert Transformers(transformers.GPT2LMHeadModel(config)).pad_token == found


def test_text_rewards() -> None:
    reward = TextReward(
        [right, short],
        letters,
        PROMPTS,
        ["one", "two", "three"],
        eos=EOS,
        columns={"answer": ["ca", "b", ""]},
        weights=[10, 0.5],
    )
    tokens = torch.tensor([[1, 0, 0], [2, 1, 3], [0, 0, 0], [2, 1, 0]])
    rewards = reward(PROMPTS[[1, 0, 2, 0]], tokens)
    # "ca" asks for the tokens 2 and 0, but 0 ends a sequence
    assert rewards.tolist() == [
        10.0,
        -1.5,
        10.0,
        -1.0,
    ]


def test_text_ends_at_the_first_of_several_ends() -> None:
    seen = []

    def note(completions: list[str], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    reward = TextReward(note, letters, PROMPTS, ["one", "two", "three"], eos=[3, 0])
    reward(PROMPTS, torch.tensor([[1, 0, 3], [2, 1, 3], [1, 2, 1]]))
    assert seen == ["b", "cb", "bcb"]


def test_conversations() -> None:
    def polite(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        assert all(
            len(messages) == 1 and messages[0]["role"] == "assistant" for messages in completions
        )
        return [float(messages[0]["content"].startswith("c")) for messages in completions]

    texts = [[{"role": "user", "content": "hello"}]] * 3
    rewards = TextReward(polite, letters, PROMPTS, texts, eos=EOS)(
        PROMPTS, torch.tensor([[2, 0], [1, 0], [0, 0]])
    )
    assert rewards.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": ["one"]}, "texts must hold one value per prompt, 3, but holds 1"),
        ({"columns": {"answer": ["x"]}}, "answer must hold one value per prompt"),
        ({"weights": [1.0, 2.0]}, "1 functions have 2 weights"),
        (
            {"prompts": PROMPTS[[0, 0, 1]], "columns": {"answer": ["x", "y", "z"]}},
            "Prompts 0 and 1 are equal but",
        ),
        ({"prompts": PROMPTS[[0, 0, 1]]}, "are equal but their texts or columns differ"),
        (
            {"functions": lambda **columns: [1.0]},
            "must return 3 rewards, one per completion, but returned 1",
        ),
        ({"functions": short}, "No function gave a reward for the completion 'bb'"),
    ],
)
def test_wrong_text_rewards(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "functions": right,
        "decode": letters,
        "prompts": PROMPTS,
        "texts": ["one", "two", "three"],
        "columns": {"answer": ["b", "b", "b"]},
    }
    with pytest.raises(ValueError, match=message):
        TextReward(**{**arguments, **changes})(PROMPTS, torch.ones(3, 2, dtype=torch.int64))


def test_a_prompt_that_is_not_known() -> None:
    reward = TextReward(
        right, letters, PROMPTS, ["one", "two", "three"], columns={"answer": ["b"] * 3}
    )
    with pytest.raises(ValueError, match="make one reward per batch"):
        reward(PROMPTS + 1, torch.ones(3, 2, dtype=torch.int64))
