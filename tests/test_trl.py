"""`arsm.trl.BranchTrainer`: the gradient of `sequences.Branch`, inside TRL's GRPOTrainer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from tests.statistics import deviations
from tests.trl_problems import (
    EOS,
    PAD,
    PROMPTS,
    WORDS,
    Given,
    count_a,
    generated,
    given,
    gradient,
    llama,
    parameters,
    peft,
    soft_capped,
    tokenizer,
    trainer,
    whole,
)

# ---------------------------------------------------------------- against sequences.Branch


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded(arsm.RLOO):
    """Leave-one-out that remembers what it asked for."""

    asked: list[Tensor] = dataclasses.field(default_factory=list)

    def ask(self, logits: Tensor, noise: Any) -> Any:
        queries = super().ask(logits, noise)
        self.asked.append(queries.points.squeeze(-1))  # [n, S]
        return queries


def branch(
    model: Any, prompt_ids: list[list[int]], completions: list[list[int]], temperature: float
) -> Any:
    """`sequences.Branch` on given completions: its gradient, draws [N, T, n - 1] and
    continuations.
    """
    length = 5
    longest = max(map(len, prompt_ids))
    prompts = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in prompt_ids])
    mask = torch.tensor([[False] * (longest - len(ids)) + [True] * len(ids) for ids in prompt_ids])
    tokens = torch.tensor([ids + [EOS] * (length - len(ids)) for ids in completions])
    estimator = Recorded(4)

    def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
        texts = [" ".join(WORDS[i] for i in row if i > EOS) for row in tokens.tolist()]
        return torch.tensor(count_a(texts))

    out = sequences.estimate(
        sequences.Branch(estimator),
        sequences.Transformers(model),
        prompts,
        reward,
        max_tokens=length,
        eos=EOS,
        mask=mask,
        temperature=temperature,
        completions=tokens,
    )
    model.zero_grad()
    (-out.value.mean()).backward()
    found = {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    (asked,) = [points for points in estimator.asked if points.shape[1] == int(out.mask.sum())]
    draws = torch.zeros(*tokens.shape, 3, dtype=torch.int64)
    draws[out.mask] = asked[1:].T
    assert out.branches is not None
    continuations = defaultdict(list)  # several completions may share a prefix
    for row, step, ids in zip(
        out.branches.row, out.branches.step, out.branches.tokens.tolist(), strict=True
    ):
        ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
        continuations[(*prompt_ids[int(row)], *ids[: int(step) + 1])].append(ids[int(step) + 1 :])
    return found, draws, continuations


MODELS = {
    "Llama": (llama, {}, {}),
    "tied weights, temperature": (
        lambda: llama(tie_word_embeddings=True),
        {"temperature": 0.7},
        {},
    ),
    "soft cap": (soft_capped, {}, {}),
    "padded with eos": (llama, {}, {"processing_class": tokenizer("<eos>")}),
    "gradient checkpointing": (llama, {"gradient_checkpointing": True}, {}),
    "one row per pass": (llama, {"per_device_train_batch_size": 1, "steps_per_generation": 8}, {}),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_gradient_is_that_of_branch(case: str) -> None:
    make, options, others = MODELS[case]
    model = make()
    made = trainer(
        Given, model, others={"credit": arsm.RLOO(4), "budget": None, **others}, **options
    )
    prompt_ids = [tokenizer()(prompt)["input_ids"] for prompt in PROMPTS[:2] for _ in range(4)]
    torch.manual_seed(3)
    lengths = [5, 1, 4, 5, 3, 5, 5, 2]
    made.completions = [
        torch.randint(2, len(WORDS), (length,)).tolist()[: length if length == 5 else length - 1]
        + ([] if length == 5 else [EOS])
        for length in lengths
    ]
    model.eval()
    expected, made.draws, continuations = branch(
        model, prompt_ids, made.completions, made.temperature
    )
    made.more = lambda prefix, limit: continuations[tuple(prefix)].pop(0)
    batch = generated(made, PROMPTS[:2])
    found = gradient(made, batch)
    assert found.keys() == expected.keys()
    size = float(whole(expected).abs().max())
    assert size > 0.1
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6 * max(size, 1))


def test_lora_has_the_gradient_of_the_merged_model() -> None:
    """W = W_0 + s B A, so that dL/dB = s dL/dW A' and dL/dA = s B' dL/dW."""
    made = given(
        2,
        others={
            "peft_config": peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=6)
        },
    )
    factors = {}
    for name, parameter in made.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
            factors[name] = parameter.detach().clone()
    found = gradient(made, generated(made, PROMPTS[:2]))
    assert found.keys() == factors.keys()
    merged = made.model.merge_and_unload().requires_grad_(True)
    plain = trainer(Given, merged, others={"credit": made.credit, "budget": None})
    plain.completions, plain.draws = made.completions, made.draws
    full = gradient(plain, generated(plain, PROMPTS[:2]))
    for name in [name for name in factors if "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        weight = full[name.removeprefix("base_model.model.").split(".lora_A")[0] + ".weight"]
        torch.testing.assert_close(found[other], 3 * weight @ factors[name].T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name], 3 * factors[other].T @ weight, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- against enumeration

FEW = ["<pad>", "<eos>", "a", "b"]
LENGTH = 3


def few() -> Any:
    return llama(vocab_size=len(FEW))


def enumerated(model: Any, prompt: list[int], temperature: float) -> dict[tuple[int, ...], Tensor]:
    """dJ/dlogits [V] in every state, by walking through all completions; logits divided by the
    temperature.
    """
    states = {}

    def value(done: tuple[int, ...], reach: float) -> float:
        if len(done) == LENGTH or (done and done[-1] == EOS):
            text = " ".join(FEW[i] for i in done if i > EOS)
            return count_a([text])[0]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *done]])).logits[0, -1].double() / temperature
        p = logits.softmax(-1)
        q = torch.tensor([value((*done, c), reach * float(p[c])) for c in range(len(FEW))]).double()
        mean = float((p * q).sum())
        states[done] = reach * p * (q - mean)
        return mean

    value((), 1.0)
    return states


@pytest.mark.parametrize("budget", [None, 1.0, 0.2], ids=["everywhere", "by coins", "by few coins"])
def test_the_mean_is_that_of_enumeration(budget: float | None) -> None:
    torch.manual_seed(2)
    groups = 4000
    made = trainer(
        model=few(),
        others={"credit": arsm.RLOO(3), "budget": budget, "processing_class": tokenizer(words=FEW)},
        per_device_train_batch_size=2 * groups,
        num_generations=2,
        max_completion_length=LENGTH,
        temperature=1.3,
    )
    batch = generated(made, ["a b"] * groups)
    exact = enumerated(made.model, tokenizer(words=FEW)("a b")["input_ids"], 1.3)
    samples = credit_by_state(made, batch, list(exact))
    mean = torch.stack(list(exact.values()))
    assert float(mean.abs().max()) > 0.02
    per_group = samples.view(groups, 2, *mean.shape).mean(1)
    assert float(deviations(per_group, mean).max()) <= 1
    if budget is not None:
        spent = made._metrics["train"]["credit/tokens"][0] / float(batch["completion_mask"].sum())
        assert 0.5 * budget < spent < 1.5 * budget


def credit_by_state(made: Any, batch: dict[str, Any], states: list[tuple[int, ...]]) -> Tensor:
    """g [B, states, V] of every row: its credit where it went through the state, else 0."""
    tokens, weights = batch["credit_tokens"], batch["credit_weights"].double()
    completions = batch["completion_ids"]
    found = torch.zeros(tokens.shape[0], len(states), len(FEW), dtype=torch.float64)
    for number, done in enumerate(states):
        t = len(done)
        if t >= completions.shape[1]:
            continue
        here = (completions[:, :t] == torch.tensor(done, dtype=torch.int64)).all(-1)
        with torch.no_grad():
            prompt = tokenizer(words=FEW)("a b")["input_ids"]
            p = (
                made.model(torch.tensor([[*prompt, *done]])).logits[0, -1].double()
                / made.temperature
            ).softmax(-1)
        one_hot = torch.nn.functional.one_hot(tokens[:, t], len(FEW)).double() - p
        credit = (weights[:, t].unsqueeze(-1) * one_hot).sum(1)
        found[:, number] = torch.where(here.unsqueeze(-1), credit, 0)
    return found


def test_a_coin_that_looks_at_the_draws_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: branching where the true token was an `a` is biased."""

    def choose(self: Any, tokens: Tensor, mask: Tensor) -> Tensor:
        return mask & (tokens[..., 0] == FEW.index("a"))

    monkeypatch.setattr(arsm.trl.BranchTrainer, "_choose", choose)
    with pytest.raises(AssertionError):
        test_the_mean_is_that_of_enumeration(0.2)


