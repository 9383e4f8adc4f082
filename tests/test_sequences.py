"""Sequences against enumeration of all completions; tests/statistics.py states the false-alarm
rate.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm import policy, sequences
from arsm.sequences import Branch, Group
from arsm.sequences.strategies import backed_up
from tests.statistics import deviations
from tests.tables import SETTINGS, Setting, Table, reward


def critic(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Some guess that depends on the state alone: the tokens before it."""
    before = torch.cat([prompts[:, 1:2], tokens[:, :-1]], -1).cumsum(-1)
    return torch.sin(before.unsqueeze(-1) + torch.arange(VOCABULARY[0]).double())


VOCABULARY = [3]


def by_result(batch: sequences.Batch, rollouts: policy.Rollouts) -> Tensor:
    """Some chance that depends on the true sequence, its return and the rollout's first token."""
    own = batch.returns[rollouts.episode, 0]
    return (0.3 + 0.2 * rollouts.action.squeeze(-1) / VOCABULARY[0] + 0.1 * (own - 3)).clamp(0.1, 1)


def by_state(batch: sequences.Batch) -> Tensor:
    """Some coin that depends on the state: its likeliest token and its position."""
    later = torch.arange(batch.tokens.shape[1]) / batch.tokens.shape[1]
    return (1 - batch.largest.exp()) * (1 - 0.5 * later)


def no_state(batch: sequences.Batch) -> Tensor:
    """A coin that never says yes."""
    return torch.zeros(batch.tokens.shape)


def by_draws(batch: sequences.Batch) -> Tensor:
    """A coin that looks at the draws: biased."""
    return (batch.draws[..., 0] == batch.draws[..., 1]).double()


class Undivided(Branch):
    """A rollout that is left out counts as 0, and those that are played count once: biased."""

    def _play(
        self, batch: sequences.Batch, plan: policy.Rollouts
    ) -> tuple[Tensor, sequences.Branches]:
        tried, branches = super()._play(batch, plan)
        assert self.chance is not None
        return tried * self.chance(batch, plan), branches


STRATEGIES = {
    "RLOO": Branch(arsm.RLOO(3)),
    "ARSM": Branch(arsm.ARSM()),
    "ARSM references": Branch(arsm.ARSM(references=1)),
    "local expectation": Branch(arsm.LocalExpectation()),
    "exact plus sampled": Branch(arsm.ExactPlusSampled(1, 1)),
    "REINFORCE": Branch(arsm.Reinforce()),
    "keep": Branch(arsm.RLOO(3), keep=0.6),
    "critic": Branch(arsm.RLOO(3), keep=0.7, critic=critic),
    "chance": Branch(arsm.RLOO(3), chance=sequences.by_likelihood(0.3)),
    "chance by result": Branch(arsm.RLOO(3), keep=0.8, chance=by_result),
    "chance, exact": Branch(arsm.LocalExpectation(), chance=sequences.by_likelihood(0.2)),
    "chance, critic": Branch(arsm.ExactPlusSampled(1, 1), chance=by_result, critic=critic),
    "group": Branch(arsm.RLOO(3), group=2),
    "coin": Branch(arsm.RLOO(3), group=2, coin=0.4),
    "coin by state": Branch(arsm.RLOO(2), group=3, coin=by_state),
    "coin, chance": Branch(arsm.RLOO(3), group=2, coin=0.5, chance=by_result),
    "leave-one-out": Group(3),
    "optimal token baseline": Group(arsm.OTB(3)),
}
BIASED = {"GRPO": Group(arsm.GRPO(3)), "Dr. GRPO": Group(arsm.DrGRPO(3))}
ROWS = 6000


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_unbiased(setting: Setting, strategy: sequences.Strategy) -> None:
    assert strategy.unbiased
    VOCABULARY[0] = setting.vocabulary
    assert deviations(setting.estimates(strategy, ROWS), setting.exact()).max() < 1


@pytest.mark.parametrize("strategy", BIASED.values(), ids=BIASED.keys())
def test_bias_is_caught(strategy: sequences.Strategy) -> None:
    assert not strategy.unbiased
    setting = SETTINGS["ends"]
    assert deviations(setting.estimates(strategy, 4 * ROWS), setting.exact()).max() > 1


def test_rollouts_that_are_not_divided_by_their_chance_are_caught() -> None:
    setting = SETTINGS["ends"]
    strategy = Undivided(arsm.RLOO(3), chance=by_result)
    assert deviations(setting.estimates(strategy, ROWS), setting.exact()).max() > 1


def test_a_coin_that_looks_at_the_draws_is_caught() -> None:
    setting = SETTINGS["ends"]
    strategy = Branch(arsm.RLOO(2), group=2, coin=by_draws)
    assert deviations(setting.estimates(strategy, ROWS), setting.exact()).max() > 1


def test_a_coin_that_chooses_nothing_leaves_the_group() -> None:
    """Leave-one-out of whole sequences."""
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(30)
    strategy = Branch(arsm.RLOO(3), group=4, coin=no_state)
    out = sequences.estimate(strategy, setting.model(30), prompts, reward, max_tokens=3, eos=1)
    others = (out.rewards.sum(-1, keepdim=True) - out.rewards) / 3
    expected = ((out.rewards - others) / 4).unsqueeze(-1) * out.mask
    assert out.credit is not None
    torch.testing.assert_close(out.credit.weights[..., 0], expected.flatten(0, 1))
    assert not out.credit.weights[..., 1:].any()


def test_a_certain_coin_is_no_coin() -> None:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(30)
    found = []
    for coin in (None, 1.0):
        strategy = Branch(arsm.RLOO(3), group=2, coin=coin)
        # the coins are tossed after the draws: the sequences are the same
        out = sequences.estimate(
            strategy,
            setting.model(30),
            prompts,
            reward,
            max_tokens=3,
            eos=1,
            generator=torch.Generator().manual_seed(0),
        )
        found.append(out)
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert found[0].info["rollouts"] == found[1].info["rollouts"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coin": 0.5}, "give group=8"),
        ({"coin": 0.5, "group": 2, "keep": 0.5}, "leave budget and keep out"),
        ({"coin": 0.0, "group": 2}, "coin must lie in"),
        ({"group": 1}, "at least 2"),
        ({"group": 2, "critic": critic}, "no critic"),
    ],
)
def test_a_coin_that_cannot_be_used_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Branch(arsm.RLOO(3), **options)


def test_a_certain_chance_plays_every_rollout() -> None:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(30)
    counts = [
        int(
            sequences.estimate(
                strategy, setting.model(30), prompts, reward, max_tokens=3, eos=1
            ).info["rollouts"]
        )
        for strategy in (
            Branch(arsm.LocalExpectation(), chance=sequences.by_likelihood(x)) for x in (1.0, 0.01)
        )
    ]
    assert counts[1] < counts[0]


def test_likely_prefixes_are_played_more_often() -> None:
    """The product over the true tokens before the state, and the rollout's own token; 0 is not
    allowed.
    """
    p = torch.tensor([[[0.5, 0.4, 0.1], [0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]]).double()
    tokens = torch.tensor([[1, 0, 0]])
    prompts, none = torch.zeros(1, 2), torch.zeros(0, dtype=torch.int64)
    ones = torch.ones(1, 3)
    log_p = p.log()
    batch = sequences.Batch(
        prompts,
        None,
        tokens,
        ones.bool(),
        draws=tokens.unsqueeze(-1),
        log_probs=log_p.gather(-1, tokens.unsqueeze(-1)),
        largest=log_p.amax(-1),
        temperature=1.0,
        returns=ones,
        generator=None,
        play=None,  # pyright: ignore[reportArgumentType]
        logits_of=None,  # pyright: ignore[reportArgumentType]
        micro_batch=1,
    )
    step, action = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 2, 1, 2, 1])
    rollouts = policy.Rollouts(
        torch.zeros_like(step),
        step,
        action.unsqueeze(-1),
        step,
        ones,
        none,
        none,
        none,
        (),
        log_prob=log_p[0, step, action],
    )
    expected = torch.tensor([1, 0.2, 0.8 / 9, 0.01, 0.8 * 0.6], dtype=torch.float64)
    torch.testing.assert_close(sequences.by_likelihood(0.01)(batch, rollouts), expected)


def test_later_rollouts_lower_the_variance() -> None:
    """A budget that all rollouts fit into differs in nothing but Q_t, which is then the true
    return.
    """
    setting = SETTINGS["four tokens"]
    backed, true = (
        setting.estimates(strategy, ROWS).var(0).sum()
        for strategy in (Branch(arsm.RLOO(6)), Branch(arsm.RLOO(6), budget=1 << 40))
    )
    assert backed < 0.9 * true


