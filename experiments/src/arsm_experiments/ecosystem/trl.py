"""TRL's trainers as whole losses: their advantages, masks, loss types, divergences and normalisers,
by their own code.

A trainer is made with a tiny GPT-2 whose backbone is replaced by the referee's table, and its
sampler by the referee's answers. `_generate_and_score_completions` and `_compute_loss` are TRL's,
from tokenising the prompts to the loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arsm.referee import Objective, TrainerBatch
from arsm.referee.language import MAX_TOKENS, VOCABULARY
from arsm.referee.worlds import TrainerLoss
from arsm_experiments.ecosystem.entry import Entry, from_package, refereed

VERSION = "1.16.0"
OLD = "1.9.2"
"""The last release before two mended losses: luspo without a mask (TRL 6654), and k3 without the
ratio of probabilities as the default divergence (TRL 6503).
"""
WORDS = ("<pad>", "<eos>", "a", "b")
"""The referee's tokens in their order."""


class Table(torch.nn.Module):
    """A backbone whose hidden states are the logits of the referee's model."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Callable[..., Tensor] | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        assert self.model is not None
        outputs = from_package("transformers.modeling_outputs")
        return outputs.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.model(input_ids, attention_mask)
        )


def trl_loss(kind: str, longer: bool = False, **options: Any) -> Callable[[], TrainerLoss]:
    """The loss of TRL's GRPO or RLOO trainer with these options.

    With `longer`, rewards are multiplied by n/(n - 1), which GRPO's own mean takes off again: the
    divergence is then judged beside a right gradient of the rewards.
    """
    return lambda: _TrlLoss(kind, longer, options)


class _TrlLoss:
    """A trainer of TRL that gets its answers and rewards from the referee."""

    def __init__(self, kind: str, longer: bool, options: dict[str, Any]) -> None:
        self.kind = kind
        self.longer = longer
        self.options = options
        self.tokenizer = _tokenizer()
        self.trainers: dict[tuple[int, int], Any] = {}
        self.rewards: list[float] = []
        self.answers: list[list[int]] = []

    def __call__(self, batch: TrainerBatch) -> Tensor:
        made = self._trainer(len(batch.rewards), batch.answers)
        factor = batch.answers / (batch.answers - 1) if self.longer else 1.0
        self.rewards = (factor * batch.rewards).tolist()
        lengths = batch.mask.sum(-1).tolist()
        rows = batch.completions.tolist()
        self.answers = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        made.model.transformer.model = batch.model
        if made.ref_model is not None:
            made.ref_model.transformer.model = batch.reference_model
        prompts = [" ".join(WORDS[t] for t in row if t) for row in batch.prompts.tolist()]
        inputs = made._generate_and_score_completions([{"prompt": p} for p in prompts])
        return made._compute_loss(made.model, inputs)

    def _trainer(self, rows: int, n: int) -> Any:
        """A trainer for batches of one size; the last one is kept."""
        if (rows, n) not in self.trainers:
            # a new trainer's arguments reset what the old ones share
            self.trainers.clear()
            self.trainers[rows, n] = self._make(rows, n)
        return self.trainers[rows, n]

    def _make(self, rows: int, n: int) -> Any:
        trl = from_package("trl")
        datasets = from_package("datasets")
        config = getattr(trl, f"{self.kind}Config")(
            output_dir=tempfile.mkdtemp(),
            num_generations=n,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            max_completion_length=MAX_TOKENS,
            report_to=[],
            use_cpu=True,
            bf16=False,
            **self.options,
        )
        made = getattr(trl, f"{self.kind}Trainer")(
            _model(),
            reward_funcs=lambda completions, **_: list(self.rewards),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
            processing_class=self.tokenizer,
        )
        made.model.train()
        # set by the training loop, which is not run here
        made.current_gradient_accumulation_steps = 1
        made._generate_single_turn = self._sampled
        for model in (made.model, made.ref_model):
            if model is not None:
                _replace_backbone(model)
        return made

    def _sampled(self, *_: Any, **__: Any) -> Any:
        """The referee's answers in place of the sampler's; GRPO wants ln p too, or None."""
        return self.answers if self.kind == "RLOO" else (self.answers, None)


def _tokenizer() -> Any:
    tokenizers = from_package("tokenizers")
    transformers = from_package("transformers")
    numbers = {word: i for i, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def _model() -> Any:
    transformers = from_package("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=VOCABULARY,
        n_layer=1,
        n_head=1,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    # from a folder, where the trainer finds its reference
    folder = tempfile.mkdtemp()
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return transformers.GPT2LMHeadModel.from_pretrained(folder)


def _replace_backbone(model: Any) -> None:
    """Let the hidden states be the referee's logits, and the head leave them as they are."""
    model.transformer = Table()
    head = model.lm_head
    head.weight.data = torch.eye(VOCABULARY)
    head.weight.requires_grad_(False)
    model.get_output_embeddings = lambda: head


def entry(
    name: str,
    claim: str,
    loss: Callable[[], TrainerLoss],
    version: str = VERSION,
    **options: Any,
) -> Entry:
    """An entry of TRL, in the environment of its version; older ones carry it in their name."""
    package, needed = "trl", (f"trl=={version}",)
    if version != VERSION:
        package = f"trl {version}"
        # imported by old releases, and no longer brought along by what they depend on
        needed += ("requests",)
    return Entry(f"{package}: {name}", "trl", "trl", claim, refereed(loss, **options), needed)


