"""`arsm.trl.BranchTrainer` as a trainer: what TRL brings, several processes, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import arsm
from tests.trl_problems import (
    LLAMA,
    PROMPTS,
    WORDS,
    Given,
    config,
    count_a,
    generated,
    given,
    gradient,
    llama,
    parameters,
    peft,
    tokenizer,
    trainer,
    transformers,
    trl,
    whole,
)
from tests.trl_processes import one_step

# ---------------------------------------------------------------- what TRL brings


def test_a_default_config_trains_with_a_warning(tmp_path: Any) -> None:
    """bfloat16, gradient checkpointing and scaled rewards are TRL's defaults."""
    data = {"train_dataset": trainer().train_dataset, "processing_class": tokenizer()}
    config()  # forget the precision of earlier trainers
    args = trl.GRPOConfig(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=2, max_completion_length=5
    )
    with pytest.warns(
        UserWarning,
        match='does not divide rewards by their standard deviation.*scale_rewards="none"',
    ):
        made = arsm.trl.BranchTrainer(llama(), count_a, args, **data)
    assert made.args.bf16
    assert made.args.gradient_checkpointing
    before = parameters(made).clone()
    made.train()
    assert not torch.equal(parameters(made), before)


def test_bfloat16_is_close_to_float32() -> None:
    plain, rounded = given(2), given(2, bf16=True)
    expected = whole(gradient(plain, generated(plain, PROMPTS[:2])))
    found = whole(gradient(rounded, generated(rounded, PROMPTS[:2])))
    assert 0 < float((found - expected).norm()) < 0.05 * float(expected.norm())


def test_chat_templates() -> None:
    """Prompts are rendered and completions are judged as messages, those of branches too."""
    seen = []

    def polite(prompts: Any, completions: Any, marks: Any, **columns: Any) -> list[float]:
        seen.extend(zip(prompts, completions, marks, strict=True))
        return [float(len(messages[0]["content"])) for messages in completions]

    made = trainer(
        others={"reward_funcs": polite, "budget": None},
        chat_template_kwargs={"mark": "b"},
        num_generations=2,
    )
    prompts = [[{"role": "user", "content": word}] for word in ("c d", "e")]
    made.model.train()
    rows = [{"prompt": prompt, "marks": i} for i, prompt in enumerate(prompts) for _ in range(2)]
    batch = made._generate_and_score_completions(rows)
    words = [WORDS[i] for i in batch["prompt_ids"][0].tolist()]
    assert words[-1] == "b"
    assert words[-3:-1] == ["c", "d"]
    assert len(seen) == 4 + made._metrics["train"]["credit/rollouts"][0]
    for prompt, messages, mark in seen:
        assert prompt == prompts[mark]
        assert messages[0]["role"] == "assistant"


def test_evaluation_does_not_branch() -> None:
    data = trainer().train_dataset
    made = trainer(
        others={"eval_dataset": data}, num_generations_eval=2, per_device_eval_batch_size=4
    )
    metrics = made.evaluate()
    assert metrics["eval_reward"] >= 0
    assert not [name for name in metrics if "credit" in name]
    made.train()
    assert "credit/rollouts" in made.state.log_history[-2]


class Stop(Exception):
    """What kills a training here."""


