"""A random Llama of a few thousand weights with a tokenizer of characters, as folders of
transformers.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

CHARACTERS = string.digits + string.ascii_letters + " .,?=+-\n"
END = "<end>"


def tiny_tokenizer(*, chat: bool = True) -> Any:
    """One token per character, an end, and a chat template that marks whose turn it is."""
    import tokenizers
    import transformers

    vocabulary = {character: number for number, character in enumerate([END, "<pad>", *CHARACTERS])}
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    whole.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token=END, pad_token="<pad>"
    )
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}U "
            "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}A {% endif %}"
        )
    return tokenizer


def save_tiny_llama(folder: Path, *, chat: bool = True) -> Path:
    """Write the model and its tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder
