"""Every option of GRPOConfig works or is refused, as the guide's table says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

# TRL brings pandas along
import pandas as pd
import pytest
import torch
from torch import Tensor
from trl.trainer import grpo_trainer

import arsm
from arsm.trl.checks import check_options
from tests import test_trl, test_trl_trainer
from tests.trl_problems import (
    LLAMA,
    PROMPTS,
    Given,
    config,
    count_a,
    generated,
    given,
    gradient,
    lively,
    llama,
    next_words,
    parameters,
    tokenizer,
    trainer,
    transformers,
    trl,
    whole,
)

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "trl.md"
TABLE = dict(re.findall(r"^\| `(\w+)` \| (works|refused) \|", GUIDE.read_text(), re.MULTILINE))


def test_the_guide_lists_every_option() -> None:
    """All fields that TRL declares itself, in GRPOConfig or in the base class of its configs."""
    declared = {
        field.name
        for field in dataclasses.fields(trl.GRPOConfig)
        if any(
            field.name in vars(kind).get("__annotations__", {})
            for kind in trl.GRPOConfig.__mro__[:2]
        )
    }
    assert TABLE.keys() == declared


# ---------------------------------------------------------------- refused

REFUSED: dict[str, Any] = {
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 8,
    "use_bias_correction_kl": False,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"no_repeat_ngram_size": 2},
    "vllm_structured_outputs_regex": "a*",
    "importance_sampling_level": "sequence",
    "sapo_temperature_neg": 1.0,
    "sapo_temperature_pos": 1.1,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "multi_objective_aggregation": "normalize_then_sum",
    "mask_truncated_completions": True,
    "top_entropy_quantile": 0.5,
    "off_policy_mask_threshold": 0.5,
    "max_tool_calling_iterations": 2,
    "use_liger_kernel": True,
}
ALSO_REFUSED = [
    *[("loss_type", name) for name in ("grpo", "bnpo", "sapo", "vespo")],
    ("scale_rewards", "batch"),
    ("max_completion_length", None),
    ("vllm_importance_sampling_mode", "token_truncate"),
    ("vllm_importance_sampling_mode", "token_mask"),
    ("torch_compile", True),
    ("neftune_noise_alpha", 5.0),
]
"""Values of options that otherwise work."""


def test_the_refused_are_those_of_the_guide() -> None:
    assert REFUSED.keys() == {option for option, says in TABLE.items() if says == "refused"}


@pytest.mark.parametrize(("option", "value"), [*REFUSED.items(), *ALSO_REFUSED], ids=str)
def test_refused_before_the_model_is_touched(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option) as refusal:
        trainer(model="no such model", **{option: value})
    assert str(refusal.value).count(". ") == 0  # one sentence


def test_fsdp_is_refused_before_the_model_is_touched() -> None:
    with pytest.raises(ValueError, match="FSDP") as refusal:
        trainer(model="no such model", fsdp=True)
    assert str(refusal.value).count(". ") == 0
    assert "use DDP" in str(refusal.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_3_is_refused_before_the_model_is_touched(stage: int) -> None:
    """The plugin stands where transformers puts it, with or without DeepSpeed installed."""
    args = config()
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)  # pyright: ignore
    if stage < 3:
        check_options(args)
        return
    with pytest.raises(ValueError, match="ZeRO-3") as refusal:
        arsm.trl.BranchTrainer("no such model", reward_funcs=count_a, args=args)
    assert str(refusal.value).count(". ") == 0


def test_fsdp_of_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --use_fsdp` leaves the arguments as they are and sets a variable."""
    args = config()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP"):
        arsm.trl.BranchTrainer("no such model", reward_funcs=count_a, args=args)


# ---------------------------------------------------------------- works: the gradient is that of
# the default

