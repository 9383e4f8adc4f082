"""Rewards that cannot be used, rewards that raise, and memory that is full."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group, sampler
from arsm.sequences.rewards import check_reward
from tests.tables import Setting, Table, reward
from tests.test_sequences_input import DONE, ROWS, Counted, refused

# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda prompts, tokens: 1.0, TypeError, "must return a tensor"),
        (
            lambda prompts, tokens: tokens[:, 0],
            TypeError,
            r"floating tensor, but returned torch.int64",
        ),
        (
            lambda prompts, tokens: tokens.double(),
            ValueError,
            r"per completion, \[6\], but returned \[6, 3\]",
        ),
        (lambda prompts, tokens: torch.tensor(1.0), ValueError, r"\[6\], but returned \[\]"),
        (
            lambda prompts, tokens: tokens[:, 0] * torch.nan,
            arsm.NotFiniteError,
            "reward returned nan for tokens",
        ),
        (
            lambda prompts, tokens: tokens[:, 0] + torch.inf,
            arsm.NotFiniteError,
            "reward returned inf for tokens",
        ),
    ],
    ids=["number", "integers", "one per token", "one for all", "NaN", "infinite"],
)
def test_rewards(bad: sequences.Reward, error: type[Exception], message: str) -> None:
    refused(message, error, reward=bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            lambda tokens: tokens[:, 0].double(),
            r"as reward\(prompts, tokens\), but takes \(tokens\); TextReward",
        ),
        (lambda completions, **columns: completions, r"but takes \(completions, \*\*columns\)"),
        (
            lambda prompts, completions, **columns: [0.0],
            r"takes \(prompts, completions, \*\*columns\), as TRL .* wrap it: TextReward",
        ),
        (
            lambda completions, answer: [0.0],
            r"wrap it: TextReward\(reward, decode, prompts, texts\)",
        ),
        (lambda prompts, tokens, answers: answers, r"but takes \(prompts, tokens, answers\)"),
        (torch.zeros(ROWS), r"must be a function reward\(prompts, tokens\), but is a Tensor"),
    ],
    ids=[
        "one argument",
        "text",
        "text with prompts",
        "text with a column",
        "three arguments",
        "no function",
    ],
)
def test_rewards_that_cannot_be_called(bad: Any, message: str) -> None:
    assert refused(message, TypeError, reward=bad).calls == 0, "refused before anything is sampled"


def test_a_reward_whose_signature_is_unknown_is_let_through() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(torch.mul)
    check_reward(torch.mul)


def test_a_branch_whose_reward_is_not_finite() -> None:
    seen = []

    def later(prompts: Tensor, tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[0])
        return reward(prompts, tokens) * (torch.nan if len(seen) > 1 else 1)

    refused("reward returned nan", arsm.NotFiniteError, reward=later)


@pytest.mark.parametrize("strategy", [Branch(arsm.ARSM()), Group(3)], ids=repr)
def test_a_reward_may_write_into_its_tokens(strategy: sequences.Strategy) -> None:
    def writing(prompts: Tensor, tokens: Tensor) -> Tensor:
        value = reward(prompts, tokens)
        prompts.zero_()
        tokens.zero_()
        return value

    found = []
    for each in (reward, writing):
        module = Table(ROWS, 3)
        generator = torch.Generator().manual_seed(0)
        out = sequences.estimate(
            strategy,
            sequences.Recompute(module),
            Setting().prompts(ROWS)[0],
            each,
            max_tokens=3,
            eos=1,
            generator=generator,
        )
        found.append((out.tokens, *torch.autograd.grad(out.value.sum(), module.table)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_equal_rewards_give_zeros() -> None:
    module = torch.nn.Embedding(3, 3)
    prompts = torch.tensor([[1, 2]])
    out = sequences.estimate(
        Group(3), sequences.Recompute(module), prompts, lambda p, t: t[:, 0] * 0.0, max_tokens=3
    )
    (gradient,) = torch.autograd.grad(out.value.sum(), [module.weight])
    assert not gradient.any()


def test_a_reward_that_raises_names_the_completion_and_keeps_what_was_sampled() -> None:
    def picky(prompts: Tensor, tokens: Tensor) -> Tensor:
        if bool((prompts[:, 0] == 7).any()):
            raise KeyError("two\nlines")
        return tokens[:, 0].double()

    prompts = Setting().prompts(40)[0]
    with pytest.raises(sequences.RewardFailure) as raised:
        sequences.estimate(Group(2), Setting().model(40), prompts, picky, max_tokens=3)
    failure = raised.value
    assert failure.tokens.shape == (80, 3)
    assert torch.equal(failure.prompts, prompts.repeat_interleave(2, 0))
    first = 14  # of prompt 7
    assert failure.row == first
    sentence = str(failure)
    assert "\n" not in sentence
    assert sentence.startswith(
        f"reward raised KeyError ('two\\nlines') for tokens {failure.tokens[first].tolist()} after "
        f"the prompt "
        f"{failure.prompts[first].tolist()}; "
    )
    assert isinstance(failure.__cause__, KeyError)


def test_a_reward_that_raises_for_branches_alone() -> None:
    seen = []

    def later(prompts: Tensor, tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[0])
        if len(seen) > 1:
            raise OSError
        return tokens[:, 0].double()

    refused(
        r"^reward raised OSError for tokens \[.*\] after", sequences.RewardFailure, reward=later
    )
    assert seen == [ROWS, seen[1], 1]


def test_a_reward_that_raises_for_many_at_once() -> None:
    def few(prompts: Tensor, tokens: Tensor) -> Tensor:
        assert tokens.shape[0] == 1, "too many"
        return tokens[:, 0].double()

    message = (
        r"AssertionError \(too many.*\) for 6 completions together, but for none of them alone"
    )
    refused(message, sequences.RewardFailure, reward=few)


# ---------------------------------------------------------------- memory


class Full(Counted):
    """Out of memory from its second call of a method on."""

    def __init__(self, module: Any, method: str) -> None:
        super().__init__(module)
        self.method, self.left = method, 1

    def _spend(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a lot."
                )

    def step(self, state: Any, tokens: Tensor) -> Any:
        self._spend("step")
        return super().step(state, tokens)

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self._spend("logits")
        return super().logits(prompts, tokens, mask)


def test_out_of_memory_names_the_batch_size_to_lower() -> None:
    error = torch.OutOfMemoryError
    message = r"^Out of memory while sampling \(CUDA out of memory\); lower rows, which is 64\.$"
    refused(message, error, model=Full(Table(ROWS, 3), "step"), rows=64)
    message = r"lower micro_batch, which is 2\.$"
    refused(
        f"while drawing beside .*{message}",
        error,
        model=Full(Table(ROWS, 3), "logits"),
        micro_batch=2,
        completions=DONE,
    )
    # the plain table has no known parameters: its graph is made at once
    refused(
        f"while computing the gradient .*{message}",
        error,
        model=Full(Table(ROWS, 3), "logits"),
        micro_batch=2,
    )


def test_out_of_memory_in_backward() -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 3))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.weight[tokens]

    full = Full(Head(), "logits")
    prompts = Setting().prompts(3)[0]
    out = sequences.estimate(Group(4), full, prompts, reward, max_tokens=3, eos=1, micro_batch=5)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"while computing the gradient .*; lower micro_batch, which is 5\.$",
    ):
        out.value.sum().backward()


def test_out_of_memory_while_branches_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room.")

    monkeypatch.setattr("arsm.sequences.waves.Waves.complete", full)
    model = refused(
        r"while playing branches \(no room\); lower rows, which is 32\.",
        torch.OutOfMemoryError,
        rows=32,
    )
    assert model not in sampler.DECODERS, "larger slots would be used again after rows were lowered"
