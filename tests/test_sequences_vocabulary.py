"""Estimators that read all logits of a state, and critics: in parts they have the gradient of
logits [N, T, V], which exist at no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import arsm
from arsm import policy, sequences
from arsm.sequences import Batch, Branch, Prefixes, TokenCredit, heads, vocabulary
from arsm.sequences.heads import Headed
from arsm.sequences.strategies import back_up, value_parts
from arsm.sequences.vocabulary import checked_chance, tossed
from tests.test_sequences_credit import ROWS, Bigram, T, V, estimate, gradients
from tests.test_sequences_memory import peak_bytes


def guess(prompts: Tensor, tokens: Tensor) -> Tensor:
    """A critic of the tokens before each state."""
    before = torch.cat([prompts[:, -1:], tokens[:, :-1]], -1).cumsum(-1)
    return torch.sin(before.unsqueeze(-1) + torch.arange(V).double())


class HeadedGuess:
    """The same critic, as hidden states and a head."""

    def headed(self, prompts: Tensor, tokens: Tensor) -> Headed:
        before = torch.cat([prompts[:, -1:], tokens[:, :-1]], -1).cumsum(-1)
        return Headed(
            before.unsqueeze(-1), lambda hidden: torch.sin(hidden + torch.arange(V).double()), V
        )

    def __call__(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        raise AssertionError("h of all states")


def by_return(batch: Batch, rollouts: policy.Rollouts) -> Tensor:
    own = batch.returns[rollouts.episode, 0]
    return (0.4 + 0.1 * rollouts.action.squeeze(-1) / V + 0.1 * own).clamp(0.1, 1)


@dataclass(frozen=True, eq=False)
class Table:
    """A gradient [M, T, V] that was computed beforehand."""

    gradient: Tensor

    def credited(self) -> Tensor:
        return (self.gradient != 0).any(-1)

    def scaled(self, factor: Tensor) -> Table:
        return Table(self.gradient * factor.unsqueeze(-1))

    def __call__(self, logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        return self.gradient[row, step]


class Whole(Branch):
    """As defined: logits, noise, queries and gradient of all states at once."""

    def _credit_logits(self, batch: Batch, keep: Tensor | None) -> TokenCredit:
        logits = torch.zeros(*batch.tokens.shape, V, dtype=torch.float64)
        for some in batch.parts():
            for states, found in batch.logits_of(some, batch.mask):
                logits[some].view(-1, V)[states] = found / batch.temperature
        every = logits.unsqueeze(-2)
        noise = batch.generator
        plan = policy.plan(
            self.estimator,
            every,
            batch.tokens.unsqueeze(-1),
            batch.mask,
            self.budget,
            keep,
            noise,
        )
        action = plan.action.squeeze(-1)
        log_p = logits.log_softmax(-1)[plan.episode, plan.step, action]
        h = torch.zeros_like(logits)
        if self.critic is not None:
            h = guess(batch.prompts, batch.tokens)
        own = h[plan.episode, plan.step, action]
        played = torch.ones_like(own, dtype=torch.bool)
        chance = torch.ones_like(own)
        if self.chance is not None:
            chance = self.chance(batch, replace(plan, log_prob=log_p))
            played = tossed(checked_chance(chance, action.shape), noise)
        where = (plan.episode[played], plan.step[played], action[played])
        branches = batch.play(Prefixes(*where, batch.tokens))
        learned = (branches.returns - own[played]) / chance[played]
        tried = own.index_put((played,), learned, accumulate=True)
        returns = batch.returns
        if self.budget is None:
            returns = back_up(*value_parts(self.estimator, plan, batch.returns, tried), batch)
        returns = returns - h.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
        gradient = policy.gradient(self.estimator, every, plan, returns, tried - own).squeeze(-2)
        p = logits.softmax(-1)
        gradient += (p * (h - (p * h).sum(-1, keepdim=True))) * batch.mask.unsqueeze(-1)
        gradient /= batch.temperature
        nothing = batch.returns.new_zeros(*batch.tokens.shape, 0)
        return TokenCredit(
            batch.draws[..., :0], nothing, gradient=Table(gradient), branches=branches
        )


def split(states: int, estimator: arsm.Estimator, played: Tensor, logits: Tensor) -> Any:
    """So many states at a time."""
    return played.split(states)


STRATEGIES: dict[str, dict[str, Any]] = {
    "ARSM": {"estimator": arsm.ARSM()},
    "references": {"estimator": arsm.ARSM(references=2), "keep": 0.6},
    "ARS": {"estimator": arsm.ARS()},
    "local expectation": {"estimator": arsm.LocalExpectation()},
    "ridge": {"estimator": arsm.RLOO(4, ridge=1.0)},
    "unordered set": {"estimator": arsm.UnorderedSet(3)},
    "exact plus sampled": {"estimator": arsm.ExactPlusSampled(1, 2), "budget": 20},
    "average": {"estimator": arsm.Average(arsm.ARSM(), 2)},
    "chance": {"estimator": arsm.LocalExpectation(), "chance": sequences.by_likelihood(0.2)},
    "chance, keep": {"estimator": arsm.ARSM(), "chance": by_return, "keep": 0.7},
    "critic": {"estimator": arsm.RLOO(3), "critic": guess},
    "critic, headed": {"estimator": arsm.ARSM(), "critic": HeadedGuess()},
    "critic, keep": {"estimator": arsm.RLOO(3), "critic": guess, "keep": 0.7},
    "critic, budget": {"estimator": arsm.RLOO(3), "critic": guess, "budget": 9},
    "critic, chance": {"estimator": arsm.ARSM(), "critic": guess, "chance": by_return},
}


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_the_gradient_is_that_of_all_logits(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Bigram()
    model = sequences.Recompute(module)
    for states in (1000, 7):
        # the same noise: what is drawn together, is drawn together there too
        monkeypatch.setattr(vocabulary, "CELLS", states * V)
        monkeypatch.setattr(policy, "_split", partial(split, states))
        whole = estimate(Whole(**options), model, micro_batch=1000)
        expected = gradients(whole.value, module)
        assert all(float(x.abs().max()) > 1e-3 for x in expected)
        for micro_batch, cells in ((1000, 1 << 20), (3, 4 * V)):
            monkeypatch.setattr(heads, "CELLS", cells)
            out = estimate(Branch(**options), model, micro_batch=micro_batch)
            assert torch.equal(out.tokens, whole.tokens)
            assert out.branches is not None
            assert whole.branches is not None
            assert torch.equal(out.branches.tokens, whole.branches.tokens)
            found = gradients(out.value, module)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_given_completions_are_asked_about_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Bigram()
    model = sequences.Recompute(module)
    given = estimate(Branch(arsm.Reinforce()), model).tokens
    found = []
    for strategy in (Whole(arsm.ARSM()), Branch(arsm.ARSM())):
        out = estimate(strategy, model, completions=given, micro_batch=3)
        assert torch.equal(out.tokens, given)
        assert int(out.info["rollouts"]) > 0
        found.append(gradients(out.value, module))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_importance_weights_multiply_the_gradient() -> None:
    module = Bigram()
    model = sequences.Recompute(module)
    given = estimate(Branch(arsm.Reinforce()), model)
    log_q = torch.full(given.tokens.shape, -1.5, dtype=torch.float64)
    options: dict[str, Any] = {
        "completions": given.tokens,
        "log_probs": log_q,
        "importance": sequences.Importance(per="sequence"),
    }
    found = [
        gradients(estimate(strategy, model, **options).value, module)
        for strategy in (Whole(arsm.ARSM()), Branch(arsm.ARSM()))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_without_a_generator_the_backward_pass_has_the_same_noise() -> None:
    module = Bigram()
    prompts = torch.arange(ROWS).unsqueeze(-1) % V
    out = sequences.estimate(
        Branch(arsm.ARSM()),
        sequences.Recompute(module),
        prompts,
        lambda prompts, tokens: tokens.double().sum(-1),
        max_tokens=T,
    )
    first = torch.autograd.grad(out.value.sum(), list(module.parameters()), retain_graph=True)
    torch.rand(100)
    again = torch.autograd.grad(out.value.sum(), list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


class Learned(nn.Module):
    """A critic with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(V, dtype=torch.float64))

    def forward(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        return self.table.expand(*tokens.shape, V)


def test_a_critic_that_learns_too_early_is_refused() -> None:
    module, critic = Bigram(), Learned()
    out = estimate(Branch(arsm.RLOO(3), critic=critic), sequences.Recompute(module))
    gradients(out.value, module)
    out = estimate(Branch(arsm.RLOO(3), critic=critic), sequences.Recompute(module))
    with torch.no_grad():
        critic.table.add_(1)
    with pytest.raises(RuntimeError, match=r"The critic was changed .* before the critic learns\."):
        out.value.sum().backward()


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        (lambda prompts, tokens: guess(prompts, tokens)[:, :-1], r"but returned \[\d+, 4, 7\]\."),
        (lambda prompts, tokens: guess(prompts, tokens) / 0, "with NaN or infinities"),
    ],
    ids=["shape", "infinite"],
)
def test_critics_that_cannot_be_used(critic: Any, message: str) -> None:
    strategy = Branch(arsm.ARSM(), critic=critic, chance=by_return)
    with pytest.raises(ValueError, match=f"critic must return finite values .*{message}"):
        estimate(strategy, sequences.Recompute(Bigram()))