UNCHANGED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_kwargs": {},
    "torch_empty_cache_steps": 1,
    "logging_steps": 5,
    "remove_unused_columns": True,
    "trust_remote_code": True,
    "disable_dropout": True,
    "cast_lm_head_to_fp32": True,
    "gradient_checkpointing": True,
    "num_generations_eval": 2,
    "ds3_gather_for_generation": False,
    "shuffle_dataset": True,
    "pad_to_multiple_of": 4,
    "generation_batch_size": 8,
    "cache_implementation": "static",
    "epsilon": 0.01,
    "epsilon_high": 0.5,
    "delta": 1.5,
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 0.2,
    "entropy_coef_delta": 0.1,
    "entropy_target": 1.0,
    "log_completions": True,
    "log_multimodal": False,
    "num_completions_to_print": 1,
    "log_unique_prompts": True,
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_server_base_url": "http://localhost:1",
    "vllm_server_host": "localhost",
    "vllm_server_port": 1,
    "vllm_server_timeout": 1.0,
    "vllm_group_port": 1,
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 32,
    "vllm_tensor_parallel_size": 2,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "sequence_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_cap": 2.0,
}
"""Options that change nothing on the first step, and a value that is not their default."""


@pytest.fixture(scope="module")
def default() -> Tensor:
    made = given(2)
    return whole(gradient(made, generated(made, PROMPTS[:2])))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("option", "value"), UNCHANGED.items(), ids=UNCHANGED)
def test_the_gradient_stays(option: str, value: Any, default: Tensor) -> None:
    made = given(2, **{option: value})
    found = whole(gradient(made, generated(made, PROMPTS[:2])))
    torch.testing.assert_close(found, default, rtol=0, atol=1e-6)


PAGES = {"block_size": 32, "num_blocks": 16, "max_batch_tokens": 64}
"""A small cache: the default is half of the memory."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"remove_unused_columns": True, "shuffle_dataset": True},
        {"pad_to_multiple_of": 4, "disable_dropout": True},
        {"log_completions": True, "log_unique_prompts": True, "num_completions_to_print": 1},
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": PAGES,
        },
        {"use_transformers_paged": True, "transformers_continuous_batching_config": PAGES},
        {
            "use_adaptive_entropy": True,
            "entropy_coef": 0.1,
            "entropy_target": 5.0,
            "entropy_coef_delta": 0.01,
        },
        {"cast_lm_head_to_fp32": True, "bf16": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_training_with_sampled_completions(options: dict[str, Any]) -> None:
    made = trainer(max_steps=2, **options)
    before = parameters(made).clone()
    made.train()
    logs = [entry for entry in made.state.log_history if "reward" in entry]
    assert [entry["credit/rollouts"] > 0 for entry in logs] == [True, True]
    assert float((parameters(made) - before).abs().max()) > 1e-4
    if "entropy_coef" in options:
        assert logs[-1]["entropy_coef"] == pytest.approx(0.12)


def test_log_completions_hub_repo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not reached; the folder that TRL would upload holds true completions alone."""
    for name in ("create_repo", "DatasetCard", "CommitScheduler"):
        monkeypatch.setattr(grpo_trainer, name, Anything())
    made = trainer(log_completions=True, log_completions_hub_repo="somebody/completions")
    made.train()
    (saved,) = Path(made.args.output_dir, "completions").glob("*.parquet")
    assert len(pd.read_parquet(saved)) == 8


