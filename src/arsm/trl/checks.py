"""Versions, options, models and estimators that `BranchTrainer` takes; everything else
is refused in one sentence.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arsm.capabilities import require
from arsm.types import Estimator

KNOWN_VERSIONS = ("1.16",)
"""Versions of TRL whose methods this module overrides and calls."""


class Refusal(NamedTuple):
    """The values of one option of GRPOConfig that BranchTrainer takes."""

    option: str
    taken: tuple[Any, ...]
    why: str


KL = "the KL penalty of the tokens that were not sampled is not computed"
SAMPLER = (
    "the other tokens are drawn from the policy's plain softmax, and the completions must be too"
)
LENGTH = (
    "it weights tokens by the length of their completion or by the sequence's ratio, which is "
    "not token credit"
)
MASK = "the credit of a state may not depend on what was drawn there"

REFUSED = (
    Refusal("beta", (0.0,), KL),
    Refusal("sync_ref_model", (False,), KL),
    Refusal("ref_model_mixup_alpha", (0.6,), KL),
    Refusal("ref_model_sync_steps", (512,), KL),
    Refusal("use_bias_correction_kl", (True,), KL),
    Refusal("top_p", (1.0,), SAMPLER),
    Refusal("top_k", (0,), SAMPLER),
    Refusal("min_p", (None, 0.0), SAMPLER),
    Refusal("repetition_penalty", (1.0,), SAMPLER),
    Refusal("generation_kwargs", (None, {}), SAMPLER),
    Refusal("vllm_structured_outputs_regex", (None,), SAMPLER),
    Refusal("loss_type", ("dapo", "dr_grpo", "luspo", "cispo"), LENGTH),
    Refusal("importance_sampling_level", ("token",), LENGTH),
    Refusal("sapo_temperature_neg", (1.05,), LENGTH),
    Refusal("sapo_temperature_pos", (1.0,), LENGTH),
    Refusal("vespo_k_pos", (2.0,), LENGTH),
    Refusal("vespo_lambda_pos", (3.0,), LENGTH),
    Refusal("vespo_k_neg", (3.0,), LENGTH),
    Refusal("vespo_lambda_neg", (2.0,), LENGTH),
    Refusal("mask_truncated_completions", (False,), MASK),
    Refusal("top_entropy_quantile", (1.0,), MASK),
    Refusal("off_policy_mask_threshold", (None,), MASK),
    Refusal("vllm_importance_sampling_mode", ("sequence_mask", "sequence_truncate"), MASK),
    Refusal(
        "multi_objective_aggregation",
        ("sum_then_normalize",),
        "branches are compared by their summed rewards",
    ),
    Refusal(
        "scale_rewards",
        ("group", "none"),
        "a branch's reward is compared with rewards on their own scale",
    ),
    Refusal("max_tool_calling_iterations", (None,), "a branch cannot repeat the calls of a tool"),
    Refusal(
        "torch_compile", (False,), "the hidden states are read by a hook on the model's backbone"
    ),
    Refusal(
        "use_liger_kernel", (False,), "the hidden states are read by a hook on the model's backbone"
    ),
    Refusal(
        "neftune_noise_alpha", (None,), "each pass with noise in the embeddings has its own policy"
    ),
)

SHAPING: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
}
"""Settings of a model's own generation_config that GRPOConfig does not replace, and the values
without effect.
"""

HEAD_GAP = 0.1
"""Mean difference in nats between the head's ln p and TRL's; bfloat16 alone makes a few
hundredths.
"""

LOGIT_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Names under which configurations keep a factor of the logits."""


def check_version(version: str) -> None:
    """Require a version of TRL whose methods are known."""
    if not version.startswith(tuple(known + "." for known in KNOWN_VERSIONS)):
        known = " or ".join(KNOWN_VERSIONS)
        raise ImportError(
            f"BranchTrainer overrides methods of TRL {known}, but version {version} is installed; "
            "install a known one with `pip install 'arsm[trl]'`."
        )


def check_credit(credit: Estimator) -> None:
    """Require an unbiased estimator that compares the n tokens of a state."""
    needs = ("values_only", "mean", "independent_rows", "compares", "unbiased")
    instead = "set credit to one such as arsm.RLOO(4)"
    require(credit, "BranchTrainer", *needs, subset=None, instead=instead)


def check_budget(budget: float | None) -> None:
    """Require a positive number of branch tokens per token, or None."""
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(
            "budget must be a positive number of branch tokens per token, or None, but is "
            f"{budget}."
        )


