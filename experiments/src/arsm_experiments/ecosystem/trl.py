"""The advantages of TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import arsm
from arsm_experiments.ecosystem.entry import Entry, Found, from_package, judged


def trl_advantages(kind: str, **options: Any) -> Callable[[], Found]:
    """The advantages of TRL's trainer, for given rewards, by its own code: a tiny model writes one token.

    Without a penalty for leaving a reference model (beta = 0), which would have to be downloaded.
    """

    def run() -> Found:
        trl, transformers = from_package("trl"), from_package("transformers")
        tokenizers, datasets = from_package("tokenizers"), from_package("datasets")
        config_class, trainer_class = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
        words = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "go": 2, "on": 3}, unk_token="<pad>")
        )
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        )
        given: list[float] = []
        trainers: dict[int, Any] = {}

        def trainer(n: int) -> Any:
            if n not in trainers:
                trainers.clear()  # a new trainer's arguments reset what the old ones share
                model = transformers.GPT2LMHeadModel(
                    transformers.GPT2Config(
                        vocab_size=4, n_positions=8, n_embd=4, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1
                    )
                )
                config = config_class(
                    output_dir="/tmp/arsm-trl",
                    num_generations=n,
                    per_device_train_batch_size=n,
                    max_completion_length=1,
                    report_to=[],
                    use_cpu=True,
                    bf16=False,
                    **options,
                )
                trainers[n] = trainer_class(
                    model,
                    reward_funcs=lambda completions, **_: list(given),
                    args=config,
                    train_dataset=datasets.Dataset.from_dict({"prompt": ["go"] * 8}),
                    processing_class=tokenizer,
                )
                trainers[n].model.train()
            return trainers[n]

        def advantages(rewards: Tensor) -> Tensor:
            given[:] = rewards.flatten().tolist()
            rows = [{"prompt": "go"} for _ in given]
            return trainer(rewards.shape[1])._generate_and_score_completions(rows)["advantages"].view(rewards.shape)

        return judged(arsm.audit_advantages(advantages), "enumerated")

    return run


NORMALISED = "normalised; no claim of being unbiased"
ENTRIES = (
    Entry("trl: RLOO advantages", "trl", "trl", "leave-one-out: unbiased", trl_advantages("RLOO", beta=0.0)),
    Entry(
        "trl: RLOO advantages, normalize_advantages",
        "trl",
        "trl",
        NORMALISED,
        trl_advantages("RLOO", beta=0.0, normalize_advantages=True),
    ),
    Entry("trl: GRPO advantages, scale_rewards=group (default)", "trl", "trl", NORMALISED, trl_advantages("GRPO")),
    Entry(
        "trl: GRPO advantages, scale_rewards=none",
        "trl",
        "trl",
        "Dr. GRPO: without the bias of the standard deviation",
        trl_advantages("GRPO", scale_rewards="none"),
    ),
)