def test_backed_up_returns_are_those_of_the_definition() -> None:
    """Q_t by hand from the rollouts that were played, with costs per token."""
    setting = SETTINGS["kl"]
    prompts, _ = setting.prompts(7)
    seen: dict[str, Any] = {}

    class Watched(Branch):
        def _play(
            self, batch: sequences.Batch, plan: policy.Rollouts
        ) -> tuple[Tensor, sequences.Branches]:
            tried, branches = super()._play(batch, plan)
            seen.update(batch=batch, plan=plan, branches=branches)
            return tried, branches

    estimator = arsm.RLOO(4)
    sequences.estimate(
        Watched(estimator, keep=0.7),
        setting.model(7),
        prompts,
        reward,
        max_tokens=3,
        eos=2,
        temperature=0.8,
        reference=setting.reference(7),
        kl=0.4,
        generator=torch.Generator().manual_seed(1),
    )
    batch, plan, branches = seen["batch"], seen["plan"], seen["branches"]
    found = backed_up(estimator, plan, batch, branches.returns)
    (queries,) = (part.pose().queries for part in plan.parts)
    draws = {
        tuple(divmod(place, 3)): queries.points[:, i, 0].tolist()
        for i, place in enumerate(plan.played.tolist())
    }
    for i, length in enumerate(batch.mask.sum(-1).tolist()):
        value = None
        for t in reversed(range(length)):
            q = batch.returns[i, t]
            if value is not None:
                q = batch.returns[i, t] - batch.returns[i, t + 1] + value
            torch.testing.assert_close(found[i, t], q)
            here = (branches.row == i) & (branches.step == t)
            of = dict(zip(branches.action[here].tolist(), branches.returns[here], strict=True))
            of[int(batch.tokens[i, t])] = q
            drawn = draws[i, t] if plan.weight[i, t] > 0 else [int(batch.tokens[i, t])]
            value = torch.stack([of[token] for token in drawn]).mean()
    assert not torch.equal(found, batch.returns)


def test_returns_are_the_reward_less_all_later_costs() -> None:
    """R - kl sum_{s >= t} (ln p - ln p_reference), token by token."""
    setting = SETTINGS["kl"]
    prompts, _ = setting.prompts(7)
    model, reference = setting.model(7), setting.reference(7)
    seen: list[sequences.Batch] = []

    class Watched(Group):
        def credit(self, batch: sequences.Batch) -> sequences.TokenCredit:
            seen.append(batch)
            return super().credit(batch)

    out = sequences.estimate(
        Watched(2),
        model,
        prompts,
        reward,
        max_tokens=3,
        eos=2,
        temperature=0.8,
        reference=reference,
        kl=0.4,
        generator=torch.Generator().manual_seed(1),
    )
    (batch,) = seen
    log_p, of_reference = (
        (each.logits(batch.prompts, batch.tokens) / 0.8)
        .log_softmax(-1)
        .gather(-1, batch.tokens.unsqueeze(-1))
        .squeeze(-1)
        for each in (model, reference)
    )
    cost = 0.4 * (log_p - of_reference).masked_fill(~batch.mask, 0)
    for t in range(3):
        expected = out.rewards.flatten() - cost[:, t:].sum(-1)
        torch.testing.assert_close(batch.returns[:, t], expected)