class Anything:
    """Takes every call and has every attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        return self

    def __getitem__(self, key: object) -> Anything:
        return self


# ---------------------------------------------------------------- works: the gradient changes as it
# should


def test_reward_weights(default: Tensor) -> None:
    def constant(completions: Any, **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    made = given(2, reward_weights=[2.0, 5.0], others={"reward_funcs": [count_a, constant]})
    torch.testing.assert_close(
        whole(gradient(made, generated(made, PROMPTS[:2]))), 2 * default, rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("kind", [Given, trl.GRPOTrainer])
def test_entropy_coef(kind: Any, default: Tensor) -> None:
    """The bonus has the gradient that GRPOTrainer gives it."""

    class Plain(trl.GRPOTrainer):
        _generate_single_turn = Given._generate_single_turn

    def bonus(kind: Any) -> Tensor:
        found = []
        for coefficient in (0.0, 0.5):
            others = {"credit": arsm.RLOO(4), "budget": None} if kind is Given else {}
            made = trainer(kind, others=others, entropy_coef=coefficient)
            reference = given(2)
            made.completions, made.draws = reference.completions, reference.draws
            found.append(whole(gradient(made, generated(made, PROMPTS[:2]))))
        return found[1] - found[0]

    expected = bonus(Plain)
    assert float(expected.abs().max()) > 1e-2
    torch.testing.assert_close(bonus(Given), expected, rtol=0, atol=1e-6)


def test_router_aux_loss_coef() -> None:
    """A mixture of experts: the balancing loss is added once, whatever the number of draws."""

    def mixture() -> Any:
        options = {
            **LLAMA,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        }
        return lively(transformers.MixtralForCausalLM(transformers.MixtralConfig(**options)))

    found = {}
    for samples in (2, 4):
        for coefficient in (0.0, 0.5):
            made = given(2, samples, router_aux_loss_coef=coefficient, model=mixture())
            found[samples, coefficient] = whole(gradient(made, generated(made, PROMPTS[:2])))
    bonus = {samples: found[samples, 0.5] - found[samples, 0.0] for samples in (2, 4)}
    assert float(bonus[4].abs().max()) > 1e-3
    torch.testing.assert_close(bonus[2], bonus[4], rtol=0, atol=1e-5)


def test_model_init_kwargs(tmp_path: Path) -> None:
    """A model given by its name is loaded by TRL, and refused after that if it must be."""
    llama().save_pretrained(tmp_path / "good")
    tokenizer().save_pretrained(tmp_path / "good")
    made = trainer(model=str(tmp_path / "good"), model_init_kwargs={"dtype": "float32"})
    made.train()
    assert made.model.dtype == torch.float32
    test_trl_trainer.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(
        tmp_path / "bad"
    )
    tokenizer().save_pretrained(tmp_path / "bad")
    with pytest.raises(ValueError, match="positions change with the padding"):
        trainer(model=str(tmp_path / "bad"))


# ---------------------------------------------------------------- vLLM, by a stand-in

ENGINE = (
    *(
        "mode",
        "model_impl",
        "enable_sleep_mode",
        "server_base_url",
        "server_host",
        "server_port",
        "server_timeout",
    ),
    *("group_port", "gpu_memory_utilization", "max_model_length", "tensor_parallel_size"),
)


class Engine:
    """Completes prompts like vLLM's wrapper in TRL; ln p are the model's own, plus `off` for every
    first token.
    """

    off = 0.0
    made: ClassVar[list[Engine]]
    vllm_client = Anything()

    def __init__(self, model: Any, max_completion_length: int, **settings: Any) -> None:
        self.model, self.max_completion_length, self.settings = (
            model,
            max_completion_length,
            settings,
        )
        self.asked: list[tuple[int, int, int]] = []
        self.synced = 0
        type(self).made.append(self)

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
        self.asked.append((len(prompts), num_generations, self.max_completion_length))
        completions = [
            next_words([*ids, i], self.max_completion_length) for i, ids in enumerate(prompts)
        ]
        log_probs = []
        for ids, more in zip(prompts, completions, strict=True):
            with torch.no_grad():
                log_p = (
                    self.model(torch.tensor([[*ids, *more]]))
                    .logits[0, len(ids) - 1 : -1]
                    .log_softmax(-1)
                )
            own = log_p.gather(-1, torch.tensor(more).unsqueeze(-1)).squeeze(-1).tolist()
            log_probs.append([[own[0] + self.off], *([each] for each in own[1:])])
        return prompts, completions, log_probs, None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(Engine, "made", [], raising=False)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    return Engine


def test_vllm_plays_branches(engine: type[Engine]) -> None:
    made = trainer(use_vllm=True, others={"budget": None}, max_steps=2)
    made.train()
    (found,) = engine.made
    true = [asked for asked in found.asked if asked[1] == 4]
    branches = [asked for asked in found.asked if asked[1] == 1]
    assert true == [(8, 4, 5)] * 2  # the limit is back after the branches
    assert {limit for _, _, limit in branches} <= {1, 2, 3, 4}
    assert len(branches) > 4
    assert found.synced == 2


def test_vllm_settings_reach_the_engine(engine: type[Engine]) -> None:
    settings = {f"vllm_{name}": UNCHANGED[f"vllm_{name}"] for name in ENGINE}
    trainer(use_vllm=True, **settings)
    (found,) = engine.made
    assert {name: found.settings[name] for name in ENGINE} == {
        name: settings[f"vllm_{name}"] for name in ENGINE
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"vllm_importance_sampling_correction": False}, 1.0),
        ({}, 2.0),
        ({"vllm_importance_sampling_clip_max": 1.5}, 0.0),
        ({"vllm_importance_sampling_clip_min": 2.5}, 0.0),
        (
            {
                "vllm_importance_sampling_mode": "sequence_truncate",
                "vllm_importance_sampling_clip_max": 1.5,
            },
            1.5,
        ),
        (
            {
                "vllm_importance_sampling_mode": "sequence_truncate",
                "vllm_importance_sampling_cap": 1.5,
            },
            1.5,
        ),
    ],
    ids=["off", "ratio", "masked above", "masked below", "truncated", "truncated by cap"],
)
def test_vllm_importance_sampling(
    options: dict[str, Any], factor: float, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose completions are half as likely as the model says: their credit is doubled."""

    def found(**options: Any) -> Tensor:
        torch.manual_seed(0)
        made = trainer(use_vllm=True, others={"budget": None}, **options)
        return whole(gradient(made, generated(made, PROMPTS[:2])))

    plain = found(vllm_importance_sampling_correction=False)
    monkeypatch.setattr(engine, "off", -float(torch.tensor(2.0).log()))
    assert float(plain.abs().max()) > 1e-2
    torch.testing.assert_close(found(**options), factor * plain, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- the table

ELSEWHERE: dict[str, Callable[..., None]] = {
    "bf16": test_trl_trainer.test_bfloat16_is_close_to_float32,
    "router_aux_loss_coef": test_router_aux_loss_coef,
    "model_init_kwargs": test_model_init_kwargs,
    "num_generations": test_trl_trainer.test_metrics,
    "max_completion_length": test_trl_trainer.test_metrics,
    "steps_per_generation": test_trl.test_num_iterations_and_steps_per_generation_train,
    "num_iterations": test_trl.test_the_first_inner_step_with_clipping_is_the_unclipped_one,
    "temperature": test_trl.test_the_gradient_is_that_of_branch,
    "chat_template_kwargs": test_trl_trainer.test_chat_templates,
    "use_vllm": test_vllm_plays_branches,
    "reward_weights": test_reward_weights,
    "scale_rewards": test_trl_trainer.test_a_default_config_trains_with_a_warning,
    "loss_type": test_trl.test_loss_types_change_the_scale_alone,
    "entropy_coef": test_entropy_coef,
    "use_adaptive_entropy": test_training_with_sampled_completions,
    "log_completions_hub_repo": test_log_completions_hub_repo,
    "use_transformers_continuous_batching": test_training_with_sampled_completions,
    "transformers_continuous_batching_config": test_training_with_sampled_completions,
    "use_transformers_paged": test_training_with_sampled_completions,
}
"""The tests of options that change what is computed."""


def test_what_works_is_tested() -> None:
    assert UNCHANGED.keys() | ELSEWHERE.keys() == {
        option for option, says in TABLE.items() if says == "works"
    }
    plain = config()
    assert all(
        getattr(plain, option) != value
        for option, value in UNCHANGED.items()
        if option != "generation_batch_size"
    )