PLAIN = {"scale_rewards": "none", "beta": 0.0}
DESIGN = "no claim of being unbiased"
LONGER = "the entry multiplies rewards by n/(n-1), which GRPO's own mean takes off"
LOSS_TYPES = {
    "grpo": "a mean over each answer's tokens; TRL's page says that it favours some lengths",
    "dapo": "a mean over the batch's tokens",
    "bnpo": "a mean over the local batch's tokens",
    "dr_grpo": "divided by a constant, to remove the length bias",
    "cispo": "weights clipped and detached, a mean over the batch's tokens",
    "sapo": "a soft gate in place of clipping, a mean over each answer's tokens",
    "luspo": "length-unbiased: a sum over each answer's tokens",
    "vespo": "weights from a gamma function, a mean over the batch's tokens",
}
DIVERGENCE = Objective(beta=0.3)
ENTRIES = (
    entry("RLOO trainer, beta = 0", "leave-one-out: unbiased", trl_loss("RLOO", beta=0.0)),
    entry(
        "RLOO trainer, beta = 0.3",
        "KL in the reward: unbiased",
        trl_loss("RLOO", beta=0.3),
        target=DIVERGENCE,
    ),
    entry(
        "RLOO trainer, normalize_advantages",
        f"normalised; {DESIGN}",
        trl_loss("RLOO", beta=0.0, normalize_advantages=True),
    ),
    entry("GRPO trainer, defaults", f"normalised; {DESIGN}", trl_loss("GRPO"), up_to_scale=True),
    entry(
        "GRPO trainer, scale_rewards=batch, dr_grpo",
        f"normalised over the batch; {DESIGN}",
        trl_loss("GRPO", scale_rewards="batch", loss_type="dr_grpo"),
        up_to_scale=True,
    ),
    *(
        entry(
            f"GRPO trainer, loss_type={name}, scale_rewards=none",
            claim,
            trl_loss("GRPO", loss_type=name, epsilon_high=5.0 if name == "cispo" else 0.2, **PLAIN),
            up_to_scale=True,
        )
        for name, claim in LOSS_TYPES.items()
    ),
    entry(
        "GRPO trainer, importance_sampling_level=sequence, luspo",
        "length-unbiased: a sum over each answer's tokens",
        trl_loss("GRPO", loss_type="luspo", importance_sampling_level="sequence", **PLAIN),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, importance_sampling_level=sequence, grpo",
        "GSPO: a mean over each answer's tokens",
        trl_loss("GRPO", loss_type="grpo", importance_sampling_level="sequence", **PLAIN),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, mask_truncated_completions, dr_grpo",
        "leaves out answers that were cut off",
        trl_loss("GRPO", loss_type="dr_grpo", mask_truncated_completions=True, **PLAIN),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, top_entropy_quantile=0.5, dr_grpo",
        "only tokens of high entropy",
        trl_loss("GRPO", loss_type="dr_grpo", top_entropy_quantile=0.5, **PLAIN),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, delta=1.5, dr_grpo",
        "clipped above on one more side: the policy gradient at the first step",
        trl_loss("GRPO", loss_type="dr_grpo", delta=1.5, **PLAIN),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, off_policy_mask_threshold=0.5, dr_grpo",
        "leaves out answers that an older model drew: the policy gradient at the first step",
        trl_loss("GRPO", loss_type="dr_grpo", off_policy_mask_threshold=0.5, **PLAIN),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, temperature=0.7, dr_grpo",
        "the tempered policy's gradient",
        trl_loss("GRPO", loss_type="dr_grpo", temperature=0.7, **PLAIN),
        target=Objective(temperature=0.7),
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, beta = 0.3, k3 with importance weights (default), luspo",
        f"the unbiased gradient of the reverse divergence; {LONGER}",
        trl_loss("GRPO", longer=True, loss_type="luspo", scale_rewards="none", beta=0.3),
        target=DIVERGENCE,
    ),
    entry(
        "GRPO trainer, beta = 0.3, use_bias_correction_kl=False, luspo",
        f"k3; {DESIGN}; {LONGER}",
        trl_loss(
            "GRPO",
            longer=True,
            loss_type="luspo",
            scale_rewards="none",
            beta=0.3,
            use_bias_correction_kl=False,
        ),
        target=DIVERGENCE,
    ),
    entry(
        "GRPO trainer, beta = 0.3, dr_grpo",
        f"the unbiased gradient of the reverse divergence; {LONGER}",
        trl_loss("GRPO", longer=True, loss_type="dr_grpo", scale_rewards="none", beta=0.3),
        target=DIVERGENCE,
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, loss_type=luspo, scale_rewards=none",
        "the right gradient for all lengths: a sum over each answer's tokens",
        trl_loss("GRPO", loss_type="luspo", **PLAIN),
        OLD,
        up_to_scale=True,
    ),
    entry(
        "GRPO trainer, beta = 0.3, dr_grpo",
        f"k3 as the estimate of the divergence; {LONGER}",
        trl_loss("GRPO", longer=True, loss_type="dr_grpo", scale_rewards="none", beta=0.3),
        OLD,
        target=DIVERGENCE,
        up_to_scale=True,
    ),
)