# ---------------------------------------------------------------- TRL's schedules


def test_the_first_inner_step_with_clipping_is_the_unclipped_one() -> None:
    once, twice = given(2), given(2, num_iterations=2, epsilon=0.01)
    plain, clipped = generated(once, PROMPTS[:2]), generated(twice, PROMPTS[:2])
    assert "old_per_token_logps" not in plain
    assert clipped["old_per_token_logps"].shape == clipped["credit_tokens"].flatten(1).shape
    torch.testing.assert_close(gradient(twice, clipped), gradient(once, plain), rtol=0, atol=1e-6)
    # Later inner steps are clipped: this policy has moved away from the one that drew.
    with torch.no_grad():
        for parameter in twice.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    once.model.load_state_dict(twice.model.state_dict())
    moved, unclipped = gradient(twice, clipped), gradient(once, plain)
    assert float((whole(moved) - whole(unclipped)).abs().max()) > 1e-2


def test_num_iterations_and_steps_per_generation_train() -> None:
    made = given(
        2, num_iterations=2, max_steps=4, per_device_train_batch_size=4, steps_per_generation=2
    )
    before = parameters(made).clone()
    made.train()
    assert float((parameters(made) - before).abs().max()) > 1e-3
    assert made.state.global_step == 4


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "luspo", "cispo"])
def test_gradient_accumulation_is_one_large_batch(loss_type: str) -> None:
    options: dict[str, Any] = (
        {"loss_type": loss_type, "epsilon_high": 5.0}
        if loss_type == "cispo"
        else {"loss_type": loss_type}
    )
    large = given(2, **options)
    parts = given(2, per_device_train_batch_size=2, gradient_accumulation_steps=4, **options)
    before = parameters(large).clone()
    large.train()
    parts.train()
    moved = parameters(large)
    assert float((moved - before).abs().max()) > 1e-3
    torch.testing.assert_close(parameters(parts), moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "scale"), [("dr_grpo", 1 / 5), ("dapo", None), ("cispo", 0.2)]
)
def test_loss_types_change_the_scale_alone(loss_type: str, scale: float | None) -> None:
    plain, other = given(2), given(2, loss_type=loss_type)
    batch = generated(plain, PROMPTS[:2])
    per_token = 8 / float(batch["completion_mask"].sum())
    scale = per_token if scale is None else scale * (per_token if loss_type == "cispo" else 1)
    found = whole(gradient(other, generated(other, PROMPTS[:2])))
    torch.testing.assert_close(found, scale * whole(gradient(plain, batch)), rtol=0, atol=1e-6)