def check_options(args: Any) -> None:
    """Refuse options of `GRPOConfig` that token credit cannot serve."""
    for option, taken, why in REFUSED:
        value = getattr(args, option)
        if value not in taken:
            wanted = " or ".join(repr(each) for each in taken)
            raise ValueError(
                f"BranchTrainer cannot use {option} = {value!r}, because {why}; set it to "
                f"{wanted}, or use GRPOTrainer."
            )
    if args.max_completion_length is None:
        raise ValueError(
            "BranchTrainer needs to know how long a branch may become; set max_completion_length."
        )
    deepspeed = getattr(args, "deepspeed_plugin", None)
    # accelerate's launcher tells of FSDP by a variable alone
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on")
    if (deepspeed is not None and deepspeed.zero_stage == 3) or args.fsdp or launched:
        raise ValueError(
            "BranchTrainer reads single rows of the head's weight, which ZeRO-3 and FSDP split "
            "between processes; use DDP, or ZeRO up to stage 2."
        )
    if args.scale_rewards == "group":
        warnings.warn(
            "BranchTrainer does not divide rewards by their standard deviation, which would bias "
            "the gradient; set "
            'scale_rewards="none" to silence this warning.',
            stacklevel=3,
        )


def check_arguments(others: dict[str, Any]) -> None:
    """Refuse further arguments of `GRPOTrainer` that token credit cannot serve."""
    for name in ("tools", "rollout_func", "environment_factory"):
        if others.get(name):
            raise ValueError(
                "BranchTrainer cannot go back to a state inside a conversation with tools or "
                f"environments; leave {name} out, or use GRPOTrainer."
            )
    dropout = getattr(others.get("peft_config"), "lora_dropout", 0.0)
    if dropout:
        raise ValueError(
            f"lora_dropout is {dropout}, but branches and completions must have one policy; set it "
            "to 0."
        )


def check_model(model: Any, *, disable_dropout: bool) -> None:
    """Require a model whose branches are drawn and scored as TRL draws and scores completions."""
    # `TokenHead` computes single logits from the head, and knows no factors of them
    config = model.config.get_text_config()
    for name in LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"BranchTrainer knows no models that scale their logits, but {name} is not 1; use "
                "GRPOTrainer."
            )
    for name, without_effect in SHAPING.items():
        value = getattr(model.generation_config, name, None)
        if value not in (None, without_effect):
            raise ValueError(
                f"TRL generates with model.generation_config.{name} = {value!r}, but {SAMPLER}; "
                "set it to None."
            )
    dropout = _dropout(model, disable_dropout=disable_dropout)
    if dropout is not None:
        raise ValueError(
            f"{dropout} drops activations while TRL generates, so that branches and completions "
            "would have different policies; set the model's dropout to 0."
        )
    if not _positions_are_relative(model):
        raise ValueError(
            "The model's positions change with the padding before a prompt, which TRL does not "
            "tell it when it scores completions; use a model with relative positions, such as "
            "rotary embeddings."
        )


def _dropout(model: nn.Module, *, disable_dropout: bool) -> str | None:
    """The name of a dropout that is not 0."""
    for name, module in model.named_modules():
        # TRL's disable_dropout switches these off, and no others
        if isinstance(module, nn.Dropout):
            if module.p > 0 and not disable_dropout:
                return name
            continue
        # attention often takes its dropout as a number
        for attribute, value in vars(module).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                return f"{name}.{attribute}"
    return None


@torch.no_grad()
def _positions_are_relative(model: Any) -> bool:
    """Whether the same tokens have the same last hidden state with padding before them
    and without.
    """
    # peft wraps the model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    device = next(model.parameters()).device
    ids = torch.arange(3, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    padding = torch.zeros(1, 4, dtype=ids.dtype, device=device)
    mask = torch.cat([padding, torch.ones_like(ids)], 1)
    longer = torch.cat([padding, ids], 1)
    plain = model.base_model(input_ids=ids, use_cache=False)[0]
    padded = model.base_model(input_ids=longer, attention_mask=mask, use_cache=False)[0]
    last = plain[0, -1].float()
    difference = padded[0, -1].float() - last
    # rounding moves the state by far less, another position by more
    return bool(difference.norm() <= 0.05 * last.norm())


def check_head(own: Tensor, trl_own: Tensor) -> None:
    """Refuse a model whose logits are not its head's product with the last hidden state."""
    if not own.numel():
        return
    gap = float((own - trl_own.float()).abs().mean())
    if not gap <= HEAD_GAP:  # also where it is NaN
        raise ValueError(
            f"ln p from the model's head and TRL's ln p differ by {gap:.2g} on average; "
            "BranchTrainer needs a model whose logits are the output embeddings times the last "
            "hidden state."
        )
