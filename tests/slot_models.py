"""Small models of transformers that can be decoded in slots, prompts for them, and noise that
depends on sequence and step alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arsm.sequences import Prefixes, Transformers

transformers = pytest.importorskip(
    "transformers", reason="transformers is in the extra `transformers`"
)
V = 13
EOS = 2
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | options))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=24, n_embd=16, n_layer=2, n_head=2)
    )


def qwen() -> Any:
    """Layers with and without a window."""
    config = transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=1
    )
    return transformers.Qwen2ForCausalLM(config)


def mistral() -> Any:
    """A window for all layers."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=3))


def gemma2() -> Any:
    """Capped scores, and a window in every second layer."""
    config = transformers.Gemma2Config(
        **SMALL,
        sliding_window=3,
        attn_logit_softcapping=1.0,
        query_pre_attn_scalar=4,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config)


def gemma3() -> Any:
    """Other frequencies in layers with a window."""
    config = transformers.Gemma3TextConfig(
        **SMALL, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3ForCausalLM(config)


MODELS = [llama, gpt2, qwen, mistral, gemma2, gemma3]


def wrapped(make: Callable[[], Any], dtype: torch.dtype = torch.float64) -> Transformers:
    torch.manual_seed(0)
    if make is gemma2:  # its own attention turns padding into NaN in float64
        dtype = torch.float32
    module = make().to(dtype).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Transformers(module)


def ragged(rows: int) -> tuple[Tensor, Tensor]:
    """Prompts of 1 to 5 tokens, padded in front."""
    prompts = torch.randint(V, (rows, 5), generator=torch.Generator().manual_seed(1))
    return prompts, torch.arange(5) >= 4 - torch.arange(rows).unsqueeze(-1) % 5


def by_place(draws: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Uniform numbers that are a function of (sequence, step)."""
    table = torch.rand(
        1000, 32, draws, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    return lambda sequence, step: table[sequence, step.clamp(max=31)]


def some_prefixes(known: Tensor, draw_some: bool) -> Prefixes:
    """Two branches at every step of every known sequence: token 5 or drawn, and the end of
    sequence.
    """
    count, width = known.shape
    state = torch.arange(count * width).repeat_interleave(2)
    action = torch.where(torch.arange(state.shape[0]) % 2 == 0, -1 if draw_some else 5, EOS)
    action = torch.where(state % 3 == 0, 7, action)
    mixed = torch.randperm(state.shape[0], generator=torch.Generator().manual_seed(4))
    return Prefixes((state // width)[mixed], (state % width)[mixed], action[mixed], known)