@pytest.mark.parametrize("capped", [False, True])
def test_a_budget_of_the_whole_call_is_unbiased(capped: bool) -> None:
    setting = SETTINGS["ends"]
    # a kept state counts up to five times: its tails are heavy
    rows, calls = (
        (8 if capped else 80),
        150,
    )
    estimates = []
    for seed in range(calls):
        strategy = (
            Branch(arsm.RLOO(3), budget=6)
            if capped
            else Branch(arsm.RLOO(3), keep=torch.tensor([0.9, 0.5, 0.2]))
        )
        estimates.append(setting.estimates(strategy, rows, seed).mean(0))
    assert deviations(torch.stack(estimates), setting.exact()).max() < 1


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(3)), Branch(arsm.ARSM()), Group(2)], ids=str)
def test_given_completions_are_the_true_sequences(strategy: sequences.Strategy) -> None:
    setting = SETTINGS["ragged, ends, temperature"]
    model, (prompts, mask) = setting.model(ROWS), setting.prompts(ROWS)
    assert mask is not None
    row = torch.arange(ROWS).repeat_interleave(strategy.samples or 1)
    how = sequences.Decoding(setting.max_tokens, setting.eos, setting.temperature, 1 << 20)
    prefixes = sequences.Prefixes.bare(row, setting.max_tokens)
    done = sequences.complete(
        model, *sequences.pad_before(prompts, mask), prefixes, how, torch.Generator().manual_seed(8)
    )
    shape = (
        (ROWS, setting.max_tokens)
        if strategy.samples is None
        else (ROWS, strategy.samples, setting.max_tokens)
    )
    estimates = setting.estimates(
        strategy, ROWS, completions=done.tokens.view(shape), log_probs=done.log_probs.view(shape)
    )
    assert deviations(estimates, setting.exact()).max() < 1


class Counted(sequences.Recompute):
    """A model that remembers the most rows that it was ever called with."""

    most = 0

    def _state(self, tokens: Tensor, length: Tensor) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.most = max(self.most, tokens.shape[0])
        return super()._state(tokens, length)


