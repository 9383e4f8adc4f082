"""Credit that might enter the library, against enumeration; tests/statistics.py has the error
rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Batch, Branch, Branches, Importance, Prefixes, TokenCredit
from arsm.sequences.heads import Headed
from arsm_experiments.sequences.candidates import (
    BranchOrValue,
    OwnTokens,
    SharedPrefixes,
    TokenCritic,
    Value,
)
from tests.experiments.tiny_llama import save_tiny_llama
from tests.statistics import deviations
from tests.tables import SETTINGS, Setting, reward

KINDS = {name: SETTINGS[name] for name in ("ends", "four tokens", "kl")}
KINDS["ragged"] = SETTINGS["ragged, ends, temperature"]
ROWS = 12_000


def half(batch: Batch) -> Tensor:
    """A coin that depends on the state."""
    return torch.where(batch.largest < -0.9, 0.6, 0.4)


def worth(tokens: Tensor) -> Tensor:
    """[N, T + 1]: a value of every state, the last included, from the tokens before it."""
    return 3 * torch.nn.functional.pad(tokens.cumsum(-1), (1, 0)).double().sin()


def before(prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The value of the state."""
    return worth(tokens)[:, :-1]


def after(prompts: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The value of the state that follows the token."""
    return worth(tokens)[:, 1:]


class Guess:
    """A critic, as hidden states and a head."""

    def __init__(self, vocabulary: int, value: Value) -> None:
        self.vocabulary = vocabulary
        self.value = value

    def headed(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Headed:
        state = self.value(prompts, tokens, mask).unsqueeze(-1)
        every = torch.arange(self.vocabulary).double()
        return Headed(state, lambda hidden: hidden + (hidden + every).sin(), self.vocabulary)


def with_critic(setting: Setting, value: Value) -> Branch:
    return Branch(arsm.RLOO(3), critic=Guess(setting.vocabulary, value))  # pyright: ignore[reportArgumentType]


STRATEGIES: dict[str, sequences.Strategy] = {
    "own": OwnTokens(3, 0.5),
    "own, all that the draws allow": OwnTokens(4, 1.0),
    "own, value": OwnTokens(3, 0.5, value=before),
    "shared, group 2": SharedPrefixes(3, 2),
    "shared, group 3": SharedPrefixes(2, 3),
    "value or branch": BranchOrValue(before, half, 3),
}


@pytest.mark.parametrize("setting", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_unbiased(setting: Setting, strategy: sequences.Strategy) -> None:
    assert strategy.unbiased
    assert deviations(setting.estimates(strategy, ROWS), setting.exact()).max() < 1


@pytest.mark.parametrize("setting", KINDS.values(), ids=KINDS)
def test_critics_are_unbiased(setting: Setting) -> None:
    found = setting.estimates(with_critic(setting, before), ROWS)
    assert deviations(found, setting.exact()).max() < 1


@dataclass(frozen=True)
class Changed:
    """A strategy whose credit a test spoils."""

    inner: Any

    unbiased = True
    samples = None

    @property
    def draws(self) -> int:
        return self.inner.draws

    def check(self, logits: Tensor) -> None:
        """Nothing to check."""

    def credit(self, batch: Batch) -> TokenCredit:
        return self.spoil(self.inner.credit(batch), batch)

    def spoil(self, credit: TokenCredit, batch: Batch) -> TokenCredit:
        raise NotImplementedError


class Forgotten(Changed):
    """The true path loses weight, and the branches do not get it."""

    def spoil(self, credit: TokenCredit, batch: Batch) -> TokenCredit:
        return replace(credit, along=None)


class Added(Changed):
    """The branches' own tokens count besides the true path's whole weight."""

    def spoil(self, credit: TokenCredit, batch: Batch) -> TokenCredit:
        left = self.inner._left(batch).unsqueeze(-1)
        return replace(credit, weights=credit.weights / left)


class FirstToo(Changed):
    """The first token of a branch counts among its own tokens too."""

    def spoil(self, credit: TokenCredit, batch: Batch) -> TokenCredit:
        assert credit.along is not None
        assert credit.branches is not None
        step = credit.branches.step.unsqueeze(-1)
        following = credit.along.gather(1, (step + 1).clamp_max(credit.along.shape[1] - 1))
        return replace(credit, along=credit.along.scatter(1, step, following))


class Foreign(SharedPrefixes):
    """Answers with the same token before it are in one state, whatever came earlier."""

    @staticmethod
    def together(tokens: Tensor, mask: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(tokens[..., :1]), tokens[..., :-1]], -1)
        equal = before.unsqueeze(2) == before.unsqueeze(1)
        return equal & mask.unsqueeze(2) & mask.unsqueeze(1)


class Unpooled(SharedPrefixes):
    """A draw is compared with its own value too."""

    def credit(self, batch: Batch) -> TokenCredit:
        credit = super().credit(batch)
        size = self.size * self.group
        return replace(credit, weights=credit.weights * (size - 1) / size)


SPOILED: dict[str, sequences.Strategy] = {
    "forgotten": Forgotten(OwnTokens(3, 0.5)),
    "added": Added(OwnTokens(3, 0.5)),
    "first token too": FirstToo(OwnTokens(4, 1.0)),
    "value after the token": OwnTokens(3, 0.5, value=after),
    "foreign states": Foreign(2, 3),
    "compared with itself": Unpooled(3, 2),
    "value after the token, or branch": BranchOrValue(after, half, 3),
    "critic after the token": with_critic(SETTINGS["ends"], after),
}


@pytest.mark.parametrize("strategy", SPOILED.values(), ids=SPOILED)
def test_mistakes_are_caught(strategy: sequences.Strategy) -> None:
    setting = SETTINGS["ends"]
    found = setting.estimates(strategy, 60_000)
    assert deviations(found, setting.exact()).max() > 1


def told(prefixes: Prefixes) -> Branches:
    """Returns that depend on where a branch begins alone."""
    row, step, action = prefixes.row, prefixes.step, prefixes.action
    returns = (row + 3 * step + 5 * action).double().cos()
    return Branches(row, step, action, prefixes.known[row], returns, returns)


class Both(Changed):
    """The credit of `Branch` from the same draws and returns, which the inner one's must equal."""

    def credit(self, batch: Batch) -> TokenCredit:
        batch = replace(batch, play=told)
        credit, same = self.inner.credit(batch), Branch(arsm.RLOO(3)).credit(batch)
        torch.testing.assert_close(credit.weights, same.weights)
        assert credit.along is None or not credit.along.any()
        return same


@pytest.mark.parametrize("strategy", [OwnTokens(3, 0.0), SharedPrefixes(3, 1)])
def test_nothing_moved_and_nothing_shared_is_branching(
    strategy: OwnTokens | SharedPrefixes,
) -> None:
    credit = credited(Both(strategy)).credit
    assert credit is not None
    assert credit.weights.any()


def credited(strategy: sequences.Strategy) -> sequences.SequenceEstimate:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(40)
    return sequences.estimate(
        strategy,
        setting.model(40),
        prompts,
        reward,
        max_tokens=3,
        eos=1,
        generator=torch.Generator().manual_seed(0),
    )


def test_equal_tokens_of_a_shared_state_are_played_once() -> None:
    out = credited(SharedPrefixes(3, 3))
    assert out.branches is not None
    prefixes = set()
    for row, step, action, whole in zip(
        out.branches.row.tolist(),
        out.branches.step.tolist(),
        out.branches.action.tolist(),
        out.branches.tokens.tolist(),
        strict=True,
    ):
        known = (row // 3, *whole[:step], action)
        assert known not in prefixes
        prefixes.add(known)
    # nor what another answer to the question took
    for row, own in enumerate(out.tokens.flatten(0, 1).tolist()):
        for end in range(1, 4):
            assert (row // 3, *own[:end]) not in prefixes
    assert len(prefixes) > 40


def test_branches_own_tokens_have_credit_after_their_first() -> None:
    out = credited(OwnTokens(3, 0.5))
    assert out.credit is not None
    assert out.credit.along is not None
    assert out.branches is not None
    later = torch.arange(3) > out.branches.step.unsqueeze(-1)
    assert not out.credit.along[~later].any()
    assert out.credit.along[later].any()
    # further epochs read the branches too
    assert out.clipped is not None
    model_gradient = out.clipped(0.2)()
    torch.testing.assert_close(model_gradient.detach(), out.value.detach())


def test_importance_weights_know_the_given_completions_alone() -> None:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(4)
    with pytest.raises(ValueError, match="credit to branches' own tokens too"):
        sequences.estimate(
            OwnTokens(3),
            setting.model(4),
            prompts,
            lambda prompts, tokens: tokens.double().mean(-1),
            max_tokens=3,
            eos=1,
            completions=torch.tensor([[0, 2, 1]]).expand(4, -1),
            log_probs=torch.full((4, 3), -1.0),
            importance=Importance(per="sequence"),
        )


def test_a_critic_learns_which_tokens_are_right(tmp_path: Path) -> None:
    """Answers with token 3 in the second place are right."""
    transformers = pytest.importorskip("transformers")
    folder = save_tiny_llama(tmp_path / "tiny")
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    critic = TokenCritic(policy, rate=3e-3, micro_batch=5)
    tokens = torch.randint(3, 5, (32, 4), generator=torch.Generator().manual_seed(0))
    prompts = torch.tensor([[9, 1, 6]]).expand(32, -1)
    mask = torch.tensor([[False, True, True]]).expand(32, -1)
    right = (tokens[:, 1] == 3).double()
    live = torch.ones_like(tokens, dtype=torch.bool)
    for _ in range(100):
        critic.fit(prompts, tokens, live, right, mask)
    whole = critic.headed(prompts, tokens, mask)
    h = whole.head(whole.hidden.flatten(0, 1)).view(32, 4, whole.vocabulary)
    assert h[:, 1, 3].min() > 0.8
    assert h[:, 1, 4].max() < 0.2
    # before its own token a state knows nothing of it
    other = tokens.clone()
    other[:, 1:] = 7
    again = critic.headed(prompts, other, mask)
    torch.testing.assert_close(again.hidden[:, :2], whole.hidden[:, :2])
    # what is learned from is what `Branch` asks for
    taken = h.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(critic(prompts, tokens, mask), taken)
    unpadded = critic.headed(prompts[:, 1:], tokens)
    torch.testing.assert_close(unpadded.hidden, whole.hidden)