# ---------------------------------------------------------------- memory

transformers = pytest.importorskip(
    "transformers", reason="transformers is in the extra `transformers`"
)
N, LARGE = 2, 4000


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor):
                # an expanded tensor occupies what it was expanded from
                stored = each.untyped_storage().nbytes() // each.element_size()
                self.cells = max(self.cells, stored)
        return out


class SmallCritic:
    """h = hidden states times a fixed matrix."""

    weight = torch.linspace(-1, 1, 2 * LARGE).view(2, LARGE)

    def headed(self, prompts: Tensor, tokens: Tensor) -> Headed:
        hidden = torch.stack([tokens, tokens.cumsum(-1)], -1).float().sin()
        return Headed(hidden, lambda hidden: hidden @ self.weight, LARGE)

    def __call__(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        raise AssertionError("h of all states")


def hardly(batch: Batch, rollouts: policy.Rollouts) -> Tensor:
    """So small a chance that nothing is played: rollouts need memory of their own."""
    return torch.full(rollouts.step.shape, 1e-9)


FEW: dict[str, Branch] = {
    "ARSM": Branch(arsm.ARSM(), chance=hardly),
    "local expectation": Branch(arsm.LocalExpectation(), chance=hardly),
    "critic": Branch(arsm.RLOO(3), critic=SmallCritic(), chance=hardly),
}


def used(strategy: Branch, width: int) -> tuple[int, int]:
    """The most bytes at a time, and the largest tensor, of an estimate and its gradient; all rows
    are one micro-batch.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=LARGE,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    module = transformers.LlamaForCausalLM(config).eval()
    nn.init.normal_(module.model.embed_tokens.weight, std=1.0)  # some tokens are likely
    model = sequences.Transformers(module)

    def call() -> None:
        out = sequences.estimate(
            strategy,
            model,
            torch.zeros(N, 2, dtype=torch.int64),
            lambda prompts, tokens: tokens.double().mean(-1),
            max_tokens=width,
            rows=N,
            micro_batch=N,
            generator=torch.Generator().manual_seed(1),
        )
        out.value.sum().backward()

    largest = Largest()
    with largest:
        call()  # buffers of the slots are kept
    return peak_bytes(call), largest.cells


@pytest.mark.parametrize("strategy", FEW.values(), ids=FEW)
def test_memory_does_not_grow_with_tokens_times_vocabulary(
    strategy: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CELLS", N * LARGE)
    monkeypatch.setattr(vocabulary, "CELLS", N * LARGE)
    short, long = 6, 24
    few, _ = used(strategy, short)
    many, largest = used(strategy, long)
    assert largest < N * long * LARGE / 3
    assert many - few < 0.25 * N * (long - short) * LARGE * 4


def test_blocks_of_all_states_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement can fail."""
    monkeypatch.setattr(vocabulary, "CELLS", 1 << 30)
    most, largest = used(FEW["critic"], 24)
    assert largest >= N * 24 * LARGE
    assert most > 2 * N * 24 * LARGE * 4