@pytest.mark.parametrize("max_rows", [2, 3, 7, 64, 4096])
def test_rows_are_bounded_and_every_prefix_is_completed(max_rows: int) -> None:
    """ln p of every token, recorded on the way, is that of the finished sequence: no row was taken
    for another.
    """
    setting = Setting(vocabulary=4, max_tokens=9, eos=0, ragged=True)
    generator = torch.Generator().manual_seed(3)
    count = 40
    model = Counted(Table(count, 4))
    prompts, mask = sequences.pad_before(*setting.prompts(count))  # pyright: ignore[reportArgumentType]
    how = sequences.Decoding(setting.max_tokens, setting.eos, 1.0, max_rows)
    row = torch.arange(count)
    true = sequences.complete(
        model, prompts, mask, sequences.Prefixes.bare(row, setting.max_tokens), how, generator
    )
    row, step = sequences.live_tokens(true.tokens, 0).nonzero().unbind(-1)
    action = torch.where(torch.arange(len(row)) % 3 == 0, -1, (true.tokens[row, step] + 1) % 4)
    prefixes = sequences.Prefixes(row, step, action, true.tokens)
    done = sequences.complete(model, prompts, mask, prefixes, how, generator)
    assert model.most <= max_rows
    place = torch.arange(setting.max_tokens)
    before, at = (
        place < step.unsqueeze(-1),
        (place == step.unsqueeze(-1)) & (action >= 0).unsqueeze(-1),
    )
    assert torch.equal(done.tokens[before], true.tokens[row][before])
    assert torch.equal(done.tokens[at], action[action >= 0])
    live = sequences.live_tokens(done.tokens, 0)
    assert (done.tokens[~live] == 0).all()
    log_p = model.logits(prompts[row], done.tokens, mask[row]).log_softmax(-1)
    log_p = log_p.gather(-1, done.tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(done.log_probs, torch.where(live & ~before, log_p.detach(), 0))
    drawn = done.tokens[action < 0, step[action < 0]]
    assert drawn.bincount(minlength=4).min() > 0


def test_generated_counts_sampled_tokens_alone() -> None:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(40)
    for strategy in (Branch(arsm.RLOO(4)), Group(3)):
        out = sequences.estimate(strategy, setting.model(40), prompts, reward, max_tokens=3, eos=1)
        total = int(out.mask.sum())
        if out.branches is not None:
            after = torch.arange(3) >= out.branches.step.unsqueeze(-1)
            total += int((after & sequences.live_tokens(out.branches.tokens, 1)).sum())
            assert (out.branches.action != out.tokens[out.branches.row, out.branches.step]).all()
        assert int(out.info["generated"]) == total
        given = sequences.estimate(
            strategy,
            setting.model(40),
            prompts,
            reward,
            max_tokens=3,
            eos=1,
            completions=out.tokens,
        )
        assert (
            int(given.info["generated"]) == total - int(out.mask.sum()) or out.branches is not None
        )


def test_shapes_and_values() -> None:
    setting = SETTINGS["ends"]
    prompts, _ = setting.prompts(5)
    out = sequences.estimate(Group(4), setting.model(5), prompts, reward, max_tokens=3, eos=1)
    assert out.tokens.shape == out.mask.shape == (5, 4, 3)
    assert out.rewards.shape == (5, 4)
    torch.testing.assert_close(out.value.detach(), out.rewards.mean(1))
    out = sequences.estimate(
        Branch(arsm.RLOO(4)), setting.model(5), prompts, reward, max_tokens=3, eos=1
    )
    assert out.tokens.shape == out.mask.shape == (5, 3)
    torch.testing.assert_close(out.value.detach(), out.rewards)
    torch.testing.assert_close(out.rewards, reward(prompts, out.tokens))
    assert float(out.info["mismatch"]) < 1e-12


class Recorded(sequences.Recompute):
    """A model that remembers the rows of every pass."""

    rows: list[int]

    def logits(self, prompts: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.rows = [*getattr(self, "rows", []), tokens.shape[0]]
        return super().logits(prompts, tokens, mask)


@pytest.mark.parametrize("strategy", [sequences.Branch(arsm.ARSM()), sequences.Group(2)], ids=repr)
def test_values_of_a_coarse_model_are_not_rounded(strategy: sequences.Strategy) -> None:
    module, prompts = Table(4, 3), Setting().prompts(4)[0]
    model = sequences.Recompute(lambda tokens: module(tokens).bfloat16())
    out = sequences.estimate(strategy, model, prompts, reward, max_tokens=3)
    assert out.value.dtype == torch.float32
    assert torch.allclose(out.value.double(), out.rewards.view(4, -1).mean(-1))
    out.value.sum().backward()
    assert module.table.grad is not None
    assert float(module.table.grad.abs().max()) > 0


def test_certain_tokens_cost_nothing() -> None:
    table = Table(6, 3)
    table.table = (
        torch.full_like(table.table, -torch.inf)
        .index_fill(-1, torch.tensor(2), 0.0)
        .requires_grad_()
    )
    prompts, _ = Setting().prompts(6)
    model, reference = sequences.Recompute(table), Recorded(table)
    out = sequences.estimate(
        Branch(arsm.RLOO(8)), model, prompts, reward, max_tokens=3, reference=reference, kl=0.1
    )
    assert reference.rows == [6], "no call for no rollouts"
    assert int(out.info["rollouts"]) == 0
    assert int(out.info["generated"]) == 18
    out.value.sum().backward()
    assert table.table.grad is not None
    assert (table.table.grad == 0).all()


@pytest.mark.parametrize("strategy", [Group(2), Branch(arsm.RLOO(3))], ids=str)
def test_more_sequences_than_rows_have_the_same_gradient(strategy: sequences.Strategy) -> None:
    setting = SETTINGS["ragged, ends, temperature"]
    prompts, mask = setting.prompts(9)
    grads = []
    tokens = sequences.estimate(
        strategy, setting.model(9), prompts, reward, max_tokens=3, eos=0, mask=mask
    ).tokens
    for max_rows in (4, 1024):
        table = Table(9, 3)
        out = sequences.estimate(
            strategy if strategy.samples else Branch(arsm.Reinforce()),
            sequences.Recompute(table),
            prompts,
            reward,
            max_tokens=3,
            eos=0,
            mask=mask,
            rows=max_rows,
            micro_batch=max_rows,
            completions=tokens,
        )
        grads.append(torch.autograd.grad(out.value.sum(), table.table)[0])
    torch.testing.assert_close(grads[0], grads[1])
    assert (grads[0] != 0).any()


def test_several_ends_of_given_completions() -> None:
    setting = Setting(vocabulary=4, eos=(2, 0))
    prompts, _ = setting.prompts(3)
    given = torch.tensor([[0, 1, 1], [3, 2, 3], [1, 3, 0]])

    def seen(prompts: Tensor, tokens: Tensor) -> Tensor:
        assert tokens.tolist() == [[0, 2, 2], [3, 2, 2], [1, 3, 0]]
        return reward(prompts, tokens)

    out = sequences.estimate(
        Branch(arsm.RLOO(3), keep=1e-9),
        setting.model(3),
        prompts,
        seen,
        max_tokens=3,
        eos=(2, 0),
        completions=given,
    )
    assert out.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
