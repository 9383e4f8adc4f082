"""Small models, tokenizers and trainers for the tests of `arsm.trl`; nothing is downloaded.

Whoever imports this is skipped where TRL or PEFT is not installed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl", reason="TRL is in the extra `trl`")
peft = pytest.importorskip("peft", reason="PEFT is in the extra `trl`")
transformers = pytest.importorskip("transformers")

from accelerate.state import AcceleratorState  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402

from arsm.trl import BranchTrainer  # noqa: E402

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *"abcdefgh"]
PROMPTS = ["a b", "c d e", "f", "g h a b"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} "
    "{% endfor %}{{ mark | default('a') }}"
)
LLAMA = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def tokenizer(pad: str = "<pad>", words: list[str] | None = None) -> PreTrainedTokenizerFast:
    """One token per word; a chat template that needs no further words."""
    words = WORDS if words is None else words
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token=pad,
        eos_token="<eos>",
        unk_token="<pad>",
        padding_side="left",
    )
    made.chat_template = TEMPLATE
    return made


def lively(model: Any) -> Any:
    """Large weights, so that the model's choices depend on what it has read."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model


def llama(**options: Any) -> Any:
    return lively(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **options})))


def soft_capped() -> Any:
    """Logits within 2, so that the cap bends them."""
    options = {
        **LLAMA,
        "head_dim": 8,
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "num_hidden_layers": 2,
    }
    return lively(Gemma2ForCausalLM(Gemma2Config(**options)))


def count_a(completions: list[Any], **columns: Any) -> list[float]:
    """Rewards between 0 and the number of tokens, which tell completions apart."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [text.count("a") + 0.25 * text.count("b") for text in texts]


def config(**options: Any) -> GRPOConfig:
    """Options for a CPU; precision and processes are those of the last config, not of the first in
    this process.
    """
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    chosen = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_steps": 1,
        "scale_rewards": "none",
        "loss_type": "luspo",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
    }
    return GRPOConfig(**{**chosen, **options})


def trainer(
    kind: Callable[..., Any] = BranchTrainer,
    model: Any = None,
    *,
    others: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer of the kind on four prompts; options are those of `GRPOConfig`, others those of the
    trainer.
    """
    chosen = {
        "reward_funcs": count_a,
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "processing_class": tokenizer(),
        **(others or {}),
    }
    return kind(model=llama() if model is None else model, args=config(**options), **chosen)


def rows(made: Any, prompts: list[Any]) -> list[dict[str, Any]]:
    """A generation batch as TRL's dataloader makes it."""
    return [{"prompt": prompt} for prompt in prompts for _ in range(made.num_generations)]


def generated(made: Any, prompts: list[Any]) -> dict[str, Any]:
    """A scored batch, without training."""
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return made._generate_and_score_completions(rows(made, prompts))


def gradient(made: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient of TRL's loss in every parameter that has one."""
    made.model.train()
    made.model.zero_grad()
    made.current_gradient_accumulation_steps = 1
    made.compute_loss(made.model, batch).backward()
    found = {
        name: each.grad.clone()
        for name, each in made.model.named_parameters()
        if each.grad is not None
    }
    made.model.zero_grad()
    return found


def whole(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients.values()])


def parameters(made: Any) -> Tensor:
    return whole({name: each.detach() for name, each in made.model.named_parameters()})


def next_words(prefix: list[int], count: int) -> list[int]:
    """A continuation that is a function of the prefix: one that ends now and then."""
    ids = []
    state = sum((i + 1) * token for i, token in enumerate(prefix)) + len(prefix)
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append(EOS + (state >> 8) % (len(WORDS) - 1))
        if ids[-1] == EOS:
            break
    return ids


class Given(BranchTrainer):
    """Completions, draws and continuations are given: nothing is left to chance but the coins."""

    completions: list[list[int]]
    """Of all processes' rows."""
    draws: Tensor
    """[rows of all processes, T, n - 1]."""
    more: Callable[[list[int], int], list[int]] = staticmethod(next_words)

    def _generate_single_turn(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int
    ) -> Any:
        if num_generations == 1:
            limit = self.generation_config.max_new_tokens
            return [self.more(ids, limit) for ids in prompt_ids], None
        first = self.accelerator.process_index * len(prompt_ids)
        return self.completions[first : first + len(prompt_ids)], None

    def _draw(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        tokens, energy = super()._draw(batch)
        draws = self._here(self.draws, tokens.shape[0])[:, : tokens.shape[1]]
        tokens[:, : draws.shape[1], 1:] = draws
        return tokens, energy


def given(
    prompts: int, samples: int = 4, generations: int = 4, length: int = 5, **options: Any
) -> Any:
    """A `Given` trainer with completions and draws from a seed, branching everywhere unless told
    otherwise.
    """
    others = {"credit": arsm.RLOO(samples), "budget": None, **options.pop("others", {})}
    made = trainer(Given, others=others, num_generations=generations, **options)
    generator = torch.Generator().manual_seed(5)
    made.completions = [next_words([7 * i + 3], length) for i in range(prompts * generations)]
    made.draws = torch.randint(
        1, len(WORDS), (prompts * generations, length, samples - 1), generator=generator
    )
    return made