class Killer(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise Stop


def test_a_killed_training_resumes(tmp_path: Any) -> None:
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole_run = trainer(output_dir=str(tmp_path / "whole"), **options)
    whole_run.train()
    killed = trainer(
        output_dir=str(tmp_path / "killed"), others={"callbacks": [Killer()]}, **options
    )
    with pytest.raises(Stop):
        killed.train()
    again = trainer(output_dir=str(tmp_path / "killed"), **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5
    assert again.state.num_input_tokens_seen == whole_run.state.num_input_tokens_seen
    torch.testing.assert_close(parameters(again), parameters(whole_run), rtol=0, atol=0)


def test_branches_leave_no_traces_in_trls_logs() -> None:
    def telling(completions: Any, log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_extra("length", [len(text) for text in completions])
        log_metric("total", sum(count_a(completions)))
        return count_a(completions)

    class Plain(trl.GRPOTrainer):
        _generate_single_turn = Given._generate_single_turn

    made = given(2, others={"reward_funcs": telling})
    plain = trainer(Plain, others={"reward_funcs": telling})
    plain.completions = made.completions
    # what a reward function logs is written with the next batch
    for each in (
        made,
        plain,
        made,
        plain,
    ):
        generated(each, PROMPTS[:2])
    assert not made._pending_extra_logs
    assert not made._pending_metrics
    assert {key: list(value) for key, value in made._logs["extra"].items()} == {
        key: list(value) for key, value in plain._logs["extra"].items()
    }
    assert made._logs["completion"] == plain._logs["completion"]
    metrics = {
        key: value for key, value in made._metrics["train"].items() if not key.startswith("credit/")
    }
    tokens, own = metrics.pop("num_tokens"), plain._metrics["train"].pop("num_tokens")
    assert metrics == dict(plain._metrics["train"])
    assert made.rollout_func is None
    # Branches count as TRL counts completions: with what they read.
    assert tokens[0] > own[0] + made._metrics["train"]["credit/tokens"][0]
    assert made.state.num_input_tokens_seen == tokens[0]


def test_metrics() -> None:
    """One state of one token, with four draws: a rollout for each other word."""
    made = trainer(
        Given,
        others={"credit": arsm.RLOO(4), "budget": None},
        num_generations=2,
        max_completion_length=1,
    )
    made.completions = [[2], [4]]
    made.draws = torch.tensor([[[2, 3, 4]], [[4, 4, 4]]])
    batch = generated(made, ["a b"])
    metrics = {
        name: value[0]
        for name, value in made._metrics["train"].items()
        if name.startswith("credit/")
    }
    # Words 2, 3 and 4 are a, b and c with rewards 1, 0.25 and 0.
    returns = torch.tensor([1, 1, 0.25, 0])
    weights = (returns - returns.mean()) / 3
    torch.testing.assert_close(
        batch["credit_weights"], torch.stack([weights, torch.zeros(4)]).unsqueeze(1)
    )
    assert batch["credit_tokens"].tolist() == [[[2, 2, 3, 4]], [[4, 4, 4, 4]]]
    assert metrics["credit/rollouts"] == metrics["credit/tokens"] == 2
    assert metrics["credit/states"] == 1
    assert metrics["credit/zero_states"] == 0.5
    squares = (weights[0] + weights[1]) ** 2 + weights[2] ** 2 + weights[3] ** 2
    assert metrics["credit/variance"] == pytest.approx(float(squares) / 2)
    with torch.no_grad():
        p = made.model(torch.tensor([[2, 3]])).logits[0, -1].softmax(-1)
    energy = [
        float((torch.nn.functional.one_hot(torch.tensor(y), len(WORDS)) - p).square().sum())
        for y in (2, 4)
    ]
    # advantages 1 and -1
    assert metrics["credit/group_variance"] == pytest.approx(sum(energy) / 2, rel=1e-4)


def test_completions_that_nobody_can_judge() -> None:
    """None from all reward functions: no credit for a completion, and the group's for a state with
    such a branch.
    """

    def choosy(completions: Any, **columns: Any) -> list[float | None]:
        return [
            None if "h" in text else reward
            for text, reward in zip(completions, count_a(completions), strict=True)
        ]

    made = trainer(
        Given,
        others={"credit": arsm.RLOO(2), "budget": None, "reward_funcs": choosy},
        num_generations=3,
        per_device_train_batch_size=3,
        max_completion_length=1,
    )
    h = WORDS.index("h")
    made.completions = [[2], [3], [h]]
    made.draws = torch.tensor([[[h]], [[4]], [[2]]])
    batch = generated(made, ["a b"])
    # The group of the first: only the second is left to compare with. It has 1 against the mean of
    # 0.25 and 0.
    torch.testing.assert_close(
        batch["credit_weights"].squeeze(1), torch.tensor([[1 - 0.125, 0], [0.125, -0.125], [0, 0]])
    )
    assert batch["credit_tokens"].squeeze(1).tolist() == [[2, 2], [3, 4], [h, h]]


def test_gradient_noise() -> None:
    """Nothing is left to chance, so nothing varies; and the scales of both trainers are the
    same.
    """
    made = given(2)
    still = arsm.trl.gradient_noise(made, 3)
    batch = generated(made, PROMPTS[:2])
    assert still.variance == pytest.approx(
        0, abs=1e-5 * float(whole(gradient(made, batch)).square().sum())
    )
    assert (
        still.tokens
        == float(batch["completion_mask"].sum()) + made._metrics["train"]["credit/tokens"][0]
    )
    with pytest.raises(ValueError, match="at least 2 repeats"):
        arsm.trl.gradient_noise(made, 1)

    # Coins that never fall: the group's leave-one-out advantages alone, which GRPOTrainer's are up
    # to (n - 1)/n.
    torch.manual_seed(0)
    group = arsm.trl.gradient_noise(trainer(others={"budget": 1e-12}), 40)
    torch.manual_seed(0)
    plain = arsm.trl.gradient_noise(trainer(trl.GRPOTrainer), 40)
    assert group.variance == pytest.approx(plain.variance, rel=0.5)
    assert group.per_token == group.variance * group.tokens


# ---------------------------------------------------------------- processes


def test_two_processes_have_the_gradient_of_one(tmp_path: Any) -> None:
    """torchrun with gloo: completions and draws are given, the parameters after one step are
    compared.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command = [*torchrun, "-m", "tests.trl_processes", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    one, first, second = one_step(1), torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    assert one["rollouts"] == first["rollouts"] > 0
    assert one["num_tokens"] == first["num_tokens"]
    assert float(one["moved"].abs().max()) > 1e-2
    torch.testing.assert_close(first["moved"], one["moved"], rtol=0, atol=1e-6)
    torch.testing.assert_close(second["moved"], first["moved"], rtol=0, atol=0)


# ---------------------------------------------------------------- size and refusals


def test_at_most_five_methods_are_overridden() -> None:
    own = {name for name, value in vars(arsm.trl.BranchTrainer).items() if callable(value)}
    assert len(own & set(dir(trl.GRPOTrainer)) - {"__firstlineno__", "__static_attributes__"}) <= 5


def test_another_version_of_trl_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(
        ImportError, match=r"overrides methods of TRL 1\.16, but version 1\.17\.0 is installed"
    ):
        trainer()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"credit": arsm.ARSM()},
            r"ARSM does not compare several samples by .* set credit to one such as arsm\.RLOO",
        ),
        ({"credit": arsm.GRPO(4)}, "GRPO is biased, but BranchTrainer needs one that is unbiased"),
        (
            {"credit": arsm.RLOO(4, ridge=1.0)},
            "RLOO does not compare several samples by their values alone",
        ),
        ({"credit": arsm.VIMCO(4)}, "VIMCO estimates a multi-sample bound"),
        ({"credit": arsm.OTB(4)}, "OTB does not compare several samples by their values alone"),
        (
            {"budget": 0.0},
            "budget must be a positive number of branch tokens per token, or None, but is 0",
        ),
        ({"tools": [len]}, "leave tools out, or use GRPOTrainer"),
        ({"rollout_func": print}, "leave rollout_func out"),
        ({"environment_factory": dict}, "leave environment_factory out"),
        (
            {"peft_config": peft.LoraConfig(lora_dropout=0.1)},
            r"lora_dropout is 0\.1, .* set it to 0",
        ),
    ],
)
def test_arguments_that_are_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(others=others)


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=2, n_head=2, **options
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: gpt2(), "drop drops activations while TRL generates"),
        (
            lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
            "The model's positions change with the padding",
        ),
        (
            lambda: llama(attention_dropout=0.1),
            r"attention_dropout drops activations while TRL generates",
        ),
        (
            lambda: transformers.CohereForCausalLM(
                transformers.CohereConfig(**LLAMA, logit_scale=0.25)
            ),
            "logit_scale is not 1",
        ),
    ],
    ids=["dropout", "absolute positions", "attention dropout", "logit scale"],
)
def test_models_that_are_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(model=model())


def test_a_model_that_shapes_its_generation_is_refused() -> None:
    model = llama()
    model.generation_config.suppress_tokens = [3]
    with pytest.raises(ValueError, match=r"generation_config.suppress_tokens = \[3\], .* to None"):
        trainer(model=model)


def test_a_head_that_is_not_linear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()
    head = made.model.get_output_embeddings()
    monkeypatch.setattr("arsm.trl.head.TokenHead.scaled", lambda _, logits: 3 * logits)
    with pytest.raises(
        ValueError, match=r"differ by .* on average; BranchTrainer needs a model whose logits are"
    ):
        generated(made, PROMPTS[:2])
    assert head.bias is None
